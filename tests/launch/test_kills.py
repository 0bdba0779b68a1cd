"""Whatever is killed, with whatever, whenever: no process is left, and the exit code tells the truth."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from .conftest import HOSTILE_NAME, Launcher, Run, until

GRACE_S = 2.0

# A training run as it is met in the wild: data-loader workers, and a program that has left for a session of its own.
BUSY = """\
import os, subprocess, sys
import torch.utils.data
print(f"pid {os.environ['RANK']} {os.getpid()}.", flush=True)
subprocess.Popen(["setsid", "sleep", "1000"])
if os.fork() == 0:  # a daemon that has forgotten where it came from
    os.setsid()
    import signal
    while True: signal.pause()
data = torch.utils.data.DataLoader(list(range(8)), num_workers=2, persistent_workers=True)
first = next(iter(data))
print(f"running {os.environ['RANK']}.", flush=True)
while True:
    for batch in data: pass
"""

# Rank 1 fails; rank 0 is told to end and takes its time.
GRACE = """\
import os, signal, subprocess, sys
subprocess.Popen(["setsid", "sleep", "1000"])
if os.environ["RANK"] == "1":
    while not os.path.exists("ready"): pass
    sys.exit(3)
signal.signal(signal.SIGTERM, lambda *_: print("ending", flush=True))
open("ready", "w").close()
while True: signal.pause()
"""

# Says when torch's own import is under way.
HOOK = """\
import importlib.abc, os, sys, time
class Hook(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "torch.nn":
            os.write(1, b"importing torch\\n")
            time.sleep(600)  # it is killed in here: later it would take the signal itself
sys.meta_path.insert(0, Hook())
"""


@dataclass(frozen=True)
class Kill:
    who: str
    signum: signal.Signals
    code: int
    when: str = "running"
    flags: tuple[str, ...] = ("--num_processes", "2")
    twice: bool = False
    or_code: int | None = None  # where the first victim's end may be told before the second one's

    def __str__(self) -> str:
        flags = "-".join(flag.strip("-") for flag in self.flags)
        return f"{self.when}-{flags}-{self.who}-{self.signum.name}{'-twice' if self.twice else ''}"


S = signal.Signals
EXEC: tuple[str, ...] = ()
SINGLE = ("--log_dir", "logs")

KILLS = [
    # The launcher. Signals that it does not handle are its death, as for any program; its ranks still end in order.
    *(Kill("launcher", S(number), -number) for number in (S.SIGKILL, S.SIGSEGV, S.SIGQUIT, S.SIGABRT)),
    *(Kill("launcher", S(number), 128 + number) for number in (S.SIGTERM, S.SIGINT, S.SIGHUP)),
    Kill("launcher's group", S.SIGKILL, -9),
    Kill("launcher's group", S.SIGINT, 130),
    # The fork server and the guard.
    Kill("server", S.SIGKILL, 1),
    Kill("server", S.SIGSEGV, 1),
    Kill("server", S.SIGTERM, 143),
    Kill("server", S.SIGQUIT, 143),
    Kill("guard", S.SIGKILL, 143),
    Kill("launcher+server", S.SIGKILL, -9),
    Kill("server+launcher", S.SIGKILL, -9),
    Kill("guard+launcher", S.SIGKILL, -9),
    # Ranks.
    *(
        Kill("rank 0", S(number), 128 + number)
        for number in (S.SIGKILL, S.SIGTERM, S.SIGSEGV, S.SIGQUIT, S.SIGINT, S.SIGABRT)
    ),
    *(Kill("rank 1", S(number), 128 + number) for number in (S.SIGKILL, S.SIGHUP, S.SIGBUS)),
    Kill("rank 0+launcher", S.SIGKILL, -9),
    Kill("rank 0+server", S.SIGKILL, 1, or_code=137),
    # One process, which is the launcher itself.
    *(
        Kill("launcher", S(number), -number, flags=EXEC)
        for number in (S.SIGKILL, S.SIGTERM, S.SIGHUP, S.SIGSEGV, S.SIGQUIT, S.SIGINT)
    ),
    # One process with its log in a file.
    Kill("launcher", S.SIGKILL, -9, flags=SINGLE),
    Kill("launcher", S.SIGSEGV, -11, flags=SINGLE),
    *(Kill("launcher", S(number), 128 + number, flags=SINGLE) for number in (S.SIGTERM, S.SIGINT, S.SIGHUP)),
    *(Kill("rank 0", S(number), 128 + number, flags=SINGLE) for number in (S.SIGKILL, S.SIGTERM, S.SIGSEGV)),
    # Before anything runs.
    Kill("launcher", S.SIGKILL, -9, when="importing"),
    *(Kill("launcher", S(number), -number, when="importing") for number in (S.SIGTERM, S.SIGINT, S.SIGHUP)),
    # While the gang is being ended after a failure: that failure stays the result.
    Kill("launcher", S.SIGKILL, -9, when="grace"),
    Kill("launcher", S.SIGTERM, 3, when="grace"),
    Kill("launcher", S.SIGINT, 3, when="grace", twice=True),
    Kill("server", S.SIGKILL, 3, when="grace"),
    Kill("rank 0", S.SIGKILL, 3, when="grace"),
]

# What `make test` tries: each victim by itself, and each moment, by the signal that leaves it no choice.
_VICTIMS = ("launcher", "server", "guard", "rank 0")
FEW = {one for one in KILLS if one.signum == S.SIGKILL and one.who in _VICTIMS}


class Ahead:
    """Runs scenarios some steps before their tests ask how they went: most of each is waiting."""

    def __init__(self, kills: list[Kill], tmp: Path) -> None:
        self._kills, self._tmp = kills, tmp
        self._width = 1 if "PYTEST_XDIST_WORKER" in os.environ else 4
        self._pool = ThreadPoolExecutor(self._width)
        self._begun: dict[Kill, Future[None]] = {}

    def run(self, kill: Kill) -> None:
        at = self._kills.index(kill)
        for one in self._kills[at : at + self._width]:
            if one not in self._begun:
                self._begun[one] = self._pool.submit(self._scenario, one)
        self._begun[kill].result()

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def _scenario(self, kill: Kill) -> None:
        here = self._tmp / f"{self._kills.index(kill)} {HOSTILE_NAME}"
        here.mkdir()
        launcher = Launcher(here, here)
        try:
            scenario(launcher, kill)
        finally:
            launcher.clean_up()


@pytest.fixture(scope="module")
def ahead(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ahead]:
    chosen: list[Kill] = []
    for item in request.session.items:
        parameters = getattr(item, "callspec", None)
        kill = parameters and parameters.params.get("kill")
        chosen += [kill] if isinstance(kill, Kill) else []
    runner = Ahead(chosen, tmp_path_factory.mktemp("kills"))
    yield runner
    runner.close()


@pytest.mark.parametrize(
    "kill", [pytest.param(kill, marks=() if kill in FEW else pytest.mark.long, id=str(kill)) for kill in KILLS]
)
def test_nothing_is_left(ahead: Ahead, kill: Kill) -> None:
    ahead.run(kill)


def scenario(launcher: Launcher, kill: Kill) -> None:
    run = _start(launcher, kill)
    victims = [_pid(launcher, run, kill, who) for who in kill.who.split("+")]
    for pid in victims:
        os.kill(pid, kill.signum)
    if kill.twice:  # another one, since two of a kind can become one on their way
        run.send(signal.SIGTERM)
    if kill.who == "guard":  # the gang does without it
        run.send(signal.SIGTERM)
    done = run.wait(GRACE_S + 60)
    launcher.nothing_left()
    assert done.code in (kill.code, kill.or_code), done
    assert kill.who.startswith("rank") or "/accel/launch/" not in done.err, done


def _start(launcher: Launcher, kill: Kill) -> Run:
    script = launcher.script(GRACE if kill.when == "grace" else BUSY)
    # In a grace, there is time enough to find the victim.
    grace = "60" if kill.twice else "8" if kill.when == "grace" else str(GRACE_S)
    env = {}
    if kill.when == "importing":
        launcher.script(HOOK, "hook/sitecustomize.py")
        env["PYTHONPATH"] = f"{launcher.here}/hook:{launcher.env()['PYTHONPATH']}"
    run = launcher.start("--shutdown_timeout", grace, *kill.flags, script, command=None, preexec=None, within=env)
    if kill.when == "importing":
        run.says("importing torch")
    elif kill.when == "grace":
        run.says("ending")
    else:
        ranks = ["0", "1"] if "--num_processes" in kill.flags else ["0"]
        if kill.flags == SINGLE:
            until("the log", lambda: _log(launcher).count("running 0.") == 1)
        else:
            run.says(*(f"running {rank}." for rank in ranks))
    return run


def _log(launcher: Launcher) -> str:
    path = launcher.here / "logs/rank-0.a0.log"
    return path.read_text() if path.exists() else ""


def _pid(launcher: Launcher, run: Run, kill: Kill, who: str) -> int:
    if who == "launcher":
        return run.pid
    if who == "launcher's group":
        return -run.pid
    if who in ("server", "guard"):
        return run.child(guard=who == "guard")
    text = run.text() + _log(launcher)
    if kill.when == "grace":
        server = run.child(guard=False)
        with open(f"/proc/{server}/task/{server}/children") as file:
            return int(file.read().split()[0])
    return int(text.partition(f"pid {who.removeprefix('rank ')} ")[2].partition(".")[0])
