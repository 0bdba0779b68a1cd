"""Progress bars, one for all processes."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from accel.errors import ArgumentError
from accel.state import PartialState


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """Return `tqdm.auto.tqdm`, shown only on the main process of each node unless ``main_process_only`` is false.

    On the other processes the bar is disabled and iterates at no cost. Raises `ArgumentError` for a bool as the
    first argument, where older scripts have ``main_process_only``, and `ImportError` without tqdm.
    """
    if args and isinstance(args[0], bool):
        raise ArgumentError(f"tqdm({args[0]}, …): write it as tqdm(…, main_process_only={args[0]})")
    try:
        bar = import_module("tqdm.auto").tqdm
    except ImportError:
        raise ImportError("tqdm is not installed: pip install tqdm") from None
    hidden = kwargs.pop("disable", False)
    if main_process_only and not hidden:
        hidden = not PartialState().is_local_main_process
    return bar(*args, **kwargs, disable=hidden)
