"""Long-poll two hosts of each job so that `wait` returns as soon as it ends. Jobs on the same host share a session."""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass, field

from ...errors import SchedulerError
from ..errors import RemoteError
from ..host_list import Host
from ..remote_files import JOBS, host_programs, program_call
from ..session import Session
from .native_id import Native
from .status import Hosts

_LIFETIME_S = 600.0  # of a session: on the host, one whose client was cut off ends by itself
_READ_SLACK_S = 60.0
_HOSTS_PER_JOB = 2  # one of them may be cut off from the others
_RETRY_S = 20.0  # before a host is tried again after a failure


@dataclass
class _WatchedJob:
    """A job, the hosts polled for it, and the hosts that have reported its end."""

    native: Native
    hosts: set[Host] = field(default_factory=set)
    reported: set[Host] = field(default_factory=set)
    changed: threading.Event = field(default_factory=threading.Event)


class Watch:
    """The long polls of one target. Safe to use from several threads."""

    def __init__(self, hosts: Hosts) -> None:
        self._hosts = hosts
        self._lock = threading.Lock()
        self._jobs: dict[str, _WatchedJob] = {}
        self._host_watches: dict[Host, _HostWatch] = {}
        self._not_before: dict[Host, float] = {}  # hosts that failed, and when to try them again

    def wait(self, native: Native, timeout_s: float) -> bool:
        """Wait until a host reports that the job ended, or lost its supervisor, there. Return False on a timeout.

        The next call polls another of its hosts: this one may have been cut off from hosts that continue the job.
        """
        with self._lock:
            job = self._jobs.setdefault(native.job_id, _WatchedJob(native))
            if len(job.hosts) < _HOSTS_PER_JOB and not job.changed.is_set():
                self._assign_hosts(job)
        if not job.changed.wait(timeout_s):
            return False
        job.changed.clear()
        return True

    def _assign_hosts(self, job: _WatchedJob) -> None:
        for host in job.native.hosts:
            if host in job.reported or host in job.hosts or self._not_before.get(host, 0.0) > time.monotonic():
                continue
            job.hosts.add(host)
            if host not in self._host_watches:
                self._host_watches[host] = _HostWatch(self, self._hosts, host)
                self._host_watches[host].start()
            self._host_watches[host].add(job.native.job_id)
            if len(job.hosts) == _HOSTS_PER_JOB:
                return

    def job_ended(self, host: Host, job_id: str) -> None:
        with self._lock:
            job = self._jobs.get(job_id)
            if job is None:  # not a job that was requested
                return
            job.reported.add(host)
            job.hosts.discard(host)
            job.changed.set()

    def session_closed(self, host: Host, *, failed: bool) -> None:
        """Forget a session. The next `wait` polls another host or, later if it failed, this one again."""
        with self._lock:
            self._host_watches.pop(host, None)
            if failed:
                self._not_before[host] = time.monotonic() + _RETRY_S
            for job in self._jobs.values():
                job.hosts.discard(host)


class _HostWatch(threading.Thread):
    def __init__(self, watch: Watch, hosts: Hosts, host: Host) -> None:
        super().__init__(name=f"watching {host}", daemon=True)
        self._watch = watch
        self._hosts = hosts
        self._host = host
        self._lock = threading.Lock()
        self._waiting: list[str] = []
        self._session: Session | None = None

    def add(self, job_id: str) -> None:
        with self._lock:
            self._waiting.append(job_id)
            self._send()

    def run(self) -> None:
        failed = True
        try:
            self._read_events()
            failed = False
        except SchedulerError as error:
            self._hosts.note(self._host, error)
        finally:
            self._watch.session_closed(self._host, failed=failed)

    def _read_events(self) -> None:
        request = {"root": self._hosts.options.root, "watch_s": _LIFETIME_S}
        argv, stdin = program_call(self._hosts.python, host_programs(*JOBS), request)
        with self._hosts.pool.remote(self._host).open(argv) as session:
            session.write(stdin)
            with self._lock:
                self._session = session
                self._send()
            try:
                while line := session.read_line(_LIFETIME_S + _READ_SLACK_S):
                    self._watch.job_ended(self._host, line.decode("ascii", "replace").strip())
            finally:
                with self._lock:
                    self._session = None
            completed = session.finish(_READ_SLACK_S)
            if completed.status != 0:
                raise RemoteError(str(self._host), f"its watch ended with status {completed.status}", completed.status)

    def _send(self) -> None:
        if self._session is None:
            return
        with contextlib.suppress(SchedulerError):  # the thread that reads raises it
            self._session.write("".join(f"{job_id}\n" for job_id in self._waiting).encode())
        self._waiting.clear()
