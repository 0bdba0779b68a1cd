"""`accel serve check`: what would keep a server from starting, or its targets from running jobs."""

from __future__ import annotations

import contextlib
import os
import ssl
from collections.abc import Callable

from schedulers.errors import ConfigError, SchedulerError
from schedulers.target import SupportsCheck

from . import people
from .database import connect, needs_migration, open_database
from .server import bind, create_home
from .settings import Settings
from .targets import offered_targets

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
    if not os.access(settings.home, os.W_OK):
        raise ConfigError("it cannot be written")
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
