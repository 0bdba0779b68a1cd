"""An AWS account on this computer, for jobs of SageMaker: its API, and instances out of namespaces.

    python -m tests.clusters.sagemaker     prints its URL (AWS_ENDPOINT_URL), and serves until its input ends

CreateTrainingJob and its like are the tests' own (`sagemaker_endpoint.py`): requests are validated with botocore's
model, states are those that AWS documents, and each instance is a machine with a container's /opt/ml. S3, CloudWatch
Logs, STS, IAM, Secrets Manager and SSM are moto's. All have one address, on a bridge that the instances reach too, and
every call is recorded. It needs root and the package iproute2.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.needs import package
from tests.waiting import until

from .netns import ClusterError, Slot, lacking
from .sagemaker_calls import Call
from .sagemaker_endpoint import ACCOUNT, BUCKET, LAUNCHER, REGION, ROLE, Endpoint
from .sagemaker_instances import LOG_GROUP

__all__ = ["SageMaker", "lacks"]

ROOT = Path(__file__).parents[2]
_PACKAGES = ("boto3", "moto", "flask", "flask_cors")


def lacks() -> tuple[str, str] | None:
    """What this computer lacks for the endpoint, and the remedy."""
    absent = [name for name in _PACKAGES if find_spec(name) is None]
    if absent:
        return ", ".join(absent), "pip install -c constraints.txt -e '.[dev]'"
    return lacking()


class SageMaker:
    """The endpoint, which is a process of its own, and what a test may ask of it."""

    account, region, bucket = ACCOUNT, REGION, BUCKET
    role = f"arn:aws:iam::{ACCOUNT}:role/{ROLE}"

    def __init__(self) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # until `end`
        argv = [sys.executable, "-m", __name__]
        env = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
        self._process = subprocess.Popen(
            argv, cwd=ROOT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True
        )
        assert self._process.stdout is not None
        self.url = self._process.stdout.readline().strip()
        if not self.url:
            raise ClusterError(f"the SageMaker endpoint did not start: {self._printed()}")

    def end(self) -> None:
        """End the endpoint and all of its jobs."""
        self._process.communicate(timeout=60)
        self._errors.close()

    @property
    def env(self) -> dict[str, str]:
        """The environment of a client: the launcher's credentials and the address of every service."""
        return {
            "AWS_ACCESS_KEY_ID": LAUNCHER,
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": REGION,
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ENDPOINT_URL_SAGEMAKER": self.url,
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "NO_PROXY": "*",
        }

    def client(self, service: str, **options: Any) -> Any:
        """A boto3 client of the test's own: its calls are not the launcher's."""
        keys = {"aws_access_key_id": "test", "aws_secret_access_key": "secret"}
        return package("boto3").client(service, **{"region_name": REGION, "endpoint_url": self.url, **keys, **options})

    def reset(self) -> None:
        """End all jobs and make the account new: one role, one bucket, no calls, no failures, quotas or denials."""
        self._ask("reset")

    def calls(self, service: str = "", operation: str = "", caller: str = LAUNCHER) -> list[Call]:
        """The calls since the reset, of one caller: `launcher`, `execution-role` or `test`."""
        recorded = [Call(**call) for call in self._ask("calls")]
        return [
            call
            for call in recorded
            if call.caller == caller and service in ("", call.service) and operation in ("", call.operation)
        ]

    def fail(self, operation: str, code: str, message: str, *, times: int = 1, status: int = 400) -> None:
        """Answer the next calls of an operation, as `sagemaker:CreateTrainingJob` or `s3:PutObject`, with an error."""
        self._ask("fail", operation=operation, code=code, message=message, times=times, status=status)

    def throttle(self, operation: str, *, times: int = 1) -> None:
        self.fail(operation, "ThrottlingException", "Rate exceeded", times=times)

    def quota(self, instance_type: str, instances: int) -> None:
        """Refuse (ResourceLimitExceeded) jobs that would have more instances of this type running."""
        self._ask("quota", instance_type=instance_type, instances=instances)

    def deny(self, *actions: str) -> None:
        """What SimulatePrincipalPolicy does not allow, as `sagemaker:CreateTrainingJob`."""
        self._ask("deny", actions=actions)

    def configure(self, *, grace_s: float | None = None, capacity: bool | None = None) -> None:
        """The seconds between SIGTERM and SIGKILL, and whether instances are to be had."""
        self._ask("configure", grace_s=grace_s, capacity=capacity)

    def interrupt(self, job: str, *, files: int | None = None, warn: bool = True) -> None:
        """Take a job's spot instances away. Raises ClusterError where it is not training.

        files: how many of the checkpoint files that are not in S3 yet still get there; all without it.
        warn: SIGTERM and the grace period come first.
        """
        self._ask("interrupt", name=job, files=files, warn=warn)

    def expire(self, job: str) -> None:
        """End a job as if its MaxRuntimeInSeconds were over."""
        self._ask("expire", name=job)

    def crash(self, job: str) -> None:
        """Let an instance fail with an internal error: the job restarts where its RetryStrategy says so."""
        self._ask("crash", name=job)

    def hold_checkpoints(self, job: str) -> None:
        """Copy no more checkpoint files to S3 until the attempt ends."""
        self._ask("hold_checkpoints", name=job)

    def hold_logs(self, job: str, *, held: bool = True) -> None:
        """Show nothing of what the containers write, as CloudWatch does for some seconds, until told to."""
        self._ask("hold_logs", name=job, held=held)

    def link(self, job: str, host: str, *, up: bool) -> None:
        """Plug or pull the cable of one host, as `algo-2`: packets vanish, nobody is told."""
        self._ask("link", name=job, host=host, up=up)

    def run(self, job: str, host: str, *argv: str) -> str:
        """Run a command on one host, in the network and mounts of its container."""
        return str(self._ask("run", name=job, host=host, argv=argv))

    def describe(self, job: str) -> dict[str, Any]:
        described: dict[str, Any] = self.client("sagemaker").describe_training_job(TrainingJobName=job)
        return described

    def wait(self, job: str, *statuses: str, seconds: float = 120) -> dict[str, Any]:
        """Wait until the job has one of these statuses or secondary statuses; its description then."""
        described: dict[str, Any] = {}

        def reached() -> bool:
            described.update(self.describe(job))
            return not {described["TrainingJobStatus"], described["SecondaryStatus"]}.isdisjoint(statuses)

        until(reached, f"{job} is {' or '.join(statuses)}", seconds)
        return described

    def logs(self, job: str) -> dict[str, list[str]]:
        """The lines of each log stream of a job, by the stream's name without the job's."""
        logs = self.client("logs")
        try:
            streams = logs.describe_log_streams(logGroupName=LOG_GROUP, logStreamNamePrefix=f"{job}/")["logStreams"]
        except logs.exceptions.ResourceNotFoundException:
            return {}
        lines = {}
        for name in (stream["logStreamName"] for stream in streams):
            pages = logs.get_log_events(logGroupName=LOG_GROUP, logStreamName=name, startFromHead=True)
            lines[name.partition("/")[2]] = [event["message"] for event in pages["events"]]
        return lines

    def diagnose(self) -> str:
        """What a failed test shows: the jobs, their logs, and what the endpoint printed."""
        return "\n".join([*self._ask("diagnose"), self._printed()])

    def _printed(self) -> str:
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")

    def _ask(self, method: str, **arguments: Any) -> Any:
        request = urllib.request.Request(f"{self.url}/_endpoint/{method}", json.dumps(arguments).encode())
        try:
            with _DIRECT.open(request, timeout=120) as reply:
                return json.load(reply)
        except urllib.error.HTTPError as error:
            with error:
                raise ClusterError(error.read().decode()) from None


_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def main() -> int:
    absent = lacks()
    if absent:
        print(f"{absent[0]} is missing: {absent[1]}", file=sys.stderr)
        return 1
    os.environ["NO_PROXY"] = "*"
    os.environ["MOTO_S3_DEFAULT_KEY_BUFFER_SIZE"] = str(1 << 20)  # larger objects are files
    endpoint = Endpoint(Slot.claim("sm"))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        endpoint.start()
        print(endpoint.url, flush=True)
        sys.stdin.read()
    except KeyboardInterrupt:
        pass
    finally:
        endpoint.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
