"""Endpoints for users, tokens and the audit log; the owner's token that the server writes when it starts."""

from __future__ import annotations

import getpass
import os
import re
import time
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query
from pydantic import BaseModel, Field
from sqlalchemy import Connection, delete, func, insert, select, update

from schedulers.errors import ConfigError
from schedulers.store import atomic_files

from . import auth
from .auth import USER_NAME, Owner, Role, Viewer, record
from .context import Context, ServeContext
from .database import Database
from .problems import Problem, Strict
from .settings import Settings
from .tables import audit, token, user
from .targets import check_sharing, offered_targets

router = APIRouter(tags=["people"])

TOKEN_FILE = "owner-token"
_RENEW_S = 7 * 86_400.0  # before its end the owner's token is replaced at a start

UserName = Annotated[str, Path(pattern=f"^{USER_NAME}$")]


class Me(BaseModel):
    """The user of the token. `server`: the id of the server, as in `/info`."""

    name: str
    role: Role
    token: str
    server: str
    targets: list[str]


class User(BaseModel):
    """A user."""

    name: str
    role: Role
    created_at: float


class RoleOf(Strict):
    """The role that a user shall have."""

    role: Role


class NewToken(Strict):
    """A token to create. `user`: default: the caller. `role`: of a user that is created with it."""

    user: str | None = Field(None, pattern=f"^{USER_NAME}$")
    role: Role = "submitter"
    days: float = Field(auth.DEFAULT_DAYS, gt=0, le=auth.MAX_DAYS)


class Token(BaseModel):
    """A token, without its secret."""

    id: str
    user: str
    created_at: float
    expires_at: float
    used_at: float | None


class Created(BaseModel):
    """A new token, which is shown only here."""

    id: str
    user: str
    token: str


class AuditRow(BaseModel):
    """A change or refusal, with its time, its user and the user's address."""

    id: int
    at: float
    user: str
    token: str
    address: str
    action: str
    object: str
    outcome: str
    request_id: str


class AuditQuery(Strict):
    """A choice of rows. `before`: only rows with a smaller id."""

    before: int | None = Field(None, ge=0, le=2**53)
    limit: int = Field(100, ge=1, le=1000)


@router.get("/me")
def me(caller: Viewer, context: Context) -> Me:
    """Return the user of the token, and the targets."""
    targets = sorted(offered_targets(context.settings))
    return Me(name=caller.name, role=caller.role, token=caller.token_id, server=context.id, targets=targets)


@router.get("/users")
def list_users(caller: Owner, context: Context) -> list[User]:
    """Return all users."""
    return [User(**row) for row in context.database.rows(select(user).order_by(user.c.name))]


@router.get("/users/{name}")
def show_user(name: UserName, caller: Owner, context: Context) -> User:
    """Return one user."""
    for row in context.database.rows(select(user).where(user.c.name == name)):
        return User(**row)
    raise _no_user(name)


@router.put("/users/{name}")
def put_user(name: UserName, body: RoleOf, caller: Owner, context: Context) -> User:
    """Create a user, or change a user's role."""
    with context.database.write() as connection:
        if not _role_of(connection, name):
            _create_user(context, connection, name, body.role)
        else:
            if body.role != "owner":
                _keep_an_owner(connection, name)
            connection.execute(update(user).where(user.c.name == name).values(role=body.role))
        record(connection, caller, "set role", f"user {name}", body.role)
    return show_user(name, caller, context)


@router.delete("/users/{name}", status_code=204)
def delete_user(name: UserName, caller: Owner, context: Context) -> None:
    """Delete a user and the user's tokens. The user's jobs stay."""
    with context.database.write() as connection:
        if not _role_of(connection, name):
            raise _no_user(name)
        _keep_an_owner(connection, name)
        connection.execute(delete(user).where(user.c.name == name))  # and by the foreign key, the tokens
        record(connection, caller, "delete", f"user {name}")


@router.get("/tokens")
def list_tokens(caller: Viewer, context: Context) -> list[Token]:
    """Return the caller's tokens, or for an owner all tokens."""
    query = select(token).where(token.c.revoked_at.is_(None)).order_by(token.c.created_at.desc())
    if not caller.may("owner"):
        query = query.where(token.c.user == caller.name)
    return [Token(**row) for row in context.database.rows(query)]


@router.post("/tokens", status_code=201)
def post_token(body: NewToken, caller: Viewer, context: Context) -> Created:
    """Create a token: for the caller, or by an owner for any user, who is created if need be."""
    name = body.user or caller.name
    if name != caller.name and not caller.may("owner"):
        raise auth.forbidden(caller, "tokens of others require role owner")
    with context.database.write() as connection:
        role = _role_of(connection, name)
        if not role:
            _create_user(context, connection, name, body.role)
        elif "role" in body.model_fields_set and body.role != role:
            raise Problem(409, f"{name} has the role {role}: change it with PUT /users/{name}", "body.role")
        token_id, secret = auth.create_token(connection, name, body.days)
        record(connection, caller, "create", f"token {token_id} of {name}")
    return Created(id=token_id, user=name, token=secret)


@router.delete("/tokens/{token_id}", status_code=204)
def delete_token(token_id: Annotated[str, Path(max_length=64)], caller: Viewer, context: Context) -> None:
    """Revoke a token: one of the caller's own, or as an owner any."""
    chosen = update(token).where(token.c.id == token_id, token.c.revoked_at.is_(None)).values(revoked_at=time.time())
    if not caller.may("owner"):
        chosen = chosen.where(token.c.user == caller.name)
    with context.database.write() as connection:
        if not connection.execute(chosen).rowcount:
            raise Problem(404, f"no valid token {token_id!r}")
        record(connection, caller, "revoke", f"token {token_id}")


@router.get("/audit")
def list_audit(query: Annotated[AuditQuery, Query()], caller: Owner, context: Context) -> list[AuditRow]:
    """Return rows of the audit log, the newest first."""
    chosen: Any = select(audit).order_by(audit.c.id.desc()).limit(query.limit)
    if query.before is not None:
        chosen = chosen.where(audit.c.id < query.before)
    return [AuditRow(**row) for row in context.database.rows(chosen)]


def start(context: ServeContext) -> str:
    """Make the user of this process an owner with a valid token in `owner-token`; return the user's name.

    Raises ConfigError if the targets may not be shared by the users that there are.
    """
    name = _own_name()
    path = os.path.join(context.settings.home, TOKEN_FILE)
    current = (atomic_files.read_bytes(path) or b"").decode(errors="replace").strip()
    with context.database.write() as connection:
        if not _role_of(connection, name):
            connection.execute(insert(user).values(name=name, role="owner", created_at=time.time()))
            record(connection, auth.SERVER, "set role", f"user {name}", "owner")
        if not auth.is_valid(connection, current, _RENEW_S):
            token_id, current = auth.create_token(connection, name)
            record(connection, auth.SERVER, "create", f"token {token_id} of {name}")
            atomic_files.replace_file(path, current.encode() + b"\n", durably=True)
    check_users(context.database, context.settings)
    return name


def check_users(database: Database, settings: Settings) -> None:
    """Raise ConfigError if the targets may not be shared by the users that there are, and this process's user."""
    if {row["name"] for row in database.rows(select(user.c.name))} - {_own_name()}:
        check_sharing(settings)


def _own_name() -> str:
    return re.sub(r"[^A-Za-z0-9._@-]", "_", getpass.getuser())


def _role_of(connection: Connection, name: str) -> str:
    """Return the user's role, or "" if there is no such user."""
    return connection.execute(select(user.c.role).where(user.c.name == name)).scalar_one_or_none() or ""


def _create_user(context: ServeContext, connection: Connection, name: str, role: Role) -> None:
    try:
        check_sharing(context.settings)
    except ConfigError as error:
        raise Problem(409, str(error), audited=True) from None
    connection.execute(insert(user).values(name=name, role=role, created_at=time.time()))


def _no_user(name: str) -> Problem:
    return Problem(404, f"no user {name!r}")


def _keep_an_owner(connection: Connection, name: str) -> None:
    others = select(func.count()).select_from(user).where(user.c.role == "owner", user.c.name != name)
    if not connection.execute(others).scalar_one():
        raise Problem(409, f"{name} is the only owner: make another user an owner before", audited=True)
