"""The table of commands, their help, and what a mistake on the command line looks like."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from accel.cli import COMMANDS, exit_status, main

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_examples(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([name, "--help"])
    assert end.value.code == exit_status.OK
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: accel {name}")
    assert f"\n  accel {name}" in shown
    assert "--json" in shown or name in ("launch", "tpu-config", "completion")


@pytest.mark.parametrize("name", COMMANDS)
def test_a_commands_module_says_what_the_table_says(name: str) -> None:
    path, summary = COMMANDS[name]
    module = importlib.import_module(path)
    assert getattr(module, "SUMMARY", summary) == summary
    assert hasattr(module, "run_argv") or (hasattr(module, "run") and hasattr(module, "add_arguments"))


def test_describe_names_only_the_parts_that_every_job_has(capsys: pytest.CaptureFixture[str]) -> None:
    """Not the failure: only targets that leave a result file have it."""
    with pytest.raises(SystemExit):
        main(["describe", "--help"])
    assert "spec, plan and events of a job.\n" in capsys.readouterr().out


def test_help_lists_every_command_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == exit_status.OK
    shown = capsys.readouterr().out
    assert sorted(re.findall(r"^  ([\w-]+) +[A-Z]", shown, re.MULTILINE)) == sorted(COMMANDS)


def test_help_of_a_command_is_what_its_option_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help"]) == exit_status.OK
    assert capsys.readouterr().out.startswith("usage: accel COMMAND")
    printed = []
    for argv in (["help", "logs"], ["logs", "--help"], ["help", "launch"], ["launch", "--help"]):
        with pytest.raises(SystemExit) as ended:
            main(argv)
        assert not ended.value.code
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] != printed[2] == printed[3]


@pytest.mark.parametrize("argv", [["--help"], [], ["logs", "--help"], ["submit", "--help"]])
def test_help_fits_a_narrow_terminal(
    argv: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def words() -> list[str]:
        with contextlib.suppress(SystemExit):
            main(argv)
        shown = capsys.readouterr()
        return (shown.out or shown.err).splitlines()

    monkeypatch.setenv("COLUMNS", "100")
    wide = words()
    monkeypatch.setenv("COLUMNS", "40")
    narrow = words()
    entries = [line for line in narrow if line.startswith("  ") and "accel " not in line]
    assert max(map(len, entries)) <= 40
    below_usage = set(narrow[narrow.index("") :])
    indents = {len(line) - len(line.lstrip()) for line in entries if line in below_usage}
    assert max(indents) <= 13, "too little of the line is left for the texts"
    assert sorted(" ".join(wide).split()) == sorted(" ".join(narrow).split())


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["help", "lgs"], "accel: unknown command 'lgs'; did you mean 'logs'?"),
        (["help", "logs", "wait"], "accel help: one command at a time, not 'logs wait'"),
        (["hepl"], "accel: unknown command 'hepl'; did you mean 'help'?"),
        (["targets", "chek", "x"], "accel targets: unknown action 'chek'; did you mean 'check'?"),
        (["targets", "check"], "accel targets check: no target given: accel targets check NAME"),
        (["targets", "check", "a", "b"], "accel targets check: one target at a time, not 'a b'"),
        (["targets", "check", "nope"], "accel targets check: no target or kind 'nope' (targets: "),
        (["logs", "--tail", "-1", "x"], "accel logs: --tail: expects a whole number of 0 or more, not '-1'"),
        (["logs", "--rank", "one", "x"], "accel logs: --rank: expects a whole number of 0 or more, not 'one'"),
        (["list", "--limit", "-1"], "accel list: --limit: expects a whole number of 0 or more, not '-1'"),
        (["prune", "--keep", "-1"], "accel prune: --keep: expects a whole number of 0 or more, not '-1'"),
        (["sumbit"], "accel: unknown command 'sumbit'; did you mean 'submit'? (accel --help lists them)"),
        (["train.py"], "accel: 'train.py' is not a command; to run a script: accel submit train.py"),
        (["--target", "x"], "accel: unknown option '--target'; options follow the command: accel COMMAND [OPTIONS]"),
        (["submit", "--node", "2", "x"], "accel submit: unknown option '--node'; did you mean '--nodes'?"),
        (
            ["submit", "--num_processes", "2", "x"],
            "accel submit: unknown option '--num_processes'; use --procs-per-node (",
        ),
        (["submit", "--gpus-per-node", "2", "x"], "accel submit: unknown option '--gpus-per-node'; use --gpus ("),
        (["submit", "python", "x.py"], "accel submit: 'python' is not a script: leave out python, and give the script"),
        (
            ["launch", "--nproc_per_node", "2", "x"],
            "accel launch: unknown option '--nproc_per_node'; use --num_processes",
        ),
        (["launch", "--ipex", "x"], "accel launch: unknown option '--ipex'; leave it out"),
        (
            ["launch", "torchrun", "x.py"],
            "accel launch: 'torchrun' is not a script: leave out torchrun and its options",
        ),
        (
            ["submit", "--target", "slurm", "--option", "sbatch={C: a}", "--dry-run", "--no-python", "x"],
            "accel submit: target slurm: sbatch: sbatch has no option 'C'; use constraint",
        ),
        (
            ["submit", "--target", "ssh", "--option", "hosts=a", "--option", "key=id", "--dry-run", "--no-python", "x"],
            "accel submit: --option key: the ssh target has no such option; set IdentityFile in ~/.ssh/config",
        ),
        (["submit", "--nodes", "two", "x"], "accel submit: --nodes: not a whole number: 'two'"),
        (["submit", "--nodes", "2:", "x"], "accel submit: --nodes: not a whole number: ''"),
        (["submit", "--json"], "accel submit: nothing to run: give a script, -m MODULE, or --no-python COMMAND"),
        (["submit", "--follow", "--detach", "x"], "accel submit: --detach: not allowed with --follow"),
        (["submit", "--dry-run", "--follow", "x"], "accel submit: --dry-run and --follow contradict each other"),
        (["submit", "--env", "A=1", "--env", "A=2", "--no-python", "x"], "accel submit: --env sets A twice"),
        (["submit", "--code", "/nowhere", "x.py"], "accel submit: --code: directory /nowhere does not exist"),
        (["list", "--state", "runing"], "accel list: --state: invalid choice: 'runing'"),
        (["status"], "accel status: the following arguments are required: JOB"),
        (["wait", "--timeout", "soon", "x"], "accel wait: --timeout: not a duration: 'soon'"),
        (["prune"], "accel prune: no jobs selected: give --older-than TIME, --keep N, or JOB"),
        (["prune", "--keep", "3", "x"], "accel prune: JOB contradicts --older-than and --keep: keep one"),
    ],
)
def test_a_wrong_line_is_one_line_and_exit_2(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == exit_status.USAGE
    shown = capsys.readouterr()
    assert shown.err.startswith(message)
    assert shown.err.count("\n") == 1
    assert shown.out == ""


def test_a_script_that_is_not_there_is_named_with_its_whole_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    assert main(["submit", "--dry-run", "tain.py", "--lr", "1"]) == exit_status.USAGE
    said = f"accel submit: no script at {tmp_path.resolve()}/tain.py: it does not exist; did you mean 'train.py'?"
    assert said in capsys.readouterr().err


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCEL_DEBUG", "1")
    with pytest.raises(Exception, match="unknown command"):
        main(["sumbit"])


@pytest.mark.parametrize("line", ["--help", "submit --help", "list", "submit --dry-run --no-python true"])
def test_what_is_typed_often_imports_nothing_heavy(line: str, tmp_path: Path) -> None:
    """torch and SDKs by rule; the others because each costs about as much time as a Python start."""
    heavy = {"torch", "numpy", "rich", "yaml", "msgspec", "asyncio", "psutil", "importlib.metadata", "shutil"}
    report = (
        "import sys, accel.cli; code = accel.cli.main(sys.argv[1:]);"
        "print(*sorted(sys.modules), file=sys.stderr); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", report, *shlex.split(line)],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], "ACCEL_HOME": str(tmp_path), "ACCEL_CONFIG_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert heavy.isdisjoint(done.stderr.split())
