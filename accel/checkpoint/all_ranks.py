"""Run a function on all ranks; if it fails on any, raise on all."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from accel.errors import AccelError, CheckpointError, CollectiveError
from accel.state import PartialState

Result = TypeVar("Result")
_TIMEOUT = timedelta(minutes=5)


def run_on_all_ranks(operation: str, action: Callable[[], Result], group: Any = None) -> list[Result]:
    """Run ``action`` on every process and return all results, in rank order; they must be picklable.

    If it fails on any process, every process raises `CheckpointError` naming that process, so none is left
    waiting. ``group`` is the process group to use, by default the world's.
    """
    result: tuple[Result | None, str | None]
    cause: Exception | None = None
    try:
        result = action(), None
    except Exception as error:
        cause = error
        result = None, str(error) if isinstance(error, AccelError) else f"{type(error).__name__}: {error}"
    gathered = _all_gather(result, group)
    failed = [(rank, message) for rank, (_, message) in enumerate(gathered) if message is not None]
    if failed:
        rank, message = failed[0]
        location = f"process {rank}: " if len(gathered) > 1 else ""
        raise CheckpointError(f"{operation}: {location}{message}") from cause
    return [value for value, _ in gathered]


def _all_gather(value: Any, group: Any) -> list[Any]:
    state = PartialState()
    if not state.use_distributed:
        return [value]
    gathered: list[Any] = [None] * state.num_processes
    dist.all_gather_object(gathered, value, group=group)
    return gathered


def check_all_ranks_present(operation: str, group: Any) -> None:
    """Raise `CollectiveError` unless all processes call this within five minutes; rank 0 names the missing ones.

    ``group``: a `new_gloo_group` with no other operation in progress; with None (a world of one) nothing happens.
    """
    if group is None:
        return
    try:
        dist.monitored_barrier(group, _TIMEOUT, wait_all_ranks=True)
    except RuntimeError as error:
        match = re.search(r"Ranks ([\d, ]+) failed", str(error))
        subject = f"process {match[1]} did not" if match else "some process did not"
        raise CollectiveError(
            f"{operation} must be called by all processes, but {subject}: is the call in code for one process only?"
        ) from error


def new_gloo_group() -> Any:
    """Create a gloo process group of all processes for background work; return ``None`` in a world of one.

    All processes must call it. Its collectives never mix with those of the default group.
    """
    return dist.new_group(backend="gloo") if PartialState().use_distributed else None
