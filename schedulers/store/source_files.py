"""The files of a code directory to ship: those that git would track, without ignored files and secrets."""

from __future__ import annotations

import functools
import os
import posixpath
import re
import stat
import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ..errors import SnapshotError
from . import paths as store_paths

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec


# Rules for files that are not shipped: ignored ones, files that are never code, and secrets by their names.

IGNORE_FILE = ".accelignore"
DOCKER_FILE = ".dockerignore"

# Names of files and directories that hold credentials, in any case; `*` is any part of a name. The only such list.
SECRETS = (".env*", ".netrc", ".npmrc", ".pypirc", ".git-credentials", ".ssh", ".aws", ".kube", "kubeconfig*",
           ".docker", ".dockercfg", ".htpasswd", ".vault-token", "*.pem", "*.key", "*.p12", "*.pfx",
           "*credentials.json", "service-account*.json", "secrets.y*ml", "*.tfstate*",
           "id_rsa*", "id_ecdsa*", "id_ed25519*", "id_dsa*")  # fmt: skip

# Never code, so left out where there is no git; `!name` in .accelignore includes one again.
NEVER_CODE = (
    IGNORE_FILE,
    DOCKER_FILE,
    ".gitignore",
    ".git",
    ".hg/",
    ".svn/",
    "__pycache__/",
    "*.pyc",
    ".ipynb_checkpoints/",
    ".mypy_cache/",
    ".pytest_cache/",
)

# Tested against every path, where pathspec would take a second for 100,000.
_SECRET = re.compile(
    "(?:^|/)(?:" + "|".join(re.escape(name).replace(r"\*", "[^/]*") for name in SECRETS) + ")(?:/|$)",
    re.DOTALL | re.IGNORECASE,
)
_MAX_SHOWN = 5


@dataclass(frozen=True, kw_only=True)
class Rules:
    """A user's rules for one directory.

    ignored:  returns True for a path that the user leaves out; a directory's path ends with `/`.
    accepted: returns True for a path that `!name` in .accelignore includes again.
    """

    ignored: Callable[[str], bool]
    accepted: Callable[[str], bool]


def is_secret(path: str) -> bool:
    """Return True for a path that looks like a secret."""
    return _SECRET.search(path) is not None


def read_rules(top: str, *, git: bool, image: bool) -> Rules:
    """Read `.accelignore`, and for an image `.dockerignore`. Raises SnapshotError for an invalid pattern."""
    lines = _lines(top, IGNORE_FILE)
    docker = _docker(top, _lines(top, DOCKER_FILE)) if image else None
    if git and not lines and docker is None:
        return Rules(ignored=lambda path: False, accepted=lambda path: False)
    ignored = _spec(top, [*(() if git else NEVER_CODE), *lines])
    accelignore = _spec(top, lines)
    return Rules(
        ignored=lambda path: ignored.match_file(path) or (docker is not None and docker(path)),
        accepted=lambda path: accelignore.check_file(path).include is False,
    )


def warnings_of(excluded: Sequence[str], accepted: Sequence[str], tracked: Sequence[str]) -> list[str]:
    """Return the warnings about hidden paths and those that look like secrets.

    excluded: not shipped.
    accepted: shipped, because .accelignore includes them again.
    tracked:  shipped, because git tracks them.
    """
    remedy = f"To leave one out, add its name to {IGNORE_FILE}"
    paths_by_message = {
        f"left out, hidden or named like secrets. To ship one, add `!NAME` to {IGNORE_FILE}": excluded,
        f"named like secrets, and shipped, as `!NAME` in {IGNORE_FILE} includes them again": accepted,
        f"named like secrets, and shipped, as git tracks them. {remedy}": tracked,
    }
    return [f"{_format_paths(paths)}: {message}" for message, paths in paths_by_message.items() if paths]


def _format_paths(paths: Sequence[str]) -> str:
    paths = sorted(paths)
    suffix = f" and {len(paths) - _MAX_SHOWN} more" if len(paths) > _MAX_SHOWN else ""
    return ", ".join(map(repr, paths[:_MAX_SHOWN])) + suffix


def _lines(top: str, name: str) -> list[str]:
    path = os.path.join(top, name)
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.read().splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise SnapshotError(f"cannot read {path!r}: {error.strerror}") from error


def _spec(top: str, lines: Sequence[str], name: str = IGNORE_FILE) -> GitIgnoreSpec:
    import pathspec

    try:
        return pathspec.GitIgnoreSpec.from_lines(lines)
    except ValueError as error:
        raise SnapshotError(f"{os.path.join(top, name)}: {error}") from None


def _docker(top: str, lines: Sequence[str]) -> Callable[[str], bool] | None:
    """Return a function that returns True for a path that .dockerignore leaves out, or None without such a file.

    https://docs.docker.com/build/concepts/context/#dockerignore-files: patterns start at the top, a pattern that
    matches a directory matches all below it, and the last pattern that matches counts, below such a directory too.
    """
    patterns = []
    for line in map(str.strip, lines):
        if not line or line.startswith("#"):
            continue
        text = posixpath.normpath(line.removeprefix("!").strip()).lstrip("/")
        if text != ".":
            patterns.append((not line.startswith("!"), _spec(top, [f"/{text}"], DOCKER_FILE)))
    if not patterns:
        return None
    has_exceptions = any(not excludes for excludes, _ in patterns)

    def is_excluded(path: str) -> bool:
        if path.endswith("/") and has_exceptions:
            return False  # something below it may be included again
        matching = (excludes for excludes, spec in reversed(patterns) if spec.match_file(path))
        return next(matching, False)

    return is_excluded


# The list of shipped files, from git or from a walk through the directory.

# The directories that accel creates in ACCEL_HOME.
_IN_HOME = ("jobs", "snapshots", "local")

_GIT_VARIABLES = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_COMMON_DIR", "GIT_NAMESPACE")


@dataclass(frozen=True)
class Entry:
    """One file, link or empty directory.

    path: relative, with `/`; bytes that are not UTF-8 are surrogate escapes.
    mode: the permission bits.
    size: in bytes.
    link: a link's target.
    """

    path: str
    type: Literal["file", "link", "directory"]
    mode: int
    size: int
    link: str = ""


def list_code(top: str, home: str | None = None, *, image: bool = False) -> tuple[list[Entry], list[str]]:
    """Return the entries to pack, sorted by path, and warnings.

    Leaves out accel's own files, in `home` or in this user's store, and for an `image` what `.dockerignore`
    names. Raises SnapshotError for a link that leads outside, a directory that cannot be read, a failing git, and
    the home directory and `/`, which hold more than code.
    """
    if top in ("/", os.path.realpath(os.path.expanduser("~"))):
        kind = "the root directory" if top == "/" else "your home directory"
        raise SnapshotError(f"{top} is {kind}, which is not packed as code: put the code into a directory below it")
    warnings: list[str] = []
    own_directories = _own_directories(
        top, {os.path.realpath(candidate) for candidate in (home, store_paths.data_home()) if candidate is not None}
    )
    git = _git_files(top, warnings)
    rules = read_rules(top, git=git is not None, image=image)
    secrets: list[str] = []
    accepted: list[str] = []
    tracked: list[str] = []
    paths = _walk(top, own_directories, rules, warnings, secrets) if git is None else git
    below_own = tuple(directory + os.sep for directory in own_directories)
    entries = []
    real_directory = _real_directories(top)
    for path in sorted(paths, key=os.fsencode):
        if os.path.join(top, path).startswith(below_own) or not real_directory(os.path.dirname(path)):
            continue
        if git is not None and rules.ignored(path):
            continue
        group = None
        if is_secret(path):
            group = accepted if rules.accepted(path) else tracked if paths[path] else secrets
        entry = None if group is secrets else _entry(top, path, warnings)
        if entry is not None:
            entries.append(entry)
        if group is not None and (group is secrets or entry is not None):
            group.append(path)
    return entries, warnings + warnings_of(secrets, accepted, tracked)


def list_all(top: str) -> list[Entry]:
    """Return all files, links and empty directories, sorted by path. Raises SnapshotError as `list_code` does."""
    paths = _walk(top, (), Rules(ignored=lambda path: False, accepted=lambda path: True), [], [])
    entries = (_entry(top, path, []) for path in sorted(paths, key=os.fsencode))
    return [entry for entry in entries if entry is not None]


def _own_directories(top: str, homes: Iterable[str]) -> tuple[str, ...]:
    """Return accel's own directories inside the code directory, if a home of its jobs is there."""
    directories = []
    for home in homes:
        directories += [os.path.join(home, name) for name in _IN_HOME] if home == top else [home]
    return tuple(directory for directory in directories if directory.startswith(top.rstrip(os.sep) + os.sep))


def _entry(top: str, path: str, warnings: list[str]) -> Entry | None:
    full_path = os.path.join(top, path)
    try:
        info = os.lstat(full_path)
    except (FileNotFoundError, NotADirectoryError):
        return None  # tracked, and deleted in the work tree
    except OSError as error:
        raise SnapshotError(f"cannot read {full_path!r}: {error.strerror}") from error
    mode = stat.S_IMODE(info.st_mode) & 0o777
    if stat.S_ISREG(info.st_mode):
        return Entry(path, "file", mode, info.st_size)
    if stat.S_ISLNK(info.st_mode):
        return Entry(path, "link", 0o777, 0, _link(top, full_path))
    if stat.S_ISDIR(info.st_mode):
        return Entry(path, "directory", mode, 0)
    warnings.append(f"{path!r} is left out: it is neither a file nor a link (a socket, a pipe or a device)")
    return None


def _link(top: str, full_path: str) -> str:
    target = os.readlink(full_path)
    # Followed to its end: on another machine a link out of the directory points at nothing, or at something else.
    resolved = os.path.realpath(full_path)
    if os.path.isabs(target) or not (resolved == top or resolved.startswith(top.rstrip(os.sep) + os.sep)):
        raise SnapshotError(
            f"{full_path!r} is a link to {target!r}, outside the code directory, which other machines lack; "
            f"delete it or add it to {IGNORE_FILE}"
        )
    return target


def _real_directories(top: str) -> Callable[[str], bool]:
    """Return a function that is True for a directory below `top` that is reached through no link.

    Files that git lists below a link are deleted ones.
    """

    @functools.cache
    def is_real(directory: str) -> bool:
        if not directory:
            return True
        return is_real(os.path.dirname(directory)) and not os.path.islink(os.path.join(top, directory))

    return is_real


def _git_files(top: str, warnings: list[str]) -> dict[str, bool] | None:
    """Return the files that git tracks (True) or would track, nested repositories included; None without git."""
    directories = [top, *map(str, Path(top).parents)]
    if not any(os.path.lexists(os.path.join(directory, ".git")) for directory in directories):
        return None
    entries = dict.fromkeys(_git_list(top, "--others", "--exclude-standard"), False)
    entries |= dict.fromkeys(_git_list(top, "--cached"), True)
    if not entries and _run_git(top, "check-ignore", "-q", ".").returncode == 0:
        return None  # a project that lies, ignored, in somebody else's repository
    paths: dict[str, bool] = {}
    for path, tracked in entries.items():
        full_path = os.path.join(top, path)
        if os.path.isdir(full_path) and not os.path.islink(full_path.rstrip("/")):
            paths |= _nested(top, path.rstrip("/"), warnings)
        else:
            paths[path] = tracked
    return paths


def _nested(top: str, path: str, warnings: list[str]) -> dict[str, bool]:
    """Return the files of a submodule or a nested repository: git lists only its directory."""
    full_path = os.path.join(top, path)
    if os.path.lexists(os.path.join(full_path, ".git")):
        files = _git_files(full_path, warnings) or {}
        return {f"{path}/{name}": tracked for name, tracked in files.items()}
    if not os.listdir(full_path):
        warnings.append(
            f"{path!r} is an empty directory: is it a submodule to check out (git submodule update --init)?"
        )
    return {}


def _git_list(top: str, *options: str) -> list[str]:
    try:
        completed = _run_git(top, "ls-files", "-z", *options)
    except FileNotFoundError:
        raise SnapshotError(
            f"{top} is in a git repository, but git, which knows the ignored files, was not found: install git"
        ) from None
    if completed.returncode != 0:
        stderr_lines = completed.stderr.decode(errors="replace").strip().splitlines() or ["no output"]
        raise SnapshotError(f"git cannot list the files of {top}: {stderr_lines[0]}")
    return [os.fsdecode(path) for path in completed.stdout.split(b"\0") if path]


def _run_git(top: str, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    # fsmonitor is a command out of the repository's own configuration.
    command = ["git", "-c", "core.fsmonitor=false", "-C", top, *arguments]
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, env=git_environment())


def git_environment() -> dict[str, str]:
    """Return the environment without a git hook's variables, which would select the hook's repository."""
    return {name: value for name, value in os.environ.items() if name not in _GIT_VARIABLES} | {"LC_ALL": "C"}


def _walk(
    top: str, own_directories: tuple[str, ...], rules: Rules, warnings: list[str], secrets: list[str]
) -> dict[str, bool]:
    """Return all files, links and empty directories that are not left out.

    Hidden ones, and directories that look like secrets, are added to `secrets`.
    """
    paths: dict[str, bool] = {}
    pending = [""]
    while pending:
        directory = pending.pop()
        entry_count = 0
        for entry in _scan(top, directory):
            path = f"{directory}/{entry.name}" if directory else entry.name
            is_directory = entry.is_dir(follow_symlinks=False)
            if entry.path in own_directories or rules.ignored(f"{path}/" if is_directory else path):
                continue
            entry_count += 1
            is_excluded = entry.name.startswith(".") or (is_directory and is_secret(path))
            if is_excluded and not rules.accepted(f"{path}/" if is_directory else path):
                secrets.append(path)
            elif not is_directory:
                paths[path] = False
            elif os.path.exists(os.path.join(entry.path, "pyvenv.cfg")):
                warnings.append(f"{path!r} is left out: it is a virtual environment")
            else:
                pending.append(path)
        if directory and not entry_count:
            paths[directory] = False
    return paths


def _scan(top: str, directory: str) -> Iterable[os.DirEntry[str]]:
    full_path = os.path.join(top, directory)
    try:
        with os.scandir(full_path) as entries:
            return list(entries)
    except OSError as error:
        raise SnapshotError(f"cannot read the directory {full_path!r}: {error.strerror}") from error
