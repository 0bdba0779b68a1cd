"""The first tables."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Create users, tokens, jobs, code and the audit log."""
    op.create_table(
        "user",
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("role", sa.Text, nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
    )
    op.create_table(
        "token",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("user", sa.Text, sa.ForeignKey("user.name", ondelete="CASCADE"), nullable=False),
        sa.Column("hash", sa.Text, nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("expires_at", sa.Float, nullable=False),
        sa.Column("revoked_at", sa.Float),
        sa.Column("used_at", sa.Float),
    )
    op.create_table(
        "job",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("owner", sa.Text, nullable=False),
        sa.Column("project", sa.Text, nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("target", sa.Text, nullable=False),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("nodes", sa.Integer, nullable=False),
        sa.Column("gpus", sa.Integer, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("exit_code", sa.Integer),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("message", sa.Text, nullable=False),
        sa.Column("native_state", sa.Text, nullable=False),
        sa.Column("native_id", sa.Text),
        sa.Column("warning", sa.Text, nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("started_at", sa.Float),
        sa.Column("ended_at", sa.Float),
        sa.Column("observed_at", sa.Float, nullable=False),
        sa.Column("cancel_asked", sa.Float),
        sa.Column("request", sa.Text, nullable=False),
        sa.Column("sha256", sa.Text, nullable=False),
        sa.Column("digest", sa.Text),
        sa.Column("changed_at", sa.Float, nullable=False),
    )
    op.create_index("job_state", "job", ["state", sa.text("id DESC")])
    op.create_index("job_owner", "job", ["owner", sa.text("id DESC")])
    op.create_index("job_project", "job", ["project", sa.text("id DESC")])
    op.create_index("job_changed_at", "job", ["changed_at"])
    op.create_table(
        "code",
        sa.Column("digest", sa.Text, primary_key=True),
        sa.Column("owner", sa.Text, primary_key=True),
        sa.Column("size", sa.Integer, nullable=False),
        sa.Column("sent_at", sa.Float, nullable=False),
    )
    op.create_table(
        "audit",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("at", sa.Float, nullable=False),
        sa.Column("user", sa.Text, nullable=False),
        sa.Column("token", sa.Text, nullable=False),
        sa.Column("address", sa.Text, nullable=False),
        sa.Column("action", sa.Text, nullable=False),
        sa.Column("object", sa.Text, nullable=False),
        sa.Column("outcome", sa.Text, nullable=False),
        sa.Column("request_id", sa.Text, nullable=False),
    )
    op.create_index("audit_at", "audit", ["at"])
