"""Files below our directory on a host: written completely or not at all, sent only if missing there.

Each call is one command: a program that is sent along (`node/files.py`) and run by the host's Python. SFTP
would take several round trips per file, and cannot verify or unpack anything.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.resources
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import SnapshotError
from .errors import RemoteError, one_line

if TYPE_CHECKING:
    from .session import Session
    from .transport import Remote

ROOT = "~/.accel"
FILE_MODE = 0o600
TRANSFER_S = 3600.0
_REPLY_TIMEOUT_S = 60.0
_CHUNK = 1 << 20
JOBS = ("program", "logs", "listen", "jobs")  # `node/jobs.py` and its imports, for `host_programs`
# Makes the sources importable under their own names, in packages without files.
_IMPORTER = """\
import sys, types
def load(name):
    parent, _, last = name.rpartition(".")
    if parent and parent not in sys.modules:
        load(parent)
    module = sys.modules[name] = types.ModuleType(name)
    if name in sources:
        module.__package__ = parent
        exec(compile(sources[name], name, "exec"), module.__dict__)
    else:
        module.__package__, module.__path__ = name, []
    if parent:
        setattr(sys.modules[parent], last, module)
    return module
"""
_DONE = dict.fromkeys(("put", "blob", "unpack", "remove"), bool)


@dataclass(frozen=True, kw_only=True)
class Blob:
    """Data to send and its sha256 in hexadecimal. Its source is read each time it is sent."""

    digest: str
    size: int
    source: Path | bytes

    @classmethod
    def of(cls, source: Path | bytes) -> Blob:
        """Hash the source. Raises SnapshotError if the file cannot be read."""
        hashed, size = hashlib.sha256(), 0
        for chunk in chunks(source):
            hashed.update(chunk)
            size += len(chunk)
        return cls(digest=hashed.hexdigest(), size=size, source=source)


@dataclass(frozen=True)
class Files:
    """The files below `root` on a host; paths are relative to it and do not leave it.

    Files are 0600 and directories 0700 by default. Every method raises HostUnreachable, and RemoteError in one
    line for errors of the host's disk or Python; what was to be written is then not there. Sending a blob removes
    those that nobody has sent or unpacked for `unused_s` seconds.
    """

    remote: Remote
    root: str = ROOT
    python: str = "python3"
    unused_s: float | None = None

    def put(self, files: Mapping[str, bytes]) -> None:
        """Write files, each replaced atomically and on disk when this returns."""
        self._do(_puts(files), list(files.values()))

    def unpack(self, blob: Blob, path: str) -> bool:
        """Unpack the tar blob as the directory `path`, completely or not at all. Return True if it was sent.

        The blob is stored under its digest, verified there, and sent only if missing. If it is unpacked already,
        nothing is done.
        """
        return self.install(blob, [path], {})

    def install(self, blob: Blob, paths: Sequence[str], files: Mapping[str, bytes]) -> bool:
        """Run `unpack` to each of `paths`, then `put`, in one command."""
        steps: list[Mapping[str, Any]] = [
            {"op": "blob", "digest": blob.digest, "size": blob.size, "unused_s": self.unused_s},
            *({"op": "unpack", "digest": blob.digest, "path": path} for path in paths),
            *_puts(files),
        ]
        return self._do(steps, list(files.values()), blob=blob)[0]

    def remove(self, *paths: str) -> list[bool]:
        """Remove files, and directories with their contents; return for each whether it existed."""
        return self._do([{"op": "remove", "path": path} for path in paths])

    def _do(
        self, steps: Sequence[Mapping[str, Any]], contents: Iterable[bytes] = (), *, blob: Blob | None = None
    ) -> list[bool]:
        from . import replies

        request = {"root": self.root, "do": list(steps)}
        names = ("program", "archive", "files") if blob else ("program", "files")  # only a blob is unpacked
        argv, stdin = program_call(self.python, host_programs(*names), request)
        with self.remote.open(argv) as session:
            session.write(stdin)
            if blob is not None and replies.decode(self._line(session), replies.Need, self.remote.name)["need"]:
                send_blob(session, blob, "the content" if isinstance(blob.source, bytes) else str(blob.source))
            for content in contents:
                session.write(content)
            session.close_stdin()
            done = replies.decode_done(self._line(session), steps, _DONE, self.remote.name)
            session.finish(_REPLY_TIMEOUT_S)
            return done

    def _line(self, session: Session) -> bytes:
        return read_reply(session, TRANSFER_S, self.remote.name, self.python)


def _puts(files: Mapping[str, bytes]) -> list[dict[str, Any]]:
    return [{"op": "put", "path": path, "size": len(data), "mode": FILE_MODE} for path, data in files.items()]


def send_blob(session: Session, blob: Blob, label: str) -> None:
    """Send the blob's content. Raises SnapshotError, with `label` for the source, if it has changed meanwhile."""
    sent = 0
    for chunk in chunks(blob.source):
        session.write(chunk)
        sent += len(chunk)
    if sent != blob.size:
        session.close()
        raise SnapshotError(f"{label} was changed while it was sent to {session.host}")


def read_reply(session: Session, timeout_s: float, host: str, python: str) -> bytes:
    """Return the program's next line. Raises RemoteError, with its last error, if it has ended without one."""
    line = session.read_line(timeout_s)
    if not line.endswith(b"\n"):
        completed = session.finish(_REPLY_TIMEOUT_S)
        raise RemoteError(host, f"{python}: {one_line(completed.stderr)}", completed.status)
    return line


def program_call(
    python: str, program: bytes, request: Mapping[str, Any], *, site: bool = False
) -> tuple[list[str], bytes]:
    """Return the argv, and the beginning of the standard input, for a program that handles this request on a host.

    `site`: it needs the packages of its interpreter.
    """
    flags = ["-I"] if site else ["-I", "-S"]
    argv = [python, *flags, "-c", program_loader(program)]
    return argv, program + json.dumps(request).encode() + b"\n"


def program_loader(program: bytes) -> str:
    """Return the argument for `python -c` that runs the `program` sent first on its standard input."""
    # With -c the first entry is the current directory, in which a json.py may lie.
    clean = "sys.path[:]=[p for p in sys.path if p]"
    return f"import sys;{clean};exec(compile(sys.stdin.buffer.read({len(program)}),'accel','exec'))"


@functools.cache
def host_program(name: str) -> bytes:
    """Return the source of a module of `schedulers.node`, or of another one named relative to `schedulers`."""
    package, _, module = name.rpartition(".")
    return importlib.resources.files(f"schedulers.{package or 'node'}").joinpath(f"{module}.py").read_bytes()


@functools.cache
def host_programs(*names: str) -> bytes:
    """Join modules into one program, each after those that it imports. The last one's `main` is called."""
    full_names = [f"schedulers.{name if '.' in name else f'node.{name}'}" for name in names]
    sources = {full: host_program(name).decode() for name, full in zip(names, full_names, strict=True)}
    return f"{_IMPORTER}sources = {sources!r}\nfor name in sources:\n    module = load(name)\nmodule.main()\n".encode()


def chunks(source: Path | bytes) -> Iterable[bytes]:
    if isinstance(source, bytes):
        yield source
        return
    try:
        with open(source, "rb") as file:
            while chunk := file.read(_CHUNK):
                yield chunk
    except OSError as error:
        raise SnapshotError(f"cannot read {source}: {error.strerror}") from error
