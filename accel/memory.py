"""Memory of devices: releasing it, and finding the batch size that fits."""

from __future__ import annotations

import gc
import inspect
import logging
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, overload

import torch

from accel.errors import CallError, StateError
from accel.state import PartialState

Function = Callable[..., Any]

# Messages of libraries when memory runs out, or is too little for a kernel to work in.
_SIGNS = (
    " out of memory.",
    "CUDA out of memory",
    "MPS backend out of memory",
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED.",
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed",
)
_UNITS = ("bytes", "KB", "MB", "GB", "TB")
_attempts = 0


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Release memory that torch has cached but does not use; with ``garbage_collection`` collect garbage first.

    Initializes no device. Collecting takes tens of milliseconds: not for every step.
    """
    if garbage_collection:
        gc.collect()
    for kind in _kinds_in_use():
        getattr(torch, kind).empty_cache()


def _kinds_in_use() -> list[str]:
    device = PartialState._shared_state.get("device")
    candidates = {"cuda", "xpu"} | ({device.type} if device is not None else set())
    kinds = []
    for kind in sorted(candidates):
        module = getattr(torch, kind, None)
        started = getattr(module, "is_initialized", lambda: True)
        if hasattr(module, "empty_cache") and started():
            kinds.append(kind)
    return kinds


def release_memory(*objects: Any) -> list[Any]:
    """Release the memory of ``objects``; return as many ``None``, to be assigned to their names.

    ``a, b = release_memory(a, b)``: the assignment frees objects without other references. Their memory returns to
    the device at the next `clear_device_cache`.
    """
    released: list[Any] = [None] * len(objects)
    del objects
    clear_device_cache(garbage_collection=True)
    return released


def should_reduce_batch_size(exception: BaseException) -> bool:
    """Return True if ``exception`` means that a device or the host has run out of memory."""
    if isinstance(exception, (torch.OutOfMemoryError, MemoryError)):
        return True
    if not isinstance(exception, RuntimeError) or len(exception.args) != 1:
        return False
    return any(marker in str(exception.args[0]) for marker in _SIGNS)


@overload
def find_executable_batch_size(
    function: Function, starting_batch_size: int = 128, reduce_batch_size_fn: Callable[[], int] | None = None
) -> Function: ...


@overload
def find_executable_batch_size(
    function: None = None, starting_batch_size: int = 128, reduce_batch_size_fn: Callable[[], int] | None = None
) -> Callable[[Function], Function]: ...


def find_executable_batch_size(
    function: Function | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
) -> Any:
    """Decorate a function to be called with the largest batch size that fits in memory.

    The function's first parameter is the batch size. The decorator passes it, and callers leave it out. The first
    call uses ``starting_batch_size``; each time memory runs out, the next uses 0.9 of the size, or the result of
    ``reduce_batch_size_fn()``. A later call begins with the size that succeeded.

    Processes of one world shrink together: if any runs out of memory, all call again with the same size. They
    agree once each has returned or run out of memory. A process that waits in a collective for one out of memory
    cannot be called back: it ends with a `StateError` that explains this when the collective times out. Objects
    prepared for training must be created inside the function.

    Raises `CallError` (a `TypeError`) if a caller passes a batch size, and `StateError` if none fits.
    """
    if function is None:
        return partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
        )
    call, size = function, starting_batch_size
    parameters = list(inspect.signature(function).parameters.values())

    @wraps(function)
    def search(*args: Any, **kwargs: Any) -> Any:
        nonlocal size
        _reject_batch_size(call, parameters, args)
        clear_device_cache(garbage_collection=True)
        while size > 0:
            result, ran_out = _attempt(partial(call, size, *args, **kwargs))
            if not _any_process(ran_out):
                return result
            del result
            clear_device_cache(garbage_collection=True)
            smaller = reduce_batch_size_fn() if reduce_batch_size_fn is not None else int(size * 0.9)
            logging.getLogger(__name__).info("out of memory at batch size %d, going on with %d", size, smaller)
            size = smaller
        raise StateError(f"{call.__name__} ran out of memory at every batch size from {starting_batch_size} down to 1")

    return search


def _reject_batch_size(function: Function, parameters: list[inspect.Parameter], args: tuple[Any, ...]) -> None:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if any(parameter.kind is inspect.Parameter.VAR_POSITIONAL for parameter in parameters):
        return
    names = [parameter.name for parameter in parameters if parameter.kind in kinds]
    if len(names) >= len(args) + 1:
        return
    params = ", ".join(names[1:])
    raise CallError(
        f"{function.__name__} takes its batch size from find_executable_batch_size: call {function.__name__}({params})"
    )


def _attempt(call: Callable[[], Any]) -> tuple[Any, bool]:
    """Return the result of ``call``, and True if it ran out of memory; any other error is raised."""
    try:
        return call(), False
    except Exception as error:
        if not should_reduce_batch_size(error):
            _report_rank_out_of_memory(error)
            raise
    # Out of the except clause, so that the traceback, which holds the call's tensors, is gone.
    return None, True


def _any_process(ran_out: bool) -> bool:
    """Return True if any process of the world ran out of memory. Every process must call this equally often.

    Uses the world's store, not a collective: processes that ran out of memory in mid-step have called fewer
    collectives than the others, so the next one would not match.
    """
    global _attempts
    world = _store()
    if world is None:
        return ran_out
    store, size, rank = world
    _attempts += 1
    keys = [_key(_attempts, peer) for peer in range(size)]
    store.set(keys[rank], "1" if ran_out else "0")
    store.wait(keys)
    exhausted = any(store.get(key) == b"1" for key in keys)
    # Rank 0 may host the store: it waits until the others have read.
    if rank:
        store.set(f"{keys[rank]}/read", "")
    else:
        store.wait([f"{key}/read" for key in keys[1:]])
    return exhausted


def _report_rank_out_of_memory(error: Exception) -> None:
    world = _store()
    if world is None:
        return
    store, size, _ = world
    for rank in range(size):
        key = _key(_attempts + 1, rank)
        if store.check([key]) and store.get(key) == b"1":
            raise StateError(
                f"process {rank} ran out of memory while this one waited for it in a collective ({error}): "
                "begin with a smaller batch size"
            ) from error


def _store() -> tuple[Any, int, int] | None:
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    size, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    return None if size == 1 else (torch.distributed.distributed_c10d._get_default_store(), size, rank)


def _key(attempt: int, rank: int) -> str:
    return f"accel/memory/{attempt}/{rank}"


def convert_bytes(size: float) -> str:
    """Return ``size`` in the largest unit in which it is at least 1, with at most two decimals: ``"1.5 GB"``."""
    for unit in _UNITS:
        if size < 1024:
            return f"{round(size, 2)} {unit}"
        size /= 1024
    return f"{round(size, 2)} PB"
