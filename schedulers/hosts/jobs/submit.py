"""Submit to hosts: code, settings, secrets and the supervisor are sent to each, and the supervisors are started."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from ...errors import SchedulerError, SubmitError, Unreachable
from ...job import Reason
from .. import bundle, fanout
from ..errors import HostUnreachable, RemoteError, one_line
from ..host_list import Host
from ..remote_files import Blob
from ..transport import Remote
from .cleanup import remove
from .native_id import Native
from .placement import Placement, progress, queue_settings
from .status import Hosts, query_all

_PORTS_TRIED = 16
_START_S = 60.0


class StartError(SubmitError):
    """A host failed before the job started. Nothing runs, or what was started ends by itself."""

    reason = Reason.NODE_FAILURE


def settings_of(template: Mapping[str, Any], placement: Placement, number: int, token: str) -> dict[str, Any]:
    """Return the settings of one host: the plan's, completed by what the preflight found.

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
    templates: Mapping[str, Mapping[str, Any]],
    placements: Sequence[Placement],
    *,
    code: Blob,
) -> dict[str, StartError]:
    """Send everything but secrets to all hosts at once; the code only to hosts that lack it.

    Returns an error for each job that cannot start because a host failed. Its files are removed from the hosts that can
    be reached.
    """
    tokens = {placement.job_id: os.urandom(32).hex() for placement in placements}
    problems = _clear_leftovers(hosts, _by_host(placements))
    by_host = _by_host([placement for placement in placements if placement.job_id not in problems])

    def send_to_host(remote: Remote) -> None:
        contents: dict[str, bytes] = {}
        for placement, number in by_host[remote.host]:
            job_id = placement.job_id
            settings = settings_of(templates[job_id], placement, number, tokens[job_id])
            contents[f"jobs/{job_id}/{bundle.PROGRAM}"] = bundle.program()
            contents[f"jobs/{job_id}/settings.json"] = json.dumps(settings).encode()
        paths = [f"jobs/{placement.job_id}/code" for placement, _ in by_host[remote.host]]
        hosts.files(remote).install(code, paths, contents)

    if len(placements) > 1 and by_host:
        progress.info("sending %d jobs to %s", len(placements), f"{len(by_host)} host{'s' if len(by_host) > 1 else ''}")
    if hosts.options.fan_out and fanout.worthwhile(len(by_host), code):
        _fan_out(hosts, by_host, code)
    problems |= _run_on_hosts(hosts, by_host, send_to_host)
    failed = [placement for placement in placements if placement.job_id in problems]
    if failed:
        paths = [f"jobs/{placement.job_id}{end}" for placement in failed for end in ("", ".claims")]
        remove(hosts, paths, list(_by_host(failed)))
    texts = {job_id: "; ".join(map(str, errors)) for job_id, errors in problems.items()}
    return {job_id: StartError(f"{text}; nothing was started") for job_id, text in texts.items()}


OnHost: TypeAlias = "Mapping[Host, Sequence[tuple[Placement, int]]]"
Problems: TypeAlias = dict[str, list[SchedulerError]]


def _by_host(placements: Sequence[Placement]) -> OnHost:
    """Return each host's jobs, each with the host's node number in it."""
    by_host: dict[Host, list[tuple[Placement, int]]] = {}
    for placement in placements:
        for number, node in enumerate(placement.nodes):
            by_host.setdefault(node.host, []).append((placement, number))
    return by_host


def _fan_out(hosts: Hosts, by_host: OnHost, code: Blob) -> None:
    """Have the hosts forward the code to each other as far as possible, on ports that no supervisor uses."""
    port_sample = random.sample(ports := hosts.options.port_range, min(_PORTS_TRIED, len(ports)))
    used_ports = {
        host: {port for placement, number in jobs for port in (placement.nodes[number].port, placement.master_port)}
        for host, jobs in by_host.items()
    }
    fanout.fan_out(
        hosts.pool,
        {host: jobs[0][0].nodes[jobs[0][1]].address for host, jobs in by_host.items()},
        code,
        root=hosts.options.root,
        python=hosts.python,
        ports={host: [port for port in port_sample if port not in used_ports[host]] for host in by_host},
    )


def _clear_leftovers(hosts: Hosts, by_host: OnHost) -> Problems:
    """Remove what earlier submits left, and note the hosts' ids.

    Returns problems by job, for instance if two hosts share a directory.
    """
    steps_by_host: dict[Host, list[Mapping[str, Any]]] = {
        host: [
            *({"op": "clear", "job": p.job_id, "token": p.claim, "node": number} for p, number in jobs),
            {"op": "id", "make": True},
        ]
        for host, jobs in by_host.items()
    }
    problems: Problems = {}
    for host, outcome in hosts.query(steps_by_host).items():
        if outcome.value is not None:
            hosts.new_ids[str(host)] = outcome.value.done[-1]
        for index, (placement, _) in enumerate(by_host[host]):
            error = outcome.error
            if outcome.value is not None and (other_nodes := outcome.value.done[index]):
                other_host = (
                    placement.nodes[other_nodes[0]].host if other_nodes[0] < len(placement.nodes) else "another host"
                )
                remedy = "name one that each host has for itself (root: in accel.yaml)"
                error = StartError(f"{host} and {other_host} share the directory {hosts.options.root}: {remedy}")
            if error is not None:
                problems.setdefault(placement.job_id, [error])
    return problems


def _run_on_hosts(hosts: Hosts, by_host: OnHost, act: Callable[[Remote], Mapping[str, RemoteError] | None]) -> Problems:
    """Run `act` on all hosts at once. Returns the errors by job: those of its hosts, and those that `act` returned."""
    problems: Problems = {}
    for outcome in hosts.pool.map(act, list(by_host)):
        for placement, _ in by_host[outcome.host]:
            error = outcome.error or (outcome.value or {}).get(placement.job_id)
            if error is not None:
                problems.setdefault(placement.job_id, []).append(error)
    return problems


def start(hosts: Hosts, placements: Sequence[Placement], *, secrets: Mapping[str, str]) -> dict[str, SchedulerError]:
    """Start the supervisors on all hosts at once; send each the secrets, which are written to no disk.

    A host where the job has a supervisor, or has ended, starts none.

    Returns an error for each job that did not start on all of its hosts: StartError, or Unreachable if a lost host may
    now run the job alone. The supervisors of several hosts wait for each other before any rank runs.
    """
    by_host = _by_host(placements)

    def start_on_host(remote: Remote) -> dict[str, RemoteError]:
        nodes = {placement.job_id: number for placement, number in by_host[remote.host]}
        step = {"op": "start", "nodes": nodes, "secrets": dict(secrets)}
        (problems,) = hosts.query_host(remote, [step], timeout_s=_START_S + len(nodes)).done
        return {job_id: RemoteError(remote.name, one_line(problem)) for job_id, problem in problems.items()}

    problems = _run_on_hosts(hosts, by_host, start_on_host)
    failed: dict[str, SchedulerError] = {}
    for placement in placements:
        errors = problems.get(placement.job_id, [])
        text = "; ".join(map(str, errors))
        if any(isinstance(error, HostUnreachable) for error in errors) and len(placement.nodes) == 1:
            failed[placement.job_id] = Unreachable(text)
        elif errors:
            start_error = failed[placement.job_id] = StartError(f"{text}; no host runs the job")
            start_error.native_id = native_id(placement)  # what was started of it is to be cancelled
    return failed


def native_id(placement: Placement) -> str:
    return str(Native.of(placement.job_id, [node.host for node in placement.nodes]))


def cancel(hosts: Hosts, native: Native) -> None:
    """Request the job's end on each of its hosts. Raises Unreachable if no host that has it could be reached."""
    replies = query_all(hosts, native.hosts, {"op": "cancel", "job": native.job_id})
    problems = [str(error) for _, _, error in replies if error is not None]
    if problems and not any(reply for _, reply, _ in replies):
        raise Unreachable("; ".join(problems))
