"""Several ranks on this node: watchdog, fork server, agent and signal handling, and their shutdown."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousParameters

from schedulers.processes import descendants, end_all, signal_name

from . import failure as failures
from . import watchdog
from .agent import GangAgent, RankSettings
from .console import event_writer, is_repeated_signal, log_path, print_message
from .elastic import ElasticRendezvous, is_this_machine
from .errors import LaunchConfigError, LaunchError, RendezvousFailed
from .fork_server import ForkServer, ServerGone, preload
from .peers import LINGER_S, LOST_AFTER_S, Peers
from .plan import Launch
from .rendezvous import DEFAULT_TIMEOUT_S, GangRendezvous, reach_node_0
from .tee import Tee, parse
from .worker import WARNINGS

_CLUSTER_UPDATE_S = 5.0  # a kubelet checks its containers every second, and may be busy
_TERMINATION_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGALRM)  # SIGALRM: the time limit


class Signals:
    """The launcher's signal handlers. They record the first termination signal; `check` raises it.

    Raising in a handler could cut a message to the fork server in two. So waits are short slices that call
    `check`. torch's own waits (c10d) cannot be sliced: during `raising`, the handler raises.
    """

    def __init__(self, server: ForkServer) -> None:
        self._server = server
        self.received: int | None = None
        self._acting = False
        self._raising = False
        for signum in _TERMINATION_SIGNALS:
            signal.signal(signum, self._on_termination)
        for signum in WARNINGS:
            signal.signal(signum, lambda received, _: self._server.warn(received))

    def _on_termination(self, signum: int, _: FrameType | None) -> None:
        if self.received is not None:
            if not is_repeated_signal(signum):
                self._server.kill_now()  # a second signal ends the grace period
            return
        self.received = signum
        if self._raising:
            self.check()

    @contextlib.contextmanager
    def raising(self) -> Iterator[None]:
        """Make the handlers raise, for waits that cannot be sliced and in which nothing is sent."""
        self._raising = True
        try:
            self.check()
            yield
        finally:
            self._raising = False

    def check(self) -> None:
        """Raise SignalException, once, after a termination signal."""
        if self.received is not None and not self._acting:
            self._acting = True
            signum = signal.SIGTERM if self.received == signal.SIGHUP else signal.Signals(self.received)
            raise SignalException(f"received {signal_name(self.received)}", signum)


def run_gang(run: Launch, launch_id: str) -> int:
    """Run the gang to its end and return its exit code. No process of the gang is left on return."""
    if not run.spawn and run.program.entry != "command":
        preload(run.program)
    watchdog_handle = watchdog.start(launch_id)
    server = ForkServer.start(run.program, watchdog_handle.pipe, run.grace_s, run.job_fds)
    # Only the launcher comes here: a rank is forked inside `start` and leaves through SystemExit.
    signals = Signals(server)
    if run.deadline is not None:
        run.deadline.arm()
    tee = Tee(run.tee, run.log_dir)
    with run.report.written():
        try:
            return _run_agent(run, server, signals, tee)
        finally:
            tee.close()
            server.close()
            end_all(lambda: watchdog_handle.other_processes(descendants(os.getpid())), grace_s=run.grace_s)
            watchdog_handle.dismiss()
            for signum in _TERMINATION_SIGNALS:  # else death by a late signal would change the code
                signal.signal(signum, signal.SIG_IGN)


def _run_agent(run: Launch, server: ForkServer, signals: Signals, tee: Tee) -> int:
    _quieten_torch()
    handler = agent = None
    try:
        handler = _rendezvous(run, signals)
        agent = _agent(run, handler, server, signals, tee)
        result = agent.run()
    except SignalException as error:
        if error.sigval == signal.SIGALRM and run.deadline is not None:
            return _stop_at_deadline(run, tee)
        failure = agent.preempted() if agent else None
        if failure is not None:
            _observer(run, tee)("failure", failure=failure, restarts_left=0)
            return _report_failure(run, tee, failure)
        received = signals.received or int(error.sigval)
        message = f"{error}; all ranks on this node were terminated"
        run.report.record({"message": message})
        if not run.quiet:
            tee.close()
            print_message(f"accel launch: {message}")
        return 128 + received
    except ServerGone as error:
        raise LaunchError(str(error)) from None
    except RendezvousError as error:
        raise _elastic_failure(run, error) from None
    finally:
        reported = _leave(handler)
    if not result.is_failed():
        return 0
    if run.deadline is not None and getattr(agent.failure, "reason", "") == "time_limit":
        return _stop_at_deadline(run, tee)  # another node reached the limit first
    preempted = agent.preempted()
    if preempted is not None and preempted.reason != getattr(agent.failure, "reason", ""):
        _observer(run, tee)("failure", failure=preempted, restarts_left=0)  # instead of another node's termination
    failure = preempted or agent.failure
    assert failure is not None
    code = _report_failure(run, tee, failure)
    _await_cluster_update(run)
    return 0 if run.node_0_reports and run.node_rank and reported and preempted is None else code


def _await_cluster_update(run: Launch) -> None:
    """Wait, on node 0, until the cluster has recorded that the other nodes ended: its failure deletes their pods."""
    if run.node_0_reports and not run.node_rank:
        time.sleep(_CLUSTER_UPDATE_S)


def _leave(handler: Peers | None) -> bool:
    """Leave the gang. Return True if node 0 knows the outcome."""
    with contextlib.suppress(RuntimeError):
        return handler is not None and handler.leave()
    return False


def _stop_at_deadline(run: Launch, tee: Tee) -> int:
    assert run.deadline is not None
    tee.close()
    code = run.deadline.end(run.quiet, run.report)
    _await_cluster_update(run)
    return code


def _report_failure(run: Launch, tee: Tee, failure: failures.Failure) -> int:
    run.report.record(failure.summary())
    if not run.quiet:
        tee.close()
        print_message(_report(run, failure))
    return failure.exit_code


def _report(run: Launch, failure: failures.Failure) -> str:
    """Return this node's part of the report. Within a job, the logs of all nodes are merged."""
    printed = run.log_dir is not None and any(parse(run.tee).values())
    node = run.node_rank if run.static else None
    return failure.text_for(node, merged="ACCEL_JOB_ID" in os.environ, printed=printed)


def _quieten_torch() -> None:
    """Silence the elastic agent's own reports, which repeat accel's."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _agent(run: Launch, handler: Peers, server: ForkServer, signals: Signals, tee: Tee) -> GangAgent:
    spec = WorkerSpec(
        role=run.role,
        local_world_size=run.processes,
        entrypoint=run.program.argv[0],
        rdzv_handler=handler,
        max_restarts=run.max_restarts,
        monitor_interval=1e-6,  # `_monitor_workers` waits for events instead of sleeping
    )
    settings = RankSettings(
        env={},
        log_path=lambda rank, attempt: log_path(run.log_dir, rank, attempt),
        spawn=run.spawn,
        grace_s=run.grace_s,
        first_attempt=run.incarnation.attempt,
        requeued=run.requeued,
    )
    os.environ["TORCH_ELASTIC_WORKER_IDENTICAL"] = "1"  # equally many ranks per node: no exchange
    observe = _observer(run, tee)
    return GangAgent(
        spec, server, settings, observe=observe, interrupted=signals.check, poll_s=run.monitor_interval_s,
        meeting=contextlib.nullcontext if run.static else signals.raising,
    )  # fmt: skip


def _observer(run: Launch, tee: Tee) -> Callable[..., None]:
    record = event_writer(run.log_dir, run.events)

    def observe(event: str, **facts: Any) -> None:
        failure = facts.get("failure")
        if isinstance(failure, failures.Failure):
            facts["failure"] = failure.to_json()
            if facts["restarts_left"] and not run.quiet:
                text = _report(run, failure)
                print_message(f"{text}\naccel launch: starting all ranks again ({facts['restarts_left']} of "
                    f"{run.max_restarts} restarts left)")  # fmt: skip
        if event == "attempt":
            logs = [(rank, log_path(run.log_dir, rank, facts["attempt"])) for rank in facts["ranks"]]
            tee.follow((local, rank, log) for local, (rank, log) in enumerate(logs))
        record(event, **facts)

    return observe


def _rendezvous(run: Launch, signals: Signals) -> Peers:
    timeout_s = _seconds(run, "timeout", _seconds(run, "join_timeout", DEFAULT_TIMEOUT_S))
    common: dict[str, Any] = {
        "lost_after_s": _seconds(run, "lost_after", LOST_AFTER_S),
        "stay_s": _seconds(run, "stay", LINGER_S),
        "ending": lambda: signals.received is not None,
    }
    if run.static:
        return GangRendezvous(
            address=run.address, port=run.port, node_rank=run.node_rank, nodes=run.nodes, run_id=run.run_id,
            names=run.node_names,
            timeout_s=timeout_s, interrupted=signals.check, incarnation=run.incarnation,
            service=run.service, own_address=run.own_address,
            notify=lambda text: None if run.quiet else print_message(f"accel launch: {text}"), **common,
        )  # fmt: skip
    config = {"join_timeout": str(int(timeout_s)), **run.rdzv_conf}
    parameters = RendezvousParameters(
        backend="c10d",
        endpoint=f"{run.address}:{run.port}",
        run_id=run.run_id,
        min_nodes=run.nodes,
        max_nodes=run.max_nodes,
        **config,
    )
    guessed = parameters.get_as_bool("is_host") is None
    if guessed:
        parameters.config["is_host"] = str(is_this_machine(run.address, resolve=not run.service))
    if not parameters.get_as_bool("is_host"):  # else torch would wait, in a call that handles no signal
        deadline = time.monotonic() + timeout_s
        reach_node_0(lambda _: [run.service or run.address], run.address, run.port, timeout_s, deadline, signals.check)
    return ElasticRendezvous(parameters, guessed=guessed, **common)


def _elastic_failure(run: Launch, error: RendezvousError) -> RendezvousFailed:
    text = str(error.__cause__ or error) or f"{type(error).__name__}; perhaps fewer than {run.nodes} machines joined"
    return RendezvousFailed(f"the rendezvous at {run.address}:{run.port} failed: {text.splitlines()[0]}")


def _seconds(run: Launch, name: str, default: float) -> float:
    text = run.rdzv_conf.get(name)
    try:
        return float(text) if text is not None else default
    except ValueError:
        raise LaunchConfigError(f"--rdzv_conf {name} must be seconds, not {text!r}") from None
