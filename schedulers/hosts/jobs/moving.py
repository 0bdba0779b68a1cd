"""Jobs that get their hosts after the submit and may move: logs that distinguish the hosts, and outlive them."""

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
    """A job on its current hosts: the target that runs it there, and its native id there.

    prefix: begins the names of its log sources, to distinguish these hosts from earlier ones.
    """

    target: HostsTarget
    native_id: str
    prefix: str

    def lines(self, since: Cursor) -> Iterator[LogLine]:
        for line in self.target.logs(self.native_id, since.below(self.prefix)):
            yield replace(line, source=self.prefix + line.source)


class MovingJobs(HostsTarget):
    """A target whose jobs move. Their native ids name no hosts."""

    @abc.abstractmethod
    def _current_placement(self, native_id: str) -> JobPlacement | None:
        """Return where the job is; None before it has hosts, and after they are gone."""

    @abc.abstractmethod
    def _archive_path(self, native_id: str) -> str:
        """Return the file for the job's archived log lines."""

    def _archive_logs(self, placement: JobPlacement, path: str) -> None:
        """Archive the lines that the hosts have now."""
        with open(f"{path}.new", "wb") as file, contextlib.suppress(Unreachable):
            for line in placement.lines(Cursor()):
                file.write(json.dumps(dataclasses.asdict(line)).encode() + b"\n")
        os.replace(f"{path}.new", path)

    def logs(self, native_id: str, since: Cursor | None = None) -> Iterator[LogLine]:
        """Yield the hosts' lines or, if the hosts are gone, the archived ones."""
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
        cursor = since.moved({})
        host_cursor = placement.target.tail_at(placement.native_id, since.below(placement.prefix), count)
        cursor.move((host_cursor or Cursor()).under(placement.prefix))
        return cursor

    def wait(self, native_id: str, timeout_s: float) -> bool | None:
        """As `HostsTarget.wait`; None if the job has no hosts."""
        placement = self._current_placement(native_id)
        return None if placement is None else placement.target.wait(placement.native_id, timeout_s)
