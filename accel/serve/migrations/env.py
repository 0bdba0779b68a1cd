"""Alembic's entry: it runs migrations over the connection of the caller, or prints their statements."""

from __future__ import annotations

from alembic import context

from accel.serve.tables import metadata


def _run() -> None:
    attributes = context.config.attributes
    if context.is_offline_mode():
        context.configure(url=attributes["url"], target_metadata=metadata, literal_binds=True)
    else:
        connection = attributes["connection"]
        context.configure(connection=connection, target_metadata=metadata, transaction_per_migration=True)
    with context.begin_transaction():
        context.run_migrations()


_run()
