"""Reader of a job's log lines from all of its pods: byte-exact, from a cursor, no line lost, doubled or cut.

Reads all logs once, or from streams that stay open while the job is followed. Each loss is a line of the
stream "missing".
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import threading
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import SchedulerError, StoreError, Unreachable
from ...job import Cursor, LogLine, State
from ..client.errors import Invalid, NotFound
from ..status import job_states, query, watch
from . import archive as archives
from . import sources
from .cursor import Piece, Position
from .followed_job import FollowedJob
from .sources import Source
from .streams import Fetched, Tail, fetch

if TYPE_CHECKING:
    from ..client.api import Api
    from ..native_id import Native

_AT_ONCE = 16  # logs that are asked for at a time
_MOST_TAILS = 64  # of one job; more logs are asked for now and then
_SELDOM_S, _LONGEST_PAUSE_S = 2.0, 10.0
_RESTARTED_S = 5.0
_MARGIN_S = 10.0  # that an ending pod has over its grace
_ENDING_PAUSE_S = 0.1
_HEAD = 64  # bytes, in which the time is at which a log begins
_ABSENT_PAUSE_S = 0.5
_ARCHIVED_AT_ONCE = 1000  # lines
_LOOKS = 3  # at most, where pods go or containers are restarted while their logs are asked for
_LOST, _GONE = "lost", "gone"
_TOGETHER = ("jobset", "trainjob")  # workloads whose pods are restarted all at once

_Start = tuple[Position | None, bool]  # a place, and whether it is one of the run's own


class Reader:
    """The reader of one target's job logs. Thread-safe, for several readers of one job."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._lock = threading.Lock()
        self._jobs: dict[str, FollowedJob] = {}

    def followed(self, native: Native) -> None:
        """Note that somebody waits for the job and will read it repeatedly."""
        self._job(native).followed_at = time.monotonic()

    def read(self, native: Native, since: Cursor | None, directory: Path | None, *, over: bool) -> Iterator[LogLine]:
        """Yield the lines that exist now. `over`: the job is known to have ended.

        Raises Unreachable, after the lines of all other logs, if a log of a job that continues cannot be read.
        """
        cursor = Cursor.parse(str(since or ""))
        overtaken = 0
        while True:
            last = overtaken >= _LOOKS - 1
            look = _Pass(self._api, native, self._job(native), cursor, directory, over=over, last=last)
            for line in look.lines():
                cursor.advance(line)
                yield line
            if not look.ending and not (look.overtaken and not last):
                return
            overtaken += look.overtaken
            if look.absent:
                time.sleep(_ABSENT_PAUSE_S)

    def cursor_at(self, native: Native, when: float, directory: Path | None) -> Cursor:
        """Return the cursor of the existing logs at the time `when`. Raises Unreachable."""
        found = {source.name for source in sources.of(_pods_of(self._api, native))}
        kept = archives.kept(directory) if directory is not None else {}
        there = when + int(self._api.now() - time.time())  # by the cluster's clock, which is known to the second
        return Cursor(dict.fromkeys((*sorted(found), *sorted(kept)), str(Position.at(there))))

    def close(self) -> None:
        with self._lock:
            jobs, self._jobs = list(self._jobs.values()), {}
        for job in jobs:
            for tail in job.all_tails():
                tail.close()

    def _job(self, native: Native) -> FollowedJob:
        with self._lock:
            return self._jobs.setdefault(str(native), FollowedJob())


class _Pass:
    """One pass over all of a job's logs, for one reader.

    overtaken: a container's run changed between the look at the pods and the read; its lines were not returned.
    absent:    the kubelet could not find a log for now, and the reader may not have all of it.
    ending:    the job's object is gone, but its pods are still terminating.
    """

    def __init__(
        self,
        api: Api,
        native: Native,
        job: FollowedJob,
        since: Cursor | None,
        directory: Path | None,
        *,
        over: bool,
        last: bool = True,
    ) -> None:
        self._api, self._native, self._job = api, native, job
        self._directory = directory
        self.overtaken = self.absent = self.ending = False
        self._over, self._last = over, last
        self._gone = False
        self._errors: list[SchedulerError] = []
        self._ending: dict[str, Tail] = {}  # the streams of logs that are asked for as a whole
        pairs = (pair.partition("=") for pair in str(since or "").split(",") if pair)
        self._positions = {source: position for source, _, position in pairs}

    def lines(self) -> Iterator[LogLine]:
        try:
            yield from self._lines()
        finally:
            self._job.release(self)

    def _lines(self) -> Iterator[LogLine]:
        self._check_tails()
        pods = self._look()
        found = sources.of(pods)
        missing = self._vanished(found)
        if missing and not self._over:
            # What is watched may be behind what has been seen otherwise.
            pods = _pods_of(self._api, self._native)
            found = sources.of(pods)
            missing = self._vanished(found)
        self._job.seen |= {source.name: source for source in found}
        for name in missing:
            yield from self._of_vanished(name)
        wanted: list[Source] = []
        for source in found:
            yield from self._of_source(source, wanted)
        yield from self._fetch_all(wanted)
        if self._gone and self._own_tails():
            yield from self._to_the_end(pods)
        if self._over and not found and not self._positions and not self._job.seen and not self._keeps:
            why = f": a later {self._native.kind} has its name" if query.replaced(self._api, self._native) else ""
            text = f"it has no pods (any more), and nothing of what they wrote was kept{why}"
            yield self._missing(_GONE, None, text, at="1")
        elif self._over or not self._job.followed:
            yield from self._unread(pods, found)
        if self._errors:
            raise Unreachable("; ".join(dict.fromkeys(map(str, self._errors))))

    def _look(self) -> list[dict[str, Any]]:
        """Read whether the job is over or gone. Return its pods, up to date if the job is over."""
        watcher = watch.running(self._api, self._native)
        seen = watcher.snapshot() if watcher is not None and not self._over else None
        workload = (seen and seen[0]) or query.workload_of(self._api, self._native)
        self._workload: Mapping[str, Any] = workload or {}
        pods = seen[1] if seen is not None else _pods_of(self._api, self._native)  # which may still be ending
        if not self._over and (workload is None or job_states.status_of(workload).state.final):
            self._over = job_states.is_over(self._native.kind, workload, pods, self._api.now())
        self._gone = workload is None and self._over
        enough = seen is None or (self._job.followed and not self._over)
        return pods if enough else _pods_of(self._api, self._native)

    def _position(self, source: str) -> Position | None:
        text = self._positions.get(source)
        return None if text is None or text == _LOST else Position.parse(text)

    def _is_done(self, source: str) -> bool:
        """Return True once the log has ended and was read to its end."""
        text = self._positions.get(source, "")
        return text == _LOST or self._job.final.get(source) == text

    def _vanished(self, found: Sequence[Source]) -> list[str]:
        """Return the logs that are gone and perhaps not fully read, in the order in which they are shown."""
        there = {source.name for source in found}
        known = [*self._job.seen, *(name for name in self._positions if name not in self._job.seen and name != _GONE)]
        known += [name for name in self._keeps if name not in known]
        return sorted((name for name in known if name not in there and not self._is_done(name)), key=self._order)

    def _order(self, name: str) -> tuple[bool, tuple[int, bool, int, str]]:
        """Return the log's sort key, the same for all readers. Logs known only from a cursor come last."""
        source = self._job.seen.get(name)
        if source is None and name in self._keeps:
            source = self._keeps[name].source
        return source is None, (0, False, 0, name) if source is None else source.order

    def _of_vanished(self, name: str) -> Iterator[LogLine]:
        source = self._job.seen.get(name)
        tail = self._tail(name)
        if tail is not None and source is not None and tail.checked and (yield from self._of_stream(source, tail)):
            return
        if name in self._keeps:
            yield from self._kept(archives.finished(self._keeps[name]))
            return
        what = f"what {source.who()}" if source is not None else f"the log {name}"
        begun = "the end of " if name in self._positions else ""
        maybe = "is" if source is not None else "may be"
        yield self._missing(name, source, f"{begun}{what} {maybe} missing: its pod is gone")

    def _of_stream(self, source: Source, tail: Tail) -> Generator[LogLine, None, bool]:
        """Yield the lines of a log's stream, if the log cannot be fetched any more.

        The stream may outlive the pod and the run. Returns False if it broke off before the log's end.
        """
        yield from self._made(source, tail.rest() if self._over else tail.take())
        if not tail.over:
            return True
        yield from self._made(source, tail.take())
        self._job.drop(tail)
        if tail.error is not None:
            return False
        yield from self._made(source, tail.take_last())
        yield from self._ended(source)
        return True

    @functools.cached_property
    def _keeps(self) -> Mapping[str, archives.Kept]:
        return {} if self._directory is None else archives.kept(self._directory)

    def _kept(self, log: archives.Kept) -> Iterator[LogLine]:
        yield from self._made(log.source, log.pieces(self._position(log.source.name)))
        if log.missing:
            yield self._missing(
                log.source.name, log.source, f"some of what {log.source.who()} is missing: {log.missing}"
            )
        yield from self._ended(log.source)

    def _of_source(self, source: Source, wanted: list[Source]) -> Iterator[LogLine]:
        """Yield the lines that a stream already holds. Append to `wanted` the logs that must be fetched."""
        if self._is_done(source.name):
            return
        if source.lost:
            tail = self._tail(source.name)
            if tail is not None and tail.checked and (yield from self._of_stream(source, tail)):
                return
            begun = "the end of " if source.name in self._positions else ""
            if source.name in self._keeps:
                yield from self._kept(archives.finished(self._keeps[source.name]))
                return
            why = "the cluster keeps the log of a container's last run, and of the one before it at most"
            maybe = "may be" if begun and source.name not in self._job.final else "is"
            yield self._missing(source.name, source, f"{begun}what {source.who()} {maybe} missing: {why}")
            return
        tail = self._tail(source.name)
        if self._may_be_restarted(source):
            if tail is not None and tail.checked and not tail.doubtful:
                yield from self._made(source, tail.take())
            return
        last = source.ended or (self._over and not self._gone)
        if tail is not None and last:
            if tail.checked and not tail.doubtful:
                # Its pod may be gone, or its log rotated, before it is asked for: then the stream has the end of it.
                self._ending[source.name] = tail
                yield from self._made(source, tail.take())
            else:
                self._job.drop(tail)
            wanted.append(source)
        elif tail is not None:
            if tail.checked and not tail.doubtful:
                yield from self._made(source, tail.take())
            # What is watched may be behind, and the last line of a log that has ended is in its stream.
            if tail.over and (tail.error is not None or ((now := self._now(source)) is not None and not now.ended)):
                self._note_end(tail)
        elif last or not self._job.followed:
            wanted.append(source)
        elif time.monotonic() >= self._job.not_before.get(source.name, 0.0):
            self._follow(source, wanted)

    def _may_be_restarted(self, source: Source) -> bool:
        """Return True if the kubelet may already serve the next run's log, before the API server knows of that run.

        After 5 s this is settled: the pod is over, or this is the previous run.
        """
        if not source.ended or source.settled or self._over or not self._job.followed:
            return False
        now = time.monotonic()
        return now - self._job.ended_at.setdefault(source.name, now) < _RESTARTED_S

    def _follow(self, source: Source, wanted: list[Source]) -> None:
        if len(self._job.all_tails()) >= _MOST_TAILS:
            self._job.not_before[source.name] = time.monotonic() + _SELDOM_S
            wanted.append(source)
            return
        after, own = self._start(source)
        tail = Tail(self._api, self._native, source, after, own=own)
        self._job.add(tail)

    def _start(self, source: Source) -> _Start:
        """Return the position to begin at: the reader's, else perhaps its position in the previous run.

        The first lines of this run may have been attributed to that one.
        """
        here = self._position(source.name)
        if here is not None or source.before is None:
            return here, True
        before = self._position(source.before)
        return (before, False) if before is not None and not before.is_time else (None, True)

    def _note_end(self, tail: Tail) -> None:
        """Schedule the reopening of a stream that ended before its container, with backoff if it failed."""
        self._job.drop(tail)
        name = tail.source.name
        failures = self._job.failures.get(name, 0) + 1 if tail.error is not None and not tail.opened else 0
        self._job.failures[name] = failures
        self._job.not_before[name] = time.monotonic() + min(_LONGEST_PAUSE_S, 0.25 * 2 ** min(failures, 10))
        if isinstance(tail.error, Unreachable):
            if failures > 1:
                self._errors.append(tail.error)
        elif tail.error is not None and not isinstance(tail.error, (Invalid, NotFound)):
            raise tail.error

    def _tail(self, name: str) -> Tail | None:
        """Reserve and return the stream at the reader's position, or None."""
        return self._job.tail(name, self._position(name), self)

    def _drop_ending(self, source: Source) -> None:
        tail = self._ending.pop(source.name, None)
        if tail is not None:
            self._job.drop(tail)

    def _check_tails(self) -> None:
        """Drop the streams that were opened after another run of the container had begun."""
        unsure = [tail for tail in self._job.all_tails() if tail.to_be_checked]
        pods = _pods_of(self._api, self._native) if unsure else []
        now = {source.name: source for source in sources.of(pods)}
        for tail in unsure:
            source = now.get(tail.source.name)
            if source is None or source.previous or source.lost:
                self._job.drop(tail)
            tail.note_checked()

    def _fetch_all(self, wanted: Sequence[Source]) -> Iterator[LogLine]:
        pairs = [(source, self._start(source)) for source in wanted]
        # So many at a time: each keeps what came, in memory or in a file, until it is its turn.
        for at in range(0, len(pairs), _AT_ONCE):
            some = pairs[at : at + _AT_ONCE]
            with contextlib.ExitStack() as held:
                with ThreadPoolExecutor(max_workers=len(some)) as pool:
                    answers = list(pool.map(functools.partial(self._fetched, held), *zip(*some, strict=True)))
                for (source, _), answer in zip(some, answers, strict=True):
                    if answer is None:
                        self.overtaken = True
                    else:
                        yield from self._of_answer(source, answer)

    def _fetched(self, held: contextlib.ExitStack, source: Source, start: _Start) -> Fetched | None:
        answer = fetch(self._api, self._native, source, start[0], own=start[1], complete=source.ended)
        held.callback(answer.close)
        # Where another run has begun or ended meanwhile, it may be that one's.
        return answer if self._is_still(source, answer) else None

    def _of_answer(self, source: Source, answer: Fetched) -> Iterator[LogLine]:
        if answer.error is not None:
            if not isinstance(answer.error, Unreachable):
                raise answer.error
            if self._over:
                _pods_of(self._api, self._native)  # raises where it is the API server that is silent
                yield self._missing(source.name, source, f"what {source.who()} cannot be read: {answer.error}")
                self._drop_ending(source)
            else:
                self._errors.append(answer.error)
            return
        if answer.absent and source.ended:
            yield from self._of_absent(source, for_now=answer.for_now)
            return
        pieces = answer.pieces()
        begin = list(itertools.islice(pieces, 1))
        tail = self._ending.pop(source.name, None)
        if answer.lost and tail is not None:
            # The place was rotated away; the stream still has what came after it.
            answer.close()
            yield from self._made(source, tail.rest())
            self._job.drop(tail)
            yield from self._rest_of(source, tail)
            return
        if tail is not None:
            self._job.drop(tail)
        yield from self._made(source, itertools.chain(begin, pieces))
        yield from self._ended_as(source, answer, untold=answer.untold and source.ended)

    def _rest_of(self, source: Source, tail: Tail) -> Iterator[LogLine]:
        """Yield the lines of the log after an ended stream of it."""
        after, own = self._start(source)
        answer = fetch(self._api, self._native, source, after, own=own, complete=source.ended)
        if answer.error is not None:
            self._errors.append(answer.error)
            return
        yield from self._made(source, answer.pieces())
        # A log that was rotated after its last line is empty: nothing is missing to who has followed it closely.
        close = tail.over and tail.error is None and not tail.behind
        yield from self._ended_as(source, answer, untold=answer.untold and not close)

    def _ended_as(self, source: Source, answer: Fetched, *, untold: bool) -> Iterator[LogLine]:
        """Report the gaps of a log that was read to its end, and note the end."""
        if answer.said and source.ended:
            yield self._missing(source.name, source, f"what {source.who()} is missing: {answer.said}")
            return
        # A pod that goes on when its job has ended is not followed any further.
        yield from self._ended(source, untold=untold, final=source.ended or (self._over and self._job.followed))

    def _of_absent(self, source: Source, *, for_now: bool) -> Iterator[LogLine]:
        """Yield what is left here of a log that the cluster does not have."""
        tail = self._ending.get(source.name)
        if tail is not None and (yield from self._of_stream(source, tail)):
            return
        self._drop_ending(source)
        kept = self._keeps.get(source.name)
        if for_now and (kept is None or kept.missing) and not self._last:
            self.absent = self.overtaken = True
        elif for_now and (kept is None or kept.missing) and self._job.followed and not self._over:
            pass  # there is time until its pod goes
        elif kept is not None:
            yield from self._kept(archives.finished(kept))
        else:
            begun = source.name in self._positions
            what = f"the end of what {source.who()} may be" if begun else f"what {source.who()} is"
            yield self._missing(source.name, source, f"{what} missing: the cluster no longer has its log")

    def _is_still(self, source: Source, answer: Fetched) -> bool:
        """Return True if the fetched log still belongs to the source's run."""
        if source.settled and (self._over or not source.previous):
            return True
        now = self._now(source)
        if not source.previous:
            return now is not None and not now.previous and not now.lost
        if now is None:
            return True
        # The kubelet may know before the API server does that the current run has ended, and is then the one before.
        return not now.lost and (now.newest or answer.begins is None or answer.begins != self._current(source))

    def _current(self, source: Source) -> bytes | None:
        """Return the time of the first line in the log of the container's current run."""
        answer = fetch(self._api, self._native, source.of_current(), None, complete=False, most=_HEAD)
        with contextlib.closing(answer):
            return answer.begins

    def _now(self, source: Source) -> Source | None:
        pod = query.pod_of(self._api, self._native, source.pod)
        return next((each for each in sources.of([pod] if pod else []) if each.name == source.name), None)

    def _unread(self, pods: Sequence[Mapping[str, Any]], found: Sequence[Source]) -> Iterator[LogLine]:
        """Yield a line for each node or attempt whose log no longer exists anywhere."""
        known = {source.name: source for source in (*found, *self._job.seen.values())}
        known |= {name: log.source for name, log in self._keeps.items()}
        if any(name.startswith("node-") and name not in known for name in self._positions):
            return  # another process has read logs of which nothing is known here
        status = self._workload.get("status") or {}
        ran, restarts = set(self._job.ran), int(status.get("restarts") or 0)
        if self._over and job_states.status_of(self._workload, pods, now=self._api.now()).state is State.SUCCEEDED:
            ran.add(max([restarts, *(source.attempt for source in known.values())]))
        missing = sources.unread(
            pods,
            list(known.values()),
            nodes=self._nodes() if self._over and known else 0,
            together=self._native.workload in _TOGETHER,
            restarts=restarts,
            ran=ran,
            # A Job counts the pods that failed, also those that somebody deleted.
            failures=int(status.get("failed") or 0) if self._workload.get("kind") == "Job" else 0,
        )
        for name, what in missing:
            if name not in self._positions:
                yield self._missing(name, None, what)

    def _nodes(self) -> int:
        """Return the job's minimum number of nodes, from its object or its record, or 0 if unknown."""
        from ...store.record import read_record

        nodes = job_states.nodes_of(self._workload)
        if nodes is None and self._directory is not None:
            with contextlib.suppress(StoreError):  # another machine has submitted it
                nodes = read_record(self._native.job_id, str(self._directory)).spec().nodes
        return nodes or 0

    def _to_the_end(self, pods: Sequence[Mapping[str, Any]]) -> Iterator[LogLine]:
        """Yield the last lines of a job whose object was deleted, while its pods terminate."""
        if self._job.ending_until is None:
            graces = [(pod.get("spec") or {}).get("terminationGracePeriodSeconds") or 0 for pod in pods]
            self._job.ending_until = time.monotonic() + max(graces, default=0) + _MARGIN_S
        self.ending = time.monotonic() < self._job.ending_until
        while time.monotonic() < self._job.ending_until:
            live = [tail for tail in self._own_tails() if not tail.over]
            for tail in live:
                yield from self._made(tail.source, tail.take())
            time.sleep(_ENDING_PAUSE_S)
            if not live:  # what came with the end, and a line that has none: when the pods are looked at again
                return

    def _own_tails(self) -> list[Tail]:
        """Return one stream for each unfinished log, at this reader's position."""
        found = [self._tail(name) for name in self._job.names() if not self._is_done(name)]
        return [tail for tail in found if tail is not None]

    def _ended(self, source: Source, *, untold: bool = False, final: bool = True) -> Iterator[LogLine]:
        """Report lines that were removed before they were read, at the end of all that exists."""
        lost = self._positions.get(source.name) == _LOST  # which was reported
        if untold or (not lost and sources.lacks_beginning(source, self._position(source.name))):
            yield self._rotated(source)
        if final:
            self._job.final[source.name] = self._positions.get(source.name, "")
            if source.name in self._job.archives:
                self._job.archives[source.name].finish(self._position(source.name))

    def _made(self, source: Source, pieces: Iterable[Piece]) -> Iterator[LogLine]:
        """Yield the lines of the pieces, and archive them if the job is followed."""
        if self._directory is None or not self._job.followed:
            yield from self._lines_of(source, pieces)
            return
        archive = self._job.archives.setdefault(source.name, archives.Archive(self._directory, source))
        iterator = iter(pieces)
        while some := list(itertools.islice(iterator, _ARCHIVED_AT_ONCE)):
            archive.add(self._position(source.name), some)
            yield from self._lines_of(source, some)

    def _lines_of(self, source: Source, pieces: Iterable[Piece]) -> Iterator[LogLine]:
        said = self._job.said
        for piece in pieces:
            if piece.gap:
                yield self._rotated(source)
            partial, data = sources.goes_on(source, piece)
            rank, data = sources.rank_of(source, dataclasses.replace(piece, data=data))
            here = self._positions.get(source.name, "")
            if sources.is_launchers(piece, goes_on=said.get(source.name) == here):
                rank, said[source.name] = None, str(piece.after)
            elif source.greets and rank is not None:  # ranks start when all nodes have met
                self._job.ran.add(source.attempt)
            text = data.decode("utf-8", "surrogateescape")
            place = {"source": source.name, "position": str(piece.after)}
            yield self._line(LogLine(rank=rank, attempt=source.attempt, text=text, partial=partial, **place))

    def _rotated(self, source: Source) -> LogLine:
        """Return a line that reports a gap before the next line and advances the reader."""
        if source.name in self._job.archives:
            self._job.archives[source.name].note_gap()
        text = f"some of what {source.who()} may be missing: its log was rotated before it was read"
        here = self._position(source.name) or Position.at(1)  # of an empty log: its beginning
        return self._missing(source.name, source, text, at=str(dataclasses.replace(here, ungreeted=False)))

    def _missing(self, name: str, source: Source | None, why: str, *, at: str = _LOST) -> LogLine:
        rank, attempt = (None, 0) if source is None else (source.rank, source.attempt)
        text = f"accel: {why}\n"
        return self._line(LogLine(rank=rank, attempt=attempt, stream="missing", text=text, source=name, position=at))

    def _line(self, line: LogLine) -> LogLine:
        self._positions[line.source] = line.position
        return line


def _pods_of(api: Api, native: Native) -> list[dict[str, Any]]:
    """Return the job's current pods; none if a later object has its name and thus its label."""
    return [] if query.replaced(api, native) else query.pods_of(api, native)


__all__ = ["Reader"]
