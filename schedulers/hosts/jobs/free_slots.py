"""Choice of the hosts for jobs by their free slots. Nothing here contacts a host."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..facts import Facts
from ..host_list import Host
from ..supervisor.slots import required_slots


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


__all__ = ["Capacity", "choose", "host_capacity", "queue_settings"]
