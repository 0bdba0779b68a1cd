"""A job's native id: `host,user@host:port,…/<job id>`, all that another machine needs to find it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ...errors import SpecError
from ..host_list import Host, parse_hosts


@dataclass(frozen=True, kw_only=True)
class Native:
    """A job and its hosts: the members in the order of their ranks, then the spares."""

    job_id: str
    hosts: tuple[Host, ...]

    def __str__(self) -> str:
        return f"{','.join(map(str, self.hosts))}/{self.job_id}"

    @classmethod
    def parse(cls, text: str) -> Native:
        """Parse a native id. Raises SpecError for any other text."""
        hosts, slash, job_id = text.rpartition("/")
        if not slash or not job_id:
            raise SpecError(f"{text!r} is not the id of a job of an ssh target (host,host,…/job)")
        return cls.of(job_id, parse_hosts(hosts, source=f"job {job_id}"))

    @classmethod
    def of(cls, job_id: str, hosts: Sequence[Host]) -> Native:
        # Without these, hosts named by different jobs or files are equal, and each is queried once.
        return cls(job_id=job_id, hosts=tuple(replace(host, source="", slots=None) for host in hosts))


def jobs_by_host(jobs: Iterable[tuple[str, Sequence[Host]]]) -> dict[Host, list[str]]:
    """Return the jobs of each host, from the hosts of each job."""
    by_host: dict[Host, list[str]] = {}
    for job_id, hosts in jobs:
        for host in hosts:
            by_host.setdefault(host, []).append(job_id)
    return by_host
