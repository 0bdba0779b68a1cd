"""Jobs from the submit to the fetched model, on instances that are namespaces with a container's /opt/ml."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import schedulers
from schedulers import Job, Reason, State, Status
from schedulers.config.named_targets import load_target
from schedulers.errors import ConfigError, NotReady, SubmitError
from schedulers.jobs.prune import prune
from schedulers.sagemaker import logs, s3
from schedulers.sagemaker.aws import AwsError
from schedulers.store.store import Store
from tests.clusters.sagemaker import SageMaker
from tests.waiting import until

from .conftest import Submit, target_options

ROOT = Path(__file__).parents[3]


def runs(job: Job, text: str) -> None:
    """Waits until a rank has written this line."""

    def said() -> bool:
        found = [each for _, _, each in printed(job)]
        assert text in found or not job.status().state.final, (job.status(), found)
        return text in found

    until(said, f"a rank writes {text!r}")


def printed(job: Job) -> list[tuple[int | None, int, str]]:
    return [(line.rank, line.attempt, line.text) for line in job.logs() if line.rank is not None]


@pytest.mark.long  # test_docs.py submits a training and fetches its model in any run
def test_digits_from_the_submit_to_the_fetched_model(sagemaker: SageMaker, home: Path, tmp_path: Path) -> None:
    job = schedulers.submit(
        "train.py", ["--epochs", "2", "--save-model", "/opt/ml/model"],
        target="sagemaker", nodes=2, procs_per_node=2, time_limit_s=600.0, code=ROOT / "examples/digits",
        cwd=ROOT / "examples/digits", options=target_options(sagemaker),
    )  # fmt: skip
    status = job.wait(240)
    assert status.state is State.SUCCEEDED, (status, list(job.logs()), sagemaker.diagnose())
    lines = list(job.logs())
    assert any("accuracy" in line.text for line in lines if line.rank == 0), lines
    assert job.fetch(tmp_path / "fetched") == ["model"]
    assert list((tmp_path / "fetched/model").rglob("*.safetensors"))
    with pytest.raises(NotReady, match="exists already"):
        job.fetch(tmp_path / "fetched")


def test_the_value_of_a_function_is_fetched(sagemaker: SageMaker, home: Path, project: Path) -> None:
    factor = 3
    job = schedulers.submit(
        lambda n, *, m: (os.environ["RANK"], os.environ["WORLD_SIZE"], n * m * factor), args=[2], kwargs={"m": 7},
        target="sagemaker", nodes=2, procs_per_node=1, time_limit_s=600.0, cwd=project,
        options=target_options(sagemaker),
    )  # fmt: skip
    assert job.result(120) == ("0", "2", 42), sagemaker.diagnose()
    downloads = len(sagemaker.calls("s3", "GetObject"))
    assert job.result() == ("0", "2", 42)
    assert len(sagemaker.calls("s3", "GetObject")) == downloads


def test_what_a_rank_is_given(sagemaker: SageMaker, submit: Submit) -> None:
    """Arguments and variables byte for byte, and what SageMaker's toolkit sets."""
    letters = random.Random(5)
    strange = ["".join(letters.choices("ab-=$`'\"\\ \t\n\r;&|<>*?[]{}()!#~%é€\x01\x7f", k=12)) for _ in range(90)]
    words = ("007", "1.10", "-1", "", "a b", "a\nb", "--x", "--x", "$HOME", "*", *strange)
    text = """\
python3 -c 'import json, os, sys; print(json.dumps([sys.argv[1:], os.environ["LONG"], os.getcwd()]))' "$@"
for name in RANK WORLD_SIZE SM_MODEL_DIR SM_OUTPUT_DATA_DIR SM_CHANNEL_CODE NCCL_SOCKET_IFNAME ACCEL_JOB_ID; do
    eval "echo $name=\\$$name"
done
"""
    job = submit(text, *words, nodes=2, env={"LONG": "x" * 2000})
    assert job.wait(120).state is State.SUCCEEDED, sagemaker.diagnose()
    for rank in (0, 1):
        mine = [text for each, _, text in printed(job) if each == rank]
        argv, long, here = json.loads(mine[0])
        assert (argv, long) == (list(words), "x" * 2000)
        assert here.endswith("/code")
        assert mine[1:] == [
            f"RANK={rank}\n", "WORLD_SIZE=2\n", "SM_MODEL_DIR=/opt/ml/model\n",
            "SM_OUTPUT_DATA_DIR=/opt/ml/output/data\n", "SM_CHANNEL_CODE=/opt/ml/input/data/code\n",
            "NCCL_SOCKET_IFNAME=eth0\n", f"ACCEL_JOB_ID={job.id}\n",
        ]  # fmt: skip


def test_secrets_are_read_in_the_container(sagemaker: SageMaker, submit: Submit) -> None:
    """And are in no file that is sent, in no log and in no record."""
    sagemaker.client("secretsmanager").create_secret(Name="login", SecretString='{"token": "hush-1"}')
    sagemaker.client("ssm").put_parameter(Name="/team/key", Value="hush-2", Type="SecureString")
    secrets = {"TOKEN": "secretsmanager:login#token", "KEY": "ssm:/team/key"}
    job = submit('[ "$TOKEN $KEY" = "hush-1 hush-2" ] && echo right', secrets=secrets)
    assert job.wait(120).state is State.SUCCEEDED, sagemaker.diagnose()
    assert [text for _, _, text in printed(job)] == ["right\n"]
    lacking = submit("true", secrets={"TOKEN": "ssm:/team/no-such"})
    status = lacking.wait(120)
    assert status.message.startswith("secret TOKEN: ssm:/team/no-such: "), status


def test_prune_removes_what_only_the_job_needed(
    sagemaker: SageMaker, submit: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And uploads that nobody goes on with; what the job has left stays."""
    job = submit("echo 1 > $SM_MODEL_DIR/weights")
    assert job.wait(120).state is State.SUCCEEDED, sagemaker.diagnose()
    client = sagemaker.client("s3")
    client.create_multipart_upload(Bucket=sagemaker.bucket, Key="team/accel/content/abc")
    monkeypatch.setattr(s3, "_ORPHAN_S", -1.0)
    assert prune(Store.default(), ids=[job.id]).kept_reasons == ()
    keys = [each["Key"] for each in client.list_objects_v2(Bucket=sagemaker.bucket)["Contents"]]
    assert not [key for key in keys if "/jobs/" in key]
    assert [key for key in keys if key.endswith("/output/model.tar.gz")]
    assert "Uploads" not in client.list_multipart_uploads(Bucket=sagemaker.bucket)


def test_the_first_error_is_the_job_s(sagemaker: SageMaker, submit: Submit) -> None:
    job = submit('[ "$RANK" = 1 ] || sleep 600; echo "ValueError: no data" >&2; exit 3', nodes=2)
    status = job.wait(120)
    assert (status.state, status.reason, status.exit_code) == (State.FAILED, Reason.EXIT_CODE, 3), sagemaker.diagnose()
    assert status.message.startswith("rank 1 on node 1: "), status
    with pytest.raises(NotReady, match="left nothing"):
        job.fetch("fetched")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"python": "/usr/bin/python3"}, "the image cannot run accel: torch is not installed"),
        ({"setup": [["no-such-command"]]}, "setup: no-such-command: No such file or directory"),
        ({"requirements": "none.txt"}, "-m pip install --disable-pip-version-check -r none.txt ended with code 1"),
    ],
)
def test_an_image_that_cannot_run_accel(
    options: dict[str, Any], said: str, sagemaker: SageMaker, submit: Submit
) -> None:
    status = submit("true", options=options).wait(120)
    assert (status.state, status.exit_code) == (State.FAILED, 1), sagemaker.diagnose()
    assert said in status.message


_PREEMPTED = """\
import time
from accel import Accelerator
accelerator = Accelerator(cpu=True)
assert not accelerator.preempted
print("up", flush=True)
while True:
    accelerator.checkpoint_on_preemption("kept")
    time.sleep(0.05)
"""


@pytest.mark.long
def test_a_host_whose_connection_breaks_is_not_waited_for(sagemaker: SageMaker, submit: Submit) -> None:
    job = submit("echo up; exec sleep 600", nodes=2)
    runs(job, "up\n")
    sagemaker.link(str(job.native_id).split("/")[1], "algo-2", up=False)
    status = job.wait(200)
    assert (status.state, status.reason) == (State.FAILED, Reason.NODE_FAILURE), (status, sagemaker.diagnose())
    assert status.message.startswith("the launcher on node 1: no heartbeat for 30 s")


def test_cancel_and_the_time_limit(sagemaker: SageMaker, submit: Submit) -> None:
    """Each begins with SIGTERM, which the ranks take as the warning that they are about to be preempted."""
    late = submit("trap 'echo warned; exit 0' TERM; echo up; while true; do sleep 0.1; done")
    runs(late, "up\n")
    sagemaker.expire(str(late.native_id).split("/")[1])
    cancelled = submit(f"exec python3 -c '{_PREEMPTED}'", grace_s=30.0, options={"cpu": True})
    runs(cancelled, "up\n")
    assert cancelled.status().state is State.RUNNING
    with pytest.raises(NotReady, match=r"still runs \(Training\)"):
        cancelled.fetch("fetched")
    assert cancelled.cancel().state is State.CANCELLED
    said = "".join(line.text for line in cancelled.logs())
    assert "preempted: saved kept, ending with code 85 to be started again" in said
    assert "accel launch: preempted in attempt 0: " in said
    ended = late.wait(120)
    assert (ended.state, ended.reason) == (State.FAILED, Reason.TIME_LIMIT)
    assert "warned\n" in [text for _, _, text in printed(late)]
    cancelled.cancel()  # what is over stays as it is


def test_a_job_that_is_still_being_set_up_is_stopped(sagemaker: SageMaker, submit: Submit) -> None:
    """The first process of a container ignores SIGTERM unless it handles it."""
    job = submit("true", options={"setup": [["sh", "-c", "echo setting up; sleep 600"]]})

    def is_set_up() -> bool:
        return "setting up\n" in [line.text for line in job.logs()]

    until(is_set_up, "the setup has begun")
    assert job.cancel().state is State.CANCELLED


def test_lines_that_cloudwatch_shows_late(
    sagemaker: SageMaker, submit: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who reads the logs of a job that is over waits for its containers' last lines, and not for ever."""
    job = submit("echo early; until [ -e /opt/ml/go ]; do sleep 0.05; done; echo late", nodes=2)
    name = str(job.native_id).split("/")[1]
    runs(job, "early\n")
    until(lambda: len(printed(job)) == 2, "both hosts have written")
    sagemaker.hold_logs(name)
    for host in ("algo-1", "algo-2"):
        sagemaker.run(name, host, "touch", "/opt/ml/go")
    assert job.wait(120).state is State.SUCCEEDED, sagemaker.diagnose()
    monkeypatch.setattr(logs, "_POLL_S", 0.2)
    monkeypatch.setattr(logs, "_LATE_LINES_S", 1.0)
    assert "late\n" not in {text for _, _, text in printed(job)}
    monkeypatch.setattr(logs, "_LATE_LINES_S", 300.0)
    before = len(sagemaker.calls("logs", "GetLogEvents"))
    with ThreadPoolExecutor() as pool:
        following = pool.submit(lambda: list(job.logs(follow=True)))
        until(lambda: len(sagemaker.calls("logs", "GetLogEvents")) > before + 8, "the follower reads time and again")
        sagemaker.hold_logs(name, held=False)
        lines = following.result(60)
    assert sorted((line.rank, line.text) for line in lines if line.rank is not None) == [
        (0, "early\n"), (0, "late\n"), (1, "early\n"), (1, "late\n")
    ]  # fmt: skip
    assert not [line for line in lines if "[accel]" in line.text]


def test_an_interruption_is_another_attempt(sagemaker: SageMaker, submit: Submit) -> None:
    options = {"enable_managed_spot_training": True, "max_wait_time_in_seconds": 600}
    job = submit(
        "f=$SM_MODEL_DIR/../checkpoints/seen; [ -e $f ] && { echo again; exit 0; }; echo first; touch $f; sleep 600",
        options={**options, "checkpoint_s3_uri": f"s3://{sagemaker.bucket}/checkpoints"},
    )
    runs(job, "first\n")
    cursor = job.cursor(None)
    for line in job.logs():
        cursor.advance(line)
    sagemaker.interrupt(str(job.native_id).split("/")[1])
    status = job.wait(120)
    assert (status.state, status.attempt) == (State.SUCCEEDED, 1), sagemaker.diagnose()
    assert printed(job) == [(0, 0, "first\n"), (0, 1, "again\n")]
    details = schedulers.find(job.id).record.status.details
    assert (details["secondary_status"], details["training_seconds"]) == ("Completed", sagemaker.describe(
        str(job.native_id).split("/")[1])["TrainingTimeInSeconds"])  # fmt: skip
    assert isinstance(details["spot_saving_percent"], int)
    with pytest.raises(ConfigError, match=r"the package sagemaker 3 is not installed: pip install 'accel-launch\[sage"):
        job.native()
    later = [line.text for line in job.logs(since=str(cursor)) if line.rank is not None]
    assert later == ["again\n"]


def test_a_submit_that_is_repeated_makes_one_job(sagemaker: SageMaker, submit: Submit, home: Path) -> None:
    job = submit("echo up; exec sleep 600")
    target = job.waiting_target()
    assert target is not None
    native = str(job.native_id).rpartition("/")[0]  # without its time, which is AWS's when it is found
    assert target.submit(job.record.plan()).rpartition("/")[0] == native
    assert len(sagemaker.client("sagemaker").list_training_jobs()["TrainingJobSummaries"]) == 1
    sent = len(sagemaker.calls("s3"))
    (Path(job.spec.code) / "job.sh").write_text("something else\n")
    assert target.submit(job.record.plan()).rpartition("/")[0] == native
    assert len(sagemaker.calls("s3")) == sent  # what the job's containers read stays as it was
    another = load_target("sagemaker", home / "jobs", overrides=target_options(sagemaker, volume_size_in_gb=31))
    with pytest.raises(SubmitError, match=r"training job .* exists already, and is another job"):
        another.submit(job.record.plan())
    runs(job, "up\n")  # a container that is being started takes no SIGTERM
    job.cancel()


def test_what_aws_refuses_once_it_has_the_job_does_not_fail_it(sagemaker: SageMaker, submit: Submit) -> None:
    for operation in ("sagemaker:DescribeTrainingJob", "sagemaker:ListTags"):
        sagemaker.fail(operation, "AccessDeniedException", "no")
    job = submit("echo up; exec sleep 600")
    assert job.record.status.state is State.QUEUED
    with pytest.raises(AwsError, match="does not allow sagemaker:DescribeTrainingJob"):
        job.status()
    runs(job, "up\n")
    job.record.update(Status(state=State.FAILED, reason=Reason.SETUP))  # as an earlier version recorded it
    (line,) = prune(Store.default(), keep=0).kept_reasons
    assert line == f"job {job.id} is kept: it still runs: InProgress at AWS"
    sagemaker.client("sagemaker").stop_training_job(TrainingJobName=str(job.native_id).split("/")[1])
    until(lambda: prune(Store.default(), keep=0).ids == (job.id,), "it has ended")


def test_another_machine_finds_the_job(
    sagemaker: SageMaker, submit: Submit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = submit("echo hello")
    assert job.wait(120).state is State.SUCCEEDED
    monkeypatch.setenv("ACCEL_HOME", str(tmp_path / "elsewhere"))
    found = schedulers.find(job.id, Store.default(), target="sagemaker", options=target_options(sagemaker))
    assert found.spec.argv == ("sh", "job.sh")
    assert found.status().state is State.SUCCEEDED
    assert [text for _, _, text in printed(found)] == ["hello\n"]


def test_many_jobs_are_one_question(sagemaker: SageMaker, submit: Submit) -> None:
    jobs = [submit("sleep 600") for _ in range(3)]
    target = jobs[0].waiting_target()
    assert target is not None
    natives = [str(job.native_id) for job in jobs]
    until(lambda: {each.state for each in target.poll(natives).values()} == {State.RUNNING}, "all run")
    before = len(sagemaker.calls("sagemaker"))
    target.poll(natives)
    asked = [call.operation for call in sagemaker.calls("sagemaker")[before:]]
    assert asked == ["ListTrainingJobs"]
    for job in jobs:
        job.cancel(wait=False)


@pytest.mark.parametrize(
    ("options", "broken", "said"),
    [
        ({"role": "nobody"}, None, "role: nobody not found; give the ARN of an execution role"),
        ({"s3_output_path": "s3://no-such-bucket"}, None, "bucket not found: no-such-bucket (s3_output_path)"),
        ({}, ("quota",), "request a higher quota"),
        ({}, ("CreateTrainingJob", "AccessDeniedException", "not authorized"), "AWS does not allow sagemaker:CreateT"),
    ],
)
def test_what_aws_refuses_is_one_line(
    options: dict[str, Any], broken: tuple[str, ...] | None, said: str, sagemaker: SageMaker, submit: Submit
) -> None:
    if broken == ("quota",):
        sagemaker.quota("ml.m5.xlarge", 0)
    elif broken:
        sagemaker.fail(f"sagemaker:{broken[0]}", broken[1], broken[2])
    with pytest.raises(SubmitError) as raised:
        submit("true", options=options)
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


def test_no_credentials(sagemaker: SageMaker, submit: Submit, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    with pytest.raises(ConfigError, match=r"no AWS credentials: .*aws sso login"):
        submit("true")


_CUT = """\
import os, signal, sys
import schedulers
from schedulers.sagemaker.aws import Aws
real, left = Aws.client, [2]
def sent(**_):
    left[0] -= 1
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
def client(self, service, **options):
    made = real(self, service, **options)
    made.meta.events.register("after-call.s3.UploadPart", sent, unique_id="sent")
    return made
Aws.client = client
schedulers.submit("sh", ["-c", "sha256sum data.bin"], entry="command", target="sagemaker", procs_per_node=1,
                  options=eval(sys.argv[1]), time_limit_s=600.0)
"""


def test_no_part_is_sent_twice(sagemaker: SageMaker, home: Path, project: Path) -> None:
    """By a client that was killed, and the one after it."""
    (project / "data.bin").write_bytes(random.Random(3).randbytes(50 << 20))
    argv = [sys.executable, "-c", _CUT, repr(target_options(sagemaker))]
    assert subprocess.run(argv, cwd=project, timeout=120).returncode == -9
    first = sagemaker.calls("s3", "UploadPart")
    assert first
    job = schedulers.submit(
        "sh", ["-c", "sha256sum data.bin"], entry="command", target="sagemaker", procs_per_node=1, cwd=project,
        options=target_options(sagemaker), time_limit_s=600.0,
    )  # fmt: skip
    assert 4 <= len(sagemaker.calls("s3", "UploadPart")) <= 5  # one may have been on its way
    assert job.wait(120).state is State.SUCCEEDED, sagemaker.diagnose()
    again = schedulers.submit(
        "sh", ["-c", "true"], entry="command", target="sagemaker", procs_per_node=1, cwd=project,
        options=target_options(sagemaker), time_limit_s=600.0,
    )  # fmt: skip
    assert len(sagemaker.calls("s3", "UploadPart")) <= 5
    assert again.wait(120).state is State.SUCCEEDED


def test_another_account_ends_no_job(submit: Submit, sagemaker: SageMaker) -> None:
    """A job that AWS does not know is lost only if its record names this account."""
    here, elsewhere = submit("sleep 1000"), submit("sleep 1000")
    identity = f"account={sagemaker.account}/{sagemaker.region}"
    assert here.record.backend == elsewhere.record.backend == identity
    path = elsewhere.record.directory / "events.jsonl"
    path.write_text(path.read_text().replace(identity, f"account=210987654321/{sagemaker.region}"))
    sagemaker.reset()
    assert here.status().reason is Reason.LOST
    assert not elsewhere.status().state.final
    assert elsewhere.record.warning.startswith(
        f"target sagemaker is now {identity}, and job {elsewhere.id} was submitted"
    )
