"""What goes to the hosts of a job: its code, its settings and secrets, and the supervisor; and how that is started."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import snapshot
from ..errors import SubmitError
from ..job import Reason
from ..remote import fanout, supervising
from ..remote.files import Blob, Files
from ..remote.hosts import Host
from ..remote.transport import Outcome, Remote
from .asking import Hosts, tell_all
from .clearing import remove, unused_s
from .options import SshOptions, port_range
from .placing import Node, Placement

_START_S = 60.0
_PORTS_TRIED = 16


class NotStarted(SubmitError):
    """A host was lost, or refused something, on the way to the start. Nothing runs, or what was started ends itself."""

    reason = Reason.NODE_FAILURE


def pack(code: str, home: Path) -> Blob:
    """The code as it is now. Raises SnapshotError."""
    return Blob.of(snapshot.pack(Path(code), home).path)


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
) -> None:
    """Puts everything but secrets on every host, at once; only the code that a host lacks is sent.

    Raises NotStarted, with nothing of the job left on the hosts that can be reached.
    """
    token = os.urandom(32).hex()
    numbers = {node.host: number for number, node in enumerate(placement.nodes)}
    program = {f"jobs/{job_id}/{supervising.PROGRAM}": supervising.program()}

    def one(remote: Remote) -> None:
        files = Files(remote, root=options.root, python=hosts.python, unused_s=unused_s(options))
        files.unpack(code, f"jobs/{job_id}/code")
        settings = settings_of(template, placement, numbers[remote.host], token)
        files.put({**program, f"jobs/{job_id}/settings.json": json.dumps(settings).encode()})

    problems = _cleared(hosts, options, job_id, numbers, placement.claim)
    if not problems:
        if options.fan_out and fanout.worthwhile(len(numbers), code):
            _pass_on(hosts, options, placement, code)
        problems = _problems(hosts.pool.map(one, numbers))
    if problems:
        remove(hosts, options, [f"jobs/{job_id}", f"jobs/{job_id}.claims"], list(numbers))
        raise NotStarted(f"{'; '.join(problems)}; nothing was started")


def _pass_on(hosts: Hosts, options: SshOptions, placement: Placement, code: Blob) -> None:
    """Has the code on as many of the hosts as get it from each other, on ports that their supervisors do not want."""
    some = random.sample(ports := port_range(options, ""), min(_PORTS_TRIED, len(ports)))
    fanout.spread(
        hosts.pool,
        {node.host: node.address for node in placement.nodes},
        code,
        root=options.root,
        python=hosts.python,
        ports={n.host: [port for port in some if port not in (n.port, placement.master_port)] for n in placement.nodes},
    )


def _cleared(hosts: Hosts, options: SshOptions, job_id: str, numbers: Mapping[Host, int], claim: str) -> list[str]:
    """Room for the job on every host; or what is wrong, as when hosts have one directory between them."""
    by_number = {number: host for host, number in numbers.items()}
    step = {"op": "clear", "job": job_id, "token": claim}
    asked = {host: [{**step, "node": number}] for host, number in numbers.items()}
    for host, outcome in hosts.ask(asked).items():
        if outcome.value is None:
            return [str(outcome.error)]
        if outcome.value.done[0]:
            other = by_number.get(outcome.value.done[0][0], "another host")
            remedy = "name one that each host has for itself (root: in accel.yaml)"
            return [f"{host} and {other} share the directory {options.root}: {remedy}"]
    return []


def start(hosts: Hosts, options: SshOptions, job_id: str, nodes: Sequence[Node], *, secrets: Mapping[str, str]) -> None:
    """Starts the supervisors, all at once, and gives each the secrets, which are written nowhere.

    When one does not start, the others are told to end, and would end by themselves: they wait for all before any
    rank runs. Raises NotStarted.
    """
    numbers = {node.host: number for number, node in enumerate(nodes)}
    homes = {node.host: node.facts.home for node in nodes}
    values = json.dumps(dict(secrets)).encode()

    def one(remote: Remote) -> None:
        directory = f"{absolute(options.root, homes[remote.host])}/jobs/{job_id}"
        command = supervising.start_command(hosts.python, directory, numbers[remote.host])
        remote.run(command, stdin=values, timeout_s=_START_S)

    outcomes = hosts.pool.map(one, numbers)
    problems = _problems(outcomes)
    if problems:
        cancel(hosts, job_id, [outcome.host for outcome in outcomes if outcome.error is None])
        raise NotStarted(f"{'; '.join(problems)}; no host runs the job")


def _problems(outcomes: Sequence[Outcome[None]]) -> list[str]:
    return [str(outcome.error) for outcome in outcomes if outcome.error is not None]


def cancel(hosts: Hosts, job_id: str, asked: Sequence[Host]) -> list[str]:
    """Asks for the end on each of these hosts, those of them that know the job. What hosts could not be asked, why."""
    told = tell_all(hosts, asked, {"op": "cancel", "job": job_id}) if asked else []
    return [str(error) for _, _, error in told if error is not None]
