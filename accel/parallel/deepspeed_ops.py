"""Building of DeepSpeed's C++ extensions: once for an environment, by one process, within a time limit.

torch marks a build by a lock file, which a killed process leaves behind, so that every later run waits for it forever.
Here the kernel's lock of a file, which ends with its process, protects the builds, so that torch's file is stale.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import torch

from accel.errors import ArgumentError
from accel.logging import get_logger
from accel.world.versions import installed_version

logger = get_logger(__name__)

TIME_LIMIT = 900.0  # seconds; a build takes one or two minutes on a free machine
_VARIABLE = "TORCH_EXTENSIONS_DIR"
_BUILD = "from deepspeed.ops.op_builder import {0}; {0}().load(verbose=True)"


def load_extension(op: str, builder: str, limit: float | None = None) -> None:
    """Load the extension ``op`` by DeepSpeed's class ``builder`` into this process; build it first if need be.

    Meanwhile the other processes of this machine that load it wait. Raises `ArgumentError` with the compiler's last
    line if the build fails or takes longer than ``limit`` seconds (default: `TIME_LIMIT`).
    """
    from deepspeed.ops import op_builder

    folder = extensions()
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f"{op}.lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (folder / op / "lock").unlink(missing_ok=True)  # torch's, of a build whose process is gone
        finished = folder / op / "accel-built"
        if not finished.exists():
            logger.warning(f"building DeepSpeed's {op} in {folder}, once for this environment", main_process_only=False)
            _build(op, builder, TIME_LIMIT if limit is None else limit)
            finished.touch()
        getattr(op_builder, builder)().load(verbose=False)  # the engine gets this one, and takes no lock


def extensions() -> Path:
    """Return the folder of extensions for these versions, below ``TORCH_EXTENSIONS_DIR``, else in the environment.

    Sets the variable, which torch reads.
    """
    versions = f"py{sys.version_info.major}{sys.version_info.minor}-torch{torch.__version__}-deepspeed"
    name = f"{versions}{installed_version('deepspeed')}"
    current = os.environ.get(_VARIABLE)
    if current is not None and Path(current).name == name:
        return Path(current)
    root = Path(sys.prefix) / "share" / "accel" / "torch_extensions"
    with suppress(OSError):
        root.mkdir(parents=True, exist_ok=True)
    if current is not None or not os.access(root, os.W_OK):
        root = Path(current or Path.home() / ".cache" / "accel" / "torch_extensions")
    os.environ[_VARIABLE] = str(root / name)
    return root / name


def _build(op: str, builder: str, limit: float) -> None:
    """Build in a process of its own, whose compilers end with it."""
    command = [sys.executable, "-c", _BUILD.format(builder)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=limit)
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        if isinstance(error, subprocess.TimeoutExpired):
            raise ArgumentError(f"{_failed(op)} took more than {limit:.0f} s: {_remedy(op)}") from None
        raise
    if process.returncode:
        lines = [line.strip() for line in output.splitlines() if "error" in line.lower()]
        raise ArgumentError(f"{_failed(op)} failed: {lines[0] if lines else 'no message'}: {_remedy(op)}")


def _failed(op: str) -> str:
    return f"DeepSpeed: building {op}"


def _remedy(op: str) -> str:
    if op == "async_io":
        return "install libaio-dev, g++ and ninja, or offload to the CPU"
    return (
        "install g++ and ninja, or set zero_force_ds_cpu_optimizer to false in DeepSpeed's configuration, which keeps "
        "torch's optimizer"
    )
