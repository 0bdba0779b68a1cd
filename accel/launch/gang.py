"""Several ranks on this node: guard, fork server, agent and signals put together, and everything ended at the end."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch.distributed.elastic.multiprocessing  # the agent's errors and signals
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters

from schedulers.processes import descendants, end_all

from . import guard, report
from .agent import GangAgent, RankSettings
from .errors import LaunchError
from .forkserver import ForkServer, ServerGone
from .node import Launch, die_of, log_path, recorder
from .rendezvous import DEFAULT_TIMEOUT_S, GangRendezvous
from .tee import Tee
from .worker import WARNINGS

# What nearly every training script imports next: once here instead of once a rank.
PRELOADED = ("torch.nn.parallel", "torch.utils.data", "torch.optim")

_ENDING = {signal.SIGTERM: signal.SIGTERM, signal.SIGINT: signal.SIGINT, signal.SIGHUP: signal.SIGTERM}


class Signals:
    """What this process is told, remembered until a place where it can be acted on.

    Raising from a handler could cut a message to the fork server in two; so the handlers only take note, and every
    wait is in slices that call `check`. Torch's own waits (c10d) are not: there the handler raises.
    """

    def __init__(self, server: ForkServer) -> None:
        self._server = server
        self._received: int | None = None
        self._acting = False
        self.raise_at_once = False
        for signum in _ENDING:
            signal.signal(signum, self._on_end)
        for signum in WARNINGS:
            signal.signal(signum, lambda received, _: self._server.warn(received))

    def _on_end(self, signum: int, _: FrameType | None) -> None:
        if self._acting:
            with contextlib.suppress(ServerGone):
                self._server.end(signal.SIGTERM, 0)  # asked twice: no more grace
            return
        self._received = signum
        if self.raise_at_once:
            self.check()

    def check(self) -> None:
        """Raises SignalException, once, when this process has been told to end."""
        if self._received is not None and not self._acting:
            self._acting = True
            raise SignalException(f"received {report.signal_name(self._received)}", _ENDING[signal.Signals(self._received)])

    @property
    def received(self) -> int | None:
        return self._received


def run_gang(run: Launch, launch_id: str) -> int:
    """Runs the gang to its end; no process of it is left when this returns."""
    _preload(run)
    keeper = guard.start(launch_id, [os.getpid()])
    server = ForkServer.start(run.program, keeper.pipe, run.grace_s)
    # From here on only the launcher itself: a rank has left through SystemExit, below this frame's feet.
    signals = Signals(server)
    tee = Tee(run.tee, run.log_dir)
    try:
        return _run_agent(run, server, signals, tee)
    finally:
        tee.close()
        server.close()
        end_all(lambda: _left(keeper), grace_s=run.grace_s, reap=_reap)
        keeper.dismiss()


def _preload(run: Launch) -> None:
    if run.spawn or run.program.entry == "command":
        return
    import importlib

    for name in PRELOADED:
        importlib.import_module(name)


def _run_agent(run: Launch, server: ForkServer, signals: Signals, tee: Tee) -> int:
    _quieten_torch()
    handler = _rendezvous(run, signals)
    agent = _agent(run, handler, server, signals, tee)
    try:
        result = agent.run()
    except SignalException as error:
        received = signals.received or int(error.sigval)
        if not run.quiet:
            print(f"accel launch: {error}; all ranks here have been ended", file=sys.stderr, flush=True)
        return die_of(received)
    except ServerGone as error:
        raise LaunchError(str(error)) from None
    finally:
        if isinstance(handler, GangRendezvous):
            with contextlib.suppress(RuntimeError):
                handler.leave()
    if not result.is_failed():
        return 0
    assert agent.failure is not None
    if not run.quiet:
        tee.drain()
        print(agent.failure.text(), file=sys.stderr, flush=True)
    return agent.failure.exit_code


def _quieten_torch() -> None:
    """The elastic agent's own reports: ours say the same, once."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _agent(run: Launch, handler: RendezvousHandler, server: ForkServer, signals: Signals, tee: Tee) -> GangAgent:
    spec = WorkerSpec(
        role=run.role,
        local_world_size=run.processes,
        entrypoint=run.program.argv[0],
        rdzv_handler=handler,
        max_restarts=run.max_restarts,
        monitor_interval=1e-6,  # the agent waits for events where it would otherwise sleep
    )
    settings = RankSettings(
        env={},
        log_of=lambda rank, attempt: log_path(run.log_dir, rank, attempt),
        spawn=run.spawn,
        grace_s=run.grace_s,
    )
    os.environ["TORCH_ELASTIC_WORKER_IDENTICAL"] = "1"  # all machines run equally many ranks: no exchange, no wait
    observe = _observer(run, tee)
    return GangAgent(spec, server, settings, observe=observe, interrupted=signals.check, poll_s=run.monitor_interval_s)


def _observer(run: Launch, tee: Tee) -> Callable[..., None]:
    record = recorder(run.log_dir)

    def observe(event: str, **facts: Any) -> None:
        failure = facts.get("failure")
        if isinstance(failure, report.Failure):
            facts["failure"] = failure.to_json()
            if failure.attempt < run.max_restarts and not run.quiet:
                print(f"{failure.text()}\naccel launch: starting all ranks again ({failure.attempt + 1} of "
                      f"{run.max_restarts} restarts)", file=sys.stderr, flush=True)  # fmt: skip
        if event == "attempt":
            first_rank = run.node_rank * run.processes
            tee.follow([(rank, log_path(run.log_dir, first_rank + rank, facts["attempt"])) for rank in range(run.processes)])
        record(event, **facts)

    return observe


def _rendezvous(run: Launch, signals: Signals) -> RendezvousHandler:
    timeout_s = _timeout(run)
    if run.rdzv_backend == "static":
        return GangRendezvous(
            address=run.address, port=run.port, node_rank=run.node_rank, nodes=run.nodes, run_id=run.run_id,
            timeout_s=timeout_s, interrupted=signals.check,
        )  # fmt: skip
    from torch.distributed.elastic.rendezvous import registry

    signals.raise_at_once = True
    # Shared, one store would serve all attempts, and the second would find the addresses of the first one's dead.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    config = {"join_timeout": str(int(timeout_s)), **run.rdzv_conf}
    return registry.get_rendezvous_handler(
        RendezvousParameters(
            backend="c10d", endpoint=f"{run.address}:{run.port or 29500}", run_id=run.run_id, min_nodes=run.nodes,
            max_nodes=run.max_nodes, **config,
        )  # fmt: skip
    )


def _timeout(run: Launch) -> float:
    text = run.rdzv_conf.get("timeout", run.rdzv_conf.get("join_timeout"))
    try:
        return float(text) if text is not None else DEFAULT_TIMEOUT_S
    except ValueError:
        raise LaunchError(f"--rdzv_conf timeout must be seconds, not {text!r}") from None


def _left(keeper: guard.Guard) -> list[int]:
    own = keeper.identity.pid if keeper.identity else None
    return [pid for pid in descendants(os.getpid()) if pid != own]


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
