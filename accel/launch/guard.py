"""The last resort: a process outside the gang that ends what is left when everybody who should have done it is dead.

It watches the launcher (and the fork server, where there is one). As long as one of them lives, ending the gang in
order is their work. When all are gone, whatever still belongs to the gang is killed: data-loader workers of a rank
that was killed with SIGKILL, and programs that a rank started in the background.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass

from schedulers.processes import Identity, end_all, in_sessions, python_module, with_variable

LAUNCH_ID = "ACCEL_LAUNCH_ID"
_GRACE_S = 1.0


@dataclass(frozen=True)
class Guard:
    """A running guard. `pipe` takes one session id a line, for every rank that was forked; a rank that was exec'd is
    known by `ACCEL_LAUNCH_ID` in its environment."""

    identity: Identity | None
    pipe: int

    def dismiss(self) -> None:
        """Ends the guard; for a launcher that has left nothing to guard."""
        os.close(self.pipe)
        if self.identity is not None and self.identity.send(signal.SIGKILL):
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self.identity.pid, 0)


def start(launch_id: str, watched: list[int]) -> Guard:
    """Starts a guard in a session of its own, so that no signal to the launcher's terminal or group reaches it."""
    identities = [str(identity) for pid in watched if (identity := Identity.of(pid))]
    reading, writing = os.pipe()
    process = subprocess.Popen(
        python_module("accel.launch.guard", launch_id, *identities),
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


def main(launch_id: str, watched: list[str]) -> None:
    sessions: set[int] = set()
    reader = threading.Thread(target=_read_sessions, args=(sessions,), daemon=True)
    reader.start()
    for identity in map(Identity.parse, watched):
        while not identity.wait(3600):
            pass
    # The writers are dead, so the end of the pipe is certain and near: no session can be missed.
    reader.join(timeout=5)

    def left() -> set[int]:
        return {*in_sessions(sessions), *with_variable(LAUNCH_ID, launch_id)} - {os.getpid()}

    end_all(left, grace_s=_GRACE_S)


def _read_sessions(sessions: set[int]) -> None:
    for line in sys.stdin.buffer:
        sessions.add(int(line))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
    sys.stdout.flush()
    os._exit(0)
