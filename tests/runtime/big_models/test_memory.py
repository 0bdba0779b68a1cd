"""What loading and running a model costs in memory, measured in processes of their own."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from accel.big_models import init_empty_weights, load_checkpoint_and_dispatch
from tests.runtime.worlds import run_one

WIDTH, DEPTH = 1024, 40
LAYER = WIDTH * WIDTH * 4  # 4 MiB
MODEL = LAYER * DEPTH


def stack() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)))


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


class Peak:
    """The most memory that this process had, beyond what it had at first, while inside; looked at all the time."""

    def __enter__(self) -> Peak:
        self.most = 0
        self._first = resident()
        self._done = threading.Event()
        self._watch = threading.Thread(target=self._look)
        self._watch.start()
        return self

    def _look(self) -> None:
        while not self._done.wait(0.0005):
            self.most = max(self.most, resident() - self._first)

    def __exit__(self, *error: object) -> None:
        self.most = max(self.most, resident() - self._first)
        self._done.set()
        self._watch.join()


def load_and_run(folder: str, device_map: dict[str, Any], dtype: str | None) -> tuple[int, float]:
    with init_empty_weights():
        model = stack()
    nn.Linear(8, 8)(torch.ones(1, 8))  # what the first use of torch allocates is not the model's
    with Peak() as peak:
        load_checkpoint_and_dispatch(model, folder, device_map, offload_folder=f"{folder}/offloaded", dtype=dtype)
        kind = torch.float32 if dtype is None else getattr(torch, dtype)
        with torch.no_grad():
            out = model(torch.ones(1, WIDTH, dtype=kind))
    return peak.most, float(out.double().sum())


def write(folder: Path) -> float:
    torch.manual_seed(0)
    model = stack()
    save_file(model.state_dict(), folder / "model.safetensors")
    with torch.no_grad():
        return float(model(torch.ones(1, WIDTH)).double().sum())


def test_a_model_on_disk_takes_a_part_of_its_size(tmp_path: Path) -> None:
    expected = write(tmp_path)
    peak, value = run_one(load_and_run, str(tmp_path), {"": "disk"}, None)
    assert value == expected
    assert peak < MODEL // 3  # 23 to 44 MB of 168: how much of the file stays mapped is for the system to say


def test_converting_to_disk_takes_a_part_of_its_size_too(tmp_path: Path) -> None:
    write(tmp_path)
    peak, _ = run_one(load_and_run, str(tmp_path), {"": "disk"}, "bfloat16")
    assert peak < MODEL // 3


def test_a_model_on_the_host_takes_its_size_and_little_more(tmp_path: Path) -> None:
    expected = write(tmp_path)
    peak, value = run_one(load_and_run, str(tmp_path), {"": "cpu"}, None)
    assert value == expected
    assert peak < MODEL + MODEL // 4
