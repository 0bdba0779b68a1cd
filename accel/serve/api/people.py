"""Endpoints for users, tokens and the audit log."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Query
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import select

from .. import people
from ..auth import DEFAULT_DAYS, MAX_DAYS, USER_NAME, Owner, Role, Viewer, create_token, forbidden, record
from ..context import ServeContext, context_of
from ..problems import Problem
from ..tables import audit, token, user
from ..targets import offered_targets

router = APIRouter(tags=["people"])

Context = Annotated[ServeContext, Depends(context_of)]
UserName = Annotated[str, Path(max_length=64)]


class Strict(BaseModel):
    """A body whose unknown keys are errors."""

    model_config = ConfigDict(extra="forbid")


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
    days: float = Field(DEFAULT_DAYS, gt=0, le=MAX_DAYS)


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
    raise Problem(404, f"no user {name!r}")


@router.put("/users/{name}")
def put_user(name: UserName, body: RoleOf, caller: Owner, context: Context) -> User:
    """Create a user, or change a user's role."""
    with context.database.write() as connection:
        people.put_user(context, connection, name, body.role)
        record(connection, caller, "set role", f"user {name}", body.role)
    return show_user(name, caller, context)


@router.delete("/users/{name}", status_code=204)
def delete_user(name: UserName, caller: Owner, context: Context) -> None:
    """Delete a user and the user's tokens. The user's jobs stay."""
    with context.database.write() as connection:
        people.delete_user(connection, name)
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
        raise forbidden(caller, "tokens of others require role owner")
    with context.database.write() as connection:
        role = people.role_of(connection, name)
        if not role:
            people.put_user(context, connection, name, body.role)
        elif "role" in body.model_fields_set and body.role != role:
            raise Problem(409, f"{name} has the role {role}: change it with PUT /users/{name}", "body.role")
        token_id, secret = create_token(connection, name, body.days)
        record(connection, caller, "create", f"token {token_id} of {name}")
    return Created(id=token_id, user=name, token=secret)


@router.delete("/tokens/{token_id}", status_code=204)
def delete_token(token_id: Annotated[str, Path(max_length=64)], caller: Viewer, context: Context) -> None:
    """Revoke a token: one of the caller's own, or as an owner any."""
    with context.database.write() as connection:
        people.revoke(connection, token_id, None if caller.may("owner") else caller.name)
        record(connection, caller, "revoke", f"token {token_id}")


@router.get("/audit")
def list_audit(query: Annotated[AuditQuery, Query()], caller: Owner, context: Context) -> list[AuditRow]:
    """Return rows of the audit log, the newest first."""
    chosen: Any = select(audit).order_by(audit.c.id.desc()).limit(query.limit)
    if query.before is not None:
        chosen = chosen.where(audit.c.id < query.before)
    return [AuditRow(**row) for row in context.database.rows(chosen)]
