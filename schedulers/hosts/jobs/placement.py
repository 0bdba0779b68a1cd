"""Placement of jobs: the hosts of each job, its node 0, and their addresses and ports."""

from __future__ import annotations

import dataclasses
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
from ..facts import Facts, HostRequirements
from ..host_list import Host
from ..preflight import Report, examine
from ..supervisor.slots import required_slots
from ..transport import Remote
from .cleanup import remove
from .native_id import jobs_by_host
from .options import HostOptions
from .status import Hosts, Step

_PORTS_TRIED = 16
_MAX_LEADS = 16  # number of hosts that all others try to reach as node 0
_PROGRESS_S = 1.0

logger = logging.getLogger(__name__)
progress = logging.getLogger("schedulers.progress")


class PlacementError(SubmitError):
    """The hosts cannot run the job. Nothing was started."""

    reason = Reason.NO_CAPACITY


@dataclass(frozen=True, kw_only=True)
class Node:
    """A host of a job. Its supervisor listens for the others at `address` and `port`; port 0 if it is alone."""

    host: Host
    facts: Facts
    address: str
    port: int

    def to_json(self) -> dict[str, Any]:
        interface = self.facts.interface_of(self.address)
        return {"name": str(self.host), "address": self.address, "control_port": self.port, "interface": interface}


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The hosts of one job. members: in the order of their ranks; the first one is node 0.

    claim: distinguishes this submit's claims to the job's directories from those of an earlier, killed submit of it.
    """

    job_id: str
    members: tuple[Node, ...]
    spares: tuple[Node, ...]
    master_port: int | None
    claim: str

    @property
    def nodes(self) -> tuple[Node, ...]:
        return self.members + self.spares


def examine_hosts(
    hosts: Hosts,
    chosen: Sequence[Host],
    requirements: HostRequirements,
    *,
    python: str | Callable[[Remote], str] | None = None,
) -> Report:
    """Run the preflight checks on the hosts, with the target's options added to `requirements`.

    `python` returns the ranks' interpreter on a host, if it is not the target's.
    """
    options, on_probed = hosts.options, _Progress(len(chosen)).advance
    disk_bytes, ports = int(options.disk_gb * 1_000_000_000), _random_ports(options, 1)
    requirements = replace(requirements, disk_bytes=disk_bytes, interface=options.interface, ports=ports)
    python = python or hosts.python
    return examine(hosts.pool, chosen, requirements, python=python, root=options.root, on_probed=on_probed)


class _Progress:
    """A progress message about the hosts examined so far, every second."""

    def __init__(self, count: int) -> None:
        self._lock = threading.Lock()
        self._count, self._done = count, 0
        self._next = time.monotonic() + _PROGRESS_S

    def advance(self, host: Host) -> None:
        with self._lock:
            self._done += 1
            if time.monotonic() >= self._next:
                self._next = time.monotonic() + _PROGRESS_S
                progress.info("examined %d of %d hosts", self._done, self._count)


def check_host_count(hosts: Sequence[Host], nodes: int, spares: int, name: str) -> None:
    """Raise SpecError if the target has fewer hosts than the job needs."""
    if len(hosts) < nodes + spares:
        extra = f" and {spares} spare{'s' if spares > 1 else ''}" if spares else ""
        raise SpecError(
            f"target {name}: {nodes} node{'s' if nodes > 1 else ''}{extra} requested, but it has "
            f"{len(hosts)} host{'s' if len(hosts) > 1 else ''}"
        )


def common_slots(chosen: Sequence[Host]) -> int | None:
    """Return the slots of each host in the hostfile; None if it has none. Raises SpecError if they differ."""
    counts = {host.slots for host in chosen}
    if len(counts) > 1:
        listing = ", ".join(f"{host} {host.slots or 'none'}" for host in chosen)
        raise SpecError(f"hosts have different numbers of slots ({listing}); set --procs-per-node")
    return counts.pop()


def place(
    hosts: Hosts,
    job_ids: Sequence[str],
    candidate_hosts: Sequence[Host],
    nodes: int,
    queue: Mapping[str, Any],
    *,
    requirements: HostRequirements,
    python: Callable[[Remote], str] | None = None,
    same_slots: bool = False,
    in_order: bool = False,
) -> tuple[list[Placement], dict[str, PlacementError]]:
    """Examine the hosts once, and place the jobs on the usable ones by their free slots.

    Returns the placements, and an error for each job whose host was lost meanwhile or has no free port. `queue` is what
    each job takes of each host, `requirements` what any job needs of it; with `in_order` a job's hosts keep the order
    of `candidate_hosts`. Hosts that are left out, and warnings, are logged. Raises PlacementError, with a line for each
    failure, if too few hosts are usable; with `same_slots`, also what `common_slots` raises.
    """
    multi_host = nodes + hosts.options.spares > 1
    leads = min(len(candidate_hosts), _MAX_LEADS) if multi_host else 0
    requirements = replace(requirements, gpus=queue["gpus"], leads=leads)
    if len(job_ids) > 1:
        count = len(candidate_hosts)
        progress.info("examining %s for %d jobs", f"{count} host{'s' if count > 1 else ''}", len(job_ids))
    report = examine_hosts(hosts, candidate_hosts, requirements, python=python)
    failures = [str(finding) for finding in report.findings if finding.severity == "fails"]
    facts = {row.host: row.facts.facts for row in report.rows if row.facts is not None}
    capacities: list[Capacity] = []
    for candidate in [host_capacity(queue, host, facts[host]) for host in report.usable]:
        if isinstance(candidate, str):
            failures.append(candidate)
        else:
            capacities.append(candidate)
    if len(capacities) < nodes or (multi_host and (report.master is None or report.port is None)):
        lines = "; ".join(failures)
        raise PlacementError(
            f"{len(capacities)} of {len(candidate_hosts)} hosts can take part, {nodes} are needed: {lines}"
        )
    chosen = choose(capacities, len(job_ids), nodes, hosts.options.spares)
    if not in_order:  # others should reach a host that may have to lead
        suspect_hosts = {finding.host for finding in report.findings if finding.check == "reach"}
        chosen = [(sorted(members, key=lambda host: str(host) in suspect_hosts), spares) for members, spares in chosen]
    addresses = _addresses(hosts, report, facts)
    claim = os.urandom(8).hex()
    jobs = {job_id: [*members, *spares] for job_id, (members, spares) in zip(job_ids, chosen, strict=True)}
    for job_hosts in jobs.values() if same_slots else ():
        common_slots(job_hosts)
    ports, unplaced = _claim_directories(hosts, jobs, report.port, claim)
    used = {str(host) for members in jobs.values() for host in members}
    for failure in failures:
        logger.warning("left out: %s", one_line(failure))
    for finding in report.findings:
        if finding.severity == "warns" and finding.host in used:
            logger.warning("%s", one_line(str(finding)))

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
        if job_id not in unplaced
    ], unplaced


def _random_ports(options: HostOptions, jobs: int) -> tuple[int, ...]:
    """Return random ports, so that two submits at once do not both take the first free one."""
    ports = options.port_range
    return tuple(random.sample(ports, min(_PORTS_TRIED * jobs, len(ports))))


def _addresses(hosts: Hosts, report: Report, facts: Mapping[Host, Facts]) -> dict[Host, str]:
    """Return each host's address: the one that the others reached or, if untested, one on node 0's interface.

    Untested addresses matter only if such a host has to lead.
    """
    interface = None if report.master is None else facts[report.usable[0]].interface_of(report.master)
    by_host = {host: report.leads[host] for host in report.usable if host in report.leads}
    for host in [host for host in report.usable if host not in by_host]:
        same_interface = [entry.address for entry in facts[host].addresses if entry.interface == interface]
        same_family = [address for address in same_interface if (":" in address) == (":" in (report.master or ""))]
        ranked, _ = candidates(facts[host].addresses, hosts.pool.settings(host).hostname, hosts.options.interface)
        by_host[host] = (same_family or ranked or [hosts.pool.settings(host).hostname])[0]
    return by_host


def _claim_directories(
    hosts: Hosts, jobs: Mapping[str, Sequence[Host]], master_port: int | None, claim: str
) -> tuple[dict[tuple[str, Host], int], dict[str, PlacementError]]:
    """Claim each job's directory on its hosts. Returns its ports there (0 if alone), and errors by job."""
    by_host = jobs_by_host(jobs.items())
    steps: dict[Host, list[Step]] = {}
    for host, ids in by_host.items():
        ports = [port for port in _random_ports(hosts.options, len(ids)) if port != master_port]
        steps[host] = []
        for number, job_id in enumerate(ids):
            own_ports = ports[number :: len(ids)]  # no two jobs get the same
            node = jobs[job_id].index(host)
            steps[host].append({"op": "port", "ports": own_ports if len(jobs[job_id]) > 1 else [0]})
            steps[host].append({"op": "claim", "job": job_id, "node": node, "token": claim})
    assigned: dict[tuple[str, Host], int] = {}
    problems: dict[str, list[str]] = {}
    for host, outcome in hosts.query(steps).items():
        done = outcome.value.done[::2] if outcome.value is not None else [None] * len(by_host[host])
        for job_id, step, port in zip(by_host[host], steps[host][::2], done, strict=True):
            if port is None:
                tried_ports = ", ".join(map(str, step["ports"]))
                problem = f"{host}: none of its ports {tried_ports} is free; name others (ports: in accel.yaml)"
                problems.setdefault(job_id, []).append(str(outcome.error or problem))
            else:
                assigned[job_id, host] = int(port) if len(jobs[job_id]) > 1 else 0
    if problems:
        affected_hosts = dict.fromkeys(host for job_id in problems for host in jobs[job_id])
        remove(hosts, [f"jobs/{job_id}.claims" for job_id in problems], list(affected_hosts))
    return assigned, {
        key: PlacementError(f"{'; '.join(lines)}; nothing was started") for key, lines in problems.items()
    }


# Choice of the hosts for jobs by their free slots. Nothing below contacts a host.


@dataclass(kw_only=True)
class Capacity:
    """A host's capacity for jobs of one size: how many can run there at once, and how many run or wait (`ahead`)."""

    host: Host
    capacity: int
    ahead: int

    @property
    def load(self) -> float:
        """At most 1 if another job can start at once; 1 more for every `capacity` jobs that wait."""
        return (self.ahead + 1) / self.capacity


def queue_settings(job: Mapping[str, Any], host: Host, facts: Facts) -> dict[str, Any]:
    """Return the job's settings for this host's queue, as its supervisor there reads them."""
    procs = job["procs_per_node"] or host.slots
    return {**job, "procs_per_node": procs, "devices": dataclasses.asdict(facts.devices)}


def host_capacity(job: Mapping[str, Any], host: Host, facts: Facts) -> Capacity | str:
    """Return the host's capacity for such jobs, or a line that says why it has none."""
    requests = required_slots(queue_settings(job, host, facts), dataclasses.asdict(facts.devices))
    for request in requests:
        if request.count > len(request.slots):
            return (
                f"{host}: has {len(request.slots)} {request.what}, not the {request.count} requested; "
                "request fewer, or leave it out"
            )
    held = set(facts.queue.held)
    capacity = min(len(request.slots) // request.count for request in requests)
    free = min(
        len([name for name in request.slots if name.replace("/", "_") not in held]) // request.count
        for request in requests
    )
    # Waiting jobs are served first, so nothing is free for new ones.
    ahead = capacity + facts.queue.waiting if facts.queue.waiting else capacity - free
    return Capacity(host=host, capacity=capacity, ahead=ahead)


def choose(capacities: Sequence[Capacity], jobs: int, nodes: int, spares: int) -> list[tuple[list[Host], list[Host]]]:
    """Return members and spares of each job, in the target's order: the hosts with the least load so far."""
    chosen = []
    for _ in range(jobs):
        ranked = sorted(range(len(capacities)), key=lambda number: capacities[number].load)
        members = sorted(ranked[:nodes])
        for number in members:
            capacities[number].ahead += 1
        chosen.append(
            ([capacities[n].host for n in members], [capacities[n].host for n in ranked[nodes : nodes + spares]])
        )
    return chosen
