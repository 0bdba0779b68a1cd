"""What happens to clusters, seen by those who use them; and of no job is anything left on any node."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import schedulers
from schedulers import Job, State
from schedulers.job import JobSpec, Reason, Resources
from schedulers.jobs.poll import restore
from schedulers.sweeps import submit_sweep
from tests.clusters.slurm import Slurm
from tests.marks import long
from tests.needs import missing
from tests.waiting import until

from .conftest import Submit, is_saved, printed
from .orphans import nothing_left
from .test_batch import SAVES

FOR_EVER = "echo go; while :; do sleep 0.1; done"
COUNTS = "n=0; while [ ! -e {end} ]; do n=$((n + 1)); echo line $n; sleep 0.1; done; echo the end"


def number(job: Job) -> str:
    return str(job.native_id).partition("/")[0]


def queued(slurm: Slurm) -> list[str]:
    return slurm.run("squeue -h -r -o %i".split()).stdout.split()


def specs(project: Path, count: int, command: str, **options: Any) -> list[JobSpec]:
    return [
        JobSpec(
            argv=("sh", "-c", command, "sh", str(at)), entry="command", name=f"job {at}", procs_per_node=1,
            resources=Resources(cpus=1), grace_s=2.0, code=str(project), options={"cpu": True, **options},
        )
        for at in range(count)
    ]  # fmt: skip


@pytest.mark.long
def test_two_hundred_jobs_at_once_and_an_end_to_them(slurm: Slurm, home: Path, project: Path) -> None:
    """Each is there once; those that run and those that wait are cancelled together, and nothing of any is left."""
    wanted = specs(project, 200, FOR_EVER)
    with ThreadPoolExecutor(16) as pool:
        jobs = list(pool.map(lambda spec: schedulers.submit_spec(spec, "slurm"), wanted))
    assert len({number(job) for job in jobs}) == 200
    assert sorted(queued(slurm)) == sorted(number(job) for job in jobs)
    until(lambda: sum("go\n" in printed(job) for job in jobs[:16]) >= 4, "some of them run", 180)
    with ThreadPoolExecutor(16) as pool:
        ends = list(pool.map(lambda job: job.cancel(), jobs))
    assert {end.state for end in ends} == {State.CANCELLED}
    nothing_left(slurm, *jobs, seconds=120)
    assert queued(slurm) == []


@pytest.mark.long
def test_a_sweep_of_twenty_is_cancelled_in_its_midst(slurm: Slurm, home: Path, project: Path) -> None:
    command = f'[ "$1" -lt 2 ] && exit 0; {FOR_EVER}'
    jobs = submit_sweep(specs(project, 20, command, array_throttle=4), "slurm")
    assert [job.wait(180).state for job in jobs[:2]] == [State.SUCCEEDED] * 2
    until(lambda: "go\n" in printed(jobs[2]), "the next ones begin")
    assert jobs[3].cancel().state is State.CANCELLED  # one of them alone
    assert not jobs[2].status(refresh=True).state.final
    for job in reversed(jobs[2:]):
        assert job.cancel().state is State.CANCELLED
    nothing_left(slurm, *jobs)
    assert queued(slurm) == []


def test_waiting_elements_of_a_sweep_are_cancelled_in_slurm(slurm_accounting: Slurm, home: Path, project: Path) -> None:
    """Slurm's controller forgets them, and accounting has one row for all."""
    slurm = slurm_accounting
    slurm.configure(MinJobAge="2")
    jobs = submit_sweep(specs(project, 3, "true", sbatch={"begin": "now+1hour"}), "slurm")
    assert [job.status(refresh=True).state for job in jobs] == [State.QUEUED] * 3
    array = number(jobs[0]).partition("_")[0]
    slurm.run(["scancel", array])
    until(lambda: array not in slurm.run("squeue -h -t all -o %F".split()).stdout.split(), "it is forgotten")
    rows = ["sacct", "-n", "-X", "-o", "State", "-j", array]
    until(lambda: "CANCELLED" in slurm.run(rows).stdout, "accounting knows of it")
    for job in jobs:
        status = job.wait(60)
        assert (status.state, status.reason) == (State.CANCELLED, Reason.USER), status


def test_a_laptop_loses_the_login_node_while_it_follows(
    slurm: Slurm, submit: Submit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        import fabric  # noqa: F401
    except ImportError:
        missing("fabric", "pip install 'accel-launch[ssh]'")
    monkeypatch.delenv("SLURM_CONF")
    end = tmp_path / "end"
    there = {"login": "login", "ssh_config": str(slurm.ssh_config), "python": sys.executable}
    job = submit(COUNTS.format(end=end), nodes=2, options=there)
    lines: list[str] = []

    def follow() -> None:
        for line in job.logs(follow=True, ranks=[0]):
            lines.append(line.text)

    follower = threading.Thread(target=follow, daemon=True)
    follower.start()
    until(lambda: len(lines) > 0, "it is followed")
    for process in slurm.login.processes("sshd"):
        if b"@" in Path(f"/proc/{process.pid}/cmdline").read_bytes():  # a session, not the server
            process.send(signal.SIGKILL)
    slurm.link("login", False)
    until(lambda: _is_silent(job), "the laptop has noticed")
    slurm.link("login", True)
    before = len(lines)
    until(lambda: len(lines) > before, "it is heard again")
    end.touch()
    assert job.wait(120).state is State.SUCCEEDED
    follower.join(90)
    assert not follower.is_alive()
    assert lines == [*(f"line {at + 1}\n" for at in range(len(lines) - 1)), "the end\n"]
    nothing_left(slurm, job)
    target: Any = job.waiting_target()
    target.close()


def _is_silent(job: Job) -> bool:
    try:
        restore(job.record).poll([str(job.native_id)])
    except schedulers.Unreachable:
        return True
    return False


def test_nodes_that_do_not_come_are_named(slurm: Slurm, submit: Submit, tmp_path: Path) -> None:
    """One node's task does not begin, as where an image is being fetched; the other does not wait for ever."""
    hangs = tmp_path / "prolog"
    hangs.write_text('#!/bin/sh\n[ "$SLURM_NODEID" = 0 ] || exec sleep 600\n')
    hangs.chmod(0o755)
    job = submit("echo never", nodes=2, options={"start_timeout_s": 5.0, "srun": [f"--task-prolog={hangs}"]})
    status = job.wait(120)
    assert (status.state, status.reason) == (State.FAILED, Reason.RENDEZVOUS), status
    assert "n2" in status.message
    assert printed(job) == ""
    nothing_left(slurm, job)


def test_accounting_lags(slurm_accounting: Slurm, submit: Submit, tmp_path: Path) -> None:
    """It still says that the job runs, and Slurm's controller has forgotten it: so it is not known what became of it,
    until accounting has caught up. Its step had what the job asked for."""
    slurm, end = slurm_accounting, tmp_path / "end"
    slurm.configure(MinJobAge="2")
    script = f"echo GPUs $CUDA_VISIBLE_DEVICES; {COUNTS.format(end=end)}; exit 5"
    job = submit(script, cpus=3, gpus=2, options={"cpu": False, "gpu_type": "a100"})
    until(lambda: "line 1\n" in printed(job), "it runs")
    assert printed(job).startswith("GPUs 0,1\n")
    step = slurm.run(["scontrol", "show", "step", "-o", f"{number(job)}.0"]).stdout
    assert {"CPUs=3", "Tasks=1", "TresPerNode=gres:gpu:a100:2"} <= set(step.split()), step
    words = ["sacct", "-n", "-X", "-o", "State", "-j", number(job)]
    until(lambda: "RUNNING" in slurm.run(words).stdout, "accounting knows that it runs")
    slurm.kill_accounting()
    end.touch()
    assert job.wait(90).exit_code == 5
    (job.record.directory / "exit.json").unlink()
    until(lambda: number(job) not in queued_or_over(slurm), "the controller has forgotten it")
    target, native = restore(job.record), str(job.native_id)
    with pytest.raises(schedulers.Unreachable):
        target.poll([native])
    slurm.start_accounting()

    def known() -> bool:
        try:
            status = restore(job.record).poll([native]).get(native)
        except schedulers.Unreachable:
            return False
        assert status is None or (status.state, status.exit_code) == (State.FAILED, 5)
        return status is not None

    until(known, "accounting has caught up")


def queued_or_over(slurm: Slurm) -> list[str]:
    return slurm.run("squeue -h -t all -o %i".split()).stdout.split()


def test_warned_while_the_controller_is_down(slurm: Slurm, submit: Submit) -> None:
    """The ranks have saved and ended: it is told to start them again when it is back."""
    job = submit(f'if [ "$ACCEL_ATTEMPT" = 0 ]; then {SAVES}\nfi\necho again', max_restarts=2)
    until(lambda: "go\n" in printed(job), "it runs")
    is_saved(slurm, job)
    slurm.kill_controller()
    for process in slurm["n1"].processes():
        if b"-S" in Path(f"/proc/{process.pid}/cmdline").read_bytes().split(b"\0"):
            process.send(signal.SIGUSR1)
    until(lambda: "warned\n" in printed(job), "it is warned")
    slurm.start_controller()
    status = job.wait(180)
    assert (status.state, status.attempt) == (State.SUCCEEDED, 1), status
    assert "again\n" in printed(job)
    nothing_left(slurm, job)


def test_a_daemon_is_restarted_under_a_job(slurm: Slurm, submit: Submit, tmp_path: Path) -> None:
    end = tmp_path / "end"
    job = submit(COUNTS.format(end=end), nodes=2)
    until(lambda: printed(job).count("line 1\n") == 2, "both ranks run")
    for name in ("n1", "n2"):
        slurm.kill_slurmd(name)
        slurm.start_slurmd(name)
    end.touch()
    assert job.wait(120).state is State.SUCCEEDED
    assert printed(job).count("the end\n") == 2
    nothing_left(slurm, job)


def test_suspended_and_resumed(slurm: Slurm, submit: Submit, tmp_path: Path) -> None:
    end = tmp_path / "end"
    job = submit(COUNTS.format(end=end), nodes=2)
    until(lambda: printed(job).count("line 1\n") == 2, "both ranks run")
    slurm.run(["scontrol", "suspend", number(job)])
    until(lambda: job.status(refresh=True).message == "it is suspended", "that is said")
    slurm.run(["scontrol", "resume", number(job)])
    end.touch()
    assert job.wait(120).state is State.SUCCEEDED
    nothing_left(slurm, job)


@pytest.mark.parametrize("runs", [True, *long(False)])
def test_an_administrator_takes_it_away(runs: bool, slurm: Slurm, submit: Submit) -> None:
    job = submit(FOR_EVER, nodes=2 if runs else 9)
    if runs:
        until(lambda: printed(job).count("go\n") == 2, "it runs")
    target, native = restore(job.record), str(job.native_id)
    assert target.wait(native, 0.0) is False  # type: ignore[attr-defined]
    slurm.run(["scancel", number(job)])
    assert target.wait(native, 120) is True  # type: ignore[attr-defined]  # without a result, Slurm is asked
    status = job.wait(120)
    assert (status.state, status.reason) == (State.CANCELLED, Reason.USER), status
    nothing_left(slurm, job)


def test_its_step_is_killed(slurm: Slurm, submit: Submit) -> None:
    job = submit(FOR_EVER, nodes=2)
    until(lambda: printed(job).count("go\n") == 2, "it runs")
    slurm.run(["scancel", "--signal=KILL", f"{number(job)}.0"])
    status = job.wait(120)
    assert status.state is State.FAILED, status
    assert status.message
    nothing_left(slurm, job)


def test_whoever_follows_goes_away(slurm: Slurm, submit: Submit, tmp_path: Path) -> None:
    """Ctrl-C, and SIGKILL: the job goes on."""
    end = tmp_path / "end"
    job = submit(COUNTS.format(end=end))
    until(lambda: "line 1\n" in printed(job), "it runs")
    for number_ in (signal.SIGINT, signal.SIGKILL):
        words = [sys.executable, "-m", "accel", "logs", "-f", job.id]
        follower = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=dict(os.environ))
        assert follower.stdout is not None
        follower.stdout.readline()
        follower.send_signal(number_)
        _, err = follower.communicate(timeout=60)
        assert b"Traceback" not in err
    end.touch()
    assert job.wait(120).state is State.SUCCEEDED
    nothing_left(slurm, job)


def test_a_shared_disk_that_fills_up_under_a_job(slurm: Slurm, submit: Submit, monkeypatch: pytest.MonkeyPatch) -> None:
    """How it ended is known all the same, and the next one is refused in one line."""
    monkeypatch.setenv("ACCEL_HOME", str(slurm.small_disk / "home"))
    job = submit(f"echo go; exec >&-; cat /dev/zero > '{slurm.small_disk}/fill'; exit 7")
    assert job.wait(120).exit_code == 7
    with pytest.raises((schedulers.SubmitError, schedulers.StoreError)) as refusal:
        submit("true")
    assert "\n" not in str(refusal.value)
    (slurm.small_disk / "fill").unlink()
    assert submit("true").wait(120).state is State.SUCCEEDED
    nothing_left(slurm, job)


def test_what_cannot_begin_is_said(slurm: Slurm, submit: Submit, tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -E -S "$@"\n')  # without any package
    bare.chmod(0o755)
    wrong: dict[str, dict[str, Any]] = {
        "unrecognized option '--nope'": {"srun": ["--nope"]},
        f"{bare} -m pip install 'accel-launch[slurm]'": {"python": str(bare)},
        "/no/python: No such file or directory": {"python": "/no/python"},
        "module: command not found": {"modules": ["cuda/99"]},
    }
    jobs = {said: submit("echo never", options=options) for said, options in wrong.items()}
    for said, job in jobs.items():
        status = job.wait(120)
        assert (status.state, status.reason) == (State.FAILED, Reason.SETUP), (said, status)
        assert said in status.message
        assert printed(job) == ""
    nothing_left(slurm, *jobs.values())
