"""1 for what accel cannot do, 2 for what the command line or a configuration file says wrongly; one line on stderr."""

from __future__ import annotations

from pathlib import Path

import pytest

from accel.cli import exit_status, main
from schedulers.store.store import Store

SUBMIT = ["submit", "--no-python", "true"]
BROKEN = "targets: {a: ["
WRONG = "targets: {local: {kind: local, concurrencyy: 1}}"


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("ACCEL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("ACCEL_CONFIG_HOME", str(tmp_path / "none"))
    monkeypatch.chdir(tmp_path)
    return Store.default()


def said(argv: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on stderr, after checking the exit code."""
    assert main(argv) == code
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("accel")
    assert shown.err.count("\n") == 1
    return shown.err


@pytest.mark.parametrize(
    "argv",
    [["status", "zzzz"], ["logs", "@last"], ["wait", "zzzz"], ["cancel", "zzzz"], ["submit", "--after", "@last"]],
)
def test_an_unknown_job_is_1(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    words = [*argv, "--no-python", "true"] if argv[0] == "submit" else argv
    said(words, exit_status.ERROR, capsys)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--target locl", "did you mean 'local'?"),
        ("--option concurency=1", "did you mean 'concurrency'?"),
        ("--option concurrency=x", "concurrency: expects int"),
        ("--nodes 0", "nodes must be 1 or more, not 0"),
        ("--nodes 2", "the local target is one machine"),
        ("--nodes 4:2", "max_nodes must be 4 or more, not 2"),
        ("--nodes 1:2", "--nodes 1:2: jobs of a local target have one size"),
        ("--image x", "--image needs another target"),
        ("--secret A=env:NOT_SET_ANYWHERE", "secret A: NOT_SET_ANYWHERE is not set"),
        ("--cpus 100000", "--cpus 100000: this process may use"),
        ("--gpus 1000", "--gpus 1000: this machine has"),
        ("--sweep lr=1,2 --cpus 100000", "--cpus 100000: this process may use"),
        ("--target ssh --hosts h --secret A=env:NOT_SET_ANYWHERE", "secret A: NOT_SET_ANYWHERE is not set"),
        ("--target slurm --secret A=file:/not/there", "secret A: /not/there: No such file"),
        ("--target slurm --sweep lr=1,2 --secret A=file:/not/there", "secret A: /not/there: No such file"),
    ],
)
def test_a_job_that_cannot_run_is_2_and_leaves_no_record(
    options: str, message: str, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in said(["submit", *options.split(), *SUBMIT[1:]], exit_status.USAGE, capsys)
    assert store.ids() == []


@pytest.mark.parametrize("text", [BROKEN, WRONG])
@pytest.mark.parametrize(
    "argv", [SUBMIT, ["submit", "--dry-run", *SUBMIT[1:]], ["targets", "check", "local"], ["test", "--target", "local"]]
)
def test_a_wrong_accel_yaml_is_2(
    text: str, argv: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "accel.yaml").write_text(text)
    assert "accel.yaml:1" in said(argv, exit_status.USAGE, capsys)


def test_a_broken_accel_yaml_does_not_stop_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "accel.yaml").write_text(BROKEN)
    assert main(["list", "--json"]) == exit_status.OK
    assert capsys.readouterr().err == ""
