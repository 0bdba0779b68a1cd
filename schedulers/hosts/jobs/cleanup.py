"""Removal of jobs from their hosts, and of blobs and environments that are no longer used there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from .. import replies
from ..host_list import Host
from ..remote_files import JOBS, Files, host_programs, program_call
from ..transport import Remote
from .native_id import Native

if TYPE_CHECKING:
    from .options import HostOptions
    from .status import Hosts

_CLEANUP_S = 600.0
_DAY_S = 86400.0


def unused_s(options: HostOptions) -> float:
    return options.unused_days * _DAY_S


def clear(remote: Remote, *, root: str, python: str, unused_s: float, jobs: Sequence[str] = ()) -> Mapping[str, str]:
    """Remove these jobs' directories from a host, and its blobs and environments unused for `unused_s` seconds.

    Returns the reason for each job that was not removed. Raises HostUnreachable, RemoteError.
    """
    request = {"root": root, "jobs": list(jobs), "unused_s": unused_s}
    argv, stdin = program_call(python, host_programs(*JOBS, "cleanup"), request)
    completed = remote.run(argv, stdin=stdin, timeout_s=_CLEANUP_S)
    return replies.decode(completed.stdout, replies.CleanupResult, remote.name, completed.stderr)["kept"]


def clear_jobs(hosts: Hosts, options: HostOptions, jobs: Sequence[Native]) -> list[str]:
    """Remove the jobs from their hosts, in one session per host; return a line for each host that keeps something."""
    jobs_by_host: dict[Host, list[str]] = {}
    for native in jobs:
        for host in native.hosts:
            jobs_by_host.setdefault(host, []).append(native.job_id)

    def clear_host(remote: Remote) -> Mapping[str, str]:
        jobs = jobs_by_host[remote.host]
        return clear(remote, root=options.root, python=hosts.python, unused_s=unused_s(options), jobs=jobs)

    lines = []
    for outcome in hosts.pool.map(clear_host, list(jobs_by_host)):
        count = len(jobs_by_host[outcome.host])
        if outcome.error is not None:
            lines.append(f"{outcome.error}; what it has of {count} job{'s' if count > 1 else ''} stays there")
        elif outcome.value:
            listing = ", ".join(f"{job} ({reason})" for job, reason in outcome.value.items())
            lines.append(f"{outcome.host}: not removed there: {listing}")
    return lines


def remove(hosts: Hosts, options: HostOptions, paths: Sequence[str], host_list: Sequence[Host]) -> None:
    """Remove these paths below `root` from the hosts that can be reached."""
    hosts.pool.map(lambda remote: Files(remote, root=options.root, python=hosts.python).remove(*paths), host_list)
