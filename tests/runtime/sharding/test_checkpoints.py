"""What a sharded run keeps comes back to the bit on any number of processes, on any mesh and on one process alone."""

from __future__ import annotations

import copy
import importlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from accel import Accelerator
from accel.accelerator import Accelerator as Façade
from accel.checkpoint.chunks import Chunks
from accel.checkpoint.manifest import find_changed_file, find_damage
from accel.errors import ArgumentError, CheckpointError
from accel.plugins import ProjectConfiguration
from accel.plugins.fsdp import FullyShardedDataParallelPlugin
from accel.plugins.parallelism import ParallelismConfig
from accel.tensor_files import SafetensorsFile
from tests.runtime.small import renew_manifest
from tests.runtime.worlds import outcomes, run, run_one

from .training import batch, decoder, loss_of, train

Kept = dict[str, Any]


def _accelerator(mesh: str, layout: str = "SHARDED_STATE_DICT", **how: Any) -> Façade:
    plugin = None if mesh == "ddp" else FullyShardedDataParallelPlugin(state_dict_type=layout)
    config = ParallelismConfig(dp_replicate_size=2) if mesh == "hybrid" else None
    return Accelerator(fsdp_plugin=plugin, parallelism_config=config, **how)


def _made(accelerator: Façade, seed: int) -> tuple[Any, Any, Any]:
    """A model with tied weights, an optimizer of two groups, and its schedule."""
    model = decoder(seed)
    blocks = list(model.blocks.parameters())
    others = [p for p in model.parameters() if not any(p is block for block in blocks)]
    optimizer = torch.optim.AdamW([{"params": blocks, "lr": 0.02}, {"params": others, "lr": 0.01}])
    prepared: tuple[Any, Any, Any] = accelerator.prepare(
        model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    )
    return prepared


def _whole(accelerator: Façade, model: Any, optimizer: Any) -> Kept:
    state = {"model": accelerator.get_state_dict(model), "optimizer": accelerator.strategy.optimizer_state(optimizer)}
    return copy.deepcopy(state)


def _save(folder: str, mesh: str, layout: str, beside: bool = False) -> tuple[Kept, list[float]]:
    accelerator = _accelerator(mesh, layout)
    model, optimizer, schedule = _made(accelerator, accelerator.process_index)
    train(accelerator, model, optimizer, steps=3, clip=0.5)
    schedule.step()
    kept = _whole(accelerator, model, optimizer)
    accelerator.save_state(folder, async_save=beside)
    losses, _ = train(accelerator, model, optimizer, steps=3, first=3)
    accelerator.end_training()
    return kept, losses


def _cut(tensor: Any) -> Any:
    return getattr(tensor, "placements", None), getattr(tensor, "device_mesh", None)


def _load(folder: str, mesh: str, stepped: bool = False) -> tuple[Kept, list[float]]:
    accelerator = _accelerator(mesh)
    model, optimizer, _ = _made(accelerator, 7)
    if stepped:  # the optimizer has state already, which is replaced
        train(accelerator, model, optimizer, steps=1)
    accelerator.load_state(folder)
    for parameter, state in optimizer.state.items():  # a resumed run must not be slower than it was
        for value in (state["exp_avg"], state["exp_avg_sq"]):
            assert (value.dtype, value.device, _cut(value)) == (parameter.dtype, parameter.device, _cut(parameter))
    kept = _whole(accelerator, model, optimizer)
    return kept, train(accelerator, model, optimizer, steps=3, first=3)[0]


def _load_each(folders: list[str], mesh: str, stepped: bool) -> list[tuple[Kept, list[float]]]:
    return [_load(folder, mesh, stepped) for folder in folders]


def _same(one: Any, other: Any, path: str = "") -> None:
    if isinstance(one, dict):
        assert one.keys() == other.keys(), path
        for key in one:
            _same(one[key], other[key], f"{path}.{key}")
    elif isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype, path
        assert torch.equal(one, other), path
    else:
        assert one == other, path


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Kept, list[float]]]:
    """Checkpoints by four processes, sharded and within two replicas, in both layouts."""
    made = {}
    for mesh in ("sharded", "hybrid"):
        for layout in ("SHARDED_STATE_DICT", "FULL_STATE_DICT"):
            folder = tmp_path_factory.mktemp("checkpoints") / "of 4"
            kept, losses = run(_save, str(folder), mesh, layout, processes=4)[0]
            made[f"{mesh} {layout}"] = folder, kept, losses
    return made


WORLDS = [("ddp", 1), ("ddp", 2), ("sharded", 1), ("sharded", 2), ("sharded", 3), ("sharded", 4), ("hybrid", 4)]


@pytest.mark.parametrize(("mesh", "processes"), WORLDS)
def test_it_loads_on_every_world(mesh: str, processes: int, folders: dict[str, Any]) -> None:
    places = [str(folder) for folder, _, _ in folders.values()]
    loaded = run(_load_each, places, mesh, processes == 4, processes=processes)[0]
    for (found, after), (_, kept, losses) in zip(loaded, folders.values(), strict=True):
        _same(found["model"], kept["model"])
        _same(found["optimizer"]["state"], kept["optimizer"]["state"])
        assert after == pytest.approx(losses, abs=1e-9)


def test_whole_files_are_those_of_an_unsharded_run(folders: dict[str, Any], tmp_path: Path) -> None:
    run(_save, str(tmp_path / "ddp"), "ddp", "")
    names = {path.name for path in (tmp_path / "ddp").iterdir() if "random_states" not in path.name}
    folder, _, _ = folders["sharded FULL_STATE_DICT"]
    assert {path.name for path in folder.iterdir() if "random_states" not in path.name} == names
    kept = run_one(_load, str(tmp_path / "ddp"), "ddp")[0]
    _same(run(_load, str(tmp_path / "ddp"), "sharded", processes=3)[0][0]["model"], kept["model"])


def test_each_process_writes_what_it_has_and_replicas_nothing(folders: dict[str, Any]) -> None:
    def sizes(mesh: str) -> list[int]:
        folder = folders[f"{mesh} SHARDED_STATE_DICT"][0]
        return [path.stat().st_size for path in sorted((folder / "chunks" / "node_0").iterdir())]

    total = sum(t.numel() * t.element_size() for t in folders["sharded SHARDED_STATE_DICT"][1]["model"].values())
    assert len(sizes("sharded")) == 4
    assert sum(sizes("sharded")) < 3 * total + 4 * 10_000
    assert sum(sizes("hybrid")) < 3 * total + 4 * 10_000


def test_it_is_written_beside_training(folders: dict[str, Any], tmp_path: Path) -> None:
    kept, _ = run(_save, str(tmp_path / "beside"), "sharded", "SHARDED_STATE_DICT", True, processes=2)[0]
    _same(run_one(_load, str(tmp_path / "beside"), "ddp")[0]["model"], kept["model"])


def test_the_weights_are_merged_into_one_file(
    folders: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from safetensors.torch import load_file

    from accel.cli import exit_status, main

    for mesh in ("sharded", "hybrid"):
        folder, kept, _ = folders[f"{mesh} SHARDED_STATE_DICT"]
        assert main(["merge-weights", str(folder), str(tmp_path / mesh)]) == 0
        written = load_file(tmp_path / mesh / "model.safetensors")
        assert written.keys() == kept["model"].keys() - {"head.weight"}
        assert all(torch.equal(written[name], kept["model"][name]) for name in written)
    assert main(["merge-weights", str(folder), str(tmp_path / "x"), "--remove_checkpoint_dir"]) != exit_status.USAGE
    assert "holds more than weights and is not removed" in capsys.readouterr().err
    assert folder.is_dir()
    assert not (tmp_path / "x").exists()


def _model_saved(folder: str, kind: str) -> list[str]:
    import resource
    import signal

    accelerator = _accelerator("sharded")
    model, _, _ = _made(accelerator, 0)
    told = ["whole"]
    try:
        if kind == "full" and accelerator.is_main_process:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))
        accelerator.save_model(model, folder, max_shard_size="10kB")
    except (ArgumentError, CheckpointError) as error:
        told = [type(error).__name__, str(error)]
    accelerator.reduce(torch.ones(1))  # every process is where the others are
    return told


def test_weights_are_written_a_parameter_at_a_time(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    assert run(_model_saved, str(tmp_path / "model"), "") == [["whole"]] * 2
    files = sorted((tmp_path / "model").glob("*.safetensors"))
    assert len(files) > 2
    written = {name: value for file in files for name, value in load_file(file).items()}
    expected = decoder(0).state_dict()
    assert written.keys() == expected.keys() - {"head.weight"}
    assert all(torch.equal(written[name], expected[name]) for name in written)


class _Mixed(torch.nn.Module):
    """Sharded parameters and buffers of 1, 2, 4 and 8 bytes an element, small ones before large ones."""

    def __init__(self) -> None:
        super().__init__()
        numbers = torch.Generator().manual_seed(0)
        self.layer = torch.nn.Linear(3, 5)
        torch.nn.init.normal_(self.layer.weight, generator=numbers)
        torch.nn.init.normal_(self.layer.bias, generator=numbers)
        for name, kind in (("a", torch.uint8), ("b", torch.bfloat16), ("c", torch.int64), ("d", torch.float32)):
            frozen = torch.nn.Parameter(torch.arange(7 * 3).view(7, 3).to(kind), requires_grad=False)
            self.register_parameter(f"{name}_frozen", frozen)
            self.register_buffer(f"{name}_buffer", torch.arange(5).to(kind))


def _mixed_saved(folder: str) -> list[list[str]]:
    """The types and shapes that this process gathers, in turn, for one file and for several."""
    weights: Any = importlib.import_module("accel.checkpoint.weights")
    accelerator = _accelerator("sharded")
    model = accelerator.prepare(_Mixed())
    gathered: list[str] = []
    full_tensor = weights.full_tensor

    def gather(value: Any) -> Any:
        gathered.append(f"{value.dtype} {tuple(value.shape)}")
        return full_tensor(value)

    weights.full_tensor = gather
    by_size = []
    for size in ("10GB", "100B"):
        gathered.clear()
        accelerator.save_model(model, f"{folder}/{size}", max_shard_size=size)
        by_size.append(list(gathered))
    return by_size


def test_every_process_gathers_in_the_order_of_the_file(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    first, second = run(_mixed_saved, str(tmp_path))
    assert first == second
    expected = _Mixed().state_dict()
    file = SafetensorsFile(tmp_path / "10GB" / "model.safetensors")
    in_file = sorted(file.tensors.values(), key=lambda tensor: tensor.offset)
    assert first[0] == [f"{tensor.dtype} {tuple(tensor.shape)}" for tensor in in_file]
    assert first[0] != [f"{tensor.dtype} {tuple(tensor.shape)}" for tensor in expected.values()]
    for size, several in (("10GB", False), ("100B", True)):
        files = sorted((tmp_path / size).glob("*.safetensors"))
        assert (len(files) > 2) is several
        written = {name: value for path in files for name, value in load_file(path).items()}
        assert written.keys() == expected.keys()
        assert all(torch.equal(written[name], expected[name]) for name in written)


def test_a_writer_that_fails_leaves_nobody_waiting(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for kind, _ in run(_model_saved, str(tmp_path / "file"), ""):
        assert kind == "ArgumentError"
    for kind, said in run(_model_saved, str(tmp_path / "full"), "full"):
        assert kind == "CheckpointError"
        assert "File too large" in said


def _misfit(folder: str, change: Callable[[Any], None]) -> str:
    accelerator = _accelerator("sharded")
    model = decoder()
    change(model)
    accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    with pytest.raises(CheckpointError) as caught:
        accelerator.load_state(folder)
    return str(caught.value)


def _wider(model: Any) -> None:
    model.blocks[1].norm = torch.nn.LayerNorm(24).double()


def _more(model: Any) -> None:
    model.more = torch.nn.Linear(2, 2).double()


def _fewer(model: Any) -> None:
    del model.blocks[2]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_wider, "model.0.blocks.1.norm.weight has shape (16,), but (24,) in this run"),
        (_more, " lacks more.weight"),
        (_fewer, "this run has no blocks.2.norm.weight"),
    ],
)
def test_what_does_not_fit_is_named(change: Any, said: str, folders: dict[str, Any]) -> None:
    folder = folders["sharded SHARDED_STATE_DICT"][0]
    for told in run(_misfit, str(folder), change):
        assert said in told


def test_whole_files_with_other_groups_are_refused(folders: dict[str, Any]) -> None:
    folder = folders["sharded FULL_STATE_DICT"][0]
    for told in run(_misfit, str(folder), _nothing):
        assert "optimizer.bin does not fit" in told
        assert "its groups have [18, 4] parameters, but [22] in this run" in told


def test_chunks_of_another_node_are_named(folders: dict[str, Any], tmp_path: Path) -> None:
    import shutil

    folder = tmp_path / "half"
    shutil.copytree(folders["sharded SHARDED_STATE_DICT"][0], folder)
    shutil.rmtree(folder / "chunks" / "node_0")
    (folder / "chunks" / "node_1").mkdir()
    for rank in (2, 3):
        name = f"rank_{rank}.safetensors"
        shutil.copy(folders["sharded SHARDED_STATE_DICT"][0] / "chunks" / "node_0" / name, folder / "chunks" / "node_1")
    renew_manifest(folder)
    for told in run(_misfit, str(folder), _nothing):
        assert "has only the chunks of rank 2, 3 on node 1" in told
        assert "\n" not in told


def _nothing(model: Any) -> None:
    pass


def _damaged(folder: str) -> str:
    accelerator = _accelerator("sharded")
    _made(accelerator, 0)
    with pytest.raises(CheckpointError) as caught:
        accelerator.load_state(folder)
    return str(caught.value)


def test_a_damaged_chunk_is_found_before_anything_is_loaded(folders: dict[str, Any], tmp_path: Path) -> None:
    import shutil

    shutil.copytree(folders["sharded SHARDED_STATE_DICT"][0], tmp_path / "damaged")
    path = tmp_path / "damaged" / "chunks" / "node_0" / "rank_3.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    for told in run(_damaged, str(tmp_path / "damaged")):
        assert "rank_3.safetensors has changed since it was written" in told


def test_each_block_is_read_by_one_process(folders: dict[str, Any]) -> None:
    folder = folders["sharded SHARDED_STATE_DICT"][0]
    assert find_damage(folder) is None
    for path in [path for path in folder.rglob("*") if path.is_file() and path.name != "accel_manifest.json"]:
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        try:
            found = [part for part in range(3) if find_changed_file(folder, part, 3)]
        finally:
            path.write_bytes(content)
        assert len(found) == 1, path


def _killed(folder: str, after: int) -> None:
    """Save twice; the process of rank ``after % 2`` dies when it has written ``after`` bytes of the second."""
    from accel.checkpoint.durable import DurableFile

    accelerator = _accelerator("sharded")
    model, optimizer, _ = _made(accelerator, 0)
    train(accelerator, model, optimizer, steps=1)
    accelerator.save_state(folder)
    train(accelerator, model, optimizer, steps=1, first=1)
    left = [after]
    parts = DurableFile._parts

    def count(file: DurableFile, length: int) -> Iterator[tuple[memoryview, int]]:
        left[0] -= length
        if left[0] < 0 and accelerator.process_index == after % 2:
            os._exit(1)
        return parts(file, length)

    DurableFile._parts = count  # type: ignore[method-assign, assignment]
    accelerator.save_state(folder)


@pytest.mark.parametrize("after", [0, 1, 3000, 20_001, 60_000, 90_001])
def test_a_writer_killed_at_any_byte_leaves_a_whole_checkpoint(after: int, tmp_path: Path) -> None:
    assert any(ended.error for ended in outcomes(_killed, str(tmp_path / "here"), after))
    kept, _ = run_one(_load, str(tmp_path / "here"), "ddp")
    assert kept["optimizer"]["state"][0]["step"] in (1, 2)


def _latest(folder: str) -> tuple[int, list[float], list[float]]:
    config = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True, total_limit=1)
    accelerator = _accelerator("sharded", project_config=config)
    model, optimizer, _ = _made(accelerator, 0)
    for step in range(2):
        train(accelerator, model, optimizer, steps=1, first=step)
        accelerator.save_state(async_save=True)
    expected, _ = train(accelerator, model, optimizer, steps=2, first=2)
    accelerator.load_state("latest")
    after = train(accelerator, model, optimizer, steps=2, first=2)[0]
    return accelerator.save_iteration, after, expected


def test_the_latest_is_found(tmp_path: Path) -> None:
    iteration, after, expected = run(_latest, str(tmp_path))[0]
    assert iteration == 2
    assert after == expected
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["checkpoint_1"]


def _cuts(data: st.DataObject, length: int) -> list[int]:
    return sorted({0, length, *data.draw(st.lists(st.integers(0, length), max_size=3))})


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 7), min_size=1, max_size=3), st.data())
def test_any_cut_of_a_tensor_is_read_through_any_other(shape: list[int], data: st.DataObject) -> None:
    from itertools import pairwise, product

    whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
    saved = Chunks("here")
    for box in product(*(list(pairwise(_cuts(data, length))) for length in shape)):
        part = whole[tuple(slice(*side) for side in box)]
        saved.add("x", tuple(shape), tuple(first for first, _ in box), part)
    found = torch.zeros_like(whole)
    saved.fill("x", found)
    assert torch.equal(found, whole)


def _every_placement(folder: str) -> list[bool]:
    """A tensor over two dimensions of a mesh, in every way, read from a file in rows."""
    from itertools import product

    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    Accelerator(cpu=True)
    mesh = init_device_mesh("cpu", (2, 2))
    whole = torch.arange(35.0).reshape(5, 7)
    saved = Chunks.single_chunk({"x": whole}, folder)
    found = []
    for placements in product((Shard(0), Shard(1), Replicate()), repeat=2):
        empty = distribute_tensor(torch.zeros(5, 7), mesh, placements)
        saved.fill("x", empty)
        found.append(torch.equal(empty.full_tensor(), whole))
    return found


def test_every_placement_is_filled(tmp_path: Path) -> None:
    assert run(_every_placement, str(tmp_path), processes=4) == [[True] * 9] * 4


def _one_step(folder: str) -> float:
    accelerator = _accelerator("sharded")
    model, optimizer, _ = _made(accelerator, 0)
    model.eval()
    with torch.no_grad():
        model(batch(0, accelerator)[:, :-1])
    accelerator.backward(loss_of(model, batch(0, accelerator)))
    optimizer.step()
    model(batch(1, accelerator)[:, :-1])  # leaves the root gathered
    accelerator.save_state(folder)
    return loss_of(model, batch(1, accelerator)).item()


def test_a_pass_without_a_backward_pass_before_a_save_does_no_harm(tmp_path: Path) -> None:
    run(_one_step, str(tmp_path / "folder"))
    saved = Chunks.in_folder(tmp_path / "folder", [f"chunks/node_0/rank_{rank}.safetensors" for rank in (0, 1)])
    assert {"model.0.embed.weight", "model.0.position", "optimizer.0.['state']['0.position']['exp_avg']"} <= set(
        saved.shapes
    )
