"""`Target`: one place where jobs can run. `Plan`: exactly what it will do, as data. And how targets are found."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar, runtime_checkable

from .convert import convert
from .errors import ConfigError, SchedulerError, SpecError, UnknownTarget, nearest
from .job import Cursor, JobSpec, LogLine, Status
from .printable import one_line

T = TypeVar("T")

ENTRY_POINT_GROUP = "accel.targets"

BUILT_IN: Mapping[str, str] = {
    "local": "schedulers.local.target:LocalTarget",
    "ssh": "schedulers.ssh.target:SshTarget",
    "slurm": "schedulers.slurm.target:SlurmTarget",
    "kubernetes": "schedulers.kubernetes.target:KubernetesTarget",
    "sagemaker": "schedulers.sagemaker.target:SageMakerTarget",
    "tpu": "schedulers.tpu.target:TpuTarget",
}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Exactly what `submit` will do. `str(plan)` is the dry run; golden files hold it in the tests.

    files:    path inside the job's directory -> text, written before any action.
    actions:  what is run, each an argv (or, for an API, the call in words that begin with its verb).
    settings: what the target's own `submit` needs beside them; plain JSON values.
    source:   `file:line` of the target's description; "" for a kind that no file describes.
    """

    target: str
    kind: str
    job_id: str
    files: Mapping[str, str] = field(default_factory=dict)
    actions: tuple[tuple[str, ...], ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    source: str = ""

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: object) -> Plan:
        """The plan that `to_json` gave. Raises ConfigError for anything else."""
        import msgspec

        try:
            return convert(data, cls)
        except msgspec.ValidationError as error:
            raise ConfigError(f"not a plan: {error}") from None

    def __str__(self) -> str:
        lines = [f"# job {self.job_id} on target {self.target} ({self.kind})"]
        lines += [f"# target defined in {one_line(self.source)}"] if self.source else []
        lines += [f"# warning: {warning}" for warning in self.warnings]
        for path, text in self.files.items():
            lines += [f"# file {path}", text.rstrip("\n")]
        lines += [f"$ {shlex.join(action)}" for action in self.actions]
        return "\n".join(lines) + "\n"


def parse_ids(parse: Callable[[str], T], native_ids: Sequence[str]) -> tuple[dict[str, T], dict[str, str]]:
    """What `parse` makes of each native id; and why, of those that it refuses: damage to one job is no other's."""
    parsed: dict[str, T] = {}
    refused: dict[str, str] = {}
    for native_id in native_ids:
        try:
            parsed[native_id] = parse(native_id)
        except SchedulerError as error:
            refused[native_id] = str(error)
    return parsed, refused


class Target(Protocol):
    """One place where jobs can run. Holds no state: all it needs is in its options, the plan or the native id.

    A class that implements it has an `Options` dataclass (the keys that `accel.yaml` and `JobSpec.options` may
    hold, with their types and defaults) and is made with a `TargetContext`.
    """

    name: str
    Options: ClassVar[type]

    def plan(self, spec: JobSpec, job_id: str) -> Plan:
        """Pure: no network, no subprocess, no clock. Raises SpecError for what this target cannot do."""

    def submit(self, plan: Plan) -> str:
        """Does what the plan says and returns the native id. Idempotent per job id: finds an earlier submit first."""

    def poll(self, native_ids: Sequence[str]) -> Mapping[str, Status]:
        """One query to the backend for all ids. An id that is missing from the answer is unknown to the backend,
        not failed. Raises Unreachable when the backend cannot be asked."""

    def logs(self, native_id: str, since: Cursor | None = None) -> Iterator[LogLine]:
        """The lines there are now, per rank, from the cursor on. A line without its ending is held back while the
        job may still write to it. Following is written once, above the targets."""

    def cancel(self, native_id: str) -> None:
        """Asks for an orderly end (the job's grace, then the kill). Cancelling what is gone is no error."""


@runtime_checkable
class Admits(Protocol):
    """A target that can tell before a job is recorded that it cannot run it. Every other target admits all jobs."""

    def admit(self, spec: JobSpec) -> None:
        """Between `plan` and the record: looks at this machine and at nothing else, and changes nothing.

        Raises SpecError for a job that could only fail: no job is recorded then.
        """


@runtime_checkable
class Sizes(Protocol):
    """A target whose options say how many nodes a job has that gives no number itself."""

    def sized(self, spec: JobSpec) -> JobSpec:
        """The job with its nodes. Looks at nothing."""


@runtime_checkable
class Waits(Protocol):
    """A target that is told when a job ends, instead of asking again and again."""

    def wait(self, native_id: str, timeout_s: float) -> bool | None:
        """Returns when the job may have reached a final state, or after `timeout_s` seconds.

        False when only the time is over: the backend then need not be polled. None when that cannot be told.
        """


@dataclass(frozen=True, kw_only=True)
class Found:
    """A job that another machine submitted, with all that is needed to follow it from here.

    spec: as it was submitted, as far as the backend can tell; paths in it are that machine's.
    plan: what was done, as far as it can be told.
    whole: False where something that belongs to the job may be missing, which only its submit makes.
    created_at: seconds since the epoch; None where the backend does not know, and the id tells.
    """

    native_id: str
    spec: JobSpec
    plan: Plan
    whole: bool = True
    created_at: float | None = None

    @classmethod
    def of(
        cls, native_id: str, read: Callable[[], object], *, target: str, kind: str, job_id: str, **more: Any
    ) -> Found:
        """The job of a target that keeps a job's spec as it was submitted: `read` returns that, or raises ValueError or
        its like. Raises SchedulerError for what is no spec of this version's."""
        try:
            kept = read()
            spec = JobSpec.from_json(kept)
        except (ValueError, KeyError, TypeError, RecursionError, SpecError) as error:
            raise SchedulerError(f"another version of accel submitted job {job_id}: {one_line(str(error))}") from None
        plan = Plan(
            target=target, kind=kind, job_id=job_id,
            files={f"{kind}/spec.json": json.dumps(kept, indent=2) + "\n"}, settings={"spec": kept},
            warnings=("submitted by another machine: this is what it asked for",),
        )  # fmt: skip
        return cls(native_id=native_id, spec=spec, plan=plan, **more)


@dataclass(frozen=True, kw_only=True)
class Listed:
    """A job that a backend knows: what a list shows of it, apart from its status."""

    job_id: str
    native_id: str
    name: str
    nodes: int
    created_at: float


@runtime_checkable
class Gathers(Protocol):
    """A class of targets of which any one can be asked about the jobs of others too."""

    @staticmethod
    def asked_with(options: Mapping[str, Any]) -> object:
        """Of a target's options, as JSON has them, those that asking depends on: jobs of all targets that agree in
        them are asked for together."""


@runtime_checkable
class Finds(Protocol):
    """A target whose backend knows jobs by their id, whichever machine submitted them."""

    def find(self, job_id: str) -> Found | None:
        """The job of that id; None when the backend has none. Changes nothing there.

        Raises Unreachable when it may be in a part of the backend that could not be asked.
        """


@runtime_checkable
class Lists(Protocol):
    """A target whose backend can list all jobs of accel that it knows, whichever machine submitted them."""

    def listed(self) -> list[Listed]:
        """The jobs, in any order. Changes nothing there. Raises what a query raises."""


@runtime_checkable
class Sweeps(Protocol):
    """A target that takes many jobs, alike but for their arguments and names, in one request."""

    def plan_many(self, specs: Sequence[JobSpec], job_ids: Sequence[str]) -> list[Plan]:
        """A plan for each job, as pure as `plan`; what they share is in the first one's. Raises SpecError."""

    def submit_many(self, plans: Sequence[Plan]) -> Sequence[str | SchedulerError]:
        """Does what the plans say in one request and returns the native ids in their order, and for a job that was not
        submitted the error that `submit` would raise. Idempotent. Raises what concerns all of the jobs."""

    def cancel(self, native_id: str) -> None:
        """That of every target."""


@runtime_checkable
class Grows(Protocol):
    """A target whose jobs may grow, from `JobSpec.nodes` to `max_nodes`."""

    grows: ClassVar[bool]


@runtime_checkable
class Dated(Protocol):
    """A target that knows when its log lines were written."""

    def cursor_at(self, native_id: str, when: float) -> Cursor:
        """Where the log streams stood `when` (seconds since the epoch), to the second."""


@runtime_checkable
class Tails(Protocol):
    """A target that finds the last lines of its logs without reading the logs."""

    def tail_at(self, native_id: str, since: Cursor, count: int) -> Cursor | None:
        """Where the last `count` finished lines of each rank begin, none of them before `since`; None where only the
        logs tell.

        Where a log cannot be asked for now, its place is that of `since`. Raises Unreachable.
        """


@dataclass(frozen=True, kw_only=True)
class Checked:
    """What was found where jobs would run: a table, its header first, and a line for each thing that is wrong."""

    table: list[list[str]]
    failures: tuple[str, ...]
    warnings: tuple[str, ...]


@runtime_checkable
class Checks(Protocol):
    """A target that can say, before any job, whether it could run one."""

    def check(self, gpus: int = 0) -> Checked:
        """Whether every machine could take part in a job that needs so many GPUs of each. Changes nothing there.

        Raises SchedulerError when there is nothing to ask.
        """


@runtime_checkable
class Clears(Protocol):
    """A target that keeps something of a job that is over."""

    def clear(self, jobs: Mapping[str, str | None]) -> list[str]:
        """Removes what it keeps of these jobs, all of them over: job id -> native id, None where none was confirmed.

        Removes as much as can be reached, and nothing of a job that still runs there; returns a line for people for
        each thing that stays.
        """


@runtime_checkable
class Outlives(Protocol):
    """A target where a part of a job may run on after the job has ended."""

    def cancel_rest(self, native_id: str) -> bool:
        """Cancel what still runs of a job that is over, and keep its logs. Returns True when something still ran.

        Raises Unreachable.
        """


@runtime_checkable
class RunsInPlace(Protocol):
    """A class of targets whose jobs run in the directories of their records."""

    @staticmethod
    def in_use(directory: Path) -> str:
        """Return why the job of this directory may still run although its record has a final state; else ''."""


@runtime_checkable
class Shells(Protocol):
    """A target that can run a program beside a job's ranks, while the job runs."""

    def shell(self, native_id: str, node: int, argv: Sequence[str], *, terminal: bool) -> int:
        """Runs `argv` (a shell, when it is empty) where that node of the job is, with this process's standard streams,
        and returns its exit code. With `terminal` standard input and output are one, and it gets one.

        Raises SubmitError when the node does not run, Unreachable when it cannot be asked or falls silent.
        """


@runtime_checkable
class Fetches(Protocol):
    """A target that keeps what its jobs leave as their results."""

    def fetch(self, native_id: str, directory: Path) -> list[str]:
        """Makes the directory out of what the job left, whole or not at all; returns the names in it. Raises NotReady
        where there is nothing yet, or the directory is there, and Unreachable."""


@runtime_checkable
class HasNative(Protocol):
    """A target whose vendor's own library has an object for a job."""

    def native(self, native_id: str) -> object:
        """The vendor's object. Raises ConfigError where its library is not installed, and Unreachable."""


@runtime_checkable
class Reviews(Protocol):
    """A target whose backend can say of a plan, before it is carried out, what it would refuse."""

    def review(self, plan: Plan) -> list[str]:
        """Shows the backend what `submit` would make and returns a line for each thing that it would refuse, or leave
        out. Changes nothing there. Raises Unreachable, ConfigError."""


@dataclass(frozen=True, kw_only=True)
class TargetContext:
    """What a target is made with: its name in `accel.yaml`, its validated options, and where job directories are."""

    name: str
    options: Any
    jobs: Path


def kinds() -> dict[str, str]:
    """Every kind of target: name -> `module:class`. An entry point may add a name and never takes one."""
    import importlib.metadata

    found = {point.name: point.value for point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)}
    return found | dict(BUILT_IN)


def refused_entry_points() -> list[str]:
    """One line for every installed entry point that tried to take a built-in name."""
    import importlib.metadata

    return [
        f"entry point {point.name} = {point.value} is ignored: {point.name!r} is a built-in kind of target"
        for point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
        if BUILT_IN.get(point.name, point.value) != point.value
    ]


def load_kind(kind: str, where: str = "--target") -> type[Any]:
    """The class that implements `kind`. Raises UnknownTarget, or ConfigError when a plug-in cannot be imported."""
    import importlib

    path = BUILT_IN.get(kind) or kinds().get(kind)
    if path is None:
        raise UnknownTarget(
            f"{where}: no kind of target {kind!r}{nearest(kind, kinds())} (kinds: {', '.join(kinds())})"
        )
    module, _, name = path.partition(":")
    try:
        loaded = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{where}: the target kind {kind!r} ({path}) cannot be loaded: {error}") from error
    if not isinstance(loaded, type):
        raise ConfigError(f"{where}: the target kind {kind!r} ({path}) is not a class")
    return loaded


def kinds_with(method: str) -> str:
    """The built-in kinds of targets that have a method, for a message."""
    return ", ".join(kind for kind in BUILT_IN if hasattr(load_kind(kind), method)) or "none"
