"""What the scripts that measure inside a training process share: interleaved rounds, and where the figures go."""

from __future__ import annotations

import gc
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path


def interleave(loops: Mapping[str, Callable[[], int]], rounds: int, warm_up: int = 2) -> dict[str, list[float]]:
    """Seconds of one step of each loop in each round; a loop returns the number of steps that it took.

    What it has to do before, and that is not measured, is its method ``begin``.
    """
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    names = list(loops)
    for number in range(-warm_up, rounds):
        # A loop that always ran second would always have the warmer caches.
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            begin = getattr(loops[name], "begin", None)
            if begin is not None:
                begin()
            gc.collect()
            started = time.perf_counter()
            steps = loops[name]()
            taken = (time.perf_counter() - started) / steps
            if number >= 0:
                seconds[name].append(taken)
    return seconds


def timed(call: Callable[[], object], times: int) -> Callable[[], int]:
    """A loop of ``times`` calls."""

    def loop() -> int:
        for _ in range(times):
            call()
        return times

    return loop


class Steps:
    """A loop of a few calls of ``step`` that records the shortest call, in seconds."""

    COUNT = 5

    def __init__(self, step: Callable[[], object]) -> None:
        self.step = step
        self.shortest = float("inf")

    def __call__(self) -> int:
        for _ in range(self.COUNT):
            started = time.perf_counter()
            self.step()
            self.shortest = min(self.shortest, time.perf_counter() - started)
        return self.COUNT


def shortest_steps(steps: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Return the shortest call of each step, in seconds; a round has five turns of each."""
    loops = {name: Steps(step) for name, step in steps.items()}
    for _ in range(5 * rounds):
        interleave(loops, 1, warm_up=0)
    return {name: [loop.shortest] for name, loop in loops.items()}


def over(seconds: dict[str, list[float]], name: str, base: str) -> list[float]:
    """What ``name`` costs over ``base``, by round."""
    return [one - other for one, other in zip(seconds[name], seconds[base], strict=True)]


def median(values: list[float]) -> float:
    return statistics.median(values)


def write(seconds: Mapping[str, list[float]]) -> None:
    """Hand the figures of rank 0 to `python -m benchmarks`, or print them."""
    if int(os.environ.get("RANK", "0")):
        return
    place = os.environ.get("BENCHMARK_RESULT")
    if place:
        Path(place).write_text(json.dumps(seconds))
    for name, values in seconds.items():
        print(f"{name:<40} {median(values) * 1e6:10.2f} µs")
