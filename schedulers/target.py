"""`Target`: a place that runs jobs. `Plan`: exactly what it will do, as data. Also the lookup of target kinds."""

from __future__ import annotations

import dataclasses
import importlib
import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar, runtime_checkable

from .convert import convert
from .errors import ConfigError, SchedulerError, SpecError, UnknownTarget, Unreachable, nearest
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
    "service": "schedulers.service.target:ServiceTarget",
}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that `submit` will do. `str(plan)` is the dry run; golden files pin it in the tests.

    files:    path inside the job's directory -> text, written before any action.
    actions:  the commands, each an argv (or, for an API, the call in words, verb first).
    settings: further input of the target's own `submit`; plain JSON values.
    source:   `file:line` of the target's description; "" if no file describes it.
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
        """Return the plan as JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: object) -> Plan:
        """Parse the result of `to_json`. Raises ConfigError for anything else."""
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
    """Return the parsed native ids, and a message for each that `parse` rejects, which does not affect the others."""
    parsed: dict[str, T] = {}
    errors: dict[str, str] = {}
    for native_id in native_ids:
        try:
            parsed[native_id] = parse(native_id)
        except SchedulerError as error:
            errors[native_id] = str(error)
    return parsed, errors


def require_answers(statuses: Mapping[str, Status], unreachable: Mapping[str, str]) -> Mapping[str, Status]:
    """Return the statuses of a poll. Raises Unreachable, with them, if some jobs (native id -> why) have none."""
    if unreachable:
        raise Unreachable("; ".join(dict.fromkeys(unreachable.values())), answers=statuses, silent=unreachable)
    return statuses


class Target(Protocol):
    """A place where jobs can run. Stateless: all it needs is in its options, the plan or the native id.

    An implementation has an `Options` dataclass (the keys that `accel.yaml` and `JobSpec.options` may hold, with
    their types and defaults) and is constructed with a `TargetContext`. A backend with one grace period for all jobs
    has it as `grace_s`: the seconds from SIGTERM to SIGKILL.
    """

    name: str
    Options: ClassVar[type]

    def plan(self, spec: JobSpec, job_id: str) -> Plan:
        """Plan the job without network, subprocess or clock. Raises SpecError for what the target cannot do."""

    def submit(self, plan: Plan) -> str:
        """Carry out the plan and return the native id. A repeated call for a job id finds the earlier submit."""

    def poll(self, native_ids: Sequence[str]) -> Mapping[str, Status]:
        """Query the backend once for all ids.

        An id that is missing from the result is unknown to the backend, not failed. Raises Unreachable.
        """

    def logs(self, native_id: str, since: Cursor | None = None) -> Iterator[LogLine]:
        """Yield the lines that exist now, of all ranks, from the cursor on.

        A line without its ending is held back while the job may still write to it. Following is implemented above the
        targets.
        """

    def cancel(self, native_id: str) -> None:
        """Request an orderly end (SIGTERM, then SIGKILL after the job's grace). A job that is gone is no error."""


@runtime_checkable
class SupportsAdmit(Protocol):
    """A target that can reject a job before it is recorded. Every other target admits all jobs."""

    def admit(self, spec: JobSpec) -> None:
        """Check the job after `plan` and before it is recorded. Looks at this machine only, and changes nothing.

        Raises SpecError for a job that could only fail; it is then not recorded.
        """


@runtime_checkable
class SupportsSized(Protocol):
    """A target whose options determine the number of nodes of a job that sets none itself."""

    def sized(self, spec: JobSpec) -> JobSpec:
        """Return the job with its number of nodes. Contacts nothing."""


@runtime_checkable
class SupportsWait(Protocol):
    """A target that is notified when a job ends, instead of polling for it."""

    def wait(self, native_id: str, timeout_s: float) -> bool | None:
        """Return when the job may have reached a final state, or after `timeout_s` seconds.

        Returns False on a mere timeout: the backend then need not be polled. Returns None if that is unknown.
        """


@dataclass(frozen=True, kw_only=True)
class DiscoveredJob:
    """A job that another machine submitted, with all that is needed to follow it from here.

    spec: as submitted, as far as the backend knows; its paths are the other machine's.
    plan: as carried out, as far as the backend knows.
    whole: False if a part of the job that only its submit creates may be missing.
    created_at: seconds since the epoch; None if the backend does not know; the id then holds the time.
    """

    native_id: str
    spec: JobSpec
    plan: Plan
    whole: bool = True
    created_at: float | None = None

    @classmethod
    def of(
        cls, native_id: str, read: Callable[[], object], *, target: str, kind: str, job_id: str, **fields: Any
    ) -> DiscoveredJob:
        """Build the job from the spec that the target stores as submitted.

        `read` returns that spec, or raises ValueError or the like. Raises SchedulerError for a spec that this version
        cannot read.
        """
        try:
            document = read()
            spec = JobSpec.from_json(document)
        except (ValueError, KeyError, TypeError, RecursionError, SpecError) as error:
            raise SchedulerError(f"another version of accel submitted job {job_id}: {one_line(str(error))}") from None
        plan = Plan(
            target=target, kind=kind, job_id=job_id,
            files={f"{kind}/spec.json": json.dumps(document, indent=2) + "\n"}, settings={"spec": document},
            warnings=("submitted by another machine: the request as submitted",),
        )  # fmt: skip
        return cls(native_id=native_id, spec=spec, plan=plan, **fields)


@dataclass(frozen=True, kw_only=True)
class JobSummary:
    """A job that a backend knows, as a list shows it, without its status. `owner`: a user, where jobs have one."""

    job_id: str
    native_id: str
    name: str
    nodes: int
    created_at: float
    owner: str = ""


@runtime_checkable
class SupportsPollKey(Protocol):
    """A class of targets in which each target can also poll the jobs of the others."""

    @staticmethod
    def poll_key(options: Mapping[str, Any]) -> object:
        """Return the options (as JSON) that identify the backend. Targets with equal results are polled together."""


@runtime_checkable
class SupportsBackends(Protocol):
    """A target that distinguishes backends with equal options: another cluster, account or host of that name."""

    def backends(self, jobs: Mapping[str, str | None]) -> Mapping[str, str]:
        """Return the identity of the backend that these jobs would be polled at now, or submitted to.

        `jobs` maps job ids to native ids, or to None before a submit. A job that is missing from the result, or has
        "", has no known backend, as before its hosts are chosen. An identity is `sort=value`, or several of these with
        a space between; the first one counts (`same_backend`). Changes no job. Raises Unreachable.
        """


def same_backend(recorded: str, current: str) -> bool | None:
    """Compare two results of `SupportsBackends.backends` by the first sort of identity in `recorded`.

    Returns None if `current` lacks that sort: whether they are the same is unknown.
    """
    sort, _, value = recorded.partition(" ")[0].partition("=")
    values = dict(word.partition("=")[::2] for word in current.split())
    return values[sort] == value if sort in values else None


@runtime_checkable
class SupportsFind(Protocol):
    """A target whose backend finds jobs by their id, submitted from any machine."""

    def find(self, job_id: str) -> DiscoveredJob | None:
        """Return the job of that id, or None if the backend has none. Changes nothing there.

        Raises Unreachable if the job may be in a part of the backend that could not be reached.
        """


@runtime_checkable
class SupportsListed(Protocol):
    """A target whose backend can list all of accel's jobs, submitted from any machine."""

    def listed(self) -> list[JobSummary]:
        """Return the jobs, in any order. Changes nothing there. Raises what a poll raises."""


@runtime_checkable
class SupportsSubmitMany(Target, Protocol):
    """A target that submits many jobs in one request if they differ in arguments and names only."""

    def plan_many(self, specs: Sequence[JobSpec], job_ids: Sequence[str]) -> list[Plan]:
        """Return one plan per job, as pure as `plan`; the first holds what they share. Raises SpecError."""

    def submit_many(self, plans: Sequence[Plan]) -> Sequence[str | SchedulerError]:
        """Carry out the plans in one idempotent request.

        Returns, in the order of the plans, the native id, or for a job that was not submitted the error that `submit`
        would raise. Raises errors that concern all of the jobs.
        """


@runtime_checkable
class SupportsAdmitMany(SupportsSubmitMany, Protocol):
    """A target whose backend limits the number of jobs in one request."""

    def admit_many(self, count: int) -> None:
        """Check the number of a sweep's jobs after `SupportsBackends.backends` and before they are recorded.

        Raises SpecError if the backend would refuse them; none is then recorded.
        """


@runtime_checkable
class SupportsGrows(Protocol):
    """A target whose jobs may grow, from `JobSpec.nodes` to `max_nodes`."""

    grows: ClassVar[bool]


@runtime_checkable
class SupportsCursorAt(Protocol):
    """A target that knows when its log lines were written."""

    def cursor_at(self, native_id: str, when: float) -> Cursor:
        """Return the positions of the log streams at `when` (seconds since the epoch), to the second."""


@runtime_checkable
class SupportsTailAt(Protocol):
    """A target that finds the last lines of its logs without reading the logs."""

    def tail_at(self, native_id: str, since: Cursor, count: int) -> Cursor | None:
        """Return where the last `count` finished lines of each rank begin, none of them before `since`.

        Returns None if only the logs themselves can show that. A log that is unavailable now keeps its position in
        `since`. Raises Unreachable.
        """


@dataclass(frozen=True, kw_only=True)
class CheckReport:
    """The result of a check: a table, header first, and one line for each problem."""

    table: list[list[str]]
    failures: tuple[str, ...]
    warnings: tuple[str, ...]


@runtime_checkable
class SupportsCheck(Protocol):
    """A target that can check, before any job, whether it could run one."""

    def check(self, gpus: int = 0) -> CheckReport:
        """Check that every machine could run a part of a job with `gpus` GPUs on each. Changes nothing there.

        Raises SchedulerError if there is nothing to check.
        """


@runtime_checkable
class SupportsClear(Protocol):
    """A target that stores data of jobs that are over."""

    def clear(self, jobs: Mapping[str, str | None]) -> list[str]:
        """Delete what the target stores of these jobs, all of them over.

        `jobs` maps job ids to native ids, or to None where none was confirmed. Deletes as much as it can reach, and
        nothing of a job that still runs there. Returns a line for people for each thing that stays.
        """


@runtime_checkable
class SupportsRunning(Protocol):
    """A target whose backend can list what still runs of jobs that are recorded as over."""

    def running(self, jobs: Mapping[str, str | None]) -> Mapping[str, str | SchedulerError]:
        """Return how each of these jobs still runs there, or why that is unknown; nothing for the others.

        `jobs` maps job ids to native ids, or to None where none was confirmed. Queries the backend once for all.
        Raises an error that concerns all jobs.
        """


@runtime_checkable
class SupportsCancelRest(Protocol):
    """A target where a part of a job may run on after the job has ended."""

    def cancel_rest(self, native_id: str) -> bool:
        """Cancel the parts of a finished job that still run, and keep its logs. Return True if there were any.

        Raises Unreachable.
        """


@runtime_checkable
class SupportsInUse(Protocol):
    """A class of targets whose jobs run in the directories of their records."""

    @staticmethod
    def in_use(directory: Path) -> str:
        """Return why the job of this directory may still run although its record has a final state; else ''."""


@runtime_checkable
class SupportsShell(Protocol):
    """A target that can run a program next to a running job's ranks."""

    def shell(self, native_id: str, node: int, argv: Sequence[str], *, terminal: bool) -> int:
        """Run `argv` (a shell, if empty) on that node of the job, with this process's standard streams.

        Returns the exit code. With `terminal`, standard input and output are a terminal, and the program gets one.
        Raises SubmitError if the node does not run, Unreachable if it cannot be reached or stops responding.
        """


@runtime_checkable
class SupportsFetch(Protocol):
    """A target that stores the results of its jobs."""

    def fetch(self, native_id: str, directory: Path) -> list[str]:
        """Create the directory from the job's results, completely or not at all, and return the names in it.

        Raises NotReady if there are no results yet or the directory exists, and Unreachable.
        """


@runtime_checkable
class SupportsNative(Protocol):
    """A target whose vendor's own library has an object for a job."""

    def native(self, native_id: str) -> object:
        """Return the vendor's object. Raises ConfigError if its library is not installed, and Unreachable."""


@runtime_checkable
class SupportsReview(Protocol):
    """A target whose backend can validate a plan before it is carried out."""

    def review(self, plan: Plan) -> list[str]:
        """Have the backend validate what `submit` would create; return a line for each thing it would reject or drop.

        Changes nothing there. Raises Unreachable, ConfigError.
        """


@dataclass(frozen=True, kw_only=True)
class TargetContext:
    """The constructor argument of targets: name in `accel.yaml`, validated options, and directory of the jobs."""

    name: str
    options: Any
    jobs: Path


def kinds() -> dict[str, str]:
    """Return every kind of target: name -> `module:class`. Entry points add names but never replace a built-in one."""
    import importlib.metadata

    plugins = {point.name: point.value for point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)}
    return plugins | dict(BUILT_IN)


def refused_entry_points() -> list[str]:
    """Return one line for every installed entry point that tried to replace a built-in kind."""
    import importlib.metadata

    return [
        f"entry point {point.name} = {point.value} is ignored: {point.name!r} is a built-in kind of target"
        for point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
        if BUILT_IN.get(point.name, point.value) != point.value
    ]


def load_kind(kind: str, location: str = "--target") -> type[Any]:
    """Return the class that implements `kind`. Raises UnknownTarget, or ConfigError if a plug-in cannot be imported."""
    path = BUILT_IN.get(kind) or kinds().get(kind)
    if path is None:
        raise UnknownTarget(
            f"{location}: no kind of target {kind!r}{nearest(kind, kinds())} (kinds: {', '.join(kinds())})"
        )
    module, _, name = path.partition(":")
    try:
        loaded = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{location}: the target kind {kind!r} ({path}) cannot be loaded: {error}") from error
    if not isinstance(loaded, type):
        raise ConfigError(f"{location}: the target kind {kind!r} ({path}) is not a class")
    return loaded


def kinds_with(method: str) -> str:
    """Return the built-in kinds of targets that have a method, for a message."""
    return ", ".join(kind for kind in BUILT_IN if hasattr(load_kind(kind), method)) or "none"
