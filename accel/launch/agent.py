"""torch's elastic agent with forked ranks, forwarded signals, and failures that end the whole gang.

The base agent keeps rendezvous, ranks and restarts. `GangAgent` starts, watches and ends workers through the
fork server, and decides which failure was first.
"""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from accel.exit_codes import REQUEUE, TIME_LIMIT
from schedulers.processes import signal_name

from .failure import Exit, Failure, diagnose, error_in_log, first_failure, oom_kill_count
from .fork_server import ForkServer, ServerGone
from .peers import Peers
from .rendezvous import GangRendezvous

_PEER_CHECK_S = 0.5
_KILL_ALLOWANCE_S = 5.0
_ECHO_WAIT_S = 3.0
_FAILURE_GRACE_S = 2.0


@dataclass(frozen=True, kw_only=True)
class RankSettings:
    """Settings for starting a rank, besides those from the rendezvous."""

    env: Mapping[str, str]
    log_path: Callable[[int, int], str | None]  # (rank, attempt) -> path
    spawn: bool
    grace_s: float
    first_attempt: int | None = 0  # of the job; None if unknown
    requeued: bool = False  # the scheduler, not this launcher, restarts ranks that exit with the requeue code


class GangAgent(SimpleElasticAgent):
    """The elastic agent of one node.

    observe:     called as `observe(event, **facts)` for each start of an attempt and each failure.
    interrupted: called during every wait; raises SignalException after a termination signal.
    meeting:     returns a context manager for each rendezvous.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        server: ForkServer,
        settings: RankSettings,
        *,
        observe: Callable[..., None],
        interrupted: Callable[[], None],
        poll_s: float,
        meeting: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        super().__init__(spec)
        self._server = server
        self._settings = settings
        self._observe = observe
        self._interrupted = interrupted
        self._poll_s = poll_s
        self._meeting = meeting
        self._exits: dict[int, Exit] = {}
        self._running_ranks: set[int] = set()
        self._ended_at = float("inf")
        self._next_peer_check = 0.0
        self._finished = False
        self._oom_kills = 0
        self._first_attempt = settings.first_attempt
        self._started = -1  # attempts of this launcher
        self.failure: Failure | None = None

    # Methods that the base agent calls.

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        with self._meeting():
            super()._rendezvous(worker_group)
        if isinstance(self._peers, GangRendezvous):
            self._first_attempt = self._peers.first_attempt

    @property
    def _peers(self) -> Peers:
        handler = self._worker_group.spec.rdzv_handler
        assert isinstance(handler, Peers)
        return handler

    @property
    def _attempt(self) -> int:
        """The attempt's number for ranks and their logs."""
        return self._started + (self._first_attempt or 0)

    @property
    def _attempt_number(self) -> int | None:
        """The attempt's number in reports; None if unknown."""
        return None if self._first_attempt is None else self._attempt

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._started += 1
        self.failure = None
        self._exits, self._finished, self._ended_at = {}, False, float("inf")
        self._oom_kills = oom_kill_count()
        pids: dict[int, Any] = {}
        self._observe("attempt", attempt=self._attempt, ranks=[worker.global_rank for worker in worker_group.workers])
        for worker in worker_group.workers:
            env = {**self._settings.env, **self._rank_environment(worker_group, worker)}
            log = self._settings.log_path(worker.global_rank, self._attempt)
            self._server.start_rank(worker.local_rank, env, log, self._settings.spawn)
            self._running_ranks.add(worker.local_rank)
            self._record_starts(pids, 0)
            if self._has_failed():  # the remaining ranks would be ended at once
                break
        while self._running_ranks - pids.keys():
            self._record_starts(pids, self._poll_s)
        return {worker.local_rank: pids.get(worker.local_rank, 0) for worker in worker_group.workers}

    def _record_starts(self, pids: dict[int, Any], timeout_s: float) -> None:
        for event in self._server.events(timeout_s):
            if event["event"] == "started":
                pids[event["local_rank"]] = event["pid"]
            else:
                self._record_exit(event)
        self._check_interrupted()

    def _has_failed(self) -> bool:
        return any(end.code != 0 for end in self._exits.values())

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Wait up to the poll interval for events, then return the state of the gang."""
        try:
            for event in self._server.events(self._poll_s):
                self._record_exit(event)
        except ServerGone as error:
            return self._fail(self._launcher_failure(str(error)))
        self._check_interrupted()
        if self._has_failed():
            return self._fail(self._end_after_failure())
        if not self._running_ranks and not self._finished:
            self._finished = True
            self._query_peers(lambda peers: peers.announce_success())
        return self._check_peers()

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._end_ranks(signal.SIGTERM, self._grace_after(self.failure))

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        self._end_ranks(signal.SIGTERM if death_sig == signal.SIGALRM else death_sig, self._settings.grace_s)

    def _exit_barrier(self) -> None:
        """Do nothing: success is reported only after every node has succeeded."""

    # The state of the gang.

    def _check_peers(self) -> RunResult:
        now = time.monotonic()
        if not self._finished and now < self._next_peer_check:
            return RunResult(WorkerState.HEALTHY)
        self._next_peer_check = now + _PEER_CHECK_S
        self._query_peers(lambda peers: peers.beat())
        remote_failure = self._query_peers(lambda peers: peers.failure_elsewhere()) or self._lost_node_failure()
        if remote_failure:
            return self._fail(Failure.from_json(remote_failure))
        if self._finished and (self._query_peers(lambda peers: peers.all_succeeded()) is not False):
            return RunResult(
                WorkerState.SUCCEEDED, return_values={w.global_rank: None for w in self._worker_group.workers}
            )
        if self._finished:
            time.sleep(self._poll_s)
        return RunResult(WorkerState.HEALTHY)

    def _query_peers(self, query: Callable[[Peers], Any]) -> Any:
        """Call the rendezvous; if node 0 is gone, return that as the failure."""
        try:
            return query(self._peers)
        except RuntimeError as error:  # DistStoreError and its kin
            return {**self._launcher_failure(f"node 0 is gone: {error}").to_json(), "final": not self._peers.may_shrink}

    def _fail(self, failure: Failure) -> RunResult:
        announcement = self._announce(failure)
        is_remote = (announcement["node"], announcement["rank"]) != (failure.node, failure.rank)
        self.failure = Failure.from_json(announcement) if is_remote else failure
        if announcement["final"]:
            self._remaining_restarts = 0
        self._observe("failure", failure=self.failure, restarts_left=self._remaining_restarts)
        return RunResult(WorkerState.FAILED, failures=self._process_failures())

    def _announce(self, failure: Failure) -> dict[str, Any]:
        """Report a failure to the other nodes, and whether it ends the gang. Return the failure reported first."""
        unrecoverable = failure.rank is None and not self._peers.may_shrink  # a lost node cannot restart its ranks
        requeued = self._settings.requeued and failure.reason == "preempted"
        final = self._remaining_restarts == 0 or unrecoverable or requeued or failure.reason == "time_limit"
        announcement = {**failure.to_json(), "final": final}
        return dict(self._query_peers(lambda peers: peers.announce_failure(announcement)))

    def _end_after_failure(self) -> Failure:
        """End this node's ranks after one has failed, and report the failure to the other nodes.

        A rank whose peer died fails too (an echo), perhaps before the peer's own node reports the cause. Other
        failures are reported at once; after an echo, this waits up to 3 s for another node's report.
        """
        failure, echo = self._own_failure()
        if not echo:
            self._announce(failure)
        self._end_ranks(signal.SIGTERM, self._grace_after(failure))
        deadline = time.monotonic() + _ECHO_WAIT_S
        while echo and not self._query_peers(lambda peers: peers.failure_elsewhere()) and time.monotonic() < deadline:
            if self._worker_group.group_world_size in (None, 1):
                break
            time.sleep(0.05)
        return self._own_failure()[0]

    def _grace_after(self, failure: Failure | None) -> float:
        """Return the grace of the other ranks: short after a failure, whose collectives never end."""
        orderly = failure is None or failure.reason in ("preempted", "time_limit")
        return self._settings.grace_s if orderly else min(self._settings.grace_s, _FAILURE_GRACE_S)

    def preempted(self) -> Failure | None:
        """Return a preemption if a rank here exited with the requeue code, regardless of what ended the gang."""
        end = next((end for end in self._exits.values() if end.code == REQUEUE), None)
        if end is None:
            return None
        return diagnose(end, node=self._worker_group.group_rank or 0, host=socket.gethostname(),
                        attempt=self._attempt_number, oom_kills=0, others="")  # fmt: skip

    def _own_failure(self) -> tuple[Failure, bool]:
        """Return the first failure on this node, and True if it is only an echo of another."""
        end = first_failure(self._exits.values(), self._ended_at)
        group = self._worker_group
        other_exits = [other for other in self._exits.values() if other.local_rank != end.local_rank]
        failure = diagnose(end, node=group.group_rank or 0, host=socket.gethostname(), attempt=self._attempt_number,
                           oom_kills=oom_kill_count() - self._oom_kills, 
                           others=_describe_other_ranks(other_exits))  # fmt: skip
        return failure, end.echo

    def _launcher_failure(self, message: str, *, how: str = "failed", exit_code: int = 1) -> Failure:
        node, host = self._worker_group.group_rank or 0, socket.gethostname()
        return Failure(rank=None, node=node, host=host, attempt=self._attempt_number, exit_code=exit_code,
                       reason="node_failure", how=how, message=message, time=time.time())  # fmt: skip

    def _lost_node_failure(self) -> dict[str, Any] | None:
        """Return the failure of a node that sends no heartbeats any more, or None."""
        silent_node = self._query_peers(lambda peers: peers.silent_node())
        if not silent_node:
            return None
        node, host, seconds = silent_node
        message = f"no heartbeat for {seconds:.0f} s: the machine, its network or its launcher is down"
        failure = self._launcher_failure(message)
        return dataclasses.replace(failure, node=node, host=host).to_json()

    def _check_interrupted(self) -> None:
        try:
            self._interrupted()
        except SignalException as error:  # report it first: the other nodes' ranks would wait for ours
            if self._finished and self._query_peers(lambda peers: peers.all_succeeded()) is True:
                return  # all ranks have succeeded: the scheduler ends the rest once the first node has left
            name, code = signal_name(error.sigval), 128 + error.sigval
            failure = self._launcher_failure("", how=f"was terminated by {name}", exit_code=code)
            if error.sigval == signal.SIGALRM:
                how = "has reached the time limit"
                failure = dataclasses.replace(failure, how=how, exit_code=TIME_LIMIT, reason="time_limit")
            self._announce(failure)
            raise

    def _process_failures(self) -> dict[int, ProcessFailure]:
        return {
            end.rank: ProcessFailure(local_rank=end.local_rank, pid=end.pid, exitcode=end.code, error_file="")
            for end in self._exits.values()
            if end.code != 0
        }

    def _record_exit(self, event: dict[str, Any]) -> None:
        if event["event"] != "exited":
            return
        local_rank = event["local_rank"]
        worker = self._worker_group.workers[local_rank]
        self._running_ranks.discard(local_rank)
        log = self._settings.log_path(worker.global_rank, self._attempt)
        code, error = event["code"], event["error"]
        if error and code < 0 and self._ended_at != float("inf"):
            code = error.get("code", code)  # it was already exiting with this; only its exit handlers were killed
        error = error or error_in_log(log, code)
        self._exits[local_rank] = Exit(
            rank=worker.global_rank, local_rank=local_rank, pid=event["pid"], code=code, time=event["time"],
            error=error, log=log,
        )  # fmt: skip

    def _end_ranks(self, signum: int, grace_s: float) -> None:
        """End this node's ranks and their descendants; wait until none is left, at most `grace_s` + 5 s."""
        if self._ended_at == float("inf"):
            self._ended_at = time.time()
        try:
            self._server.end(signum, grace_s)
            deadline = time.monotonic() + grace_s + _KILL_ALLOWANCE_S
            while time.monotonic() < deadline:
                events = self._server.events(self._poll_s)
                for event in events:
                    self._record_exit(event)
                self._query_peers(lambda peers: peers.beat())
                if any(event["event"] == "ended" for event in events):
                    return
        except ServerGone:  # its ranks died with it; `run_gang` ends the rest
            self._running_ranks.clear()

    def _rank_environment(self, group: WorkerGroup, worker: Any) -> dict[str, str]:
        """Return torchrun's variables.

        https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables
        """
        spec = group.spec
        return {
            "RANK": str(worker.global_rank),
            "LOCAL_RANK": str(worker.local_rank),
            "WORLD_SIZE": str(worker.world_size),
            "LOCAL_WORLD_SIZE": str(spec.local_world_size),
            "GROUP_RANK": str(group.group_rank),
            "GROUP_WORLD_SIZE": str(group.group_world_size),
            "NODE_RANK": str(group.group_rank),
            "ROLE_RANK": str(worker.role_rank),
            "ROLE_WORLD_SIZE": str(worker.role_world_size),
            "ROLE_NAME": spec.role,
            "MASTER_ADDR": str(group.master_addr),
            "MASTER_PORT": str(group.master_port),
            "TORCHELASTIC_RESTART_COUNT": str(self._attempt),
            "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts),
            "TORCHELASTIC_RUN_ID": spec.rdzv_handler.get_run_id(),
            "TORCHELASTIC_USE_AGENT_STORE": str(spec.rdzv_handler.use_agent_store),
        }


def _describe_other_ranks(exits: list[Exit]) -> str:
    """Summarize how the other ranks ended."""
    groups: dict[str, list[int]] = {}
    for end in exits:
        if end.code == 0:
            outcome = "had finished"
        elif end.code == -signal.SIGTERM:
            outcome = "ended by SIGTERM"
        elif end.code == -signal.SIGKILL:
            outcome = "killed after the grace period"
        else:
            outcome = end.description()
        groups.setdefault(outcome, []).append(end.rank)
    return "; ".join(f"rank {', '.join(map(str, sorted(ranks)))} {outcome}" for outcome, ranks in groups.items())
