"""Sharded checkpoints in Accelerate's layout: on any number of processes, and by Accelerate's own functions."""

from __future__ import annotations

import os
import pickle
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from accel import Accelerator
from accel.accelerator import Accelerator as Façade
from accel.errors import ArgumentError, CheckpointError
from accel.plugins.fsdp import FullyShardedDataParallelPlugin
from tests.needs import package
from tests.runtime.worlds import run, run_one

from .test_checkpoints import Kept, _accelerator, _fewer, _made, _more, _same, _whole, _wider
from .training import batch, decoder, train

LAYOUTS = ("SHARDED_STATE_DICT", "FULL_STATE_DICT")


class Functions:
    """The four functions with the plugin of a layout; ``foreign``: those of Accelerate."""

    def __init__(self, accelerator: Façade, layout: str, foreign: bool = False) -> None:
        self.accelerator = accelerator
        if foreign:
            from accelerate import FullyShardedDataParallelPlugin as Plugin
            from accelerate import PartialState
            from accelerate.utils import fsdp_utils

            PartialState(cpu=True)  # its loggers need one
            self.all, self.plugin = fsdp_utils, Plugin(fsdp_version=2, state_dict_type=layout)
        else:
            from accel.compat import fsdp_checkpoints  # in a child process: it answers for `import accelerate`

            self.all, self.plugin = fsdp_checkpoints, FullyShardedDataParallelPlugin(state_dict_type=layout)

    def save(self, model: Any, optimizer: Any, folder: str, **how: Any) -> None:
        self.all.save_fsdp_model(self.plugin, self.accelerator, model, folder, **how)
        self.all.save_fsdp_optimizer(self.plugin, self.accelerator, optimizer, model, folder)

    def load(self, model: Any, optimizer: Any, folder: str, **how: Any) -> Any:
        result = self.all.load_fsdp_model(self.plugin, self.accelerator, model, folder, **how)
        self.all.load_fsdp_optimizer(self.plugin, self.accelerator, optimizer, model, folder, **how)
        return result


Saving = tuple[Kept, list[float]]


def _save(folder: str, mesh: str, foreign: bool = False) -> Saving:
    accelerator = _accelerator(mesh)
    model, optimizer, _ = _made(accelerator, accelerator.process_index)
    train(accelerator, model, optimizer, steps=3, clip=0.5)
    kept = _whole(accelerator, model, optimizer)
    for layout in LAYOUTS:
        if not foreign:
            model(batch(1, accelerator)[:, :-1])  # leaves the root gathered
        Functions(accelerator, layout, foreign).save(model, optimizer, f"{folder}/{layout}")
    return kept, train(accelerator, model, optimizer, steps=3, first=3)[0]


def _load(folders: list[str], mesh: str, foreign: bool = False) -> list[Saving]:
    accelerator = _accelerator(mesh)
    loaded = []
    for folder in folders:
        model, optimizer, _ = _made(accelerator, 7)  # the optimizer has no state yet
        result = Functions(accelerator, Path(folder).name, foreign).load(model, optimizer, folder)
        assert not any(result or ())
        kept = _whole(accelerator, model, optimizer)
        loaded.append((kept, train(accelerator, model, optimizer, steps=3, first=3)[0]))
        accelerator.free_memory()
    return loaded


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Saving]:
    """Checkpoints in both layouts by four processes, sharded and within two replicas."""
    made = {}
    for mesh in ("sharded", "hybrid"):
        folder = str(tmp_path_factory.mktemp(mesh))
        made[folder] = run(_save, folder, mesh, processes=4)[0]
    return made


def _check(made: dict[str, Saving], mesh: str, processes: int, foreign: bool = False) -> None:
    places = [f"{folder}/{layout}" for folder in made for layout in LAYOUTS]
    loaded = run(_load, places, mesh, foreign, processes=processes)[0]
    expected = [saving for saving in made.values() for _ in LAYOUTS]
    for (found, after), (kept, losses) in zip(loaded, expected, strict=True):
        _same(found["model"], kept["model"])
        _same(found["optimizer"]["state"], kept["optimizer"]["state"])
        assert after == pytest.approx(losses, abs=1e-9)


@pytest.mark.parametrize(("mesh", "processes"), [("ddp", 1), ("sharded", 2)])
def test_it_loads_on_every_world(mesh: str, processes: int, folders: dict[str, Saving]) -> None:
    _check(folders, mesh, processes)


def test_the_files_are_those_of_accelerate(folders: dict[str, Saving]) -> None:
    def names(layout: str) -> set[str]:
        folder = Path(next(iter(folders)), layout)
        return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}

    parts = {".metadata", *(f"__{rank}_0.distcp" for rank in range(4))}
    assert names(LAYOUTS[0]) == {f"{part}/{name}" for part in ("pytorch_model_fsdp_0", "optimizer_0") for name in parts}
    assert names(LAYOUTS[1]) == {"pytorch_model_fsdp.bin", "optimizer.bin"}


def test_accelerate_reads_them(folders: dict[str, Saving]) -> None:
    package("accelerate")
    _check(folders, "sharded", 2, foreign=True)


def test_those_of_accelerate_are_read(tmp_path: Path) -> None:
    package("accelerate")
    _check({str(tmp_path): run(_save, str(tmp_path), "sharded", True)[0]}, "ddp", 1)


def test_the_weights_are_merged_into_one_file(folders: dict[str, Saving], tmp_path: Path) -> None:
    from safetensors.torch import load_file

    from accel.cli import main

    for number, (folder, (kept, _)) in enumerate(folders.items()):
        source, target = f"{folder}/{LAYOUTS[0]}/pytorch_model_fsdp_0", tmp_path / str(number)
        assert main(["merge-weights", source, str(target)]) == 0
        written = load_file(target / "model.safetensors")
        assert written.keys() <= kept["model"].keys() <= {*written, "head.weight"}
        assert all(torch.equal(value, kept["model"][name]) for name, value in written.items())


def _lora(seed: int, foreign: bool) -> tuple[Façade, Any, Any]:
    """A frozen model with an adapter that depends on ``seed``."""
    if not foreign:
        import accel.compat  # noqa: F401  # before peft, which imports accelerate

    from peft import LoraConfig, get_peft_model

    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(transformer_cls_names_to_wrap="Block"))
    base: Any = decoder()
    torch.manual_seed(seed)
    config = LoraConfig(target_modules=["up", "down"], r=3, init_lora_weights=False)
    model: Any = get_peft_model(base, config)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    return accelerator, *accelerator.prepare(model, optimizer)


def _save_adapter(folder: str) -> list[float]:
    accelerator, model, optimizer = _lora(0, foreign=False)
    train(accelerator, model, optimizer, steps=2)
    for layout in LAYOUTS:
        Functions(accelerator, layout).save(model, optimizer, f"{folder}/{layout}", adapter_only=True)
    accelerator.save_state(f"{folder}/state")
    return train(accelerator, model, optimizer, steps=3, first=2)[0]


def _load_adapters(folders: list[str], copies: str | None = None) -> list[list[float]]:
    """The losses after loading each of ``folders``; with ``copies``, loaded and written there by Accelerate."""
    losses = []
    foreign = copies is not None
    for seed, folder in enumerate(folders, 1):
        accelerator, model, optimizer = _lora(seed, foreign)
        name = Path(folder).name
        if name == "state":
            accelerator.load_state(folder)
        else:
            Functions(accelerator, name, foreign).load(model, optimizer, folder, adapter_only=True)
        if foreign:
            Functions(accelerator, name, foreign).save(model, optimizer, f"{copies}/{name}", adapter_only=True)
        losses.append(train(accelerator, model, optimizer, steps=3, first=2)[0])
        accelerator.free_memory()
    return losses


def test_an_adapter_is_kept_alone(tmp_path: Path) -> None:
    package("peft")
    package("accelerate")
    expected = run(_save_adapter, str(tmp_path / "ours"))[0]
    _check_names(tmp_path / "ours")
    mine, theirs = ([str(tmp_path / who / layout) for layout in LAYOUTS] for who in ("ours", "theirs"))
    copied = run(_load_adapters, mine, str(tmp_path / "theirs"))[0]
    loaded = run_one(_load_adapters, [*mine, *theirs, str(tmp_path / "ours" / "state")])
    for losses in (*copied, *loaded):
        assert losses == pytest.approx(expected, abs=1e-9)


def _check_names(folder: Path) -> None:
    from accel.checkpoint.dcp import DcpFolder

    layers = [f"base_model.model.blocks.{block}.{layer}" for block in range(3) for layer in ("up", "down")]
    names = {f"{layer}.lora_{side}" for layer in layers for side in "AB"}
    sharded, full = (folder / layout for layout in LAYOUTS)
    assert {*DcpFolder(sharded / "pytorch_model_fsdp_0").tensors.shapes} == {f"model.{name}.weight" for name in names}
    written = torch.load(full / "pytorch_model_fsdp.bin", weights_only=True)
    assert {*written} == {f"{name}.default.weight" for name in names} | {"base_model.model.scale"}


def _refused(make: Callable[[Any], Any], folders: list[str], use: Callable[..., Any]) -> list[str]:
    accelerator = _accelerator("sharded")
    model = decoder()
    make(model)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    said = []
    for folder in folders:
        with pytest.raises((ArgumentError, CheckpointError)) as caught:
            use(Functions(accelerator, LAYOUTS[0]), model, optimizer, folder)
        said.append(str(caught.value))
    return said


def _model(functions: Functions, model: Any, optimizer: Any, folder: str) -> None:
    functions.all.load_fsdp_model(functions.plugin, functions.accelerator, model, folder)


def _optimizer(functions: Functions, model: Any, optimizer: Any, folder: str) -> None:
    functions.all.load_fsdp_optimizer(functions.plugin, functions.accelerator, optimizer, model, folder)


def _stranger(functions: Functions, model: Any, optimizer: Any, folder: str) -> None:
    functions.save(model, torch.optim.SGD([torch.ones(3, requires_grad=True)], lr=0.1), folder)


def _per_rank(functions: Functions, model: Any, optimizer: Any, folder: str) -> None:
    functions.all.save_fsdp_model(functions.plugin, functions.accelerator, model, folder, use_dcp=False)


def _unplugged(functions: Functions, model: Any, optimizer: Any, folder: str) -> None:
    functions.all.save_fsdp_model(None, functions.accelerator, model, folder)


def _as_is(model: Any) -> None:
    pass


@pytest.mark.parametrize(
    ("make", "use", "said"),
    [
        (_wider, _model, "blocks.1.norm.weight has shape (16,), but (24,) in this run"),
        (_more, _model, " lacks more.weight"),
        (_fewer, _model, "this run has no blocks.2.norm.weight"),
        (_as_is, _optimizer, "2 parameter group(s), but 1 in this run"),
        (_as_is, _stranger, "the optimizer has a parameter of shape (3,) that is not in the model"),
        (_as_is, _per_rank, "use_dcp=False is not supported"),
        (_as_is, _unplugged, "fsdp_plugin is None"),
    ],
)
def test_what_does_not_fit_is_named(make: Any, use: Any, said: str, folders: dict[str, Saving], tmp_path: Path) -> None:
    source = tmp_path / LAYOUTS[0]
    shutil.copytree(Path(next(iter(folders)), LAYOUTS[0]), source)
    for (told,) in run(_refused, make, [str(source)], use):
        assert said in told
        assert "\n" not in told


class Runs:
    """An object whose pickle makes a directory when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


def test_what_cannot_be_read_is_one_line_and_runs_nothing(folders: dict[str, Saving], tmp_path: Path) -> None:
    from torch.distributed.checkpoint.state_dict_saver import save

    whole = Path(next(iter(folders)), LAYOUTS[0])
    places = [tmp_path / name for name in ("nowhere", "bare", "pickle", "object", "cut", "other")]
    nowhere, bare, pickled, objects, cut, other = (place / "optimizer_0" for place in places)
    bare.mkdir(parents=True)
    for place in (pickled, objects, cut):
        shutil.copytree(whole / "optimizer_0", place)
    shutil.copytree(whole / "pytorch_model_fsdp_0", other)
    (pickled / ".metadata").write_bytes(pickle.dumps(Runs(tmp_path / "ran")))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save({"optimizer": {"param_groups": Runs(tmp_path / "ran")}}, checkpoint_id=objects, no_dist=True)
    for shard in cut.glob("*.distcp"):
        shard.write_bytes(shard.read_bytes()[:2000])
    expected = [
        f"{nowhere}: no such directory",
        f"{bare} is not a sharded checkpoint: it has no .metadata",
        "posix.mkdir, which is not allowed in checkpoints",
        f"{objects}/__0_0.distcp cannot be loaded as weights only: ",
        f"{cut}/__",
        f"{other} has no optimizer: pass the folder that save_fsdp_optimizer wrote",
    ]
    for told in run(_refused, _as_is, [str(place) for place in places], _optimizer):
        for line, said in zip(told, expected, strict=True):
            assert said in line
            assert "\n" not in line
    assert not (tmp_path / "ran").exists()
