"""The first tables. They stay as they are here when a later migration changes them."""

from __future__ import annotations

from alembic import op
from sqlalchemy import Column, Float, ForeignKey, Integer, Text, text

from accel.serve.tables import columns, key

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Create users, tokens, jobs, code and the audit log."""
    op.create_table("user", key("name"), *columns("role"), *columns("created_at", Float))
    op.create_table(
        "token",
        key("id"),
        Column("user", Text, ForeignKey("user.name", ondelete="CASCADE"), nullable=False),
        *columns("hash"),
        *columns("created_at expires_at", Float),
        *columns("revoked_at used_at", Float, nullable=True),
    )
    op.create_table(
        "job",
        key("id"),
        *columns("owner project name target kind state reason message native_state warning request sha256"),
        *columns("nodes gpus attempt", Integer),
        *columns("created_at observed_at changed_at", Float),
        *columns("started_at ended_at cancel_asked", Float, nullable=True),
        *columns("native_id digest", nullable=True),
        *columns("exit_code", Integer, nullable=True),
    )
    for name in ("state", "owner", "project"):
        op.create_index(f"job_{name}", "job", [name, text("id DESC")])
    op.create_index("job_changed_at", "job", ["changed_at"])
    op.create_table("code", key("digest"), key("owner"), *columns("size", Integer), *columns("sent_at", Float))
    op.create_table(
        "audit",
        key("id", Integer),
        *columns("at", Float),
        *columns("user token address action object outcome request_id"),
    )
    op.create_index("audit_at", "audit", ["at"])
