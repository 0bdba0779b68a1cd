"""Poll jobs on their hosts with one request per host, and combine the hosts' answers into one `Status` per job."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from ...errors import SchedulerError
from ...job import Reason, State, Status
from .. import replies
from ..errors import HostUnreachable, RemoteError
from ..host_list import Host
from ..remote_files import JOBS, Files, host_programs, program_call
from ..transport import Outcome, Pool, Remote
from .native_id import Native, jobs_by_host
from .options import HostOptions, python_of

_REPLY_TIMEOUT_S = 60.0
_REPLY_GRACE_S = 1.0  # then the next host of a job is queried as well
_DOWN_S = 20.0  # for so long, a host that could not be reached is queried after the others

Step = Mapping[str, Any]

# The supervisor's phase -> ours. A job that starts again is queued between its attempts.
_PHASES: Mapping[str, State] = {
    "waiting": State.QUEUED,
    "setup": State.QUEUED,
    "armed": State.QUEUED,
    "running": State.RUNNING,
    "ending": State.RUNNING,
    "ended": State.RUNNING,
}


@dataclass(frozen=True)
class Reply:
    """A host's reply: a value for each step, and the bytes that follow."""

    done: list[Any]
    data: bytes


class Hosts:
    """The hosts of a target. Connections are kept and shared; safe to use from several threads."""

    def __init__(self, options: HostOptions) -> None:
        self.options = options
        self._lock = threading.Lock()
        self._pool: Pool | None = None
        self._down: dict[Host, tuple[float, SchedulerError]] = {}
        self.new_ids: dict[str, str] = {}  # of the hosts of a submit, until its jobs' backends are recorded

    @property
    def pool(self) -> Pool:
        with self._lock:
            if self._pool is None:
                self._pool = Pool(config=self.options.ssh_config)
            return self._pool

    @property
    def python(self) -> str:
        return on_host(python_of(self.options))

    def files(self, remote: Remote) -> Files:
        options = self.options
        return Files(remote, root=options.root, python=self.python, unused_s=options.unused_s)

    def query(
        self, steps_by_host: Mapping[Host, Sequence[Step]], *, skip_down: bool = False
    ) -> dict[Host, Outcome[Reply]]:
        """Query all hosts at once, with one request each.

        With `skip_down`, hosts that could not be reached a moment ago are not tried: they would delay the others'
        answers.
        """
        down = {host: error for host in steps_by_host if skip_down and (error := self._down_error(host)) is not None}
        tried = [host for host in steps_by_host if host not in down]
        outcomes = self.pool.map(lambda remote: self.query_host(remote, steps_by_host[remote.host]), tried)
        for outcome in outcomes:
            self.note(outcome.host, outcome.error)
        by_host = {outcome.host: outcome for outcome in outcomes}
        return {host: by_host.get(host) or Outcome(host, error=down[host]) for host in steps_by_host}

    def note(self, host: Host, error: SchedulerError | None) -> None:
        """Record the outcome of the last attempt to reach a host."""
        with self._lock:
            if isinstance(error, HostUnreachable):
                self._down[host] = (time.monotonic() + _DOWN_S, error)
            else:
                self._down.pop(host, None)

    def likely_first(self, hosts: Sequence[Host]) -> list[Host]:
        """Return the hosts in their order, but last those that could not be reached a moment ago."""
        return sorted(hosts, key=lambda host: self._down_error(host) is not None)

    def _down_error(self, host: Host) -> SchedulerError | None:
        with self._lock:
            down_until, error = self._down.get(host, (0.0, None))
        return error if down_until > time.monotonic() else None

    def close(self) -> None:
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()

    def query_host(self, remote: Remote, steps: Sequence[Step], timeout_s: float = _REPLY_TIMEOUT_S) -> Reply:
        """Raises HostUnreachable, RemoteError."""
        request = {"root": self.options.root, "do": list(steps)}
        argv, stdin = program_call(self.python, host_programs(*JOBS), request)
        completed = remote.run(argv, stdin=stdin, timeout_s=timeout_s)
        line, _, data = completed.stdout.partition(b"\n")
        return Reply(replies.decode_done(line, steps, replies.JOBS, remote.name, completed.stderr), data)


def on_host(path: str) -> str:
    """Return a path for commands: they start in the home directory, and no shell expands `~`."""
    return f"./{path[2:]}" if path.startswith("~/") else path


@dataclass
class _PollState:
    """The state of the poll of one job, whose hosts are queried one by one."""

    native: Native
    remaining_hosts: list[Host]
    replies: list[dict[str, Any]] = field(default_factory=list)
    unreachable: list[str] = field(default_factory=list)
    fenced: Status | None = None  # a result that the other hosts, cut off from this one, may have superseded
    nodes: int = 1
    pending: int = 0  # hosts that have yet to answer


ReplyQueue: TypeAlias = "queue.SimpleQueue[tuple[list[str], Outcome[Reply]]]"


def statuses(hosts: Hosts, jobs: Mapping[str, Native]) -> tuple[dict[str, Status], dict[str, str]]:
    """Return the statuses of jobs, and errors for those that could not be queried. A job in neither is unknown.

    Each job's hosts are queried in order until one has its result or a live supervisor; the next one also if no answer
    has come for a moment.
    """
    job_statuses: dict[str, Status] = {}
    unreachable: dict[str, str] = {}
    pending = {key: _PollState(native, hosts.likely_first(native.hosts)) for key, native in jobs.items()}
    reply_queue: ReplyQueue = queue.SimpleQueue()
    _query_next(hosts, pending, reply_queue)
    while pending:
        try:
            keys, outcome = reply_queue.get(timeout=_REPLY_GRACE_S)
        except queue.Empty:
            _query_next(hosts, pending, reply_queue)  # a host that may be cut off does not delay the rest
            continue
        unresolved = {}
        for number, key in enumerate(keys):
            job = pending.get(key)
            if job is None:
                continue
            job.pending -= 1
            status = _status_from_reply(job, outcome, number)
            if status is not None:
                job_statuses[key] = status
                del pending[key]
            elif job.remaining_hosts:
                unresolved[key] = job
            elif not job.pending:
                _conclude(key, job, job_statuses, unreachable)
                del pending[key]
        _query_next(hosts, unresolved, reply_queue)
    return job_statuses, unreachable


def _query_next(hosts: Hosts, jobs: Mapping[str, _PollState], reply_queue: ReplyQueue) -> None:
    """Query the next host of each job, with one request per host."""
    keys_by_host: dict[Host, list[str]] = {}
    for key, job in jobs.items():
        if job.remaining_hosts:
            job.pending += 1
            keys_by_host.setdefault(job.remaining_hosts.pop(0), []).append(key)
    for host, keys in keys_by_host.items():
        steps = [{"op": "status", "job": jobs[key].native.job_id} for key in keys]

        def poll_host(host: Host = host, keys: list[str] = keys, steps: Sequence[Step] = steps) -> None:
            outcome: Outcome[Reply] = Outcome(host, error=RemoteError(host.name, "the query failed (see the log)"))
            try:
                outcome = hosts.query({host: steps})[host]
            finally:
                reply_queue.put((keys, outcome))

        threading.Thread(target=poll_host, name=f"polling {host}", daemon=True).start()


def _status_from_reply(job: _PollState, outcome: Outcome[Reply], number: int) -> Status | None:
    """Return the status if this host's reply decides it."""
    if outcome.error is not None or outcome.value is None:
        job.unreachable.append(str(outcome.error))
        return None
    reply = outcome.value.done[number]
    if reply["exit"] is not None:
        status = Status.of_result(reply["exit"], f" on {outcome.host}")
        if not (isinstance(reply["exit"], dict) and reply["exit"].get("fenced")):
            return status
        job.fenced = job.fenced or status
        state = reply["state"]
        members = state.get("members") if isinstance(state, dict) else None
        job.nodes = max(job.nodes, len(members) if isinstance(members, list) else 0)
        return None
    if reply["alive"]:
        return _progress(reply["state"])
    job.replies.append(reply)
    return None


def _conclude(key: str, job: _PollState, job_statuses: dict[str, Status], unreachable: dict[str, str]) -> None:
    """Decide the status after all replies: none has the job's own result, or a live supervisor.

    The hosts that cannot be reached may have both. If they are fewer than the job needs, the result of a host that was
    cut off from them is the job's.
    """
    if job.fenced is not None and len(job.unreachable) < job.nodes:
        job_statuses[key] = job.fenced
    elif job.unreachable:
        unreachable[key] = job.unreachable[0]
    elif any(reply["state"] is not None for reply in job.replies):
        message = "its supervisors were killed, or their hosts restarted, and they left no result"
        job_statuses[key] = Status(state=State.FAILED, reason=Reason.LOST, message=message)


def _progress(document: Any) -> Status:
    state = document if isinstance(document, dict) else {"phase": "waiting"}
    phase, attempt = str(state.get("phase", "")), state.get("attempt")
    message = str(state.get("message") or ("" if phase == "running" else phase))
    return Status(
        state=_PHASES.get(phase, State.RUNNING),
        reason=Reason.NO_CAPACITY if state.get("queued") and message else Reason.NONE,
        attempt=attempt if isinstance(attempt, int) and attempt > 0 else 0,
        message=message,
        native_state=phase,
    )


def running(hosts: Hosts, jobs: Sequence[Native]) -> dict[str, str | SchedulerError]:
    """Return where a supervisor of each job runs, or why that is unknown, by job id. One request per host."""
    by_host = jobs_by_host((native.job_id, native.hosts) for native in jobs)
    steps = {host: [{"op": "status", "job": job_id} for job_id in job_ids] for host, job_ids in by_host.items()}
    result: dict[str, str | SchedulerError] = {}
    for host, outcome in hosts.query(steps).items():
        if outcome.value is None:
            error = outcome.error or RemoteError(host.name, "it did not answer")
            result = {**dict.fromkeys(by_host[host], error), **result}
        else:
            replies_by_job = zip(by_host[host], outcome.value.done, strict=True)
            result |= {job_id: f"its supervisor runs on {host}" for job_id, reply in replies_by_job if reply["alive"]}
    return result


def query_all(hosts: Hosts, host_list: Sequence[Host], step: Step) -> list[tuple[Host, Any, SchedulerError | None]]:
    """Send one step to each host; return each host's answer, or its error."""
    outcomes = hosts.query({host: [step] for host in host_list})
    return [
        (host, None if outcome.value is None else outcome.value.done[0], outcome.error)
        for host, outcome in outcomes.items()
    ]
