"""The server behind tests/clusters/sagemaker.py: SageMaker's operations, moto for all other services, one address.

Every request passes here and is recorded. What a test asks of the endpoint itself comes as JSON to `/_endpoint/METHOD`.
"""

from __future__ import annotations

import base64
import heapq
import io
import json
import shutil
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from http import HTTPStatus
from typing import Any

from tests.needs import package

from .netns import Machine, Network, Slot
from .sagemaker_calls import Call, error_reply, read_call
from .sagemaker_jobs import Order, TrainingJob
from .sagemaker_validation import Refused, check_reply, check_request, not_valid

ACCOUNT, REGION, ROLE, BUCKET = "123456789012", "us-east-1", "accel-execution", "accel-tests"
LAUNCHER, EXECUTION_ROLE, SERVICE = "launcher", "execution-role", "service"  # access keys
GRACE_S = 120.0
_MOST_INSTANCES = 240
_DEFAULT_PAGE = 10
_JSON = "application/x-amz-json-1.1"
_SIMULATED = """<SimulatePrincipalPolicyResponse xmlns="https://iam.amazonaws.com/doc/2010-05-08/">
<SimulatePrincipalPolicyResult><IsTruncated>false</IsTruncated><EvaluationResults>{results}</EvaluationResults>
</SimulatePrincipalPolicyResult></SimulatePrincipalPolicyResponse>"""
_DECISION = """<member><EvalActionName>{action}</EvalActionName><EvalResourceName>*</EvalResourceName>
<EvalDecision>{decision}</EvalDecision></member>"""
_QUOTA = (
    "The account-level service limit '{type} for training job usage' is {limit} Instances, with current utilization of "
    "{used} Instances and a request delta of {asked} Instances. Please use AWS Service Quotas to request an increase "
    "for this quota. If AWS Service Quotas is not available, contact AWS support to request an increase for this quota."
)
_ROLE = (
    "Could not assume role {role}. Please ensure that the role exists and allows principal 'sagemaker.amazonaws.com' "
    "to assume the role."
)


class Endpoint:
    """One AWS account, in a slot of its own."""

    def __init__(self, slot: Slot) -> None:
        self.network = Network(slot)
        self.url = ""
        self.grace_s, self.capacity = GRACE_S, True
        self.jobs: dict[tuple[str, str], TrainingJob] = {}  # region and name
        self._tags: dict[str, dict[str, str]] = {}  # of a job's ARN
        self._calls: list[Call] = []
        self._failures: dict[str, list[Refused]] = {}  # of "service:Operation"
        self._quotas: dict[str, int] = {}
        self._denied: set[str] = set()
        self._indices = list(range(1, _MOST_INSTANCES))
        self._clients: dict[tuple[str, str], Any] = {}
        self._lock = threading.RLock()

    def start(self) -> None:
        self.clean()
        self.network.slot.box.mkdir(mode=0o755)
        self.network.up()
        moto = package("moto.moto_server.werkzeug_app")
        self._moto = moto.DomainDispatcherApplication(moto.create_backend_app)
        self._server = package("werkzeug.serving").make_server(
            self.network.address(0), 0, self, threaded=True, request_handler=_quiet(moto.MotoRequestHandler)
        )
        self.url = f"http://{self.network.address(0)}:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.reset()

    def close(self) -> None:
        self._end_jobs()
        self._server.shutdown()
        self._server.server_close()
        self.clean()

    def clean(self) -> None:
        """End the machines of the slot, those of a killed owner too, and remove all that there was."""
        for own in (self.network.slot.box / "nodes").glob("i*"):
            Machine(self.network, int(own.name[1:]), own.name, lambda machine: "").end()
        self.network.down()
        shutil.rmtree(self.network.slot.box, ignore_errors=True)

    # What a job asks of its place.

    def aws(self, service: str, region: str) -> Any:
        with self._lock:  # making a client is not thread-safe
            if (service, region) not in self._clients:
                self._clients[service, region] = package("boto3").client(
                    service,
                    region_name=region,
                    endpoint_url=self.url,
                    aws_access_key_id=SERVICE if service == "iam" else EXECUTION_ROLE,
                    aws_secret_access_key="secret",
                )
            return self._clients[service, region]

    def take_index(self) -> int:
        with self._lock:
            return heapq.heappop(self._indices)

    def free_index(self, index: int) -> None:
        with self._lock:
            heapq.heappush(self._indices, index)

    def container_env(self, region: str) -> dict[str, str]:
        """How a container finds AWS: what its instance's metadata and DNS are in AWS."""
        keys = {"AWS_ACCESS_KEY_ID": EXECUTION_ROLE, "AWS_SECRET_ACCESS_KEY": "secret"}
        return {"AWS_ENDPOINT_URL": self.url, "AWS_DEFAULT_REGION": region, **keys}

    # What a test asks.

    def reset(self) -> None:
        self._end_jobs()
        self.jobs, self._tags, self._failures, self._quotas, self._denied = {}, {}, {}, {}, set()
        self.grace_s, self.capacity = GRACE_S, True
        self._moto_reset()
        trust = {"Effect": "Allow", "Principal": {"Service": "sagemaker.amazonaws.com"}, "Action": "sts:AssumeRole"}
        document = json.dumps({"Version": "2012-10-17", "Statement": [trust]})
        self.aws("iam", REGION).create_role(RoleName=ROLE, AssumeRolePolicyDocument=document)
        self.aws("s3", REGION).create_bucket(Bucket=BUCKET)
        self._calls = []

    def calls(self) -> list[dict[str, Any]]:
        return [asdict(call) for call in self._calls]

    def diagnose(self) -> list[str]:
        """The states of each job, and the last lines of its hosts."""
        texts = []
        for job in self.jobs.values():
            states = " → ".join(entry["Status"] for entry in job.transitions)
            texts.append(f"{job.name}: {states} {job.reason or ''}")
            for instance in job.instances:
                texts += [f"  {instance.host}: {line}" for line in instance.tail()]
        return texts

    def fail(self, operation: str, code: str, message: str, times: int, status: int) -> None:
        self._failures.setdefault(operation, []).extend([Refused(code, message, status)] * times)

    def quota(self, instance_type: str, instances: int) -> None:
        self._quotas[instance_type] = instances

    def deny(self, actions: list[str]) -> None:
        self._denied |= set(actions)

    def configure(self, grace_s: float | None, capacity: bool | None) -> None:
        self.grace_s = self.grace_s if grace_s is None else grace_s
        self.capacity = self.capacity if capacity is None else capacity

    def interrupt(self, name: str, files: int | None, warn: bool) -> None:
        self._order(name, Order("Interrupted", files, warn))

    def expire(self, name: str) -> None:
        self._order(name, Order("MaxRuntimeExceeded"))

    def crash(self, name: str) -> None:
        self._order(name, Order("Restarting", warn=False))

    def hold_checkpoints(self, name: str) -> None:
        for checkpoints in self._job(name).checkpoints:
            checkpoints.held = True

    def hold_logs(self, name: str, held: bool) -> None:
        self._job(name).hold_logs(held)

    def link(self, name: str, host: str, up: bool) -> None:
        self._instance(name, host).machine.link(up)

    def run(self, name: str, host: str, argv: list[str]) -> str:
        return str(self._instance(name, host).machine.run(*argv))

    def _instance(self, name: str, host: str) -> Any:
        return next(instance for instance in self._job(name).instances if instance.host == host)

    def _job(self, name: str) -> TrainingJob:
        return next(job for (_, known), job in self.jobs.items() if known == name)

    def _order(self, name: str, order: Order) -> None:
        job = self._job(name)
        if job.secondary != "Training":
            raise not_valid(f"{name} is {job.secondary}, not Training")
        job.order = order

    def _end_jobs(self) -> None:
        self.grace_s = 0.0  # of those too that have been told to stop
        for job in self.jobs.values():
            job.order = Order("Stopped", files=0, warn=False)
        for job in self.jobs.values():
            job.thread.join(60)
            assert not job.thread.is_alive(), f"{job.name} does not end: {job.secondary}"

    def _moto_reset(self) -> None:
        request = package("urllib.request").Request(f"{self.url}/moto-api/reset", method="POST")
        with package("urllib.request").urlopen(request) as reply:
            reply.read()

    # HTTP.

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        path, method = environ["PATH_INFO"], environ["REQUEST_METHOD"]
        if path.startswith("/_endpoint/"):
            return self._own(path.rpartition("/")[2], _body(environ), start_response)
        body = b"" if "/s3/aws4_request" in environ.get("HTTP_AUTHORIZATION", "") else _body(environ)
        call = read_call(environ, body)
        if call.service:
            self._calls.append(call)
        try:
            failures = self._failures.get(f"{call.service}:{call.operation}")
            if failures:
                raise failures.pop(0)
            if call.service == "sagemaker":
                return _reply(start_response, 200, _JSON, json.dumps(self._sagemaker(call)).encode())
            if call.operation == "StartSession":
                return _reply(start_response, 200, _JSON, json.dumps(self._start_session(call)).encode())
            if call.operation == "SimulatePrincipalPolicy":
                return _reply(start_response, 200, "text/xml", self._simulate(call).encode())
        except Refused as error:
            return _reply(start_response, error.status, *error_reply(call, method, error))
        except Exception as error:
            traceback.print_exc()
            internal = Refused("InternalFailure", f"{type(error).__name__}: {error}", 500)
            return _reply(start_response, 500, *error_reply(call, method, internal))
        reply: Iterable[bytes] = self._moto(environ, start_response)
        return reply

    def _own(self, name: str, body: bytes, start_response: Callable[..., Any]) -> Iterable[bytes]:
        try:
            result = getattr(self, name)(**json.loads(body or b"{}"))
            return _reply(start_response, 200, _JSON, json.dumps(result).encode())
        except Exception as error:
            traceback.print_exc()
            return _reply(start_response, 500, "text/plain", f"{type(error).__name__}: {error}".encode())

    def _simulate(self, call: Call) -> str:
        actions = [value for key, value in call.request.items() if key.startswith("ActionNames.member.")]
        decisions = {action: "implicitDeny" if action in self._denied else "allowed" for action in actions}
        results = [_DECISION.format(action=action, decision=decision) for action, decision in decisions.items()]
        return _SIMULATED.format(results="".join(results))

    def _start_session(self, call: Call) -> dict[str, Any]:
        """A session in a container. Refused, in Session Manager's words, where no agent runs."""
        check_request(call.operation, call.request, "ssm")
        kind, _, place = call.request["Target"].partition(":")
        name, _, host = place.rpartition("_")
        job = self.jobs.get((call.region, name))
        hosts = [instance.host for instance in job.instances] if job is not None and job.secondary == "Training" else []
        debugged = job is not None and job.request.get("RemoteDebugConfig", {}).get("EnableRemoteDebug")
        if kind != "sagemaker-training-job" or not debugged or host not in hosts:
            raise Refused("TargetNotConnected", f"{call.request['Target']} is not connected.")
        stream = f"wss://ssmmessages.{call.region}.amazonaws.com/v1/data-channel/launcher-1?role=publish_subscribe"
        reply = {"SessionId": "launcher-1", "TokenValue": "a-token", "StreamUrl": stream}
        check_reply(call.operation, reply, "ssm")
        return reply

    # SageMaker.

    def _sagemaker(self, call: Call) -> dict[str, Any]:
        operations: dict[str, Callable[[Mapping[str, Any], str], dict[str, Any]]] = {
            "CreateTrainingJob": self._create,
            "DescribeTrainingJob": lambda request, region: self._find(request, region).describe(),
            "ListTrainingJobs": self._list,
            "StopTrainingJob": self._stop,
            "ListTags": lambda request, region: {"Tags": _listed(self._tags_of(request))},
            "AddTags": self._add_tags,
        }
        if call.operation not in operations:
            raise Refused("UnknownOperationException", f"The tests' endpoint has no {call.operation}.")
        check_request(call.operation, call.request)
        reply = operations[call.operation](call.request, call.region)
        check_reply(call.operation, reply)
        return reply

    def _create(self, request: Mapping[str, Any], region: str) -> dict[str, Any]:
        name = request["TrainingJobName"]
        partition = "aws-cn" if region.startswith("cn-") else "aws-us-gov" if region.startswith("us-gov-") else "aws"
        arn = f"arn:{partition}:sagemaker:{region}:{ACCOUNT}:training-job/{name}"
        self._assume(request["RoleArn"], region)
        with self._lock:
            if (region, name) in self.jobs:
                raise Refused(
                    "ResourceInUse",
                    "Training job names must be unique within an AWS account and region, and a training job with this "
                    f"name already exists ({arn})",
                )
            self._check_quota(request["ResourceConfig"])
            self._tags[arn] = {tag["Key"]: tag["Value"] for tag in request.get("Tags", [])}
            self.jobs[region, name] = TrainingJob(request, arn, region, self)
        return {"TrainingJobArn": arn}

    def _assume(self, role: str, region: str) -> None:
        iam = self.aws("iam", region)
        try:
            document = iam.get_role(RoleName=role.rpartition("/")[2])["Role"]["AssumeRolePolicyDocument"]
        except iam.exceptions.NoSuchEntityException:
            document = None
        if "sagemaker.amazonaws.com" not in json.dumps(document):
            raise not_valid(_ROLE.format(role=role))

    def _check_quota(self, resources: Mapping[str, Any]) -> None:
        kind, asked = resources.get("InstanceType", ""), resources.get("InstanceCount", 0)
        running = [
            job.request["ResourceConfig"] for job in self.jobs.values() if job.status in ("InProgress", "Stopping")
        ]
        used = sum(other.get("InstanceCount", 0) for other in running if other.get("InstanceType") == kind)
        limit = self._quotas.get(kind, _MOST_INSTANCES)
        if used + asked > limit:
            raise Refused("ResourceLimitExceeded", _QUOTA.format(type=kind, limit=limit, used=used, asked=asked))

    def _find(self, request: Mapping[str, Any], region: str) -> TrainingJob:
        job = self.jobs.get((region, request["TrainingJobName"]))
        if job is None:
            raise not_valid("Requested resource not found.")
        return job

    def _stop(self, request: Mapping[str, Any], region: str) -> dict[str, Any]:
        self._find(request, region).stop()
        return {}

    def _list(self, request: Mapping[str, Any], region: str) -> dict[str, Any]:
        by = {"Name": "TrainingJobName", "Status": "TrainingJobStatus"}.get(request.get("SortBy", ""), "CreationTime")
        descending = request.get("SortOrder") == "Descending"
        token = json.loads(base64.b64decode(request["NextToken"])) if "NextToken" in request else None
        summaries = []
        for (known, _), job in list(self.jobs.items()):
            summary = job.summary()
            if known == region and _selected(summary, request):
                summaries.append(([summary[by], job.name], summary))
        summaries.sort(key=lambda pair: pair[0], reverse=descending)
        if token is not None:
            summaries = [pair for pair in summaries if (pair[0] < token if descending else pair[0] > token)]
        page = summaries[: request.get("MaxResults", _DEFAULT_PAGE)]
        reply: dict[str, Any] = {"TrainingJobSummaries": [summary for _, summary in page]}
        if len(page) < len(summaries):
            reply["NextToken"] = base64.b64encode(json.dumps(page[-1][0]).encode()).decode()
        return reply

    def _tags_of(self, request: Mapping[str, Any]) -> dict[str, str]:
        tags = self._tags.get(request["ResourceArn"])
        if tags is None:
            raise not_valid("Requested resource not found.")
        return tags

    def _add_tags(self, request: Mapping[str, Any], region: str) -> dict[str, Any]:
        tags = self._tags_of(request)
        merged = {**tags, **{tag["Key"]: tag["Value"] for tag in request["Tags"]}}
        if len(merged) > 50:
            raise Refused("ResourceLimitExceeded", "A resource has at most 50 tags.")
        tags.update(merged)
        return {"Tags": _listed(tags)}


def _selected(summary: Mapping[str, Any], request: Mapping[str, Any]) -> bool:
    times = {"CreationTime": summary["CreationTime"], "LastModifiedTime": summary["LastModifiedTime"]}
    # botocore sends whole seconds.
    return (
        request.get("NameContains", "") in summary["TrainingJobName"]
        and request.get("StatusEquals", summary["TrainingJobStatus"]) == summary["TrainingJobStatus"]
        and all(when >= request.get(f"{name}After", when) for name, when in times.items())
        and all(when <= request.get(f"{name}Before", when) for name, when in times.items())
    )


def _listed(tags: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"Key": key, "Value": value} for key, value in tags.items()]


def _body(environ: dict[str, Any]) -> bytes:
    """The request's body, which whoever comes next may read again."""
    body: bytes = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
    environ["wsgi.input"] = io.BytesIO(body)
    return body


def _reply(start_response: Callable[..., Any], status: int, content_type: str, body: bytes) -> Iterable[bytes]:
    headers = [("Content-Type", content_type), ("Content-Length", str(len(body)))]
    start_response(f"{status} {HTTPStatus(status).phrase}", headers)
    return [body]


def _quiet(handler: Any) -> Any:
    return type("Handler", (handler,), {"log_request": lambda *_: None})
