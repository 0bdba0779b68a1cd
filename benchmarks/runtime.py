"""What the runtime costs inside a training process, beside the same by hand and beside Accelerate.

Each benchmark starts a script that runs all of them in turns and hands back the figures of rank 0.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from .measure import Bar, interleaved, report, wall

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent


def _inside(script: str, rounds: int, processes: int = 1, **env: str) -> dict[str, list[float]]:
    """The figures that ``script`` measures in itself, in a world of ``processes``."""
    start = [sys.executable]
    if processes > 1:
        start = [str(BIN / "accel"), "launch", "--cpu", "--num_processes", str(processes)]
    command = [*start, "-m", f"benchmarks.scripts.{script}"]
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, "figures.json")
        whole = {**os.environ, "BENCHMARK_RESULT": str(place), "BENCHMARK_ROUNDS": str(rounds), **env}
        done = subprocess.run(
            command, cwd=ROOT, env=whole, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        if done.returncode != 0:
            raise SystemExit(f"{script} failed:\n{done.stderr[-2000:]}")
        found: dict[str, list[float]] = json.loads(place.read_text())
        return found


def steps(rounds: int) -> bool:
    """The cost of a training step over the loop written by hand: at most a quarter of that with Accelerate.

    A step of a GPT, of about 12 ms, beside the same by hand.
    """
    kinds = ("plain", "accumulate", "whole")
    bars = [
        Bar(ours=f"{kind}, accel over by hand", base=f"{kind}, accelerate over by hand", limit=0.25) for kind in kinds
    ]
    bars.append(Bar(ours="GPT, accel", base="GPT, by hand", limit=1.01))
    return report("steps", _inside("steps", rounds), bars)


def ddp_steps(rounds: int) -> bool:
    """A training step in DDP of two processes: by hand, accel and Accelerate; of 8 floats, and of 1, 10 and 100 ms."""
    seconds = _inside("steps", rounds, processes=2, BENCHMARK_STEPS="100")
    kept = {name: values for name, values in seconds.items() if "over" not in name}
    kinds = ("plain", "whole", "1 ms", "10 ms", "100 ms")
    bars = [Bar(ours=f"{kind}, accel", base=f"{kind}, by hand", limit=1.05) for kind in kinds]
    return report("ddp_steps", kept, bars)


def samplers(rounds: int) -> bool:
    """A batch of indices in a world of 1,024, and 10,000 batches skipped in a world of 64."""
    bars = [
        Bar(ours="world 1024, accel", base="world 1, accel", limit=1.5),
        Bar(ours="world 1024, accel", base="world 1024, accelerate", limit=0.01),
        Bar(ours="skip 10,000 at world 64, accel", base="skip 10,000 at world 64, accelerate", limit=0.02),
    ]
    return report("samplers", _inside("samplers", rounds), bars)


def loaders(rounds: int) -> bool:
    """What a batch costs over the plain loader's, of a data set that can be indexed and of a stream."""
    bars = [
        Bar(ours=f"{kind}, accel over plain", base=f"{kind}, accelerate over plain", limit=1)
        for kind in ("Rows", "Stream")
    ]
    bars += [
        Bar(ours=f"{kind}, 2 workers, accel", base=f"{kind}, 2 workers, plain", limit=1.1)
        for kind in ("Rows", "Stream")
    ]
    return report("loaders", _inside("loaders", rounds), bars)


def dispatch(rounds: int) -> bool:
    """A round of batches that the main process reads for a world of two: three tensors of int64 each.

    Beside Accelerate's, and beside torch's `scatter_object_list`, which would do without a format of our own.
    """
    seconds = _inside("loaders", rounds, processes=2)
    others = {"accelerate": 1, "scatter_object_list": 1 / 1.2}
    bars = [
        Bar(ours=f"16 × {width}, accel", base=f"16 × {width}, {other}", limit=limit)
        for other, limit in others.items()
        for width in (32, 512, 8192)
    ]
    return report("dispatch", seconds, bars)


def collectives(rounds: int) -> bool:
    """Gathering a nest of 20 small tensors in a world of two."""
    bars = [
        Bar(ours="gather of 20, accel", base="gather of 20, accelerate", limit=0.1),
        Bar(ours="gather of 20, accel", base="one flat all_gather", limit=1.1),
    ]
    return report("collectives", _inside("collect", rounds, processes=2), bars)


def sharded(rounds: int) -> bool:
    """FSDP 2 in a world of two: steps, `prepare`, checkpoints, and memory where the main process alone has weights."""
    found = _inside("sharded", rounds, processes=2)
    bars = [
        Bar(ours="shortest step, accel", base="shortest step, by hand", limit=1.03),
        Bar(ours="shortest step, accel", base="shortest step, accelerate", limit=1.0),
        Bar(ours="prepare, accel", base="prepare, by hand", limit=1.2),
        Bar(ours="save, accel", base="save, dcp", limit=0.5),
        Bar(ours="load, accel", base="load, dcp", limit=0.7),
        Bar(ours="GB more on another process", base="GB of its share and two units", limit=1.0),
    ]
    return report("sharded", found, bars)


def parallel(rounds: int) -> bool:
    """Split layers (TP 2) and split sequences (CP 2) in a world of two: steps, beside torch's own APIs by hand."""
    return _beside_by_hand("parallel", ("TP 2", "CP 2"), rounds)


def engines(rounds: int) -> bool:
    """DeepSpeed (ZeRO 2 and 3) and torchao's float8 in a world of two: steps, beside their own interfaces by hand."""
    return _beside_by_hand("engines", ("ZeRO 2", "ZeRO 3", "float8"), rounds)


def _beside_by_hand(name: str, kinds: Sequence[str], rounds: int) -> bool:
    seconds: dict[str, list[float]] = {}
    for kind in kinds:
        seconds |= _inside(name, rounds, processes=2, BENCHMARK_KIND=kind)
    bars = [Bar(ours=f"{kind}, accel", base=f"{kind}, by hand", limit=1.03) for kind in kinds]
    return report(name, seconds, bars)


def imports(rounds: int) -> bool:
    """Importing the runtime: at most 5 % over importing torch."""
    python = [sys.executable, "-c"]
    ours, base = "from accel import Accelerator", "import torch"
    measures = {text: wall([*python, text]) for text in (base, ours, "from accelerate import Accelerator")}
    return report("imports", interleaved(measures, rounds), [Bar(ours=ours, base=base, limit=1.05)])


def checkpoints(rounds: int) -> bool:
    """Saving and loading 630 MB: ours is on the disk when `save_state` returns, Accelerate's is in the page cache."""
    with tempfile.TemporaryDirectory() as folder:
        memory: dict[str, list[float]] = {}
        measures = {
            f"{what}, {package}": _checkpoint(package, what, Path(folder), memory)
            for what in ("save", "load", "load from the disk", "async", "again")
            for package in ("accel", "accelerate")
            if what not in ("async", "again") or package == "accel"
        }
        seconds = interleaved(measures, rounds)
    seconds.update({f"{name}, GB more memory": values[1:] for name, values in memory.items()})
    allowed = "GB of the largest tensor and 64 MB"
    seconds[allowed] = [2012 * 2012 * 4 / 1e9 + 0.064] * rounds  # the weight of a layer of the script's model
    bars = [
        Bar(ours="save, accel", base="save, accelerate", limit=0.35),
        Bar(ours="load, accel", base="load, accelerate", limit=1),
        Bar(ours="load from the disk, accel", base="load from the disk, accelerate", limit=1),
        Bar(ours="async, accel", base="save, accelerate", limit=0.3),
        Bar(ours="again, accel", base="save, accelerate", limit=0.3),
        Bar(ours="load, accel, GB more memory", base="load, accelerate, GB more memory", limit=0.3),
        Bar(ours="load, accel, GB more memory", base=allowed, limit=1),
        Bar(ours="load from the disk, accel, GB more memory", base=allowed, limit=1),
    ]
    return report("checkpoints", seconds, bars)


def _set_cached(place: Path, cached: bool) -> None:
    """Bring the files of a checkpoint into the page cache, or out of it."""
    for path in filter(Path.is_file, place.rglob("*")):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            while cached and file.read(1 << 20):
                pass


def _checkpoint(package: str, what: str, folder: Path, memory: dict[str, list[float]]) -> Callable[[], float]:
    place = folder / (what if what in ("async", "again") else package)

    def measure() -> float:
        if what.startswith("load"):
            _set_cached(place, what == "load")
        else:
            for old in (place, place.with_name(f"{place.name}-first")):
                shutil.rmtree(old, ignore_errors=True)
            os.sync()  # else one pays for what the one before it left in the page cache
        command = [sys.executable, "-m", "benchmarks.scripts.checkpoints", package, what.split()[0], str(place)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode != 0:
            raise SystemExit(f"{command} failed:\n{done.stderr[-2000:]}")
        found = json.loads(done.stdout.splitlines()[-1])
        memory.setdefault(f"{what}, {package}", []).append(found["memory"] / 1e9)
        blocked: float = found["blocked"]
        return blocked

    return measure
