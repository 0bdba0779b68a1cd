"""Checks over the facts of all hosts, one pure function each. A finding is one line with a remedy."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

from .facts import GB, Facts, HostRequirements, TimedFacts

T = TypeVar("T")

_SKEW_WARNS_S = 5.0
_SKEW_FAILS_S = 60.0
_FEW_FILES = 4096
_FEW_PROCESSES = 1024
_LITTLE_SHM = 256_000_000
OTHER_PYTHON_HINT = "name another (python: or venv: in accel.yaml)"
_LIMITS = "raise {} there, in /etc/security/limits.conf"


@dataclass(frozen=True)
class Finding:
    """A problem of a host. `fails` excludes the host from the job; `warns` does not."""

    host: str
    check: str
    severity: Literal["fails", "warns"]
    problem: str
    remedy: str = ""

    @classmethod
    def fails(cls, host: str, check: str, problem: str, remedy: str = "") -> Finding:
        return cls(host, check, "fails", problem, remedy)

    @classmethod
    def warns(cls, host: str, check: str, problem: str, remedy: str = "") -> Finding:
        return cls(host, check, "warns", problem, remedy)

    def __str__(self) -> str:
        return f"{self.host}: {self.problem}" + (f"; {self.remedy}" if self.remedy else "")


FactsByHost = Mapping[str, TimedFacts]
Check = Callable[[FactsByHost, HostRequirements], Iterator[Finding]]


def run_checks(hosts: FactsByHost, requirements: HostRequirements) -> list[Finding]:
    """Return all findings, check by check, in the order of `hosts` (name -> facts)."""
    return [finding for check in CHECKS for finding in check(hosts, requirements)]


def same_machine(hosts: FactsByHost, requirements: HostRequirements) -> Iterator[Finding]:
    by_machine: dict[str, str] = {}
    for name, timed_facts in hosts.items():
        other = by_machine.setdefault(timed_facts.facts.machine, name)
        if other != name:
            yield Finding.fails(name, "machine", f"is the same machine as {other}", "leave one of the names out")


def python(hosts: FactsByHost, requirements: HostRequirements) -> Iterator[Finding]:
    minimum = requirements.python
    usual = _usual({name: ".".join(timed_facts.facts.python.split(".")[:2]) for name, timed_facts in hosts.items()})
    for name, timed_facts in hosts.items():
        facts = timed_facts.facts
        version = tuple(int(part) for part in facts.python.split(".")[:2])
        if version < minimum:
            need = ".".join(map(str, minimum))
            problem = f"{facts.executable} is Python {facts.python}; {need} is required"
            yield Finding.fails(name, "python", problem, OTHER_PYTHON_HINT)
        elif ".".join(map(str, version)) != usual:
            problem = f"has Python {facts.python}, most hosts {usual}"
            yield Finding.warns(name, "python", problem, f"use the same one, or {OTHER_PYTHON_HINT}")


def packages(hosts: FactsByHost, requirements: HostRequirements) -> Iterator[Finding]:
    for package in requirements.packages:
        versions = {name: timed_facts.facts.packages.get(package) for name, timed_facts in hosts.items()}
        usual = _usual({name: version for name, version in versions.items() if version is not None})
        for name, version in versions.items():
            interpreter = _command_path(hosts[name].facts)
            # A build (+cu126) is in an index of its own: pip cannot install it by version.
            requirement = package if usual in (None, "?") else f"{package}=={str(usual).partition('+')[0]}"
            remedy = f"run there: {interpreter} -m pip install {requirement}"
            if version is None:
                problem = f"no {package} for {interpreter}"
                yield Finding.fails(name, "packages", problem, f"{remedy}, or {OTHER_PYTHON_HINT}")
            elif version != usual:
                # A release's second number changes how processes talk to each other; the third does not.
                severity = Finding.warns if _release(version) == _release(usual) else Finding.fails
                yield severity(name, "packages", f"has {package} {version}, most hosts {usual}", remedy)


def disk(hosts: FactsByHost, requirements: HostRequirements) -> Iterator[Finding]:
    for name, timed_facts in hosts.items():
        facts = timed_facts.facts
        if not facts.disk_writable:
            problem = f"{facts.user} may not write to {facts.disk}"
            yield Finding.fails(name, "disk", problem, "name another directory (root: in accel.yaml)")
        elif facts.disk_free < requirements.disk_bytes:
            free, need = _gigabytes(facts.disk_free), _gigabytes(requirements.disk_bytes)
            remedy = "free space there, or lower disk_gb in accel.yaml"
            yield Finding.fails(name, "disk", f"{free} free at {facts.disk}, {need} are needed", remedy)
        if facts.shm_free < _LITTLE_SHM:
            free = _gigabytes(facts.shm_free)
            remedy = "enlarge it there: mount -o remount,size=50% /dev/shm (a container: --shm-size)"
            yield Finding.warns(name, "shm", f"{free} free at /dev/shm, which data loaders use", remedy)


def clock(hosts: FactsByHost, requirements: HostRequirements) -> Iterator[Finding]:
    for name, timed_facts in hosts.items():
        skew = timed_facts.skew_s
        if abs(skew) > _SKEW_WARNS_S:
            severity = Finding.fails if abs(skew) > _SKEW_FAILS_S else Finding.warns
            direction = "ahead" if skew > 0 else "behind"
            remedy = "start a time service there: timedatectl set-ntp true (or chronyd)"
            yield severity(name, "clock", f"its clock is {abs(skew):.0f} s {direction}", remedy)


def gpus(hosts: FactsByHost, requirements: HostRequirements) -> Iterator[Finding]:
    usual = _usual({name: timed_facts.facts.gpus.count for name, timed_facts in hosts.items()})
    for name, timed_facts in hosts.items():
        gpu_facts = timed_facts.facts.gpus
        if gpu_facts.problem and (requirements.gpus or gpu_facts.count):
            yield Finding.fails(name, "gpus", f"its GPUs do not work: {gpu_facts.problem}", "run there: nvidia-smi")
        elif gpu_facts.count < requirements.gpus:
            source = f" ({gpu_facts.how})" if gpu_facts.how else ""
            problem = f"has {gpu_facts.count} of {requirements.gpus} GPUs{source}"
            yield Finding.fails(name, "gpus", problem, "request fewer (--gpus), or leave it out")
        elif gpu_facts.count != usual and requirements.gpus == 0:
            problem = f"has {gpu_facts.count} GPUs, most hosts {usual}"
            yield Finding.warns(name, "gpus", problem, "set how many to use: --gpus")


def devices(hosts: FactsByHost, requirements: HostRequirements) -> Iterator[Finding]:
    for name, timed_facts in hosts.items():
        problem = timed_facts.facts.devices.problem
        if problem:
            remedy = f"run there: {_command_path(timed_facts.facts)} -m accel.launch.devices"
            yield Finding.warns(name, "devices", f"the probe for its devices {problem}", remedy)


def limits(hosts: FactsByHost, requirements: HostRequirements) -> Iterator[Finding]:
    for name, timed_facts in hosts.items():
        facts = timed_facts.facts
        if 0 <= facts.files < _FEW_FILES and facts.gpus.count:
            yield Finding.warns(name, "limits", f"{facts.user} may open {facts.files} files", _LIMITS.format("nofile"))
        if 0 <= facts.processes < _FEW_PROCESSES:
            problem = f"{facts.user} may have {facts.processes} processes"
            yield Finding.warns(name, "limits", problem, _LIMITS.format("nproc"))


CHECKS: tuple[Check, ...] = (same_machine, python, packages, disk, clock, gpus, devices, limits)


def _usual(values: Mapping[str, T]) -> T | None:
    """Return the most common value; of equally common ones, the first host's."""
    most_common = Counter(values.values()).most_common(1)
    return most_common[0][0] if most_common else None


def _command_path(facts: Facts) -> str:
    """Return the interpreter's path as that user's shell understands it."""
    home = facts.home.rstrip("/") + "/"
    return "~/" + facts.executable.removeprefix(home) if facts.executable.startswith(home) else facts.executable


def _release(version: str | None) -> list[str]:
    return re.split(r"[.+]", version or "")[:2]


def _gigabytes(size: int) -> str:
    return f"{size / GB:.1f} GB" if size >= GB / 10 else f"{size // 1_000_000} MB"
