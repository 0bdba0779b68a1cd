"""List the files of a code directory that are shipped: what git would track, less ignored files and secrets."""

from __future__ import annotations

import os
import posixpath
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ..errors import SnapshotError
from . import paths as store_paths

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec


# Files that are not shipped: ignored ones, what is never code, and what looks like a secret.

IGNORE_FILE = ".accelignore"
DOCKER_FILE = ".dockerignore"

# Names of files and directories that hold credentials, in any case; `*` is any part of a name. The one list of them.
SECRETS = (".env*", ".netrc", ".npmrc", ".pypirc", ".ssh", ".aws", "*.pem", "*.key", "credentials.json",
           "id_rsa*", "id_ecdsa*", "id_ed25519*", "id_dsa*")  # fmt: skip

# Never code, so left out where there is no git; `!name` in .accelignore takes one back.
NEVER_CODE = (
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
_SHOWN = 5


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
    """Read `.accelignore`, and for an image `.dockerignore`. Raises SnapshotError for a pattern that is wrong."""
    lines = _lines(top, IGNORE_FILE)
    docker = _docker(top, _lines(top, DOCKER_FILE)) if image else None
    if git and not lines and docker is None:
        return Rules(ignored=lambda path: False, accepted=lambda path: False)
    ignored = _spec(top, [*(() if git else NEVER_CODE), *lines])
    own = _spec(top, lines)
    return Rules(
        ignored=lambda path: ignored.match_file(path) or (docker is not None and docker(path)),
        accepted=lambda path: own.check_file(path).include is False,
    )


def warnings_of(left: Sequence[str], accepted: Sequence[str], tracked: Sequence[str]) -> list[str]:
    """Return the warnings about paths that look like secrets.

    left:     not shipped.
    accepted: shipped, because .accelignore includes them again.
    tracked:  shipped, because git tracks them.
    """
    remedy = f"To leave one out, add its name to {IGNORE_FILE}"
    found = {
        f"left out, named like secrets. To ship one, add `!NAME` to {IGNORE_FILE}": left,
        f"named like secrets, and shipped, as `!NAME` in {IGNORE_FILE} takes them back": accepted,
        f"named like secrets, and shipped, as git tracks them. {remedy}": tracked,
    }
    return [f"{_some(paths)}: {message}" for message, paths in found.items() if paths]


def _some(paths: Sequence[str]) -> str:
    paths = sorted(paths)
    more = f" and {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else ""
    return ", ".join(map(repr, paths[:_SHOWN])) + more


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
    takes_back = any(not leaves_out for leaves_out, _ in patterns)

    def left_out(path: str) -> bool:
        if path.endswith("/") and takes_back:
            return False  # something below it may be taken back
        matching = (leaves_out for leaves_out, spec in reversed(patterns) if spec.match_file(path))
        return next(matching, False)

    return left_out


# Files that are.

# What accel makes in ACCEL_HOME.
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


@dataclass(frozen=True)
class _Path:
    """A path to ship unless a rule leaves it out."""

    path: str
    tracked: bool = False


def list_code(top: str, home: str | None = None, *, image: bool = False) -> tuple[list[Entry], list[str]]:
    """Return the entries to pack, sorted by path, and warnings.

    Leaves out accel's own files, in `home` or in this user's store, and for an `image` what `.dockerignore`
    names. Raises SnapshotError for a link that leads outside, a directory that cannot be read, or a failing git.
    """
    warnings: list[str] = []
    own = _own_directories(
        top, {os.path.realpath(each) for each in (home, store_paths.data_home()) if each is not None}
    )
    git = _git_files(top, warnings)
    rules = read_rules(top, git=git is not None, image=image)
    secrets: list[str] = []
    accepted: list[str] = []
    tracked: list[str] = []
    paths = _walk(top, own, rules, warnings, secrets) if git is None else git
    below_own = tuple(directory + os.sep for directory in own)
    entries = []
    real_directory = _real_directories(top)
    for each in sorted(set(paths), key=lambda each: os.fsencode(each.path)):
        path = each.path
        if os.path.join(top, path).startswith(below_own) or not real_directory(os.path.dirname(path)):
            continue
        if git is not None and rules.ignored(path):
            continue
        kind = None
        if is_secret(path):
            kind = accepted if rules.accepted(path) else tracked if each.tracked else secrets
        entry = None if kind is secrets else _entry(top, path, warnings)
        if entry is not None:
            entries.append(entry)
        if kind is not None and (kind is secrets or entry is not None):
            kind.append(path)
    return entries, warnings + warnings_of(secrets, accepted, tracked)


def _own_directories(top: str, homes: Iterable[str]) -> tuple[str, ...]:
    """Return accel's own directories inside the code directory, if a home of its jobs is there."""
    own = []
    for home in homes:
        own += [os.path.join(home, name) for name in _IN_HOME] if home == top else [home]
    return tuple(directory for directory in own if directory.startswith(top.rstrip(os.sep) + os.sep))


def _entry(top: str, path: str, warnings: list[str]) -> Entry | None:
    whole = os.path.join(top, path)
    try:
        found = os.lstat(whole)
    except (FileNotFoundError, NotADirectoryError):
        return None  # tracked, and deleted in the work tree
    except OSError as error:
        raise SnapshotError(f"cannot read {whole!r}: {error.strerror}") from error
    mode = stat.S_IMODE(found.st_mode) & 0o777
    if stat.S_ISREG(found.st_mode):
        return Entry(path, "file", mode, found.st_size)
    if stat.S_ISLNK(found.st_mode):
        return Entry(path, "link", 0o777, 0, _link(top, whole))
    if stat.S_ISDIR(found.st_mode):
        return Entry(path, "directory", mode, 0)
    warnings.append(f"{path!r} is left out: it is neither a file nor a link (a socket, a pipe or a device)")
    return None


def _link(top: str, whole: str) -> str:
    target = os.readlink(whole)
    # Followed to its end: on another machine a link out of the directory points at nothing, or at something else.
    inside = os.path.realpath(whole)
    if os.path.isabs(target) or not (inside == top or inside.startswith(top.rstrip(os.sep) + os.sep)):
        raise SnapshotError(
            f"{whole!r} is a link to {target!r}, outside the code directory: other machines do not have that; "
            f"delete it, or have it ignored ({IGNORE_FILE})"
        )
    return target


def _real_directories(top: str) -> Callable[[str], bool]:
    """Return a function that is True for a directory below `top` that is reached through no link.

    Files that git lists below a link are deleted ones.
    """
    known = {"": True}

    def real(directory: str) -> bool:
        if directory not in known:
            whole = os.path.join(top, directory)
            known[directory] = real(os.path.dirname(directory)) and not os.path.islink(whole)
        return known[directory]

    return real


def _git_files(top: str, warnings: list[str]) -> list[_Path] | None:
    """Return the files that git tracks or would track, with submodules and nested repositories; None without git."""
    if not _in_repository(top):
        return None
    listed = [(path, True) for path in _listed(top, "--cached")]
    listed += [(path, False) for path in _listed(top, "--others", "--exclude-standard")]
    if not listed and _is_ignored(top):
        return None  # a project that lies, ignored, in somebody else's repository
    found: list[_Path] = []
    for path, tracked in listed:
        whole = os.path.join(top, path)
        if os.path.isdir(whole) and not os.path.islink(whole.rstrip("/")):
            found += _nested(top, path.rstrip("/"), warnings)
        else:
            found.append(_Path(path, tracked))
    return found


def _listed(top: str, *which: str) -> list[str]:
    return [os.fsdecode(path) for path in _git(top, "ls-files", "-z", *which).split(b"\0") if path]


def _nested(top: str, path: str, warnings: list[str]) -> Iterator[_Path]:
    """Yield the files of a submodule or a nested repository: git lists only its directory."""
    whole = os.path.join(top, path)
    if os.path.lexists(os.path.join(whole, ".git")):
        for inner in _git_files(whole, warnings) or ():
            yield _Path(f"{path}/{inner.path}", inner.tracked)
    elif not os.listdir(whole):
        warnings.append(
            f"{path!r} is an empty directory: is it a submodule to check out (git submodule update --init)?"
        )


def _in_repository(top: str) -> bool:
    directory = top
    while not os.path.lexists(os.path.join(directory, ".git")):
        parent = os.path.dirname(directory)
        if parent == directory:
            return False
        directory = parent
    return True


def _git(top: str, *words: str) -> bytes:
    import subprocess

    # fsmonitor is a command out of the repository's own configuration.
    command = ["git", "-c", "core.fsmonitor=false", "-C", top, *words]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, env=git_environment())
    except FileNotFoundError:
        raise SnapshotError(
            f"{top} is in a git repository, and git, which knows what it ignores, is not there: install git"
        ) from None
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip().splitlines() or ["it said nothing"]
        raise SnapshotError(f"git cannot list the files of {top}: {said[0]}")
    return done.stdout


def _is_ignored(top: str) -> bool:
    import subprocess

    asked = subprocess.run(
        ["git", "-c", "core.fsmonitor=false", "-C", top, "check-ignore", "-q", "."],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env=git_environment(),
    )
    return asked.returncode == 0


def git_environment() -> dict[str, str]:
    """Return the environment without a git hook's variables, which would select the hook's repository."""
    return {name: value for name, value in os.environ.items() if name not in _GIT_VARIABLES} | {"LC_ALL": "C"}


def _walk(top: str, own: tuple[str, ...], rules: Rules, warnings: list[str], secrets: list[str]) -> list[_Path]:
    """Return all files, links and empty directories that are not left out.

    Directories that look like secrets are added to `secrets`.
    """
    found: list[_Path] = []
    waiting = [""]
    while waiting:
        directory = waiting.pop()
        kept = 0
        for entry in _scan(top, directory):
            path = f"{directory}/{entry.name}" if directory else entry.name
            is_directory = entry.is_dir(follow_symlinks=False)
            if entry.path in own or rules.ignored(f"{path}/" if is_directory else path):
                continue
            kept += 1
            if not is_directory:
                found.append(_Path(path))
            elif is_secret(path) and not rules.accepted(f"{path}/"):
                secrets.append(path)
            elif os.path.exists(os.path.join(entry.path, "pyvenv.cfg")):
                warnings.append(f"{path!r} is left out: it is a virtual environment")
            else:
                waiting.append(path)
        if directory and not kept:
            found.append(_Path(directory))
    return found


def _scan(top: str, directory: str) -> Iterable[os.DirEntry[str]]:
    whole = os.path.join(top, directory)
    try:
        with os.scandir(whole) as entries:
            return list(entries)
    except OSError as error:
        raise SnapshotError(f"cannot read the directory {whole!r}: {error.strerror}") from error
