"""Completion, asked by the shells themselves where they are installed, and what it costs."""

from __future__ import annotations

import os
import re
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from accel.cli import COMMANDS, exit_status, main
from accel.cli.completion import candidates
from accel.launch.flags import GROUPS
from tests.needs import missing

from .conftest import Accel


def said(accel: Accel, *words: str) -> list[str]:
    return [line.partition("\t")[0] for line in accel("__complete", *words).splitlines()]


def test_commands(accel: Accel) -> None:
    assert said(accel, "") == [*COMMANDS, "help"]
    assert said(accel, "st") == ["status"]
    assert "status\tShow the state of a job\n" in accel("__complete", "st")
    assert said(accel, "nothing") == []
    assert said(accel) == [*COMMANDS, "help"]
    assert said(accel, "help", "st") == ["status"]


def test_options(accel: Accel) -> None:
    assert "--num-processes" in said(accel, "launch", "--num")
    assert "--num-processes" in said(accel, "launch", "--num_p")
    assert said(accel, "list", "--st") == ["--state"]
    assert said(accel, "list", "--state", "run") == ["running"]
    assert said(accel, "list", "--state=run") == ["--state=running"]
    assert said(accel, "list", "--state", "=", "run") == ["running"]
    assert "float32" in said(accel, "estimate-memory", "x", "--dtypes", "")
    assert said(accel, "completion", "") == ["bash", "zsh", "fish"]
    assert said(accel, "estimate-memory", "x", "--dtypes", "float32", "b") == ["bfloat16"]
    assert said(accel, "estimate-memory", "x", "--dtypes", "float32", "--js") == ["--json"]
    assert said(accel, "launch", "train.py", "--") == []  # the script's own
    assert said(accel, "launch", "--num_processes", "2", "--cp") == ["--cpu"]


def test_values_of_settings() -> None:
    def offered(*words: str) -> list[str]:
        return [value for value, _ in candidates(list(words))]

    assert offered("launch", "--mixed_precision", "") == ["no", "fp16", "bf16", "fp8"]
    assert offered("launch", "--mixed-precision", "f") == ["fp16", "fp8"]
    assert offered("launch", "--mixed_precision=f") == ["--mixed_precision=fp16", "--mixed_precision=fp8"]
    assert offered("launch", "--mixed_precision", "=", "b") == ["bf16"]
    assert offered("launch", "--rdzv_backend", "s") == ["static"]
    assert offered("launch", "--fsdp_offload_params", "") == ["true", "false"]
    assert offered("launch", "--zero_stage", "") == ["0", "1", "2", "3"]
    assert offered("launch", "--num_processes", "") == []
    assert offered("config", "default", "--mixed_precision", "b") == ["bf16"]
    for setting in (setting for group in GROUPS.values() for setting in group):
        if setting.choices:
            assert offered("launch", setting.spellings()[-1], "") == list(setting.choices)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_completes_its_options(command: str, accel: Accel) -> None:
    assert "--help" in said(accel, command, "--he")


def takes_jobs() -> list[str]:
    """The commands whose usage says JOB, as people read it."""
    usages = {name: usage(name) for name in COMMANDS}
    return [name for name, text in usages.items() if re.search(r"(?<!after )\bJOB\b", text)]


def usage(command: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "accel", command, "--help"], capture_output=True, text=True, check=True
    )
    return done.stdout.partition("\n\n")[0]


def test_targets_and_jobs(accel: Accel) -> None:
    (accel.here / "accel.yaml").write_text("targets:\n  lab: {kind: local}\n")
    job = accel("submit", "--no-python", "true").strip()
    accel("wait", job)
    assert said(accel, "submit", "--target", "la") == ["lab"]
    assert {"lab", "local", "ssh"} <= set(said(accel, "targets", "check", ""))
    assert said(accel, "targets", "") == ["check"]
    for command in takes_jobs():
        assert said(accel, command, "") == ["@last", job]
        assert said(accel, command, job[:4]) == [job]
    assert said(accel, "submit", "--after", "") == ["@last", job]
    assert f"{job}\ttrue, succeeded" in accel("__complete", "status", "")


def test_a_broken_file_is_no_noise(accel: Accel) -> None:
    (accel.here / "accel.yaml").write_text("targets: [1]\n")
    done = accel.finish("__complete", "submit", "--target", "")
    assert (done.stdout, done.stderr) == (b"", b"")


def test_it_is_cheap(accel: Accel) -> None:
    code = (
        "import sys; from accel.cli import main; main(['__complete', *sys.argv[1:]]);"
        "print('loaded', *sorted(sys.modules), file=sys.stderr)"
    )
    for words in (["st"], ["status", ""], ["launch", "--n"]):
        command = [sys.executable, "-c", code, *words]
        done = subprocess.run(command, cwd=accel.here, env=accel.env(), capture_output=True, text=True, check=True)
        assert {"torch", "numpy", "rich", "asyncio"}.isdisjoint(done.stderr.split())


def test_alone_it_shows_a_map(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == exit_status.USAGE
    shown = capsys.readouterr().err
    named = {word.strip(",;") for line in shown.splitlines()[2:-1] for word in line[30:].split()}
    assert set(COMMANDS) <= named
    assert len(shown.splitlines()) <= 20


def test_another_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "tcsh"]) == exit_status.USAGE
    assert "invalid choice: 'tcsh'" in capsys.readouterr().err


@pytest.fixture
def path(accel: Accel, tmp_path: Path) -> str:
    """PATH with an `accel` on it."""
    (tmp_path / "bin").mkdir()
    script = tmp_path / "bin/accel"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -m accel "$@"\n')
    script.chmod(0o755)
    (accel.here / "accel.yaml").write_text("targets:\n  lab: {kind: local}\n")
    (accel.here / "train file.py").touch()
    return f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"


def in_shell(accel: Accel, shell: str, path: str, *argv: str) -> str:
    if shutil.which(shell) is None:
        missing(shell, f"apt-get install {shell}")
    env = accel.env(PATH=path, HOME=str(accel.here), TERM="dumb")
    done = subprocess.run(
        [shell, *argv], cwd=accel.here, env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stderr == ""
    return done.stdout


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("sta", "status"),
        ("submit --target la", "lab"),
        ("submit --target = la", "lab"),
        ("targets che", "check"),
    ],
)
def test_in_bash(accel: Accel, path: str, words: str, expected: str) -> None:
    code = (
        'eval "$(accel completion bash)"; complete -p accel >/dev/null || exit 3; '
        f"COMP_WORDS=(accel {words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); _accel accel; "
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    assert in_shell(accel, "bash", path, "--norc", "-c", code).split() == [expected]


@pytest.mark.parametrize(
    ("line", "expected"),
    [("accel sta", ["status"]), ("accel submit --target la", ["lab"]), ("accel launch tra", ["train file.py"])],
)
def test_in_fish(accel: Accel, path: str, line: str, expected: list[str]) -> None:
    code = f"accel completion fish | source; complete -C '{line}'"
    found = in_shell(accel, "fish", path, "--no-config", "-c", code).splitlines()
    assert [entry.partition("\t")[0].replace("\\ ", " ") for entry in found] == expected


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("accel stat\t", "accel status "),
        ("accel submit --target la\t", "--target lab "),
        ("accel launch tra\t", "train\\ file.py"),
    ],
)
def test_in_zsh(accel: Accel, path: str, typed: str, expected: str) -> None:
    """On a terminal, as zsh completes nowhere else."""
    import pty

    if shutil.which("zsh") is None:
        missing("zsh", "apt-get install zsh")
    env = accel.env(PATH=path, HOME=str(accel.here), TERM="dumb", ZDOTDIR=str(accel.here))
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(accel.here)
        os.execvpe("zsh", ["zsh", "-f", "-i"], env)
    try:
        os.write(
            terminal, b"autoload -U compinit; compinit -D -u; eval \"$(accel completion zsh)\"; PS1=; echo rea''dy\n"
        )
        assert "ready" in until(terminal, "ready")
        os.write(terminal, typed.encode())
        assert expected in until(terminal, expected)
    finally:
        os.kill(pid, 9)
        os.close(terminal)
        os.waitpid(pid, 0)


def until(terminal: int, text: str) -> str:
    """What the terminal shows, up to `text`, or all that it showed in a minute."""
    shown = ""
    end = time.monotonic() + 60
    while text not in shown and time.monotonic() < end:
        if select.select([terminal], [], [], 0.2)[0]:
            shown += os.read(terminal, 4096).decode(errors="replace")
            shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\x07", "", shown)
            while "\b" in shown:
                shown = re.sub(r"[^\b]?\b", "", shown, count=1)
    return shown
