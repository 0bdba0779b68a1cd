"""Changes of users and tokens, and the owner's token that the server writes when it starts."""

from __future__ import annotations

import getpass
import os
import re
import time

from sqlalchemy import Connection, delete, func, insert, select, update

from schedulers.errors import ConfigError
from schedulers.store import atomic_files

from .auth import SERVER, USER_NAME, Role, create_token, is_valid, record
from .context import ServeContext
from .database import Database
from .problems import Problem
from .settings import Settings
from .tables import token, user
from .targets import check_sharing

TOKEN_FILE = "owner-token"
_RENEW_S = 7 * 86_400.0  # before its end the owner's token is replaced at a start


def start(context: ServeContext) -> str:
    """Make the user of this process an owner with a valid token in `owner-token`; return the user's name.

    Raises ConfigError if the targets may not be shared by the users that there are.
    """
    name = _own_name()
    path = os.path.join(context.settings.home, TOKEN_FILE)
    current = (atomic_files.read_bytes(path) or b"").decode(errors="replace").strip()
    with context.database.write() as connection:
        if not role_of(connection, name):
            connection.execute(insert(user).values(name=name, role="owner", created_at=time.time()))
            record(connection, SERVER, "set role", f"user {name}", "owner")
        if not is_valid(connection, current, _RENEW_S):
            token_id, current = create_token(connection, name)
            record(connection, SERVER, "create", f"token {token_id} of {name}")
            atomic_files.replace_file(path, current.encode() + b"\n", durably=True)
    check_users(context.database, context.settings)
    return name


def check_users(database: Database, settings: Settings) -> None:
    """Raise ConfigError if the targets may not be shared by the users that there are, and this process's user."""
    if {row["name"] for row in database.rows(select(user.c.name))} - {_own_name()}:
        check_sharing(settings)


def _own_name() -> str:
    return re.sub(r"[^A-Za-z0-9._@-]", "_", getpass.getuser())


def role_of(connection: Connection, name: str) -> str:
    """Return the user's role, or "" if there is no such user."""
    return connection.execute(select(user.c.role).where(user.c.name == name)).scalar_one_or_none() or ""


def put_user(context: ServeContext, connection: Connection, name: str, role: Role) -> None:
    """Create the user or change the role. Raises Problem."""
    if not re.fullmatch(USER_NAME, name):
        raise Problem(422, f"{name!r} is not a name: use letters, digits and . _ @ -", "path.name")
    before = role_of(connection, name)
    if not before:
        try:
            check_sharing(context.settings)
        except ConfigError as error:
            raise Problem(409, str(error), audited=True) from None
        connection.execute(insert(user).values(name=name, role=role, created_at=time.time()))
        return
    if role != "owner":
        _keep_an_owner(connection, name)
    connection.execute(update(user).where(user.c.name == name).values(role=role))


def delete_user(connection: Connection, name: str) -> None:
    """Delete the user and the user's tokens; jobs stay. Raises Problem."""
    if not role_of(connection, name):
        raise Problem(404, f"no user {name!r}")
    _keep_an_owner(connection, name)
    connection.execute(delete(token).where(token.c.user == name))
    connection.execute(delete(user).where(user.c.name == name))


def revoke(connection: Connection, token_id: str, owner: str | None) -> None:
    """Revoke a token at once. `owner`: only if it is this user's. Raises Problem."""
    chosen = update(token).where(token.c.id == token_id, token.c.revoked_at.is_(None)).values(revoked_at=time.time())
    if owner is not None:
        chosen = chosen.where(token.c.user == owner)
    if not connection.execute(chosen).rowcount:
        raise Problem(404, f"no valid token {token_id!r}")


def _keep_an_owner(connection: Connection, name: str) -> None:
    others = select(func.count()).select_from(user).where(user.c.role == "owner", user.c.name != name)
    if not connection.execute(others).scalar_one():
        raise Problem(409, f"{name} is the only owner: make another user an owner before", audited=True)
