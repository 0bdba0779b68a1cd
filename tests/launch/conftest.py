"""`accel launch` as people use it: real processes, and a look at what they leave behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests import warm
from tests.waiting import comes

ROOT = Path(__file__).parents[2]
HOSTILE_NAME = 'it\'s a; "$(dir)"\n'
MARK = warm.MARK
DEADLINE_S = 180.0  # for what is certain to come, on a machine that has other things to do

LAUNCH = (sys.executable, "-m", "accel", "launch")
GANG = frozenset({"--num_processes", "--num_machines", "--max_restarts"})  # with these a launcher imports torch

# What a launch must not inherit from the shell (or the launch) that runs the tests.
_FOREIGN = tuple(
    "ACCEL ACCELERATE_ TORCHELASTIC_ CUDA_VISIBLE OMP_NUM SLURM_ PET_ SM_ TPU_ MASTER_ RANK LOCAL_ WORLD_".split(),
)


def until(what: str, happened: Callable[[], object], within_s: float = DEADLINE_S) -> None:
    """Waits for an event that other processes bring about."""
    assert comes(happened, within_s), f"{what}: not within {within_s:g} s"


def marked(mark: str) -> dict[int, str]:
    """All live processes that have the mark in their environment (it is inherited over fork and exec), with their
    command lines; and those of their sessions that have shed it."""
    wanted = f"{MARK}={mark}".encode()
    environments = {pid: data for pid in _pids() if (data := _read(pid, "environ")) is not None}
    found = {pid for pid, data in environments.items() if wanted in data.split(b"\0")}
    sessions = {session for pid in found if (session := _session(pid)) is not None} - {os.getsid(0)}
    found |= {pid for pid in environments if _session(pid) in sessions}
    return {pid: line for pid in sorted(found) if _lives(pid) and (line := _command(pid)) is not None}


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _read(pid: int, name: str) -> bytes | None:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return None


def _command(pid: int) -> str | None:
    data = _read(pid, "cmdline")
    return None if data is None else data.replace(b"\0", b" ").decode(errors="replace")


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:
        return None


def _lives(pid: int) -> bool:
    stat = _read(pid, "stat")
    return stat is not None and stat.rpartition(b")")[2].split()[0] not in (b"Z", b"X")


@dataclass(frozen=True)
class Done:
    """How a launch ended."""

    code: int
    out: str
    err: str


@dataclass
class Run:
    """A launch that is under way. Its output goes to files: no pipe that a process left behind could hold open."""

    process: warm.Process
    out: Path
    err: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    def text(self) -> str:
        return self.out.read_text(errors="replace") + self.err.read_text(errors="replace")

    def says(self, *words: str) -> None:
        """Waits until all these stand in the output."""

        def said() -> bool:
            ended = self.process.poll() is not None
            text = self.text()
            missing = [word for word in words if word not in text]
            assert not (missing and ended), f"it ended ({self.process.returncode}) without {missing}:\n{text}"
            return not missing

        until(f"the output {words}", said)

    def send(self, signum: int) -> None:
        self.process.send_signal(signum)

    def wait(self, timeout_s: float = DEADLINE_S) -> Done:
        code = self.process.wait(timeout_s)
        return Done(code, self.out.read_text(errors="replace"), self.err.read_text(errors="replace"))

    def child(self, *, guard: bool) -> int:
        """The launcher's guard or fork server."""
        found: list[int] = []

        def look() -> bool:
            below = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
            found[:] = [int(pid) for pid in below if ("launch.watchdog" in (_command(int(pid)) or "")) is guard]
            return bool(found)

        until("the launcher's child", look)
        return found[0]


@dataclass
class Launcher:
    """Starts `accel launch` in `here`; every process that comes of it bears this test's mark.

    A launcher is forked from the worker's `tests.warm` server; a `command` is run as it is.
    """

    here: Path
    tmp: Path
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    _runs: list[Run] = field(default_factory=list)

    def script(self, text: str, name: str = "train.py") -> str:
        path = self.here / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return name

    def env(self, **more: str) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
        own = {"PYTHONPATH": str(ROOT), "LC_ALL": "C.UTF-8", "HF_HOME": str(self.tmp / "no-default-file")}
        return {**inherited, **own, MARK: self.mark, **more}

    def start(
        self,
        *argv: str | bytes,
        command: list[str] | None = None,
        preexec: Callable[[], object] | None = None,
        within: Mapping[str, str] | None = None,
        **env: str,
    ) -> Run:
        """`within` and `env` are variables of its environment."""
        env = {**(within or {}), **env}
        out, err = (self.tmp / f"{len(self._runs)}.{name}" for name in ("out", "err"))
        argv = (*(command or LAUNCH), *argv)
        with open(out, "wb") as stdout, open(err, "wb") as stderr:
            if command is None and preexec is None:
                loaded = warm.TORCH if GANG & set(argv) else warm.LIGHT
                process: warm.Process = warm.start(
                    argv, cwd=self.here, env=self.env(**env), stdout=stdout, stderr=stderr, loaded=loaded
                )
            else:
                process = subprocess.Popen(
                    argv, cwd=self.here, env=self.env(**env), stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr,
                    start_new_session=True, preexec_fn=preexec,
                )  # fmt: skip
        run = Run(process, out, err)
        self._runs.append(run)
        return run

    def __call__(self, *argv: str | bytes, code: int = 0, command: list[str] | None = None, **env: str) -> Done:
        """Runs it to its end, and checks the exit code and that nothing is left when it is there."""
        done = self.start(*argv, command=command, preexec=None, within=env).wait()
        assert done.code == code, done
        return done

    def python(self, *argv: str, **env: str) -> Done:
        """What the same words give without a launcher, both outputs in one."""
        done = subprocess.run(
            [sys.executable, *argv],
            cwd=self.here,
            env=self.env(**env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=DEADLINE_S,
        )
        return Done(done.returncode, done.stdout.decode(errors="replace"), "")

    def log(self, rank: int, attempt: int = 0, log_dir: str = "logs") -> str:
        return (self.here / log_dir / f"rank-{rank}.a{attempt}.log").read_text(errors="replace")

    def nothing_left(self) -> None:
        """Waits for the end of all that this test has started. What is left for good must be made to last longer."""
        left: dict[int, str] = {}

        def gone() -> bool:
            left.clear()
            left.update(marked(self.mark))
            return not left

        try:
            until("no process left", gone)
        except AssertionError:
            pytest.fail(f"left {DEADLINE_S:g} s later: {left}")

    def clean_up(self) -> None:
        deadline = time.monotonic() + 10
        while (left := marked(self.mark)) and time.monotonic() < deadline:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        for run in self._runs:
            run.process.wait(10)


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    here = tmp_path / HOSTILE_NAME
    here.mkdir()
    runner = Launcher(here, tmp_path)
    yield runner
    runner.clean_up()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    """For a launch that several tests look at."""
    tmp = tmp_path_factory.mktemp("shared")
    here = tmp / HOSTILE_NAME
    here.mkdir()
    runner = Launcher(here, tmp)
    yield runner
    runner.clean_up()
