"""`accel submit --target slurm` beside sbatch, torchrun and submitit, on a real Slurm cluster of four nodes in network
namespaces of this computer (`tests/clusters/slurm.py`): they share its processors, and their network has no latency.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .measure import WAIT_S, Bar, difference, interleaved, report, report_limits, until, wall
from .slurm_lab import BIN, SCRIPTS, Lab, cluster_lab

JOBS, SINGLE = 1000, 20
RANKS = 4
CALLS_A_MINUTE = 45
SHAPE = ("--nodes", "2", "--procs-per-node", "2", "--cpus", "2")
ONE = ("--cpus", "1")
AWAY_S = 3.0  # how long a job runs before it is ended or warned: whoever waits for it has then settled
LONG_AWAY_S = 60.0  # when whoever asks Slurm again and again may have become slow


def slurm_submit(rounds: int) -> bool:
    """The whole command that submits a job of two nodes, and no more than that: the job does not start."""
    with cluster_lab() as lab:
        if lab is None:
            return False
        hold = lab.script("#SBATCH --hold\nsrun ./nothing.sh", nodes=2, cpus=2)
        ours = [str(BIN / "accel"), "submit", "--target", "held", *SHAPE, "--no-python", "./nothing.sh"]
        folder = str(lab.fresh())
        measures = {
            "sbatch": wall(["sbatch", str(hold)], lab.env),
            "accel submit": wall(ours, lab.env, str(lab.project)),
            "a script with submitit": wall([*_submitit(folder), "hold"], lab.env),
        }
        seconds = interleaved(measures, rounds)
        lab.clear()
        over = difference(seconds, "accel submit", "sbatch")
        difference(seconds, "a script with submitit", "sbatch")
        return report_limits("slurm_submit", seconds, {over: 0.3})


def slurm_end(rounds: int) -> bool:
    """From the last thing that a job does, and from the moment at which squeue no longer says that it runs, to the
    return of `accel wait`, of submitit's `job.results()`, and of `sbatch --wait`. And from the end of a job that leaves
    no result, after a minute of waiting for it, with what was asked of Slurm meanwhile."""
    with cluster_lab() as lab:
        if lab is None:
            return False
        seconds: dict[str, list[float]] = {}
        taken_away, calls = "scancel after a minute to accel wait", "calls of squeue and sacct in that minute"
        ends = {"accel wait": _waited, "submitit results()": _waited_by_submitit, "sbatch --wait": _waited_by_sbatch}
        for _ in range(rounds):
            for name, measure in ends.items():
                after_stamp, after_slurm = measure(lab)
                seconds.setdefault(f"stamp to {name}", []).append(after_stamp)
                seconds.setdefault(f"Slurm's end to {name}", []).append(after_slurm)
            seen_s, asked = _waited_for_nothing(lab)
            seconds.setdefault(taken_away, []).append(seen_s)
            seconds.setdefault(calls, []).append(asked)
        limits = {"stamp to accel wait": 2, "Slurm's end to accel wait": 2, taken_away: 2, calls: CALLS_A_MINUTE}
        return report_limits("slurm_end", seconds, limits)


def slurm_list(rounds: int) -> bool:
    """`accel list --all` of a thousand jobs that Slurm holds, most of them one array, the others each with options of
    its own, and what it asks of Slurm."""
    with cluster_lab() as lab:
        if lab is None:
            return False
        values = ",".join(map(str, range(JOBS - SINGLE)))
        lab.accel("submit", "--target", "held", *ONE, "--sweep", f"n={values}", "--no-python", "./nothing.sh")
        for at in range(SINGLE):
            option = f"sbatch={{hold: true, nice: {at + 1}}}"
            lab.accel("submit", "--target", "held", "--option", option, *ONE, "--no-python", "./nothing.sh")
        ours, news = f"accel list --all, {JOBS} jobs", "accel list --all, news of each"
        command = [str(BIN / "accel"), "list", "--all"]
        measures = {
            "squeue alone": wall(["squeue", "--me", "--array", "--noheader", "--states=all"], lab.env),
            news: _listed_with_news(lab, command),
            ours: _listed(lab, command),
        }
        seconds = interleaved(measures, rounds)
        lab.forget()
        shown = lab.accel("list", "--all", env={"PATH": lab.noted_path}).splitlines()
        calls = [words for _, words in lab.noted()]
        queued = sum(line.split("\t")[2] == "queued" for line in shown)
        if queued != JOBS:
            raise SystemExit(f"accel list shows {queued} queued jobs, not {JOBS}")
        lab.clear()
        seconds["calls of squeue, sacct and scontrol"] = [float(len(calls))]
        return report_limits("slurm_list", seconds, {ours: 1, news: 1, "calls of squeue, sacct and scontrol": 2})


def slurm_requeue(rounds: int) -> bool:
    """Four ranks are warned and run again: from the warning to the request to Slurm, and from the start of the batch
    script to the first step, which is beside that of torchrun in a script that is requeued by hand."""
    with cluster_lab() as lab:
        if lab is None:
            return False
        seconds: dict[str, list[float]] = {}
        for _ in range(rounds):
            for name, value in {**_preempted(lab), **_requeued(lab)}.items():
                seconds.setdefault(name, []).append(value)
        over = difference(seconds, "batch script to first step, accel", "batch script to first step, torchrun")
        return report_limits("slurm_requeue", seconds, {"SIGUSR1 to scontrol requeue": 1, over: 1})


def slurm_launch(rounds: int) -> bool:
    """From the command to the first all-reduce of two ranks on each of two nodes."""
    with cluster_lab() as lab:
        if lab is None:
            return False
        ours, base = "accel submit", "sbatch, srun torchrun"
        measures = {
            ours: _reduced_by(lab, lambda stamps: [str(BIN / "accel"), "submit", "--target", "lab", *SHAPE,
                                                   "all_reduce.py", str(stamps)]),
            base: _reduced_by(lab, lambda _: ["sbatch", str(lab.torchrun("all_reduce.py"))]),
            "submitit, a task a rank": _reduced_by(lab, lambda stamps: [*_submitit(str(lab.fresh())), "all_reduce",
                                                                        str(stamps)]),
        }  # fmt: skip
        return report("slurm_launch", interleaved(measures, rounds), [Bar(ours=ours, base=base, limit=1)])


def _submitit(folder: str) -> list[str]:
    return [sys.executable, str(SCRIPTS / "submitit_job.py"), folder]


def _listed(lab: Lab, command: list[str]) -> Callable[[], float]:
    """Without what another `accel` was told by Slurm a moment ago."""
    listed = wall(command, lab.env, str(lab.project))

    def measure() -> float:
        lab.forget()
        return listed()

    return measure


def _listed_with_news(lab: Lab, command: list[str]) -> Callable[[], float]:
    """The reason for which every job waits is another one each time."""
    listed, verbs = _listed(lab, command), itertools.cycle(("hold", "uhold"))

    def measure() -> float:
        numbers = sorted(set(lab.run("squeue", "--me", "--noheader", "--format=%F").split()))
        lab.run("scontrol", next(verbs), ",".join(numbers))
        return listed()

    return measure


def _waited(lab: Lab) -> tuple[float, float]:
    stamp, go = _stamp_and_go(lab)
    job = lab.accel("submit", "--target", "lab", *ONE, "--no-python", "./ending.sh", str(stamp), str(go))
    return _ended(lab, [str(BIN / "accel"), "wait", job], lab.number(job), stamp, go)


def _waited_by_submitit(lab: Lab) -> tuple[float, float]:
    stamp, go = _stamp_and_go(lab)
    command = [*_submitit(str(lab.fresh())), "stamp", str(stamp), str(go)]
    with subprocess.Popen(command, env=lab.env, cwd=lab.project, stdout=subprocess.PIPE, text=True) as waiting:
        assert waiting.stdout is not None
        number = waiting.stdout.readline().strip()
        slurm_s = _let_end(lab, number, stamp, go)
        returned = float(waiting.stdout.read())
    lab.idle()
    return returned - float(stamp.read_text()), returned - slurm_s


def _waited_by_sbatch(lab: Lab) -> tuple[float, float]:
    stamp, go = _stamp_and_go(lab)
    script = lab.script(f"srun {lab.project}/ending.sh {stamp} {go}")
    before = set(lab.run("squeue", "-h", "-o", "%A").split())
    return _ended(lab, ["sbatch", "--wait", str(script)], None, stamp, go, before)


def _stamp_and_go(lab: Lab) -> tuple[Path, Path]:
    folder = lab.fresh()
    return folder / "stamp", folder / "go"


def _ended(
    lab: Lab, command: Sequence[str], number: str | None, stamp: Path, go: Path, before: Collection[str] = ()
) -> tuple[float, float]:
    """How long after the job's end, and after Slurm's knowledge of it, the command returns."""
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(lambda: (lab.run(*command), time.time())[1])
        if number is None:
            until(stamp.with_name("stamp.began").exists, "the job runs")
            (number,) = set(lab.run("squeue", "-h", "-o", "%A").split()).difference(before)
        slurm_s = _let_end(lab, number, stamp, go)
        returned = waiting.result()
    lab.idle()
    return returned - float(stamp.read_text()), returned - slurm_s


def _let_end(lab: Lab, number: str, stamp: Path, go: Path) -> float:
    """Lets the job end; when squeue first did not say any more that it runs."""
    until(stamp.with_name("stamp.began").exists, "the job runs")
    time.sleep(AWAY_S)
    go.touch()
    until(lambda: lab.state(number) != "RUNNING", "the job has ended")
    return time.time()


def _waited_for_nothing(lab: Lab) -> tuple[float, float]:
    """Of a job that is taken out of the queue by hand: it leaves no result, so Slurm has to be asked. And how often it
    was."""
    job = lab.accel("submit", "--target", "held", *ONE, "--no-python", "./nothing.sh")
    number = lab.number(job)
    lab.noted()
    env = {**lab.env, "PATH": lab.noted_path}
    waiting = subprocess.Popen([BIN / "accel", "wait", job], env=env, cwd=lab.project, stdout=subprocess.DEVNULL)
    time.sleep(LONG_AWAY_S)
    asked = len(lab.noted())
    lab.run("scancel", number)
    started = time.time()
    waiting.wait(WAIT_S)
    return time.time() - started, asked


def _preempted(lab: Lab) -> dict[str, float]:
    stamps, env = _stamps(lab)
    lab.noted()
    job = lab.accel("submit", "--target", "lab", *SHAPE, "--max-restarts", "1", "preempted.py", str(stamps), env=env)
    until(lambda: _has_stamps(stamps, "0-"), "all ranks have done a step")
    time.sleep(AWAY_S)
    number = lab.number(job)
    warned = time.time()
    lab.run("scancel", "--signal=USR1", number)
    lab.accel("wait", job)
    asked = next(when for when, words in lab.noted() if words.startswith("scontrol requeue"))
    started, stepped = _second_run(stamps)
    lab.idle()
    return {
        "SIGUSR1 to scontrol requeue": asked - warned,
        "scontrol requeue to batch script, accel": started - asked,
        "batch script to first step, accel": stepped - started,
    }


def _requeued(lab: Lab) -> dict[str, float]:
    stamps, env = _stamps(lab)
    number = lab.sbatch(lab.torchrun("preempted.py"), env)
    until(lambda: _has_stamps(stamps, "0-"), "all ranks have done a step")
    time.sleep(AWAY_S)
    asked = time.time()
    lab.run("scontrol", "requeue", number)
    until(lambda: _has_stamps(stamps, "1-"), "all ranks have done a step again")
    started, stepped = _second_run(stamps)
    lab.idle()
    return {
        "scontrol requeue to batch script, torchrun": started - asked,
        "batch script to first step, torchrun": stepped - started,
    }


def _second_run(stamps: Path) -> tuple[float, float]:
    """When its batch script began, and when its last rank had done a step."""
    return float((stamps / "batch").read_text().split()[1]), _last(stamps, "1-")


def _stamps(lab: Lab) -> tuple[Path, dict[str, str]]:
    stamps = lab.fresh()
    return stamps, {"STAMPS": str(stamps), "PATH": lab.noted_path}


def _has_stamps(stamps: Path, prefix: str) -> bool:
    return len(list(stamps.glob(f"{prefix}[0-9]"))) == RANKS


def _last(stamps: Path, prefix: str) -> float:
    return max(float(path.read_text()) for path in stamps.glob(f"{prefix}[0-9]"))


def _reduced_by(lab: Lab, command: Callable[[Path], list[str]]) -> Callable[[], float]:
    def measure() -> float:
        stamps, env = _stamps(lab)
        words = command(stamps)
        started = time.time()
        lab.run(*words, env={"STAMPS": env["STAMPS"]})
        until(lambda: _has_stamps(stamps, "") and all(path.read_text() for path in stamps.glob("[0-9]")), "a sum")
        lab.idle()
        return _last(stamps, "") - started

    return measure
