from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from accel.big_models import (
    available_host_memory,
    compute_module_sizes,
    compute_module_total_buffer_size,
    convert_file_size_to_int,
    dtype_byte_size,
    estimate_model,
    estimate_training_usage,
    get_balanced_memory,
    get_max_memory,
    init_empty_weights,
)
from accel.errors import ArgumentError
from tests.runtime.big_models.models import Tower


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        (torch.float32, 4),
        (torch.bfloat16, 2),
        (torch.float64, 8),
        (torch.complex64, 8),
        (torch.bool, 1),
        (torch.uint8, 1),
        (torch.float8_e4m3fn, 1),
        ("float8_e5m2", 1),
        ("fp8", 1),
        ("int4", 0.5),
        ("torch.float16", 2),
        ("int2", 0.25),
        ("torch.int4", 0.5),
        ("nf4", 0.5),
    ],
)
def test_bytes_of_one_element(dtype: str | torch.dtype, size: float) -> None:
    assert dtype_byte_size(dtype) == size


def test_a_word_that_is_no_type() -> None:
    with pytest.raises(ArgumentError, match=r"'flot16' is unknown to torch"):
        dtype_byte_size("flot16")


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (7, 7),
        ("1KB", 1000),
        ("1KiB", 1024),
        ("1.5GB", 1_500_000_000),
        ("2 GiB", 2**31),
        ("8Gb", 10**9),
        ("3mib", 3 * 2**20),
    ],
)
def test_sizes_in_words(text: int | str, size: int) -> None:
    assert convert_file_size_to_int(text) == size


@pytest.mark.parametrize("text", [-1, "5", "GB", "5 parsecs", "-5GB", "", "5GBs"])
def test_words_that_are_no_size(text: int | str) -> None:
    with pytest.raises(ArgumentError, match="size"):
        convert_file_size_to_int(text)


def test_special_types_and_buffers() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4))
    sizes = compute_module_sizes(model, dtype="float16", special_dtypes={"0.weight": "int4"})
    assert sizes["0"] == 8  # 16 elements of half a byte
    assert sizes["1"] == 4 * 4 * 2 + 8  # the counter of batches stays int64
    assert compute_module_total_buffer_size(model) == 2 * 16 + 8


def test_what_is_free_here() -> None:
    free = get_max_memory()
    assert 0 < free["cpu"] <= available_host_memory() * 1.2


def test_order_and_words_of_max_memory() -> None:
    given: dict[int | str, int | str] = {"disk": "1TB", "cpu": "1GB", 1: "2GiB", 0: 5}
    assert list(get_max_memory(given).items()) == [(0, 5), (1, 2**31), ("cpu", 10**9), ("disk", 10**12)]
    assert given["cpu"] == 10**9  # transformers reads the numbers back from its own dict
    with pytest.raises(ArgumentError, match=r"unknown device 'cup'.*did you mean 'cpu'"):
        get_max_memory({"cup": 1})


def group(root: Path, version: int, limit: str, used: int, cache: int) -> None:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text("MemTotal:  9000 kB\nMemAvailable:  8000 kB\n")
    if version == 2:
        top, path = root / "sys/fs/cgroup", "0::/job/step"
        names = ("memory.max", "memory.current", "inactive_file")
    else:
        top, path = root / "sys/fs/cgroup/memory", "3:cpu,memory:/job/step"
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    (root / "proc/self/cgroup").write_text(f"1:name=systemd:/\n{path}\n")
    folder = top / "job"
    (folder / "step").mkdir(parents=True)
    (folder / names[0]).write_text(limit)
    (folder / names[1]).write_text(str(used))
    (folder / "memory.stat").write_text(f"anon 1\n{names[2]} {cache}\n")


@pytest.mark.parametrize("version", [1, 2])
def test_a_control_group_limits_what_is_free(tmp_path: Path, version: int) -> None:
    group(tmp_path, version, limit="1000000", used=700_000, cache=200_000)
    assert available_host_memory(tmp_path) == 500_000


def test_a_control_group_without_limit(tmp_path: Path) -> None:
    group(tmp_path, 2, limit="max\n", used=1, cache=0)
    assert available_host_memory(tmp_path) == 8000 * 1024


def test_balanced_memory_of_accelerators_with_any_numbers() -> None:
    model = nn.Sequential(*[nn.Linear(10, 10) for _ in range(8)])
    whole = int(compute_module_sizes(model)[""])
    budget = get_balanced_memory(model, {1: 10**6, 3: 10**6, "cpu": 10**6}, no_split_module_classes=["Linear"])
    assert budget == {1: whole // 2 + int(1.25 * 440), 3: 10**6, "cpu": 10**6}
    low = get_balanced_memory(model, {0: 10**6, 1: 1000, 2: 1000}, low_zero=True)
    assert low[0] == whole - 2000


def test_estimates() -> None:
    with init_empty_weights():
        model = nn.Sequential(nn.Linear(100, 100, bias=False), nn.Linear(100, 10, bias=False))
    rows = {row.dtype: row for row in estimate_model(model)}
    assert (rows["float32"].total, rows["float32"].largest_layer) == (44_000, 40_000)
    assert (rows["float16"].total, rows["int8"].total, rows["int4"].total) == (22_000, 11_000, 5_500)
    assert rows["float32"].training == {"model": 44_000, "optimizer": 88_000, "gradients": 44_000, "step": 176_000}
    assert rows["float16"].training_peak == 88_000
    assert (rows["int8"].training, rows["int8"].training_peak) == (None, None)
    with pytest.raises(ArgumentError, match="'fp61'"):
        estimate_training_usage(1, "fp61")
    with pytest.raises(ArgumentError, match=r"msamp_config='O2': MS-AMP .* to estimate mixed_precision 'fp8'"):
        estimate_training_usage(1, "fp8", msamp_config="O2")


def test_tied_weights_count_once() -> None:
    sizes = compute_module_sizes(Tower())
    assert sizes["head"] == 0
    assert sizes["embed"] == 11 * 6 * 4
