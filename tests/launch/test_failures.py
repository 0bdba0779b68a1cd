"""What people are told when a rank fails, from real ranks."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.needs import missing

from .conftest import Launcher

GANG = ("--num_processes", "2", "--log_dir", "logs")
SINGLE = ("--log_dir", "logs")
WAIT = "\nimport signal\nwhile True: signal.pause()\n"


def failure(launcher: Launcher) -> dict[str, Any]:
    """The failure in `launch.jsonl`."""
    events = [json.loads(line) for line in (launcher.here / "logs/launch.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events] == ["attempt", "failure"]
    assert all(event["schema"] == 1 and event["time"] > 0 for event in events)
    return dict(events[-1]["failure"])


def test_the_first_rank_and_not_its_echoes(launcher: Launcher) -> None:
    launcher.script(
        "import os, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "dist.barrier()\n"
        "if dist.get_rank() == 1: raise ValueError('the cause')\n"
        "dist.all_reduce(torch.ones(3))\n"
    )
    done = launcher(*GANG, "train.py", code=1)
    told = failure(launcher)
    assert (told["rank"], told["node"], told["attempt"], told["exit_code"]) == (1, 0, 0, 1)
    assert told["message"] == "ValueError: the cause"
    assert told["log"] == "logs/rank-1.a0.log"
    assert "accel/launch" not in told["traceback"]
    assert "failed first, in attempt 0: exited with code 1" in done.err
    assert "  | ValueError: the cause\n" in done.err
    assert "  log:    logs/rank-1.a0.log\n" in done.err
    assert "  others: rank 0 " in done.err
    assert done.err.count("accel launch: ") == 1


def test_one_process_without_logs_explains_its_error(launcher: Launcher) -> None:
    launcher.script(
        "import os, torch, accel\n"
        "accel.Accelerator()\n"
        "print(os.environ.get('ACCEL_EXPLAIN_ERRORS'))\n"
        "raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2 GiB')\n"
    )
    done = launcher("train.py", code=1)
    assert done.out == "None\n"
    trace, _, report = done.err.partition("accel launch: ")
    assert trace.endswith("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\n")
    assert report.startswith("the program failed\n  cause:  the GPU's memory is full\n  remedy: smaller batch")


def test_ranks_get_a_short_grace_after_a_failure(launcher: Launcher) -> None:
    """No signal handler runs inside a collective that never ends."""
    launcher.script(
        "import os, pathlib, signal, time\n"
        "if os.environ['RANK'] == '1':\n"
        "    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "    pathlib.Path('ready').touch()\n"
        "    while True: signal.pause()\n"
        "while not os.path.exists('ready'): time.sleep(0.01)\n"
        "raise ValueError('the cause')\n"
    )
    done = launcher("--shutdown_timeout", "1000", *GANG, "train.py", code=1)
    assert "ValueError: the cause" in done.err
    launcher.nothing_left()


def test_a_killed_rank_and_not_its_peers_errors(launcher: Launcher) -> None:
    launcher.script(
        "import os, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "dist.barrier()\n"
        "if dist.get_rank() == 1: os.kill(os.getpid(), 9)\n"
        "while True: dist.all_reduce(torch.ones(3))\n"
    )
    done = launcher(*GANG, "train.py", code=137)
    told = failure(launcher)
    assert (told["rank"], told["exit_code"], told["how"]) == (1, 137, "was killed by SIGKILL (exit code 137)")
    assert "others: rank 0 " in done.err


CASES: dict[str, tuple[str, int, dict[str, str]]] = {
    "import": (
        "import no_such_package",
        1,
        {"reason": "setup", "message": "ModuleNotFoundError: No module named 'no_such_package'"},
    ),
    "words": ("import sys; sys.exit('why not')", 1, {"message": "SystemExit: why not"}),
    "number": ("import sys; sys.exit(42)", 42, {"how": "exited with code 42", "message": "rank 0 exited with code 42"}),
    "memory": ("raise MemoryError", 1, {"reason": "out_of_memory"}),
    "segv": (
        "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
        139,
        {"how": "was killed by SIGSEGV (exit code 139)"},
    ),
    "term": (
        "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
        143,
        {"how": "was killed by SIGTERM (exit code 143)"},
    ),
    "disk": ("import os; os.write(os.open('/dev/full', os.O_WRONLY), b'x')", 1, {"cause": "a disk is full"}),
    "closed": ("import os; os.closerange(3, 99); f = open('mine', 'w'); raise ValueError(1)", 1, {}),
}


def cases_script(launcher: Launcher) -> str:
    cases = [f"if case == {number}:\n    {text}\n" for number, (text, _, _) in enumerate(CASES.values())]
    head = f"import os\nif os.environ['RANK'] != '0':\n    {WAIT.strip().replace(chr(10), chr(10) + '    ')}\n"
    return launcher.script(head + "case = int(os.environ['TORCHELASTIC_RESTART_COUNT'])\n" + "".join(cases))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_cases(launcher: Launcher, method: str) -> None:
    """One a attempt."""
    flags = (*GANG, "--start_method", method, "--max_restarts", str(len(CASES) - 1))
    done = launcher(*flags, cases_script(launcher), code=1)
    events = [json.loads(line) for line in (launcher.here / "logs/launch.jsonl").read_text().splitlines()]
    told = [event["failure"] for event in events if event["event"] == "failure"]
    for number, (case, (_, code, wanted)) in enumerate(CASES.items()):
        found = told[number]
        assert (found["rank"], found["attempt"], found["exit_code"]) == (0, number, code), case
        if case != "words" or method == "fork":  # a spawned rank's last words stand in its log alone
            assert {key: found[key] for key in wanted} == wanted, case
        assert f"log:    logs/rank-0.a{number}.log" in done.err
    assert sys.executable in told[0]["remedy"]
    assert "no_such_package" in told[0]["traceback"]
    assert (launcher.here / "mine").read_text() == ""


@pytest.mark.parametrize("case", CASES)
def test_cases_of_one_process(launcher: Launcher, case: str) -> None:
    _, code, wanted = CASES[case]
    number = str(list(CASES).index(case))
    text = (launcher.here / cases_script(launcher)).read_text()
    launcher.script(text.replace("os.environ['TORCHELASTIC_RESTART_COUNT']", number))
    launcher(*SINGLE, "train.py", code=code)
    found = failure(launcher)
    assert (found["rank"], found["log"]) == (0, "logs/rank-0.a0.log")
    if case != "words":
        assert {key: found[key] for key in wanted} == wanted


def test_a_command_that_is_python(launcher: Launcher) -> None:
    """Its traceback is read from its log."""
    launcher.script("raise KeyError('from far away')")
    launcher(*GANG, "--no_python", sys.executable, "train.py", code=1)
    told = failure(launcher)
    assert told["message"] == "KeyError: 'from far away'"
    assert "line 1" in told["traceback"]


@pytest.mark.parametrize(("text", "mode", "code"), [("#!/no/such/interpreter\n", 0o755, 127), ("\x7fELF", 0o755, 126)])
def test_a_command_that_cannot_be_run(launcher: Launcher, text: str, mode: int, code: int) -> None:
    launcher.script(text, "run")
    (launcher.here / "run").chmod(mode)
    launcher(*GANG, "--no_python", "./run", code=code)
    assert failure(launcher)["reason"] == "setup"
    for flags in (SINGLE, ()):
        done = launcher(*flags, "--no_python", "./run", code=code)
        assert done.err.startswith("accel launch: cannot run './run': ")
        assert done.err.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "code", "said"),
    [
        ("no-such-command", 127, "command 'no-such-command' not found on PATH"),
        ("./train.py", 126, "'./train.py' is not executable: chmod +x"),
    ],
)
def test_a_command_that_is_not_there(launcher: Launcher, name: str, code: int, said: str) -> None:
    """As a shell's, so that no scheduler tries it again."""
    launcher.script("print('ran')")
    for flags in (GANG, SINGLE, ()):
        done = launcher(*flags, "--no_python", name, code=code)
        assert done.err.startswith(f"accel launch: {said}"), done


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("no.py",), "no script at "),
        (("two.yaml", "train.py"), "two.yaml is a configuration file (its name ends in .yaml), not a Python program: "),
        (("--log_dir", "/proc", "train.py"), "--log_dir /proc cannot be written to: "),
        (("--log_dir", "train.py", "train.py"), "--log_dir train.py cannot be written to: File exists"),
        (
            ("--log_dir", "train.py/x", "--num_processes", "2", "train.py"),
            "--log_dir train.py/x cannot be written to: Not a dir",
        ),
        (
            ("--num_processes", "2", "--rdzv_conf", "timeout=soon", "train.py"),
            "--rdzv_conf timeout must be seconds, not 'soon'",
        ),
        (("--log_dir", "logs", "--tee", "7", "train.py"), "--tee takes 0 to 3"),
    ],
)
def test_what_cannot_be_is_one_line(launcher: Launcher, argv: tuple[str, ...], said: str) -> None:
    launcher.script("print('ran')")
    launcher.script("num_processes: 2", "two.yaml")
    done = launcher(*argv, code=2)
    assert done.err.startswith(f"accel launch: {said}"), done
    assert done.out == ""
    launcher.nothing_left()


def test_a_port_in_use(launcher: Launcher) -> None:
    with socket.create_server(("", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = launcher("--num_processes", "2", "--main_process_port", port, launcher.script("print('ran')"), code=1)
    assert done.err.startswith(f"accel launch: port {port} (--main_process_port) is in use on this machine")
    assert done.out == ""
    launcher.nothing_left()


def test_quiet(launcher: Launcher) -> None:
    done = launcher("--quiet", "--num_processes", "2", launcher.script("import sys; sys.exit(3)"), code=3)
    assert done.err == ""


def test_nobody_reads_the_report(launcher: Launcher) -> None:
    """The exit code is the rank's, even when standard error is a pipe whose reader has gone."""
    launcher.script("import sys; sys.exit(3)")
    command = ["/bin/sh", "-c", '{ "$0" -m accel launch "$@"; echo $? >code; } 2>&1 | true', sys.executable]
    launcher("--num_processes", "2", "train.py", command=command)
    assert (launcher.here / "code").read_text() == "3\n"


def test_a_log_that_cannot_be_opened(launcher: Launcher) -> None:
    os.makedirs(launcher.here / "logs/rank-1.a0.log")
    done = launcher(*GANG, launcher.script("import time; time.sleep(1000)"), code=1)
    told = failure(launcher)
    assert told["rank"] == 1
    assert "Is a directory" in told["message"]
    assert "Is a directory" in done.err


@pytest.fixture
def group(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A control group (v1 or v2) of this test's own, of the kind that `request.param` names."""
    kind, name = request.param, f"accel-test-{os.getpid()}"
    made: Path | None = None
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        v1 = kind in controllers.split(",")
        if not v1 and controllers:
            continue
        candidate = Path(f"/sys/fs/cgroup/{kind if v1 else ''}{path}") / name
        try:
            candidate.mkdir()
        except OSError:
            continue
        limit = candidate / {"memory": "memory.limit_in_bytes" if v1 else "memory.max", "pids": "pids.max"}[kind]
        if os.access(limit, os.W_OK):
            made = candidate
            break
        candidate.rmdir()
    if made is None:
        missing(f"a {kind} control group", "run as root where /sys/fs/cgroup can be written")
    yield made
    made.rmdir()


def set_limit(group: Path, kind: str, value: int) -> None:
    names = ["memory.limit_in_bytes", "memory.max"] if kind == "memory" else ["pids.max"]
    for name in [*names, "memory.swap.max" if kind == "memory" else ""]:
        if name and (group / name).exists():
            (group / name).write_text("0" if "swap" in name else str(value))


def enter(group: Path) -> None:
    (group / "cgroup.procs").write_text(str(os.getpid()))


@pytest.mark.parametrize("group", ["memory"], indirect=True)
def test_out_of_memory(launcher: Launcher, group: Path) -> None:
    """A real one, by the kernel, at a control group's limit."""
    set_limit(group, "memory", 900 << 20)
    launcher.script(
        f"import os\nif os.environ['RANK'] == '1':\n    hog = [bytearray(b'x' * (1 << 20)) for _ in range(4096)]{WAIT}"
    )
    run = launcher.start(*GANG, "train.py", preexec=lambda: enter(group))
    assert run.wait().code == 137
    launcher.nothing_left()
    told = failure(launcher)
    assert (told["rank"], told["reason"]) == (1, "out_of_memory")
    assert "control group" in told["cause"]
    assert "--memory" in told["remedy"]


@pytest.mark.parametrize("group", ["pids"], indirect=True)
def test_no_more_processes(launcher: Launcher, group: Path) -> None:
    """As many as the limit are tried, and some find no room beside the launcher; of more nothing is started."""
    set_limit(group, "pids", 20)
    launcher.script(WAIT)
    refused = "accel launch: --num_processes 21: this machine can run at most 20 processes (pids.max of its control"
    for count, code, said in (("21", 2, refused), ("20", 1, "cannot start a process: Resource temporarily unavail")):
        argv = ("--num_processes", count, "--log_dir", "logs", "train.py")
        done = launcher.start(*argv, preexec=lambda: enter(group)).wait()
        launcher.nothing_left()
        assert (done.code, said in done.err) == (code, True), done


@pytest.mark.parametrize("flags", [GANG, SINGLE], ids=["gang", "single"])
def test_a_job_that_was_started_before_goes_on_counting_its_attempts(
    launcher: Launcher, flags: tuple[str, ...]
) -> None:
    launcher.script("import os, sys\nprint(os.environ['TORCHELASTIC_RESTART_COUNT'])\nsys.exit(3)\n")
    launcher(*flags, "train.py", code=3, ACCEL_ATTEMPT="2")
    told = failure(launcher)
    assert (told["attempt"], told["log"]) == (2, f"logs/rank-{told['rank']}.a2.log")
    assert launcher.log(told["rank"], attempt=2) == "2\n"
    done = launcher(*flags, "train.py", code=2, ACCEL_ATTEMPT="two")
    assert "ACCEL_ATTEMPT must be a whole number, not 'two'" in done.err
