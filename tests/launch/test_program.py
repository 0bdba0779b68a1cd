"""Under `accel launch` a program runs as `python program` would run it, forked ranks included."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.needs import missing

from .conftest import Launcher

# What a program can see of how it was started. Rank 0 looks; the others do too, and keep it to themselves.
LOOK = '''\
"""Its own docstring."""
import atexit, json, multiprocessing, os, pickle, sys, threading, time

here: str = "annotated"

class Mine:
    def __init__(self): self.x = 1

def square(x): return x * x

def pooled(way):
    # Closed and joined: a pool that is only dropped may end in a thread of its own, whenever it likes.
    with multiprocessing.get_context(way).Pool(1) as pool:
        found = pool.map(square, [3 if way == "spawn" else 4])
        pool.close()
        pool.join()
    return found

def look():
    import schedulers, accel_helper, random
    import numpy, torch
    main = sys.modules["__main__"]
    return {
        "name": __name__, "file": __file__, "doc": __doc__, "package": __package__, "spec": repr(__spec__),
        "annotations": str(__annotations__),
        "loader": type(__loader__).__name__,
        "names": sorted(name for name in globals() if name.startswith("__")),
        "main": main.__dict__ is globals(),
        "argv": sys.argv, "path0": sys.path[0], "flags": str(sys.flags), "executable": sys.executable,
        "schedulers": schedulers.__file__, "helper": accel_helper.__file__,
        "pickled": pickle.dumps(Mine()).hex(), "unpickled": pickle.loads(pickle.dumps(Mine())).x,
        "spawned": pooled("spawn"), "forked": pooled("fork"),
        "threads": threading.active_count(),
        "thread": threading.current_thread() is threading.main_thread(),
        "stdin": sys.stdin.read(), "encodings": [s.encoding for s in (sys.stdin, sys.stdout, sys.stderr)],
        "errors": [s.errors for s in (sys.stdin, sys.stdout, sys.stderr)],
        "same_streams": [sys.stdin is sys.__stdin__, sys.stdout is sys.__stdout__, sys.stderr is sys.__stderr__],
        "cwd": os.getcwd(), "excepthook": sys.excepthook is sys.__excepthook__, "umask": os.umask(0o22),
        "threads_of_torch": torch.get_num_threads(),
    }

if __name__ == "__main__":
    fds = {}
    for fd in os.listdir("/proc/self/fd"):
        try: fds[os.readlink(f"/proc/self/fd/{fd}")] = fd
        except OSError: pass  # of the listing itself
    json.dump(fds, open("fds." + os.environ["RANK"], "w"))
    rank = os.environ["RANK"]
    found = look()
    json.dump(found, open(f"look.{rank}", "w"))
    import numpy, random, torch
    draws = [numpy.random.rand(), random.random(), torch.rand(1).item(), torch.initial_seed()]
    json.dump(draws, open(f"draws.{rank}", "w"))
    left_open = open(f"unflushed.{rank}", "w")
    left_open.write("written at the end")
    atexit.register(lambda: open(f"atexit.{rank}", "w").write("ran"))
    threading.Thread(target=lambda: (time.sleep(0.2), open(f"thread.{rank}", "w").write("joined"))).start()
    print("é", "\\udcff", "printed")
'''


@pytest.fixture(scope="module")
def looked(shared: Launcher) -> Launcher:
    """`LOOK` has run directly (as rank `direct`) and in two forked ranks, from a directory that is not its own."""
    shared.script(LOOK, "sub dir/look.py")
    shared.script("", "sub dir/schedulers/__init__.py")
    shared.script("", "sub dir/accel_helper.py")
    direct = shared.python("sub dir/look.py", "a", "", RANK="direct", OMP_NUM_THREADS="1")
    assert direct.code == 0, direct.out
    shared("--num_processes", "2", "--log_dir", "logs", "sub dir/look.py", "a", "", OMP_NUM_THREADS="1")
    return shared


def seen(launcher: Launcher, what: str, rank: object) -> Any:
    return json.loads((launcher.here / f"{what}.{rank}").read_text())


def test_it_sees_what_it_would_see_without_a_launcher(looked: Launcher) -> None:
    direct = seen(looked, "look", "direct")
    for rank in (0, 1):
        assert seen(looked, "look", rank) == direct


def test_random_numbers_are_each_ranks_own(looked: Launcher) -> None:
    """As in processes that were started one by one: torch's default seed is random too."""
    draws = [number for rank in ("direct", 0, 1) for number in seen(looked, "draws", rank)]
    assert len(set(draws)) == 12


def test_its_ending_is_whole(looked: Launcher) -> None:
    for rank in (0, 1):
        assert (looked.here / f"unflushed.{rank}").read_text() == "written at the end"
        assert (looked.here / f"atexit.{rank}").read_text() == "ran"
        assert (looked.here / f"thread.{rank}").read_text() == "joined"


def test_its_output_has_the_same_bytes(looked: Launcher) -> None:
    assert (looked.here / "logs/rank-0.a0.log").read_bytes() == b"\xc3\xa9 \xff printed\n"


def test_no_descriptor_of_the_launcher_comes_along(looked: Launcher) -> None:
    known = re.compile(r"/dev/null|.*/rank-\d\.a0\.log|/memfd:accel-.*|/proc/\d+/fd", re.DOTALL)
    for rank in (0, 1):
        fds = seen(looked, "fds", rank)
        assert [path for path in fds if not known.fullmatch(path)] == []


ENDINGS = {
    "exit with a number": "sys.exit(3)",
    "exit with a large number": "sys.exit(259)",
    "exit with words": "sys.exit('why')",
    "exit with an object": "sys.exit({'a': 1})",
    "raise": "def inner(): raise ValueError('so\\nand so')\n    inner()",
    "raise from": "try: 1 / 0\n    except ZeroDivisionError as e: raise KeyError('é') from e",
    "a hook": "sys.excepthook = lambda *e: print('hooked', e[1])\n    raise ValueError(1)",
    "os._exit": "print('said'); sys.stdout.flush(); os._exit(7)",
    "a bad str": "class Bad(Exception):\n        def __str__(self): raise RuntimeError\n    raise Bad",
    "an exit handler": "import atexit; atexit.register(print, 'at exit'); raise OSError(2, 'gone')",
    "import": "import importlib; importlib.import_module('no_such_module')",
    "a thread": "import threading as t; main = t.main_thread()\n"
    "    t.Thread(target=lambda: print(main.join())).start(); raise ValueError",
}  # fmt: skip


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    """All endings, one an attempt of the same gang."""
    tmp = tmp_path_factory.mktemp("ended")
    launcher = Launcher(tmp, tmp)
    cases = [f"if case == {number}:\n    {text}\n" for number, text in enumerate(ENDINGS.values())]
    launcher.script("import os, sys\ncase = int(os.environ['TORCHELASTIC_RESTART_COUNT'])\n" + "".join(cases))
    launcher("--num_processes", "1", "--max_restarts", str(len(cases)), "--log_dir", "logs", "train.py")
    yield launcher
    launcher.clean_up()


@pytest.mark.parametrize(("number", "how"), list(enumerate(ENDINGS)))
def test_an_ending_is_the_interpreters(ended: Launcher, number: int, how: str) -> None:
    direct = ended.python("train.py", TORCHELASTIC_RESTART_COUNT=str(number))
    events = [json.loads(line) for line in (ended.here / "logs/launch.jsonl").read_text().splitlines()]
    codes = [event["failure"]["exit_code"] for event in events if event["event"] == "failure"]
    assert codes[number] == direct.code != 0, how
    assert ended.log(0, attempt=number) == direct.out


@pytest.mark.parametrize("text", ["x = (\n", "'\\N{no such}'\n"])
def test_what_does_not_compile(launcher: Launcher, text: str) -> None:
    launcher.script(text)
    direct = launcher.python("train.py")
    launcher("--num_processes", "2", "--log_dir", "logs", "train.py", code=1)
    assert direct.code == 1
    assert launcher.log(0) == direct.out


def test_a_keyboard_interrupt_still_ends_in_order(launcher: Launcher) -> None:
    launcher.script(
        "import atexit, os, sys\nif os.environ['RANK'] == '0':\n"
        "    atexit.register(lambda: open('atexit', 'w').write('ran'))\n    raise KeyboardInterrupt\n"
        "import signal; signal.pause()\n"
    )
    launcher("--num_processes", "2", "--log_dir", "logs", "train.py", code=130)
    assert (launcher.here / "atexit").read_text() == "ran"
    assert launcher.log(0).endswith("KeyboardInterrupt\n")


def test_exit_without_a_code_is_success(launcher: Launcher) -> None:
    launcher("--num_processes", "2", launcher.script("import sys; sys.exit()"))


MODULE = """\
import json, os, sys
seen = [__name__, __package__, sys.argv, sys.path[0], __spec__.name]
json.dump(seen, open("m." + os.environ["RANK"], "w"))
"""


def test_a_module(launcher: Launcher) -> None:
    launcher.script("", "pkg/__init__.py")
    launcher.script(MODULE, "pkg/tool.py")
    assert launcher.python("-m", "pkg.tool", "-x", RANK="direct").code == 0
    launcher("--num_processes", "2", "-m", "pkg.tool", "-x")
    launcher("-m", "pkg.tool", "-x", RANK="9")
    assert seen(launcher, "m", 0) == seen(launcher, "m", 1) == seen(launcher, "m", "direct")


def test_a_module_that_is_not_there(launcher: Launcher) -> None:
    launcher("--num_processes", "2", "--log_dir", "logs", "-m", "no.such", code=1)
    assert "No module named no" in launcher.log(0) or "No module named 'no'" in launcher.log(0)


def test_a_directory_and_an_archive(launcher: Launcher) -> None:
    import zipfile

    text = "import sys, helper; print(__name__, helper.x, sys.argv[1:])"
    launcher.script(text, "app/__main__.py")
    launcher.script("x = 5", "app/helper.py")
    with zipfile.ZipFile(launcher.here / "app.zip", "w") as archive:
        archive.writestr("__main__.py", text)
        archive.writestr("helper.py", "x = 5")
    for program in ("app", "app.zip"):
        done = launcher("--num_processes", "2", program, "a b")
        assert done.out == "__main__ 5 ['a b']\n" * 2, done


def test_a_command(launcher: Launcher) -> None:
    launcher.script('echo "$RANK of $WORLD_SIZE:$1"; yes | head -1; exit $((RANK * 0))\n', "run.sh")
    done = launcher("--num_processes", "2", "--log_dir", "logs", "--no_python", "/bin/sh", "run.sh", "$(x)")
    assert (launcher.log(0), launcher.log(1)) == ("0 of 2:$(x)\ny\n", "1 of 2:$(x)\ny\n"), done
    assert launcher("--no_python", "/bin/sh", "run.sh", "").out == "0 of 1:\ny\n"
    launcher("--log_dir", "one", "--no_python", "/bin/sh", "run.sh", "")
    assert launcher.log(0, log_dir="one") == "0 of 1:\ny\n"


def test_lines_of_several_ranks_stay_whole(launcher: Launcher) -> None:
    launcher.script("import os\nfor i in range(300): print(os.environ['RANK'] * 200, i, end=' end\\n')")
    done = launcher("--num_processes", "4", "train.py")
    lines = done.out.splitlines()
    assert len(lines) == 1200
    assert all(re.fullmatch(r"(\d)\1{199} \d+ end", line) for line in lines)


def test_one_process_is_the_program_itself(launcher: Launcher) -> None:
    """No child that it did not start, no parent in between: `os.wait` has nothing to wait for."""
    launcher.script("import os\nprint(os.getpid())\ntry: os.wait()\nexcept ChildProcessError: print('no child')")
    run = launcher.start("train.py")
    done = run.wait()
    assert done.out == f"{run.pid}\nno child\n", done
    launcher.nothing_left()


@pytest.mark.parametrize(
    "flags", [(), ("--log_dir", "logs"), ("--num_processes", "2", "--log_dir", "logs")], ids=["exec", "single", "gang"]
)
@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
def test_closed_standard_streams(launcher: Launcher, flags: tuple[str, ...], closed: str) -> None:
    launcher.script("import os\nopen('ran' + os.environ['RANK'], 'w').write('yes')\nprint('hello')")
    command = ["/bin/sh", "-c", f'exec "$0" -m accel launch "$@" {closed}', sys.executable]
    launcher(*flags, "train.py", command=command)
    assert (launcher.here / "ran0").read_text() == "yes"
    if flags:
        assert launcher.log(0) == "hello\n"


def test_the_installed_command(launcher: Launcher) -> None:
    """Where a directory of the user's has the name of one of the launcher's packages."""
    command = Path(sys.executable).with_name("accel")
    if not command.exists():
        missing("the installed command accel", "pip install -e .")
    launcher.script("raise SystemExit('not this')", "schedulers/__init__.py")
    launcher.script("print('fine')")
    assert launcher("train.py", command=[str(command), "launch"], PYTHONPATH="").out == "fine\n"
    assert (
        launcher("--num_processes", "2", "train.py", command=[str(command), "launch"], PYTHONPATH="").out
        == "fine\n" * 2
    )


def test_without_torch_one_process_runs_and_two_say_why_not(launcher: Launcher) -> None:
    launcher.script("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')", "blocked/torch.py")
    launcher.script("print('fine')")
    path = f"{launcher.here}/blocked:{launcher.env()['PYTHONPATH']}"
    assert launcher("train.py", PYTHONPATH=path).out == "fine\n"
    launcher("--log_dir", "logs", "train.py", PYTHONPATH=path)
    assert launcher.log(0) == "fine\n"
    done = launcher("--num_processes", "2", "train.py", code=1, PYTHONPATH=path)
    assert done.out == ""
    assert done.err.startswith("accel launch: torch is not installed in ")
    assert "pip install 'accel-launch[train]'" in done.err
    assert done.err.count("\n") == 1


def test_nothing_is_left_of_a_program_that_ended_well(launcher: Launcher) -> None:
    launcher.script("import subprocess; subprocess.Popen(['setsid', 'sleep', '1000'])")
    launcher("train.py")
    launcher.nothing_left()
    launcher("--log_dir", "logs", "train.py")
    launcher.nothing_left()
    launcher("--num_processes", "2", "train.py")
    launcher.nothing_left()
