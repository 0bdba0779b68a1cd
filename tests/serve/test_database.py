"""Migrations create the tables, and copy an older database before they change it."""

from __future__ import annotations

import sqlite3
import threading
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import insert, select, text

from accel.serve import database, server
from accel.serve.settings import Settings
from accel.serve.tables import metadata, user
from schedulers.errors import ConfigError, StoreError


def test_the_migrations_make_the_tables(settings: Settings) -> None:
    server.create_home(settings.home)
    opened = database.open_database(settings)
    with opened.read() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []
    assert database.revisions(opened.engine)[0] == database.revisions(opened.engine)[1]
    opened.close()
    assert sorted(path.name for path in Path(settings.home).glob("service.db.2*")) == []


def test_an_older_database_is_copied_before_it_is_migrated(settings: Settings) -> None:
    server.create_home(settings.home)
    path = Path(settings.home) / "service.db"
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE old (a)")
    connection.commit()
    connection.close()
    database.open_database(settings).close()
    (copy,) = Path(settings.home).glob("service.db.2*")
    copied = sqlite3.connect(copy)
    assert copied.execute("SELECT name FROM sqlite_master").fetchall() == [("old",)]
    copied.close()


def test_a_newer_database_is_left_alone(settings: Settings) -> None:
    server.create_home(settings.home)
    opened = database.open_database(settings)
    with opened.write() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    opened.close()
    with pytest.raises(StoreError, match=r"the database is from a newer accel \(revision 9999\): upgrade accel"):
        database.open_database(settings)


def test_transactions_wait_for_each_other(settings: Settings) -> None:
    """Threads that read and then write in one transaction: SQLite's own default fails half of them at once."""
    server.create_home(settings.home)
    opened = database.open_database(settings)
    failures: list[BaseException] = []

    def add(start: int) -> None:
        try:
            for number in range(start, start + 20):
                with opened.write() as connection:
                    count = len(connection.execute(select(user.c.name)).all())
                    connection.execute(insert(user).values(name=f"{number}", role="viewer", created_at=count))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=add, args=(100 * index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    with opened.read() as connection:
        assert sorted(connection.execute(select(user.c.created_at)).scalars()) == list(range(80))
    opened.close()


def test_a_home_on_a_network_file_system_is_refused(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    server.create_home(settings.home)
    monkeypatch.setattr("schedulers.local.job_files.DISKS", set())
    with pytest.raises(ConfigError, match="is on a network file system, where SQLite loses data: set database to Post"):
        database.open_database(settings)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("", "secret database: DB is not set"),
        ("nonsense", "expects a URL such as postgresql://"),
        ("mysql://x/y", "database: mysql is not supported: use sqlite or PostgreSQL"),
        ("postgresql://127.0.0.1:1/x", "the database does not answer: connection failed"),
    ],
)
def test_a_wrong_reference_is_one_line(homes: Path, monkeypatch: pytest.MonkeyPatch, value: str, message: str) -> None:
    if value:
        monkeypatch.setenv("DB", value)
    else:
        monkeypatch.delenv("DB", raising=False)
    with pytest.raises((ConfigError, StoreError), match=message):
        database.connect(Settings(database="env:DB"))
