"""Run a function on all ranks; if it fails on any, raise on all."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from accel import collectives
from accel.errors import AccelError, CheckpointError, CollectiveError
from accel.state import PartialState

Result = TypeVar("Result")
_ROLL_CALL = timedelta(seconds=20)
_calls = itertools.count()


def run_on_all_ranks(
    operation: str, action: Callable[[], Result], group: Any = None, *, alone: bool = False
) -> list[Result]:
    """Run ``action`` on every process and return all results, in rank order; they must be picklable.

    If it fails on any process, every process raises `CheckpointError` naming that process, so none is left
    waiting. ``group`` is the process group to use, by default the world's; with ``alone`` there is no other process.
    """
    result: tuple[Result | None, str | None]
    cause: Exception | None = None
    try:
        result = action(), None
    except Exception as error:
        cause = error
        result = None, str(error) if isinstance(error, AccelError) else f"{type(error).__name__}: {error}"
    gathered: list[Any] = [result] if alone else collectives.all_objects(result, group=group)
    failed = [(rank, message) for rank, (_, message) in enumerate(gathered) if message is not None]
    if failed:
        rank, message = failed[0]
        location = f"process {rank}: " if len(gathered) > 1 else ""
        raise CheckpointError(f"{operation}: {location}{message}") from cause
    return [value for value, _ in gathered]


def call_roll(operation: str) -> None:
    """Raise `CollectiveError` on all processes that make this call, now or later, unless every process does.

    The main process waits 20 seconds for the others. They wait for it up to the process group's timeout, as it may
    have work of its own.
    """
    state = PartialState()
    if not state.use_distributed:
        return
    store, number = dist.distributed_c10d._get_default_store(), next(_calls)
    verdict = f"accel/call/{number}"
    keys = [f"{verdict}/{operation}/{rank}" for rank in range(state.num_processes)]
    if state.is_main_process:
        with suppress(RuntimeError):  # the time is up
            store.wait(keys[1:], _ROLL_CALL)
        arrived = store.check(keys[1:])
        missing = [str(rank) for rank, key in enumerate(keys) if rank and not arrived and not store.check([key])]
        problem = f"process {', '.join(missing)} did not within {_ROLL_CALL.seconds} s" if missing else ""
        store.set(verdict, problem)
        if not missing:
            store.delete_key(f"accel/call/{number - 1}")  # every process has read it
    else:
        store.set(keys[state.process_index], "")
        try:
            problem = store.get(verdict).decode()
            store.delete_key(keys[state.process_index])
        except RuntimeError:
            problem = "the main process did not"
    if problem:
        raise CollectiveError(
            f"every process must call {operation}, but {problem}: call it outside of code for one process, and "
            "wait_for_everyone() before it if processes arrive far apart"
        )
