"""What is in a checkpoint: safe to read, what safetensors reads, and what other objects and hooks put there."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from accel import Accelerator
from accel.checkpoint.durable import Digest
from accel.checkpoint.file_names import MANIFEST
from accel.checkpoint.files import write_object, write_tensors
from accel.checkpoint.manifest import Manifest, read_manifest, write_manifest
from accel.errors import CheckpointError
from accel.tensor_files import SafetensorsFile, read_object

from ..small import fill, save_twice, simple
from ..worlds import outcomes, run_one
from .test_tensor_files import MIXED


def _unsafe(directory: str) -> str:
    accelerator, _, _, tally = simple()
    tally.value = Path("anything")
    try:
        accelerator.save_state(directory)
    except CheckpointError as error:
        return str(error)
    return ""


def test_what_could_not_be_loaded_safely_is_refused_when_saving(tmp_path: Path) -> None:
    said = run_one(_unsafe, str(tmp_path / "here"))
    assert "custom_checkpoint_0.pkl would hold" in said
    assert "PosixPath" in said
    assert list(tmp_path.iterdir()) == []


class _Bomb:
    def __reduce__(self) -> Any:
        return print, ("a pickle ran code",)


def test_pickles_of_others_never_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"value": _Bomb()}, tmp_path / "bomb.pkl")
    with pytest.raises(CheckpointError, match=re.escape(str(tmp_path / "bomb.pkl"))):
        read_object(tmp_path / "bomb.pkl")
    (tmp_path / "raw.pkl").write_bytes(pickle.dumps(_Bomb(), protocol=2))
    with pytest.raises(CheckpointError):
        read_object(tmp_path / "raw.pkl")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("tensors", MIXED.values(), ids=list(MIXED))
def test_every_tensor_begins_at_a_multiple_of_its_element(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    path = tmp_path / "mine.safetensors"
    write_tensors(path, tensors)
    header_size = int.from_bytes(path.read_bytes()[:8], "little")
    header = json.loads(path.read_bytes()[8 : 8 + header_size])
    for name, tensor in tensors.items():
        assert (8 + header_size + header[name]["data_offsets"][0]) % tensor.element_size() == 0
    loaded = load_file(path)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


def test_tensors_are_what_safetensors_reads_and_writes(tmp_path: Path) -> None:
    kinds = (
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
    tensors = {str(kind): (torch.rand(3, 5) * 9).to(kind) for kind in kinds}
    tensors |= {
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "strided": torch.arange(12.0).reshape(3, 4).t(),
    }
    tensors["tied"] = tensors["scalar"]
    digest = write_tensors(tmp_path / "mine.safetensors", tensors)
    assert digest.length == (tmp_path / "mine.safetensors").stat().st_size
    theirs = load_file(tmp_path / "mine.safetensors")
    assert set(theirs) == set(tensors) - {"tied"}
    mine = SafetensorsFile(tmp_path / "mine.safetensors").tensors
    for name, tensor in tensors.items():
        assert torch.equal(mine[name], tensor)
        assert mine[name].dtype is tensor.dtype
    save_file({"a": torch.ones(2)}, tmp_path / "theirs.safetensors")
    assert SafetensorsFile(tmp_path / "theirs.safetensors").tensors["a"].tolist() == [1, 1]


def _tied(directory: str, extra: bool) -> list[Any]:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(4, 2)
            self.head = nn.Linear(2, 4, bias=False)
            self.head.weight = self.embedding.weight
            self.note: Any = None

        def get_extra_state(self) -> Any:
            return {"note": self.note}

        def set_extra_state(self, state: Any) -> None:
            self.note = state["note"]

    accelerator = Accelerator()
    raw = Tied()
    model = accelerator.prepare(raw)
    fill(raw, 3.0)
    raw.note = "kept"
    accelerator.save_state(directory, safe_serialization=not extra)
    fill(raw, 0.0)
    raw.note = None
    accelerator.load_state(directory)
    return [
        model is raw,
        raw.head.weight.tolist() == [[3.0] * 2] * 4,
        raw.head.weight is raw.embedding.weight,
        raw.note,
    ]


@pytest.mark.parametrize("pickled", [False, True])
def test_tied_weights_and_extra_state(tmp_path: Path, pickled: bool) -> None:
    assert run_one(_tied, str(tmp_path / "here"), pickled) == [True, True, True, "kept"]
    names = {entry.name for entry in (tmp_path / "here").iterdir()}
    assert ("pytorch_model.bin" in names) is pickled
    assert ("model.safetensors" in names) is not pickled


def _hooks(directory: str) -> list[Any]:
    accelerator, _, _, _ = simple()
    calls: list[Any] = []

    def on_save(models: Any, weights: Any, folder: str) -> None:
        calls.append(("save", len(models), len(weights)))
        (Path(folder) / "config.json").write_text("{}")
        weights.pop()

    def on_load(models: Any, folder: str) -> None:
        calls.append(("load", (Path(folder) / "config.json").exists()))
        models.pop()

    handle = accelerator.register_save_state_pre_hook(on_save)
    other = accelerator.register_load_state_pre_hook(on_load)
    accelerator.save_state(directory)
    accelerator.load_state(directory)
    handle.remove()
    other.remove()
    names = sorted(json.loads((Path(directory) / MANIFEST).read_text())["files"])
    return [calls, names]


def test_hooks_write_into_the_checkpoint_and_take_models_out(tmp_path: Path) -> None:
    calls, names = run_one(_hooks, str(tmp_path / "here"))
    assert calls == [("save", 1, 1), ("load", True)]
    assert names == ["config.json", "custom_checkpoint_0.pkl", "optimizer.bin", "random_states_0.pkl"]


def _misfit(directory: str, kind: str) -> None:
    accelerator = Accelerator()
    model: nn.Module = nn.Linear(4 if kind == "model" else 3, 1)
    prepared = [model, torch.optim.Adam(model.parameters())]
    if kind == "optimizer":
        prepared.append(torch.optim.SGD(model.parameters()))
    accelerator.prepare(*prepared)
    accelerator.load_state(directory)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("model", "model 0 does not fit: weight has shape (1, 3), but (1, 4) in this run"),
        ("optimizer", "has no optimizer_1.bin"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, kind: str, said: str) -> None:
    run_one(save_twice, str(tmp_path / "here"))
    ended = outcomes(_misfit, str(tmp_path / "here"), kind, processes=1)[0]
    assert ended.error == "CheckpointError"
    assert said in ended.message
    assert "\n" not in ended.message


def _accelerates(directory: str) -> None:
    import accelerate

    accelerator = accelerate.Accelerator(cpu=True)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    fill(model, 7.0)
    accelerator.save_state(directory)


def _read_accelerates(directory: str) -> float:
    accelerator = Accelerator()
    model = accelerator.prepare(nn.Linear(3, 1))
    for name in ("optimizer.bin",):
        read_object(Path(directory) / name)
    model.load_state_dict(SafetensorsFile(Path(directory) / "model.safetensors").tensors)
    weight: float = model.weight.flatten()[0].item()
    return weight


@pytest.mark.usefixtures("accelerate")
@pytest.mark.filterwarnings("ignore")
def test_model_and_optimizer_files_of_accelerate_are_read(tmp_path: Path) -> None:
    run_one(_accelerates, str(tmp_path / "theirs"))
    assert run_one(_read_accelerates, str(tmp_path / "theirs")) == 7.0


@pytest.mark.parametrize(
    ("before", "after"),
    [('"num_processes": 2', '"num_processes": 1'), ('"bytes": 3', '"bytes": 4'), ('"a.pkl"', '"b.pkl"')],
)
def test_a_manifest_that_was_changed_is_damage(tmp_path: Path, before: str, after: str) -> None:
    """Valid JSON with other values: only the manifest's own checksum tells."""
    write_manifest(tmp_path, Manifest(num_processes=2, files={"a.pkl": Digest(3, "00000000")}))
    written = read_manifest(tmp_path)
    assert written is not None
    assert written.num_processes == 2
    text = (tmp_path / MANIFEST).read_text()
    assert text.count(before) == 1
    (tmp_path / MANIFEST).write_text(text.replace(before, after))
    with pytest.raises(CheckpointError, match=f"{MANIFEST} is damaged: its checksum differs"):
        read_manifest(tmp_path)


def test_objects_refuse_nothing_that_training_keeps(tmp_path: Path) -> None:
    state = {"a": torch.ones(2), "b": [1, 2.5, "x", None, True], "c": (1, {"d": b"bytes"})}
    write_object(tmp_path / "x.pkl", state)
    assert read_object(tmp_path / "x.pkl")["c"] == (1, {"d": b"bytes"})
