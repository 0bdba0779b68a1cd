"""Signals to the launcher: some end the gang in order, some are only passed on."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.needs import missing

from .conftest import Launcher, until

TELL = """\
import os, signal, sys
def told(signum, frame):
    print(f"rank {os.environ['RANK']} told {signal.Signals(signum).name}.", flush=True)
    if signum in (signal.SIGTERM, signal.SIGINT): sys.exit(0)
for name in sys.argv[1:]:
    signal.signal(getattr(signal, name), told)
print(f"ready {os.environ['RANK']}.", flush=True)
while True: signal.pause()
"""
GANG = ("--num_processes", "2")
SINGLE = ("--log_dir", "logs", "--tee", "3")
BOTH = pytest.mark.parametrize("flags", [GANG, SINGLE], ids=["gang", "single"])


def ranks(flags: tuple[str, ...]) -> range:
    return range(2 if flags == GANG else 1)


@BOTH
@pytest.mark.parametrize(
    ("signum", "arrives"),
    [(signal.SIGTERM, "SIGTERM"), (signal.SIGINT, "SIGINT"), (signal.SIGHUP, "SIGTERM")],
    ids=["TERM", "INT", "HUP"],
)
def test_the_gang_ends_in_order(launcher: Launcher, flags: tuple[str, ...], signum: int, arrives: str) -> None:
    run = launcher.start(*flags, launcher.script(TELL), "SIGTERM", "SIGINT")
    run.says(*(f"ready {rank}." for rank in ranks(flags)))
    run.send(signum)
    done = run.wait()
    assert done.code == 128 + signum
    for rank in ranks(flags):
        assert f"rank {rank} told {arrives}." in done.out
    launcher.nothing_left()


@BOTH
def test_warnings_reach_every_rank_and_kill_nobody(launcher: Launcher, flags: tuple[str, ...]) -> None:
    run = launcher.start(*flags, launcher.script(TELL), "SIGUSR1", "SIGTERM")
    run.says(*(f"ready {rank}." for rank in ranks(flags)))
    run.send(signal.SIGUSR2)  # which nobody handles
    run.send(signal.SIGUSR1)
    run.says(*(f"rank {rank} told SIGUSR1." for rank in ranks(flags)))
    run.send(signal.SIGTERM)
    done = run.wait()
    assert done.code == 143
    assert done.out.count("told SIGUSR1") == len(ranks(flags))


def test_a_warning_while_torch_is_loaded(launcher: Launcher) -> None:
    """Slurm's warning may come at any moment; its default action would end the launcher."""
    hook = "import os, signal, sys\nif 'launch' in sys.argv or '-m' in sys.argv: pass\n"
    finder = (
        "import importlib.abc\n"
        "class Hook(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'torch.nn': os.kill(os.getpid(), signal.SIGUSR1)\n"
        "sys.meta_path.insert(0, Hook())\n"
    )
    launcher.script(hook + finder, "hook/sitecustomize.py")
    launcher.script("print('fine')")
    path = f"{launcher.here}/hook:{launcher.env()['PYTHONPATH']}"
    assert launcher(*GANG, "train.py", PYTHONPATH=path).out == "fine\n" * 2


def test_a_warning_to_a_program_that_is_the_launcher(launcher: Launcher) -> None:
    launcher.script("import os, signal\nos.kill(os.getpid(), signal.SIGUSR1)\nprint('fine')")
    assert launcher("train.py").out == "fine\n"


DEAF = """\
import os, signal
signal.signal(signal.SIGTERM, lambda *_: print(f"deaf {os.environ['RANK']}.", flush=True))
print(f"ready {os.environ['RANK']}.", flush=True)
while True: signal.pause()
"""


@BOTH
def test_who_does_not_listen_is_killed_after_the_grace(launcher: Launcher, flags: tuple[str, ...]) -> None:
    run = launcher.start("--shutdown_timeout", "5", *flags, launcher.script(DEAF))
    run.says(*(f"ready {rank}." for rank in ranks(flags)))
    run.send(signal.SIGTERM)
    done = run.wait()
    assert done.code == 143
    for rank in ranks(flags):
        assert f"deaf {rank}." in done.out
    launcher.nothing_left()


@BOTH
def test_a_second_signal_skips_the_grace(launcher: Launcher, flags: tuple[str, ...]) -> None:
    run = launcher.start("--shutdown_timeout", "1000", *flags, launcher.script(DEAF))
    run.says(*(f"ready {rank}." for rank in ranks(flags)))
    run.send(signal.SIGTERM)
    run.says(*(f"deaf {rank}." for rank in ranks(flags)))
    run.send(signal.SIGTERM)
    assert run.wait().code == 143
    launcher.nothing_left()


def test_two_signals_at_once(launcher: Launcher) -> None:
    run = launcher.start("--shutdown_timeout", "1000", *GANG, launcher.script(DEAF))
    run.says("ready 0.", "ready 1.")
    run.send(signal.SIGINT)
    run.send(signal.SIGTERM)
    assert run.wait().code in (130, 143)
    launcher.nothing_left()


def test_a_checkpoint_may_take_the_grace_when_the_launcher_is_killed(launcher: Launcher) -> None:
    """The guard waits for the fork server, which ends the ranks in order."""
    launcher.script(
        "import os, signal, time\n"
        "def save(*_):\n"
        "    time.sleep(7)\n"
        "    open('saved' + os.environ['RANK'], 'w').close()\n"
        "    raise SystemExit\n"
        "signal.signal(signal.SIGTERM, save)\n"
        "print(f'ready {os.environ[\"RANK\"]}.', flush=True)\n"
        "while True: signal.pause()\n"
    )
    run = launcher.start("--shutdown_timeout", "20", *GANG, "train.py")
    run.says("ready 0.", "ready 1.")
    run.send(signal.SIGKILL)
    run.wait()
    until("both have saved", lambda: {"saved0", "saved1"} <= set(os.listdir(launcher.here)), 20)
    launcher.nothing_left()


def test_a_rank_that_is_told_before_it_has_begun(launcher: Launcher) -> None:
    """Of sixteen ranks the first fails at once: those that are being forked just then must not outlive SIGTERM."""
    launcher.script("import os, sys, time\nif os.environ['RANK'] == '0': sys.exit(5)\ntime.sleep(1000)")
    for _ in range(2):
        run = launcher.start("--num_processes", "16", "--shutdown_timeout", "1000", "train.py")
        assert run.wait(60).code == 5


CALLER = """\
import sys
from accel.compat.commands import launch_command, launch_command_parser
launch_command(launch_command_parser().parse_args(["--cpu", *sys.argv[1:]]))
"""


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_a_program_that_calls_the_launcher_ends_with_its_ranks(launcher: Launcher, signum: signal.Signals) -> None:
    """On SIGTERM after them; when it is killed they end by themselves."""
    command = [sys.executable, "-c", CALLER]
    run = launcher.start(*GANG, launcher.script(TELL), "SIGTERM", command=command)
    run.says("ready 0.", "ready 1.")
    run.send(signum)
    assert run.wait().code == -signum
    if signum == signal.SIGTERM:
        assert "rank 0 told SIGTERM." in run.text()
    launcher.nothing_left()


OTHER = "import sys; from accel.launch.external import _run; _run([sys.executable, *sys.argv[1:]], {'RANK': '0'})"


def test_another_launcher_ends_when_the_one_that_started_it_is_killed(launcher: Launcher) -> None:
    """As `mpirun`, or DeepSpeed's."""
    run = launcher.start(launcher.script(TELL), "SIGTERM", command=[sys.executable, "-c", OTHER])
    run.says("ready 0.")
    run.send(signal.SIGKILL)
    assert run.wait().code == -signal.SIGKILL
    launcher.nothing_left()


def as_first_process(*flags: str) -> list[str]:
    """The command of a launch that is PID 1 of a namespace, as a container's command is."""
    unshare = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc", "--kill-child"]
    if shutil.which("unshare") is None or subprocess.run([*unshare, "true"], capture_output=True).returncode:
        missing("a PID namespace", "run as root, or where users may make namespaces (unshare of util-linux)")
    return [*unshare, sys.executable, "-m", "accel", "launch", *flags]


@pytest.mark.parametrize(("words", "code"), [((), 128 + signal.SIGTERM), (("SIGTERM",), 0)])
def test_one_process_that_is_pid_1_ends_on_sigterm(launcher: Launcher, words: tuple[str, ...], code: int) -> None:
    run = launcher.start(launcher.script(TELL), *words, command=as_first_process())
    run.says("ready 0.")
    (first,) = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
    os.kill(int(first), signal.SIGTERM)
    done = run.wait()
    assert done.code == code, done
    assert ("rank 0 told SIGTERM." in done.out) is bool(words)
    launcher.nothing_left()


def test_pid_1_that_inherits_an_ignored_sigchld(launcher: Launcher) -> None:
    *unshare, python, _, _, _ = as_first_process()
    ignoring = [*unshare, "sh", "-c", 'trap "" CHLD; exec "$0" -m accel launch "$@"', python]
    launcher(launcher.script("raise SystemExit(7)"), code=7, command=ignoring)


def test_pid_1_gives_its_programs_exit_code_and_reaps_what_the_program_left(launcher: Launcher) -> None:
    text = """
import os, subprocess, sys, time
assert os.getppid() == 1
orphan = subprocess.run(["sh", "-c", "true & echo $!"], capture_output=True, text=True).stdout.strip()
while os.path.exists(f"/proc/{orphan}"):  # a zombie stays there until it is reaped
    time.sleep(0.01)
sys.exit(7)
"""
    launcher(launcher.script(text), code=7, command=as_first_process())


def test_a_signal_while_the_interpreter_is_taken_down_changes_no_exit_code(launcher: Launcher) -> None:
    """The node that is the first to leave has the scheduler end the others, which are leaving too."""
    program = """\
import os, signal, sys
from accel.cli import main
class Last:
    def __init__(self): self.kill, self.getpid, self.pid, self.signum = os.kill, os.getpid, os.getpid(), signal.SIGTERM
    def __del__(self): self.getpid() == self.pid and self.kill(self.pid, self.signum)
last = Last()
sys.exit(main(["launch", "--num_processes", "2", "--cpu", "--no_python", sys.argv[1]]))
"""
    for word, code in (("true", 0), ("false", 1)):
        argv = [sys.executable, "-c", program, word]
        assert subprocess.run(argv, timeout=60, stderr=subprocess.DEVNULL).returncode == code
