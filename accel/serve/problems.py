"""Answers of the API: JSON in ASCII, and errors as problem documents (RFC 9457)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict
from sqlalchemy.exc import DataError, DBAPIError
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.routing import Match

from schedulers.errors import ConfigError, SchedulerError, SpecError, UnknownJob
from schedulers.printable import one_line

# Of each endpoint, for the API's description.
RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {
        "description": HTTPStatus(status).phrase,
        "content": {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}},
    }
    for status in (400, 401, 403, 404, 405, 409, 413, 422, 429, 503)
}

SCHEMA = {
    "title": "Problem",
    "type": "object",
    "required": ["type", "title", "status", "detail"],
    "properties": {
        "type": {"type": "string"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string", "description": "One line that says what was wrong and what to do."},
        "where": {"type": "string", "description": "The part of the request that was wrong: body.resources.gpus"},
    },
}


class Strict(BaseModel):
    """A body or query whose unknown keys are errors."""

    model_config = ConfigDict(extra="forbid")


_METHODS = ("DELETE", "GET", "HEAD", "PATCH", "POST", "PUT")


class Ascii(JSONResponse):
    """A JSON document in ASCII: argv and names may hold bytes that are not UTF-8, as lone surrogates."""

    def render(self, content: Any) -> bytes:
        """Encode the document."""
        return json.dumps(content, separators=(",", ":"), allow_nan=False).encode("ascii")


class Problem(HTTPException):
    """An error of a request, with its HTTP status and one line for the user.

    where:   the part that was wrong.
    audited: the caller was not allowed to do that: the audit log gets a row.
    """

    def __init__(
        self, status: int, detail: str, where: str = "", *, headers: dict[str, str] | None = None, audited: bool = False
    ) -> None:
        super().__init__(status, one_line(detail), headers)
        self.where, self.audited = where, audited


def problem_response(status: int, detail: str, where: str = "", headers: Mapping[str, str] | None = None) -> Ascii:
    """Return the response of a failed request."""
    document = {"type": "about:blank", "title": HTTPStatus(status).phrase, "status": status, "detail": detail}
    content = document | ({"where": where} if where else {})
    return Ascii(content, status, headers, media_type="application/problem+json")


def add_handlers(app: FastAPI, record_refusal: Callable[[Request, str], None]) -> None:
    """Make the application answer every error with a problem document. `record_refusal`: for those to be audited."""

    @app.exception_handler(HTTPException)
    async def of_http(request: Request, error: HTTPException) -> JSONResponse:
        if isinstance(error, Problem) and error.audited:
            try:
                await run_in_threadpool(record_refusal, request, error.detail)
            except DBAPIError as failure:
                return await of_database(request, failure)
        headers = error.headers
        if error.status_code == 401:
            headers = {"WWW-Authenticate": "Bearer"}
        elif error.status_code == 405:
            headers = {"Allow": _allowed(request)}
        return problem_response(error.status_code, str(error.detail), getattr(error, "where", ""), headers)

    @app.exception_handler(RequestValidationError)
    async def of_validation(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        place, name = where.rpartition(".")[::2]
        is_unknown = first["type"] in ("extra_forbidden", "unexpected_keyword_argument")
        detail = f"{place}: unknown key {name!r}" if is_unknown else one_line(f"{where}: {first['msg']}")
        return problem_response(422, detail, where)

    @app.exception_handler(SchedulerError)
    async def of_schedulers(_: Request, error: SchedulerError) -> JSONResponse:
        is_mistake = isinstance(error, (ConfigError, SpecError))
        status = 404 if isinstance(error, UnknownJob) else 422 if is_mistake else 503
        return problem_response(status, one_line(str(error)))

    @app.exception_handler(DBAPIError)
    async def of_database(_: Request, error: DBAPIError) -> JSONResponse:
        if isinstance(error, DataError):  # PostgreSQL's text has no NUL
            return problem_response(422, f"a value is not allowed: {one_line(str(error.orig))}")
        return problem_response(503, f"the database does not answer: {one_line(str(error.orig))}")


def _allowed(request: Request) -> str:
    """Return the value of the header `Allow`: all methods of the path."""

    def exists(method: str) -> bool:
        scope = {**request.scope, "method": method}
        return any(route.matches(scope)[0] is Match.FULL for route in request.app.router.routes)

    return ", ".join(filter(exists, _METHODS))  # Starlette names those of one function
