"""The queue of one machine: first come, first served, over lock files that the kernel releases when a holder dies.

    queue/<job id>    locked by a waiting job, which is behind those with smaller ids
    slots/<name>      locked by the job that has that GPU, processor or place

Each boot of a machine has lock files of its own, which its containers share. Nothing needs cleanup after a crash. The
supervisors of local jobs and of jobs on hosts use this module.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0
_LOCK_TRIES, _LOCK_S = 20, 0.05
# Kind of device -> the variable that limits the devices visible to a process.
VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "xpu": "ZE_AFFINITY_MASK"}


class NotEnoughSlots(Exception):
    """A request for more slots than this machine has. The message is one line for people."""


class SlotRequest:
    """A request for any `count` of `slots`. `what` is their kind in messages."""

    def __init__(self, *, what: str, count: int, slots: Sequence[str]) -> None:
        self.what, self.count, self.slots = what, count, slots


def required_slots(job: Mapping[str, Any], devices: Mapping[str, Any]) -> list[SlotRequest]:
    """Return the slots that a job takes: GPUs and processors as requested, and a place if `concurrency` is set.

    Without any of these, it takes a processor per process. On a machine with GPUs, a job that names no number of GPUs
    or processes takes all, as `accel launch` would.
    """
    requests = []
    on_gpus = devices["kind"] in VISIBLE and not job["cpu_only"]
    if on_gpus or job["gpus"]:
        gpu_slots = [f"gpu-{name}" for name in devices["ids"]] if on_gpus else []
        count = job["gpus"] or job["procs_per_node"] or len(gpu_slots)
        requests.append(SlotRequest(what="GPUs", count=count, slots=gpu_slots))
    processors = [f"cpu-{number}" for number in range(devices["cpus"])]
    if job["cpus"] is not None:
        requests.append(SlotRequest(what="processors", count=job["cpus"], slots=processors))
    elif not requests and job["concurrency"] is None:
        # More processes than processors is slow but valid: such a job takes the whole machine.
        count = min(job["procs_per_node"] or 1, len(processors))
        requests.append(SlotRequest(what="processors", count=count, slots=processors))
    if job["concurrency"] is not None:
        places = [f"place-{number}" for number in range(job["concurrency"])]
        requests.append(SlotRequest(what="places", count=1, slots=places))
    return requests


def visible(slots: Sequence[str], devices: Mapping[str, Any]) -> dict[str, str]:
    """Return the environment that limits a job to the GPUs among its slots; empty if it has none."""
    gpus = [name[len("gpu-") :] for name in slots if name.startswith("gpu-")]
    return {VISIBLE[devices["kind"]]: ",".join(gpus)} if gpus else {}


class Slots:
    """The slots of this machine that one job waits for and then holds, until `release` or the end of its process."""

    def __init__(self, home: str | os.PathLike[str], job_id: str, host: str = "") -> None:
        """Create the lock directories. `host`: this machine's name in messages that are read elsewhere."""
        root = _directory(os.path.join(os.fspath(home), "local"))
        self._queue, self._slots = (os.path.join(root, name) for name in ("queue", "slots"))
        for directory in (self._queue, self._slots):
            os.makedirs(directory, exist_ok=True)
        self._job_id = job_id
        self._host = host
        self._lock_fds: list[int] = []
        self._ticket: int | None = None
        self.ahead = 0  # number of jobs ahead in the queue at the last look

    @property
    def pause_s(self) -> float:
        """Seconds until the next try; the first in line tries more often than the others."""
        return min(_FIRST_PAUSE_S * (1 + self.ahead), _LONGEST_PAUSE_S)

    @property
    def id(self) -> str:
        """An id of this queue, unique while the machine is up; the same for all that share the queue."""
        queue = os.stat(self._queue)
        return f"{boot_id()} {queue.st_dev} {queue.st_ino}"

    def enqueue(self) -> None:
        """Enter the queue, unless the job is in it. Raises OSError."""
        path = os.path.join(self._queue, self._job_id)
        while self._ticket is None:
            fd = _lock(path, wait=True)
            assert fd is not None  # with `wait`, it is locked
            self._ticket = fd
            if not _is_same_file(fd, path):  # another job removed it as stale before it was locked
                self._ticket = None
                os.close(fd)

    def try_acquire(self, requests: Sequence[SlotRequest]) -> tuple[list[str], str]:
        """Return the acquired slots if it is this job's turn and they are free; else none, and the reason.

        Never waits for another job; the job keeps its place in the queue. Raises NotEnoughSlots, OSError.
        """
        for request in requests:
            if request.count > len(request.slots):
                limit = f"this machine has {len(request.slots)}"
                raise NotEnoughSlots(f"{request.count} {request.what} requested, but {limit}")
        self.enqueue()
        while predecessor := self._predecessor():
            if not self._remove_if_stale(predecessor):
                return [], f"waits for its turn{f' on {self._host}' if self._host else ''} behind job {predecessor}"
        names, reason = self._acquire(requests)
        if not reason:
            self.dequeue()
        return names, reason

    def dequeue(self) -> None:
        """Leave the queue if the job is in it."""
        if self._ticket is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(self._queue, self._job_id))
            os.close(self._ticket)
            self._ticket = None

    def release(self) -> None:
        for fd in self._lock_fds:
            os.close(fd)
        self._lock_fds.clear()

    @property
    def fds(self) -> tuple[int, ...]:
        """The descriptors of the acquired slots' locks, for the launcher, which may outlive the supervisor."""
        return tuple(self._lock_fds)

    def _predecessor(self) -> str | None:
        """Return the ticket just before ours. Job ids sort by time."""
        earlier = [name for name in os.listdir(self._queue) if name < self._job_id]
        self.ahead = len(earlier)
        return max(earlier) if earlier else None

    def _remove_if_stale(self, ticket: str) -> bool:
        """Remove the ticket of a job that has left the queue or died. Return False if it still waits."""
        path = os.path.join(self._queue, ticket)
        fd = _lock(path, wait=False)
        if fd is None:
            return False
        if _is_same_file(fd, path):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        os.close(fd)
        return True

    def _acquire(self, requests: Sequence[SlotRequest]) -> tuple[list[str], str]:
        """Acquire all slots or none."""
        names: list[str] = []
        for request in requests:
            count = len(names) + request.count
            for name in request.slots:
                if len(names) == count:
                    break
                fd = _lock(os.path.join(self._slots, name.replace("/", "_")), wait=False)
                if fd is not None:
                    self._lock_fds.append(fd)
                    names.append(name)
            if len(names) < count:
                self.release()
                machine = f"{self._host}'s" if self._host else "this machine's"
                return [], f"waits for {request.count} of {machine} {len(request.slots)} {request.what}"
        return names, ""


def _directory(parent: str) -> str:
    """Return the directory of this machine's queue for this boot, regardless of the host's name; it may not exist.

    Earlier versions named it after the host. While a job of theirs holds a lock there, the new name is a link to it.
    """
    node = platform.node() or "this-machine"
    path = os.path.join(parent, boot_id() or node)
    if not os.path.lexists(path):
        old = os.path.join(parent, node)
        if any(_is_locked(entry.path) for name in ("queue", "slots") for entry in _entries(os.path.join(old, name))):
            with contextlib.suppress(FileExistsError):
                os.symlink(node, path)
    return path


def _entries(path: str) -> list[os.DirEntry[str]]:
    try:
        return list(os.scandir(path))
    except OSError:
        return []


def _is_locked(path: str) -> bool:
    fd = _lock(path, wait=False)
    if fd is not None:
        os.close(fd)
    return fd is None


def boot_id() -> str:
    """Return the kernel's id of this boot; empty if the system has none."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""


def _is_same_file(fd: int, path: str) -> bool:
    """Return True if the open file is still the one with this name."""
    try:
        return os.fstat(fd).st_ino == os.stat(path).st_ino
    except FileNotFoundError:
        return False


def _lock(path: str, *, wait: bool) -> int | None:
    """Lock the file exclusively; return its descriptor, or None if it is locked and `wait` is False."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        os.close(fd)
        return None
    return fd


def lock_soon(path: str) -> int | None:
    """Lock the file, which a reader may hold for a moment; return its descriptor, None if it stays locked."""
    for _ in range(_LOCK_TRIES):
        fd = _lock(path, wait=False)
        if fd is not None:
            return fd
        time.sleep(_LOCK_S)
    return None
