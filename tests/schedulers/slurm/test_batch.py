"""The batch program and the nodes' part of a job, on a real cluster: how jobs end, and that nothing of them is left."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.clusters.slurm import Slurm
from tests.launch.test_preemption import TRAIN
from tests.marks import long

from .by_hand import ROOT, ByHand

Make = Callable[..., ByHand]

FIRST_THEN = 'if [ "$ACCEL_ATTEMPT" = 0 ]; then {first}; fi\necho "again $SLURM_JOB_ID $SLURM_RESTART_COUNT"'
WAIT = "echo go; while :; do sleep 0.1; done"
ENDS_IN_ORDER = 'trap "echo ending; exit 0" TERM\necho go; while :; do sleep 0.1; done'
# Not a shell's `trap`: a shell cannot trap what was ignored before it began, as the launcher has warnings.
SAVES = f"""exec {sys.executable} -S -c '
import os, signal, time
def warned(*_):
    os.write(1, b"warned\\n")  # whole, should another signal come
    os._exit(85)
for number in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(number, warned)
print("go", flush=True)
while True:
    time.sleep(0.05)
'"""


@pytest.fixture
def make(slurm: Slurm, tmp_path: Path) -> Make:
    def make(script: str = "", **settings: Any) -> ByHand:
        return ByHand(slurm, tmp_path / 'it\'s "D"; $(x) 100%', script, **{"nodes": 1, **settings})

    return make


ALL_REDUCE = """\
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([float(dist.get_rank())]); dist.all_reduce(total)
names = ("RANK", "SLURM_NODEID", "MASTER_ADDR", "SLURMD_NODENAME")
print(*(os.environ[name] for name in names), total.item(), flush=True)
if dist.get_rank() == 3: raise SystemExit(7)
dist.barrier()
"""


def test_two_nodes_of_two_ranks_and_the_first_failure(make: Make) -> None:
    job = make(nodes=2, procs_per_node=2, entry="script", argv=["train.py"])
    (job.directory / "code/train.py").write_text(ALL_REDUCE)
    end = job.submit().exit()
    assert (end["state"], end["reason"], end["exit_code"], end["attempt"]) == ("failed", "exit_code", 7, 0)
    assert end["message"] == "rank 3 exited with code 7"
    (start,) = job.lines("slurm/attempts.jsonl")
    first, second = start["nodes"]
    said = [job.log(rank).split("\n")[0] for rank in range(4)]
    nodes = [first, first, second, second]
    assert said == [f"{rank} {rank // 2} {first} {nodes[rank]} 6.0" for rank in range(4)]
    assert job.exit_status() == "7:0"
    assert [report["code"] for report in job.reports()] == [7, 7]
    assert start["master"] == first


@pytest.mark.parametrize(
    ("script", "code", "said"),
    [
        ("echo go; exit 0", 0, ""),
        ("exit 7", 7, "rank 0 exited with code 7"),
        ("kill -SEGV $$", 139, "rank 0 was killed by SIGSEGV (exit code 139) (native code crashed, or another"),
        ("exec /no/such/program", 127, "rank 0 exited with code 127 (the command was not found)"),
    ],
)
def test_the_exit_code_is_the_ranks(make: Make, script: str, code: int, said: str) -> None:
    job = make(script).submit()
    end = job.exit()
    assert (end["state"], end["exit_code"]) == ("failed" if code else "succeeded", code)
    assert end["message"].startswith(said)
    assert job.exit_status() == f"{code}:0"
    assert not (job.directory / "slurm/spare").exists()


def test_scancel_by_somebody_else(make: Make) -> None:
    job = make(ENDS_IN_ORDER).submit()
    job.await_running()
    job.slurm.run(["scancel", job.id])
    end = job.exit()
    assert (end["state"], end["reason"], end["message"]) == ("cancelled", "user", "cancelled in Slurm (scancel)")
    assert job.log(0).split()[-1] == "ending"
    assert job.state() == "CANCELLED"


def test_cancelling_needs_no_controller(make: Make) -> None:
    """A file is enough: the nodes look for it, and end the ranks with the job's grace, not with Slurm's."""
    job = make(ENDS_IN_ORDER).submit()
    job.await_running()
    (job.directory / "slurm/cancel").touch()
    end = job.exit()
    assert (end["state"], end["reason"], end["message"]) == ("cancelled", "user", "cancelled")
    assert job.log(0).split()[-1] == "ending"
    assert job.state() == "CANCELLED"


def test_the_grace_has_an_end(make: Make) -> None:
    job = make('trap "" TERM; ' + WAIT, grace_s=0.5).submit()
    job.await_running()
    (job.directory / "slurm/cancel").touch()
    assert job.exit()["state"] == "cancelled"


def test_a_warned_job_is_started_again_under_its_id(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the client that asks Slurm for it is ended with all that belongs to the job, before it has its answer."""
    asks = tmp_path / "bin/scontrol"
    asks.parent.mkdir()
    asks.write_text(f'#!/bin/sh\n{shutil.which("scontrol")} "$@"\n[ "$1" != requeue ] || kill -KILL $$\n')
    asks.chmod(0o755)
    job = make(FIRST_THEN.format(first=SAVES), max_restarts=3)
    with monkeypatch.context() as patched:
        patched.setenv("PATH", f"{asks.parent}:{os.environ['PATH']}")
        job.submit()
    job.await_running()
    job.slurm.run(["scancel", "--signal=USR1", job.id])
    end = job.exit()
    assert (end["state"], end["attempt"]) == ("succeeded", 1)
    assert set(job.log(0).splitlines()) == {"go", "warned"}
    assert job.log(0, attempt=1).split() == ["again", job.id, "1"]
    starts, (left,) = job.lines("slurm/attempts.jsonl"), job.lines("slurm/ends.jsonl")
    assert [(start["attempt"], start["restart_count"]) for start in starts] == [(0, 0), (1, 1)]
    assert (left["start"], left["reason"], left["exit_code"]) == (0, "preempted", 85)


@pytest.mark.long
def test_training_goes_on_where_it_was(make: Make) -> None:
    """Two nodes save at one step, end, and are started again; the losses are those of a run that was left alone."""
    job = make(nodes=2, max_restarts=1, entry="script", argv=["train.py", "run", "wait"], grace_s=30.0)
    code = job.directory / "code"
    (code / "train.py").write_text(TRAIN)
    (code / "run").mkdir()
    (code / "alone").mkdir()
    job.submit()
    job.await_running("is process")
    job.slurm.run(["scancel", "--signal=USR1", job.id])
    (code / "run/told").touch()
    end = job.exit(seconds=240)
    assert (end["state"], end["attempt"]) == ("succeeded", 1)
    alone = [sys.executable, "-m", "accel", "launch", "--cpu", "--num_processes", "2", "train.py", "alone"]
    subprocess.run(alone, cwd=code, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)
    for rank in range(2):
        name = f"losses-{rank}"
        assert (code / "run" / name).read_text() == (code / "alone" / name).read_text()
    assert len((code / "alone/losses-0").read_text().splitlines()) == 50


@pytest.mark.parametrize(
    ("restarts", "sbatch", "said"),
    [
        (0, "--requeue", "it is not started again without --max-restarts"),
        (1, "--no-requeue", "Slurm refused to requeue it: "),
    ],
)
def test_restarts_are_bounded(make: Make, restarts: int, sbatch: str, said: str) -> None:
    job = make(SAVES, max_restarts=restarts).submit(sbatch)
    job.await_running()
    job.slurm.run(["scancel", "--signal=USR1", job.id])
    end = job.exit()
    assert (end["state"], end["reason"], end["exit_code"]) == ("failed", "preempted", 85)
    assert said in end["message"]
    assert job.exit_status() == "85:0"


def test_the_tasks_of_an_array_go_ways_of_their_own(slurm: Slurm, tmp_path: Path) -> None:
    """The last one has the number of the whole array: what is asked of Slurm for it must not hit the others."""
    last = FIRST_THEN.format(first=SAVES)
    scripts = [WAIT, "echo go; while [ ! -e on ]; do sleep 0.1; done; exit 3", last]
    jobs = [
        ByHand(slurm, tmp_path / f"d{task}", script, nodes=1, max_restarts=task // 2)
        for task, script in enumerate(scripts)
    ]
    ByHand.submit_array(jobs)
    for job in jobs:
        job.await_running()
    slurm.run(["scancel", "--signal=USR1", jobs[2].id])
    end = jobs[2].exit()
    assert (end["state"], end["attempt"]) == ("succeeded", 1)
    (jobs[1].directory / "code/on").touch()
    end = jobs[1].exit()
    assert (end["state"], end["exit_code"], end["attempt"]) == ("failed", 3, 0)
    (jobs[0].directory / "slurm/cancel").touch()
    assert jobs[0].exit()["state"] == "cancelled"


def test_cancelling_a_task_leaves_the_array(slurm: Slurm, tmp_path: Path) -> None:
    jobs = [ByHand(slurm, tmp_path / f"d{task}", WAIT, nodes=1) for task in range(2)]
    ByHand.submit_array(jobs)
    for job in jobs:
        job.await_running()
    (jobs[1].directory / "slurm/cancel").touch()
    assert jobs[1].exit()["state"] == "cancelled"
    assert jobs[0].state() == "RUNNING"
    (jobs[0].directory / "slurm/cancel").touch()
    assert jobs[0].exit()["state"] == "cancelled"


def test_a_start_too_many(make: Make) -> None:
    """Slurm starts a job again whatever we think of it."""
    job = make(WAIT, max_restarts=1).submit()
    job.await_running()
    for attempt in (1, 2):
        job.slurm.run(["scontrol", "requeue", job.id])
        if attempt == 1:
            job.await_running(attempt=1)
    end = job.exit()
    assert (end["state"], end["reason"], end["attempt"]) == ("failed", "node_failure", 2)
    assert "it was started 2 times, and --max-restarts 1 allows no more" in end["message"]
    assert not (job.directory / "logs/rank-0.a2.log").exists()


@pytest.mark.parametrize("warned", [True, *long(False)])
def test_preemption_by_another_job(make: Make, warned: bool) -> None:
    """With a user signal before SIGTERM, or without: SIGTERM is the warning then."""
    job = make(FIRST_THEN.format(first=SAVES), max_restarts=3)
    if not warned:
        job.slurm.configure(SlurmctldParameters="")
    job.submit("--exclusive", "--nodelist=n1", "--partition=main")
    job.await_running()
    other = ["sbatch", "--parsable", "-p", "high", "--exclusive", "-w", "n1", "-o", "/dev/null", "--wrap", "sleep 1"]
    job.slurm.run(other)
    end = job.exit()
    assert (end["state"], end["attempt"]) == ("succeeded", 1)
    assert "warned" in job.log(0)
    (left,) = job.lines("slurm/ends.jsonl")
    assert (left["reason"], left["exit_code"]) == ("preempted", 85)


def test_preemption_without_a_handler(make: Make) -> None:
    job = make(WAIT, max_restarts=0).submit("--exclusive", "--nodelist=n1", "--partition=main")
    job.await_running()
    job.slurm.run(["sbatch", "-p", "high", "--exclusive", "-w", "n1", "-o", "/dev/null", "--wrap", "sleep 1"])
    end = job.exit()
    assert (end["state"], end["reason"]) == ("failed", "preempted")
    assert "accelerator.checkpoint_on_preemption()" in end["message"]
    assert "--max-restarts" in end["message"]


@pytest.mark.long
def test_the_time_limit_without_a_handler(make: Make) -> None:
    job = make(ENDS_IN_ORDER, max_restarts=1).submit("--time=1")
    job.await_running()
    end = job.exit(seconds=240)
    assert (end["state"], end["reason"]) == ("failed", "time_limit")
    assert end["message"].startswith("its time limit (00:01:00) was reached; no checkpoint was left: call accel")
    assert job.log(0).split()[-1] == "ending"
    assert job.state() == "TIMEOUT"


@pytest.mark.long
def test_a_lost_node(make: Make) -> None:
    job = make(FIRST_THEN.format(first=WAIT), nodes=2, max_restarts=1).submit()
    job.await_running()
    lost = job.lines("slurm/attempts.jsonl")[0]["nodes"][1]
    job.slurm.kill_node(lost)
    end = job.exit(seconds=240)
    assert (end["state"], end["attempt"]) == ("succeeded", 1)
    assert lost not in job.lines("slurm/attempts.jsonl")[1]["nodes"]


def test_a_lost_node_is_no_cancellation(make: Make) -> None:
    """The job is COMPLETING, as after scancel, when its batch script asks what has become of it."""
    job = make(ENDS_IN_ORDER, nodes=2, max_restarts=0).submit()
    job.await_running()
    lost = job.lines("slurm/attempts.jsonl")[0]["nodes"][1]
    job.slurm.run(["scontrol", "update", f"NodeName={lost}", "State=DOWN", "Reason=test"])
    end = job.exit()
    assert (end["state"], end["reason"], job.state()) == ("failed", "node_failure", "NODE_FAIL"), end


def test_a_lost_first_node(make: Make) -> None:
    job = make(FIRST_THEN.format(first=WAIT), max_restarts=1).submit()
    job.await_running()
    lost = job.lines("slurm/attempts.jsonl")[0]["nodes"][0]
    job.slurm.kill_node(lost)
    end = job.exit(seconds=240)
    assert (end["state"], end["attempt"]) == ("succeeded", 1)


def test_attempts_do_not_overlap(make: Make) -> None:
    """The daemon of a node dies, its tasks live on, and Slurm starts the job elsewhere: the old ranks see the fence."""
    job = make(FIRST_THEN.format(first='trap "" TERM; ' + WAIT), max_restarts=1).submit()
    job.await_running()
    lost = job.lines("slurm/attempts.jsonl")[0]["nodes"][0]
    job.slurm.kill_slurmd(lost)
    job.until("the job is started elsewhere", lambda: len(job.lines("slurm/attempts.jsonl")) == 2, 180)
    job.until("nothing of the first start is left", lambda: not job.on(lost))
    end = job.exit()
    assert (end["state"], end["attempt"]) == ("succeeded", 1)
    assert job.reports()[0]["told"] == "fence"


def test_a_restart_within_the_allocation(make: Make) -> None:
    # Each rank has written before one fails: the launcher ends the others at once, however late they began.
    both = "touch up-$RANK; until [ -e up-0 ] && [ -e up-1 ]; do sleep 0.05; done"
    script = f'echo "$TORCHELASTIC_RESTART_COUNT"; [ "$TORCHELASTIC_RESTART_COUNT" = 1 ] || {{ {both}; exit 3; }}'
    job = make(script, nodes=2, max_restarts=1).submit()
    end = job.exit()
    assert (end["state"], end["attempt"]) == ("succeeded", 1)
    assert len(job.lines("slurm/attempts.jsonl")) == 1
    assert [job.log(rank, attempt) for rank in (0, 1) for attempt in (0, 1)] == ["0\n", "1\n", "0\n", "1\n"]


def test_setup_runs_once_a_node(make: Make) -> None:
    show = 'echo "set up $SLURM_NODEID, $WORLD_SIZE of $SLURM_STEP_NUM_TASKS, $1"'
    setup = [["sh", "-c", show, "sh", "with 'quotes' and\nlines"]]
    job = make("echo go", nodes=2, procs_per_node=2, setup=setup).submit()
    assert job.exit()["state"] == "succeeded"
    said = job.read("logs/setup.log")
    assert sorted(line for line in said.splitlines() if line.startswith("set up")) == [
        "set up 0, 1 of 2, with 'quotes' and",
        "set up 1, 1 of 2, with 'quotes' and",
    ]


def test_a_setup_that_fails(make: Make) -> None:
    script = '[ "$SLURM_NODEID" = 0 ] || exit 4'
    job = make("echo go", nodes=2, setup=[["sh", "-c", script]], start_timeout_s=300.0).submit()
    end = job.exit()
    assert (end["state"], end["reason"], end["exit_code"]) == ("failed", "setup", 4)
    name = job.lines("slurm/attempts.jsonl")[0]["nodes"][1]
    assert end["message"] == f"{name}: the setup command 'sh' failed with exit code 4"


def test_a_node_that_does_not_begin(make: Make) -> None:
    """Its container is being fetched for ever, say."""
    job = make("echo go", nodes=2, start_timeout_s=3.0)
    wait = 'if [ "$SLURM_NODEID" = 1 ]; then while :; do sleep 0.2; done; fi; exec "$@"'
    job.settings["submitit"] = ["/bin/sh", "-c", wait, "sh", *job.settings["submitit"]]
    end = job.submit().exit()
    name = job.lines("slurm/attempts.jsonl")[0]["nodes"][1]
    assert (end["state"], end["reason"]) == ("failed", "rendezvous")
    assert name in end["message"]


def test_an_interpreter_that_cannot_begin(make: Make) -> None:
    job = make("echo go")
    job.settings["submitit"] = [sys.executable, "-m", "no_such_module", "x"]
    end = job.submit().exit()
    assert (end["state"], end["reason"]) == ("failed", "setup")
    assert "No module named no_such_module" in end["message"]


HOSTILE = [
    "",
    " ",
    "a b",
    "'",
    '"',
    "\\",
    "$(touch x)",
    "`id`",
    "a\nb",
    "*",
    "~",
    "-",
    "--",
    "é",
    "日本",
    "\udcff",
    "!",
    ";",
]


def test_every_argument_arrives_bit_for_bit(make: Make) -> None:
    values = {"QUOTES": "a 'b' \"c\" $(d) `e` \\ \n é %n", "EMPTY": ""}
    show = (
        "import os, sys, json; json.dump([sys.argv[1:], {n: os.environ[n] for n in ('QUOTES', 'EMPTY')}], sys.stdout)"
    )
    job = make(argv=[sys.executable, "-c", show, *HOSTILE], env=values).submit()
    assert job.exit()["state"] == "succeeded"
    assert json.loads(job.log(0)) == [HOSTILE, values]
    assert sorted(path.name for path in (job.directory / "code").iterdir()) == ["job.sh"]


def test_secrets_are_in_the_environment_of_the_ranks_alone(make: Make) -> None:
    job = make('echo go "$TOKEN"; while [ ! -e on ]; do sleep 0.1; done').submit(secret={"TOKEN": "s3cr3t value"})
    job.await_running()
    holders = [line for line in job.processes() if b"TOKEN=s3cr3t" in _environ(line)]
    others = [line for line in job.processes() if line not in holders]
    assert not [line for line in holders if "submitit" in line or "srun" in line or "batch.py" in line]
    assert [line for line in others if "submitit" in line]
    assert [line for line in others if "batch.py" in line]
    (job.directory / "code/on").touch()
    assert job.exit()["state"] == "succeeded"
    files = [path for path in job.directory.rglob("*") if path.is_file() and b"s3cr3t" in path.read_bytes()]
    assert [path.name for path in files] == ["rank-0.a0.log"]


def _environ(line: str) -> bytes:
    try:
        return Path(f"/proc/{line.split()[1]}/environ").read_bytes()
    except OSError:
        return b""


@pytest.mark.parametrize("code", [0, 7])
def test_a_full_disk(slurm: Slurm, code: int) -> None:
    job = ByHand(slurm, slurm.small_disk / f"d{code}", f"echo go; exec >&-; cat /dev/zero >fill; exit {code}", nodes=1)
    end = job.submit().exit()
    assert (end["state"], end["exit_code"]) == ("failed" if code else "succeeded", code)
    assert end["message"].endswith("its disk was full: lines of its logs may be missing")
    assert job.exit_status() == f"{code}:0"


def test_jobs_on_one_node_have_ports_of_their_own(slurm: Slurm, tmp_path: Path) -> None:
    jobs = [
        ByHand(slurm, tmp_path / f"d{number}", 'echo go "$MASTER_PORT"', nodes=1, procs_per_node=2) for number in (1, 2)
    ]
    for job in jobs:
        job.submit("--nodelist=n1")
    ends = [job.exit() for job in jobs]
    assert [end["state"] for end in ends] == ["succeeded", "succeeded"]
    ports = {job.lines("slurm/attempts.jsonl")[0]["port"] for job in jobs}
    assert len(ports) == 2
