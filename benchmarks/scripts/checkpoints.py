"""One save or load of a model of 210 MB and its Adam state (630 MB in all), by accel or by Accelerate.

`checkpoints.py accel|accelerate save|async|again|load FOLDER` prints as JSON the seconds for which the training loop
stood still and the bytes of memory that the process had more at its worst than before. ``again`` is the second save
beside training, whose memory is there already.
"""

from __future__ import annotations

import json
import resource
import sys
import threading
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

LAYERS, WIDTH = 13, 2012  # 13 × 2012 × 2013 × 4 bytes = 210 MB


def prepared(package: str) -> tuple[Any, Any, Any]:
    accelerator: Any = import_module(package).Accelerator(cpu=True)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    model(torch.randn(2, WIDTH)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return accelerator, model, optimizer


class Memory:
    """The resident bytes of this process at their highest, sampled all the while: a peak before does not count."""

    def __init__(self) -> None:
        self.start = self.peak = self.now()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    @staticmethod
    def now() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    def _watch(self) -> None:
        while not self._done.wait(0.002):
            self.peak = max(self.peak, self.now())

    def extra(self) -> int:
        self._done.set()
        self._thread.join()
        return max(self.peak, self.now()) - self.start


def main() -> None:
    package, what, folder = sys.argv[1:]
    accelerator, _, _ = prepared(package)
    if what == "again":
        accelerator.save_state(f"{folder}-first", async_save=True)
        accelerator.wait_for_checkpoint()
    memory = Memory()
    started = time.perf_counter()
    if what == "load":
        accelerator.load_state(folder)
    elif what in ("async", "again"):
        accelerator.save_state(folder, async_save=True)
    else:
        accelerator.save_state(folder)
    blocked = time.perf_counter() - started
    accelerator.end_training()
    print(json.dumps({"blocked": blocked, "whole": time.perf_counter() - started, "memory": memory.extra()}))


if __name__ == "__main__":
    main()
