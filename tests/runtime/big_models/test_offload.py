from __future__ import annotations

import json
import os
import resource
from pathlib import Path

import pytest
import torch

from accel.big_models import (
    OffloadedWeightsLoader,
    PrefixedDataset,
    extract_submodules_state_dict,
    load_offloaded_weight,
    offload_state_dict,
    offload_weight,
    save_offload_index,
)
from accel.errors import ArgumentError, CheckpointError
from tests.runtime.worlds import run_one

TYPES = [
    torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.int64, torch.int8, torch.uint8, torch.bool, torch.complex64,
]  # fmt: skip


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(), (3,), (2, 5), (0, 4)])
def test_every_type_comes_back_bit_for_bit(tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    weight = (torch.rand(shape) * 4 - 2).to(dtype)
    index = offload_weight(weight, "a.b", tmp_path, {})
    assert index == {"a.b": {"dtype": str(dtype).removeprefix("torch."), "shape": list(shape)}}
    back = load_offloaded_weight(tmp_path / "a.b.dat", index["a.b"])
    assert (back.dtype, back.shape) == (dtype, weight.shape)
    assert torch.equal(back.reshape(-1).view(torch.uint8), weight.reshape(-1).view(torch.uint8))


def test_what_is_not_contiguous_comes_back(tmp_path: Path) -> None:
    weight = torch.arange(6.0).reshape(2, 3).T
    index = offload_weight(weight, "w", tmp_path, {})
    assert index is not None
    assert torch.equal(load_offloaded_weight(tmp_path / "w.dat", index["w"]), weight)


def test_a_weight_is_a_map_that_writing_does_not_reach(tmp_path: Path) -> None:
    offload_state_dict(tmp_path, {"w": torch.zeros(4)})
    weights = OffloadedWeightsLoader(save_folder=tmp_path)
    weights["w"].add_(1)
    assert weights["w"].tolist() == [0, 0, 0, 0]


def test_rewriting_a_weight_does_not_change_what_was_read(tmp_path: Path) -> None:
    offload_state_dict(tmp_path, {"w": torch.zeros(4)})
    read = OffloadedWeightsLoader(save_folder=tmp_path)["w"]
    offload_state_dict(tmp_path, {"w": torch.ones(4)})
    assert read.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("padding", range(0, 64, 8))
def test_weights_lie_where_torch_would_put_them(tmp_path: Path, padding: int) -> None:
    """The last bits of a matrix product depend on where its matrices start."""
    from safetensors.torch import save_file

    torch.manual_seed(0)
    weight, x = torch.randn(256, 256), torch.ones(1, 256)
    save_file({"w": weight}, tmp_path / "m.safetensors", metadata={"format": "pt", "note": "n" * padding})
    index = {"w": {"safetensors_file": str(tmp_path / "m.safetensors")}}
    found = OffloadedWeightsLoader(index=index)["w"]
    assert found.data_ptr() % 64 == 0
    assert torch.equal(x @ found, x @ weight)


def test_names_of_one_tensor_share_its_bytes(tmp_path: Path) -> None:
    weight = torch.rand(100)
    for _ in range(2):
        offload_state_dict(tmp_path, {"a": weight, "b": weight, "c": weight[:50]})
        assert os.stat(tmp_path / "a.dat").st_ino == os.stat(tmp_path / "b.dat").st_ino
        assert sorted(path.name for path in tmp_path.iterdir()) == ["a.dat", "b.dat", "c.dat", "index.json"]
    weights = OffloadedWeightsLoader(save_folder=tmp_path)
    assert torch.equal(weights["b"], weight)


def test_the_index_grows(tmp_path: Path) -> None:
    save_offload_index({"a": {"dtype": "int8", "shape": [1]}}, tmp_path)
    save_offload_index({"b": {"dtype": "int8", "shape": [1]}}, tmp_path)
    save_offload_index({}, tmp_path)
    save_offload_index(None, tmp_path)
    assert set(json.loads((tmp_path / "index.json").read_text())) == {"a", "b"}


def test_sources_of_the_loader(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"inner": torch.arange(3.0), "odd": torch.ones(1)}, tmp_path / "m.safetensors")
    offload_state_dict(tmp_path, {"file": torch.ones(2)})
    index = {
        **json.loads((tmp_path / "index.json").read_text()),
        "tensor": {"safetensors_file": str(tmp_path / "m.safetensors"), "weight_name": "inner", "dtype": "float16"},
    }
    weights = OffloadedWeightsLoader({"host": torch.zeros(1)}, tmp_path, index)
    assert list(weights) == ["host", "file", "tensor"]
    assert len(weights) == 3
    assert weights["tensor"].dtype == torch.float16
    assert weights["tensor"].tolist() == [0, 1, 2]
    assert "odd" not in weights
    assert weights.get("odd") is None
    save_file({"inner": torch.arange(3.0) + 7}, tmp_path / "m.safetensors")
    assert weights["tensor"].tolist() == [7, 8, 9]


def test_a_prefix(tmp_path: Path) -> None:
    part = PrefixedDataset({"a.x": torch.ones(1), "a.y": torch.zeros(1), "b.x": torch.zeros(2)}, "a.")
    assert list(part) == ["x", "y"]
    assert len(part) == 2
    assert "x" in part
    assert "z" not in part
    assert dict(part)["x"].item() == 1


def test_part_of_a_state_dict() -> None:
    state = {"h.1.w": torch.ones(1), "h.10.w": torch.ones(1), "top": torch.ones(1), "topper": torch.ones(1)}
    assert list(extract_submodules_state_dict(state, ["h.1", "top"])) == ["h.1.w", "top"]
    assert list(extract_submodules_state_dict(state, [""])) == list(state)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: (folder / "w.dat").write_bytes(b"1234567"), "has 7 bytes, but its index entry (float32 [3])"),
        (lambda folder: (folder / "w.dat").unlink(), "w.dat cannot be read: No such file"),
        (lambda folder: (folder / "index.json").write_text('{"w": {"dtype": "flot32", "shape": [3]}}'), "'flot32'"),
    ],
)
def test_damage_is_one_line(tmp_path: Path, damage: object, said: str) -> None:
    offload_state_dict(tmp_path, {"w": torch.zeros(3)})
    assert callable(damage)
    damage(tmp_path)
    with pytest.raises((CheckpointError, ArgumentError)) as caught:
        OffloadedWeightsLoader(save_folder=tmp_path)["w"]
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_folders_and_names_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no index\.json"):
        OffloadedWeightsLoader(save_folder=tmp_path)
    with pytest.raises(ArgumentError, match="needs a state_dict"):
        OffloadedWeightsLoader()
    (tmp_path / "index.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"index\.json cannot be read"):
        OffloadedWeightsLoader(save_folder=tmp_path)
    with pytest.raises(KeyError, match="did you mean 'weight'"):
        OffloadedWeightsLoader({"weight": torch.ones(1)})["wieght"]


def fill_the_disk(folder: str) -> tuple[str, list[str]]:
    """What is said, and left, when a file may not grow beyond 1 MB (as on a disk with that much left)."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))
    try:
        offload_state_dict(folder, {"small": torch.zeros(10), "large": torch.zeros(1_000_000)})
    except CheckpointError as error:
        return str(error), sorted(os.listdir(folder))
    return "", []


def test_a_full_disk_is_one_line_and_leaves_no_half_file(tmp_path: Path) -> None:
    said, left = run_one(fill_the_disk, str(tmp_path))
    assert "large.dat (4000000 bytes) cannot be written: File too large" in said
    assert "bytes are free there" in said
    assert "\n" not in said
    assert left == ["small.dat"]
