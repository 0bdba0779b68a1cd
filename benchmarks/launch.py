"""`accel launch` beside `torchrun` and `accelerate launch`: from the command to the first all-reduce in every rank."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from .measure import Bar, interleaved, report, wall

SCRIPTS = Path(__file__).parent / "scripts"
BIN = Path(sys.executable).parent
RANKS = 8
PORT = "{port}"  # replaced by a free one before every run: neither peer takes 0 for "any" in every mode


def gang(rounds: int) -> bool:
    """8 ranks. `accelerate launch --cpu` would start one, silently; `--multi_gpu` makes it start all 8 here."""
    torchrun = [str(BIN / "torchrun"), "--nproc_per_node", str(RANKS), "--master_port", PORT]
    peer = [str(BIN / "accelerate"), "launch", "--multi_gpu", "--num_processes", str(RANKS), "--main_process_port",
            PORT, "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no",
            "--num_cpu_threads_per_process", "1"]  # fmt: skip
    measures = {
        "accel launch": _to_first_all_reduce(_ours()),
        "torchrun": _to_first_all_reduce(torchrun),
        "accelerate launch": _to_first_all_reduce(peer),
    }
    bars = [Bar(ours="accel launch", base="torchrun", limit=0.4)]
    return report("gang", interleaved(measures, rounds), bars)


def restart(rounds: int) -> bool:
    """8 ranks of which one is killed: from its death to the first all-reduce after the restart; at most a start's time.

    Without the peers: the ranks that torchrun 2.13 restarts fail to connect over gloo more often than not.
    """
    measures = {
        "start": _to_first_all_reduce(_ours()),
        "restart": _back_after_a_death([*_ours(), "--max_restarts", "1"]),
    }
    return report("restart", interleaved(measures, rounds), [Bar(ours="restart", base="start", limit=1)])


def _ours() -> list[str]:
    return [str(BIN / "accel"), "launch", "--num_processes", str(RANKS), "--num_cpu_threads_per_process", "1"]


def single(rounds: int) -> bool:
    """One process: the launcher's cost over running the script directly."""
    script = str(SCRIPTS / "import_torch.py")
    peer = [str(BIN / "accelerate"), "launch", "--cpu", "--num_processes", "1", "--num_machines", "1",
            "--mixed_precision", "no", "--dynamo_backend", "no", script]  # fmt: skip
    measures = {
        "python script": wall([sys.executable, script]),
        "accel launch": wall([str(BIN / "accel"), "launch", "--num_processes", "1", script]),
        "torchrun": lambda: wall(
            _with_port([str(BIN / "torchrun"), "--nproc_per_node", "1", "--master_port", PORT, script])
        )(),
        "accelerate launch": wall(peer),
    }
    bars = [Bar(ours="accel launch", base="python script", limit=1.15)]
    return report("single", interleaved(measures, rounds), bars)


def _to_first_all_reduce(launcher: list[str]) -> Callable[[], float]:
    def measure() -> float:
        started = time.time()
        stamps = _stamps(launcher, "all_reduce.py")
        return max(stamps.values()) - started

    return measure


def _back_after_a_death(launcher: list[str]) -> Callable[[], float]:
    def measure() -> float:
        stamps = _stamps(launcher, "die_once.py")
        return max(stamps.values()) - stamps["died"]

    return measure


def _stamps(launcher: list[str], script: str) -> dict[str, float]:
    """The times that the ranks of ``script`` have written down, by name."""
    with tempfile.TemporaryDirectory() as folder:
        command = [*_with_port(launcher), str(SCRIPTS / script), folder]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=_environment())
        stamps = {path.name: float(path.read_text()) for path in Path(folder).iterdir()}
        if done.returncode != 0 or not stamps.keys() >= {str(rank) for rank in range(RANKS)}:
            raise SystemExit(f"{command} failed:\n{done.stderr.decode(errors='replace')[-2000:]}")
        return stamps


def _with_port(command: list[str]) -> list[str]:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return [word.replace(PORT, str(sock.getsockname()[1])) for word in command]


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}
