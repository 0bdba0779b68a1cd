"""`accel submit --sweep` and `--array`."""

from __future__ import annotations

import json
import logging

import pytest

from accel.cli.output import progress
from tests.cli.conftest import Accel


def test_a_job_for_each_combination(accel: Accel) -> None:
    script = accel.script("import sys; print(sys.argv[1:])")
    ids = accel("submit", "--sweep", "lr=1e-3,1e-4", "--sweep", 'note="a, b"', script, "--out", "run-{lr}").split()
    assert len(ids) == 2
    for job_id, rate in zip(ids, ["1e-3", "1e-4"], strict=True):
        accel("wait", job_id)
        assert accel("logs", job_id) == f"['--out', 'run-{rate}', '--note', 'a, b']\n"
    assert [row["name"] for row in json.loads(accel("list", "--json"))["jobs"]] == [
        "train [lr=1e-4, note=a, b]",
        "train [lr=1e-3, note=a, b]",
    ]


def test_the_dry_run_shows_every_job_and_writes_nothing(accel: Accel) -> None:
    accel.script("")
    (accel.here / "table.csv").write_text("lr,seed\n1,2\n3,4\n")
    plans = json.loads(accel("submit", "--dry-run", "--json", "--array", "table.csv", "train.py"))
    assert [plan["actions"][1][-4:] for plan in plans] == [["--lr", "1", "--seed", "2"], ["--lr", "3", "--seed", "4"]]
    assert not accel.home.exists()


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--sweep", "lr=1", "--array", "t.csv"], 2, "--sweep and --array contradict each other"),
        (["--sweep", "lr=1", "--follow"], 2, "--follow follows one job"),
        (["--sweep", "lr"], 2, "expects KEY=VALUE, not 'lr'"),
        (["--sweep", 'lr="1'], 2, "expects NAME=V1,V2"),
        (["--sweep", "lr=1", "--sweep", "lr=2"], 2, "--sweep sets lr twice"),
        (["--array", "none.csv"], 2, "sweep none.csv: No such file"),
    ],
)
def test_refused_in_one_line(accel: Accel, words: list[str], code: int, message: str) -> None:
    accel.script("")
    done = accel.finish("submit", *words, "train.py")
    assert done.returncode == code
    assert message in done.stderr.decode()
    assert len(done.stderr.decode().strip().splitlines()) == 1


def test_how_far_a_submit_is_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    told = logging.getLogger("schedulers.progress")
    with progress():
        told.info("examined %d of %d hosts", 1, 4)
    told.info("not asked for any more")
    assert capsys.readouterr() == ("", "accel: examined 1 of 4 hosts\n")
