"""The tables of the database. The truth about a job is its directory in the store; its row is an index for lists."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Column, Float, ForeignKey, Index, Integer, MetaData, Table, Text


def key(name: str, kind: Any = Text) -> Column[Any]:
    """Return a column of the primary key."""
    return Column(name, kind, primary_key=True)


def columns(names: str, kind: Any = Text, *, nullable: bool = False) -> list[Column[Any]]:
    """Return a column for each of the names, which blanks separate."""
    return [Column(name, kind, nullable=nullable) for name in names.split()]


metadata = MetaData()

user = Table("user", metadata, key("name"), *columns("role"), *columns("created_at", Float))

# `hash`: sha256 of the token. Times are seconds since the epoch; `used_at` is kept to the hour.
token = Table(
    "token",
    metadata,
    key("id"),
    Column("user", Text, ForeignKey("user.name", ondelete="CASCADE"), nullable=False),
    *columns("hash"),
    *columns("created_at expires_at", Float),
    *columns("revoked_at used_at", Float, nullable=True),
)

# `request`: the body of the PUT, as text: JSON columns refuse lone surrogates. `sha256`: its digest.
# `digest`: of the code. `changed_at`: the time of the last change.
job = Table(
    "job",
    metadata,
    key("id"),
    *columns("owner project name target kind state reason message native_state warning request sha256"),
    *columns("nodes gpus attempt", Integer),
    *columns("created_at observed_at changed_at", Float),
    *columns("started_at ended_at cancel_asked", Float, nullable=True),
    *columns("native_id digest", nullable=True),
    *columns("exit_code", Integer, nullable=True),
)
for _name in ("state", "owner", "project"):
    Index(f"job_{_name}", job.c[_name], job.c.id.desc())
Index("job_changed_at", job.c.changed_at)

# Who has sent which code: a digest alone gives nobody the code of others.
code = Table("code", metadata, key("digest"), key("owner"), *columns("size", Integer), *columns("sent_at", Float))

audit = Table(
    "audit",
    metadata,
    key("id", Integer),
    *columns("at", Float),
    *columns("user token address action object outcome request_id"),
)
Index("audit_at", audit.c.at)
