"""Tensors in files: by any writer, of any type and order, they arrive to the bit, where they go and nowhere else."""

from __future__ import annotations

import json
import math
import os
import struct
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from accel import Accelerator, tensor_files
from accel.checkpoint.chunks import load_module
from accel.checkpoint.file_names import MANIFEST
from accel.checkpoint.files import write_object, write_tensors
from accel.checkpoint.merge import merge_fsdp_weights
from accel.errors import CheckpointError
from accel.plugins.fsdp import FullyShardedDataParallelPlugin
from accel.tensor_files import SafetensorsFile, Scratch, StoredTensor, cut, read_object

from ..small import renew_manifest
from ..worlds import run, run_one

# In the order of the names, each first tensor ends where no element of the second may begin.
MIXED: dict[str, dict[str, torch.Tensor]] = {
    "one float before counters": {"a": torch.rand(1), "b": torch.arange(9000)},
    "flags before floats": {"a": torch.tensor([True, False, True]), "b": torch.rand(9000)},
    "bytes before floats": {"a": torch.arange(5, dtype=torch.uint8), "b": torch.rand(9000).double()},
    "int32 before int64": {"a": torch.arange(3, dtype=torch.int32), "b": torch.arange(9000)},
    "an odd number of bfloat16": {"a": torch.rand(7).bfloat16(), "b": torch.rand(9000)},
}
_NAMES = {torch.float32: "F32", torch.float64: "F64", torch.bfloat16: "BF16", torch.bool: "BOOL"}
_NAMES |= {torch.int64: "I64", torch.int32: "I32", torch.uint8: "U8"}


def write_packed(tensors: Mapping[str, torch.Tensor], path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file as accel once did: in the order of the names, with no regard to alignment."""
    header: dict[str, Any] = {"__metadata__": dict(metadata or {})}
    data = b""
    for name, tensor in tensors.items():
        elements = bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
        offsets = [len(data), len(data) + len(elements)]
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        data += elements
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def _write_legacy(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    torch.save(dict(tensors), path, _use_new_zipfile_serialization=False)


WRITERS: dict[str, Callable[[dict[str, torch.Tensor], Path], Any]] = {
    "accel": lambda tensors, path: write_tensors(path, tensors),
    "accel, once": write_packed,
    "safetensors": save_file,
    "torch": torch.save,
    "torch, once": _write_legacy,
}


def _read(writer: str, path: Path) -> dict[str, torch.Tensor]:
    pickled: dict[str, torch.Tensor] | None = read_object(path, stored=True) if writer.startswith("torch") else None
    return dict(SafetensorsFile(path).tensors) if pickled is None else pickled


def _with_scratch(monkeypatch: pytest.MonkeyPatch, pieces: int, size: int) -> None:
    scratch = Scratch(torch.device("cpu"), pieces, size)
    monkeypatch.setattr(tensor_files, "_scratch", lambda device: scratch)


def test_pieces_are_read_in_turn_and_each_waits_for_its_last_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for a GPU, whose copies go on while the next piece is read."""
    _with_scratch(monkeypatch, pieces=2, size=64)
    events: list[str] = []
    pieces: list[int] = []
    read = tensor_files.StoredTensor._read

    class Event:
        def __init__(self, piece: int) -> None:
            self.piece = piece

        def synchronize(self) -> None:
            events.append(f"wait {self.piece}")

    def noted(stored: StoredTensor, file: int, target: torch.Tensor, start: int) -> None:
        if target.data_ptr() not in pieces:
            pieces.append(target.data_ptr())
        events.append(f"read {pieces.index(target.data_ptr())}")
        read(stored, file, target, start)

    monkeypatch.setattr(tensor_files.StoredTensor, "_read", noted)
    monkeypatch.setattr(tensor_files, "_event_on", lambda device: Event(int(events[-1][-1])))
    tensor = torch.rand(80)
    save_file({"a": tensor}, tmp_path / "file")
    copied = torch.empty(80, dtype=torch.float64).copy_(SafetensorsFile(tmp_path / "file").tensors["a"])
    assert torch.equal(copied, tensor.double())
    assert events == ["read 0", "read 1", "wait 0", "read 0", "wait 1", "read 1", "wait 0", "read 0"]


@pytest.mark.parametrize("scratch", [64, 16 << 20])
@pytest.mark.parametrize("writer", WRITERS)
def test_tensors_of_any_writer_fill_any_destination(
    tmp_path: Path, writer: str, scratch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the file's type and layout, of others, as a slice of a larger tensor, and by parts."""
    _with_scratch(monkeypatch, pieces=1, size=scratch)
    for tensors in MIXED.values():
        (tmp_path / "file").unlink(missing_ok=True)
        tensors = {**tensors, "c": torch.arange(210.0).reshape(2, 15, 7)}
        WRITERS[writer](tensors, tmp_path / "file")
        stored = _read(writer, tmp_path / "file")
        assert sorted(stored) == ["a", "b", "c"]
        for name, tensor in tensors.items():
            for kind in (tensor.dtype, torch.float64, torch.float16):
                around = torch.zeros((3, *tensor.shape[::-1]), dtype=kind)
                turned = around[1].permute(tuple(reversed(range(tensor.ndim))))
                for destination in (torch.empty(tensor.shape, dtype=kind), turned):
                    assert destination.copy_(stored[name]) is destination
                    assert torch.equal(destination, tensor.to(kind))
                assert not around[::2].any()
        assert torch.equal(cut(stored["c"], (slice(1), slice(3, 9), slice(2, 5))) + 0, tensors["c"][:1, 3:9, 2:5])


@pytest.mark.parametrize("writer", ["accel, once", "torch"])
def test_short_reads_and_reads_of_several_calls_arrive_to_the_bit(
    tmp_path: Path, writer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system reads at most 2 GB a call, and may read less than it is asked for."""
    lengths: list[int] = []
    preadv = os.preadv

    def short(file: int, buffers: list[memoryview], offset: int) -> int:
        lengths.append(len(buffers[0]))
        return preadv(file, [buffers[0][: -(-len(buffers[0]) // 2)]], offset)

    tensors = {"a": torch.rand(1), "b": torch.arange(50), "c": torch.rand(11, 5).bfloat16(), "d": torch.rand(9) > 0.5}
    WRITERS[writer](tensors, tmp_path / "file")
    stored: dict[str, Any] = _read(writer, tmp_path / "file")
    monkeypatch.setattr(tensor_files, "_MAX_READ", 7)
    monkeypatch.setattr(os, "preadv", short)
    for name, tensor in tensors.items():
        assert torch.equal(stored[name].read().view(torch.uint8), tensor.view(torch.uint8))
        assert torch.equal(torch.empty(tensor.shape, dtype=torch.float64).copy_(stored[name]), tensor.double())
    assert max(lengths) == 7
    assert min(lengths) < 7


def test_strides_ties_and_parts_of_one_memory_in_a_pickle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _with_scratch(monkeypatch, pieces=1, size=200)
    memory = torch.rand(4, 30, 5)
    state = {"turned": memory.permute(2, 0, 1), "part": memory[1:3, ::7], "all": memory, "same": memory}
    state |= {"wide": torch.ones(1).expand(300, 40), "none": torch.empty(0, 3), "one": torch.tensor(3.5)}
    torch.save({**state, "nested": [{"x": torch.arange(5)}]}, tmp_path / "state.bin")
    stored = read_object(tmp_path / "state.bin", stored=True)
    assert all(isinstance(stored[name], StoredTensor) for name in state)
    assert all(torch.equal(stored[name].read(), tensor) for name, tensor in state.items())
    assert stored["all"] is stored["same"]
    assert stored["nested"][0]["x"].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_an_archive_that_another_program_packed(tmp_path: Path, compression: int) -> None:
    """torch tells where its own writer would have put the tensors."""
    state = {name: torch.rand(size) for name, size in (("a", 1000), ("b", 3), ("c", 500))}
    torch.save(state, tmp_path / "state.bin")
    with zipfile.ZipFile(tmp_path / "state.bin") as old, zipfile.ZipFile(tmp_path / "new.bin", "w", compression) as new:
        for name in sorted(old.namelist(), reverse=True):
            new.writestr(name, old.read(name))
    found = read_object(tmp_path / "new.bin", stored=True)
    assert all(torch.equal(found[name] + 0, tensor) for name, tensor in state.items())


class _Mixed(nn.Module):
    """A model with one kind of MIXED among its buffers, beside a parameter whose shards are not of one size."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(7, 5)
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor.clone())


def _zero(state: Mapping[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for tensor in state.values():
            tensor.zero_()


def _whole(folder: str) -> None:
    neighbours = [torch.ones(9000) for _ in range(16)]
    for kind, tensors in MIXED.items():
        model = _Mixed(tensors)
        accelerator = Accelerator()
        prepared = accelerator.prepare(model)
        expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        for writer, write in WRITERS.items():
            place = Path(folder, kind, writer)
            accelerator.save_state(str(place), safe_serialization=not writer.startswith("torch"))
            if writer != "accel":
                (place / MANIFEST).unlink()
                path = next(iter([*place.glob("model.safetensors"), *place.glob("pytorch_model.bin")]))
                path.unlink()
                write(expected, path)
            _zero(prepared.state_dict())
            accelerator.load_state(str(place))
            for name, tensor in model.state_dict().items():
                assert torch.equal(tensor, expected[name]), (kind, writer, name)
    assert all(bool((neighbour == 1).all()) for neighbour in neighbours)


@pytest.mark.filterwarnings("ignore")
def test_whole_states_load_to_the_bit(tmp_path: Path) -> None:
    run_one(_whole, str(tmp_path))


def _sharded(folder: str) -> None:
    for kind, tensors in MIXED.items():
        accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(state_dict_type="SHARDED_STATE_DICT"))
        model = accelerator.prepare(_Mixed(tensors))
        expected = {name: tensor.clone() for name, tensor in accelerator.get_state_dict(model).items()}
        for writer in ("accel", "accel, once"):
            place = Path(folder, kind, writer)
            accelerator.save_state(str(place))
            if accelerator.is_main_process and writer == "accel, once":
                for path in place.glob("chunks/*/*"):
                    table = SafetensorsFile(path).metadata
                    write_packed(dict(sorted(load_file(path).items())), path, table)
                renew_manifest(place)
            accelerator.wait_for_everyone()
            _zero(model.state_dict())
            accelerator.load_state(str(place))
            found = accelerator.get_state_dict(model)
            merged = {}
            if accelerator.is_main_process:
                merged = load_file(merge_fsdp_weights(place, place / "merged"))
            for name, tensor in expected.items():
                assert torch.equal(found[name], tensor), (kind, writer, name)
                assert torch.equal(merged[name], tensor), (kind, writer, name)
            accelerator.wait_for_everyone()


@pytest.mark.filterwarnings("ignore")
def test_sharded_states_load_and_merge_to_the_bit(tmp_path: Path) -> None:
    run(_sharded, str(tmp_path))


class _Queue(nn.Module):
    """Keeps the tensor that it gets, of whatever size, and scales the others in place."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
        self.register_buffer("queue", torch.zeros(1))

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        self.queue = state_dict[f"{prefix}queue"]
        state_dict[f"{prefix}weight"][:2].mul_(2)
        super()._load_from_state_dict(state_dict, prefix, *args)


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("assign", [False, True])
def test_code_of_modules_sees_tensors(tmp_path: Path, writer: str, assign: bool) -> None:
    model = nn.Sequential(_Queue(), nn.Linear(3, 2), nn.BatchNorm1d(2))

    def rename(module: Any, state: Any, prefix: str, *_: Any) -> None:
        for name in [name for name in state if name.startswith("old.")]:
            state[name.removeprefix("old.")] = state.pop(name)

    model.register_load_state_dict_pre_hook(rename)  # type: ignore[no-untyped-call]
    saved = {f"old.{name}": torch.rand(value.shape) + 1 for name, value in model.state_dict().items()}
    saved["old.0.queue"] = torch.arange(6.0)
    saved["old.2.num_batches_tracked"] = torch.tensor(7)
    WRITERS[writer](saved, tmp_path / "file")
    load_module(model, dict(_read(writer, tmp_path / "file")), strict=True, assign=assign)
    (tmp_path / "file").unlink()
    saved["old.0.weight"][:2] *= 2
    for name, value in model.state_dict().items():
        assert type(value) is torch.Tensor
        assert torch.equal(value, saved[f"old.{name}"]), name


class _Noted(nn.Linear):
    note: Any = None

    def get_extra_state(self) -> Any:
        return {"note": torch.ones(3)}

    def set_extra_state(self, state: Any) -> None:
        self.note = state["note"]


def test_extra_state_that_a_module_keeps_outlives_the_file(tmp_path: Path) -> None:
    from accel.checkpoint.weights import read_weights

    model = _Noted(2, 2)
    write_object(tmp_path / "pytorch_model.bin", model.state_dict())
    load_module(model, read_weights(tmp_path))
    (tmp_path / "pytorch_model.bin").unlink()
    assert type(model.note) is torch.Tensor
    assert model.note.tolist() == [1, 1, 1]


def test_types_that_safetensors_has_and_what_it_lacks(tmp_path: Path) -> None:
    numbers = torch.tensor([1 + 2j, 3 - 4j])
    tensors = {"number": numbers, "conjugate": numbers.conj(), "negative": numbers.conj().imag, "same": numbers}
    kinds = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
    tensors |= {str(kind): torch.rand(5).to(kind) for kind in kinds}
    write_tensors(tmp_path / "good.safetensors", tensors)
    found = SafetensorsFile(tmp_path / "good.safetensors").tensors
    assert found["same"] is found["number"]
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].tolist() == tensor.resolve_conj().resolve_neg().tolist()
    bad = {"sparse": torch.eye(3).to_sparse(), "wide": torch.ones(1, dtype=torch.complex128)}
    for name, told in (("sparse", "a tensor of layout sparse_coo"), ("wide", "a Tensor of torch.complex128 on cpu")):
        with pytest.raises(
            CheckpointError, match=rf"^bad.safetensors: {name} is {told}, which safetensors cannot hold$"
        ):
            write_tensors(tmp_path / "bad.safetensors", {"a": torch.ones(1), name: bad[name]})
    assert not (tmp_path / "bad.safetensors").exists()


def test_a_header_that_safetensors_would_refuse_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accel.checkpoint.files.MAX_HEADER", 150)
    write_tensors(tmp_path / "a", {"a": torch.ones(1)})
    with pytest.raises(CheckpointError, match=r"^b: the names and shapes of its 9 tensors take \d+ bytes"):
        write_tensors(tmp_path / "b", {str(name): torch.ones(1) for name in range(9)})


def test_names_of_tied_weights(tmp_path: Path) -> None:
    """Also of a weight that is called as a value of the metadata; and as accel once wrote them."""
    weight = torch.rand(2)
    for name in ("pt", "format"):
        write_tensors(tmp_path / name, {name: weight, "other": weight})
        file = SafetensorsFile(tmp_path / name)
        assert sorted(file.tensors) == sorted([name, "other"])
        assert file.metadata["format"] == "pt"
        assert file.aliases == {"other": name}
    write_packed({"head": weight}, tmp_path / "once", {"format": "pt", "tied": "head"})
    assert list(SafetensorsFile(tmp_path / "once").tensors) == ["head", "tied"]


_GOOD = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}


@pytest.mark.parametrize(
    ("header", "size", "told"),
    [
        (_GOOD, 7, "is truncated: 1 bytes are missing at its end"),
        (_GOOD, 9, "is damaged: it has 78 bytes, but its header describes 77"),
        ({"a": {**_GOOD["a"], "data_offsets": [1, 9]}}, 9, "is damaged: the offsets of a in its header do not match"),
        ({"a": {**_GOOD["a"], "data_offsets": [0, 9]}}, 9, "is damaged: the offsets of a in its header do not match"),
        ({**_GOOD, "b": _GOOD["a"]}, 8, "is damaged: the offsets of b in its header do not match"),
        ({"a": {**_GOOD["a"], "dtype": "F3"}}, 8, "a is of type F3, which torch does not have"),
        ({"a": {**_GOOD["a"], "shape": [-1, -2]}}, 8, "is not a safetensors file: its header is damaged"),
        ({"a": {**_GOOD["a"], "shape": "2"}}, 8, "is damaged: the offsets of a in its header do not match"),
        ({"a": {**_GOOD["a"], "data_offsets": [0.0, 8.0]}}, 8, "is not a safetensors file: its header is damaged"),
        ({"a": {"dtype": "F32"}}, 8, "is not a safetensors file: its header is damaged"),
        ({"a": 1}, 8, "is not a safetensors file: its header is damaged"),
        ([1], 8, "is not a safetensors file: its header is damaged"),
        ({**_GOOD, "__metadata__": [1]}, 8, "is not a safetensors file: its header is damaged"),
    ],
)
def test_damaged_files_are_one_line(tmp_path: Path, header: Any, size: int, told: str) -> None:
    text = json.dumps(header).encode()
    path = tmp_path / "file"
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(size))
    with pytest.raises(CheckpointError) as caught:
        SafetensorsFile(path)
    assert str(caught.value).startswith(str(path))
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_changes_before_its_tensors_are_read(tmp_path: Path) -> None:
    changes: dict[str, Callable[[Path], Any]] = {"changed": lambda path: path.write_bytes(b""), "gone": Path.unlink}
    for name, change in changes.items():
        path = tmp_path / name
        save_file({"a": torch.ones(math.prod((3, 3)))}, path)
        stored = SafetensorsFile(path).tensors["a"]
        change(path)
        with pytest.raises(CheckpointError, match=rf"{name} (has changed while it was read|cannot be read: No such)"):
            stored.read()


def test_a_full_memory_is_not_taken_for_a_damaged_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"a": torch.zeros(2)}, tmp_path / "a.bin")

    def load(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(torch, "load", load)
    for stored in (False, True):
        with pytest.raises(MemoryError):
            read_object(tmp_path / "a.bin", stored=stored)
