"""One command on one host: its input, its output and its end.

The user's shell (which may be any) gets only the line of `loader`. The command itself follows as the first bytes of
standard input, quoted for `/bin/sh`. Nothing is quoted anywhere else.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import SpecError
from .connection import Connection
from .errors import RemoteError, RemoteTimeout, one_line

if TYPE_CHECKING:
    from typing_extensions import Self

_CHUNK = 1 << 18
_PIECE = 1 << 16
_SEND_CHUNK = 1 << 15  # fits into any server's window: sending it cannot block
_MAX_NOISE = 2000
# Bytes that a command may print in all, and in one line if it is read by lines.
_MAX_OUTPUT, _LONGEST_LINE = 256 << 20, 16 << 20


@dataclass(frozen=True)
class Result:
    """The end of a command. `status` is its exit status, or 128 + N if signal N ended it.

    `stdout` and `stderr` are all that it printed, byte for byte, without the output of start-up files.
    """

    status: int
    stdout: bytes
    stderr: bytes


class Session:
    """A running command, for one thread at a time. `close` ends the session, but no process that ignores that.

    Every method that waits raises HostUnreachable if the connection is lost, and RemoteTimeout.
    """

    def __init__(self, connection: Connection, argv: Sequence[str], opening_s: float) -> None:
        self.host = connection.settings.alias
        self._program = argv[0] if argv else ""
        self._connection = connection
        self._mark = f"accel {os.urandom(16).hex()}"
        command = script(argv, self._mark)
        self._channel = connection.open_session(opening_s)
        self._closed = False
        self._out = _MarkedOutput(self._mark)
        self._err = _MarkedOutput(self._mark)
        try:
            self._channel.settimeout(opening_s)
            self._channel.exec_command(loader(len(command)))
            self._readable = self._channel.fileno()
            self.write(command)
        except BaseException as error:
            self.close()
            raise self._problem(error, "starting it") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, data: bytes) -> None:
        """Send to standard input; return when all is on its way. A command that no longer reads is no error."""
        import paramiko

        if self._channel.eof_sent or self._channel.closed:
            return
        try:
            # In pieces: paramiko copies all that is left for every packet.
            for start in range(0, len(data), _PIECE):
                self._channel.sendall(data[start : start + _PIECE])
        except TimeoutError:
            raise RemoteTimeout(self.host, f"{self._program} does not read what it is sent") from None
        except (OSError, EOFError, paramiko.SSHException):
            if not self._connection.alive:
                raise self._connection.connection_lost_error(f"sending to {self._program}") from None

    def close_stdin(self) -> None:
        with contextlib.suppress(OSError, EOFError):
            self._channel.shutdown_write()

    def read_line(self, timeout_s: float) -> bytes:
        """Return the next line of standard output with its ending; at the end, a line without one, or empty."""
        deadline = time.monotonic() + timeout_s
        # Lines before the mark come from the login shell's start-up files.
        while not (self._out.started and b"\n" in self._out.data) and self._wait_for_data(deadline, _LONGEST_LINE):
            pass
        return self._out.take(self._out.data.find(b"\n") + 1 or len(self._out.data))

    def finish(self, timeout_s: float | None) -> Result:
        """Wait for the end. Raises RemoteError if the command did not even start."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while self._wait_for_data(deadline):
            pass
        if not self._channel.status_event.wait(None if deadline is None else max(0.0, deadline - time.monotonic())):
            raise self._timeout_error()
        status = self._channel.exit_status
        if status < 0:
            if not self._connection.alive:
                raise self._connection.connection_lost_error(f"{self._program} was running")
            raise RemoteError(self.host, f"{self._program} ended without an exit status: its server ended it")
        if not self._out.started:
            noise = one_line(self._err.noise or self._out.noise)
            raise RemoteError(self.host, f"its shell runs no command (status {status}): {noise}", status)
        return Result(status, bytes(self._out.data), bytes(self._err.data))

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._channel.close()
            self._connection.release_session()

    def _wait_for_data(self, deadline: float | None, max_bytes: int | None = None) -> bool:
        """Wait for more output; return False if there can be none. Raises RemoteError if there is too much."""
        ended = self._channel.eof_received or self._channel.closed
        remaining = None if deadline is None else deadline - time.monotonic()
        if remaining is not None and remaining <= 0 and not ended:  # even if it still prints
            raise self._timeout_error()
        if self._drain():
            self._check_size(_MAX_OUTPUT if max_bytes is None else max_bytes)
            return True
        if ended:
            return False
        poll = select.poll()
        poll.register(self._readable, select.POLLIN)
        if not poll.poll(None if remaining is None else remaining * 1000):
            raise self._timeout_error()
        return True

    def _drain(self) -> bool:
        """Read the output that has arrived, at most a chunk per stream. Return True if any."""
        received = False
        if self._channel.recv_stderr_ready():
            self._err.add(self._channel.recv_stderr(_CHUNK))
            received = True
        if self._channel.recv_ready():
            self._out.add(self._channel.recv(_CHUNK))
            received = True
        return received

    def _check_size(self, max_bytes: int) -> None:
        for output in (self._out, self._err):
            if output.skipped + len(output.data) > max_bytes:
                excerpt = one_line(bytes(output.data[:_MAX_NOISE]) or output.noise)
                problem = f"{self._program} prints more than {max_bytes >> 20} MiB"
                raise RemoteError(self.host, f"{problem}; it begins: {excerpt}")

    def _timeout_error(self) -> RemoteTimeout:
        if not self._out.started:
            printed = self._err.noise or self._out.noise
            noise = f"; its start-up files printed: {one_line(printed)}" if printed.strip() else ""
            return RemoteTimeout(self.host, f"its login shell does not start {self._program}{noise}")
        detail = f"; last output: {one_line(bytes(self._err.data))}" if self._err.data else ""
        return RemoteTimeout(self.host, f"{self._program} takes too long{detail}")

    def _problem(self, error: BaseException, activity: str) -> BaseException:
        import paramiko

        if not isinstance(error, (paramiko.SSHException, EOFError, OSError)):
            return error
        if not self._connection.alive:
            return self._connection.connection_lost_error(f"{activity}: {self._program}")
        if isinstance(error, TimeoutError):
            return RemoteTimeout(self.host, f"its server does not start {self._program}")
        return RemoteError(self.host, f"its server refuses to run a command: {one_line(str(error))}")


class _MarkedOutput:
    """The command's output: the bytes after the mark. `skipped`: number of bytes before that."""

    def __init__(self, mark: str) -> None:
        self._mark = f"\n{mark}\n".encode()
        self.started = False
        self.skipped = 0
        self.noise = b""
        self.data = bytearray()

    def add(self, data: bytes) -> None:
        self.data += data
        if not self.started:
            before, mark, after = self.data.partition(self._mark)
            self.started = bool(mark)
            self.noise = bytes(before[-_MAX_NOISE:])
            tail = after if mark else self.data[-_MAX_NOISE - len(self._mark) :]
            self.skipped += len(self.data) - len(tail)
            self.data = bytearray(tail)

    def take(self, count: int) -> bytes:
        if not self.started:
            return b""
        data = bytes(self.data[:count])
        del self.data[:count]
        return data


def run(session: Session, stdin: bytes | Iterable[bytes], timeout_s: float | None) -> Result:
    """Send all of `stdin`, reading the command's output meanwhile, and wait for its end."""
    if isinstance(stdin, bytes) and len(stdin) <= _SEND_CHUNK:
        session.write(stdin)
        session.close_stdin()
        return session.finish(timeout_s)
    source_errors: list[Exception] = []

    def send() -> None:
        try:
            for chunk in (stdin,) if isinstance(stdin, bytes) else stdin:
                try:
                    session.write(chunk)
                except Exception:  # `finish` raises the reason
                    break
        except Exception as error:
            source_errors.append(error)
        session.close_stdin()

    # Sent while this thread reads, so that a command that prints before it reads all does not block.
    sender = threading.Thread(target=send, name=f"to {session.host}", daemon=True)
    sender.start()
    try:
        return session.finish(timeout_s)
    finally:
        session.close()
        sender.join()
        if source_errors:
            raise source_errors[0]


def loader(length: int) -> str:
    """Return the command line for a script of `length` bytes, which csh, fish and zsh read like sh."""
    return f"exec /bin/sh -c 'eval \"$(head -c {length})\"'"


def script(argv: Sequence[str], mark: str) -> bytes:
    """Return the script for `/bin/sh`, which runs the program `argv[0]`, never a shell's built-in.

    It first writes `mark` (on a line of its own) to both outputs, to separate the output of start-up files from
    that of the command. Raises SpecError for what no process accepts: an empty argv, a null character.
    """
    if not argv or not argv[0] or argv[0].startswith("-"):
        raise SpecError(f"{argv[0] if argv else '(nothing)'!r} is not a program that a host can run")
    lines = [f"printf '\\n{mark}\\n'; printf '\\n{mark}\\n' >&2".encode()]
    lines.append(b"(exec " + b" ".join(quote(argument) for argument in argv) + b")")
    lines.append(b"exit $?")
    return b"\n".join(lines)


def quote(word: str) -> bytes:
    """Quote the word for `/bin/sh`; bytes that are not UTF-8 (surrogate escapes) are preserved."""
    raw = os.fsencode(word)
    if b"\0" in raw:
        raise SpecError(f"no process can be given a null character: {word!r}")
    return b"'" + raw.replace(b"'", b"'\\''") + b"'"
