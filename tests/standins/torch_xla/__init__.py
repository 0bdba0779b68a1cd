"""A stand-in for torch_xla 2.9: names, signatures and behaviour of what accel uses, on processes with CPU tensors.

As there, `launch` starts a process a device by a pool whose workers run the function in a thread, takes a rank of
torchrun's for one of its own, and the backend `xla` of torch.distributed has the rendezvous `xla://`.
`STANDIN_DEVICES` says how many devices there are, `STANDIN_CORES` how many a process has.
"""

from __future__ import annotations

import concurrent.futures
import functools
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__version__ = "2.9.0"
syncs = 0


def device(index: int | None = None) -> torch.device:
    import torch  # here: the tests of the launcher need none

    return torch.device("cpu")


def sync(wait: bool = False, reset_scope: bool = True) -> None:
    global syncs
    syncs += 1


def launch(
    fn: Callable[..., Any], args: tuple[Any, ...] = (), start_method: str = "spawn", debug_single_process: bool = False
) -> None:
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torch.distributed.is_torchelastic_launched()
        fn(int(os.environ["LOCAL_RANK"]), *args)
        return
    count = 1 if debug_single_process else int(os.environ.get("STANDIN_DEVICES", "1"))
    with tempfile.TemporaryDirectory() as folder:
        os.environ["STANDIN_FOLDER"] = folder
        with concurrent.futures.ProcessPoolExecutor(
            max_workers=count, mp_context=multiprocessing.get_context(start_method)
        ) as pool:
            list(pool.map(functools.partial(_run, count, fn, args), range(count)))


def _run(count: int, fn: Callable[..., Any], args: tuple[Any, ...], rank: int) -> None:
    folder = os.environ["STANDIN_FOLDER"]
    open(os.path.join(folder, str(rank)), "w").close()
    while len(os.listdir(folder)) < count:  # the devices of a slice come up together: one process has one
        time.sleep(0.01)
    os.environ.update(PJRT_LOCAL_PROCESS_RANK=str(rank), PJRT_LOCAL_PROCESS_COUNT=str(count))
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        thread.submit(fn, rank, *args).result()
