"""The application: its parts' endpoints, those for health and version, errors and limits."""

from __future__ import annotations

import os
from urllib.parse import urlsplit

from fastapi import APIRouter, FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from sqlalchemy import select
from starlette.responses import PlainTextResponse, Response

import accel

from . import code, jobs, logs, people, problems, submits, targets
from .auth import Viewer, record_refusal
from .context import Context, ServeContext
from .limits import Limits
from .problems import Ascii, add_handlers, problem_response

PREFIX = "/api/v1"
API_LEVEL = 1
_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")

health = APIRouter(include_in_schema=False)
router = APIRouter(tags=["info"])


def create_app(context: ServeContext) -> FastAPI:
    """Return the ASGI application."""
    app = FastAPI(
        title="accel",
        version=accel.__version__,
        default_response_class=Ascii,
        openapi_url=None,  # `describe_api` adds the schema of errors
        docs_url=None,  # its page loads scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.context = context
    app.include_router(health)
    for part in (router, people.router, targets.router, code.router, jobs.router, submits.router, logs.router):
        app.include_router(part, prefix=PREFIX, responses=problems.RESPONSES)
    add_handlers(app, record_refusal)
    hosts = [*_LOOPBACK, context.settings.host, (urlsplit(context.settings.address).hostname or "").lower()]
    app.add_middleware(Limits, hosts=hosts, max_body=int(context.settings.max_body), requests=context.metrics.requests)
    return app


class Info(BaseModel):
    """A server's version and interface.

    id:  random, of the server's home: another server at the same URL has another one.
    api: the level of the API, which grows with each addition.
    """

    id: str
    version: str
    api: int
    login: list[str]


@router.get("/info")
async def info(context: Context) -> Info:
    """Return the server's version and the ways to log in."""
    return Info(id=context.id, version=accel.__version__, api=API_LEVEL, login=["token"])


@router.get("/openapi.json", include_in_schema=False)
def describe_api(request: Request) -> Ascii:
    """Return the description of the API, with the schema of errors."""
    document = request.app.openapi()
    document["components"]["schemas"]["Problem"] = problems.SCHEMA
    return Ascii(document)


@health.get("/healthz")
async def is_alive() -> Response:
    """Answer as long as the process serves requests."""
    return PlainTextResponse("ok\n")


@health.get("/readyz")
def is_ready(context: Context) -> Response:
    """Answer if the database answers and the home can be written, else with status 503 and the reason."""
    if context.ending.is_set():
        return problem_response(503, "the server is shutting down")
    context.database.rows(select(1))
    if not os.access(context.settings.home, os.W_OK):
        return problem_response(503, f"{context.settings.home} cannot be written")
    return PlainTextResponse("ok\n")


@health.get("/metrics")
def metrics(caller: Viewer, context: Context) -> Response:
    """Answer with the metrics, in Prometheus' text format."""
    return Response(context.metrics.text(), media_type=CONTENT_TYPE_LATEST)
