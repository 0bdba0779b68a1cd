"""How local jobs end when they are told to, run out of time, or lose one of their processes; and what is then left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import schedulers
from schedulers import Job, Reason, State
from schedulers.job import JobSpec
from schedulers.local.job_files import JobFiles
from schedulers.processes import Identity
from tests.marks import long
from tests.waiting import until

from .conftest import Submit, identities, of_job, printed, until_printed

STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
time.sleep(1000)
"""

POLITE = """
import signal, sys, time
def save(*_):
    print("saved", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
time.sleep(1000)
"""

LINGERING = """
import os, signal, sys, time
def linger(*_):
    print("told", flush=True)
    while not os.path.exists("go"): time.sleep(0.01)
    sys.exit(0)
signal.signal(signal.SIGTERM, linger)
print("ready", flush=True)
while True: time.sleep(0.01)
"""

HOLDS = """
import os
names = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
assert not any(name.endswith("supervisor.lock") for name in names), names
"""

WITH_COMPANY = """
import subprocess, sys, time
subprocess.Popen(["setsid", "sleep", "1000"])
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
print("ready", flush=True)
time.sleep(1000)
"""


def test_cancel_lets_the_program_save(submit: Submit) -> None:
    job = submit(POLITE)
    until_printed(job, "ready")
    status = job.cancel()
    assert (status.state, status.reason) == (State.CANCELLED, Reason.USER)
    assert printed(job) == "ready\nsaved\n"
    assert of_job(job) == []


def test_cancel_kills_after_the_grace(submit: Submit) -> None:
    job = submit(STUBBORN, grace_s=0.3)
    until_printed(job, "ready")
    assert job.cancel().state is State.CANCELLED
    assert of_job(job) == []


def test_cancel_before_it_started_and_after_it_ended(submit: Submit) -> None:
    running = submit(POLITE, options={"concurrency": 1})
    until_printed(running, "ready")
    queued = submit("print('never')", options={"concurrency": 1})
    until(lambda: "waits for" in queued.status().message, "a reason for waiting")
    assert queued.cancel().message == "cancelled before it started"
    assert printed(queued) == ""
    assert running.cancel().state is State.CANCELLED
    assert running.cancel().state is State.CANCELLED


TOLD_EARLY = """
import os, signal, sys
from pathlib import Path
from schedulers.local.job_files import JobFiles
from schedulers.local.supervisor import Supervisor
supervisor = Supervisor(JobFiles(Path(sys.argv[1])), 0)
os.kill(os.getpid(), signal.SIGINT)
print(supervisor.run().state.value)
"""


def test_a_cancel_before_it_waits_is_not_forgotten(submit: Submit) -> None:
    job = submit("print('ran')")
    assert job.wait().state is State.SUCCEEDED
    argv = [sys.executable, "-c", TOLD_EARLY, str(job.record.directory)]
    assert subprocess.run(argv, capture_output=True, text=True).stdout == "cancelled\n"
    assert printed(job) == "ran\n"


TOLD_WHILE_IT_WRITES = """
import os, signal, sys
from pathlib import Path
from schedulers.hosts.supervisor.slots import Slots
from schedulers.local import supervisor as module
from schedulers.local.job_files import JobFiles
supervisor = module.Supervisor(JobFiles(Path(sys.argv[1])), 0)
Slots._acquire = lambda *_: ([], "waits")
def write(document):
    os.kill(os.getpid(), signal.SIGINT)
    print("whole", document["message"])
supervisor._progress.write = write
print(supervisor.run().state.value)
"""


def test_a_cancel_does_not_cut_short_what_is_being_written(submit: Submit) -> None:
    """An exception out of the signal's handler would: it may leave a file half written, or a lock held."""
    job = submit("print('ran')")
    assert job.wait().state is State.SUCCEEDED
    argv = [sys.executable, "-c", TOLD_WHILE_IT_WRITES, str(job.record.directory)]
    assert subprocess.run(argv, capture_output=True, text=True).stdout == "whole waits\ncancelled\n"


def test_a_job_that_waits_for_another_can_be_cancelled(submit: Submit) -> None:
    first = submit(POLITE)
    second = submit("print('never')", name="second.py", after=(first,))
    until(lambda: first.id in second.status().message, "a reason for waiting")
    assert second.cancel().message == "cancelled before it started"
    assert first.cancel().state is State.CANCELLED


def test_a_job_whose_supervisor_was_killed_runs_for_as_long_as_its_ranks_take(submit: Submit) -> None:
    """The launcher holds the lock too, and the fork server where the launcher was killed with the supervisor."""
    job = submit(LINGERING, procs_per_node=2, grace_s=60)
    until_printed(job, "ready", times=2)
    until(lambda: job.status().state is State.RUNNING, "it is noted to run")
    processes = identities(job)
    processes["supervisor"].send(signal.SIGKILL)
    until_printed(job, "told", times=2)
    assert job.status().state is State.RUNNING
    processes["launcher"].send(signal.SIGKILL)
    until(lambda: not processes["launcher"].alive(), "the launcher's end")
    assert job.status().state is State.RUNNING
    (_directory(job) / "go").touch()
    status = job.wait(60)
    assert (status.state, status.reason) == (State.FAILED, Reason.LOST)
    assert f"process {processes['supervisor'].pid}" in status.message
    until(lambda: of_job(job) == [], "the end of the last process, which nobody waits for")


def test_no_program_holds_the_lock(submit: Submit) -> None:
    for procs in (1, 2):
        job = submit(HOLDS, procs_per_node=procs)
        assert job.wait().state is State.SUCCEEDED, printed(job)


def test_the_time_limit_ends_it_in_order(submit: Submit) -> None:
    job = submit(POLITE, time_limit_s=1.0)
    status = job.wait()
    assert (status.state, status.reason) == (State.FAILED, Reason.TIME_LIMIT)
    assert "1 s" in status.message
    assert of_job(job) == []


@pytest.mark.parametrize("procs", [2, *long(1)])
@pytest.mark.parametrize(
    ("victims", "signum", "states"),
    [
        (("supervisor",), signal.SIGKILL, {(State.FAILED, Reason.LOST)}),
        (("supervisor",), signal.SIGTERM, {(State.FAILED, Reason.NODE_FAILURE)}),
        *long(
            (("supervisor",), signal.SIGINT, {(State.CANCELLED, Reason.USER)}),
            (("supervisor",), signal.SIGHUP, set()),
        ),
        (("launcher",), signal.SIGKILL, {(State.FAILED, Reason.EXIT_CODE)}),
        *long(
            (("launcher",), signal.SIGTERM, {(State.FAILED, Reason.EXIT_CODE)}),
            (("launcher",), signal.SIGUSR1, set()),
            (("launcher",), signal.SIGUSR2, set()),
        ),
        (("supervisor", "launcher"), signal.SIGKILL, {(State.FAILED, Reason.LOST)}),
    ],
)
def test_whoever_is_killed_nothing_is_left(
    submit: Submit, procs: int, victims: tuple[str, ...], signum: int, states: set[tuple[State, Reason]]
) -> None:
    text = WITH_COMPANY if procs == 1 else "import torch\n" + WITH_COMPANY
    job = submit(text, procs_per_node=procs, grace_s=5)
    until_printed(job, "ready", times=procs)
    until(lambda: job.status().state is State.RUNNING, "it is noted to run")
    processes = identities(job)
    for victim in victims:
        processes[victim].send(signum)
    if not states:
        assert job.status().state is State.RUNNING
        assert len(of_job(job)) >= 3 * procs
        job.cancel()
        return
    status = job.wait(60)
    assert (status.state, status.reason) in states
    if (victims, signum) == (("launcher",), signal.SIGKILL):
        assert status.message == "accel launch was killed by SIGKILL"
    until(lambda: of_job(job) == [], f"the end of {of_job(job)}", seconds=60)


def test_a_launcher_killed_by_a_signal_without_a_name(submit: Submit) -> None:
    job = submit(POLITE, procs_per_node=2)
    until_printed(job, "ready", times=2)
    identities(job)["launcher"].send(40)
    status = job.wait(60)
    assert (status.state, status.reason) == (State.FAILED, Reason.EXIT_CODE)
    assert status.message == "accel launch was killed by signal 40"


def test_a_rank_killed_for_no_known_reason_is_named(submit: Submit) -> None:
    job = submit("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    status = job.wait()
    assert (status.exit_code, status.reason) == (137, Reason.EXIT_CODE)
    assert "SIGKILL" in status.message


def test_another_process_with_the_supervisor_s_number_is_not_taken_for_it(submit: Submit) -> None:
    job = submit(POLITE)
    until_printed(job, "ready")
    processes = identities(job)
    processes["supervisor"].send(signal.SIGKILL)
    for name, process in processes.items():
        until(lambda process=process: not process.alive(), f"the {name}'s end")  # type: ignore[misc]
    # The number comes round again, or the machine has restarted: here it is this very process that has it.
    mine = Identity.of(os.getpid())
    assert mine is not None
    JobFiles(job.record.directory).set_supervisor(Identity(mine.pid, "another-boot.1"))
    status = job.wait(60)
    assert (status.state, status.reason) == (State.FAILED, Reason.LOST)


def test_a_final_state_never_changes(submit: Submit) -> None:
    job = submit("print('x')")
    done = job.wait()
    (job.record.directory / "exit.json").unlink()
    assert job.status() == done


def test_after_waits_for_success_and_takes_over_a_failure(submit: Submit) -> None:
    first = submit("import os, time\nwhile not os.path.exists('go'): time.sleep(0.01)", name="first.py",
                   options={"concurrency": 3})  # fmt: skip
    second = submit("print('second')", name="second.py", after=(first,), options={"concurrency": 3})
    until(lambda: first.id in second.status().message, "a reason for waiting")
    assert second.status().state is State.QUEUED
    assert second.status().reason is Reason.DEPENDENCY
    (_directory(first) / "go").touch()
    assert second.wait().state is State.SUCCEEDED

    failing = submit("raise SystemExit(3)", name="failing.py", options={"concurrency": 3})
    never = submit("print('never')", name="never.py", after=(failing,), options={"concurrency": 3})
    after_never = submit("print('never')", name="never2.py", after=(never,), options={"concurrency": 3})
    for job in (never, after_never):
        status = job.wait()
        assert (status.state, status.reason) == (State.CANCELLED, Reason.DEPENDENCY)
        assert printed(job) == ""


def _directory(job: Job) -> Path:
    return Path(job.spec.code)


def test_a_shutdown_is_no_cancel(submit: Submit) -> None:
    """SIGTERM to the supervisors of a running and a waiting job, and to the ranks, as at a reboot."""
    running = submit(POLITE)
    until_printed(running, "ready")
    waiting = submit("", after=[running.id])
    until(lambda: waiting.status().reason is Reason.DEPENDENCY, "it waits")
    for job in (waiting, running):
        supervisor = JobFiles(job.record.directory).supervisor()
        assert supervisor is not None
        supervisor.send(signal.SIGTERM)
    for job in (waiting, running):
        status = job.wait(60)
        assert (status.state, status.reason) == (State.FAILED, Reason.NODE_FAILURE)
        assert status.message == "its supervisor received SIGTERM, as at a shutdown of the machine"


def test_a_cancel_that_cannot_be_written_reaches_the_supervisor(submit: Submit) -> None:
    job = submit(POLITE)
    until_printed(job, "ready")
    (job.record.directory / f"local/.cancel.{os.getpid()}").mkdir()  # where the request is written first
    assert job.cancel().state is State.CANCELLED


def setting_up(project: Path) -> Job:
    """Return a job whose setup command has started processes in two sessions."""
    setup = (("sh", "-c", "setsid sleep 1000 & sleep 1000"),)
    job = schedulers.submit_spec(JobSpec(argv=("true",), entry="command", code=str(project), setup=setup), "local")
    until(lambda: len(of_job(job)) >= 3, "the setup command runs")
    return job


def test_a_cancel_during_the_setup(home: Path, project: Path) -> None:
    job = setting_up(project)
    status = job.cancel()
    assert (status.state, status.message) == (State.CANCELLED, "cancelled during its setup")
    assert of_job(job) == []


def test_a_supervisor_killed_during_the_setup_leaves_nothing(home: Path, project: Path) -> None:
    job = setting_up(project)
    supervisor = JobFiles(job.record.directory).supervisor()
    assert supervisor is not None
    supervisor.send(signal.SIGKILL)
    assert job.wait(60).reason is Reason.LOST
    until(lambda: of_job(job) == [], "the end of the setup command")


@pytest.mark.parametrize("procs", [1, 2])
def test_a_job_that_the_job_has_submitted_runs_on(submit: Submit, procs: int, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    command = f"read line <{gate}; echo $line >{tmp_path}/out"
    job = submit(
        "import os, schedulers\n"
        "if os.environ.get('RANK', '0') == '0':\n"
        f"    schedulers.submit('sh', ['-c', {command!r}], entry='command', target='local', options={{'cpu': True}})\n",
        procs_per_node=procs,
    )
    assert job.wait(120).state is State.SUCCEEDED, printed(job)
    (other,) = (listed for listed in schedulers.list_jobs() if listed.id != job.id)
    until(lambda: schedulers.find(other.id).status().state is State.RUNNING, "it runs")
    gate.write_text("well\n")
    assert schedulers.find(other.id).wait(120).state is State.SUCCEEDED
    assert (tmp_path / "out").read_text() == "well\n"


def test_a_job_that_waits_for_another_asks_again(
    submit: Submit, project: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a relative ACCEL_HOME nor a store that cannot be read for a while fails the waiting job."""
    monkeypatch.chdir(home.parent)
    monkeypatch.setenv("ACCEL_HOME", home.name)
    text = "import os, time\nprint('ready', flush=True)\nwhile not os.path.exists('go'): time.sleep(0.01)\n"
    first = submit(text, name="first.py", options={"concurrency": 2})
    until_printed(first, "ready")
    events, away = first.record.directory / "events.jsonl", first.record.directory / "away"
    second = submit("print('ran')", name="second.py", after=(first,), options={"concurrency": 2})
    events.rename(away)
    events.mkdir()
    log = second.record.directory / "logs/supervisor.txt"
    until(lambda: f"job {first.id}: " in log.read_text(), "it has looked in vain")
    assert second.status().reason is Reason.DEPENDENCY
    events.rmdir()
    away.rename(events)
    (Path(first.spec.code) / "go").touch()
    assert first.wait(60).state is State.SUCCEEDED
    assert second.wait(60).state is State.SUCCEEDED
