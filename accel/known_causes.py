"""Causes and remedies of errors by their text, for failure reports and for uncaught exceptions."""

from __future__ import annotations

import os
import re
import sys
from types import TracebackType

EXPLAIN = "ACCEL_EXPLAIN_ERRORS"  # set by the launcher for a program that replaces it

# `schedulers/kubernetes/status/pod_states.py` matches parts of the causes.
_CAUSES: tuple[tuple[str, str, str, str], ...] = (
    # pattern in the rank's error, reason, cause, remedy
    (r"CUDA out of memory|OutOfMemoryError|HIP out of memory", "out_of_memory", "the GPU's memory is full",
     "smaller batch per process, gradient accumulation, mixed precision, or activation checkpointing"),
    (r"DefaultCPUAllocator: can't allocate memory|^MemoryError", "out_of_memory", "the machine's memory is full",
     "smaller batches or fewer data-loader workers, or request more memory (--memory)"),
    (r"EADDRINUSE|[Aa]ddress already in use", "rendezvous", "a port that the program needs is in use",
     "leave the port to the launcher (no --main_process_port), or name a free one"),
    (r"NCCL.*timeout|Watchdog caught collective operation timeout|ProcessGroupNCCL.*[Tt]imeout", "exit_code",
     "not all ranks joined a collective in time",
     "look for a slow rank or one in another branch; TORCH_NCCL_DUMP_ON_TIMEOUT=1 names the collective"),
    (r"Timed out waiting .*ms|Timed out after \d+ seconds|[Ss]tore.*timed? ?out", "rendezvous",
     "a rank timed out waiting for other ranks",
     "look for a rank that ended early or does not call the same collective"),
    (r"SetupError: the function was pickled by Python", "setup", "the job's Python cannot load the function",
     "run it with that version of Python, and install cloudpickle there (accel-launch[functions])"),
    (r"ModuleNotFoundError: No module named '([^']+)'", "setup", "a package is missing where the job ran",
     "install it in the Python that runs the job ({python}), or ship it with the code"),
    (r"ImportError", "setup", "a package is installed but incompatible", "compare its version with the program's"),
    (r"No space left on device", "exit_code", "a disk is full", "free some space where the program writes"),
    (r"Too many open files", "exit_code", "the limit of open files is reached",
     "raise it (ulimit -n), or torch.multiprocessing.set_sharing_strategy('file_system')"),
    (r"device-side assert triggered", "exit_code", "an index is out of range on the GPU, or an assertion failed there",
     "CUDA_LAUNCH_BLOCKING=1 shows where; often a label beyond the outputs, or a token beyond the embeddings"),
    (r"invalid device ordinal", "setup", "the program uses a GPU that this process does not see",
     "use accelerator.device, or cuda:N with N below torch.cuda.device_count()"),
    (r"Expected all tensors to be on the same device", "exit_code", "tensors of one operation are on different devices",
     "move them to accelerator.device, or pass model and loaders to accelerator.prepare"),
    (r"Duplicate GPU detected", "setup", "two ranks use the same GPU, which NCCL refuses",
     "start at most one rank for each GPU, and leave the choice of the device to Accelerator()"),
    (r"CUDA error: no kernel image|CUDA driver version is insufficient", "setup",
     "this torch does not fit the GPU or driver",
     "install the torch build that is made for this driver (https://pytorch.org/get-started/locally/)"),
)  # fmt: skip


def find_known_cause(error_text: str) -> tuple[str, str, str] | None:
    """Return reason, cause and remedy for the text of an error (type and message), or None if it is unknown."""
    for pattern, reason, cause, remedy in _CAUSES:
        if re.search(pattern, error_text):
            return reason, cause, remedy.replace("{python}", sys.executable)
    return None


def explain_uncaught_exceptions() -> None:
    """Print cause and remedy, if known, below the traceback of an exception that ends this process.

    Do nothing unless the launcher has requested it; processes that this one starts do not inherit the request.
    """
    if not os.environ.pop(EXPLAIN, ""):
        return
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        previous(kind, error, trace)
        known = find_known_cause(f"{kind.__name__}: {error}")
        if known is not None and sys.stderr is not None:
            print(f"accel launch: the program failed\n  cause:  {known[1]}\n  remedy: {known[2]}", file=sys.stderr)

    sys.excepthook = hook
