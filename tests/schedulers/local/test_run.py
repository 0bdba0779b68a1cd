"""A job on the local target from submit to its end: what it runs, what it prints, how it is said to have ended."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import schedulers
from schedulers import Reason, SpecError, State
from schedulers.errors import SnapshotError
from schedulers.local.target import LocalOptions, LocalTarget
from schedulers.store.record import Record
from schedulers.target import TargetContext
from tests.waiting import until

from .conftest import Submit, of_job, printed, until_printed

HOSTILE = (
    "", " ", "a b", "'", '"', "$(touch pwned)", "`id`", "\\", "\n", "a\nb", "*", "~", "--", "-x", "--name=x", "ü€🏖",
    "{logs}", "%s", "#", ";", "a" * 100_000, "\udcff",
)  # fmt: skip


def test_arguments_arrive_bit_for_bit(submit: Submit) -> None:
    job = submit("import sys, json; print(json.dumps(sys.argv))", HOSTILE)
    assert job.wait().state is State.SUCCEEDED
    assert json.loads(printed(job)) == ["train.py", *HOSTILE]


def test_runs_where_it_was_submitted_with_its_own_environment(submit: Submit, project: Path) -> None:
    job = submit(
        "import os, json; print(json.dumps([os.getcwd(), os.environ['X'], os.environ['ACCEL_JOB_ID']]))",
        env={"X": "a $b 'c'\n"},
    )
    job.wait()
    assert json.loads(printed(job)) == [str(project), "a $b 'c'\n", job.id]


def test_runs_in_the_home_directory(submit: Submit, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs run in place there; packing the home directory is refused."""
    monkeypatch.setenv("HOME", str(project))
    job = submit("import os; print(os.getcwd())")
    assert (job.wait().state, printed(job)) == (State.SUCCEEDED, f"{project}\n")
    with pytest.raises(SnapshotError, match="is your home directory"):
        submit("", options={"snapshot": True})


def test_a_module_and_a_command(home: Path, project: Path) -> None:
    (project / "pkg").mkdir()
    (project / "pkg/__main__.py").write_text("import sys; print('module', sys.argv[1:])")
    module = schedulers.submit("pkg", ["-m"], entry="module", cwd=project)
    command = schedulers.submit("printf", ["%s|", "a b", "-c"], entry="command", cwd=project)
    assert (module.wait().state, command.wait().state) == (State.SUCCEEDED, State.SUCCEEDED)
    assert printed(module) == "module ['-m']\n"
    assert printed(command) == "a b|-c|"


@pytest.mark.parametrize(
    ("text", "code", "reason", "message"),
    [
        ("raise ValueError('bad data')", 1, Reason.EXIT_CODE, "rank 0: ValueError: bad data"),
        ("import sys; sys.exit(7)", 7, Reason.EXIT_CODE, "rank 0 exited with code 7"),
        ("import nothing_of_this_name", 1, Reason.SETUP, "No module named 'nothing_of_this_name'"),
        ("import os; os.abort()", 134, Reason.EXIT_CODE, "SIGABRT"),
        ("raise MemoryError", 1, Reason.OUT_OF_MEMORY, "MemoryError"),
    ],
)
def test_failures_say_why(submit: Submit, text: str, code: int, reason: Reason, message: str) -> None:
    status = submit(text).wait()
    assert (status.state, status.exit_code, status.reason) == (State.FAILED, code, reason)
    assert message in status.message


def test_a_script_that_is_not_there(home: Path, project: Path) -> None:
    (project / "train.py").write_text("")
    with pytest.raises(SpecError, match=r"no script at .*/trian\.py: it does not exist; did you mean 'train\.py'\?"):
        schedulers.submit("trian.py", cwd=project)
    assert schedulers.list_jobs() == []


def test_two_ranks_have_a_log_each_and_the_first_failure_is_the_job_s(submit: Submit) -> None:
    job = submit(
        """
import os, sys, torch.distributed as dist
dist.init_process_group("gloo")
print("I am", dist.get_rank(), "of", dist.get_world_size())
if dist.get_rank() == 1:
    raise RuntimeError("the cause")
dist.barrier()
""",
        procs_per_node=2,
    )
    status = job.wait()
    assert status.exit_code == 1
    assert status.message == "rank 1: RuntimeError: the cause"
    said = {line.rank: line.text for line in job.logs() if line.text.startswith("I am")}
    assert said == {0: "I am 0 of 2\n", 1: "I am 1 of 2\n"}


def test_restarts_are_attempts_with_logs_of_their_own(submit: Submit) -> None:
    job = submit(
        "import os, sys\na = os.environ['TORCHELASTIC_RESTART_COUNT']\nprint('attempt', a)\nsys.exit(a != '2')",
        max_restarts=2,
    )
    status = job.wait()
    assert (status.state, status.attempt) == (State.SUCCEEDED, 2)
    assert [(line.attempt, line.text) for line in job.logs(ranks=[0])] == [(n, f"attempt {n}\n") for n in range(3)]


def test_nothing_of_a_job_is_left_when_it_has_ended(submit: Submit) -> None:
    job = submit("import subprocess\nsubprocess.Popen(['setsid', 'sleep', '1000'])\nprint('x', flush=True)")
    assert job.wait().state is State.SUCCEEDED
    assert of_job(job) == []


def test_setup_runs_first_and_its_failure_is_the_job_s(home: Path, project: Path) -> None:
    (project / "train.py").write_text("print(open('made').read())")
    make = (sys.executable, "-c", "open('made', 'w').write('by setup')")
    good, bad = (
        schedulers.submit_spec(schedulers.JobSpec(argv=("train.py",), code=str(project), setup=(setup,)), "local")
        for setup in (make, ("false",))
    )
    assert good.wait().state is State.SUCCEEDED
    assert printed(good) == "by setup\n"
    status = bad.wait()
    assert (status.state, status.reason, status.exit_code) == (State.FAILED, Reason.SETUP, 1)
    assert printed(bad) == ""


def test_secrets_reach_the_process_and_nothing_on_disk(
    submit: Submit, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_TOKEN", "s3cr3t-of-mine")
    (tmp_path / "token").write_text("0ther-s3cr3t\n")
    job = submit(
        "import os; assert (os.environ['A'], os.environ['B']) == ('s3cr3t-of-mine', '0ther-s3cr3t')",
        secrets={"A": "env:MY_TOKEN", "B": f"file:{tmp_path / 'token'}"},
    )
    assert job.wait().state is State.SUCCEEDED
    kept = [path for path in home.rglob("*") if path.is_file() and b"s3cr3t" in path.read_bytes()]
    assert kept == []


def test_a_secret_that_is_gone_when_the_job_starts(submit: Submit, project: Path, tmp_path: Path) -> None:
    """The references are resolved where the ranks start, after the job has waited for its turn."""
    secret = tmp_path / "token"
    secret.write_text("s3cr3t")
    first = submit("import time; time.sleep(1000)", name="blocker.py", options={"concurrency": 1})
    second = submit("", secrets={"A": f"file:{secret}"}, options={"concurrency": 1})
    secret.unlink()
    first.cancel()
    status = second.wait()
    assert (status.state, status.reason) == (State.FAILED, Reason.SETUP)
    assert f"secret A: {secret}: No such file or directory" in status.message


def test_a_snapshot_runs_the_code_as_it_was(submit: Submit, project: Path) -> None:
    (project / "helper.py").write_text("text = 'as submitted'")
    first = submit("import time; time.sleep(1000)", name="blocker.py", options={"concurrency": 1})
    second = submit("import helper; print(helper.text)", options={"concurrency": 1, "snapshot": True})
    (project / "helper.py").write_text("text = 'edited since'")
    first.cancel()
    assert second.wait().state is State.SUCCEEDED
    assert printed(second) == "as submitted\n"


def test_a_job_inside_a_job_does_not_take_itself_for_a_part_of_it(submit: Submit) -> None:
    job = submit(
        """
import os, schedulers
open("inner.py", "w").write("import os; print(os.environ['WORLD_SIZE'], os.environ['ACCEL_JOB_ID'])")
inner = schedulers.submit("inner.py", options={"concurrency": 2})
inner.wait()
print(inner.id, *[line.text.strip() for line in inner.logs()])
""",
        options={"concurrency": 2},
    )
    assert job.wait().state is State.SUCCEEDED
    inner, world, seen = printed(job).split()
    assert world == "1"
    assert inner == seen != job.id


def test_submitting_twice_starts_one_supervisor(submit: Submit, home: Path) -> None:
    job = submit("print('once')")
    target = LocalTarget(TargetContext(name="local", options=LocalOptions(), jobs=home / "jobs"))
    assert target.submit(job.record.plan()) == job.id
    job.wait()
    assert target.submit(job.record.plan()) == job.id
    assert printed(job) == "once\n"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"nodes": 2}, "one machine"),
        ({"secrets": {"A": "vault:x"}}, "env:NAME and file:PATH"),
        ({"options": {"concurrency": 0}}, "1 or more"),
        ({"options": {"cpu": True}, "gpus": 1}, "and --gpus contradict each other: keep one"),
        ({"options": {"concurency": 1}}, "concurrency"),
        ({"secrets": {"A": "env:NOT_SET_ANYWHERE"}}, "secret A: NOT_SET_ANYWHERE is not set"),
        ({"secrets": {"A": "file:/not/there"}}, "secret A: /not/there: No such file"),
        ({"gpus": 1000}, "--gpus 1000: this machine has"),
        ({"cpus": 10_000}, "--cpus 10000: this process may use"),
    ],
)
def test_what_the_target_cannot_do_is_refused_before_anything_is_written(
    submit: Submit, home: Path, options: dict[str, object], says: str
) -> None:
    with pytest.raises(schedulers.SchedulerError, match=says):
        submit("", **options)
    assert not list((home / "jobs").glob("*")) if (home / "jobs").exists() else True


def test_links_to_nothing_and_files_that_vanish_among_the_logs_end_nothing(submit: Submit, project: Path) -> None:
    """Until the supervisor has looked at them; and a line without an end is delivered while the job runs."""
    text = f"""if True:
        import os, sys, time, pathlib
        logs = pathlib.Path(os.environ['ACCEL_JOB_DIR'], 'logs')
        (logs / 'rank-7.a0.log').symlink_to('nowhere')
        (logs / 'rank-8.a0.log').symlink_to('rank-8.a0.log')
        sys.stdout.write('x' * {3 << 20})
        sys.stdout.flush()
        while '"rank-0.a0": {3 << 20}' not in (logs / 'sizes.jsonl').read_text():
            (logs / 'rank-9.a0.log').write_text('there')
            (logs / 'rank-9.a0.log').unlink()
        pathlib.Path('noted').touch()
        while not os.path.exists('end'):
            time.sleep(0.01)
        print('!')
    """
    job = submit(text)
    until(lambda: (project / "noted").exists() or job.status().state.final, "the logs' sizes are noted")
    pieces = [line for line in job.logs() if line.rank == 0]
    (project / "end").touch()
    assert [(len(line.text), line.partial) for line in pieces] == [((1 << 20) - 2, True)] * 3
    assert job.wait().state is State.SUCCEEDED
    assert printed(job) == "x" * (3 << 20) + "!\n"
    assert [line.text for line in job.logs(ranks=[0], tail=1)][-1] == "xxxxxx!\n"


def test_the_terminal_may_close(home: Path, project: Path) -> None:
    """Submitted from a terminal of its own, which is then hung up."""
    import pty

    (project / "train.py").write_text(
        "import os, time\nprint('started', flush=True)\nwhile not os.path.exists('go'): time.sleep(0.01)\nprint('done')"
    )
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(project)
        os.execv(sys.executable, [sys.executable, "-m", "accel", "submit", "train.py"])
    until(lambda: any(isinstance(r, Record) and r.native_id for r in schedulers.list_jobs()), "the job submitted")
    job = schedulers.find("@last")
    until_printed(job, "started")
    os.close(terminal)
    os.waitpid(pid, 0)
    (project / "go").touch()
    assert job.wait(60).state is State.SUCCEEDED
    assert printed(job) == "started\ndone\n"


def test_the_digits_reach_97_percent(home: Path) -> None:
    root = Path(__file__).parents[3]
    job = schedulers.submit("examples/digits/train.py", procs_per_node=2, cwd=root)
    status = job.wait()
    assert status.state is State.SUCCEEDED, "".join(line.text for line in job.logs())
    [said] = [line for line in job.logs() if line.text.startswith("test accuracy:")]
    assert said.rank == 0
    assert float(said.text.split()[-1]) >= 0.97


def test_the_plan_is_pure_and_spec_errors_name_the_way_out(home: Path) -> None:
    target = LocalTarget(TargetContext(name="local", options=LocalOptions(), jobs=home))
    spec = schedulers.JobSpec(argv=("train.py", "a b"), code="/project", procs_per_node=2)
    assert target.plan(spec, "j1") == target.plan(spec, "j1")
    assert not home.exists()
    with pytest.raises(SpecError, match="accel targets"):
        target.plan(schedulers.JobSpec(argv=("x",), nodes=2), "j1")


def test_closing_standard_output_does_not_matter(home: Path, project: Path) -> None:
    (project / "train.py").write_text("print('hi')")
    done = subprocess.run(
        ["sh", "-c", 'exec "$0" -m accel submit train.py >&-', sys.executable], cwd=project, timeout=60, check=False
    )
    assert done.returncode in (0, 1)
    assert schedulers.find("@last").wait(60).state is State.SUCCEEDED
