"""A reader of a job's log lines from all of its pods: from a cursor, byte for byte, each line once.

It fetches the logs, or reads streams that stay open while the job is followed. Each loss is a line of the stream
"missing".
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
from .cursor import LogChunk, Position
from .followed_job import FollowedJob
from .sources import Source
from .streams import ContainerLogStream, LogResponse, fetch

if TYPE_CHECKING:
    from ..client.api import Api
    from ..native_id import Native

_CONCURRENT_READS = 16  # logs fetched at a time
_MAX_TAILS = 64  # of one job; further logs are fetched now and then
_SELDOM_S, _LONGEST_PAUSE_S = 2.0, 10.0
_RESTARTED_S = 5.0
_MARGIN_S = 10.0  # for a terminating pod after its grace period
_ENDING_PAUSE_S = 0.1
_HEAD = 64  # bytes, enough for the time of a log's first line
_ABSENT_PAUSE_S = 0.5
_ARCHIVE_BATCH = 1000  # lines
_MAX_PASSES = 3  # if pods go or containers restart while their logs are fetched
_MISSING_POSITION, _POSITION_GONE = "lost", "gone"
_RESTART_ALL_KINDS = ("jobset", "trainjob")  # workloads whose pods are restarted all at once

_Start = tuple[Position | None, bool]  # a position, and False if it is one in the previous run


class Reader:
    """The reader of one target's job logs. Thread-safe, for several readers of one job."""

    def __init__(self, api: Api) -> None:
        self.api = api
        self._lock = threading.Lock()
        self._jobs: dict[str, FollowedJob] = {}

    def mark_followed(self, native: Native) -> None:
        """Note that a caller waits for the job and will read it repeatedly."""
        self._job(native).followed_at = time.monotonic()

    def read(
        self, native: Native, since: Cursor | None, directory: Path | None, *, finished: bool
    ) -> Iterator[LogLine]:
        """Yield the existing lines. `finished`: the job is known to have ended.

        Raises Unreachable, after the lines of all other logs, if a log of a running job cannot be read.
        """
        cursor = Cursor.parse(str(since or ""))
        retries = 0
        while True:
            last = retries >= _MAX_PASSES - 1
            log_pass = _ReadPass(self.api, native, self._job(native), cursor, directory, finished=finished, last=last)
            for line in log_pass.lines():
                cursor.advance(line)
                yield line
            if not log_pass.terminating and not (log_pass.stale and not last):
                return
            retries += log_pass.stale
            if log_pass.absent:
                time.sleep(_ABSENT_PAUSE_S)

    def cursor_at(self, native: Native, when: float, directory: Path | None) -> Cursor:
        """Return the cursor of the existing logs at `when`, in seconds since the epoch. Raises Unreachable."""
        source_names = {source.name for source in sources.list_sources(_pods_of(self.api, native))}
        archived = archives.archived_logs(directory) if directory is not None else {}
        cluster_time = when + int(self.api.now() - time.time())  # whole seconds, as `now`
        return Cursor(dict.fromkeys((*sorted(source_names), *sorted(archived)), str(Position.at(cluster_time))))

    def close(self) -> None:
        with self._lock:
            jobs, self._jobs = list(self._jobs.values()), {}
        for job in jobs:
            for tail in job.all_tails():
                tail.close()

    def _job(self, native: Native) -> FollowedJob:
        with self._lock:
            return self._jobs.setdefault(str(native), FollowedJob())


class _ReadPass:
    """One pass over all of a job's logs, for one reader.

    stale:       a container's run changed between the query of the pods and the read; its lines were not returned.
    absent:      the kubelet could not find a log for now, and the reader may not have all of it.
    terminating: the job's object is gone, but its pods are still terminating.
    """

    def __init__(
        self,
        api: Api,
        native: Native,
        job: FollowedJob,
        since: Cursor | None,
        directory: Path | None,
        *,
        finished: bool,
        last: bool = True,
    ) -> None:
        self._api, self._native, self._job = api, native, job
        self._directory = directory
        self.stale = self.absent = self.terminating = False
        self._over, self._last = finished, last
        self._is_deleted = False
        self._errors: list[SchedulerError] = []
        self._ending_tails: dict[str, ContainerLogStream] = {}  # streams of logs that are also fetched
        pairs = (pair.partition("=") for pair in str(since or "").split(",") if pair)
        self._positions = {source: position for source, _, position in pairs}

    def lines(self) -> Iterator[LogLine]:
        try:
            yield from self._lines()
        finally:
            self._job.release(self)

    def _lines(self) -> Iterator[LogLine]:
        self._check_tails()
        pods = self._query_pods()
        available = sources.list_sources(pods)
        missing = self._vanished(available)
        if missing and not self._over:
            # The watch may lag behind earlier queries.
            pods = _pods_of(self._api, self._native)
            available = sources.list_sources(pods)
            missing = self._vanished(available)
        self._job.known_sources |= {source.name: source for source in available}
        for name in missing:
            source = self._job.known_sources.get(name)
            yield from self._lines_of_gone(name, source, "its pod is gone", certain=source is not None)
        to_fetch: list[Source] = []
        for source in available:
            yield from self._lines_of_source(source, to_fetch)
        yield from self._fetch_all(to_fetch)
        if self._is_deleted and self._own_tails():
            yield from self._lines_until_gone(pods)
        if self._over and not available and not self._positions and not self._job.known_sources and not self._archived:
            detail = f": a later {self._native.kind} has its name" if query.replaced(self._api, self._native) else ""
            text = f"it has no pods (any more), and their logs were not archived{detail}"
            yield self._notice(_POSITION_GONE, None, text, position="1")
        elif self._over or not self._job.followed:
            yield from self._missing_log_lines(pods, available)
        if self._errors:
            raise Unreachable("; ".join(dict.fromkeys(map(str, self._errors))))

    def _query_pods(self) -> list[dict[str, Any]]:
        """Update `_over` and `_is_deleted`. Return the job's pods, up to date if it is over."""
        watcher = watch.running(self._api, self._native)
        snapshot = watcher.snapshot() if watcher is not None and not self._over else None
        workload = (snapshot and snapshot[0]) or query.workload_of(self._api, self._native)
        self._workload: Mapping[str, Any] = workload or {}
        pods = snapshot[1] if snapshot is not None else _pods_of(self._api, self._native)  # may still be terminating
        if not self._over and (workload is None or job_states.status_of(workload).state.final):
            self._over = job_states.is_over(self._native.kind, workload, pods, self._api.now())
        self._is_deleted = workload is None and self._over
        is_current = snapshot is None or (self._job.followed and not self._over)
        return pods if is_current else _pods_of(self._api, self._native)

    def _position(self, source: str) -> Position | None:
        text = self._positions.get(source)
        return None if text is None or text == _MISSING_POSITION else Position.parse(text)

    def _is_done(self, source: str) -> bool:
        """Return True once the log has ended and was read to its end."""
        text = self._positions.get(source, "")
        return text == _MISSING_POSITION or self._job.final.get(source) == text

    def _vanished(self, available: Sequence[Source]) -> list[str]:
        """Return the logs that are gone and perhaps not fully read, in display order."""
        gone = {*self._job.known_sources, *self._positions, *self._archived} - {source.name for source in available}
        return sorted((name for name in gone - {_POSITION_GONE} if not self._is_done(name)), key=self._order)

    def _order(self, name: str) -> tuple[bool, tuple[int, bool, int, str]]:
        """Return the log's sort key, the same for all readers. Logs known only from a cursor come last."""
        source = self._job.known_sources.get(name)
        if source is None and name in self._archived:
            source = self._archived[name].source
        return source is None, (0, False, 0, name) if source is None else source.order

    def _lines_of_gone(self, name: str, source: Source | None, reason: str, *, certain: bool) -> Iterator[LogLine]:
        """Yield the lines of a log that the cluster no longer has, from its stream, else from its archive.

        certain: the log has more lines than were read.
        """
        tail = self._tail(name)
        if source is None or not (yield from self._lines_of_stream(source, tail)):
            yield from self._archived_or_missing(name, source, reason, certain=certain)

    def _archived_or_missing(
        self, name: str, source: Source | None, reason: str, *, certain: bool
    ) -> Iterator[LogLine]:
        if name in self._archived:
            yield from self._lines_of_archive(archives.finished(self._archived[name]))
            return
        started = name in self._positions
        subject = f"log {name}" if source is None else f"output of {source.writer()}"
        verb = "may be" if started and not certain else "is"
        yield self._notice(name, source, f"{'the end of the ' if started else ''}{subject} {verb} missing: {reason}")

    def _lines_of_stream(self, source: Source, tail: ContainerLogStream | None) -> Generator[LogLine, None, bool]:
        """Yield the lines of a stream whose log cannot be fetched any more: it may outlive the pod and the run.

        Returns False if the stream failed before the log's end, or is not certainly one of this run.
        """
        if tail is None or not tail.run_confirmed:
            return False
        yield from self._archived_lines(source, tail.rest() if self._over else tail.take())
        if not tail.over:
            return True
        yield from self._archived_lines(source, tail.take())
        self._job.drop(tail)
        if tail.error is not None:
            return False
        yield from self._archived_lines(source, tail.take_last())
        yield from self._rotation_notices(source)
        return True

    @functools.cached_property
    def _archived(self) -> Mapping[str, archives.ArchivedLog]:
        return {} if self._directory is None else archives.archived_logs(self._directory)

    def _lines_of_archive(self, log: archives.ArchivedLog) -> Iterator[LogLine]:
        yield from self._archived_lines(log.source, log.chunks(self._position(log.source.name)))
        if log.missing:
            text = f"some output of {log.source.writer()} is missing: {log.missing}"
            yield self._notice(log.source.name, log.source, text)
        yield from self._rotation_notices(log.source)

    def _lines_of_source(self, source: Source, to_fetch: list[Source]) -> Iterator[LogLine]:
        """Yield the lines that a stream already holds. Append to `to_fetch` the logs that must be fetched."""
        if self._is_done(source.name):
            return
        if source.lost:
            reason = "the cluster keeps the log of a container's last run, and of the one before it at most"
            yield from self._lines_of_gone(source.name, source, reason, certain=source.name in self._job.final)
            return
        tail = self._tail(source.name)
        is_usable = tail is not None and tail.run_confirmed and not tail.may_be_stale
        if tail is not None and is_usable:
            yield from self._archived_lines(source, tail.take())
        if self._may_be_restarted(source):
            return
        last = source.ended or (self._over and not self._is_deleted)
        if tail is not None and last:
            if is_usable:
                # If the pod is deleted or the log rotated before the fetch, the stream has the log's end.
                self._ending_tails[source.name] = tail
            else:
                self._job.drop(tail)
            to_fetch.append(source)
        elif tail is not None:
            # The watch may lag behind, and the stream has the last line of a log that has ended.
            if tail.over and (
                tail.error is not None or ((current := self._current_source(source)) is not None and not current.ended)
            ):
                self._note_end(tail)
        elif last or not self._job.followed:
            to_fetch.append(source)
        elif time.monotonic() >= self._job.not_before.get(source.name, 0.0):
            self._follow(source, to_fetch)

    def _may_be_restarted(self, source: Source) -> bool:
        """Return True if the kubelet may serve the next run's log before the API server knows that run.

        After 5 s the API server knows it, or the pod is over.
        """
        if not source.ended or source.is_final or self._over or not self._job.followed:
            return False
        now = time.monotonic()
        return now - self._job.ended_at.setdefault(source.name, now) < _RESTARTED_S

    def _follow(self, source: Source, to_fetch: list[Source]) -> None:
        if len(self._job.all_tails()) >= _MAX_TAILS:
            self._job.not_before[source.name] = time.monotonic() + _SELDOM_S
            to_fetch.append(source)
            return
        after, own = self._start(source)
        tail = ContainerLogStream(self._api, self._native, source, after, own=own)
        self._job.add(tail)

    def _start(self, source: Source) -> _Start:
        """Return the reader's position in this run, else its position in the previous run.

        The first lines of this run may have been attributed to the previous one.
        """
        position = self._position(source.name)
        if position is not None or source.before is None:
            return position, True
        previous = self._position(source.before)
        return (previous, False) if previous is not None and not previous.is_time else (None, True)

    def _note_end(self, tail: ContainerLogStream) -> None:
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

    def _tail(self, name: str) -> ContainerLogStream | None:
        """Reserve and return the stream at the reader's position, or None."""
        return self._job.tail(name, self._position(name), self)

    def _drop_ending(self, source: Source) -> None:
        tail = self._ending_tails.pop(source.name, None)
        if tail is not None:
            self._job.drop(tail)

    def _check_tails(self) -> None:
        """Drop the streams that were opened after another run of the container had begun."""
        unchecked = [tail for tail in self._job.all_tails() if tail.needs_check]
        pods = _pods_of(self._api, self._native) if unchecked else []
        current = {source.name: source for source in sources.list_sources(pods)}
        for tail in unchecked:
            source = current.get(tail.source.name)
            if source is None or source.previous or source.lost:
                self._job.drop(tail)
            tail.mark_checked()

    def _fetch_all(self, to_fetch: Sequence[Source]) -> Iterator[LogLine]:
        pairs = [(source, self._start(source)) for source in to_fetch]
        # In batches: each log stays in memory or in a file until its turn.
        for start in range(0, len(pairs), _CONCURRENT_READS):
            batch = pairs[start : start + _CONCURRENT_READS]
            with contextlib.ExitStack() as stack:
                with ThreadPoolExecutor(max_workers=len(batch)) as pool:
                    fetched_logs = list(pool.map(functools.partial(self._fetched, stack), *zip(*batch, strict=True)))
                for (source, _), fetched in zip(batch, fetched_logs, strict=True):
                    if fetched is None:
                        self.stale = True
                    else:
                        yield from self._lines_of_response(source, fetched)

    def _fetched(self, stack: contextlib.ExitStack, source: Source, start: _Start) -> LogResponse | None:
        fetched = fetch(self._api, self._native, source, start[0], own=start[1], complete=source.ended)
        stack.callback(fetched.close)
        # If another run has begun or ended meanwhile, the log may be that one's.
        return fetched if self._is_same_run(source, fetched) else None

    def _lines_of_response(self, source: Source, fetched: LogResponse) -> Iterator[LogLine]:
        if fetched.error is not None:
            if not isinstance(fetched.error, Unreachable):
                raise fetched.error
            if self._over:
                _pods_of(self._api, self._native)  # raises if the API server is the unreachable part
                yield self._notice(source.name, source, f"output of {source.writer()} cannot be read: {fetched.error}")
                self._drop_ending(source)
            else:
                self._errors.append(fetched.error)
            return
        if fetched.absent and source.ended:
            yield from self._lines_of_absent(source, for_now=fetched.for_now)
            return
        chunks = fetched.chunks()
        first_chunks = list(itertools.islice(chunks, 1))
        tail = self._ending_tails.pop(source.name, None)
        if fetched.parser.lost and tail is not None:
            # The log was rotated beyond the position; the stream still has the lines after it.
            fetched.close()
            yield from self._archived_lines(source, tail.rest())
            self._job.drop(tail)
            yield from self._lines_of_rest(source, tail)
            return
        if tail is not None:
            self._job.drop(tail)
        yield from self._archived_lines(source, itertools.chain(first_chunks, chunks))
        yield from self._end_notices(source, fetched, gap=fetched.parser.has_unreported_gap and source.ended)

    def _lines_of_rest(self, source: Source, tail: ContainerLogStream) -> Iterator[LogLine]:
        """Yield the log's lines after those of its ended stream."""
        after, own = self._start(source)
        fetched = fetch(self._api, self._native, source, after, own=own, complete=source.ended)
        if fetched.error is not None:
            self._errors.append(fetched.error)
            return
        yield from self._archived_lines(source, fetched.chunks())
        # A log that was rotated after its last line is empty: a reader that kept up has lost nothing.
        kept_up = tail.over and tail.error is None and not tail.behind
        yield from self._end_notices(source, fetched, gap=fetched.parser.has_unreported_gap and not kept_up)

    def _end_notices(self, source: Source, fetched: LogResponse, *, gap: bool) -> Iterator[LogLine]:
        """Report the gaps of a log that was read to its end. `gap`: there is one that no line has reported."""
        message = " ".join(fetched.parser.kubelet_lines)
        if message and source.ended:
            yield self._notice(source.name, source, f"output of {source.writer()} is missing: {message}")
            return
        # A pod that runs on after its job's end is not followed further.
        yield from self._rotation_notices(source, gap=gap, final=source.ended or (self._over and self._job.followed))

    def _lines_of_absent(self, source: Source, *, for_now: bool) -> Iterator[LogLine]:
        """Yield the lines of a log that the cluster no longer has, from its stream or archive."""
        if (yield from self._lines_of_stream(source, self._ending_tails.get(source.name))):
            return
        self._drop_ending(source)
        archived = self._archived.get(source.name)
        if for_now and (archived is None or archived.missing) and not self._last:
            self.absent = self.stale = True
        elif for_now and (archived is None or archived.missing) and self._job.followed and not self._over:
            pass  # retried while the pod exists
        else:
            reason = "the cluster no longer has its log"
            yield from self._archived_or_missing(source.name, source, reason, certain=False)

    def _is_same_run(self, source: Source, fetched: LogResponse) -> bool:
        """Return True if the fetched log still belongs to the source's run."""
        if source.is_final and (self._over or not source.previous):
            return True
        current = self._current_source(source)
        if not source.previous:
            return current is not None and not current.previous and not current.lost
        if current is None:
            return True
        # The kubelet may know first that the current run has ended: its `previous` is then that run.
        return not current.lost and (
            current.newest or fetched.begins is None or fetched.begins != self._current_begin(source)
        )

    def _current_begin(self, source: Source) -> bytes | None:
        """Return the time of the first line in the log of the container's current run."""
        current = dataclasses.replace(source, previous=False, ended=False)
        fetched = fetch(self._api, self._native, current, None, complete=False, limit_bytes=_HEAD)
        with contextlib.closing(fetched):
            return fetched.begins

    def _current_source(self, source: Source) -> Source | None:
        pod = query.pod_of(self._api, self._native, source.pod)
        runs = sources.list_sources([pod] if pod else [])
        return next((run for run in runs if run.name == source.name), None)

    def _missing_log_lines(self, pods: Sequence[Mapping[str, Any]], available: Sequence[Source]) -> Iterator[LogLine]:
        """Yield a line for each node or attempt whose log no longer exists anywhere."""
        known_sources = {source.name: source for source in (*available, *self._job.known_sources.values())}
        known_sources |= {name: log.source for name, log in self._archived.items()}
        if any(name.startswith("node-") and name not in known_sources for name in self._positions):
            return  # another process has read logs that are unknown here
        status = self._workload.get("status") or {}
        attempts_run, restarts = set(self._job.started_attempts), int(status.get("restarts") or 0)
        if self._over and job_states.status_of(self._workload, pods, now=self._api.now()).state is State.SUCCEEDED:
            attempts_run.add(max([restarts, *(source.attempt for source in known_sources.values())]))
        missing = sources.missing_logs(
            pods,
            list(known_sources.values()),
            nodes=self._nodes() if self._over and known_sources else 0,
            gang_restart=self._native.workload in _RESTART_ALL_KINDS,
            restarts=restarts,
            attempts_run=attempts_run,
            # A Job counts its failed pods, including deleted ones.
            failures=int(status.get("failed") or 0) if self._workload.get("kind") == "Job" else 0,
        )
        for name, message in missing:
            if name not in self._positions:
                yield self._notice(name, None, message)

    def _nodes(self) -> int:
        """Return the job's minimum number of nodes, from its object or its record, or 0 if unknown."""
        from ...store.record import read_record

        nodes = job_states.nodes_of(self._workload)
        if nodes is None and self._directory is not None:
            with contextlib.suppress(StoreError):  # another machine has the record
                nodes = read_record(self._native.job_id, str(self._directory)).spec().nodes
        return nodes or 0

    def _lines_until_gone(self, pods: Sequence[Mapping[str, Any]]) -> Iterator[LogLine]:
        """Yield the last lines of a job whose object was deleted, while its pods terminate."""
        if self._job.termination_deadline is None:
            graces = [(pod.get("spec") or {}).get("terminationGracePeriodSeconds") or 0 for pod in pods]
            self._job.termination_deadline = time.monotonic() + max(graces, default=0) + _MARGIN_S
        self.terminating = time.monotonic() < self._job.termination_deadline
        while time.monotonic() < self._job.termination_deadline:
            live = [tail for tail in self._own_tails() if not tail.over]
            for tail in live:
                yield from self._archived_lines(tail.source, tail.take())
            time.sleep(_ENDING_PAUSE_S)
            if not live:  # the next pass reads the last lines
                return

    def _own_tails(self) -> list[ContainerLogStream]:
        """Return one stream for each unfinished log, at this reader's position."""
        tails = [self._tail(name) for name in self._job.names() if not self._is_done(name)]
        return [tail for tail in tails if tail is not None]

    def _rotation_notices(self, source: Source, *, gap: bool = False, final: bool = True) -> Iterator[LogLine]:
        """Report lines that were removed before they were read, after all existing lines."""
        lost = self._positions.get(source.name) == _MISSING_POSITION  # reported already
        if gap or (not lost and sources.is_truncated(source, self._position(source.name))):
            yield self._rotated(source)
        if final:
            self._job.final[source.name] = self._positions.get(source.name, "")
            if source.name in self._job.archives:
                self._job.archives[source.name].finish(self._position(source.name))

    def _archived_lines(self, source: Source, chunks: Iterable[LogChunk]) -> Iterator[LogLine]:
        """Yield the lines of the chunks, and archive them if the job is followed."""
        if self._directory is None or not self._job.followed:
            yield from self._lines_of(source, chunks)
            return
        archive = self._job.archives.setdefault(source.name, archives.Archive(self._directory, source))
        iterator = iter(chunks)
        while batch := list(itertools.islice(iterator, _ARCHIVE_BATCH)):
            archive.add(self._position(source.name), batch)
            yield from self._lines_of(source, batch)

    def _lines_of(self, source: Source, chunks: Iterable[LogChunk]) -> Iterator[LogLine]:
        launcher_lines = self._job.launcher_positions
        for chunk in chunks:
            if chunk.gap:
                yield self._rotated(source)
            partial, data = sources.is_continuation(source, chunk)
            rank, data = sources.rank_of(source, dataclasses.replace(chunk, data=data))
            position = self._positions.get(source.name, "")
            if sources.is_launcher_line(chunk, follows_launcher=launcher_lines.get(source.name) == position):
                rank, launcher_lines[source.name] = None, str(chunk.after)
            elif source.greets and rank is not None:  # ranks start after the rendezvous of all nodes
                self._job.started_attempts.add(source.attempt)
            text = data.decode("utf-8", "surrogateescape")
            origin = {"source": source.name, "position": str(chunk.after)}
            yield self._line(LogLine(rank=rank, attempt=source.attempt, text=text, partial=partial, **origin))

    def _rotated(self, source: Source) -> LogLine:
        """Return a line that reports a gap before the next line and advances the reader."""
        if source.name in self._job.archives:
            self._job.archives[source.name].note_gap()
        text = f"some output of {source.writer()} may be missing: its log was rotated before it was read"
        position = self._position(source.name) or Position.at(1)  # for an empty log: its beginning
        return self._notice(
            source.name, source, text, position=str(dataclasses.replace(position, before_launch_line=False))
        )

    def _notice(self, name: str, source: Source | None, message: str, *, position: str = _MISSING_POSITION) -> LogLine:
        rank, attempt = (None, 0) if source is None else (source.rank, source.attempt)
        text = f"accel: {message}\n"
        return self._line(
            LogLine(rank=rank, attempt=attempt, stream="missing", text=text, source=name, position=position)
        )

    def _line(self, line: LogLine) -> LogLine:
        self._positions[line.source] = line.position
        return line


def _pods_of(api: Api, native: Native) -> list[dict[str, Any]]:
    """Return the job's current pods; none if a later object has its name, and so its label."""
    return [] if query.replaced(api, native) else query.pods_of(api, native)
