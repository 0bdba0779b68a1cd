"""Which hosts run which jobs, which of them is node 0, and their addresses and ports."""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...errors import SpecError, SubmitError
from ...job import Reason
from ...printable import one_line
from ..addresses import candidates
from ..facts import Facts, Wanted
from ..host_list import Host
from ..preflight import Report, examine
from ..transport import Remote
from .cleanup import remove
from .free_slots import Room, choose, room
from .options import HostOptions, port_range
from .status import Hosts, Step

_PORTS_TRIED = 16
_MOST_LEADS = 16  # so many hosts are tried as node 0 by all others
_PROGRESS_S = 1.0

logger = logging.getLogger(__name__)
progress = logging.getLogger("schedulers.progress")


class NotPlaced(SubmitError):
    """The hosts cannot run the job. Nothing was started."""

    reason = Reason.NO_CAPACITY


@dataclass(frozen=True, kw_only=True)
class Node:
    """A host of a job. `address` and `port` are where its supervisor answers the others; no port where it is alone."""

    host: Host
    facts: Facts
    address: str
    port: int

    def to_json(self) -> dict[str, Any]:
        interface = next((a.interface for a in self.facts.addresses if a.address == self.address), None)
        return {"name": str(self.host), "address": self.address, "control_port": self.port, "interface": interface}


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where one job runs. members: in the order of their ranks, the first one node 0.

    claim: what tells the claims that were laid to the hosts' directories on the way here from those of an earlier
           submit of the same job, whose client was killed.
    """

    job_id: str
    members: tuple[Node, ...]
    spares: tuple[Node, ...]
    master_port: int | None
    claim: str

    @property
    def nodes(self) -> tuple[Node, ...]:
        return self.members + self.spares


def examined(
    hosts: Hosts,
    options: HostOptions,
    name: str,
    chosen: Sequence[Host],
    wanted: Wanted,
    *,
    python: Callable[[Remote], str] | None = None,
) -> Report:
    """What the hosts say of themselves, and whether they can run jobs that want this.

    `python` says which interpreter the ranks get on a host, where it is not the target's.
    """
    wanted = replace(
        wanted,
        disk_bytes=int(options.disk_gb * 1_000_000_000),
        interface=options.interface,
        ports=_some_ports(options, name, 1),
    )
    told = _Progress(len(chosen)).told
    return examine(hosts.pool, chosen, wanted, python=python or hosts.python, root=options.root, told=told)


class _Progress:
    """Reports how many hosts have answered, once that takes longer than a moment."""

    def __init__(self, count: int) -> None:
        self._lock = threading.Lock()
        self._count, self._done = count, 0
        self._next = time.monotonic() + _PROGRESS_S

    def told(self, host: Host) -> None:
        with self._lock:
            self._done += 1
            if time.monotonic() >= self._next:
                self._next = time.monotonic() + _PROGRESS_S
                progress.info("examined %d of %d hosts", self._done, self._count)


def enough(named: Sequence[Host], nodes: int, spares: int, name: str) -> None:
    """Raises SpecError for a target with fewer hosts than the job needs."""
    if len(named) < nodes + spares:
        extra = f" and {spares} spare{'s' if spares > 1 else ''}" if spares else ""
        raise SpecError(
            f"target {name}: {nodes} node{'s' if nodes > 1 else ''}{extra} asked for, and there "
            f"{'is' if len(named) == 1 else 'are'} {len(named)} host{'s' if len(named) > 1 else ''}"
        )


def slots(chosen: Sequence[Host]) -> int | None:
    """A hostfile's slots are the processes of each node; None where it has none. Raises SpecError when they differ."""
    found = {host.slots for host in chosen}
    if len(found) > 1:
        listed = ", ".join(f"{host} {host.slots or 'none'}" for host in chosen)
        raise SpecError(f"hosts have different numbers of slots ({listed}); say --procs-per-node")
    return found.pop()


def place(
    hosts: Hosts,
    options: HostOptions,
    name: str,
    job_ids: Sequence[str],
    named: Sequence[Host],
    nodes: int,
    queue: Mapping[str, Any],
    *,
    wanted: Wanted,
    python: Callable[[Remote], str] | None = None,
    same_slots: bool = False,
    in_order: bool = False,
) -> tuple[list[Placement], dict[str, NotPlaced]]:
    """Examines the hosts once, and spreads the jobs over those that can take part, by their free slots.

    Returns too why jobs were not placed: a host was lost meanwhile, or has no free port. `queue` is what each job takes
    of each host, `wanted` what any job needs of it; with `in_order` a job's hosts keep the order of `named`. Hosts that
    are left out, and warnings, are logged. Raises NotPlaced, with a line for each failure, when there are fewer than a
    job needs; with `same_slots`, also what `slots` raises.
    """
    together = nodes + options.spares > 1
    wanted = replace(wanted, gpus=queue["gpus"], leads=min(len(named), _MOST_LEADS) if together else 0)
    if len(job_ids) > 1:
        progress.info("examining %s for %d jobs", f"{len(named)} host{'s' if len(named) > 1 else ''}", len(job_ids))
    report = examined(hosts, options, name, named, wanted, python=python)
    failures = [str(finding) for finding in report.findings if finding.severity == "fails"]
    facts = {row.host: row.seen.facts for row in report.rows if row.seen is not None}
    rooms: list[Room] = []
    for found in [room(queue, host, facts[host]) for host in report.usable]:
        if isinstance(found, str):
            failures.append(found)
        else:
            rooms.append(found)
    if len(rooms) < nodes or (together and (report.master is None or report.port is None)):
        lines = "; ".join(failures)
        raise NotPlaced(f"{len(rooms)} of {len(named)} hosts can take part, {nodes} are needed: {lines}")
    chosen = choose(rooms, len(job_ids), nodes, options.spares)
    if not in_order:  # who leads when others are lost should be reached by all
        doubtful = {finding.host for finding in report.findings if finding.check == "reach"}
        chosen = [(sorted(members, key=lambda host: str(host) in doubtful), spares) for members, spares in chosen]
    addresses = _addresses(hosts, options, report, facts)
    claim = os.urandom(8).hex()
    jobs = {job_id: [*members, *spares] for job_id, (members, spares) in zip(job_ids, chosen, strict=True)}
    for its in jobs.values() if same_slots else ():
        slots(its)
    ports, refused = _prepared(hosts, options, name, jobs, report.port, claim)
    _log(report, failures, {str(host) for members in jobs.values() for host in members})

    def node(job_id: str, host: Host) -> Node:
        return Node(host=host, facts=facts[host], address=addresses[host], port=ports[job_id, host])

    return [
        Placement(
            job_id=job_id,
            members=tuple(node(job_id, host) for host in members),
            spares=tuple(node(job_id, host) for host in spares),
            master_port=report.port,
            claim=claim,
        )
        for job_id, (members, spares) in zip(job_ids, chosen, strict=True)
        if job_id not in refused
    ], refused


def _log(report: Report, failures: Sequence[str], used: set[str]) -> None:
    for line in failures:
        logger.warning("left out: %s", one_line(line))
    for finding in report.findings:
        if finding.severity == "warns" and finding.host in used:
            logger.warning("%s", one_line(str(finding)))


def _some_ports(options: HostOptions, name: str, jobs: int) -> tuple[int, ...]:
    """By chance, so that two submits at once do not both take the first that is free."""
    ports = port_range(options, name)
    return tuple(random.sample(ports, min(_PORTS_TRIED * jobs, len(ports))))


def _addresses(hosts: Hosts, options: HostOptions, report: Report, facts: Mapping[Host, Facts]) -> dict[Host, str]:
    """Those that all others reached, where they were tried. The others' are on the interface of the same name as node
    0's, if there is one. They matter when another host has to take the lead.
    """
    interface = None
    if report.master is not None:
        first = report.usable[0]
        interface = next((a.interface for a in facts[first].addresses if a.address == report.master), None)
    found = {host: report.leads[host] for host in report.usable if host in report.leads}
    for host in [host for host in report.usable if host not in found]:
        same = [a.address for a in facts[host].addresses if a.interface == interface]
        kind = [address for address in same if (":" in address) == (":" in (report.master or ""))]
        ranked, _ = candidates(facts[host].addresses, hosts.pool.settings(host).hostname, options.interface)
        found[host] = (kind or ranked or [hosts.pool.settings(host).hostname])[0]
    return found


def _prepared(
    hosts: Hosts,
    options: HostOptions,
    name: str,
    jobs: Mapping[str, Sequence[Host]],
    master_port: int | None,
    claim: str,
) -> tuple[dict[tuple[str, Host], int], dict[str, NotPlaced]]:
    """Lays each job's claim to its directory on its hosts. Returns its ports there (0 if alone), or its error."""
    on: dict[Host, list[str]] = {}
    for job_id, its in jobs.items():
        for host in its:
            on.setdefault(host, []).append(job_id)
    asked: dict[Host, list[Step]] = {}
    for host, ids in on.items():
        ports = [port for port in _some_ports(options, name, len(ids)) if port != master_port]
        asked[host] = []
        for number, job_id in enumerate(ids):
            of_its_own = ports[number :: len(ids)]  # no two jobs are offered the same
            node = jobs[job_id].index(host)
            asked[host].append({"op": "port", "ports": of_its_own if len(jobs[job_id]) > 1 else [0]})
            asked[host].append({"op": "claim", "job": job_id, "node": node, "token": claim})
    found: dict[tuple[str, Host], int] = {}
    problems: dict[str, list[str]] = {}
    for host, outcome in hosts.ask(asked).items():
        done = outcome.value.done[::2] if outcome.value is not None else [None] * len(on[host])
        for job_id, step, port in zip(on[host], asked[host][::2], done, strict=True):
            if port is None:
                taken = ", ".join(map(str, step["ports"]))
                problem = f"{host}: none of its ports {taken} is free; name others (ports: in accel.yaml)"
                problems.setdefault(job_id, []).append(str(outcome.error or problem))
            else:
                found[job_id, host] = int(port) if len(jobs[job_id]) > 1 else 0
    if problems:
        theirs = dict.fromkeys(host for job_id in problems for host in jobs[job_id])
        remove(hosts, options, [f"jobs/{job_id}.claims" for job_id in problems], list(theirs))
    return found, {key: NotPlaced(f"{'; '.join(lines)}; nothing was started") for key, lines in problems.items()}
