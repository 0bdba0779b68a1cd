"""The tables of the database. The truth about a job is its directory in the store; its row is an index for lists."""

from __future__ import annotations

from sqlalchemy import Column, Float, ForeignKey, Index, Integer, MetaData, Table, Text

metadata = MetaData()

user = Table(
    "user",
    metadata,
    Column("name", Text, primary_key=True),
    Column("role", Text, nullable=False),
    Column("created_at", Float, nullable=False),
)

# `hash`: sha256 of the token. Times are seconds since the epoch; `used_at` is kept to the hour.
token = Table(
    "token",
    metadata,
    Column("id", Text, primary_key=True),
    Column("user", Text, ForeignKey("user.name", ondelete="CASCADE"), nullable=False),
    Column("hash", Text, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("expires_at", Float, nullable=False),
    Column("revoked_at", Float),
    Column("used_at", Float),
)

# `request`: the body of the PUT, as text: JSON columns refuse lone surrogates. `sha256`: its digest.
# `digest`: of the code. `changed_at`: the number of the last change, by which waiting clients see news.
job = Table(
    "job",
    metadata,
    Column("id", Text, primary_key=True),
    Column("owner", Text, nullable=False),
    Column("project", Text, nullable=False),
    Column("name", Text, nullable=False),
    Column("target", Text, nullable=False),
    Column("kind", Text, nullable=False),
    Column("nodes", Integer, nullable=False),
    Column("gpus", Integer, nullable=False),
    Column("state", Text, nullable=False),
    Column("reason", Text, nullable=False),
    Column("exit_code", Integer),
    Column("attempt", Integer, nullable=False),
    Column("message", Text, nullable=False),
    Column("native_state", Text, nullable=False),
    Column("native_id", Text),
    Column("warning", Text, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("started_at", Float),
    Column("ended_at", Float),
    Column("observed_at", Float, nullable=False),
    Column("cancel_asked", Float),
    Column("request", Text, nullable=False),
    Column("sha256", Text, nullable=False),
    Column("digest", Text),
    Column("changed_at", Float, nullable=False),
)
Index("job_state", job.c.state, job.c.id.desc())
Index("job_owner", job.c.owner, job.c.id.desc())
Index("job_project", job.c.project, job.c.id.desc())
Index("job_changed_at", job.c.changed_at)

# Who has sent which code: a digest alone gives nobody the code of others.
code = Table(
    "code",
    metadata,
    Column("digest", Text, primary_key=True),
    Column("owner", Text, primary_key=True),
    Column("size", Integer, nullable=False),
    Column("sent_at", Float, nullable=False),
)

audit = Table(
    "audit",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("at", Float, nullable=False),
    Column("user", Text, nullable=False),
    Column("token", Text, nullable=False),
    Column("address", Text, nullable=False),
    Column("action", Text, nullable=False),
    Column("object", Text, nullable=False),
    Column("outcome", Text, nullable=False),
    Column("request_id", Text, nullable=False),
)
Index("audit_at", audit.c.at)
