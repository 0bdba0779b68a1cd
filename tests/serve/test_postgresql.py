"""PostgreSQL in place of SQLite: tests of users and jobs once more, on a database of a real server for each."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import psycopg
import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import text

from accel.cli import main
from accel.serve import database
from accel.serve.server import check
from accel.serve.settings import Settings, read_settings
from accel.serve.tables import metadata
from schedulers.errors import ConfigError, StoreError
from schedulers.processes import die_with_parent
from tests.needs import missing
from tests.ordinary import NOBODY, as_user
from tests.waiting import until

from . import test_people
from .test_jobs import (
    digest,
    snapshot,
    test_a_cancel_reaches_a_job_that_runs_and_one_that_was_not_submitted_yet,
    test_a_job_after_one_that_was_not_submitted,
    test_a_job_runs_and_is_deleted,
    test_a_killed_server_submits_each_job_once,
    test_a_page_continues_where_the_last_one_ended,
    test_jobs_that_ended_long_ago_are_removed_with_their_code,
    works,
)

__all__ = [
    "digest",
    "snapshot",
    "test_a_cancel_reaches_a_job_that_runs_and_one_that_was_not_submitted_yet",
    "test_a_job_after_one_that_was_not_submitted",
    "test_a_job_runs_and_is_deleted",
    "test_a_killed_server_submits_each_job_once",
    "test_a_page_continues_where_the_last_one_ended",
    "test_jobs_that_ended_long_ago_are_removed_with_their_code",
    "works",
]


@pytest.fixture(scope="module")
def directory() -> Iterator[Path]:
    """The directory of the server's socket, who runs as an ordinary user; its databases need no password."""
    programs = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    if not programs:
        missing("PostgreSQL", "apt-get install postgresql")
    directory = Path(tempfile.mkdtemp(prefix="accel-pg"))  # a socket's path may have 107 characters
    user = as_user(NOBODY) if os.geteuid() == 0 else []
    if user:
        os.chown(directory, NOBODY, NOBODY)
    data, programs_directory = str(directory / "data"), programs[-1].parent
    initdb = [str(programs[-1]), "--no-sync", "--auth", "trust", "--username", "accel", "-D", data]
    subprocess.run([*user, *initdb], check=True, capture_output=True, cwd=directory)
    options = ["-D", data, "-k", str(directory), "-c", "listen_addresses=", "-c", "fsync=off"]
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(
            [*user, str(programs_directory / "postgres"), *options], cwd=directory, stdout=log, stderr=log,
            preexec_fn=die_with_parent,
        )  # fmt: skip
    try:
        ready = [str(programs_directory / "pg_isready"), "--quiet", "-h", str(directory)]
        until(lambda: process.poll() is not None or subprocess.run(ready).returncode == 0, "PostgreSQL answers")
        assert process.poll() is None, (directory / "log").read_text()
        yield directory
    finally:
        process.send_signal(signal.SIGINT)  # disconnects its clients
        process.wait()
        shutil.rmtree(directory)


@pytest.fixture(autouse=True)
def url(directory: Path, homes: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a new database, which `serve.yaml` names; its tables were created by `accel serve migrate`."""
    name = f"accel {homes.name}"
    with psycopg.connect(host=str(directory), user="accel", dbname="postgres", autocommit=True) as connection:
        connection.execute(psycopg.sql.SQL("CREATE DATABASE {}").format(psycopg.sql.Identifier(name)))
    url = f"postgresql://accel@/{quote(name)}?host={quote(str(directory))}"
    monkeypatch.setenv("JOBS_DATABASE", url)
    (homes / "config/serve.yaml").write_text("database: env:JOBS_DATABASE\n")
    assert main(["serve", "migrate"]) == 0
    return url


class TestSeveralUsers:
    test_a_token_ends = staticmethod(test_people.test_a_token_ends)
    test_roles = staticmethod(test_people.test_roles)
    test_users = staticmethod(test_people.test_users)

    @pytest.fixture
    def settings(self, homes: Path) -> Settings:
        (homes / "config/accel.yaml").write_text("targets: {lab: {kind: kubernetes}}\n")
        with (homes / "config/serve.yaml").open("a") as file:
            file.write("targets: {lab: {run_as: service}}\n")
        return read_settings(None, {})


def test_the_database(settings: Settings, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    opened = database.open_database(settings)
    with opened.read() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []
    capsys.readouterr()
    assert main(["serve", "migrate", "--sql"]) == 0
    statements = capsys.readouterr().out
    with opened.write() as connection:
        connection.execute(text("DROP SCHEMA public CASCADE"))
        connection.execute(text("CREATE SCHEMA public"))
    with pytest.raises(ConfigError, match="the database's tables are not those of this version: run accel serve mig"):
        database.open_database(settings)
    (row,) = [row for row in check(settings) if row[0] == "database"]
    assert row[1:] == (False, "the database's tables are not those of this version: run accel serve migrate")
    with opened.engine.connect() as connection:
        connection.exec_driver_sql(statements)
    with opened.read() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []
    opened.close()
    database.open_database(settings).close()
    assert not Path(settings.home, "service.db").exists()
    monkeypatch.setenv("JOBS_DATABASE", "postgresql://accel@127.0.0.1:1/jobs")
    with pytest.raises(StoreError, match=r"the database does not answer: .*Connection refused") as raised:
        database.open_database(settings)
    assert "\n" not in str(raised.value)
