"""Removal of jobs from their hosts, and of blobs and environments that are no longer used there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from .. import replies
from ..host_list import Host
from ..remote_files import JOBS, host_programs, program_call
from ..transport import Remote
from .native_id import Native, jobs_by_host

if TYPE_CHECKING:
    from .status import Hosts

_CLEANUP_S = 600.0


def clear(remote: Remote, *, root: str, python: str, unused_s: float, jobs: Sequence[str] = ()) -> Mapping[str, str]:
    """Remove these jobs' directories from a host, and its blobs and environments unused for `unused_s` seconds.

    Returns the reason for each job that was not removed. Raises HostUnreachable, RemoteError.
    """
    request = {"root": root, "jobs": list(jobs), "unused_s": unused_s}
    argv, stdin = program_call(python, host_programs(*JOBS, "files", "cleanup"), request)
    completed = remote.run(argv, stdin=stdin, timeout_s=_CLEANUP_S)
    return replies.decode(completed.stdout, replies.CleanupResult, remote.name, completed.stderr)["kept"]


def clear_jobs(hosts: Hosts, jobs: Sequence[Native]) -> list[str]:
    """Remove the jobs from their hosts, in one session per host; return a line for each host that keeps something."""
    by_host = jobs_by_host((native.job_id, native.hosts) for native in jobs)

    def clear_host(remote: Remote) -> Mapping[str, str]:
        options, jobs = hosts.options, by_host[remote.host]
        return clear(remote, root=options.root, python=hosts.python, unused_s=options.unused_s, jobs=jobs)

    lines = []
    for outcome in hosts.pool.map(clear_host, list(by_host)):
        count = len(by_host[outcome.host])
        if outcome.error is not None:
            lines.append(f"{outcome.error}; data of {count} job{'s' if count > 1 else ''} not deleted")
        elif outcome.value:
            listing = ", ".join(f"{job} ({reason})" for job, reason in outcome.value.items())
            lines.append(f"{outcome.host}: not removed there: {listing}")
    return lines


def remove(hosts: Hosts, paths: Sequence[str], host_list: Sequence[Host]) -> None:
    """Remove these paths below `root` from the hosts that can be reached."""
    hosts.pool.map(lambda remote: hosts.files(remote).remove(*paths), host_list)
