"""What may be said of any target whose jobs run on hosts that share nothing, and what it means before one is asked."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ...errors import SpecError
from ..remote_files import ROOT

_MIN_HEARTBEAT_S = 5.0
_LAST_PORT = 65535
_MIN_PORTS = 2  # node 0 has one for the ranks' rendezvous and one for its supervisor
_MIN_UNUSED_DAYS = 1.0
_VERSION = re.compile(r"3\.[1-9]\d(\.\d{1,3})?", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class HostOptions:
    """What `accel.yaml` may say of hosts.

    user, port:      of the SSH servers, where a host does not say.
    interface:       the network interface (a name or its beginning) over which the hosts, and their ranks, talk to each
                     other.
    ports:           from which ports on the hosts may be taken, as `29500-29599`.
    concurrency:     how many jobs may run at once on each host; without it, as many as its GPUs and processors allow.
    spares:          so many of the hosts, beyond those the job asks for, stand in for bad ones.
    python:          the interpreter on the hosts that has accel and torch; `venv` is a virtual environment with one.
    requirements:    a requirements file of pip: a virtual environment is made of it on each host, once for the same
                     content, out of that interpreter, whose packages it sees; looked for from the code directory.
    requirements_python: the version of Python of that environment, where it is not that interpreter's: uv makes it, and
                     it has the packages of the file alone, accel and torch too.
    setup:           argvs run once on every host before the ranks start, before those of the job.
    cpu:             train on the CPU even where there are GPUs.
    heartbeat_s:     after so many seconds of silence a host counts as lost.
    start_timeout_s: how long the hosts wait for each other; when one does not come, none runs.
    fan_out:         from 16 hosts on, code of which they need 16 MB together is sent to one of them, and the hosts pass
                     it on to each other, unencrypted; without it, each gets it from here.
    disk_gb:         what must be free on every host.
    unused_days:     contents and environments on a host that were not used for so long may be removed there.
    root:            where everything of ours is on the hosts.
    ssh_config:      the configuration file for SSH, as `ssh -F` takes it, instead of ~/.ssh/config.
    """

    user: str | None = None
    port: int | None = None
    interface: str | None = None
    ports: str | None = None
    concurrency: int | None = None
    spares: int = 0
    python: str | None = None
    venv: str | None = None
    requirements: str | None = None
    requirements_python: str | None = None
    setup: tuple[tuple[str, ...], ...] = ()
    cpu: bool = False
    heartbeat_s: float = 30.0
    start_timeout_s: float = 300.0
    fan_out: bool = True
    disk_gb: float = 1.0
    unused_days: float = 30.0
    root: str = ROOT
    ssh_config: str | None = None


def check(options: HostOptions, name: str) -> None:
    """Raises SpecError, naming the key, for what cannot be meant."""
    subject = f"target {name}"
    if options.heartbeat_s < _MIN_HEARTBEAT_S or options.heartbeat_s == float("inf"):
        raise SpecError(f"{subject}: heartbeat_s must be {_MIN_HEARTBEAT_S:g} or more, not {options.heartbeat_s:g}")
    for key in ("start_timeout_s", "disk_gb"):
        if not 0 < getattr(options, key) < float("inf"):
            raise SpecError(f"{subject}: {key} must be more than 0, not {getattr(options, key):g}")
    if not options.unused_days >= _MIN_UNUSED_DAYS:
        raise SpecError(f"{subject}: unused_days must be {_MIN_UNUSED_DAYS:g} or more, not {options.unused_days:g}")
    if options.concurrency is not None and options.concurrency < 1:
        raise SpecError(f"{subject}: concurrency must be 1 or more, not {options.concurrency}")
    if options.spares < 0:
        raise SpecError(f"{subject}: spares must be 0 or more, not {options.spares}")
    if options.port is not None and not 0 < options.port <= _LAST_PORT:
        raise SpecError(f"{subject}: port must be 1 to {_LAST_PORT}, not {options.port}")
    if options.python is not None and options.venv is not None:
        raise SpecError(f"{subject}: python and venv are both given: keep one")
    if options.requirements is not None and not options.requirements.strip():
        raise SpecError(f"{subject}: requirements must be the name of a file")
    if options.requirements_python is not None:
        if options.requirements is None:
            raise SpecError(f"{subject}: requirements_python is the Python of an environment: name its requirements")
        if not _VERSION.fullmatch(options.requirements_python):
            raise SpecError(
                f"{subject}: requirements_python must be a version from 3.10 on, such as 3.12 or 3.12.4, "
                f"not {options.requirements_python!r}"
            )
    if any(not argv or not argv[0] for argv in options.setup):
        raise SpecError(f"{subject}: setup: a command has no program")
    if not (options.root == "~" or options.root.startswith(("~/", "/"))):
        raise SpecError(f"{subject}: root must begin with / or ~/, not {options.root!r}")
    port_range(options, name)


def port_range(options: HostOptions, name: str) -> range:
    """The ports that may be taken. Where nothing is said, those below the ones that systems give out by themselves."""
    if options.ports is None:
        return range(20000, 32768)
    first, dash, last = options.ports.partition("-")
    if first.isdecimal() and (last.isdecimal() or not dash):
        ports = range(int(first), int(last or first) + 1)
        if len(ports) >= _MIN_PORTS and ports[0] > 0 and ports[-1] <= _LAST_PORT:
            return ports
    raise SpecError(
        f"target {name}: ports must be a range of {_MIN_PORTS} or more, such as 29500-29599, not {options.ports!r}"
    )


def python_of(options: HostOptions) -> str:
    """The interpreter on the hosts; one in the home directory (~/) is made absolute when the home is known."""
    return options.python or (f"{options.venv.rstrip('/')}/bin/python" if options.venv else "python3")
