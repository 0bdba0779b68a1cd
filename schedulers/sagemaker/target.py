"""The SageMaker target: one training job for each job, with `accel launch` on each of its instances."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from ..errors import ConfigError, SpecError, StoreError, SubmitError
from ..job import Cursor, JobSpec, LogLine, Status
from ..store.record import read_record
from ..target import DiscoveredJob, JobSummary, Plan, TargetContext, parse_ids, require_answers
from . import logs, request, s3
from . import options as sagemaker_options
from . import submit as submission
from .aws import Aws, AwsError
from .options import GRACE_S, KIND, SageMakerOptions
from .status import Native, Poller, describe, list_entries

_PLUGIN = "session-manager-plugin"
_PAGE = "https://docs.aws.amazon.com/systems-manager/latest/userguide/session-manager-working-with-install-plugin.html"
_SESSION = "AWS_SSM_START_SESSION_RESPONSE"


class SageMakerTarget:
    """A target that runs each job as a training job. Native ids: `region/training job/job id/created`."""

    Options: ClassVar[type] = SageMakerOptions
    grace_s: ClassVar[float] = GRACE_S

    def __init__(self, context: TargetContext) -> None:
        self.name = context.name
        self._options: SageMakerOptions = context.options
        self._jobs = context.jobs
        self._aws = Aws(self._options, self.name)
        self._poller = Poller(self._aws)

    @staticmethod
    def poll_key(options: Mapping[str, Any]) -> list[object]:
        """Return the account, by its profile, and the region."""
        return [options.get("profile"), options.get("region")]

    def plan(self, spec: JobSpec, job_id: str) -> Plan:
        """Return the request and the containers' settings, without what only AWS knows. Raises SpecError."""
        options = self._options
        sagemaker_options.check(spec, options, self.name)
        resolved = request.resolved(options)
        job_request = request.build(spec, resolved, job_id, self.name)
        settings = request.settings(spec, options, job_id)
        unknown = request.unknown_type(options.instance_type)
        return Plan(
            target=self.name,
            kind=KIND,
            job_id=job_id,
            files={
                "sagemaker/request.json": json.dumps(job_request, indent=2) + "\n",
                "sagemaker/job.json": json.dumps(settings, indent=2) + "\n",
            },
            actions=(
                ("send", spec.code, "to", request.input_uri(resolved, job_id)),
                ("sagemaker:CreateTrainingJob", job_request["TrainingJobName"]),
            ),
            settings={"spec": spec.to_json()},
            warnings=(*sagemaker_options.warnings(spec, options), *([unknown] if unknown else [])),
        )

    def submit(self, plan: Plan) -> str:
        """Create the training job, once, with all files that its containers read.

        Raises SubmitError, SpecError, ConfigError; Unreachable when it is unknown whether AWS has the job.
        """
        spec = JobSpec.from_json(plan.settings["spec"])
        return str(submission.submit(self._aws, spec, plan.job_id, self._jobs))

    def backends(self, jobs: Mapping[str, str | None]) -> Mapping[str, str]:
        """Return the account and region. Raises Unreachable, ConfigError."""
        account = self._aws.call("sts", "get_caller_identity")["Account"]
        return dict.fromkeys(jobs, f"account={account}/{self._aws.region}")

    def poll(self, native_ids: Sequence[str]) -> Mapping[str, Status]:
        natives, unreachable = parse_ids(Native.parse, native_ids)
        statuses = self._poller.statuses(list(natives.values())) if natives else {}
        return require_answers(statuses, unreachable)

    def logs(self, native_id: str, since: Cursor | None = None) -> Iterator[LogLine]:
        native, nodes = Native.parse(native_id), None
        with contextlib.suppress(StoreError):  # without a record, it is unknown whether the job is over
            record = read_record(native.job_id, str(self._jobs / native.job_id))
            nodes = record.nodes if record.status.state.final else None
        yield from logs.lines(self._aws, native, since, nodes)

    def cursor_at(self, native_id: str, when: float) -> Cursor:
        streams = logs.streams(self._aws, Native.parse(native_id))
        return Cursor({stream.name: f"{int(when * 1000)}.0" for stream in streams})

    def cancel(self, native_id: str) -> None:
        """Cancel the job: SIGTERM, 120 s, SIGKILL. Do nothing if it is over. Raises Unreachable, AwsError."""
        name = Native.parse(native_id).name
        try:
            self._aws.call("sagemaker", "stop_training_job", TrainingJobName=name)
        except AwsError:
            job = describe(self._aws, name)
            if job is not None and job["TrainingJobStatus"] == "InProgress":
                raise

    def fetch(self, native_id: str, directory: Path) -> list[str]:
        return s3.fetch_artefacts(self._aws, Native.parse(native_id), directory)

    def shell(self, native_id: str, node: int, argv: Sequence[str], *, terminal: bool) -> int:
        """Open a shell through AWS's Session Manager plug-in, which reads the session's token from its environment.

        Raises SpecError for a command and for a job without remote debugging, ConfigError, AwsError, Unreachable.
        """
        native = Native.parse(native_id)
        if argv:
            raise SpecError("SageMaker opens shells only: Session Manager returns no exit code of a command")
        job = describe(self._aws, native.name) or {}
        if not job.get("RemoteDebugConfig", {}).get("EnableRemoteDebug"):
            raise SpecError(f"job {native.job_id} was submitted without enable_remote_debug: true, which a shell needs")
        program = shutil.which(_PLUGIN)
        if program is None:
            raise ConfigError(f"{self._aws.label}: {_PLUGIN} not found; install it: {_PAGE}")
        parameters = {"Target": f"sagemaker-training-job:{native.name}_algo-{node + 1}"}
        session = self._aws.call("ssm", "start_session", **parameters)
        session_json = json.dumps({key: session[key] for key in ("SessionId", "TokenValue", "StreamUrl")})
        url, profile = self._aws.client("ssm").meta.endpoint_url, self._options.profile or ""
        command = [program, _SESSION, native.region, "StartSession", profile, json.dumps(parameters), url]
        previous_handler = signal.signal(signal.SIGINT, lambda *_: None)  # Ctrl-C is for the shell
        try:
            return subprocess.call(command, env={**os.environ, _SESSION: session_json})
        finally:
            signal.signal(signal.SIGINT, previous_handler)

    def native(self, native_id: str) -> object:
        """Return the SageMaker SDK's `TrainingJob`. Raises ConfigError, Unreachable."""
        return self._aws.training_job(Native.parse(native_id).name)

    def review(self, plan: Plan) -> list[str]:
        """Resolve what the plan leaves open. Return a line if that, or the request, is invalid. Raises Unreachable."""
        spec = JobSpec.from_json(plan.settings["spec"])
        try:
            options = self._aws.resolved_options()
            request.build(spec, options, plan.job_id, self.name)
            s3.check_bucket(self._aws, str(options.s3_output_path))
        except (AwsError, ConfigError, SpecError, SubmitError) as error:
            return [str(error)]
        return []

    def find(self, job_id: str) -> DiscoveredJob | None:
        return submission.find(self._aws, job_id)

    def listed(self) -> list[JobSummary]:
        return submission.list_jobs(self._aws)

    def running(self, jobs: Mapping[str, str | None]) -> Mapping[str, str]:
        """Return the status of each of these jobs that AWS still runs. Raises Unreachable, AwsError."""
        statuses = {
            entry["TrainingJobName"].rpartition("-")[2]: f"{status} at AWS"
            for status in ("InProgress", "Stopping")
            for entry in list_entries(self._aws, StatusEquals=status)
        }
        return {job_id: statuses[job_id] for job_id in jobs if job_id in statuses}

    def clear(self, jobs: Mapping[str, str | None]) -> list[str]:
        """Delete the files that these jobs' containers read. Artefacts stay, and AWS keeps the jobs."""
        return s3.remove(self._aws, list(jobs))
