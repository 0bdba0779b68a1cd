"""What goes to the hosts of a job: its code, its settings and secrets, and the supervisor; and how that is started."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from ...errors import SchedulerError, SubmitError, Unreachable
from ...job import Reason
from .. import bundle, fanout
from ..errors import HostUnreachable, RemoteError
from ..host_list import Host
from ..remote_files import Blob, Files
from ..transport import Remote
from .cleanup import remove, unused_s
from .free_slots import queue_settings
from .native_id import Native
from .options import HostOptions, port_range
from .placement import Placement, progress
from .status import Hosts, query_all

_PORTS_TRIED = 16


class StartError(SubmitError):
    """A host was lost, or refused something, on the way to the start. Nothing runs, or what was started ends itself."""

    reason = Reason.NODE_FAILURE


def settings_of(template: Mapping[str, Any], placement: Placement, number: int, token: str) -> dict[str, Any]:
    """The settings of one host: the plan's, with what only the examination of the hosts could tell.

    `number` counts members first, then spares.
    """
    node = placement.nodes[number]
    settings = dict(template)
    settings["token"] = token
    settings["node"] = number
    settings["nodes"] = [node.to_json() for node in placement.members]
    settings["spares"] = [node.to_json() for node in placement.spares]
    settings["master_port"] = placement.master_port
    if settings["workdir"].split("/")[0] == "~":
        settings["workdir"] = node.facts.home + settings["workdir"][1:]
    settings["command"] = [node.facts.executable, *settings["command"][1:]]
    settings["queue"] = queue_settings(settings["queue"], node.host, node.facts)
    return settings


def ship(
    hosts: Hosts,
    options: HostOptions,
    templates: Mapping[str, Mapping[str, Any]],
    placements: Sequence[Placement],
    *,
    code: Blob,
) -> dict[str, StartError]:
    """Sends everything but secrets to every host, at once; only the code that a host lacks is sent.

    Returns why jobs cannot be started: a host failed. Nothing of them is left on the hosts that can be reached.
    """
    tokens = {placement.job_id: os.urandom(32).hex() for placement in placements}
    problems = _cleared(hosts, options, _by_host(placements))
    by_host = _by_host([placement for placement in placements if placement.job_id not in problems])

    def send_to_host(remote: Remote) -> None:
        files = Files(remote, root=options.root, python=hosts.python, unused_s=unused_s(options))
        contents: dict[str, bytes] = {}
        for placement, number in by_host[remote.host]:
            job_id = placement.job_id
            settings = settings_of(templates[job_id], placement, number, tokens[job_id])
            contents[f"jobs/{job_id}/{bundle.PROGRAM}"] = bundle.program()
            contents[f"jobs/{job_id}/settings.json"] = json.dumps(settings).encode()
        files.install(code, [f"jobs/{placement.job_id}/code" for placement, _ in by_host[remote.host]], contents)

    if len(placements) > 1 and by_host:
        progress.info("sending %d jobs to %s", len(placements), f"{len(by_host)} host{'s' if len(by_host) > 1 else ''}")
    if options.fan_out and fanout.worthwhile(len(by_host), code):
        _fan_out(hosts, options, by_host, code)
    problems |= _on_each(hosts, by_host, send_to_host)
    failed = [placement for placement in placements if placement.job_id in problems]
    if failed:
        paths = [f"jobs/{placement.job_id}{end}" for placement in failed for end in ("", ".claims")]
        remove(hosts, options, paths, list(_by_host(failed)))
    texts = {job_id: "; ".join(map(str, errors)) for job_id, errors in problems.items()}
    return {job_id: StartError(f"{text}; nothing was started") for job_id, text in texts.items()}


OnHost: TypeAlias = "Mapping[Host, Sequence[tuple[Placement, int]]]"
Problems: TypeAlias = dict[str, list[SchedulerError]]


def _by_host(placements: Sequence[Placement]) -> OnHost:
    """The jobs of each host, and which of a job's nodes it is."""
    by_host: dict[Host, list[tuple[Placement, int]]] = {}
    for placement in placements:
        for number, node in enumerate(placement.nodes):
            by_host.setdefault(node.host, []).append((placement, number))
    return by_host


def _fan_out(hosts: Hosts, options: HostOptions, by_host: OnHost, code: Blob) -> None:
    """Has the code on as many of the hosts as get it from each other, on ports that their supervisors do not want."""
    port_sample = random.sample(ports := port_range(options, ""), min(_PORTS_TRIED, len(ports)))
    used_ports = {
        host: {port for placement, number in jobs for port in (placement.nodes[number].port, placement.master_port)}
        for host, jobs in by_host.items()
    }
    fanout.fan_out(
        hosts.pool,
        {host: jobs[0][0].nodes[jobs[0][1]].address for host, jobs in by_host.items()},
        code,
        root=options.root,
        python=hosts.python,
        ports={host: [port for port in port_sample if port not in used_ports[host]] for host in by_host},
    )


def _cleared(hosts: Hosts, options: HostOptions, by_host: OnHost) -> Problems:
    """Makes room for the jobs on every host. Returns what is wrong, as when hosts have one directory between them."""
    steps_by_host = {
        host: [{"op": "clear", "job": p.job_id, "token": p.claim, "node": number} for p, number in jobs]
        for host, jobs in by_host.items()
    }
    problems: Problems = {}
    for host, outcome in hosts.query(steps_by_host).items():
        for index, (placement, _) in enumerate(by_host[host]):
            error = outcome.error
            if outcome.value is not None and (other_nodes := outcome.value.done[index]):
                other_host = (
                    placement.nodes[other_nodes[0]].host if other_nodes[0] < len(placement.nodes) else "another host"
                )
                remedy = "name one that each host has for itself (root: in accel.yaml)"
                error = StartError(f"{host} and {other_host} share the directory {options.root}: {remedy}")
            if error is not None:
                problems.setdefault(placement.job_id, [error])
    return problems


def _on_each(hosts: Hosts, by_host: OnHost, act: Callable[[Remote], Mapping[str, RemoteError] | None]) -> Problems:
    """Acts on all hosts at once. Returns the errors of each job: those of its hosts, and those that `act` returns."""
    problems: Problems = {}
    for outcome in hosts.pool.map(act, list(by_host)):
        for placement, _ in by_host[outcome.host]:
            error = outcome.error or (outcome.value or {}).get(placement.job_id)
            if error is not None:
                problems.setdefault(placement.job_id, []).append(error)
    return problems


def start(
    hosts: Hosts, options: HostOptions, placements: Sequence[Placement], *, secrets: Mapping[str, str]
) -> dict[str, SchedulerError]:
    """Starts the supervisors, all at once, and sends each the secrets, which are written nowhere.

    Returns why a job was not started on all of its hosts: NotStarted, or Unreachable when a host was lost that may now
    run the job alone. Those of several hosts wait for all before any rank runs.
    """
    by_host = _by_host(placements)

    def start_on_host(remote: Remote) -> dict[str, RemoteError]:
        nodes = {placement.job_id: number for placement, number in by_host[remote.host]}
        return bundle.start(remote, root=options.root, python=hosts.python, nodes=nodes, secrets=secrets)

    problems = _on_each(hosts, by_host, start_on_host)
    failed: dict[str, SchedulerError] = {}
    for placement in placements:
        errors = problems.get(placement.job_id, [])
        text = "; ".join(map(str, errors))
        if any(isinstance(error, HostUnreachable) for error in errors) and len(placement.nodes) == 1:
            failed[placement.job_id] = Unreachable(text)
        elif errors:
            refusal = failed[placement.job_id] = StartError(f"{text}; no host runs the job")
            if len(errors) < len(placement.nodes):
                refusal.native_id = native_id(placement)
    return failed


def native_id(placement: Placement) -> str:
    return str(Native.of(placement.job_id, [node.host for node in placement.nodes]))


def cancel(hosts: Hosts, native: Native) -> None:
    """Asks for the end on each of the job's hosts. Raises Unreachable when none that has the job could be asked."""
    replies = query_all(hosts, native.hosts, {"op": "cancel", "job": native.job_id})
    problems = [str(error) for _, _, error in replies if error is not None]
    if problems and not any(reply for _, reply, _ in replies):
        raise Unreachable("; ".join(problems))
