"""Alembic's directory of migrations."""
