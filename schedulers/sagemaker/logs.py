"""A job's output from CloudWatch: one stream for each instance, and another after each interruption.

A position is an event's time in ms and the number of events read at that time: CloudWatch's own tokens expire
after a day. CloudWatch stores lines without their endings, and shows them some seconds after they were
written.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..job import Cursor, LogLine
from .aws import Aws, Refused
from .entry import END
from .status import Native, describe

GROUP = "/aws/sagemaker/TrainingJobs"
_STREAM = re.compile(r"(?P<host>algo-(?P<number>\d+))-(?P<began>\d+)\Z")
_RANK = re.compile(r"\[rank (\d{1,7})\] ")
_LATE_S = 30.0  # after a job's end, for lines that are not shown yet; a container that was killed has no last line
_AGAIN_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Stream:
    """A log stream. `name`: without the job's own; `attempt`: its index among its host's streams."""

    name: str
    node: int
    attempt: int


def streams(aws: Aws, native: Native) -> list[Stream]:
    """Return the existing streams, by attempt and then by node."""
    found: dict[int, list[tuple[int, str]]] = {}
    asked = {"logGroupName": GROUP, "logStreamNamePrefix": f"{native.name}/"}
    try:
        for each in aws.pages("logs", "describe_log_streams", "logStreams", **asked):
            match = _STREAM.match(str(each["logStreamName"]).partition("/")[2])
            if match is not None:
                found.setdefault(int(match["number"]) - 1, []).append((int(match["began"]), match[0]))
    except Refused as error:
        if error.code != "ResourceNotFoundException":  # nobody in the account has written yet
            raise
    made = [
        Stream(name=name, node=node, attempt=attempt)
        for node, runs in found.items()
        for attempt, (_, name) in enumerate(sorted(runs))
    ]
    return sorted(made, key=lambda stream: (stream.attempt, stream.node))


def lines(aws: Aws, native: Native, since: Cursor | None, nodes: int | None) -> Iterator[LogLine]:
    """Yield the existing lines from the cursor on.

    nodes: the number of nodes of a job that is over. This then waits for lines that CloudWatch does not show yet,
           until each container of the last attempt has written the entry's last line.
    """
    cursor = (since or Cursor()).moved({})
    complete: set[Stream] = set()
    deadline: float | None = None
    while True:
        found = streams(aws, native)
        for stream in found:
            for line in _lines_of(aws, native, stream, cursor.position(stream.name)):
                if line.rank is None and line.text == f"{END}\n":
                    complete.add(stream)
                else:
                    cursor.advance(line)
                    yield line
        if nodes is None or sum(stream.attempt == found[-1].attempt for stream in complete) >= nodes:
            return
        if deadline is None:
            deadline = time.monotonic() + _left(aws, native)
        if time.monotonic() >= deadline:
            return
        time.sleep(_AGAIN_S)


def _left(aws: Aws, native: Native) -> float:
    """Return the seconds in which lines of a finished job may still appear."""
    made = describe(aws, native.name) or {}
    if "TrainingStartTime" not in made or "TrainingEndTime" not in made:
        return 0.0
    since: float = time.time() - made["TrainingEndTime"].timestamp()
    return _LATE_S - max(0.0, since)


def cursor_at(aws: Aws, native: Native, when: float) -> Cursor:
    """Return the cursor of the streams at that time."""
    return Cursor({stream.name: f"{int(when * 1000)}.0" for stream in streams(aws, native)})


def _lines_of(aws: Aws, native: Native, stream: Stream, position: str | None) -> Iterator[LogLine]:
    at, _, count = (position or "0.0").partition(".")
    last, seen, skip = int(at), 0, int(count or 0)
    asked: dict[str, Any] = {
        "logGroupName": GROUP, "logStreamName": f"{native.name}/{stream.name}", "startTime": last, "startFromHead": True
    }  # fmt: skip
    while True:
        answer = aws.call("logs", "get_log_events", **asked)
        for event in answer.get("events") or []:
            moment = int(event["timestamp"])
            last, seen = moment, seen + 1 if moment == last else 1
            if moment == int(at) and seen <= skip:
                continue
            yield _line(stream, str(event["message"]), f"{moment}.{seen}")
        token = answer.get("nextForwardToken")
        if token is None or token == asked.get("nextToken"):  # a page without events is not yet the end
            return
        asked["nextToken"] = token


def _line(stream: Stream, text: str, position: str) -> LogLine:
    match = _RANK.match(text)
    rank, text = (int(match[1]), text[match.end() :]) if match else (None, text)
    return LogLine(rank=rank, attempt=stream.attempt, text=f"{text}\n", source=stream.name, position=position)
