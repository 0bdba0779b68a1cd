"""Run the same commands on every worker of a TPU VM: one `gcloud … ssh` per worker, all at once."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import IO

from accel.launch.signals import Told
from schedulers.processes import descendants, end_all, signal_name

_GRACE_S = 10.0
_POLL_S = 0.05
_KEY = "~/.ssh/google_compute_engine"  # where gcloud keeps it


class PodError(Exception):
    """The TPU cannot be queried. The message is one line."""


def ssh(gcloud: Sequence[str], name: str, zone: str, worker: str, commands: Sequence[str]) -> list[str]:
    """Return the command line that runs ``commands`` on a worker (a number or ``all``) until one fails."""
    return [*gcloud, "ssh", name, "--zone", zone, "--worker", worker, "--command", script(commands)]


def script(commands: Sequence[str]) -> str:
    """Return a script for a worker's shell that exits with the code of the first failing command.

    Each command is a line of its own (not ``a && b``, whose ``a`` could hide a comment) in the same shell: a
    ``cd`` or ``export`` affects those that follow.
    """
    return "\n".join(["set -e", *commands])


def run(gcloud: Sequence[str], name: str, zone: str, commands: Sequence[str]) -> int:
    """Run commands with gcloud, as `on_each` does. Raises `PodError` without gcloud, or if the TPU is unknown."""

    def lines(told: Told) -> list[list[str]]:
        count = workers(gcloud, name, zone, told)
        if count > 1:
            _sign_in(gcloud, name, zone, told)
        return [ssh(gcloud, name, zone, str(index), commands) for index in range(count)]

    return on_each(lines)


def on_each(lines: Callable[[Told], Sequence[Sequence[str]]]) -> int:
    """Run a command line per worker and print its output line by line. Return the first failing code, else 0.

    Ends the others when one has failed, and all on a termination signal, for which it returns 128 + its number.
    ``lines`` is called after the signal handlers are set, and may raise `PodError`.
    """
    told = Told()
    running: list[_Worker] = []
    try:
        for index, line in enumerate(lines(told)):
            if not told.signum:
                running.append(_Worker(index, line))
        return _first_failure(running, told)
    except _ToldToEnd:
        return told.exit_code
    finally:
        if told.signum:
            print(f"accel: told to end by {signal_name(told.signum)}; ending what runs", file=sys.stderr)
        _end(running)
        told.forget()


def workers(gcloud: Sequence[str], name: str, zone: str, told: Told) -> int:
    """Return the number of workers. Raises `PodError`."""
    asked = [*gcloud, "describe", name, "--zone", zone, "--format", "json"]
    try:
        code, described, said = _answer(asked, told)
    except FileNotFoundError:
        raise PodError(
            "there is no gcloud on PATH: install the Google Cloud CLI (https://cloud.google.com/sdk)"
        ) from None
    if code != 0:
        raise PodError(f"gcloud cannot describe {name} in {zone}: {_error(said) or f'code {code}'}")
    try:
        found = json.loads(described)
        ends, state = found.get("networkEndpoints") or [], found.get("state", "READY")
    except (ValueError, AttributeError):
        raise PodError(f"gcloud describes {name} in words that are not understood: {shlex.join(asked)}") from None
    if state != "READY":
        raise PodError(f"{name} in {zone} is {state}, not READY")
    return max(1, len(ends))


def _sign_in(gcloud: Sequence[str], name: str, zone: str, told: Told) -> None:
    """Let gcloud create its SSH key if it has none: several at once would overwrite each other's."""
    if os.path.exists(os.path.expanduser(_KEY)):
        return
    code, _, said = _answer(ssh(gcloud, name, zone, "0", ["true"]), told)
    if code != 0:
        raise PodError(f"gcloud cannot sign in to worker 0 of {name}: {_error(said) or f'code {code}'}")


class _ToldToEnd(Exception):
    """A signal came while gcloud ran."""


def _answer(command: Sequence[str], told: Told) -> tuple[int, str, str]:
    """Return gcloud's exit code, stdout and stderr. Raises _ToldToEnd after gcloud and its ssh have ended.

    Runs in this session, on whose terminal gcloud may prompt for a key's passphrase.
    """
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    out, err = running.communicate(timeout=_POLL_S)
                    return running.returncode, out, err
                if told.signum:
                    raise _ToldToEnd
        except BaseException:
            end_all(
                lambda: [running.pid, *descendants(running.pid)] if running.poll() is None else [], grace_s=_GRACE_S
            )
            raise


def _error(said: str) -> str:
    """Return gcloud's paragraph that begins with ERROR, as one line; without one, its last line."""
    lines = said.strip().splitlines()
    start = next((at for at, line in enumerate(lines) if line.startswith("ERROR")), len(lines) - 1)
    return " ".join(line.strip() for line in itertools.takewhile(str.strip, lines[max(start, 0) :]))


class _Worker:
    def __init__(self, index: int, command: Sequence[str]) -> None:
        self.index = index
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
        self._readers = [
            threading.Thread(target=self._pass_on, args=pair, daemon=True)
            for pair in ((self._process.stdout, sys.stdout), (self._process.stderr, sys.stderr))
        ]
        for reader in self._readers:
            reader.start()

    def _pass_on(self, lines: IO[bytes], to: IO[str]) -> None:
        for line in lines:
            text = line.decode(errors="replace").rstrip("\r\n")
            try:
                to.write(f"[worker {self.index}] {text}\n")
                to.flush()
            except (OSError, ValueError):
                continue  # nobody reads any more; the worker must still not wait for a full pipe

    def poll(self) -> int | None:
        return self._process.poll()

    def finish(self, seconds: float | None = None) -> None:
        for reader in self._readers:
            reader.join(seconds)

    def signal(self, number: int) -> None:
        """Signal gcloud and the ssh that it started."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def wait(self, seconds: float) -> bool:
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True


def _first_failure(running: Sequence[_Worker], told: Told) -> int:
    left = list(running)
    while left:
        if told.signum:
            return told.exit_code
        for worker in [one for one in left if one.poll() is not None]:
            left.remove(worker)
            worker.finish(_GRACE_S)
            code = worker.poll() or 0
            if code:
                code = 128 - code if code < 0 else code
                others = f"; ending the other {len(left)}" if left else ""
                print(f"accel: worker {worker.index} ended with code {code}{others}", file=sys.stderr)
                return code
        time.sleep(_POLL_S)
    return 0


def _end(running: Sequence[_Worker]) -> None:
    for worker in running:
        worker.signal(signal.SIGTERM)
    for worker in running:
        if not worker.wait(_GRACE_S):
            worker.signal(signal.SIGKILL)
            worker.wait(_GRACE_S)
        worker.finish(1.0)
