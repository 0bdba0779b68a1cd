"""The database: its engine, transactions, and the migrations of its tables."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, RowMapping, Select, create_engine, event, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError

from schedulers.config import secrets
from schedulers.errors import ConfigError, SpecError, StoreError
from schedulers.local.job_files import on_disk_of_this_machine
from schedulers.printable import one_line

from .settings import Settings

NAME = "service.db"
_BUSY_S = 30.0  # for which a transaction waits for another process, such as `accel serve migrate`
_COPIES = 3


class Database:
    """The connections to one database. Thread-safe."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._reader = engine.execution_options(isolation_level="AUTOCOMMIT")

    def read(self) -> Connection:
        """Return a connection for queries, a context manager. Each query sees the newest data."""
        return self._reader.connect()

    def rows(self, query: Select[Any]) -> Sequence[RowMapping]:
        """Return the rows of a query."""
        with self.read() as connection:
            return connection.execute(query).mappings().all()

    def write(self) -> contextlib.AbstractContextManager[Connection]:
        """Return a transaction, which is committed at the block's end, or rolled back if it raises."""
        return self.engine.begin()

    def close(self) -> None:
        """Close all connections."""
        self.engine.dispose()


def open_database(settings: Settings) -> Database:
    """Connect to the database and migrate its tables. Raises ConfigError, StoreError."""
    engine = connect(settings)
    try:
        if needs_migration(engine):
            migrate(engine)
    except BaseException:
        engine.dispose()
        raise
    return Database(engine)


def connect(settings: Settings) -> Engine:
    """Return an engine whose database answers. Raises ConfigError for a wrong setting, StoreError if it does not."""
    if settings.database == "sqlite":
        path = os.path.join(settings.home, NAME)
        if not on_disk_of_this_machine(Path(settings.home)):
            raise ConfigError(
                f"{path} is on a network file system, where SQLite loses data: set database to PostgreSQL, or --home "
                "to a local disk"
            )
        engine = _sqlite(path)
    else:
        engine = _postgresql(settings.database)
    try:
        with engine.connect() as connection:
            connection.execute(text("SELECT 1"))
    except DBAPIError as error:
        raise StoreError(f"the database does not answer: {one_line(str(error.orig))}") from None
    return engine


def needs_migration(engine: Engine) -> bool:
    """Return True if a start must migrate the tables before. Raises ConfigError, StoreError.

    PostgreSQL is migrated by `accel serve migrate` alone: its administrator decides when.
    """
    current, newest = revisions(engine)
    if current != newest and engine.dialect.name != "sqlite":
        raise ConfigError("the database's tables are not those of this version: run accel serve migrate")
    return current != newest


def revisions(engine: Engine) -> tuple[str | None, str | None]:
    """Return the revision of the database's tables, None if it has none, and the newest one.

    Raises StoreError for a database that a newer version has migrated.
    """
    script = ScriptDirectory.from_config(_config())
    with engine.connect() as connection:
        current = MigrationContext.configure(connection).get_current_revision()
    if current is not None and current not in {revision.revision for revision in script.walk_revisions()}:
        raise StoreError(f"the database is from a newer accel (revision {current}): upgrade accel")
    return current, script.get_current_head()


def migrate(engine: Engine) -> None:
    """Migrate the tables. A SQLite database with content is copied before. Raises StoreError."""
    try:
        if engine.dialect.name == "sqlite":
            _copy(engine)
        with engine.connect() as connection:
            command.upgrade(_config(connection), "head")
    except (DBAPIError, OSError) as error:
        raise StoreError(f"the database cannot be migrated: {one_line(str(error))}") from None


def print_sql(settings: Settings) -> None:
    """Print the statements that would create the tables from nothing."""
    config = _config()
    config.attributes["url"] = "sqlite://" if settings.database == "sqlite" else "postgresql://"
    command.upgrade(config, "head", sql=True)


def _config(connection: Connection | None = None) -> Config:
    config = Config()
    config.set_main_option("script_location", "accel.serve:migrations")
    config.attributes["connection"] = connection
    return config


def _sqlite(path: str) -> Engine:
    engine = create_engine(f"sqlite:///{path}", connect_args={"timeout": _BUSY_S, "check_same_thread": False})

    @event.listens_for(engine, "connect")
    def configure(connection: sqlite3.Connection, _: object) -> None:
        connection.isolation_level = None  # sqlite3 would begin transactions by itself, and later than needed
        for setting in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
            connection.execute(f"PRAGMA {setting}")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        # A transaction that begins by reading, and then writes, fails at once if another has written meanwhile.
        if connection.get_execution_options().get("isolation_level") != "AUTOCOMMIT":
            connection.exec_driver_sql("BEGIN IMMEDIATE")

    return engine


def _postgresql(reference: str) -> Engine:
    try:
        url = make_url(secrets.values({"database": reference})["database"].strip())
    except (SpecError, ArgumentError) as error:
        detail = "expects a URL such as postgresql://USER:PASSWORD@HOST/NAME"
        raise ConfigError(f"database: {error if isinstance(error, SpecError) else detail}") from None
    if url.get_backend_name() != "postgresql":
        raise ConfigError(f"database: {url.get_backend_name()} is not supported: use sqlite or PostgreSQL")
    try:
        return create_engine(url.set(drivername="postgresql+psycopg"), pool_pre_ping=True)
    except ImportError as error:  # psycopg, or libpq below it, is missing
        raise ConfigError(f"PostgreSQL needs psycopg: pip install 'accel-launch[serve]' ({error})") from None


def _copy(engine: Engine) -> None:
    """Copy a SQLite database with content to `service.db.TIME`; keep the newest copies."""
    path = str(engine.url.database)
    with contextlib.closing(sqlite3.connect(path)) as connection:
        if not connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            return
        connection.execute("VACUUM INTO ?", (f"{path}.{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}",))
    for copy in sorted(Path(path).parent.glob(f"{NAME}.2*"))[:-_COPIES]:
        copy.unlink()
