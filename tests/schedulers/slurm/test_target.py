"""Jobs on a real cluster, as a user of its login node has them."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path

import pytest

import schedulers
from schedulers import State, SubmitError
from schedulers.errors import ConfigError, SpecError
from schedulers.job import Reason
from schedulers.jobs.handle import list_jobs
from schedulers.store.record import Record
from schedulers.target import SupportsCheck, SupportsFind, SupportsSubmitMany, SupportsWait
from tests.clusters.slurm import Slurm
from tests.waiting import until

from .conftest import Calls, Submit, printed

HOSTILE = [
    "",
    " ",
    "a b",
    "it's",
    '"',
    "$(touch x)",
    "`x`",
    "\\",
    "a\nb",
    "\t",
    "*",
    "~",
    "-n",
    "--",
    "#",
    "%j",
    "ü€",
    ";&|<>!",
]
SHOW = "import sys, json, os; print(json.dumps([sys.argv[1:], os.environ.get('A')]))"


def test_a_job_runs_and_tells(slurm: Slurm, submit: Submit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "venv").symlink_to(sys.prefix)
    own = {"sbatch": {"mem": 0, "cpus-per-task": 2}, "python": "~/venv/bin/python"}  # all memory of each node
    printed = shlex.quote(str(tmp_path / "printed"))  # by rank 0, which the failure of rank 1 ends
    show = (
        'echo "rank $RANK of $WORLD_SIZE on $(hostname): $SLURM_CPUS_PER_TASK cores"; '
        f"[ $RANK != 0 ] || touch {printed}; until [ -e {printed} ]; do sleep 0.1; done; exit $RANK"
    )
    job = submit(show, nodes=2, cpus=None, options=own)
    status = job.wait(90)
    assert (status.state, status.reason, status.exit_code) == (State.FAILED, Reason.EXIT_CODE, 1)
    lines = {line.rank: line.text for line in job.logs() if line.rank is not None}
    assert lines == {rank: f"rank {rank} of 2 on n{rank + 1}: 2 cores\n" for rank in (0, 1)}
    allocated = slurm.run(["scontrol", "show", "job", str(job.native_id).partition("/")[0]]).stdout
    assert "TRES=cpu=4,mem=8000M" in allocated


def test_everything_arrives_bit_for_bit(slurm: Slurm, submit: Submit, project: Path) -> None:
    (project / "show.py").write_text(SHOW)
    name = "".join(chr(code) for code in range(32, 127)) + "ü€"
    job = submit('exec python3 show.py "$@"', tuple(HOSTILE), name=name, env={"A": "".join(HOSTILE)})
    assert job.wait(90).state is State.SUCCEEDED, printed(job)
    assert json.loads(printed(job)) == [HOSTILE, "".join(HOSTILE)]
    assert job.name == name


def test_the_target_does_what_targets_may(slurm: Slurm, submit: Submit) -> None:
    target = submit("true").waiting_target()
    for protocol in (SupportsWait, SupportsFind, SupportsCheck, SupportsSubmitMany):
        assert isinstance(target, protocol)


def test_a_refusal_is_one_line(slurm: Slurm, submit: Submit, home: Path) -> None:
    with pytest.raises(SubmitError, match="Invalid partition name specified") as refusal:
        submit("true", options={"partition": "nowhere"}, secrets={"TOKEN": "env:HOME"})
    assert "\n" not in str(refusal.value)
    (found,) = schedulers.list_jobs()
    assert isinstance(found, Record)
    assert (found.status.state, found.status.reason) == (State.FAILED, Reason.SETUP)
    assert not (found.directory / "slurm/secrets.json").exists()


def test_a_machine_without_slurm(submit: Submit, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="target slurm: scontrol not found: not a Slurm login node"):
        submit("true")
    assert list_jobs() == []


def test_a_machine_that_does_not_know_its_cluster(
    slurm: Slurm, submit: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLURM_CONF")
    with pytest.raises(SubmitError, match="Slurm has no configuration here"):
        submit("true")


def test_the_environment_of_the_submitter(slurm: Slurm, submit: Submit, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that is submitted from inside another one is no part of it, and secrets go one way only."""
    for name, value in {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "9", "SBATCH_PARTITION": "no", "RANK": "5"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MY_TOKEN", "very secret")
    before = dict(os.environ)
    job = submit("env", secrets={"TOKEN": "env:MY_TOKEN"})
    assert dict(os.environ) == before
    assert job.wait(90).state is State.SUCCEEDED, printed(job)
    lines = printed(job).splitlines()
    assert "TOKEN=very secret" in lines
    assert "RANK=0" in lines
    assert not [line for line in lines if line.startswith("MY_TOKEN=") or line == "SLURM_NTASKS=9"]
    texts = [path.read_text() for path in job.record.directory.rglob("*.json*")]
    assert not [text for text in texts if "very secret" in text]


def test_cancelling_what_runs_and_what_waits(slurm: Slurm, submit: Submit) -> None:
    running = submit("trap 'echo bye; exit 0' TERM; echo ready; while :; do sleep 0.05; done", nodes=2)
    waiting = submit("echo never", nodes=9)
    until(lambda: printed(running).count("ready") == 2, "both ranks print")
    assert waiting.cancel().state is State.CANCELLED
    assert running.cancel().state is State.CANCELLED
    assert printed(running).count("bye") == 2
    assert printed(waiting) == ""
    assert running.cancel().state is State.CANCELLED  # what is over is no error


def test_after_another_job(slurm: Slurm, submit: Submit) -> None:
    good, bad = submit("sleep 1"), submit("sleep 1; exit 3")
    then, never = submit("echo then", after=[good]), submit("echo never", after=[bad.id])
    assert then.wait(90).state is State.SUCCEEDED
    assert good.status().state is State.SUCCEEDED
    status = never.wait(90)
    assert (status.state, status.reason) == (State.FAILED, Reason.DEPENDENCY)
    assert submit("true", after=[good]).wait(90).state is State.SUCCEEDED
    assert bad.status().state is State.FAILED
    with pytest.raises(SubmitError, match="failed"):
        submit("true", after=[bad])


def test_after_a_job_of_another_target(slurm: Slurm, submit: Submit) -> None:
    other = submit("sleep 30", target="local", options={"cpu": True})
    with pytest.raises(SpecError, match="does not know jobs of target local"):
        submit("true", after=[other])
    other.cancel()


def test_a_sweep_is_one_sbatch(slurm: Slurm, home: Path, project: Path, calls: Calls) -> None:
    from schedulers.job import JobSpec, Resources
    from schedulers.sweeps import submit_sweep

    specs = [
        JobSpec(
            argv=("sh", "-c", f"echo {number}; exit {number % 2}"),
            entry="command",
            name=f"sweep {number}",
            procs_per_node=1,
            resources=Resources(cpus=1),
            grace_s=2.0,
            code=str(project),
            options={"cpu": True, "array_throttle": 8},
        )
        for number in range(20)
    ]
    jobs = submit_sweep(specs, "slurm")
    assert calls.taken() == ["scontrol", "sbatch"]
    assert len({str(job.native_id).partition("_")[0] for job in jobs}) == 1
    jobs[19].cancel()
    for number, job in enumerate(jobs[:19]):
        status = job.wait(180)
        assert (status.state, status.exit_code) == ((State.FAILED, 1) if number % 2 else (State.SUCCEEDED, 0))
        assert printed(job) == f"{number}\n"
    assert jobs[19].wait(90).state is State.CANCELLED


def test_a_sweep_above_max_array_size_is_not_recorded(slurm: Slurm, home: Path, project: Path, calls: Calls) -> None:
    from schedulers.job import JobSpec
    from schedulers.sweeps import submit_sweep

    spec = JobSpec(argv=("true",), entry="command", procs_per_node=1, code=str(project), options={"cpu": True})
    with pytest.raises(SpecError, match=r"target slurm: the sweep has 1,002 jobs, .* MaxArraySize is 1,001: split it"):
        submit_sweep([spec] * 1002, "slurm")
    assert calls.taken() == ["scontrol"]
    assert list_jobs(refresh=False) == []


def test_the_code_as_it_was(slurm: Slurm, submit: Submit, project: Path) -> None:
    job = submit("sleep 0.5; cat data", options={"snapshot": True}, **_with(project, "before"))
    (project / "data").write_text("after")
    assert job.wait(90).state is State.SUCCEEDED, printed(job)
    assert printed(job) == "before"


def _with(project: Path, text: str) -> dict[str, object]:
    (project / "data").write_text(text)
    return {}


def test_what_is_wrong_before_any_job(slurm: Slurm, submit: Submit) -> None:
    target = submit("true", options={"partition": "main"}).waiting_target()
    assert isinstance(target, SupportsCheck)
    checked = target.check()
    assert checked.failures == ()
    assert {row[0] for row in checked.table} == {"partition", "main", "high", "small"}
    assert any("accounting is off" in warning for warning in checked.warnings)
