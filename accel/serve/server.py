"""A server's life: its home and lock, its port, what is checked before, and its end at SIGTERM."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import ssl
from collections.abc import Callable, Iterator
from types import FrameType

import uvicorn

from schedulers.errors import ConfigError, SchedulerError
from schedulers.printable import one_line
from schedulers.store import atomic_files
from schedulers.store.store import Store
from schedulers.target import SupportsCheck

from . import people
from .app import create_app
from .context import ServeContext
from .database import connect, needs_migration, open_database
from .settings import Settings
from .targets import offered_targets
from .workers import working

_GRACEFUL_S = 3  # for requests that still run at SIGTERM; with the threads and the database, all ends within 5 s


@contextlib.contextmanager
def open_context(settings: Settings) -> Iterator[ServeContext]:
    """Hold the home of a server, with its database open. Raises ConfigError, StoreError."""
    create_home(settings.home)
    with _only_one(settings.home), contextlib.closing(open_database(settings)) as database:
        yield ServeContext(settings, database, Store(settings.home), _identity(settings.home))


def create_home(home: str) -> None:
    """Create the directory of a server's files. Raises StoreError."""
    try:
        for name in ("jobs", "snapshots", "code", "logs", "secrets"):
            os.makedirs(os.path.join(home, name), mode=0o700, exist_ok=True)
        os.chmod(home, 0o700)
    except OSError as error:
        raise atomic_files.store_error(error, home, "write") from error


def _identity(home: str) -> str:
    """Return the random id of the home, which is made at the first start."""
    path = os.path.join(home, "server-id")
    identity = atomic_files.read_bytes(path)
    if identity is None:
        identity = os.urandom(8).hex().encode()
        atomic_files.replace_file(path, identity, durably=True)
    return identity.decode()


def bind(settings: Settings) -> socket.socket:
    """Return a listening socket. Raises ConfigError if the address cannot be had."""
    is_ipv6 = ":" in settings.host
    family = socket.AF_INET6 if is_ipv6 else socket.AF_INET
    both = is_ipv6 and socket.has_dualstack_ipv6()  # `::` is all addresses
    try:
        return socket.create_server((settings.host, settings.port), family=family, backlog=1024, dualstack_ipv6=both)
    except OSError as error:
        reason = "is taken" if error.errno == errno.EADDRINUSE else f"cannot be used: {error.strerror}"
        raise ConfigError(f"port {settings.port} of {settings.host} {reason}: give another --port") from None


def serve(context: ServeContext, listener: socket.socket) -> None:
    """Serve requests until SIGTERM or SIGINT."""
    settings = context.settings
    config = uvicorn.Config(
        create_app(context),
        log_config=None,
        access_log=False,
        ws="none",
        server_header=False,
        proxy_headers=bool(settings.behind_proxy),
        forwarded_allow_ips=list(settings.behind_proxy),
        ssl_certfile=settings.tls_cert or None,
        ssl_keyfile=settings.tls_key or None,
        timeout_graceful_shutdown=_GRACEFUL_S,
    )
    with working(context):
        _Server(config).run(sockets=[listener])


class _Server(uvicorn.Server):
    """A server that tells its streams when it ends, and so does not wait for them."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin the end."""
        self.config.app.state.context.end()  # type: ignore[union-attr]
        super().handle_exit(sig, frame)


@contextlib.contextmanager
def _only_one(home: str) -> Iterator[None]:
    path = os.path.join(home, "serve.lock")
    with atomic_files.exclusive_lock(path, blocking=False) as acquired:
        if not acquired:
            holder = one_line((atomic_files.read_bytes(f"{path}.pid") or b"?").decode(errors="replace"))
            raise ConfigError(f"another accel serve (process {holder}) has the home {home}: give another --home")
        atomic_files.replace_file(f"{path}.pid", f"{os.getpid()} on {socket.gethostname()}".encode())
        yield


# `accel serve check`: what would keep a server from starting, or its targets from running jobs.

Row = tuple[str, bool, str]  # what was checked, True if it is all right, details


def check(settings: Settings) -> list[Row]:
    """Check everything, and return a row for each part. Starts no job."""
    rows = [
        _run(f"home {settings.home}", _check_home, settings),
        _run("database", _check_database, settings),
        _run(f"address {settings.address}", _check_address, settings),
    ]
    if rows[1][1:] == (True, ""):  # with tables that are up to date
        rows.append(_run("users", _check_users, settings))
    if settings.tls_cert:
        rows.append(_run("TLS", _check_tls, settings))
    try:
        offers = offered_targets(settings)
    except SchedulerError as error:
        return [*rows, ("targets", False, str(error))]
    return [*rows, *(_run(f"target {name}", _check_target, settings, name) for name in offers)]


def _run(subject: str, act: Callable[..., str], *arguments: object) -> Row:
    try:
        return subject, True, act(*arguments)
    except (SchedulerError, OSError) as error:
        return subject, False, str(error)


def _check_home(settings: Settings) -> str:
    create_home(settings.home)
    return ""


def _check_database(settings: Settings) -> str:
    engine = connect(settings)
    try:
        return f"a start creates or migrates its tables ({engine.dialect.name})" if needs_migration(engine) else ""
    finally:
        engine.dispose()


def _check_users(settings: Settings) -> str:
    with contextlib.closing(open_database(settings)) as database:
        people.check_users(database, settings)
    return ""


def _check_address(settings: Settings) -> str:
    bind(settings).close()
    return ""


def _check_tls(settings: Settings) -> str:
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(settings.tls_cert, settings.tls_key)
    except OSError as error:  # also ssl.SSLError
        raise ConfigError(f"{settings.tls_cert}, {settings.tls_key}: {error.strerror or error}") from None
    return ""


def _check_target(settings: Settings, name: str) -> str:
    target = offered_targets(settings)[name].resolve(settings, {}).target
    if not isinstance(target, SupportsCheck):
        return "this kind has no checks"
    report = target.check(0)
    if report.failures:
        raise ConfigError("; ".join(report.failures))
    return "; ".join(report.warnings)
