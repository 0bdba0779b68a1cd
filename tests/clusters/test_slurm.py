"""The Slurm clusters of the tests are what they promise to be."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clusters.netns import ClusterError, lacking, wait_until
from tests.clusters.slurm import ACCOUNTING_PROGRAMS, LOGIN_PROGRAMS, PROGRAMS, Slurm, claim, main
from tests.clusters.slurm_files import lacks_cgroups
from tests.needs import missing

ROOT = Path(__file__).parents[2]


def _check(**more: str) -> None:
    absent = lacking(**PROGRAMS, **more)
    if absent:
        missing(*absent)


@pytest.fixture
def slurm(_with_accounting: Slurm) -> Iterator[Slurm]:
    yield _with_accounting
    _with_accounting.heal()


def _sbatch(slurm: Slurm, directory: Path, body: str, *options: str) -> str:
    """Submits the text of a script and returns the job's id; its output goes to `out` in `directory`."""
    argv = ["sbatch", "--parsable", "--output=out", "--open-mode=append", *options]
    return slurm.run(argv, cwd=directory, text=f"#!/bin/bash\n{body}\n").stdout.strip()


def _job(slurm: Slurm, job: str, key: str) -> str:
    shown = slurm.run(["scontrol", "-o", "show", "job", job]).stdout
    return next(word.partition("=")[2] for word in shown.split() if word.startswith(f"{key}="))


def _until_state(slurm: Slurm, job: str, *states: str) -> None:
    wait_until(f"job {job} is {states}", lambda: _job(slurm, job, "JobState") in states, 90)


def _saved(slurm: Slurm) -> bytes:
    """What the controller has saved of its jobs; nothing at the moment at which it puts a new file there."""
    try:
        return (slurm.box / "state/job_state").read_bytes()
    except FileNotFoundError:
        return b""


def _left(slurm: Slurm) -> list[str]:
    """Whatever is still there of a cluster: directories, mounts, namespaces, interfaces, processes."""
    tag, box = slurm.slot.tag, str(slurm.box)
    found = [box] if slurm.box.exists() else []
    found += [line for line in Path("/proc/mounts").read_text().splitlines() if f"{box}/" in line]
    found += [name for name in os.listdir("/sys/class/net") if name.startswith((f"{tag}v", f"{tag}br"))]
    found += [name for name in os.listdir("/run/netns") if name.startswith(f"{tag}-")]
    found += [str(path) for path in Path("/sys/fs/cgroup").glob(f"*/accel-{tag}-*")]
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            found += [f"{entry.name} {line}" for line in [(entry / "cmdline").read_text()] if f"{box}/" in line]
        except OSError:
            continue
    return found


def test_a_step_runs_on_every_node_under_its_own_name(slurm: Slurm) -> None:
    done = slurm.run(["srun", "-N4", "--label", "sh", "-c", "hostname; getent ahostsv4 n3 | head -1"])
    lines = sorted(done.stdout.splitlines())
    assert [line for line in lines if line[3] == "n"] == [f"{rank}: n{rank + 1}" for rank in range(4)]
    assert sum(slurm["n3"].address in line for line in lines) == 4


def test_a_job_that_has_ended_is_in_the_accounts(slurm: Slurm, tmp_path: Path) -> None:
    job = _sbatch(slurm, tmp_path, "exit 3", "--comment=mine")
    _until_state(slurm, job, "FAILED")
    argv = ["sacct", "-X", "-n", "-P", "-j", job, "-o", "State,ExitCode,Comment"]
    wait_until("sacct has it", lambda: slurm.run(argv).stdout.strip() == "FAILED|3:0|mine")
    slurm.kill_accounting()
    assert slurm.run(argv, check=False).returncode != 0
    slurm.start_accounting()
    assert slurm.run(argv).stdout.strip() == "FAILED|3:0|mine"


def test_gpus_are_counted_and_given_out(slurm: Slurm) -> None:
    seen = "echo $SLURM_NODEID $CUDA_VISIBLE_DEVICES"
    done = slurm.run(["srun", "-N2", "--gres=gpu:a100:2", "sh", "-c", seen])
    assert sorted(done.stdout.splitlines()) == ["0 0,1", "1 0,1"]
    assert slurm.run(["srun", "-N1", "--gres=gpu:1", "sh", "-c", seen]).stdout == "0 0\n"
    with pytest.raises(ClusterError, match="not available"):
        slurm.run(["srun", "-N1", "--gres=gpu:3", "true"])


@pytest.mark.long
def test_a_job_whose_node_has_lost_its_power_is_requeued_on_others(slurm: Slurm, tmp_path: Path) -> None:
    body = 'echo "${SLURM_RESTART_COUNT:-0} $SLURM_JOB_NODELIST"; [ "$SLURM_RESTART_COUNT" ] || sleep 1000'
    job = _sbatch(slurm, tmp_path, body, "-N2", "--requeue")
    wait_until("it runs", lambda: (tmp_path / "out").exists() and (tmp_path / "out").read_text() != "")
    slurm.kill_node("n2")
    _until_state(slurm, job, "COMPLETED")
    ran = [line for line in (tmp_path / "out").read_text().splitlines() if line[0] in "01"]
    assert ran in (["0 n[1-2]", "1 n[1,3]"], ["0 n[1-2]", "1 n[3-4]"])
    rows = ["sacct", "-X", "-D", "-n", "-P", "-j", job, "-o", "State"]
    wait_until("sacct has both runs", lambda: slurm.run(rows).stdout.split() == ["NODE_FAIL", "COMPLETED"])
    slurm.start_node("n2")
    assert slurm.run(["srun", "-w", "n2", "hostname"]).stdout == "n2\n"


@pytest.mark.long
def test_the_controller_comes_back_and_finds_the_job_that_ran_on(slurm: Slurm, tmp_path: Path) -> None:
    body = f"touch started; until [ -e {tmp_path}/end ]; do sleep 0.1; done"
    job = _sbatch(slurm, tmp_path, body)
    wait_until("it runs", (tmp_path / "started").exists)
    # As one that runs: one that was saved while it waited would be started a second time.
    mark = f"runs {tmp_path}"
    slurm.run(["scontrol", "update", f"JobId={job}", f"Comment={mark}"])
    wait_until("it is saved", lambda: mark.encode() in _saved(slurm))
    slurm.kill_controller()
    assert slurm.run(["squeue"], check=False).returncode != 0
    (tmp_path / "end").touch()
    slurm.start_controller()
    _until_state(slurm, job, "COMPLETED")


def test_job_ids_that_a_killed_controller_forgot_are_not_met_again_after_healing(slurm: Slurm, tmp_path: Path) -> None:
    slurm.run(["srun", "-N4", "true"])
    lost = [_sbatch(slurm, tmp_path, "true") for _ in range(3)]
    slurm.kill_controller()
    slurm.heal()
    assert int(_sbatch(slurm, tmp_path, "true")) > int(lost[-1])
    assert slurm.run(["srun", "-N4", "hostname"]).stdout.split() != []


@pytest.mark.long
def test_preemption_sends_the_chosen_signal_before_sigterm_and_requeues(slurm: Slurm, tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(
        "import os, signal, sys, time\n"
        'name = f\'{os.environ["SLURM_PROCID"]}.{os.environ.get("SLURM_RESTART_COUNT", "0")}\'\n'
        "out = open(name, 'a', buffering=1)\n"
        "def told(number, frame): print(signal.Signals(number).name, file=out)\n"
        "for number in (signal.SIGUSR1, signal.SIGTERM): signal.signal(number, told)\n"
        "print('ready', file=out)\n"
        "while '.0' in name: time.sleep(0.05)\n"
    )
    job = _sbatch(slurm, tmp_path, f"srun {sys.executable} task.py", "-N4", "--exclusive", "--signal=USR1@60")
    heard = [tmp_path / f"{rank}.0" for rank in range(4)]
    wait_until("tasks are ready", lambda: all(file.exists() and "ready" in file.read_text() for file in heard), 60)
    higher = _sbatch(slurm, tmp_path, "true", "-p", "high", "-N4", "--exclusive")
    _until_state(slurm, higher, "COMPLETED")
    assert [file.read_text().split()[:2] for file in heard] == [["ready", "SIGUSR1"]] * 4
    assert {tuple(file.read_text().split()[2:]) for file in heard} <= {("SIGTERM",), ("SIGTERM", "SIGTERM")}
    _until_state(slurm, job, "COMPLETED")
    assert _job(slurm, job, "Restarts") == "1"


@pytest.mark.long
def test_without_the_setting_preemption_sends_sigterm_only(slurm: Slurm, tmp_path: Path) -> None:
    slurm.configure(SlurmctldParameters="")
    task = "trap 'echo USR1' USR1; trap 'echo TERM; exit 9' TERM; echo ready; while :; do sleep 0.05; done"
    (tmp_path / "task.sh").write_text(task)
    job = _sbatch(slurm, tmp_path, "srun bash task.sh", "-N4", "--exclusive", "--signal=USR1@60")
    out = tmp_path / "out"
    wait_until("tasks are ready", lambda: out.exists() and out.read_text().count("ready") == 4, 60)
    higher = _sbatch(slurm, tmp_path, "true", "-p", "high", "-N4", "--exclusive", "--output=higher")
    _until_state(slurm, higher, "COMPLETED")
    heard = out.read_text().split("ready")[4]  # what the first run printed after it was ready
    assert "TERM" in heard
    assert "USR1" not in heard
    slurm.run(["scancel", job])


def test_a_job_is_submitted_on_the_login_machine_by_an_ordinary_user(slurm: Slurm) -> None:
    argv = ["ssh", "-F", str(slurm.ssh_config), "-l", "worker", "login"]
    command = "cd ~; sbatch --parsable --wait --output=out --wrap='id -un; hostname; pwd'; hostname; squeue -h"
    done = subprocess.run([*argv, command], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120)
    assert done.stderr == ""
    assert done.stdout.split()[1:] == ["login"]
    home = slurm.home("worker")
    assert (home / "out").read_text().split() == ["worker", "n1", str(home)]


@pytest.mark.long
def test_whatever_was_broken_can_be_mended(slurm: Slurm, tmp_path: Path) -> None:
    left = "setsid sh -c 'sleep 1000 & sleep 1000' & "
    _sbatch(slurm, tmp_path, f"{left} trap '' TERM; while :; do sleep 1; done", "-w", "n1")
    _sbatch(slurm, tmp_path, "sleep 1000", "--hold")
    wait_until("it runs", (tmp_path / "out").exists)
    wait_until("it left something", lambda: len(slurm["n1"].processes("sleep")) >= 3)
    (slurm.small_disk / "file").write_text("x")
    with pytest.raises(OSError, match="No space left"):
        (slurm.small_disk / "more").write_bytes(bytes(32 << 20))
    slurm.run("scontrol update NodeName=n2 State=DRAIN Reason=broken".split())
    slurm.kill_node("n3")
    slurm.kill_slurmd("n4")
    slurm.link("n1", False)
    for name in ("slurmdbd", "mariadbd"):
        slurm.head.processes(name)[0].send(signal.SIGSTOP)
    slurm.kill_controller()
    slurm.heal()
    assert slurm.run("squeue -h -a".split()).stdout == ""
    assert sorted(slurm.run(["srun", "-N4", "hostname"]).stdout.split()) == slurm.names
    assert slurm.run("sacct -X -n".split()).stdout != ""
    assert len(slurm["n1"].processes("sleep")) == 1  # the one that keeps it up
    assert list(slurm.small_disk.iterdir()) == []


def test_two_clusters_do_not_meet_and_leave_nothing() -> None:
    _check()
    with claim() as one, claim() as other:
        one.start(1)
        other.start(2)
        assert one.env != other.env
        assert one.run(["srun", "hostname"]).stdout == "n1\n"
        other.stop()
        assert _left(other) == []
        assert one.run(["srun", "hostname"]).stdout == "n1\n"
        assert "slurmctld" in one.diagnose()
    assert _left(one) == []


def test_what_a_killed_owner_left_is_removed_by_the_next_that_comes() -> None:
    _check()
    script = "import tests.clusters.slurm as s, time; c = s.claim(); c.start(2); print(c.slot.number, flush=True)"
    argv = [sys.executable, "-c", f"{script}; time.sleep(1000)"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, cwd=ROOT) as owner:
        assert owner.stdout is not None
        number = int(owner.stdout.readline())
        owner.kill()
    with claim() as slurm:
        if slurm.slot.number != number:
            assert _left(Slurm(type(slurm.slot)(slurm.slot.kind, number))) == []
        slurm.start(1)
        assert slurm.run(["srun", "hostname"]).stdout == "n1\n"
    assert _left(slurm) == []


def test_with_cgroups_memory_is_limited_and_nothing_outlives_its_job() -> None:
    _check()
    lack = lacks_cgroups()
    if lack is not None:
        pytest.skip(lack)
    with claim() as slurm:
        slurm.start(1, cgroups=True)
        glutton = [sys.executable, "-c", "import time; x = b'a' * 300_000_000; time.sleep(1)"]
        done = slurm.run(["srun", "--mem=100", *glutton], check=False)
        assert "Out Of Memory" in done.stderr
        slurm.run(["srun", "sh", "-c", "setsid sh -c 'sleep 1000 & sleep 1000' & sleep 0.1"])
        wait_until("all is gone", lambda: len(slurm["n1"].processes("sleep")) == 1)
    assert _left(slurm) == []


def test_a_wrong_setting_is_told(tmp_path: Path) -> None:
    _check()
    with claim() as slurm:
        with pytest.raises(ClusterError, match="NoSuchKey"):
            slurm.start(1, settings={"NoSuchKey": "1"})
        with pytest.raises(ClusterError, match="not 0"):
            slurm.start(0)
    assert _left(slurm) == []


def test_the_command_says_how_it_is_used(capsys: pytest.CaptureFixture[str]) -> None:
    _check(**ACCOUNTING_PROGRAMS, **LOGIN_PROGRAMS)
    for words in (["nothing"], ["up", "4", "--gpus"], ["up", "4", "--wrong"], ["up", "many"], ["link", "n1"]):
        assert main(words) == 2
        assert "python -m tests.clusters.slurm up" in capsys.readouterr().err
