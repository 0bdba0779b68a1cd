"""The logs of a job's pods: one for each run of a container, with its writer."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .. import names
from .cursor import LogChunk, Position

Object = Mapping[str, Any]

_OWN_PREFIX = "accel-"
_KILLED = 137
_RANK = re.compile(rb"\[rank (\d{1,7})\] ")
# The prefix of the launcher's lines, and the further lines of its failure report: see accel/launch/failure.py.
_LAUNCHER = b"accel launch: "
_CONTINUATION = b"\x1f\n"
_REPORT = re.compile(rb"  (\| |(error|cause|remedy|log|others): )")


@dataclass(frozen=True, kw_only=True)
class Source:
    """One run of a container, and the kubelet's log of it.

    name:     the name in cursors, unique over all runs of all pods.
    run:      the number of earlier starts of the container.
    rank:     the writer, if there is only one.
    tee:      each line names its rank.
    previous: the run is the one before the current run.
    lost:     the run is older than that, and the cluster does not keep its log.
    ended:    the run has ended.
    is_final: the container will not start again.
    newest:   no later run is known.
    greets:   the log's first line is the launcher's.
    code:     the exit code, once the run has ended.
    """

    name: str
    pod: str
    uid: str
    node: int
    container: str
    run: int
    attempt: int
    rank: int | None
    tee: bool
    previous: bool = False
    lost: bool = False
    ended: bool = False
    is_final: bool = False
    newest: bool = True
    greets: bool = False
    code: int | None = None

    @property
    def order(self) -> tuple[int, bool, int, str]:
        """The sort key: the attempt, then init containers first, then the node."""
        return (self.attempt, self.rank is not None or self.tee, self.node, self.name)

    @property
    def before(self) -> str | None:
        """The name of the same container's previous run, or None."""
        head = self.name.rpartition(".")[0]
        return f"{head}.a{self.run - 1}" if self.run else None

    def writer(self) -> str:
        subject = (
            f"node {self.node}"
            if self.rank is not None or self.tee
            else f"container {self.container} of node {self.node}"
        )
        return f"{subject} in its run {self.run}" if self.run else subject


def list_sources(pods: Sequence[Object]) -> list[Source]:
    """Return the existing runs in display order."""
    sources: list[Source] = []
    pods_before: dict[int, int] = {}
    for pod in sorted(pods, key=lambda pod: str((pod.get("metadata") or {}).get("creationTimestamp"))):
        node = names.node_of(pod)
        if node is None:
            continue
        attempt = _attempt_of(pod)
        base = pods_before.get(node, 0) if attempt is None else attempt
        pods_before[node] = pods_before.get(node, 0) + 1
        sources += _sources_of_pod(pod, node, base)
    return sorted(sources, key=lambda source: source.order)


def missing_logs(
    pods: Sequence[Object],
    sources: Sequence[Source],
    *,
    nodes: int,
    gang_restart: bool,
    restarts: int,
    attempts_run: Collection[int],
    failures: int,
) -> Iterator[tuple[str, str]]:
    """Yield (name, message) for each node and attempt that has no log.

    sources:      the existing logs, and those that were read before their pods were deleted.
    nodes:        the job's number of nodes; 0 if unknown.
    gang_restart: the cluster restarts all pods at once. Otherwise pods may be in different attempts.
    restarts:     the number of attempts that have certainly failed.
    attempts_run: the attempts in which all nodes have certainly run.
    failures:     the number of failed pods, by the cluster's count.
    """
    present = {(source.attempt, source.node) for source in sources if source.rank is not None or source.tee}
    present |= {(_attempt_of(pod) or 0, node) for pod in pods if (node := names.node_of(pod)) is not None}
    attempts = {source.attempt for source in sources} | {attempt for attempt, _ in present}
    if not gang_restart:
        present, attempts, attempts_run = {(0, node) for _, node in present}, {0}, {0} if attempts_run else ()
    latest = max(restarts, *attempts) if sources else 0
    for attempt in range(latest + 1):
        label = f" in attempt {attempt}" if latest else ""
        if attempt < latest and attempt not in attempts:
            yield f"attempt-{attempt}", f"output of attempt {attempt} is missing: its pods are gone"
        elif attempt in attempts_run:
            for node in sorted(
                set(range(nodes)) - {node for other_attempt, node in present if other_attempt == attempt}
            ):
                yield f"attempt-{attempt}.node-{node}", f"output of node {node}{label} is missing: its pod is gone"
    uids = {str((pod.get("metadata") or {}).get("uid")) for pod in pods}
    gone_uids = {source.uid for source in sources} - uids
    count = failures - sum(map(_has_failed, pods)) - len(gone_uids)
    if count > 0:
        label = "a failed pod" if count == 1 else f"{count} failed pods"
        yield "failed-pods", f"output of {label} is missing: removed by the cluster"


def _has_failed(pod: Object) -> bool:
    deleted = (pod.get("metadata") or {}).get("deletionTimestamp") is not None
    return deleted or (pod.get("status") or {}).get("phase") == "Failed"


def is_truncated(source: Source, position: Position | None) -> bool:
    """Return True if the log's beginning was removed before it was read up to `position`."""
    if position is None:
        return source.greets and source.code == 0
    # A launcher that could not start leaves only a few lines of the interpreter, and no first line of its own.
    return position.before_launch_line and source.code in (None, 0, _KILLED)


def is_launcher_line(chunk: LogChunk, *, follows_launcher: bool) -> bool:
    """Return True if the launcher wrote the line. `follows_launcher`: it wrote the previous line too."""
    return chunk.head.startswith(_LAUNCHER) or (follows_launcher and _REPORT.match(chunk.head) is not None)


def rank_of(source: Source, chunk: LogChunk) -> tuple[int | None, bytes]:
    """Return the rank that wrote a line (None if unknown), and the line as written."""
    if not source.tee:
        return source.rank, chunk.data
    match = _RANK.match(chunk.head)
    if match is None:
        return None, chunk.data
    return int(match[1]), chunk.data[match.end() :] if chunk.first else chunk.data


def is_continuation(source: Source, chunk: LogChunk) -> tuple[bool, bytes]:
    """Return True if the line continues, and the data as written; see `_CONTINUATION` in accel/launch/tee.py."""
    if source.tee and not chunk.first and chunk.data.endswith(_CONTINUATION):
        return True, chunk.data[: -len(_CONTINUATION)]
    return chunk.partial, chunk.data


def _sources_of_pod(pod: Object, node: int, base: int) -> Iterator[Source]:
    status, spec = pod.get("status") or {}, pod.get("spec") or {}
    commands = {entry.get("name"): entry.get("command") or () for entry in spec.get("containers") or []}
    finished = status.get("phase") in ("Succeeded", "Failed")
    for container in (*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])):
        name = str(container.get("name"))
        if name not in names.MAIN and not name.startswith(_OWN_PREFIX):
            continue
        launch = _launch(commands.get(name, ())) if name in names.MAIN else ()
        yield from _runs(pod, container, node, base, finished=finished, launch=launch, main=name in names.MAIN)


def _runs(
    pod: Object, container: Object, node: int, base: int, *, finished: bool, launch: Sequence[str], main: bool
) -> Iterator[Source]:
    metadata = pod.get("metadata") or {}
    name, uid, restarts = str(container.get("name")), str(metadata.get("uid")), int(container.get("restartCount") or 0)
    state, last = container.get("state") or {}, (container.get("lastState") or {}).get("terminated")
    if state.get("running") is None and _is_unknown(last) and restarts:
        # The kubelet has removed the container, as for an evicted pod, and counts a restart that never happened.
        restarts, state, last = restarts - 1, {"terminated": last}, None
    elif _is_unknown(state.get("terminated")):
        state = {}
    suffix = "" if main else f".{name}"
    tee = "--tee" in launch
    # With setup commands, the launcher's first line is not the log's first.
    greets = "launch" in launch and launch[0] != "sh" and "--quiet" not in launch

    def make_source(run: int, terminated: Object | None = None, **flags: bool) -> Source:
        return Source(
            name=f"node-{node}.{uid[:8]}{suffix}.a{run}", pod=str(metadata.get("name")), uid=uid, node=node,
            container=name, run=run, attempt=base + run, rank=node if main and not tee else None, tee=tee,
            newest=run == restarts, greets=greets, code=(terminated or {}).get("exitCode"), **flags,
        )  # fmt: skip

    newest = restarts
    if state.get("running") is not None or state.get("terminated"):
        ended = bool(state.get("terminated"))
        # A succeeded init container runs again only with the whole pod.
        is_final = ended and (finished or (not main and not (state["terminated"].get("exitCode") or 0)))
        yield make_source(restarts, state.get("terminated"), ended=ended, is_final=is_final)
        if last and restarts:
            newest = restarts - 1
            yield make_source(newest, last, previous=True, ended=True, is_final=True)
    elif last:
        # It waits for a restart: the kubelet serves this log as `previous`, also after the next run has begun.
        yield make_source(restarts, last, previous=True, ended=True, is_final=True)
    for run in range(newest):
        yield make_source(run, lost=True, ended=True, is_final=True)


def _is_unknown(terminated: Object | None) -> bool:
    return terminated is not None and terminated.get("reason") == "ContainerStatusUnknown"


def _launch(command: Sequence[str]) -> Sequence[str]:
    """Return the launcher's own options."""
    return command[: command.index("--")] if "--" in command else command


def _attempt_of(pod: Object) -> int | None:
    """Return the attempt that created the pod; None if the cluster does not restart all pods at once."""
    label = names.marks(pod).get(names.RESTART_ATTEMPT, "")
    return int(label) if label.isdigit() else None
