"""Commands on hosts over SSH: one shared connection per host; many hosts at once, results in host order.

    with Pool() as pool:
        for outcome in pool.map(lambda remote: remote.run(["nvidia-smi", "-L"]), parse_hosts("gpu[1-8]")):
            print(outcome.host, outcome.value.stdout if outcome.error is None else outcome.error)

Host keys must be known, with any value of StrictHostKeyChecking; no agent is forwarded; no shell interprets a
caller's arguments.
"""

from __future__ import annotations

import functools
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from ..errors import ConfigError, SchedulerError
from . import session as sessions
from .connection import Connection, Timeouts, library
from .errors import HostUnreachable, RemoteError, one_line
from .host_list import Host
from .session import Result, Session
from .ssh_config import Settings, resolve

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")

RUN_S = 60.0
MAX_CONCURRENT = 64
_MAX_JUMPS = 8
_WATCH_S = 0.1
_STOPPED_S = 2.0


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """The result of one host: a value, or the error that was raised for it."""

    host: Host
    value: T | None = None
    error: SchedulerError | None = None

    def get(self) -> T:
        """Return the value, or raise the error."""
        if self.error is not None:
            raise self.error
        return self.value  # type: ignore[return-value]  # no error: it is there


class Remote:
    """A host to run commands on. Connects on first use, and again after a connection was lost."""

    def __init__(self, pool: Pool, host: Host) -> None:
        self._pool = pool
        self.host = host

    @property
    def name(self) -> str:
        return self.host.name

    def connection(self) -> Connection:
        """Return the connection. Raises HostUnreachable (HostKeyRefused, LoginRefused), and ConfigError."""
        return self._pool.connection(self.host)

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes | Iterable[bytes] = b"",
        timeout_s: float | None = RUN_S,
        check: bool = True,
    ) -> Result:
        """Run a program with exactly these arguments, once; it is never retried.

        Raises HostUnreachable, RemoteTimeout after `timeout_s` seconds (the program may then still run), and, unless
        `check` is off, RemoteError for a status other than 0.
        """
        with self.open(argv) as session:
            result = sessions.run(session, stdin, timeout_s)
        if check and result.status != 0:
            detail = one_line(result.stderr or result.stdout)
            raise RemoteError(self.name, f"{argv[0]} failed (status {result.status}): {detail}", result.status)
        return result

    def open(self, argv: Sequence[str]) -> Session:
        """Start a program and return its session."""
        return Session(self.connection(), argv, self._pool.timeouts.connect_s)


class Pool:
    """Connections to hosts, one each, jump hosts included. Threads may share a pool; `close` ends them all.

    `config` replaces the files of `~/.ssh/config`, as `ssh -F` does. Raises SchedulerError without fabric.
    """

    def __init__(self, *, config: str | None = None, timeouts: Timeouts | None = None) -> None:
        library()
        self.timeouts = timeouts or Timeouts()
        self._resolve = functools.cache(functools.partial(resolve, config=config))
        self._lock = threading.Lock()
        self._entries: dict[tuple[Host, ...], _Entry] = {}
        self._closed = threading.Event()
        self._watcher: threading.Thread | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def remote(self, host: Host | str) -> Remote:
        return Remote(self, Host(name=host) if isinstance(host, str) else host)

    def map(self, function: Callable[[Remote], T], hosts: Iterable[Host]) -> list[Outcome[T]]:
        """Call the function for every host, MAX_CONCURRENT at a time; return the outcomes in the hosts' order.

        A SchedulerError is that host's outcome. Any other exception, and Ctrl-C, is raised at once: calls that have
        not begun do not begin, and the others end with the pool.
        """
        host_list = list(hosts)
        outcomes: list[Outcome[T] | None] = [None] * len(host_list)
        indices = iter(range(len(host_list)))
        done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        stop = threading.Event()

        def worker() -> None:
            while not stop.is_set():
                with self._lock:
                    index = next(indices, None)
                if index is None:
                    return
                host = host_list[index]
                try:
                    outcomes[index] = Outcome(host, value=function(self.remote(host)))
                except SchedulerError as error:
                    outcomes[index] = Outcome(host, error=error)
                except BaseException as error:
                    done.put(error)
                    return
                done.put(None)

        for number in range(min(MAX_CONCURRENT, len(host_list))):
            # Daemons, and nothing joins them: a host that hangs must not keep the program from ending.
            threading.Thread(target=worker, name=f"hosts {number}", daemon=True).start()
        try:
            for _ in host_list:
                error = done.get()
                if error is not None:
                    raise error
        finally:
            stop.set()
        return [outcome for outcome in outcomes if outcome is not None]

    def connection(self, host: Host) -> Connection:
        return self._connection_to(host, None, ())

    def settings(self, host: Host) -> Settings:
        """Return the host's settings in the SSH configuration. Raises ConfigError."""
        return self._resolve(Host(name=host.name, user=host.user, port=host.port, source=""))

    def close(self) -> None:
        """Close every connection; processes on the hosts notice it as with any client that disconnects."""
        self._closed.set()
        with self._lock:
            entries = list(self._entries.values())
        for entry in reversed(entries):
            if entry.connection is not None:
                entry.connection.close()

    def _connection_to(self, host: Host, jumps: tuple[Host, ...] | None, visited: tuple[str, ...]) -> Connection:
        """Return the connection to a host, via `jumps`, or if None via those in its configuration."""
        from .opening import connect

        settings = self.settings(host)
        route = settings.jumps if jumps is None else jumps
        if len(route) == 1 and route[0].name == host.name:
            route = ()  # `Host *` with a ProxyJump, and this is that jump host
        path = (*visited, host.name)
        if len(path) > _MAX_JUMPS or host.name in visited:
            raise ConfigError(f"ProxyJump in the SSH configuration goes round in circles: {' → '.join(path)}")
        entry = self._entry((*route, host))
        with entry.lock:
            if self._closed.is_set():
                raise HostUnreachable(host.name, "the connections were closed")
            if entry.connection is None or not entry.connection.alive:
                if entry.connection is not None:
                    entry.connection.close()
                # The last jump is reached by way of the ones before it, the first one as its own configuration says.
                via = self._connection_to(route[-1], route[:-1] or None, path) if route else None
                entry.connection = connect(settings, via=via, timeouts=self.timeouts)
                self._watch()
            return entry.connection

    def _entry(self, route: tuple[Host, ...]) -> _Entry:
        key = tuple(Host(name=host.name, user=host.user, port=host.port, source="") for host in route)
        with self._lock:
            return self._entries.setdefault(key, _Entry())

    def _watch(self) -> None:
        with self._lock:
            if self._watcher is None:
                self._watcher = threading.Thread(target=self._watch_silence, name="hosts' silence", daemon=True)
                self._watcher.start()

    def _watch_silence(self) -> None:
        last = time.monotonic()
        while not self._closed.wait(_WATCH_S):
            now = time.monotonic()
            with self._lock:
                connections = [entry.connection for entry in self._entries.values() if entry.connection is not None]
            for connection in connections:
                if now - last > min(_STOPPED_S, connection.silence_s / 3):
                    connection.reset_silence()
                else:
                    connection.check_silence(now)
            last = now


class _Entry:
    """One host's connection in a pool; its lock is held while the connection is opened."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.connection: Connection | None = None
