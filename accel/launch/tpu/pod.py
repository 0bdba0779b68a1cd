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

from accel.launch.signals import TerminationSignals
from schedulers.processes import descendants, end_all, signal_name

_GRACE_S = 10.0
_POLL_S = 0.05
_KEY = "~/.ssh/google_compute_engine"  # gcloud's SSH key


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

    def lines(signals: TerminationSignals) -> list[list[str]]:
        count = workers(gcloud, name, zone, signals)
        if count > 1:
            _sign_in(gcloud, name, zone, signals)
        return [ssh(gcloud, name, zone, str(index), commands) for index in range(count)]

    return on_each(lines)


def on_each(lines: Callable[[TerminationSignals], Sequence[Sequence[str]]]) -> int:
    """Run a command line per worker and print its output line by line. Return the first failing code, else 0.

    Ends the others when one has failed, and all on a termination signal, for which it returns 128 + its number.
    ``lines`` is called after the signal handlers are set, and may raise `PodError`.
    """
    signals = TerminationSignals()
    running: list[_Worker] = []
    try:
        for index, line in enumerate(lines(signals)):
            if not signals.signum:
                running.append(_Worker(index, line))
        return _first_failure(running, signals)
    except _Terminated:
        return signals.exit_code
    finally:
        if signals.signum:
            print(f"accel: received {signal_name(signals.signum)}; ending all workers", file=sys.stderr)
        _end_workers(running)
        signals.forget()


def workers(gcloud: Sequence[str], name: str, zone: str, signals: TerminationSignals) -> int:
    """Return the number of workers. Raises `PodError`."""
    argv = [*gcloud, "describe", name, "--zone", zone, "--format", "json"]
    try:
        code, stdout, stderr = _run_gcloud(argv, signals)
    except FileNotFoundError:
        raise PodError(
            "gcloud not found on PATH: install the Google Cloud CLI (https://cloud.google.com/sdk)"
        ) from None
    if code != 0:
        raise PodError(f"gcloud cannot describe {name} in {zone}: {_error(stderr) or f'code {code}'}")
    try:
        description = json.loads(stdout)
        endpoints, state = description.get("networkEndpoints") or [], description.get("state", "READY")
    except (ValueError, AttributeError):
        raise PodError(f"gcloud's description of {name} is not valid JSON: {shlex.join(argv)}") from None
    if state != "READY":
        raise PodError(f"{name} in {zone} is {state}, not READY")
    return max(1, len(endpoints))


def _sign_in(gcloud: Sequence[str], name: str, zone: str, signals: TerminationSignals) -> None:
    """Let gcloud create its SSH key if it has none: several at once would overwrite each other's."""
    if os.path.exists(os.path.expanduser(_KEY)):
        return
    code, _, stderr = _run_gcloud(ssh(gcloud, name, zone, "0", ["true"]), signals)
    if code != 0:
        raise PodError(f"gcloud cannot sign in to worker 0 of {name}: {_error(stderr) or f'code {code}'}")


class _Terminated(Exception):
    """A termination signal was received while gcloud ran."""


def _run_gcloud(command: Sequence[str], signals: TerminationSignals) -> tuple[int, str, str]:
    """Return gcloud's exit code, stdout and stderr. Raises _Terminated after gcloud and its ssh have ended.

    It runs in this session, so that gcloud may prompt for a key's passphrase on its terminal.
    """
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    stdout, stderr = running.communicate(timeout=_POLL_S)
                    return running.returncode, stdout, stderr
                if signals.signum:
                    raise _Terminated
        except BaseException:
            end_all(
                lambda: [running.pid, *descendants(running.pid)] if running.poll() is None else [], grace_s=_GRACE_S
            )
            raise


def _error(stderr: str) -> str:
    """Return gcloud's paragraph that begins with ERROR, as one line; if there is none, the last line."""
    lines = stderr.strip().splitlines()
    start = next((index for index, line in enumerate(lines) if line.startswith("ERROR")), len(lines) - 1)
    return " ".join(line.strip() for line in itertools.takewhile(str.strip, lines[max(start, 0) :]))


class _Worker:
    def __init__(self, index: int, command: Sequence[str]) -> None:
        self.index = index
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
        self._readers = [
            threading.Thread(target=self._forward, args=pair, daemon=True)
            for pair in ((self._process.stdout, sys.stdout), (self._process.stderr, sys.stderr))
        ]
        for reader in self._readers:
            reader.start()

    def _forward(self, lines: IO[bytes], stream: IO[str]) -> None:
        for line in lines:
            text = line.decode(errors="replace").rstrip("\r\n")
            try:
                stream.write(f"[worker {self.index}] {text}\n")
                stream.flush()
            except (OSError, ValueError):
                continue  # the reader is gone; keep the worker's pipe empty

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


def _first_failure(running: Sequence[_Worker], signals: TerminationSignals) -> int:
    remaining = list(running)
    while remaining:
        if signals.signum:
            return signals.exit_code
        for worker in [candidate for candidate in remaining if candidate.poll() is not None]:
            remaining.remove(worker)
            worker.finish(_GRACE_S)
            code = worker.poll() or 0
            if code:
                code = 128 - code if code < 0 else code
                suffix = f"; ending the other {len(remaining)}" if remaining else ""
                print(f"accel: worker {worker.index} ended with code {code}{suffix}", file=sys.stderr)
                return code
        time.sleep(_POLL_S)
    return 0


def _end_workers(running: Sequence[_Worker]) -> None:
    for worker in running:
        worker.signal(signal.SIGTERM)
    for worker in running:
        if not worker.wait(_GRACE_S):
            worker.signal(signal.SIGKILL)
            worker.wait(_GRACE_S)
        worker.finish(1.0)
