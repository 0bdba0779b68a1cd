"""Virtual environments on hosts, created from a requirements file, once for the same content.

An environment sees the packages of the interpreter that creates it, so that torch, which is large, is installed once.
With a `version` it is of another Python and has only its own packages.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ...errors import ConfigError
from .. import replies
from ..errors import RemoteError
from ..host_list import Host
from ..remote_files import host_programs, program_call, read_reply
from ..transport import Pool, Remote
from .cleanup import clear

MAIN = "requirements.txt"
_CREATE_S = 3600.0

_COMMENT = re.compile(r"(?:^|\s)#.*$")
_OPTION = re.compile(r"(?P<name>--[a-z-]+|-[a-z])(?:\s*=\s*|\s+|(?<=^-[a-z]))(?P<value>\S.*)")
_AT = re.compile(r"[A-Za-z0-9._-]+(?:\s*\[[^]]*\])?\s*@\s*(?P<place>\S+)")
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_ARCHIVES = (".whl", ".zip", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
_INCLUDES = ("-r", "--requirement")
_CONSTRAINTS = ("-c", "--constraint")
_PLACES = ("-e", "--editable", "-f", "--find-links")


@dataclass(frozen=True)
class Requirements:
    """Files for pip by name, `requirements.txt` first. They refer to no other file of this machine."""

    source: str
    files: Mapping[str, str] = field(repr=False)


def read(file: str, code: str) -> Requirements:
    """Read a requirements file, relative to the directory `code`, with the files that it includes (-r, -c).

    Paths in it are paths on the hosts and must be absolute. Raises ConfigError, with file and line.
    """
    path = os.path.join(code, os.path.expanduser(file))
    files: dict[str, str] = {MAIN: ""}
    files[MAIN] = "".join(line + "\n" for line in _flattened(path, files, (path,)))
    return Requirements(file, files)


def _flattened(path: str, files: dict[str, str], chain: tuple[str, ...]) -> Iterator[str]:
    for number, line in _lines(path):
        option = _OPTION.fullmatch(line)
        name, value = (option["name"], option["value"].strip()) if option else ("", "")
        if name not in (*_INCLUDES, *_CONSTRAINTS) or _URL.match(value):
            _check(name, value if option else line, f"{path}:{number}")
            yield line
            continue
        included = os.path.normpath(os.path.join(os.path.dirname(path), value.strip("'\"")))
        if included in chain:
            raise ConfigError(f"{path}:{number}: {line}: the files include each other")
        text = _flattened(included, files, (*chain, included))
        if name in _INCLUDES:
            yield from text
        else:
            constraints = f"constraints-{len(files)}.txt"
            files[constraints] = ""
            files[constraints] = "".join(line + "\n" for line in text)
            yield f"-c {constraints}"


def _lines(path: str) -> Iterator[tuple[int, str]]:
    """Yield each line with its number, without comments; lines continued by a backslash are joined."""
    try:
        with open(path, encoding="utf-8-sig") as file:
            physical = file.read().splitlines()
    except UnicodeDecodeError:
        raise ConfigError(f"requirements {path}: not a text file") from None
    except OSError as error:
        raise ConfigError(f"requirements {path}: {(error.strerror or str(error)).lower()}") from None
    joined, first = "", 0
    for number, line in enumerate([*physical, ""], 1):
        first = first or number
        if line.endswith("\\") and not line.lstrip().startswith("#"):
            joined += line[:-1] + " "
            continue
        text = _COMMENT.sub("", joined + line).strip()
        if text:
            yield first, text
        joined, first = "", 0


def _check(option: str, text: str, location: str) -> None:
    """Raise ConfigError for a requirement that is a file of this machine, which the hosts lack."""
    if option and option not in _PLACES:
        return
    match = _AT.match(text)
    source = match["place"] if match else re.split(r"\s|;", text, maxsplit=1)[0]
    if source.startswith("file:"):
        local = not source.startswith(("file:///", "file://localhost/"))
    elif _URL.match(source) or source.startswith("/"):
        local = False
    elif option in ("-f", "--find-links"):
        local = not source.startswith("~")
    else:
        name = re.split(r"[\[<>=!~]", source, maxsplit=1)[0]
        local = bool(option) or name.startswith(".") or "/" in name or source.lower().endswith(_ARCHIVES)
    if local:
        raise ConfigError(
            f"{location}: {source} is relative, and hosts have no such file: give a path that each host has, or a URL "
            "(packages in the code directory can be installed by setup:)"
        )


@dataclass(frozen=True)
class Environments:
    """The virtual environments of a target's hosts. Threads may share it for different hosts."""

    requirements: Requirements
    root: str
    python: str
    version: str | None = None
    unused_s: float = float("inf")

    def ensure(self, remote: Remote) -> str:
        """Return the environment's interpreter on a host; create it if it is missing, which takes as long as pip does.

        After a creation, blobs and environments that no job there needs, unused for `unused_s` seconds, are removed.

        Raises HostUnreachable, and RemoteError with pip's last errors.
        """
        return str(self._query(remote, make=True))

    def find(self, remote: Remote) -> str | None:
        """Return the environment's interpreter on a host, None if missing. Raises HostUnreachable, RemoteError."""
        return self._query(remote, make=False)

    def missing_on(self, pool: Pool, hosts: Sequence[Host]) -> list[Host]:
        """Return the hosts without the environment. Hosts that cannot be queried are left out."""
        outcomes = pool.map(self.find, hosts)
        return [outcome.host for outcome in outcomes if outcome.error is None and outcome.value is None]

    def _query(self, remote: Remote, *, make: bool) -> str | None:
        files = dict(self.requirements.files)
        request = {"root": self.root, "files": files, "version": self.version, "make": make}
        argv, stdin = program_call(self.python, host_programs("program", "venv"), request, site=True)
        with remote.open(argv) as session:
            session.write(stdin)
            line = read_reply(session, _CREATE_S, remote.name, self.python)
        try:
            reply = replies.decode(line, replies.VenvResult, remote.name)
        except RemoteError as error:
            raise RemoteError(remote.name, f"{self.requirements.source}: {error.problem}") from None
        if reply["made"] and self.unused_s != float("inf"):
            clear(remote, root=self.root, python=self.python, unused_s=self.unused_s)
        return reply["python"]
