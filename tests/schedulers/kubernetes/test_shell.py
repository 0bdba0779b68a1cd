"""`accel shell`: a program in the pod of a rank, with a terminal or with pipes, through a real API server."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from schedulers import Job, State
from schedulers.kubernetes.shell import FEEDER
from tests.waiting import until

from .conftest import Submit

ROOT = Path(__file__).parents[3]
WAITS = "echo up; while :; do sleep 0.2; done"
COMMAND = [sys.executable, "-m", "accel", "shell"]


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", **more}


def shell(*words: str, text: bytes | None = None) -> subprocess.CompletedProcess[bytes]:
    given: dict[str, object] = {"stdin": subprocess.DEVNULL} if text is None else {"input": text}
    return subprocess.run([*COMMAND, *words], env=environment(), capture_output=True, timeout=120, **given)  # type: ignore[call-overload, no-any-return]


@pytest.fixture
def job(submit: Submit) -> Iterator[Job]:
    """Two nodes of two ranks, all of which wait."""
    made = submit(WAITS, nodes=2, procs_per_node=2)
    try:
        until(lambda: made.status().state is State.RUNNING, "it runs")
        until(lambda: b"0\n" in shell(made.id, "--node=0", "--", "echo", "0").stdout, "node 0 runs")
        until(lambda: b"1\n" in shell(made.id, "--node=1", "--", "echo", "1").stdout, "node 1 runs")
        yield made
    finally:
        made.cancel(wait=False)


def test_commands_with_pipes(job: Job) -> None:
    """Where each rank is, what goes in and comes out, and the exit code; one job for all, as each costs seconds."""
    hosts = {rank: shell(job.id, f"--rank={rank}", "--", "hostname").stdout.decode().strip() for rank in (0, 1, 3)}
    assert hosts[0] == hosts[1] == f"sh-{job.id}-worker-0"
    assert hosts[3] == f"sh-{job.id}-worker-1"

    done = shell(job.id, "--", "sh", "-c", "echo out; echo err >&2; exit 7")
    assert (done.returncode, done.stdout, done.stderr) == (7, b"out\n", b"err\n")

    every = bytes(range(256)) * 4096  # a megabyte, there and back, each byte of which could be taken for a control
    done = shell(job.id, "--", "cat", text=every)
    assert (done.returncode, done.stdout == every) == (0, True)

    argument = 'it\'s "$HOME" `x` \\ ü\n\t*'
    assert shell(job.id, "--", "printf", "%s", argument).stdout.decode() == argument
    assert shell(job.id, text=b"echo $ACCEL_JOB_ID\nexit 3\n").stdout.decode() == f"{job.id}\n"
    assert shell(job.id, text=b"exit 3\n").returncode == 3

    done = shell(job.id, "--", "no-such-program")
    assert (done.returncode, done.stderr) == (127, b"accel shell: no-such-program: No such file or directory\n")
    done = shell(job.id, "--", "sh", "-c", "kill -9 $$")
    assert done.returncode == 137

    done = shell(job.id, "--json", "--", "sh", "-c", "echo a; exit 4")
    assert done.returncode == 4
    assert b'"exit_code": 4,\n  "stdout": "a\\n"' in done.stdout

    for words, message in [
        (("--rank=4",), "accel shell: --rank 4: the job has ranks 0 to 3\n"),
        (("--node=2",), "accel shell: --node 2: the job has nodes 0 to 1\n"),
        (("--rank=0", "--node=0"), "accel shell: --node: not allowed with --rank\n"),
        (("--json",), "accel shell: --json needs a command: accel shell JOB --json -- COMMAND\n"),
    ]:
        done = shell(job.id, *words)
        assert (done.returncode, done.stderr.decode()) == (2, message)


def test_a_terminal(job: Job) -> None:
    ours, theirs = pty.openpty()
    resize(ours, 33, 101)
    before = termios.tcgetattr(theirs)
    process = subprocess.Popen(
        [*COMMAND, job.id], env=environment(), stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    )
    screen = Screen(ours)
    screen.type("stty size; echo $TERM\n")
    screen.until("33 101\r\nxterm\r\n")
    resize(ours, 20, 60)
    process.send_signal(signal.SIGWINCH)
    screen.repeat("stty size\n", "20 60\r\n")
    screen.type("sh -c 'echo in $((6 - 5)); exec sleep 1000'\n")
    screen.until("in 1\r\n")  # the program has the terminal
    screen.repeat("\x03", "^C")  # Ctrl-C is the program's, not ours
    screen.repeat("test -t 0 && echo $((6 * 7))\n", "42\r\n")
    screen.type("exit 9\n")
    until(lambda: screen.drained() and process.poll() is not None, "it ends")
    assert process.returncode == 9
    assert termios.tcgetattr(theirs) == before
    os.close(ours)
    os.close(theirs)


def test_a_program_ends_with_whoever_wanted_it(job: Job) -> None:
    process = subprocess.Popen(
        [*COMMAND, job.id, "--", "sleep", "4321"], env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )

    def runs() -> bool:
        return shell(job.id, "--", "pgrep", "-xf", "sleep 4321").returncode == 0

    until(runs, "it runs")
    process.kill()
    process.communicate()
    until(lambda: not runs(), "it has ended")


def test_a_job_that_does_not_run_is_one_line(submit: Submit) -> None:
    job = submit("true", options={"image": "example.org/no-such:1"})
    until(lambda: bool(job.status().message), "it is said why it waits")
    done = shell(job.id)
    assert done.returncode == 1
    assert done.stderr.decode().startswith(f"accel shell: job {job.id} is queued: ")
    assert done.stderr.count(b"\n") == 1
    job.cancel(wait=True)
    done = shell(job.id)
    assert done.stderr.decode().startswith(f"accel shell: job {job.id} has ended (cancelled")


@pytest.fixture(params=["pidfd", "parent's id"])
def exec_feeder(request: pytest.FixtureRequest) -> Iterator[Callable[[str], subprocess.Popen[bytes]]]:
    """Starts a shell script through the feeder, as a container runtime does. Kernels before 5.3 have no pidfd_open."""
    started: list[subprocess.Popen[bytes]] = []
    feeder = FEEDER if request.param == "pidfd" else f"import os\nos.__dict__.pop('pidfd_open', None)\n{FEEDER}"

    def start(script: str) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-c", feeder, "sh", "-c", script]
        pipe = subprocess.PIPE
        started.append(subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            assert pipe is not None
            pipe.close()


def send(process: subprocess.Popen[bytes], *pieces: bytes) -> None:
    assert process.stdin is not None
    for piece in pieces:
        process.stdin.write(len(piece).to_bytes(4, "big") + piece)


def test_a_program_that_closes_an_output_goes_on(
    exec_feeder: Callable[[str], subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    """containerd closes the input of such a program."""
    process = exec_feeder(f"exec >&-; : >{tmp_path}/closed; cat >{tmp_path}/input; exit 7")
    send(process, b"one\n")
    until((tmp_path / "closed").exists, "its output is closed")
    assert process.stdin is not None
    assert process.stdout is not None
    if any(select.select([process.stdout], [], [], 0)):
        process.stdin.close()
    else:
        send(process, b"two\n" * 100_000, b"")
    assert process.wait(60) == 7
    assert (tmp_path / "input").read_bytes() == b"one\n" + b"two\n" * 100_000


def test_a_program_ends_when_its_input_breaks_off(exec_feeder: Callable[[str], subprocess.Popen[bytes]]) -> None:
    """Also where it has not read what was sent."""
    process = exec_feeder("echo up; exec sleep 1000")
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    send(process, b"x" * 100_000)
    process.stdin.close()
    assert process.wait(60) == -signal.SIGTERM


def test_an_end_is_seen_while_another_process_holds_the_input(
    exec_feeder: Callable[[str], subprocess.Popen[bytes]],
) -> None:
    process = exec_feeder("exec 3<&0; sleep 1000 <&3 >/dev/null 2>&1 & echo $!; read go; exit 5")
    assert process.stdout is not None
    sleeper = int(process.stdout.readline())
    try:
        send(process, b"go\n" + b"x" * 100_000)
        assert process.stdout.read() == b""  # both outputs are closed, and with them the exec ends
        assert process.wait(60) == 5
    finally:
        os.kill(sleeper, signal.SIGKILL)


def resize(descriptor: int, lines: int, columns: int) -> None:
    fcntl.ioctl(descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))


class Screen:
    """What a program shows on a terminal, and what is typed there."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._seen = ""
        os.set_blocking(descriptor, False)

    def type(self, text: str) -> None:
        os.write(self._descriptor, text.encode())

    def until(self, text: str) -> None:
        until(lambda: self._shows(text), f"{text!r} is shown")

    def repeat(self, typed: str, text: str) -> None:
        """Types it again until that is shown."""

        def shown() -> bool:
            self.type(typed)
            return self._shows(text)

        until(shown, f"{text!r} is shown")

    def drained(self) -> bool:
        self._shows("nothing of the sort")
        return True

    def _shows(self, text: str) -> bool:
        with contextlib.suppress(BlockingIOError):
            self._seen += os.read(self._descriptor, 65536).decode(errors="replace")
        at = self._seen.find(text)
        if at >= 0:
            self._seen = self._seen[at + len(text) :]
        return at >= 0
