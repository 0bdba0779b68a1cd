"""Discovery of a job that another machine submitted, by its id alone."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import SpecError, UnknownJob, Unreachable
from ...job import JobSpec
from ...target import DiscoveredJob, Plan
from ..errors import RemoteError
from ..host_list import Host, parse_hosts
from .native_id import Native
from .status import Hosts, query_all

Settings = Mapping[str, Any]


def find(hosts: Hosts, host_list: Sequence[Host], job_id: str, target: str) -> DiscoveredJob | None:
    """Query all hosts at once. One that knows the job is enough, for it also knows the job's other hosts.

    Raises UnknownJob for a job that was sent there and never started, Unreachable if only hosts that cannot be reached
    may know it.
    """
    replies = query_all(hosts, host_list, {"op": "find", "job": job_id})
    settings_by_host = {host: reply["settings"] for host, reply, _ in replies if reply is not None and reply["started"]}
    if settings_by_host:
        return _discovered_job(job_id, target, settings_by_host)
    problems = [str(error) for _, _, error in replies if error is not None]
    if problems:
        count = len(host_list) - len(problems)
        summary = f"{count} other host{'s do' if count > 1 else ' does'} not know it" if count else "no host answers"
        raise Unreachable(f"job {job_id} may be on hosts that cannot be reached ({summary}): {'; '.join(problems)}")
    if any(reply is not None for _, reply, _ in replies):
        raise UnknownJob(f"job {job_id} is being submitted to target {target} right now, or was never started there")
    return None


def _discovered_job(job_id: str, target: str, settings_by_host: Mapping[Host, Settings]) -> DiscoveredJob:
    source, settings = next(iter(settings_by_host.items()))
    try:
        spec = JobSpec.from_json(settings.get("spec"))
        native = Native.of(job_id, _job_hosts(settings_by_host))
    except (SpecError, KeyError, TypeError, ValueError) as error:
        raise RemoteError(str(source), f"another version of accel put job {job_id} there: {error}") from None
    shown = {key: value for key, value in settings.items() if key != "spec"}
    plan = Plan(
        target=target,
        kind="ssh",
        job_id=job_id,
        files={"settings.json": json.dumps(shown, indent=2) + "\n"},
        settings={"nodes": spec.nodes},
        warnings=(f"submitted by another machine: these are the settings on {source}",),
    )
    return DiscoveredJob(native_id=str(native), spec=spec, plan=plan)


def _job_hosts(settings_by_host: Mapping[Host, Settings]) -> list[Host]:
    """Return the job's hosts by node number, named as in this target or else as by the submitter."""
    settings = next(iter(settings_by_host.values()))
    by_number = {int(host_settings["node"]): host for host, host_settings in settings_by_host.items()}
    names = [str(node["name"]) for node in (*settings["nodes"], *settings["spares"])]
    return [by_number.get(number) or parse_hosts(name, source="the job")[0] for number, name in enumerate(names)]
