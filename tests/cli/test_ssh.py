"""The options of the command line that say which machines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from accel.cli import exit_status, main


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCEL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("ACCEL_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts").write_text("a slots=2\nb slots=2\nc slots=2\n")
    targets = "lab: {kind: ssh, hosts: [x, 'y[1-3]']}, spared: {kind: ssh, spares: 1}"
    (tmp_path / "accel.yaml").write_text(f"targets: {{{targets}}}\n")


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["submit", "--dry-run", "--json", *words, "--no-python", "true"]) == exit_status.OK
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize(
    ("words", "nodes", "candidates", "taken"),
    [
        (["--target", "ssh", "--hosts", "gpu[01-04]"], 4, "gpu01, gpu02, gpu03, gpu04", 4),
        (["--target", "ssh", "--hosts", "a,b,c", "--spares", "1"], 2, "a, b, c", 3),
        (["--target", "ssh", "--hosts", "gpu*", "--nodes", "3"], 3, "gpu*", 3),
        (["--target", "lab"], 1, "x, y1, y2, y3", 1),
        (["--target", "lab", "--nodes", "3", "--spares", "1"], 3, "x, y1, y2, y3", 4),
        (["--target", "lab", "--hosts", "a,b"], 2, "a, b", 2),
        (["--target", "spared", "--hosts", "a,b,c"], 2, "a, b, c", 3),
        (["--target", "spared", "--hosts", "a,b,c", "--option", "spares=2"], 1, "a, b, c", 3),
        (["--target", "spared", "--hosts", "a,b,c", "--spares", "0"], 3, "a, b, c", 3),
    ],
)
def test_machines_on_the_line(
    words: list[str], nodes: int, candidates: str, taken: int, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = planned(capsys, *words)
    assert plan["settings"]["nodes"] == nodes
    count = "one" if taken == 1 else taken
    assert plan["actions"][:2] == [["examine", candidates], ["take", f"the {count} of them with the most free slots"]]


def test_a_hostfile_is_found_from_here_and_replaces_the_targets_hosts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    plan = planned(capsys, "--target", "lab", "--hostfile", "hosts")
    assert plan["settings"]["nodes"] == 3
    assert plan["actions"][0] == ["examine", f"hostfile {tmp_path / 'hosts'}"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--hosts", "a", "--hostfile", "hosts"], "accel submit: --hosts and --hostfile contradict each other"),
        (["--hosts", "gpu*"], "accel submit: --hosts gpu* is a pattern: give the number of nodes with --nodes"),
        (["--hosts", "a,b", "--spares", "2"], "accel submit: --spares 2 leaves none of the 2 hosts to run on"),
        (["--hosts", "a,a"], "accel submit: --hosts: 'a' is listed twice"),
        (["--hosts", "a", "--option", "spares=1"], "accel submit: spares: 1 of target ssh leaves none of the 1 host "),
        (["--hostfile", "nowhere"], "accel submit: hostfile nowhere: no such file or directory\n"),
        (["--hostfile", "."], "accel submit: hostfile .: is a directory\n"),
    ],
)
def test_machines_that_cannot_be_meant(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", "--target", "ssh", *words, "--no-python", "true"]) == exit_status.USAGE
    assert capsys.readouterr().err.startswith(said)


def test_what_cannot_be_checked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["targets", "check", "local"]) == exit_status.USAGE
    assert "has no machines that can be checked" in capsys.readouterr().err
    assert main(["targets", "chekc", "lab"]) == exit_status.USAGE
    assert "unknown action 'chekc'; did you mean 'check'?" in capsys.readouterr().err


def test_setup_commands_are_words_and_come_after_the_targets(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--setup", "pip install -e '.[extra one]'", "--setup", "echo $HOME"]
    plan = planned(capsys, "--target", "lab", *words)
    settings = json.loads(plan["files"]["settings.json"])
    assert settings["setup"] == [["pip", "install", "-e", ".[extra one]"], ["echo", "$HOME"]]


@pytest.mark.parametrize("text", ["echo 'a", "", "''"])
def test_what_is_no_setup_command_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", "--target", "lab", "--setup", text, "--no-python", "true"]) == exit_status.USAGE
    assert "--setup: not a command" in capsys.readouterr().err
