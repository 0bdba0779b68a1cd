"""Which hosts run a job, who of them is node 0, and on which addresses and ports they talk to each other."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..errors import SpecError, SubmitError
from ..job import Reason
from ..remote.facts import Facts, Wanted
from ..remote.hosts import Host
from ..remote.preflight import Report, examine
from ..remote.reaching import candidates
from ..remote.transport import Remote
from .asking import Hosts, Step
from .clearing import remove
from .options import SshOptions, port_range

_PORTS_TRIED = 16


class NotPlaced(SubmitError):
    """The hosts cannot run the job. Nothing was started."""

    reason = Reason.NO_CAPACITY


@dataclass(frozen=True, kw_only=True)
class Node:
    """A host of a job. `address` and `port` are where its supervisor answers the others."""

    host: Host
    facts: Facts
    address: str
    port: int

    def to_json(self) -> dict[str, Any]:
        interface = next((a.interface for a in self.facts.addresses if a.address == self.address), None)
        return {"name": str(self.host), "address": self.address, "control_port": self.port, "interface": interface}


@dataclass(frozen=True, kw_only=True)
class Placement:
    """members: in the order of their ranks, the first one node 0. `warnings`: one line each.

    claim: what tells the claims that were laid to the hosts' directories on the way here from those of an earlier
           submit of the same job, whose client was killed.
    """

    members: tuple[Node, ...]
    spares: tuple[Node, ...]
    master_port: int
    claim: str
    warnings: tuple[str, ...] = ()

    @property
    def nodes(self) -> tuple[Node, ...]:
        return self.members + self.spares


def examined(
    hosts: Hosts,
    options: SshOptions,
    name: str,
    chosen: Sequence[Host],
    gpus: int,
    *,
    python: Callable[[Remote], str] | None = None,
    packages: bool = True,
) -> Report:
    """What the hosts say of themselves, and whether they can run a job together.

    `python` says which interpreter the ranks get on a host, where it is not the target's; without `packages` nobody
    asks what is installed there.
    """
    wanted = Wanted(
        gpus=gpus,
        disk_bytes=int(options.disk_gb * 1_000_000_000),
        interface=options.interface,
        ports=_some_ports(options, name),
    )
    if not packages:
        wanted = replace(wanted, packages={})
    return examine(hosts.pool, chosen, wanted, python=python or hosts.python, root=options.root)


def enough(named: Sequence[Host], nodes: int, spares: int, name: str) -> list[Host]:
    """The hosts that are asked: as many as the job needs, and its spares. Raises SpecError."""
    if len(named) < nodes + spares:
        extra = f" and {spares} spare{'s' if spares > 1 else ''}" if spares else ""
        raise SpecError(
            f"target {name}: {nodes} node{'s' if nodes > 1 else ''}{extra} asked for, and there "
            f"{'is' if len(named) == 1 else 'are'} {len(named)} host{'s' if len(named) > 1 else ''}"
        )
    return list(named[: nodes + spares])


def place(
    hosts: Hosts,
    options: SshOptions,
    name: str,
    job_id: str,
    chosen: Sequence[Host],
    nodes: int,
    gpus: int,
    *,
    python: Callable[[Remote], str] | None = None,
) -> Placement:
    """Takes the first `nodes` hosts that nothing speaks against; what is left over of them is spare.

    Raises NotPlaced, with a line for each failure, when there are fewer.
    """
    report = examined(hosts, options, name, chosen, gpus, python=python)
    failures = [str(finding) for finding in report.findings if finding.severity == "fails"]
    if len(report.usable) < nodes or report.master is None or report.port is None:
        lines = "; ".join(failures)
        raise NotPlaced(f"{len(report.usable)} of {len(chosen)} hosts can take part, {nodes} are needed: {lines}")
    facts = {row.host: row.seen.facts for row in report.rows if row.seen is not None}
    addresses = _addresses(hosts, options, report, facts)
    claim = os.urandom(8).hex()
    ports = _control_ports(hosts, options, name, job_id, report, claim)
    made = [Node(host=host, facts=facts[host], address=addresses[host], port=ports[host]) for host in report.usable]
    warnings = [str(finding) for finding in report.findings if finding.severity == "warns"]
    left_out = [f"left out: {line}" for line in failures]
    return Placement(
        members=tuple(made[:nodes]),
        spares=tuple(made[nodes:]),
        master_port=report.port,
        claim=claim,
        warnings=(*left_out, *warnings),
    )


def _some_ports(options: SshOptions, name: str) -> tuple[int, ...]:
    """By chance, so that two submits at once do not both take the first that is free."""
    ports = port_range(options, name)
    return tuple(random.sample(ports, min(_PORTS_TRIED, len(ports))))


def _addresses(hosts: Hosts, options: SshOptions, report: Report, facts: dict[Host, Facts]) -> dict[Host, str]:
    """Node 0's, and those of the next few, are the ones that all others reached; the others' are on the interface of
    the same name, if there is one. They matter when another host has to take the lead.
    """
    first = report.usable[0]
    assert report.master is not None  # looked at by the caller
    interface = next((a.interface for a in facts[first].addresses if a.address == report.master), None)
    found = {host: report.leads[host] for host in report.usable if host in report.leads}
    for host in report.usable:
        if host in found:
            continue
        same = [a.address for a in facts[host].addresses if a.interface == interface]
        kind = [address for address in same if (":" in address) == (":" in report.master)]
        ranked, _ = candidates(facts[host].addresses, hosts.pool.settings(host).hostname, options.interface)
        found[host] = (kind or ranked or [hosts.pool.settings(host).hostname])[0]
    return found


def _control_ports(
    hosts: Hosts, options: SshOptions, name: str, job_id: str, report: Report, claim: str
) -> dict[Host, int]:
    """A free port on each host, which on the way lays its claim to the job's directory."""
    some = _some_ports(options, name)
    wanted = dict.fromkeys(report.usable, some)
    wanted[report.usable[0]] = tuple(port for port in some if port != report.port)
    asked: dict[Host, list[Step]] = {
        host: [{"op": "port", "ports": wanted[host]}, {"op": "claim", "job": job_id, "node": number, "token": claim}]
        for number, host in enumerate(report.usable)
    }
    found, problems = {}, []
    for host, outcome in hosts.ask(asked).items():
        port = None if outcome.value is None else outcome.value.done[0]
        if outcome.value is None:
            problems.append(str(outcome.error))
        elif port is None:
            taken = ", ".join(map(str, wanted[host]))
            problems.append(f"{host}: none of its ports {taken} is free; name others (ports: in accel.yaml)")
        else:
            found[host] = int(port)
    if problems:
        remove(hosts, options, [f"jobs/{job_id}.claims"], list(asked))
        raise NotPlaced(f"{'; '.join(problems)}; nothing was started")
    return found
