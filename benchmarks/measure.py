"""Interleaved measurement: every round runs each command once, so that a slow minute slows all of them."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
WAIT_S = 180.0  # for anything that must come true


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A promise: the median of `ours` is at most `limit` times that of `base`."""

    ours: str
    base: str
    limit: float


def interleaved(measures: Mapping[str, Callable[[], float]], rounds: int, warm_up: int = 1) -> dict[str, list[float]]:
    """Seconds of each measure in each round, after `warm_up` rounds that are not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in measures}
    for number in range(-warm_up, rounds):
        for name, measure in measures.items():
            value = measure()
            if number >= 0:
                seconds[name].append(value)
    return seconds


def wall(command: list[str], env: Mapping[str, str] | None = None, cwd: str | None = None) -> Callable[[], float]:
    """A measure: the whole of a command, from start to end. It must succeed."""

    def measure() -> float:
        started = time.perf_counter()
        done = subprocess.run(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=env and dict(env), cwd=cwd
        )
        taken = time.perf_counter() - started
        if done.returncode != 0:
            raise SystemExit(f"{command} failed:\n{done.stderr.decode(errors='replace')[-2000:]}")
        return taken

    return measure


def report(name: str, seconds: Mapping[str, list[float]], bars: list[Bar]) -> bool:
    """Prints and keeps the figures; True when every bar is met."""
    medians = {key: statistics.median(values) for key, values in seconds.items()}
    width = max(map(len, seconds))
    print(f"\n{name}: median [min … max] of {len(next(iter(seconds.values())))}")
    for key, values in seconds.items():
        print(f"  {key:<{width}}  {shown(key, medians[key])}  [{shown(key, min(values))} … {shown(key, max(values))}]")
    met = True
    for bar in bars:
        ratio = medians[bar.ours] / medians[bar.base]
        met &= ratio <= bar.limit
        verdict = "met" if ratio <= bar.limit else "MISSED"
        print(f"  {bar.ours} / {bar.base} = {ratio:.3g} (at most {bar.limit:g}: {verdict})")
    _keep(name, seconds, medians, bars)
    return met


def report_limits(name: str, seconds: Mapping[str, list[float]], limits: Mapping[str, float]) -> bool:
    """`report`, with bars in seconds, or calls."""
    rounds = len(next(iter(seconds.values())))
    bases = {
        limit: f"calls allowed: {limit:g}" if key.startswith("calls") else f"{limit:g} s"
        for key, limit in limits.items()
    }
    constant = {base: [float(limit)] * rounds for limit, base in bases.items()}
    bars = [Bar(ours=key, base=bases[limit], limit=1) for key, limit in limits.items()]
    return report(name, {**constant, **seconds}, bars)


def difference(seconds: dict[str, list[float]], ours: str, base: str) -> str:
    """Adds what ours took longer, round by round; its name."""
    name = f"{ours} - {base}"
    seconds[name] = [one - other for one, other in zip(seconds[ours], seconds[base], strict=True)]
    return name


def shown(key: str, value: float) -> str:
    """A figure with its unit: seconds, unless its name says that it is memory, or a number of something."""
    if key.startswith(("calls", "orphans")):
        return f"{value:8g}"
    if "GB" in key:
        return f"{value:8.3f} GB"
    if "kB" in key:
        return f"{value:8.0f} kB"
    return f"{value * 1e3:8.1f} ms" if abs(value) >= 0.01 else f"{value * 1e6:8.1f} µs"


def _keep(name: str, seconds: Mapping[str, list[float]], medians: Mapping[str, float], bars: list[Bar]) -> None:
    RESULTS.mkdir(exist_ok=True)
    facts = {
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": _commit(),
        "machine": {
            "cpus": len(os.sched_getaffinity(0)),
            "python": platform.python_version(),
            "system": platform.platform(),
        },
        "versions": _versions(),
        "figures": {key: [float(f"{value:.4g}") for value in values] for key, values in seconds.items()},
        "ratios": {f"{bar.ours} / {bar.base}": round(medians[bar.ours] / medians[bar.base], 3) for bar in bars},
        "bars": {f"{bar.ours} / {bar.base}": bar.limit for bar in bars},
    }
    (RESULTS / f"{name}.json").write_text(json.dumps(facts, indent=1) + "\n")


def _commit() -> str:
    """The commit that was measured, with `+changes` if files that it has differ."""
    commit = _git("rev-parse", "HEAD")
    return (
        f"{commit}+changes" if _git("status", "--porcelain", "--untracked-files=no", ":!benchmarks/results") else commit
    )


def _git(*words: str) -> str:
    command = ["git", "-C", str(RESULTS.parents[1]), *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in ("accel-launch", "torch", "accelerate"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def until(true: Callable[[], bool], what: str) -> None:
    """Returns once it is true, looked at 50 times a second. Ends the benchmark, saying what did not come true."""
    deadline = time.monotonic() + WAIT_S
    while not true():
        if time.monotonic() > deadline:
            raise SystemExit(f"{what}: not within {WAIT_S:g} s")
        time.sleep(0.02)
