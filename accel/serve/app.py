"""The application: endpoints, errors and limits over one server's context."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

import accel

from . import problems
from .api import code, info, jobs, logs, people, targets
from .auth import record_refusal
from .context import ServeContext
from .limits import Limits
from .problems import Ascii, add_handlers

PREFIX = "/api/v1"
_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


def create_app(context: ServeContext) -> FastAPI:
    """Return the ASGI application."""
    app = FastAPI(
        title="accel",
        version=accel.__version__,
        default_response_class=Ascii,
        openapi_url=f"{PREFIX}/openapi.json",
        docs_url=None,  # its page loads scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.context = context
    app.include_router(info.health)
    app.include_router(info.router, prefix=PREFIX, responses=problems.RESPONSES)
    for part in (people, targets, code, jobs, logs):
        app.include_router(part.router, prefix=PREFIX, responses=problems.RESPONSES)
    add_handlers(app, record_refusal)
    hosts = [*_LOOPBACK, context.settings.host, (urlsplit(context.settings.address).hostname or "").lower()]
    app.add_middleware(Limits, hosts=hosts, max_body=int(context.settings.max_body), requests=context.metrics.requests)
    app.openapi = lambda: _describe(app)  # type: ignore[method-assign]
    return app


def _describe(app: FastAPI) -> dict[str, Any]:
    """Return the description of the API, with the schema of errors."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, routes=app.routes)
        document.setdefault("components", {}).setdefault("schemas", {})["Problem"] = problems.SCHEMA
        app.openapi_schema = document
    return app.openapi_schema
