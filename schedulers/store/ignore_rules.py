"""Rules for files that are not shipped with the code: ignored ones, those that are never code, likely secrets."""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import SnapshotError

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

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


def read(top: str, *, git: bool, image: bool) -> Rules:
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


def warnings(left: Sequence[str], accepted: Sequence[str], tracked: Sequence[str]) -> list[str]:
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
