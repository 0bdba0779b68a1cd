"""Endpoints for the code of jobs, which clients send in pieces before they submit."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Header, Path, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from .. import code
from ..auth import Submitter
from ..problems import Problem
from .people import Context

router = APIRouter(tags=["code"])

Digest = Annotated[str, Path(pattern="^[0-9a-f]{64}$", description="sha256 of the tree, as `accel` computes it")]


@router.head("/code/{digest}", response_class=Response)
def show_code(digest: Digest, caller: Submitter, context: Context) -> Response:
    """Answer how much of this code the server has from the caller: `Accel-Complete`, `Accel-Offset`; 404 for none."""
    if code.is_complete(context, digest, caller.name):
        return Response(headers={"Accel-Complete": "true"})
    offset = code.received(context, digest, caller.name)
    if not offset:
        raise Problem(404, f"code {digest} not found")
    return Response(headers={"Accel-Complete": "false", "Accel-Offset": str(offset)})


@router.patch(
    "/code/{digest}",
    status_code=202,
    response_class=Response,
    responses={201: {"description": "The code is complete"}},
)
async def add_piece(
    digest: Digest,
    request: Request,
    caller: Submitter,
    context: Context,
    accel_offset: Annotated[int, Header(ge=0, le=2**53)],
    accel_size: Annotated[int, Header(ge=1, le=2**53)],
) -> Response:
    """Append the body, a piece of a snapshot's tar file, at `Accel-Offset`; `Accel-Size` is the size of the whole file.

    The last piece is answered with status 201, others with 202.
    """
    piece = await request.body()
    arguments = (context, digest, caller.name, accel_offset, accel_size, piece)
    is_complete = await run_in_threadpool(code.add_piece, *arguments)
    return Response(status_code=201 if is_complete else 202)
