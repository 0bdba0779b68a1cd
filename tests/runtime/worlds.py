"""Runs functions in real worlds of processes: forked from a server that has imported torch once, joined over gloo.

A test module, or its package, names in ``PRELOAD`` modules that take seconds to import: they too are imported once.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import pickle
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import Any
from unittest.mock import patch

from tests.ports import free_port as free_port

os.environ.setdefault("OMP_NUM_THREADS", "1")
_context = multiprocessing.get_context("forkserver")
_PRELOAD = ("torch", "torch._dynamo", "accel.accelerator", "safetensors.torch")
_servers: dict[tuple[str, ...], forkserver.ForkServer] = {}

_OURS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_PATIENCE = 240


@dataclass(frozen=True)
class Outcome:
    """What became of one process: the value its function returned, or the error it raised."""

    value: Any = None
    error: str | None = None
    message: str = ""
    trace: str = ""


def world_env(rank: int, size: int, port: int) -> dict[str, str]:
    """The variables a launcher gives to process ``rank`` of ``size`` on this machine."""
    if size == 1:
        return {}
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "CUDA_VISIBLE_DEVICES": "",  # a machine with fewer GPUs than ranks would refuse some; a test may say otherwise
    }


def clean_env(**more: str) -> dict[str, str]:
    """This process's environment without a launcher's variables."""
    kept = {k: v for k, v in os.environ.items() if k not in _OURS and not k.startswith("ACCELERATE_")}
    return {**kept, **more}


def _child(pipe: Connection, env: Mapping[str, str], function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ.clear()
    os.environ.update(env)
    warnings.simplefilter("error")
    try:
        outcome = Outcome(value=function(*args))
    except Exception as error:
        sys.last_value = error  # as an interpreter does that ends by an uncaught exception
        outcome = Outcome(error=type(error).__name__, message=str(error), trace=traceback.format_exc())
    # By value: what multiprocessing makes of a tensor is a handle that the other side must fetch before this one ends.
    pipe.send_bytes(pickle.dumps(outcome))
    pipe.close()
    atexit._run_exitfuncs()


def outcomes(
    function: Callable[..., Any], *args: Any, processes: int = 2, env: Mapping[str, str] | None = None
) -> list[Outcome]:
    """Run ``function(*args)`` in each process of a new world; returns what became of each, in rank order."""
    port, server = free_port(), _server(function)
    running = []
    for rank in range(processes):
        ours, theirs = _context.Pipe(duplex=False)
        variables = clean_env(**{**world_env(rank, processes, port), **(env or {})})
        process = _context.Process(target=_child, args=(theirs, variables, function, args))
        with patch.object(forkserver, "connect_to_new_process", server.connect_to_new_process):
            process.start()
        theirs.close()
        running.append((process, ours))
    try:
        return [_await(pipe) for _, pipe in running]
    finally:
        for process, _ in running:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()


def _server(function: Callable[..., Any]) -> forkserver.ForkServer:
    """The server whose processes have the modules that the tests of ``function`` name."""
    module = getattr(function, "__module__", "")
    named = (getattr(sys.modules.get(name), "PRELOAD", ()) for name in (module, module.rpartition(".")[0]))
    modules = (*_PRELOAD, *next(filter(None, named), ()))
    if modules not in _servers:
        _servers[modules] = forkserver.ForkServer()
        _servers[modules].set_forkserver_preload(list(modules))
    return _servers[modules]


def _await(pipe: Connection) -> Outcome:
    try:
        if pipe.poll(_PATIENCE):
            outcome: Outcome = pickle.loads(pipe.recv_bytes())
            return outcome
        return Outcome(error="Timeout", message=f"nothing came back within {_PATIENCE} s")
    except EOFError:
        return Outcome(error="Died", message="the process ended without a word")


def run(
    function: Callable[..., Any], *args: Any, processes: int = 2, env: Mapping[str, str] | None = None
) -> list[Any]:
    """Like `outcomes`, for functions that must not fail; returns their values."""
    ended = outcomes(function, *args, processes=processes, env=env)
    failed = [
        f"process {rank}: {o.error}: {o.message}\n{o.trace}" for rank, o in enumerate(ended) if o.error is not None
    ]
    assert not failed, "\n".join(failed)
    return [outcome.value for outcome in ended]


def run_one(function: Callable[..., Any], *args: Any, env: Mapping[str, str] | None = None) -> Any:
    """Run ``function(*args)`` in a fresh process that is a world by itself."""
    return run(function, *args, processes=1, env=env)[0]
