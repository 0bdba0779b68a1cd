"""The watchdog: a process outside the gang that kills what is left when the launcher and fork server are dead.

It watches the launcher and, by the pipe's end, the fork server, if there is one. As long as one of them
lives, ending the gang (with its grace period) is their task. When both are dead, the watchdog kills the
remaining processes of the gang: data-loader workers of a rank killed with SIGKILL, and programs that a rank
started in the background.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass

from schedulers.processes import Identity, end_all, in_sessions, python_module, with_memory_file, with_variable

LAUNCH_ID = "ACCEL_LAUNCH_ID"
_GRACE_S = 1.0


@dataclass(frozen=True)
class Watchdog:
    """A running watchdog. Write the session id of each forked rank to `pipe`, one per line.

    The watchdog finds processes that left their rank's session by `ACCEL_LAUNCH_ID` in their environment, or, if
    they only forked, by an inherited file (`memory_file`).
    """

    identity: Identity | None
    pipe: int

    def other_processes(self, pids: list[int]) -> list[int]:
        """Return the pids other than the watchdog's."""
        return [pid for pid in pids if self.identity is None or pid != self.identity.pid]

    def dismiss(self) -> None:
        """Kill the watchdog, after the gang has ended."""
        os.close(self.pipe)
        if self.identity is not None and self.identity.send(signal.SIGKILL):
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self.identity.pid, 0)


def memory_file(launch_id: str) -> str:
    """Return the name of the memfd that every forked rank has open."""
    return f"accel-{launch_id}"


def start(launch_id: str) -> Watchdog:
    """Start a watchdog in its own session, so that no signal to the launcher's terminal or group reaches it."""
    reading, writing = os.pipe()
    process = subprocess.Popen(
        python_module("accel.launch.watchdog", launch_id, str(Identity.of(os.getpid()))),
        stdin=reading,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        env={name: value for name, value in os.environ.items() if name != LAUNCH_ID},  # it is not of the gang
        start_new_session=True,
    )
    os.close(reading)
    process.returncode = 0  # forked processes inherit the object and must not wait for the child
    return Watchdog(Identity.of(process.pid), writing)


def start_detached(launch_id: str) -> None:
    """Start a watchdog that is no child of this process: the program that replaces it expects none."""
    identity = str(Identity.of(os.getpid()))
    pid = os.fork()
    if pid:
        os.waitpid(pid, 0)
        return
    try:
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in range(3):
            os.dup2(null, descriptor)
        if os.fork() == 0:
            os.chdir("/")
            os.environ.pop(LAUNCH_ID, None)
            command = python_module("accel.launch.watchdog", launch_id, identity)
            os.execv(command[0], command)
    finally:
        os._exit(0)


def main(launch_id: str, launcher: str) -> None:
    sessions: set[int] = set()
    reader = threading.Thread(target=_read_sessions, args=(sessions,), daemon=True)
    reader.start()
    identity = Identity.parse(launcher)
    while not identity.wait(3600):
        pass
    reader.join()  # the pipe closes when the fork server is dead; then all sessions are known

    def leftovers() -> set[int]:
        pid_sets = (
            in_sessions(sessions),
            with_variable(LAUNCH_ID, launch_id),
            with_memory_file(memory_file(launch_id)),
        )
        return {pid for pids in pid_sets for pid in pids} - {os.getpid()}

    end_all(leftovers, grace_s=_GRACE_S)


def _read_sessions(sessions: set[int]) -> None:
    for line in sys.stdin.buffer:
        sessions.add(int(line))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
    sys.stdout.flush()
    os._exit(0)
