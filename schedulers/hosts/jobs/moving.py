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
class Placed:
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
    def _on_hosts(self, native_id: str) -> Placed | None:
        """Where the job is; None before it is there, and when its hosts are gone."""

    @abc.abstractmethod
    def _kept_log(self, native_id: str) -> str:
        """The file in which the job's log lines are kept."""

    def _keep_logs(self, placed: Placed, path: str) -> None:
        """Keeps the lines that the hosts have now."""
        with open(f"{path}.new", "wb") as file, contextlib.suppress(Unreachable):
            for line in placed.lines(Cursor()):
                file.write(json.dumps(dataclasses.asdict(line)).encode() + b"\n")
        os.replace(f"{path}.new", path)

    def logs(self, native_id: str, since: Cursor | None = None) -> Iterator[LogLine]:
        """Those of the hosts; when they are gone, what was kept."""
        start, placed = since or Cursor(), self._on_hosts(native_id)
        if placed is not None:
            yield from placed.lines(start)
        elif os.path.exists(path := self._kept_log(native_id)):
            with open(path, "rb") as file:
                lines = (LogLine(**json.loads(line)) for line in file)
                yield from (line for line in lines if int(line.position) > int(start.position(line.source) or 0))

    def cursor_at(self, native_id: str, when: float) -> Cursor:
        placed = self._on_hosts(native_id)
        return Cursor() if placed is None else placed.target.cursor_at(placed.native_id, when).under(placed.prefix)

    def tail_at(self, native_id: str, since: Cursor, count: int) -> Cursor | None:
        placed = self._on_hosts(native_id)
        if placed is None:
            return None
        at, there = since.moved({}), placed.target.tail_at(placed.native_id, since.below(placed.prefix), count)
        at.move((there or Cursor()).under(placed.prefix))
        return at

    def wait(self, native_id: str, timeout_s: float) -> bool | None:
        """As `HostsTarget.wait`; None where the job is on no hosts."""
        placed = self._on_hosts(native_id)
        return None if placed is None else placed.target.wait(placed.native_id, timeout_s)
