"""Named targets: the project's `accel.yaml`, if no other user could have written it, over the user's own.

    targets:
      lab:
        kind: local
        concurrency: 2

The keys of a target are the fields of its class's dataclass `Options`; nothing else describes them.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import shlex
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ..errors import ConfigError, SpecError, UnknownTarget, nearest
from ..job import FUNCTION_KINDS, FUNCTION_TARGETS
from ..printable import one_line
from ..store import paths
from ..target import BUILT_IN, SupportsSubmitMany, Target, TargetContext, kinds, load_kind
from .schema import as_written, make_options

if TYPE_CHECKING:
    from ..job import JobSpec
    from ..target import Plan
    from .yaml_file import YamlFile


# The project's `accel.yaml`: the nearest one up to the project's root that no other user could have written.

FILE = "accel.yaml"
TRUST = "ACCEL_CONFIG_TRUST"


def find_project_file(start: str) -> tuple[str | None, list[str]]:
    """Return the path of the project's file, if there is one, and a warning for each file that was skipped.

    The search ends at the root of the project: the git work tree or the home directory, whichever is nearer, or else
    the last directory on the file system of `start`. A file counts when it, the link that leads to it and its
    directory belong to this user or to root, or when `ACCEL_CONFIG_TRUST` names it or a directory above it.

    The user's configuration directory is in no project: from there, a server finds the user's own file alone.
    """
    warnings: list[str] = []
    start = os.path.realpath(start)
    for directory in _upward(start) if start != os.path.realpath(paths.config_home()) else ():
        path = os.path.join(directory, FILE)
        if not os.path.isfile(path):
            continue
        problem = None if _is_trusted(path) else _foreign(directory, path)
        if problem is None:
            return path, warnings
        accepted = f"{TRUST}={shlex.quote(path)}"
        warnings.append(f"{path}: skipped: {problem}, neither you nor root. Set {accepted} to accept it")
    return None, warnings


@functools.cache
def _warn_once(warning: str) -> None:
    """Log the warning once per process."""
    import logging

    logging.getLogger(__name__).warning("%s", one_line(warning))


def _upward(start: str) -> Iterator[str]:
    """Yield `start` and the directories above it, up to the project's root."""
    home = os.path.realpath(os.path.expanduser("~"))
    directories = [start]
    while not (os.path.lexists(os.path.join(directories[-1], ".git")) or directories[-1] == home):
        parent = os.path.dirname(directories[-1])
        if parent == directories[-1]:
            return _on_one_device(directories)
        directories.append(parent)
    return iter(directories)


def _on_one_device(directories: list[str]) -> Iterator[str]:
    """Yield the directories before the first one on another file system; one that is missing is on none."""
    devices = {path: _device(path) for path in directories}
    first = next((device for device in devices.values() if device is not None), None)
    return itertools.takewhile(lambda path: devices[path] in (None, first), directories)


def _device(path: str) -> int | None:
    try:
        return os.stat(path).st_dev
    except OSError:
        return None


def _is_trusted(path: str) -> bool:
    """Return True if `ACCEL_CONFIG_TRUST`, a list of paths as in PATH, names the file or a directory above it."""
    trusted_paths = [os.path.expanduser(entry) for entry in os.environ.get(TRUST, "").split(os.pathsep) if entry]
    return any(
        path == entry or path.startswith(entry.rstrip(os.sep) + os.sep)
        for entry in map(os.path.realpath, trusted_paths)
    )


def _foreign(directory: str, path: str) -> str | None:
    """Return `it belongs to NAME` if the file, the link to it or its directory belongs to another user."""
    try:
        owners = {os.stat(directory).st_uid: "its directory", os.lstat(path).st_uid: "it", os.stat(path).st_uid: "it"}
    except OSError:  # deleted or renamed meanwhile
        return "it cannot be examined, and may belong to another user"
    subject, owner = next(((subject, uid) for uid, subject in owners.items() if uid not in (0, os.geteuid())), ("", 0))
    return f"{subject} belongs to {_user_name(owner)}" if subject else None


def _writable_by_all(path: str) -> str | None:
    """Return a warning if every user can write the file, or replace it in its directory."""
    for place in (path, os.path.dirname(path), os.path.realpath(path), os.path.dirname(os.path.realpath(path))):
        try:
            mode = os.stat(place).st_mode
        except OSError:  # deleted or renamed meanwhile
            continue
        if mode & stat.S_IWOTH and not (stat.S_ISDIR(mode) and mode & stat.S_ISVTX):
            return f"{path}: every user can change it, and so what runs on your behalf: chmod o-w {shlex.quote(place)}"
    return None


def _user_name(uid: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


# Targets by name or kind.


@dataclass(frozen=True, kw_only=True)
class NamedTarget:
    """A target that `--target` accepts. `source`: `file:line` of its description, `built-in` or `plug-in …`."""

    name: str
    kind: str
    options: Mapping[str, Any]
    source: str
    file: YamlFile | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True, kw_only=True)
class ResolvedTarget:
    """A constructed target and its options: plain JSON values, enough to construct it again anywhere.

    source: `file:line` of its description, the path absolute; "" for a kind that no file describes.
    """

    name: str
    kind: str
    options: Mapping[str, Any]
    target: Target
    source: str = ""

    def plan(self, spec: JobSpec, job_id: str) -> Plan:
        """Return the target's plan, with the place that describes the target. Raises SpecError."""
        if spec.calls_function and self.kind not in FUNCTION_KINDS:
            raise SpecError(f"target {self.name}: {FUNCTION_TARGETS}")
        return dataclasses.replace(self.target.plan(spec, job_id), source=self.source)

    def plan_many(self, specs: Sequence[JobSpec], job_ids: Sequence[str]) -> list[Plan]:
        """Return the plans of a sweep, in order. Raises SpecError."""
        if isinstance(self.target, SupportsSubmitMany):
            plans = self.target.plan_many(specs, job_ids)
            return [dataclasses.replace(plan, source=self.source) for plan in plans]
        return [self.plan(spec, job_id) for spec, job_id in zip(specs, job_ids, strict=True)]


def load_target(
    name_or_kind: str, jobs: Path, *, start: Path | str | None = None, overrides: Mapping[str, Any] | None = None
) -> Target:
    """Return the target of that name in a file, or else of that kind. Raises what `resolve_target` raises."""
    return resolve_target(name_or_kind, jobs, start=start, overrides=overrides).target


def resolve_target(
    name_or_kind: str, jobs: Path, *, start: Path | str | None = None, overrides: Mapping[str, Any] | None = None
) -> ResolvedTarget:
    """Return the target of that name in a file, or else of that kind, with `overrides` applied to its options.

    `SERVER/TARGET` is a target of a server in `servers.yaml`, or of `server`, the one in `ACCEL_SERVER`.

    `start`: the directory from which to look for the project's file, upward; default: the current one. Raises
    UnknownTarget, and ConfigError, with file:line (or `option NAME`), for a file or an option that is wrong.
    """
    named_target = described_targets(start).get(name_or_kind)
    if named_target is None and "/" in name_or_kind:
        named_target = _target_of_server(name_or_kind)
    if named_target is None and name_or_kind not in BUILT_IN and name_or_kind not in kinds():
        raise _unknown(name_or_kind, start)
    named_target = named_target or NamedTarget(name=name_or_kind, kind=name_or_kind, options={}, source="--target")
    return _construct(named_target, jobs, overrides or {})


def _target_of_server(name: str) -> NamedTarget:
    """Return the target `SERVER/TARGET`. Raises ConfigError for an unknown server; contacts none."""
    from .servers import read_servers

    server, _, target = name.partition("/")
    url = read_servers().get(server).url
    return NamedTarget(name=name, kind="service", options={"url": url, "target": target}, source="servers.yaml")


def restore_target(name: str, kind: str, options: Mapping[str, Any], jobs: Path) -> Target:
    """Construct a target as `resolve_target` described it, regardless of the files since. Raises ConfigError.

    Ignores options that only a newer accel knows.
    """
    known = {field.name for field in dataclasses.fields(load_kind(kind).Options)}
    options = {key: value for key, value in options.items() if key in known}
    return _construct(NamedTarget(name=name, kind=kind, options=options, source=f"target {name}"), jobs, {}).target


def known_targets(start: Path | str | None = None) -> list[NamedTarget]:
    """Return all that `--target` accepts: names in the files, then kinds. Raises ConfigError for a bad file."""
    by_name = described_targets(start)
    targets = [target for _, target in sorted(by_name.items())]
    for kind, value in sorted(kinds().items()):
        if kind not in by_name:
            source = "built-in" if kind in BUILT_IN else f"plug-in {value}"
            targets.append(NamedTarget(name=kind, kind=kind, options={}, source=source))
    return targets


def config_files(start: Path | str | None = None) -> list[str]:
    """Return the files that are read; the last one takes precedence."""
    user = os.path.join(paths.config_home(), FILE)
    files = [user] if os.path.isfile(user) else []
    project, skipped = find_project_file(os.path.abspath(start or os.getcwd()))
    for warning in skipped:
        _warn_once(warning)
    if project is not None and not (files and os.path.samefile(project, user)):
        files.append(project)
    for path in files:
        problem = None if _is_trusted(path) else _writable_by_all(path)
        if problem is not None:
            _warn_once(problem)
    return files


def skipped_files(start: Path | str | None = None) -> list[str]:
    """Return a warning for each `accel.yaml` that is not read because another user could have written it."""
    return find_project_file(os.path.abspath(start or os.getcwd()))[1]


def described_targets(start: Path | str | None = None) -> dict[str, NamedTarget]:
    """Return the targets that the files describe, by name. Raises ConfigError for a bad file."""
    by_name: dict[str, NamedTarget] = {}
    for path in config_files(start):
        by_name |= _read(path)
    return by_name


def _read(path: str) -> dict[str, NamedTarget]:
    from .yaml_file import YamlFile

    file = YamlFile(path, core=True)
    if file.value is None:
        return {}
    if not isinstance(file.value, dict):
        raise ConfigError(f"{file.location()}: expects a mapping with the key 'targets', got {_kind_of(file.value)}")
    for key in file.value:
        if key != "targets":
            hint = nearest(str(key), ["targets"])
            raise ConfigError(f"{file.key_location(str(key))}: unknown key {key!r}{hint} (keys: targets)")
    targets = file.value.get("targets")
    if targets is None:
        return {}
    if not isinstance(targets, dict):
        raise ConfigError(f"{file.location('targets')}: targets: expects a mapping of names, got {_kind_of(targets)}")
    return {name: _parse_target(file, name, value) for name, value in targets.items()}


def _parse_target(file: YamlFile, name: object, value: object) -> NamedTarget:
    if not isinstance(name, str) or not name or not name.isprintable():
        raise ConfigError(f"{file.location('targets')}: {name!r} is not a name for a target; put it in quotes")
    location = file.key_location("targets", name)
    if not isinstance(value, dict):
        raise ConfigError(f"{location}: target {name}: expects a mapping with the key 'kind', got {_kind_of(value)}")
    bad_key = next((key for key in value if not isinstance(key, str)), None)
    if bad_key is not None:
        raise ConfigError(f"{location}: target {name}: {bad_key!r} is not a key; put it in quotes")
    if "kind" not in value:
        raise ConfigError(f"{location}: target {name}: no kind (kinds: {', '.join(kinds())})")
    kind = value["kind"]
    kind_location = file.location("targets", name, "kind")
    if not isinstance(kind, str):
        raise ConfigError(f"{kind_location}: target {name}: kind: expects str, got {_kind_of(kind)}")
    if name in BUILT_IN and kind != name:
        raise ConfigError(
            f"{kind_location}: target {name}: {name!r} is a kind of target; only kind: {name} may have that name"
        )
    options = {key: option for key, option in value.items() if key != "kind"}
    return NamedTarget(name=name, kind=kind, options=options, source=location, file=file)


def _construct(named_target: NamedTarget, jobs: Path, overrides: Mapping[str, Any]) -> ResolvedTarget:
    file = named_target.file
    location = named_target.source if file is None else file.location("targets", named_target.name, "kind")
    kind = load_kind(named_target.kind, location)

    def locate(path: tuple[str | int, ...], of_key: bool) -> str:
        if file is None:
            return f"target {named_target.name}"
        keys = ("targets", named_target.name)
        position = file.key_location(*keys, *map(str, path)) if of_key else file.location(*keys, *path)
        return f"{position}: target {named_target.name}"

    def spelling(path: tuple[str | int, ...]) -> str | None:
        return None if file is None else file.spelling("targets", named_target.name, *path)

    values = as_written(kind.Options, named_target.options, spelling, locate)
    options, plain = make_options(kind.Options, values, overrides, locate, kind=named_target.kind)
    context = TargetContext(name=named_target.name, options=options, jobs=Path(jobs))
    target = cast(Target, kind(context))
    source = "" if file is None else f"{os.path.abspath(file.path)}:{named_target.source.rpartition(':')[2]}"
    return ResolvedTarget(name=named_target.name, kind=named_target.kind, options=plain, target=target, source=source)


def _unknown(name: str, start: Path | str | None) -> UnknownTarget:
    from .servers import read_servers

    if name in read_servers().by_name:
        return UnknownTarget(f"{name} is a server: give one of its targets, as in {name}/lab (accel targets)")
    names = [target.name for target in known_targets(start)]
    return UnknownTarget(f"no target or kind {name!r}{nearest(name, names)} (targets: {', '.join(names)})")


def _kind_of(value: object) -> str:
    return "nothing" if value is None else f"{type(value).__name__} {value!r}"
