"""Options of all targets whose jobs run on hosts that share nothing, and their validation."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from ...errors import SpecError
from ..remote_files import ROOT

_MIN_HEARTBEAT_S = 5.0
_LAST_PORT = 65535
_MIN_PORTS = 2  # node 0 has one for the ranks' rendezvous and one for its supervisor
_MIN_UNUSED_DAYS = 1.0
_DAY_S = 86400.0
_VERSION = re.compile(r"3\.[1-9]\d(\.\d{1,3})?", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class HostOptions:
    """Options of hosts in `accel.yaml`.

    user, port:      of the SSH servers, for hosts that name none.
    interface:       the network interface (a name or its beginning) that connects the hosts and their ranks.
    ports:           ports that may be used on the hosts, as `29500-29599`.
    concurrency:     maximum number of jobs at once on each host; None: as many as its GPUs and processors allow.
    spares:          number of additional hosts per job, which replace lost ones.
    python:          the interpreter on the hosts that has accel and torch; `venv`: a virtual environment with one.
    requirements:    a requirements file of pip, relative to the code directory. From it each host creates a virtual
                     environment, once for the same content, which sees the packages of that interpreter.
    requirements_python: another Python version for that environment. uv creates it, and it has only the packages of the
                     file: accel and torch must be among them.
    modules:         environment modules that a login shell loads on every host, before setup commands and ranks.
    prologue:        lines of bash that it runs after that.
    setup:           argvs that run once on every host before the ranks start, before those of the job.
    cpu:             train on the CPU even if there are GPUs.
    heartbeat_s:     seconds of silence after which a host counts as lost.
    start_timeout_s: seconds that the hosts wait for each other; if one does not connect, none runs.
    fan_out:         if 16 hosts or more need 16 MB or more of code in all, send it to one of them, and have the hosts
                     forward it to each other, unencrypted; False: send it to each host from here.
    disk_gb:         free space that every host must have.
    unused_days:     days after which blobs and environments that were not used may be removed from a host.
    root:            our directory on the hosts.
    ssh_config:      the SSH configuration file, as for `ssh -F`, instead of ~/.ssh/config.
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
    modules: tuple[str, ...] = ()
    prologue: tuple[str, ...] = ()
    setup: tuple[tuple[str, ...], ...] = ()
    cpu: bool = False
    heartbeat_s: float = 30.0
    start_timeout_s: float = 300.0
    fan_out: bool = True
    disk_gb: float = 1.0
    unused_days: float = 30.0
    root: str = ROOT
    ssh_config: str | None = None

    @property
    def unused_s(self) -> float:
        return self.unused_days * _DAY_S

    @property
    def port_range(self) -> range:
        """The ports that may be used, by default those below the range that systems assign; empty if invalid."""
        if self.ports is None:
            return range(20000, 32768)
        first, dash, last = self.ports.partition("-")
        if not first.isdecimal() or not (last.isdecimal() or not dash):
            return range(0)
        ports = range(int(first), int(last or first) + 1)
        return ports if len(ports) >= _MIN_PORTS and ports[0] > 0 and ports[-1] <= _LAST_PORT else range(0)


def check(options: HostOptions, name: str) -> None:
    """Raise SpecError, naming the key, for invalid options."""
    subject = f"target {name}"
    # Key -> whether its value is valid, and the valid ones.
    limits = {
        "heartbeat_s": (_MIN_HEARTBEAT_S <= options.heartbeat_s < float("inf"), f"{_MIN_HEARTBEAT_S:g} or more"),
        "start_timeout_s": (0 < options.start_timeout_s < float("inf"), "more than 0"),
        "disk_gb": (0 < options.disk_gb < float("inf"), "more than 0"),
        "unused_days": (options.unused_days >= _MIN_UNUSED_DAYS, f"{_MIN_UNUSED_DAYS:g} or more"),
        "concurrency": (options.concurrency is None or options.concurrency >= 1, "1 or more"),
        "spares": (options.spares >= 0, "0 or more"),
        "port": (options.port is None or 0 < options.port <= _LAST_PORT, f"1 to {_LAST_PORT}"),
    }
    for key, (is_valid, valid) in limits.items():
        if not is_valid:
            value = getattr(options, key)
            shown = f"{value:g}" if isinstance(value, float) else value
            raise SpecError(f"{subject}: {key} must be {valid}, not {shown}")
    if options.python is not None and options.venv is not None:
        raise SpecError(f"{subject}: python and venv are both given: keep one")
    if options.requirements is not None and not options.requirements.strip():
        raise SpecError(f"{subject}: requirements must be the name of a file")
    if options.requirements_python is not None:
        if options.requirements is None:
            raise SpecError(f"{subject}: requirements_python is set, but requirements is not; set both")
        if not _VERSION.fullmatch(options.requirements_python):
            raise SpecError(
                f"{subject}: requirements_python must be a version from 3.10 on, such as 3.12 or 3.12.4, "
                f"not {options.requirements_python!r}"
            )
    check_lines(options.modules, options.prologue, subject)
    if any(not argv or not argv[0] for argv in options.setup):
        raise SpecError(f"{subject}: setup: a command has no program")
    if not (options.root == "~" or options.root.startswith(("~/", "/"))):
        raise SpecError(f"{subject}: root must begin with / or ~/, not {options.root!r}")
    if not options.port_range:
        raise SpecError(
            f"{subject}: ports must be a range of {_MIN_PORTS} or more, such as 29500-29599, not {options.ports!r}"
        )


def check_lines(modules: Sequence[str], prologue: Sequence[str], subject: str) -> None:
    """Raise SpecError if an entry is not one line."""
    if any("\n" in line or "\0" in line for line in (*modules, *prologue)):
        raise SpecError(f"{subject}: an entry of modules or prologue has a line break. Write one line per entry")


def module_lines(modules: Sequence[str]) -> list[str]:
    """Return lines of bash that load the modules, and exit if one cannot be loaded."""
    return [f"module load {shlex.quote(module)} || exit" for module in modules]


def python_of(options: HostOptions) -> str:
    """Return the interpreter on the hosts. `~/`, a host's home directory, is still to be replaced."""
    return options.python or (f"{options.venv.rstrip('/')}/bin/python" if options.venv else "python3")
