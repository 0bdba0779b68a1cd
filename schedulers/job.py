"""The types of a job: `JobSpec` (what to run), `Status` (its state) and `LogLine` (its output)."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from .convert import convert
from .errors import SpecError
from .status import Reason as Reason
from .status import State as State
from .status import Status as Status

Entry = Literal["script", "module", "command"]

# A job that calls a function: the module that it runs, the file in its directory, and the targets that can run it.
# Without dots: for scripts/affected a module's name is a dependency, which every job would have.
FUNCTION_MODULE, FUNCTION_FILE = "accel/launch/run_function".replace("/", "."), "function.pkl"
FUNCTION_KINDS = ("local", "slurm", "sagemaker")
FUNCTION_TARGETS = (
    "functions run on local targets, slurm targets without `login`, and sagemaker targets. Elsewhere, submit a script"
)

# For the models that Pydantic derives from these classes: unknown keys are errors.
_PYDANTIC_CONFIG = {"extra": "forbid"}

_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


def _at_least(name: str, value: int | None, least: int) -> None:
    if value is not None and value < least:
        raise SpecError(f"{name} must be {least} or more, not {value!r}")


@dataclass(frozen=True, kw_only=True)
class Resources:
    """The resources that each node needs. Everything else is up to the target (`JobSpec.options`)."""

    __pydantic_config__: ClassVar[Mapping[str, str]] = _PYDANTIC_CONFIG

    gpus: int = 0
    cpus: int | None = None
    memory_gb: float | None = None
    shm_gb: float | None = None
    accelerator: str | None = None

    def __post_init__(self) -> None:
        _at_least("gpus", self.gpus, 0)
        _at_least("cpus", self.cpus, 1)
        remedy = "; for all memory of a node on Slurm, set `sbatch: {mem: 0}` in the target"
        for name, value, hint in (("--memory", self.memory_gb, remedy), ("shm_gb", self.shm_gb, "")):
            if value is not None and not 0 < value < float("inf"):
                raise SpecError(f"{name} must be more than 0, not {value:g}{'' if value else hint}")


@dataclass(frozen=True, kw_only=True)
class Retry:
    """The number of restarts of the whole gang after failures. A restart is a new attempt of the same job."""

    __pydantic_config__: ClassVar[Mapping[str, str]] = _PYDANTIC_CONFIG

    max_restarts: int = 0

    def __post_init__(self) -> None:
        _at_least("max_restarts", self.max_restarts, 0)


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """A job's description, the same for every target. It is frozen and round-trips through JSON.

    argv:           the script and its arguments, verbatim; never a shell string.
    entry:          kind of argv[0]: a Python script, a Python module (`-m`), or a command that is not Python.
    max_nodes:      the largest world that the job may grow to from `nodes`; None: it has one size.
    procs_per_node: None: one per accelerator, or one where there is none.
    env:            NAME -> text; numbers are converted.
    secrets:        NAME -> reference (`env:HF_TOKEN`, `file:/run/token`), never a value.
    code, workdir:  the directory that holds the program, and the directory inside it that argv runs in.
    setup:          argvs run once on every node before the ranks start.
    time_limit_s:   seconds from the start of an attempt's first rank; None: the target's own limit.
    grace_s:        seconds between the warning (SIGTERM) and SIGKILL.
    after:          ids of jobs that must succeed first.
    options:        options of the target, which validates them.

    Raises SpecError for values that no target can run.
    """

    __pydantic_config__: ClassVar[Mapping[str, str]] = _PYDANTIC_CONFIG

    argv: tuple[str, ...]
    entry: Entry = "script"
    name: str = "job"
    nodes: int = 1
    max_nodes: int | None = None
    procs_per_node: int | None = None
    resources: Resources = Resources()
    env: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict)
    code: str = "."
    workdir: str = "."
    image: str | None = None
    setup: tuple[tuple[str, ...], ...] = ()
    time_limit_s: float | None = None
    grace_s: float = 30.0
    retry: Retry = Retry()
    after: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.argv or not self.argv[0]:
            raise SpecError("nothing to run: give a script, -m MODULE, or --no-python COMMAND")
        for argument in self.argv:
            if not isinstance(argument, str):
                raise SpecError(f"argument {argument!r} must be text, not {type(argument).__name__}")
            if "\0" in argument:
                raise SpecError(f"an argument has a NUL byte, which no process accepts: {argument!r}")
        if not self.name or not self.name.isprintable():
            raise SpecError(f"name must be one printable line, not {self.name!r}")
        _at_least("nodes", self.nodes, 1)
        _at_least("max_nodes", self.max_nodes, self.nodes)
        _at_least("procs_per_node", self.procs_per_node, 1)
        if self.time_limit_s is not None and not 0 < self.time_limit_s < float("inf"):
            raise SpecError(f"time_limit must be more than 0 seconds, not {self.time_limit_s!r}")
        if not 0 <= self.grace_s < float("inf"):
            raise SpecError(f"grace must be 0 seconds or more, not {self.grace_s!r}")
        object.__setattr__(self, "env", {name: _env_text(name, value) for name, value in self.env.items()})
        _check_environment(self.env, self.secrets)

    @property
    def calls_function(self) -> bool:
        """True for a job of a function, whose pickle is in `FUNCTION_FILE`."""
        return self.entry == "module" and self.argv[0] == FUNCTION_MODULE

    @property
    def max_ranks(self) -> int | None:
        """The largest world size; None if each node starts one rank per accelerator that it finds."""
        per_node = self.procs_per_node or self.resources.gpus
        return (self.max_nodes or self.nodes) * per_node if per_node else None

    @property
    def has_many_ranks(self) -> bool | None:
        """True if several ranks may write lines, so that each needs a prefix; None if unknown."""
        ranks = self.max_ranks
        return ranks > 1 if ranks is not None else (self.max_nodes or self.nodes) > 1 or None

    def to_json(self) -> dict[str, Any]:
        """Return plain dicts, lists, strings and numbers, in the order of the fields."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: object) -> JobSpec:
        """Parse the result of `to_json`. Raises SpecError, naming the place, for anything else."""
        import msgspec

        try:
            return convert(data, cls)
        except msgspec.ValidationError as error:
            raise SpecError(f"not a job spec: {error}") from None


def check_cpu(spec: JobSpec, cpu: bool, target: str) -> None:
    """Raise SpecError for a job with GPUs on a target that trains on the CPU."""
    if cpu and spec.resources.gpus:
        raise SpecError(f"cpu: true in target {target} and --gpus contradict each other: keep one")


@dataclass(frozen=True, kw_only=True)
class LogLine:
    r"""One line of a job's output.

    rank:     the rank that printed it; None: the launcher or the backend itself.
    attempt:  the attempt it belongs to.
    stream:   "output" where a target keeps stdout and stderr as one stream, in the order they were written;
              "missing" for a line that lists the lines of a finished job that could not be retrieved.
    text:     the line with its own ending (`\n`, `\r`, or nothing at the end of a file). Bytes that are not UTF-8
              are surrogate escapes: joining the texts and encoding with `surrogateescape` gives the exact bytes.
    source:   the log stream; `position` is the point in it just after this line: see `Cursor`.
    partial:  a piece, without ending, of a line longer than 1 MiB; the next of its source and rank continues it.
    """

    rank: int | None
    attempt: int = 0
    stream: str = "output"
    text: str
    source: str
    position: str
    partial: bool = False

    @property
    def data(self) -> bytes:
        """The exact bytes."""
        return self.text.encode("utf-8", "surrogateescape")

    def to_json(self) -> dict[str, Any]:
        """Return the line, without its position, as JSON values.

        Bytes that are not UTF-8 are replaced in `text`; `base64` then has the exact ones. A piece is `partial`.
        """
        values = {"rank": self.rank, "attempt": self.attempt, "stream": self.stream, "text": self.text}
        if not self.text.isascii():
            data = self.data
            values["text"] = data.decode(errors="replace")
            if values["text"] != self.text:
                import base64

                values["base64"] = base64.b64encode(data).decode()
        return values | {"partial": True} if self.partial else values

    @classmethod
    def from_json(cls, data: Mapping[str, Any], *, source: str, position: str) -> LogLine:
        """Return the line of `to_json`, at a position."""
        text, exact = data["text"], data.get("base64")
        if exact is not None:
            import base64

            text = base64.b64decode(exact).decode("utf-8", "surrogateescape")
        return cls(
            rank=data["rank"], attempt=data["attempt"], stream=data["stream"], text=text, source=source,
            position=position, partial=data.get("partial", False),
        )  # fmt: skip


class Cursor:
    """A position in each of a job's log streams; `logs(since=cursor)` continues exactly from there."""

    def __init__(self, positions: Mapping[str, str] | None = None) -> None:
        self._positions = dict(positions or {})

    def position(self, source: str) -> str | None:
        """Return the position in a stream, or None at its beginning."""
        return self._positions.get(source)

    def advance(self, line: LogLine) -> None:
        """Move past a line."""
        self._positions[line.source] = line.position

    def move(self, cursor: Cursor) -> None:
        """Adopt the positions of another cursor."""
        self._positions.update(cursor._positions)

    def moved(self, positions: Mapping[str, str | None]) -> Cursor:
        """Return a copy with these positions replaced (None: the beginning)."""
        return Cursor(
            {key: position for key, position in {**self._positions, **positions}.items() if position is not None}
        )

    def below(self, prefix: str) -> Cursor:
        """Return the positions of the sources with this prefix, under their names without it."""
        positions = {name: position for name, position in self._positions.items() if name.startswith(prefix)}
        return Cursor({name[len(prefix) :]: position for name, position in positions.items()})

    def under(self, prefix: str) -> Cursor:
        """Return a copy with `prefix` before the names of all sources."""
        return Cursor({prefix + name: position for name, position in self._positions.items()})

    def __str__(self) -> str:
        return ",".join(f"{source}={position}" for source, position in sorted(self._positions.items()))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Cursor) and self._positions == other._positions

    __hash__ = None  # type: ignore[assignment]  # mutable

    @classmethod
    def parse(cls, text: str) -> Cursor:
        """Parse the result of `str(cursor)`. Raises SpecError."""
        pairs = [pair.partition("=") for pair in text.split(",") if pair]
        for source, equals, position in pairs:
            if not (source and equals and position):
                raise SpecError(f"not a log cursor: {text!r}")
        return cls({source: position for source, _, position in pairs})


def _env_text(name: str, value: object) -> str:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise SpecError(f"env: {name} must be text or a number, not {type(value).__name__} {value!r}")
    return value


def _check_environment(env: Mapping[str, str], secrets: Mapping[str, str]) -> None:
    for name in (*env, *secrets):
        if not isinstance(name, str) or not _ENV_NAME.match(name):
            raise SpecError(f"{name!r} is not a name for an environment variable (letters, digits, underscore)")
    for name, value in env.items():
        if "\0" in value:
            raise SpecError(f"the value of {name} holds a NUL byte")
    for name, reference in secrets.items():
        if not isinstance(reference, str):
            raise SpecError(f"secrets: {name} must be a reference such as env:NAME, not {type(reference).__name__}")
        if name in env:
            raise SpecError(f"{name} is given both as --env and as --secret; keep one")
