"""Jobs whose hosts come after the submit, and may be replaced: logs that tell the hosts apart, and outlive them."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ...errors import Unreachable
from ...job import Cursor, LogLine
from .target import HostsTarget


@dataclass(frozen=True)
class JobPlacement:
    """A job on its hosts of now: the target that runs it there, its native id there, and a prefix of the names of its
    log streams, which tells these hosts from those before."""

    target: HostsTarget
    native_id: str
    prefix: str

    def lines(self, since: Cursor) -> Iterator[LogLine]:
        for line in self.target.logs(self.native_id, since.below(self.prefix)):
            yield replace(line, source=self.prefix + line.source)


class MovingJobs(HostsTarget):
    """A target whose jobs move. Their native ids say nothing of hosts."""

    @abc.abstractmethod
    def _current_placement(self, native_id: str) -> JobPlacement | None:
        """Where the job is; None before it is there, and when its hosts are gone."""

    @abc.abstractmethod
    def _archive_path(self, native_id: str) -> str:
        """The file in which the job's log lines are kept."""

    def _archive_logs(self, placement: JobPlacement, path: str) -> None:
        """Keeps the lines that the hosts have now."""
        with open(f"{path}.new", "wb") as file, contextlib.suppress(Unreachable):
            for line in placement.lines(Cursor()):
                file.write(json.dumps(dataclasses.asdict(line)).encode() + b"\n")
        os.replace(f"{path}.new", path)

    def logs(self, native_id: str, since: Cursor | None = None) -> Iterator[LogLine]:
        """Those of the hosts; when they are gone, what was kept."""
        start, placement = since or Cursor(), self._current_placement(native_id)
        if placement is not None:
            yield from placement.lines(start)
        elif os.path.exists(path := self._archive_path(native_id)):
            with open(path, "rb") as file:
                lines = (LogLine(**json.loads(line)) for line in file)
                yield from (line for line in lines if int(line.position) > int(start.position(line.source) or 0))

    def cursor_at(self, native_id: str, when: float) -> Cursor:
        placement = self._current_placement(native_id)
        return (
            Cursor()
            if placement is None
            else placement.target.cursor_at(placement.native_id, when).under(placement.prefix)
        )

    def tail_at(self, native_id: str, since: Cursor, count: int) -> Cursor | None:
        placement = self._current_placement(native_id)
        if placement is None:
            return None
        cursor, host_cursor = (
            since.moved({}),
            placement.target.tail_at(placement.native_id, since.below(placement.prefix), count),
        )
        cursor.move((host_cursor or Cursor()).under(placement.prefix))
        return cursor

    def wait(self, native_id: str, timeout_s: float) -> bool | None:
        """As `HostsTarget.wait`; None where the job is on no hosts."""
        placement = self._current_placement(native_id)
        return None if placement is None else placement.target.wait(placement.native_id, timeout_s)
