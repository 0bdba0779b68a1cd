"""A job that another machine submitted: found on the hosts by its id alone."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import SpecError, UnknownJob, Unreachable
from ...job import JobSpec
from ...target import Found, Plan
from ..errors import RemoteError
from ..host_list import Host, parse_hosts
from .native_id import Native
from .status import Hosts, tell_all

Settings = Mapping[str, Any]


def find(hosts: Hosts, named: Sequence[Host], job_id: str, target: str) -> Found | None:
    """Asks all these hosts at once; one that knows the job is enough, for it knows the job's other hosts.

    Raises UnknownJob for a job that was put there and never started, Unreachable when only hosts that cannot be asked
    may know it.
    """
    told = tell_all(hosts, named, {"op": "find", "job": job_id})
    knowing = {host: answer["settings"] for host, answer, _ in told if answer is not None and answer["started"]}
    if knowing:
        return _found(job_id, target, knowing)
    problems = [str(error) for _, _, error in told if error is not None]
    if problems:
        count = len(named) - len(problems)
        rest = f"{count} other host{'s do' if count > 1 else ' does'} not know it" if count else "no host can be asked"
        raise Unreachable(f"job {job_id} may be where nobody can look now ({rest}): {'; '.join(problems)}")
    if any(answer is not None for _, answer, _ in told):
        raise UnknownJob(f"job {job_id} is being submitted to target {target} this moment, or was never started there")
    return None


def _found(job_id: str, target: str, knowing: Mapping[Host, Settings]) -> Found:
    source, settings = next(iter(knowing.items()))
    try:
        spec = JobSpec.from_json(settings.get("spec"))
        native = Native.of(job_id, _named_here(knowing))
    except (SpecError, KeyError, TypeError, ValueError) as error:
        raise RemoteError(str(source), f"another version of accel put job {job_id} there: {error}") from None
    shown = {key: value for key, value in settings.items() if key != "spec"}
    plan = Plan(
        target=target,
        kind="ssh",
        job_id=job_id,
        files={"settings.json": json.dumps(shown, indent=2) + "\n"},
        settings={"nodes": spec.nodes},
        warnings=(f"submitted by another machine: this is what {source} was told",),
    )
    return Found(native_id=str(native), spec=spec, plan=plan)


def _named_here(knowing: Mapping[Host, Settings]) -> list[Host]:
    """The job's hosts by their numbers: as they are called here, and those not named here as the submitter did."""
    settings = next(iter(knowing.values()))
    here = {int(of["node"]): host for host, of in knowing.items()}
    names = [str(node["name"]) for node in (*settings["nodes"], *settings["spares"])]
    return [here.get(number) or parse_hosts(name, source="the job")[0] for number, name in enumerate(names)]


__all__ = ["find"]
