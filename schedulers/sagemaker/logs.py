"""A job's output from CloudWatch: one stream for each instance, and another after each interruption.

A position is an event's time in ms and the number of events read at that time: CloudWatch's own tokens expire
after a day. CloudWatch stores lines without their endings, and shows them some seconds after they were
written.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from ..job import Cursor, LogLine
from .aws import Aws, AwsError
from .entry import END
from .status import Native, describe

GROUP = "/aws/sagemaker/TrainingJobs"
_STREAM = re.compile(r"algo-(?P<number>\d+)-(?P<began>\d+)\Z")
_RANK = re.compile(r"\[rank (\d{1,7})\] ")
# After a job's end, for lines that CloudWatch does not show yet: a killed container has no last line.
_LATE_LINES_S = 30.0
_POLL_S = 1.0


class Stream(NamedTuple):
    """A log stream. `attempt`: its index among its host's streams; `name`: without the job's own."""

    attempt: int
    node: int
    name: str


def streams(aws: Aws, native: Native) -> list[Stream]:
    """Return the existing streams, by attempt and then by node."""
    runs_by_node: dict[int, list[tuple[int, str]]] = {}
    parameters = {"logGroupName": GROUP, "logStreamNamePrefix": f"{native.name}/"}
    try:
        for log_stream in aws.pages("logs", "describe_log_streams", "logStreams", **parameters):
            match = _STREAM.match(str(log_stream["logStreamName"]).partition("/")[2])
            if match is not None:
                runs_by_node.setdefault(int(match["number"]) - 1, []).append((int(match["began"]), match[0]))
    except AwsError as error:
        if error.code != "ResourceNotFoundException":  # no job in the account has written yet
            raise
    return sorted(
        Stream(attempt, node, name)
        for node, runs in runs_by_node.items()
        for attempt, (_, name) in enumerate(sorted(runs))
    )


def lines(aws: Aws, native: Native, since: Cursor | None, nodes: int | None) -> Iterator[LogLine]:
    """Yield the existing lines from the cursor on.

    nodes: the number of nodes of a job that is over. This then waits for lines that CloudWatch does not show yet,
           until each container of the last attempt has written the entry's last line.
    """
    cursor = (since or Cursor()).moved({})
    complete: set[Stream] = set()
    deadline: float | None = None
    while True:
        log_streams = streams(aws, native)
        for stream in log_streams:
            for line in _lines_of(aws, native, stream, cursor.position(stream.name)):
                if line.rank is None and line.text == f"{END}\n":
                    complete.add(stream)
                else:
                    cursor.advance(line)
                    yield line
        if nodes is None or sum(stream.attempt == log_streams[-1].attempt for stream in complete) >= nodes:
            return
        if deadline is None:
            deadline = time.monotonic() + _remaining_s(aws, native)
        if time.monotonic() >= deadline:
            return
        time.sleep(_POLL_S)


def _remaining_s(aws: Aws, native: Native) -> float:
    """Return the seconds in which lines of a finished job may still appear."""
    job = describe(aws, native.name) or {}
    if "TrainingStartTime" not in job or "TrainingEndTime" not in job:
        return 0.0
    elapsed_s: float = time.time() - job["TrainingEndTime"].timestamp()
    return _LATE_LINES_S - max(0.0, elapsed_s)


def _lines_of(aws: Aws, native: Native, stream: Stream, position: str | None) -> Iterator[LogLine]:
    timestamp, _, count = (position or "0.0").partition(".")
    last, ordinal, skip = int(timestamp), 0, int(count or 0)
    parameters: dict[str, Any] = {
        "logGroupName": GROUP, "logStreamName": f"{native.name}/{stream.name}", "startTime": last, "startFromHead": True
    }  # fmt: skip
    while True:
        reply = aws.call("logs", "get_log_events", **parameters)
        for event in reply.get("events") or []:
            moment = int(event["timestamp"])
            last, ordinal = moment, ordinal + 1 if moment == last else 1
            if moment == int(timestamp) and ordinal <= skip:
                continue
            yield _line(stream, str(event["message"]), f"{moment}.{ordinal}")
        token = reply.get("nextForwardToken")
        if token is None or token == parameters.get("nextToken"):  # a page without events is not yet the end
            return
        parameters["nextToken"] = token


def _line(stream: Stream, text: str, position: str) -> LogLine:
    match = _RANK.match(text)
    rank, text = (int(match[1]), text[match.end() :]) if match else (None, text)
    return LogLine(rank=rank, attempt=stream.attempt, text=f"{text}\n", source=stream.name, position=position)
