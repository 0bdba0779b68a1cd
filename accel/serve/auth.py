"""Users, their roles and tokens, and the audit log of what they change."""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import re
import secrets
import string
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from sqlalchemy import Connection, RowMapping, delete, insert, select, update

from .context import Context, ServeContext, context_of
from .problems import Problem
from .tables import audit, token, user

Role = Literal["viewer", "submitter", "owner"]
ROLES: tuple[Role, ...] = ("viewer", "submitter", "owner")  # each may do what those before it may

DEFAULT_DAYS, MAX_DAYS = 90, 365
USER_NAME = r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}"
AUDIT_DAYS = 400

_ALPHABET = string.digits + string.ascii_uppercase + string.ascii_lowercase
_TOKEN = re.compile(r"accel_(?P<id>[0-9A-Za-z]{8})_[0-9A-Za-z]{43}(?P<sum>[0-9A-Za-z]{6})\Z")
_DAY_S, _HOUR_S = 86_400.0, 3600.0

_bearer = HTTPBearer(auto_error=False, description="A token of `accel token create`.")


@dataclass(frozen=True, kw_only=True)
class Caller:
    """The user who makes a request, and the address."""

    name: str
    role: Role
    token_id: str
    address: str
    request_id: str

    def may(self, role: Role) -> bool:
        """Return True if the caller has this role or a greater one."""
        return ROLES.index(self.role) >= ROLES.index(role)


SERVER = Caller(name="accel serve", role="owner", token_id="", address="", request_id="")  # no user can have this name


def caller_of(
    request: Request,
    context: Context,
    credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)],
) -> Caller:
    """Return who makes the request. Raises Problem with status 401, or 429 after many wrong tokens from the address.

    A valid token is accepted all the same: others may share the address.
    """
    nobody = Caller(
        name="", role="viewer", token_id="", address=request.client.host if request.client else "",
        request_id=request.state.request_id,
    )  # fmt: skip
    if credentials is None:
        raise Problem(401, "no token: send one in the header Authorization: Bearer TOKEN")
    try:
        with context.database.read() as connection:
            row = _row_of(connection, credentials.credentials)
    except Problem as problem:
        context.failures.add(nobody.address)
        with context.database.write() as connection:
            record(connection, nobody, "log in", request.url.path, problem.detail)
        raise
    now = time.time()
    if now - (row["used_at"] or 0.0) > _HOUR_S:
        with context.database.write() as connection:
            connection.execute(update(token).where(token.c.id == row["id"]).values(used_at=now // _HOUR_S * _HOUR_S))
    caller = dataclasses.replace(nobody, name=row["user"], role=row["role"], token_id=row["id"])
    request.state.caller = caller  # for `record_refusal`
    return caller


def require(role: Role) -> Callable[..., Caller]:
    """Return a dependency: the caller, who must have at least this role."""

    def check(request: Request, caller: Annotated[Caller, Depends(caller_of)]) -> Caller:
        if not caller.may(role):
            raise forbidden(caller, f"{request.method} {request.url.path} requires role {role}")
        return caller

    return check


Viewer = Annotated[Caller, Depends(require("viewer"))]
Submitter = Annotated[Caller, Depends(require("submitter"))]
Owner = Annotated[Caller, Depends(require("owner"))]


def forbidden(caller: Caller, reason: str) -> Problem:
    """Return the error for what the caller's role does not allow."""
    return Problem(403, f"{reason}; {caller.name} is a {caller.role}", audited=True)


def record_refusal(request: Request, detail: str) -> None:
    """Add a row to the audit log for a request that was refused."""
    with context_of(request).database.write() as connection:
        record(connection, request.state.caller, request.method, request.url.path, f"refused: {detail}")


def record(connection: Connection, caller: Caller, action: str, subject: str, outcome: str = "done") -> None:
    """Add a row to the audit log; delete rows older than 400 days."""
    now = time.time()
    connection.execute(
        insert(audit).values(
            at=now, user=caller.name, token=caller.token_id, address=caller.address, action=action, object=subject,
            outcome=outcome, request_id=caller.request_id,
        )
    )  # fmt: skip
    connection.execute(delete(audit).where(audit.c.at < now - AUDIT_DAYS * _DAY_S))


def create_token(connection: Connection, name: str, days: float = DEFAULT_DAYS) -> tuple[str, str]:
    """Create a token for the user; return its id and the token, which is stored nowhere."""
    token_id = _random(8)
    body = f"accel_{token_id}_{_random(43)}"
    secret = body + _checksum(body)
    now = time.time()
    connection.execute(
        insert(token).values(id=token_id, user=name, hash=_hash(secret), created_at=now, expires_at=now + days * _DAY_S)
    )
    return token_id, secret


def is_valid(connection: Connection, secret: str, margin_s: float = 0.0) -> bool:
    """Return True for a token that can be used now, and for `margin_s` more seconds."""
    try:
        return bool(_row_of(connection, secret)["expires_at"] > time.time() + margin_s)
    except Problem:
        return False


def is_active(context: ServeContext, token_id: str) -> bool:
    """Return True for a token that is neither revoked nor expired."""
    query = select(token.c.id).where(
        token.c.id == token_id, token.c.revoked_at.is_(None), token.c.expires_at > time.time()
    )
    return bool(context.database.rows(query))


def _row_of(connection: Connection, secret: str) -> RowMapping:
    """Return the row of a valid token, with its user's role. Raises Problem with status 401."""
    match = _TOKEN.match(secret)
    if match is None or _checksum(secret[:-6]) != match["sum"]:
        raise Problem(401, "malformed token: copy all of it")
    query = select(token, user.c.role).join(user).where(token.c.id == match["id"])
    row = connection.execute(query).mappings().one_or_none()
    if row is None or not hmac.compare_digest(row["hash"], _hash(secret)):
        raise Problem(401, "the token is not known")
    if row["revoked_at"] is not None:
        raise Problem(401, "the token was revoked")
    if row["expires_at"] <= time.time():
        day = time.strftime("%Y-%m-%d", time.gmtime(row["expires_at"]))
        raise Problem(401, f"the token expired on {day}")
    return row


def _random(length: int) -> str:
    return "".join(secrets.choice(_ALPHABET) for _ in range(length))


def _checksum(body: str) -> str:
    """Return CRC-32 in six characters: scanners tell tokens in files from other words by it."""
    number = zlib.crc32(body.encode())
    digits = ""
    for _ in range(6):
        number, digit = divmod(number, len(_ALPHABET))
        digits = _ALPHABET[digit] + digits
    return digits


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
