"""The last resort: a process outside the gang that ends what is left when everybody who should have done it is dead.

It watches the launcher and, by the pipe's end, the fork server, where there is one. As long as one of them lives,
ending the gang in order is their work, and takes the grace that it takes. When both are gone, whatever still belongs
to the gang is killed: data-loader workers of a rank that was killed with SIGKILL, and programs that a rank started in
the background.
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
class Guard:
    """A running guard. `pipe` takes one session id a line, for every rank that was forked.

    What has left its rank's session is known by `ACCEL_LAUNCH_ID` in its environment if it was exec'd, and if it was
    only forked by the file that it has inherited (`memory_file`).
    """

    identity: Identity | None
    pipe: int

    def others(self, pids: list[int]) -> list[int]:
        """All of these but the guard itself."""
        return [pid for pid in pids if self.identity is None or pid != self.identity.pid]

    def dismiss(self) -> None:
        """Ends the guard; for a launcher that has left nothing to guard."""
        os.close(self.pipe)
        if self.identity is not None and self.identity.send(signal.SIGKILL):
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self.identity.pid, 0)


def memory_file(launch_id: str) -> str:
    """The name of the memfd that every forked rank has open."""
    return f"accel-{launch_id}"


def start(launch_id: str) -> Guard:
    """Starts a guard in a session of its own, so that no signal to the launcher's terminal or group reaches it."""
    reading, writing = os.pipe()
    process = subprocess.Popen(
        python_module("accel.launch.watchdog", launch_id, str(Identity.of(os.getpid()))),
        stdin=reading,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        env={name: value for name, value in os.environ.items() if name != LAUNCH_ID},  # it must not find itself
        start_new_session=True,
    )
    os.close(reading)
    process.returncode = 0  # the object is done with; forked processes inherit it and must not mind the child
    return Guard(Identity.of(process.pid), writing)


def start_apart(launch_id: str) -> None:
    """Starts a guard that is no child of this process, which is about to become a program that knows of no child."""
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
    reader.join()  # the end of the pipe is the end of the fork server too; and so no session is missed

    def left() -> set[int]:
        known = (in_sessions(sessions), with_variable(LAUNCH_ID, launch_id), with_memory_file(memory_file(launch_id)))
        return {pid for pids in known for pid in pids} - {os.getpid()}

    end_all(left, grace_s=_GRACE_S)


def _read_sessions(sessions: set[int]) -> None:
    for line in sys.stdin.buffer:
        sessions.add(int(line))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
    sys.stdout.flush()
    os._exit(0)
