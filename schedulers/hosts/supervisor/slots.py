"""The queue of one machine: first come, first served, over lock files that the kernel releases when a holder dies.

    queue/<job id>    locked by a job that waits; the next in line waits for it
    slots/<name>      locked by the job that has that GPU, processor or place

Locks are per machine (a home directory may be shared by several), so nothing is to be cleaned up after a crash.
The local target uses this module in its supervisor, the ssh target on its hosts.
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
# The variable that shows a process some of the machine's devices only, by the kind of these.
VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "xpu": "ZE_AFFINITY_MASK"}


class NotEnoughSlots(Exception):
    """More slots than this machine has; one line for people."""


class SlotRequest:
    """So many of these slots, whichever are free."""

    def __init__(self, *, what: str, count: int, of: Sequence[str]) -> None:
        self.what, self.count, self.slots = what, count, of


def required_slots(job: Mapping[str, Any], devices: Mapping[str, Any]) -> list[SlotRequest]:
    """The slots that a job takes: its GPUs, or a processor for each process; and a place, where places are counted.

    On a machine with GPUs a job that names no number of them, nor of processes, takes all, as `accel launch` would.
    """
    requests = []
    on_gpus = devices["kind"] in VISIBLE and not job["cpu_only"]
    if on_gpus or job["gpus"]:
        gpu_slots = [f"gpu-{name}" for name in devices["ids"]] if on_gpus else []
        requests.append(
            SlotRequest(what="GPUs", count=job["gpus"] or job["procs_per_node"] or len(gpu_slots), of=gpu_slots)
        )
    processors = [f"cpu-{number}" for number in range(devices["cpus"])]
    if job["cpus"] is not None:
        requests.append(SlotRequest(what="processors", count=job["cpus"], of=processors))
    elif not requests and job["concurrency"] is None:
        # More processes than processors is slow and not wrong: such a job takes the whole machine.
        requests.append(
            SlotRequest(what="processors", count=min(job["procs_per_node"] or 1, len(processors)), of=processors)
        )
    if job["concurrency"] is not None:
        requests.append(
            SlotRequest(what="places", count=1, of=[f"place-{number}" for number in range(job["concurrency"])])
        )
    return requests


def visible(slots: Sequence[str], devices: Mapping[str, Any]) -> dict[str, str]:
    """The environment that shows a job the GPUs among its slots and no other; empty where it has none."""
    gpus = [name[len("gpu-") :] for name in slots if name.startswith("gpu-")]
    return {VISIBLE[devices["kind"]]: ",".join(gpus)} if gpus else {}


class Slots:
    """The slots of this machine that one job waits for and then holds, until `release` or the end of its process."""

    def __init__(self, home: str | os.PathLike[str], job_id: str, host: str = "") -> None:
        """`host` names this machine in messages to people elsewhere."""
        root = os.path.join(os.fspath(home), "local", platform.node() or "this-machine")
        self._queue, self._slots = (os.path.join(root, name) for name in ("queue", "slots"))
        for directory in (self._queue, self._slots):
            os.makedirs(directory, exist_ok=True)
        self._job_id = job_id
        self._host = host
        self._lock_fds: list[int] = []
        self._ticket: int | None = None
        self.ahead = 0  # so many jobs were before this one when it last looked

    @property
    def pause_s(self) -> float:
        """The seconds until it should look again: the first in line looks oftener than the others."""
        return min(_FIRST_PAUSE_S * (1 + self.ahead), _LONGEST_PAUSE_S)

    @property
    def id(self) -> str:
        """The same for all who share this queue, while the machine is up, and for no other queue."""
        queue = os.stat(self._queue)
        return f"{boot_id()} {queue.st_dev} {queue.st_ino}"

    def enqueue(self) -> None:
        """Takes the job's place in the queue, unless it has it. Raises OSError."""
        path = os.path.join(self._queue, self._job_id)
        while self._ticket is None:
            fd = _lock(path, wait=True)
            assert fd is not None  # it has waited
            self._ticket = fd
            if not _is_same_file(fd, path):  # taken for a dead job's, and removed, before it was locked
                self._ticket = None
                os.close(fd)

    def attempt(self, requests: Sequence[SlotRequest]) -> tuple[list[str], str]:
        """The names of the slots, when it is this job's turn and they are free; else none, and why not.

        Never waits for another job; the job's place in the queue is kept meanwhile. Raises TooMany, OSError.
        """
        _check(requests)
        self.enqueue()
        while predecessor := self._position():
            if not self._is_stale(predecessor):
                return [], f"waits for its turn{f' on {self._host}' if self._host else ''} behind job {predecessor}"
        names, reason = self._acquire(requests)
        if not reason:
            self.dequeue()
        return names, reason

    def dequeue(self) -> None:
        """Gives up the job's place in the queue, where it has one."""
        if self._ticket is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(self._queue, self._job_id))
            os.close(self._ticket)
            self._ticket = None

    def release(self) -> None:
        for fd in self._lock_fds:
            os.close(fd)
        self._lock_fds.clear()

    def _position(self) -> str | None:
        """The ticket just before ours. Job ids sort by time."""
        earlier = [name for name in os.listdir(self._queue) if name < self._job_id]
        self.ahead = len(earlier)
        return max(earlier) if earlier else None

    def _is_stale(self, ticket: str) -> bool:
        """Removes the ticket of a job that has gone on or died. False while it waits."""
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
        """All or none."""
        names: list[str] = []
        for request in requests:
            slot_names = self._acquire_one(request)
            if len(slot_names) < request.count:
                self.release()
                machine = f"{self._host}'s" if self._host else "this machine's"
                return [], f"waits for {request.count} of {machine} {len(request.slots)} {request.what}"
            names += slot_names
        return names, ""

    def _acquire_one(self, request: SlotRequest) -> list[str]:
        names: list[str] = []
        for name in request.slots:
            if len(names) == request.count:
                break
            fd = _lock(os.path.join(self._slots, name.replace("/", "_")), wait=False)
            if fd is not None:
                self._lock_fds.append(fd)
                names.append(name)
        return names


def boot_id() -> str:
    """The kernel's id of this boot; empty where the system has none."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""


def _check(requests: Sequence[SlotRequest]) -> None:
    for request in requests:
        if request.count > len(request.slots):
            raise NotEnoughSlots(f"{request.count} {request.what} asked for, and this machine has {len(request.slots)}")


def _is_same_file(fd: int, path: str) -> bool:
    """Whether the open file is the one of this name."""
    try:
        return os.fstat(fd).st_ino == os.stat(path).st_ino
    except FileNotFoundError:
        return False


def _lock(path: str, *, wait: bool) -> int | None:
    """An exclusive lock on the file, as its descriptor; None when it is held and `wait` is false."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        os.close(fd)
        return None
    return fd


def lock_soon(path: str) -> int | None:
    """Take the file's lock, which a reader may hold for a moment: its descriptor, or None when a process keeps it."""
    for _ in range(_LOCK_TRIES):
        fd = _lock(path, wait=False)
        if fd is not None:
            return fd
        time.sleep(_LOCK_S)
    return None
