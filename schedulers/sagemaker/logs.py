"""A job's output out of CloudWatch: a stream for each instance, and after an interruption another one.

A position is the time of an event, in ms, and how many events of that time were read: CloudWatch's own tokens end after
a day. CloudWatch keeps lines, and not what they ended with.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..job import Cursor, LogLine
from .aws import Aws, Refused
from .native_id import Native

GROUP = "/aws/sagemaker/TrainingJobs"
_STREAM = re.compile(r"(?P<host>algo-(?P<number>\d+))-(?P<began>\d+)\Z")
_RANK = re.compile(r"\[rank (\d{1,7})\] ")
_GOES_ON = "\x1f"  # the end of a piece of a longer line: see accel/launch/tee.py


@dataclass(frozen=True, kw_only=True)
class Stream:
    """name: after the job's own. attempt: which of its host's streams it is."""

    name: str
    node: int
    attempt: int


def streams(aws: Aws, native: Native) -> list[Stream]:
    """The streams there are, attempt by attempt, and node by node."""
    found: dict[int, list[tuple[int, str]]] = {}
    asked: dict[str, Any] = {"logGroupName": GROUP, "logStreamNamePrefix": f"{native.name}/"}
    while True:
        try:
            answer = aws.call("logs", "describe_log_streams", **asked)
        except Refused as error:
            if error.code == "ResourceNotFoundException":  # nobody in the account has written yet
                return []
            raise
        for each in answer.get("logStreams") or []:
            match = _STREAM.match(str(each["logStreamName"]).partition("/")[2])
            if match is not None:
                found.setdefault(int(match["number"]) - 1, []).append((int(match["began"]), match[0]))
        if not answer.get("nextToken"):
            break
        asked["nextToken"] = answer["nextToken"]
    made = [
        Stream(name=name, node=node, attempt=attempt)
        for node, runs in found.items()
        for attempt, (_, name) in enumerate(sorted(runs))
    ]
    return sorted(made, key=lambda stream: (stream.attempt, stream.node))


def lines(aws: Aws, native: Native, since: Cursor | None) -> Iterator[LogLine]:
    """The lines there are, from the cursor on."""
    cursor = since or Cursor()
    for stream in streams(aws, native):
        yield from _lines_of(aws, native, stream, cursor.position(stream.name))


def cursor_at(aws: Aws, native: Native, when: float) -> Cursor:
    """Where the streams stood at that time."""
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
    text = text[match.end() :] if match else text
    partial = match is not None and text.endswith(_GOES_ON)
    return LogLine(
        rank=int(match[1]) if match else None, attempt=stream.attempt,
        text=text[: -len(_GOES_ON)] if partial else f"{text}\n", source=stream.name, position=position, partial=partial,
    )  # fmt: skip
