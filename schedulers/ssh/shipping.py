"""What goes to the hosts of a job: its code, its settings and secrets, and the supervisor; and how that is started."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import snapshot
from ..errors import SpecError, SubmitError
from ..job import Reason
from ..remote.files import Blob, Files
from ..remote.hosts import Host
from ..remote.supervising import PROGRAM, start_command
from ..remote.supervising import program as supervisor
from ..remote.transport import Outcome, Remote
from .asking import Hosts, tell_all
from .options import SshOptions
from .placing import Node, Placement

_START_S = 60.0


class NotStarted(SubmitError):
    """A host was lost, or refused something, on the way to the start. Nothing runs, or what was started ends itself."""

    reason = Reason.NODE_FAILURE


def pack(code: str, home: Path) -> Blob:
    """The code as it is now. Raises SnapshotError."""
    return Blob.of(snapshot.pack(Path(code), home).path)


def secret_values(secrets: Mapping[str, str]) -> dict[str, str]:
    """What the references mean here, where the job is submitted. Raises SpecError, and never says a value."""
    found = {}
    for name, reference in secrets.items():
        kind, _, where = reference.partition(":")
        if kind == "env":
            value = os.environ.get(where)
            if value is None:
                raise SpecError(f"secret {name}: {where} is not set where the job is submitted")
            found[name] = value
        else:
            try:
                found[name] = Path(where).expanduser().read_text().rstrip("\n")
            except (OSError, UnicodeDecodeError) as error:
                said = getattr(error, "strerror", None) or "it is not text"
                raise SpecError(f"secret {name}: {where}: {said}") from None
    return found


def settings_of(template: Mapping[str, Any], placement: Placement, number: int, token: str) -> dict[str, Any]:
    """The settings of one host: the plan's, with what only the examination of the hosts could tell.

    `number` counts members first, then spares.
    """
    facts = placement.nodes[number].facts
    settings = dict(template)
    settings["token"] = token
    settings["node"] = number
    settings["nodes"] = [node.to_json() for node in placement.members]
    settings["spares"] = [node.to_json() for node in placement.spares]
    settings["master_port"] = placement.master_port
    settings["workdir"] = absolute(settings["workdir"], facts.home)
    settings["command"] = [facts.executable, *settings["command"][1:]]
    return settings


def absolute(path: str, home: str) -> str:
    return home + path[1:] if path == "~" or path.startswith("~/") else path


def ship(
    hosts: Hosts,
    options: SshOptions,
    job_id: str,
    template: Mapping[str, Any],
    placement: Placement,
    *,
    code: Blob,
    secrets: Mapping[str, str],
) -> None:
    """Puts everything on every host, at once; only the code that a host lacks is sent. Raises NotStarted."""
    token = os.urandom(32).hex()
    numbers = {node.host: number for number, node in enumerate(placement.nodes)}
    program = {f"jobs/{job_id}/{PROGRAM}": supervisor()}

    def one(remote: Remote) -> None:
        files = Files(remote, root=options.root, python=hosts.python)
        files.remove(f"jobs/{job_id}")  # of an earlier submit of this job that started nothing
        files.unpack(code, f"jobs/{job_id}/code")
        settings = settings_of(template, placement, numbers[remote.host], token)
        texts = {f"jobs/{job_id}/settings.json": json.dumps(settings).encode()}
        if secrets:
            texts[f"jobs/{job_id}/secrets.json"] = json.dumps(dict(secrets)).encode()
        files.put({**program, **texts})

    _all_or_none(hosts, job_id, hosts.pool.map(one, numbers), "nothing was started")
    _check_not_shared(hosts, options, job_id, numbers)


def _check_not_shared(hosts: Hosts, options: SshOptions, job_id: str, numbers: Mapping[Host, int]) -> None:
    """Every host must have a directory of its own, and a home directory may be on all of them."""
    by_number = {number: host for host, number in numbers.items()}
    for host, found, error in tell_all(hosts, list(numbers), {"op": "node", "job": job_id}):
        if error is not None:
            raise NotStarted(f"{error}; nothing was started")
        if found != numbers[host]:
            raise NotStarted(
                f"{host} and {by_number.get(found, 'another host')} share the directory {options.root}: name one that "
                "each host has for itself (root: in accel.yaml); nothing was started"
            )


def start(hosts: Hosts, options: SshOptions, job_id: str, nodes: Sequence[Node]) -> None:
    """Starts the supervisors, all at once. When one does not start, the others are told to end, and would end by
    themselves: they wait for all before any runs. Raises NotStarted."""
    numbers = {node.host: number for number, node in enumerate(nodes)}
    homes = {node.host: node.facts.home for node in nodes}

    def one(remote: Remote) -> None:
        directory = f"{absolute(options.root, homes[remote.host])}/jobs/{job_id}"
        remote.run(start_command(hosts.python, directory, numbers[remote.host]), timeout_s=_START_S)

    _all_or_none(hosts, job_id, hosts.pool.map(one, numbers), "none of the hosts runs the job")


def _all_or_none(hosts: Hosts, job_id: str, outcomes: Sequence[Outcome[None]], then: str) -> None:
    problems = [str(outcome.error) for outcome in outcomes if outcome.error is not None]
    if problems:
        cancel(hosts, job_id, [outcome.host for outcome in outcomes if outcome.error is None])
        raise NotStarted(f"{'; '.join(problems)}; {then}")


def cancel(hosts: Hosts, job_id: str, asked: Sequence[Host]) -> list[str]:
    """Asks for the end on each of these hosts, those of them that know the job. What hosts could not be asked, why."""
    told = tell_all(hosts, asked, {"op": "cancel", "job": job_id}) if asked else []
    return [str(error) for _, _, error in told if error is not None]
