"""Health of the server, and what a client must know before it logs in."""

from __future__ import annotations

import os
from typing import Annotated

from fastapi import APIRouter, Depends
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from sqlalchemy import select
from starlette.responses import PlainTextResponse, Response

import accel

from ..auth import Viewer
from ..context import ServeContext, context_of
from ..problems import problem_response

API_LEVEL = 1

health = APIRouter(include_in_schema=False)
router = APIRouter(tags=["info"])


class Info(BaseModel):
    """A server's version and interface.

    id:  random, of the server's home: another server at the same URL has another one.
    api: the level of the API, which grows with each addition.
    """

    id: str
    version: str
    api: int
    login: list[str]


@health.get("/healthz")
async def is_alive() -> Response:
    """Answer as long as the process serves requests."""
    return PlainTextResponse("ok\n")


@health.get("/readyz")
def is_ready(context: Annotated[ServeContext, Depends(context_of)]) -> Response:
    """Answer if the database answers and the home can be written, else with status 503 and the reason."""
    if context.ending.is_set():
        return problem_response(503, "the server is shutting down")
    context.database.rows(select(1))
    if not os.access(context.settings.home, os.W_OK):
        return problem_response(503, f"{context.settings.home} cannot be written")
    return PlainTextResponse("ok\n")


@health.get("/metrics")
def metrics(caller: Viewer, context: Annotated[ServeContext, Depends(context_of)]) -> Response:
    """Answer with the metrics, in Prometheus' text format."""
    return Response(context.metrics.text(), media_type=CONTENT_TYPE_LATEST)


@router.get("/info")
async def info(context: Annotated[ServeContext, Depends(context_of)]) -> Info:
    """Return the server's version and the ways to log in."""
    return Info(id=context.id, version=accel.__version__, api=API_LEVEL, login=["token"])
