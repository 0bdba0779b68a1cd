"""Endpoints for the logs of jobs: by offset, as a stream of events, and as a compressed file."""

from __future__ import annotations

import json
import math
import time
import zlib
from collections.abc import AsyncIterator, Iterator
from typing import Annotated

from fastapi import APIRouter, Depends, Header, Query
from fastapi.sse import EventSourceResponse, ServerSentEvent
from pydantic import Field
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response, StreamingResponse

from schedulers.errors import SchedulerError
from schedulers.job import LogLine
from schedulers.store.atomic_files import store_error
from schedulers.store.log_lines import LogText

from . import spool_file
from .auth import Viewer, is_active
from .changes import is_set_within
from .context import Context, ServeContext
from .jobs import FINAL, Job, Row
from .problems import Problem, Strict
from .spool import Spool

router = APIRouter(tags=["logs"])

_PIECE_BYTES, _EVENT_BYTES = 1 << 20, 1 << 15
_WAIT_S, _LOOK_S, _CHECK_S = 20.0, 1.0, 5.0
_OFFSET = 2**53


class LogQuery(Strict):
    """A position in a log, an offset in bytes: the last one of those that `since`, `at` and `tail` name."""

    since: int = Field(0, ge=0, le=_OFFSET, description="an offset after a line")
    at: float | None = Field(None, allow_inf_nan=False, description="what was read at that time or later")
    tail: int | None = Field(None, ge=0, le=1_000_000, description="the last lines of each rank")
    limit_bytes: int = Field(_PIECE_BYTES, ge=0, le=_OFFSET, description="0: no lines")


class StreamQuery(Strict):
    """A position in a log."""

    since: int = Field(0, ge=0, le=_OFFSET)


@router.get(
    "/jobs/{job_id}/logs",
    response_class=Response,
    responses={200: {"content": {"application/x-ndjson": {"schema": {"type": "string"}}}}},
)
async def read_log(job: Job, query: Annotated[LogQuery, Query()], context: Context) -> Response:
    """Return lines of the log, one JSON object each, from a position.

    `Accel-Offset` is the position after them; `Accel-More: true`: there are more now; `Accel-Complete: true`: there
    will be no more. Objects with `cursor` are marks of the server, and no lines. With `tail` and `limit_bytes=0` the
    answer is one object: where the last lines of each rank begin.
    """
    limit = min(query.limit_bytes, _PIECE_BYTES)
    needs_all = query.at is not None or query.tail is not None or not limit
    spool, is_current = await _read_now(context, job, math.inf if needs_all else query.since + limit)
    mark = spool.mark
    start, starts = await run_in_threadpool(_position, spool, mark.end, query)
    data = await _read(spool, start, mark.end, limit) if limit else b""
    if not is_current and (needs_all or not data):
        raise _behind(context, spool)
    end = start + len(data)
    headers = {
        "Accel-Offset": str(end),
        "Accel-More": str(end < mark.end or not is_current).lower(),
        "Accel-Complete": str(mark.complete and end == mark.end).lower(),
    }
    if starts is not None and not limit:  # as a header, that of many ranks would be too large for proxies
        data = json.dumps(starts).encode() + b"\n"
    return Response(data, media_type="application/x-ndjson", headers=headers)


async def _opened(
    job: Job,
    caller: Viewer,
    context: Context,
    query: Annotated[StreamQuery, Query()],
    last_event_id: Annotated[int | None, Header(ge=0, le=_OFFSET)] = None,
) -> AsyncIterator[int]:
    """Yield the offset at which a stream begins. It counts as open until the answer has ended."""
    since = query.since if last_event_id is None else last_event_id
    spool, _ = await run_in_threadpool(_ask, context, job)
    await run_in_threadpool(_check, spool, spool.mark.end, since)
    counts, limit = context.spools.streams, context.settings.streams
    if counts[caller.name] >= limit:
        raise Problem(429, f"{caller.name} has {limit} log streams open, the most that are allowed")
    counts[caller.name] += 1
    try:
        yield since
    finally:
        counts[caller.name] -= 1


@router.get("/jobs/{job_id}/logs/stream", response_class=EventSourceResponse)
async def stream_log(
    job: Job, caller: Viewer, context: Context, offset: Annotated[int, Depends(_opened)]
) -> AsyncIterator[ServerSentEvent]:
    """Send the lines of the log as events of one or more lines each, whose id is the offset after them.

    The event `end` follows the last one.
    """
    check_at = 0.0
    with context.spools.changes.waiting(job["id"]) as changed:
        while not context.ending.is_set():
            if time.monotonic() >= check_at:
                if not await run_in_threadpool(is_active, context, caller.token_id):
                    return
                spool, _ = await run_in_threadpool(_ask, context, job, now=False)
                check_at = time.monotonic() + _CHECK_S
            if spool.removed:
                return
            changed.clear()
            mark = spool.mark
            data = await _read(spool, offset, mark.end, _EVENT_BYTES)
            offset += len(data)
            if text := b"\n".join(line for line in data.splitlines() if not spool_file.is_mark(line)):
                # An event a line would cost 100 followers 20 times the processor time.
                yield ServerSentEvent(raw_data=text.decode(), id=str(offset))
            if offset >= mark.end and mark.complete:
                yield ServerSentEvent(raw_data="{}", event="end", id=str(offset))
                return
            if offset >= mark.end:
                await is_set_within(changed, _LOOK_S)


@router.get(
    "/jobs/{job_id}/logs.gz",
    response_class=Response,
    responses={200: {"content": {"application/gzip": {"schema": {"type": "string", "format": "binary"}}}}},
)
async def download_log(job: Job, context: Context) -> Response:
    """Return the log as compressed text, with `[rank N]` before each line if there are several ranks."""
    spool, is_current = await _read_now(context, job)
    if not is_current:
        raise _behind(context, spool)
    prefix = await run_in_threadpool(_prefix, context, job["id"])
    headers = {"Content-Disposition": f'attachment; filename="{job["id"]}.log.gz"'}
    return StreamingResponse(_compressed(spool, spool.mark.end, prefix), media_type="application/gzip", headers=headers)


async def _read_now(context: ServeContext, job: Row, enough: float = math.inf) -> tuple[Spool, bool]:
    """Return the job's spool once it has all that the job had written when the request came, or `enough` bytes.

    Returns True if it has all.
    """
    deadline = time.monotonic() + _WAIT_S
    with context.spools.changes.waiting(job["id"]) as changed:
        spool, number = await run_in_threadpool(_ask, context, job)
        while True:
            changed.clear()
            if spool.mark.complete or spool.finished >= number:
                return spool, spool.mark.complete or not spool.problem
            is_late = spool.ended or context.ending.is_set() or time.monotonic() > deadline
            if is_late or spool.mark.end >= enough:
                return spool, False
            await is_set_within(changed, _LOOK_S)


def _behind(context: ServeContext, spool: Spool) -> Problem:
    detail = spool.problem or "the log is still being read from its target"
    return Problem(503, "the server is shutting down" if context.ending.is_set() else detail)


def _ask(context: ServeContext, job: Row, *, now: bool = True) -> tuple[Spool, int]:
    return context.spools.read_soon(job["id"], is_over=job["state"] in FINAL, now=now)


def _check(spool: Spool, end: int, offset: int) -> None:
    if not spool_file.is_position(spool.path, offset, end):
        raise Problem(422, f"no line of this log, which has {end:,} bytes, ends at byte {offset:,}", "query.since")


def _position(spool: Spool, end: int, query: LogQuery) -> tuple[int, dict[str, int] | None]:
    """Return where to begin, and where the last lines of each rank do if the request asks for them."""
    start, starts = query.since, None
    _check(spool, end, start)
    if query.at is not None and query.at >= time.time():
        start = end
    elif query.at is not None:
        start = spool_file.position_at(spool.path, start, end, query.at)
    if query.tail is not None:
        starts = spool_file.last_lines(spool.path, start, end, query.tail)
        start = min(starts.values(), default=end)
    return start, starts


async def _read(spool: Spool, since: int, end: int, limit: int) -> bytes:
    """Return whole lines, as `spool_file.read` does."""
    begin, data = spool.recent
    if since >= end:
        return b""
    if begin <= since:  # as for all who follow the log
        stop = min(end, since + limit) - begin
        cut = data.rfind(b"\n", since - begin, stop) + 1 or data.index(b"\n", stop) + 1
        return data[since - begin : cut]
    try:
        return await run_in_threadpool(spool_file.read, spool.path, since, end, limit)
    except OSError as error:
        raise store_error(error, spool.path, "read") from error


def _prefix(context: ServeContext, job_id: str) -> bool | None:
    try:
        return context.store.record(job_id).spec().has_many_ranks
    except SchedulerError:
        return None


def _compressed(spool: Spool, end: int, prefix: bool | None) -> Iterator[bytes]:
    text, gzip = LogText(prefix), zlib.compressobj(wbits=31)
    for raw in spool_file.lines(spool.path, 0, end):
        if spool_file.is_mark(raw):
            continue
        line = LogLine.from_json(json.loads(raw), source="log", position="")
        data = text.end() + line.data if line.rank is None else text.add(line)
        if piece := gzip.compress(data):
            yield piece
    yield gzip.compress(text.end()) + gzip.flush()
