"""The CreateTrainingJob request of a job, checked against the API's limits, and the settings of its containers.

https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_CreateTrainingJob.html
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..errors import SpecError, nearest
from ..job import JobSpec
from ..object_names import object_name
from .options import SageMakerOptions, gpus, image_address

JOB_ID, DIGEST = "accel.dev/job-id", "accel.dev/digest"
CHANNEL = "code"
REGION = "{region}"  # until AWS has told it
DIRECTORY = f"/opt/ml/input/data/{CHANNEL}"
ENTRY, SETTINGS, CODE = "entry.py", "job.json", "code.tar.gz"
_DAY_S, _MAX_DAYS = 86_400, 28
# Option -> the path of its unchanged value in the request.
FIELDS: Mapping[str, tuple[str, ...]] = {
    "instance_type": ("ResourceConfig", "InstanceType"),
    "volume_size_in_gb": ("ResourceConfig", "VolumeSizeInGB"),
    "volume_kms_key_id": ("ResourceConfig", "VolumeKmsKeyId"),
    "keep_alive_period_in_seconds": ("ResourceConfig", "KeepAlivePeriodInSeconds"),
    "training_plan_arn": ("ResourceConfig", "TrainingPlanArn"),
    "max_wait_time_in_seconds": ("StoppingCondition", "MaxWaitTimeInSeconds"),
    "max_pending_time_in_seconds": ("StoppingCondition", "MaxPendingTimeInSeconds"),
    "output_kms_key_id": ("OutputDataConfig", "KmsKeyId"),
    "output_compression_type": ("OutputDataConfig", "CompressionType"),
    "subnets": ("VpcConfig", "Subnets"),
    "security_group_ids": ("VpcConfig", "SecurityGroupIds"),
    "enable_network_isolation": ("EnableNetworkIsolation",),
    "enable_inter_container_traffic_encryption": ("EnableInterContainerTrafficEncryption",),
    "enable_managed_spot_training": ("EnableManagedSpotTraining",),
    "maximum_retry_attempts": ("RetryStrategy", "MaximumRetryAttempts"),
    "enable_remote_debug": ("RemoteDebugConfig", "EnableRemoteDebug"),
    "checkpoint_s3_uri": ("CheckpointConfig", "S3Uri"),
}
# Path in the request -> the flag or option that sets it, for messages.
FIELD_SOURCES: Mapping[tuple[str, ...], str] = {
    **{path: name for name, path in FIELDS.items()},
    ("TrainingJobName",): "--name",
    ("RoleArn",): "role",
    ("AlgorithmSpecification", "TrainingImage"): "image",
    ("AlgorithmSpecification", "ContainerEntrypoint"): "python",
    ("AlgorithmSpecification", "MetricDefinitions"): "metric_definitions",
    ("ResourceConfig", "InstanceCount"): "--nodes",
    ("StoppingCondition", "MaxRuntimeInSeconds"): "--time-limit",
    ("OutputDataConfig", "S3OutputPath"): "s3_output_path",
    ("CheckpointConfig", "LocalPath"): "checkpoint_local_path",
    ("InputDataConfig",): "input_data_config",
    ("Tags",): "tags",
}


def resolved(
    options: SageMakerOptions, account: str = "{account}", region: str = "", role: str = ""
) -> SageMakerOptions:
    """Return the options with region, the role's ARN and an S3 path: placeholders, where only AWS knows the value."""
    region = region or options.region or REGION
    if not role:
        is_arn = options.role.startswith("arn:")
        role = options.role if is_arn else f"arn:{{partition}}:iam::{account}:role/{options.role}"
    s3_path = options.s3_output_path or f"s3://sagemaker-{region}-{account}"
    return replace(options, region=region, role=role, s3_output_path=s3_path.rstrip("/"))


def input_uri(options: SageMakerOptions, job_id: str) -> str:
    """Return the S3 URI of the files that a job's containers read. Other jobs do not share them."""
    return f"{options.s3_output_path}/accel/jobs/{job_id}/code/"


def build(spec: JobSpec, options: SageMakerOptions, job_id: str, target: str) -> dict[str, Any]:
    """Build the request from resolved options, without the tag that identifies its content.

    Raises SpecError if the API would reject it.
    """
    image = str(spec.image or options.image)
    if options.region is not None and options.region != REGION:
        image = image_address(image, options.region, options.instance_type, f"target {target}")
    uri = input_uri(options, job_id)
    code = {"S3DataType": "S3Prefix", "S3Uri": uri, "S3DataDistributionType": "FullyReplicated"}
    job_request: dict[str, Any] = {
        "TrainingJobName": object_name(spec.name, job_id),
        "RoleArn": options.role,
        "AlgorithmSpecification": {
            "TrainingImage": image,
            "TrainingInputMode": "File",
            "ContainerEntrypoint": [options.python, f"{DIRECTORY}/{ENTRY}"],
            **({"MetricDefinitions": _camel(options.metric_definitions)} if options.metric_definitions else {}),
        },
        "InputDataConfig": [
            {"ChannelName": CHANNEL, "DataSource": {"S3DataSource": code}, "InputMode": "File"},
            *_camel(options.input_data_config),
        ],
        "OutputDataConfig": {"S3OutputPath": options.s3_output_path},
        "ResourceConfig": {"InstanceCount": spec.nodes},
        "StoppingCondition": {"MaxRuntimeInSeconds": math.ceil(spec.time_limit_s or _DAY_S)},
        "Tags": [{"Key": key, "Value": value} for key, value in {**options.tags, JOB_ID: job_id}.items()],
    }  # fmt: skip
    for name, path in FIELDS.items():
        value = getattr(options, name)
        if value not in (None, False, ()):
            section = job_request
            for key in path[:-1]:
                section = section.setdefault(key, {})
            section[path[-1]] = list(value) if isinstance(value, tuple) else value
    if options.checkpoint_s3_uri is not None:
        job_request["CheckpointConfig"] = {
            "S3Uri": options.checkpoint_s3_uri.replace("{id}", job_id), "LocalPath": options.checkpoint_local_path
        }  # fmt: skip
    job_request = dict(_merge_patch(job_request, options.patch))
    _check_limits(job_request, target)
    return job_request


def with_digest(request: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the request with a digest tag, by which a repeated submit recognizes its job even if the code changed."""
    text = json.dumps([request, settings], sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return {**request, "Tags": [*request["Tags"], {"Key": DIGEST, "Value": digest}]}


def digest_of(tags: Sequence[Mapping[str, str]]) -> str | None:
    return next((tag["Value"] for tag in tags if tag.get("Key") == DIGEST), None)


def settings(spec: JobSpec, options: SageMakerOptions, job_id: str) -> dict[str, Any]:
    """Return the settings of `entry.py`, with arguments and variables, which the API would limit and change."""
    return {
        "schema": 1,
        "spec": spec.to_json(),
        "launch": _launch(spec, options),
        "setup": [list(argv) for argv in (*options.setup, *spec.setup)],
        "requirements": options.requirements,
        "environment": {"ACCEL_JOB_ID": job_id, "ACCEL_PROJECT_ROOT": options.checkpoint_local_path, **spec.env},
        "secrets": dict(spec.secrets),
        "workdir": spec.workdir,
    }


def _launch(spec: JobSpec, options: SageMakerOptions) -> list[str]:
    devices = 1 if options.cpu else spec.resources.gpus or gpus(options.instance_type) or 1
    arguments = ["--num_processes", str((spec.procs_per_node or devices) * spec.nodes)]
    if spec.nodes > 1:
        arguments += ["--rdzv_conf", f"timeout={options.start_timeout_s:g}"]
    arguments += ["--cpu"] if options.cpu or gpus(options.instance_type) == 0 else []
    if spec.retry.max_restarts:
        arguments += ["--max_restarts", str(spec.retry.max_restarts)]
    arguments += ["--shutdown_timeout", f"{spec.grace_s:g}", "--tee", "3"]
    arguments += {"script": [], "module": ["-m"], "command": ["--no_python"]}[spec.entry]
    return [*arguments, "--", *spec.argv]


def _camel(value: Any) -> Any:
    """Convert keys in snake case to boto3's: `s3_data_source` is `S3DataSource`."""
    if isinstance(value, Mapping):
        return {
            "".join(word[:1].upper() + word[1:] for word in key.split("_")): _camel(element)
            for key, element in value.items()
        }
    return [_camel(element) for element in value] if isinstance(value, (list, tuple)) else value


def _merge_patch(value: Any, patch: Any) -> Any:
    """Apply a JSON merge patch (https://www.rfc-editor.org/rfc/rfc7396)."""
    if not isinstance(patch, Mapping):
        return patch
    merged = dict(value) if isinstance(value, Mapping) else {}
    for key, change in patch.items():
        if change is None:
            merged.pop(key, None)
        else:
            merged[key] = _merge_patch(merged.get(key), change)
    return merged


# Limits of the API, from botocore's service model: invalid requests are rejected before they are sent.

# Character classes of Java's regular expressions that Python lacks.
_CLASSES = {r"\p{L}": r"\w", r"\p{N}": r"\d", r"\p{Z}": r"\s", r"\p{M}": "\u0300-\u036f", r"\p{P}": "!-/:-@"}
_TYPE = ("ResourceConfig", "InstanceType")
# Kind of a botocore shape -> the types of its values, and their name in messages.
_KINDS: Mapping[str, tuple[Any, str]] = {
    "structure": (Mapping, "names and values"), "map": (Mapping, "names and values"), "list": ((list, tuple), "list"),
    "string": (str, "string"), "boolean": (bool, "boolean"), "integer": (int, "a whole number"),
    "long": (int, "a whole number"),
}  # fmt: skip
_Path = tuple[str, ...]


def _check_limits(request: Mapping[str, Any], target: str) -> None:
    """Raise SpecError, naming the flag or option, for a value that the API rejects. Botocore has the model."""
    problems = () if _model() is None else _problems(_model(), request, ())
    for path, problem in itertools.chain(problems, _textual_rules(request)):
        raise SpecError(f"target {target}: {_origin(path)}: {problem}")


def _textual_rules(request: Mapping[str, Any]) -> Iterator[tuple[_Path, str]]:
    """Check what the API's pages state in their text only: API_StoppingCondition, API_Channel and API_Tag."""
    with contextlib.suppress(AttributeError, KeyError, TypeError):  # of a malformed part, which the model names
        limits = request.get("StoppingCondition", {})
        run_s, wait_s = limits.get("MaxRuntimeInSeconds", _DAY_S), limits.get("MaxWaitTimeInSeconds")
        if run_s > _MAX_DAYS * _DAY_S:
            yield ("StoppingCondition", "MaxRuntimeInSeconds"), f"{run_s} s is above AWS's limit of {_MAX_DAYS} days"
        if wait_s is not None and wait_s < run_s:
            problem = f"{wait_s} is below the run time (--time-limit), {run_s} s, which it includes"
            yield ("StoppingCondition", "MaxWaitTimeInSeconds"), problem
        if [channel["ChannelName"] for channel in request.get("InputDataConfig", ())].count(CHANNEL) > 1:
            yield ("InputDataConfig",), f"the channel {CHANNEL} is accel's own: choose another channel_name"
        for tag in request.get("Tags", ()):
            if tag["Key"].lower().startswith("aws:"):
                yield ("Tags",), f"{tag['Key']}: AWS reserves names that begin with aws:"


def unknown_type(instance_type: str) -> str | None:
    """Return a warning for an instance type that botocore does not list: it may be newer."""
    model = _model()
    known_types = [instance_type] if model is None else model.members["ResourceConfig"].members["InstanceType"].enum
    if instance_type in known_types:
        return None
    return f"instance_type: botocore lists no {instance_type}{nearest(instance_type, known_types)}"


@functools.cache
def _model() -> Any:
    try:
        import botocore.session
    except ImportError:
        return None
    service = botocore.session.get_session().get_service_model("sagemaker")
    return service.operation_model("CreateTrainingJob").input_shape


def _problems(shape: Any, value: Any, path: _Path) -> Iterator[tuple[_Path, str]]:
    kind, limits = shape.type_name, shape.metadata
    types, name = _KINDS[kind]
    if not isinstance(value, types) or (isinstance(value, bool) and kind != "boolean"):
        yield path, f"expects {name}, not {value!r}"
        return
    if kind == "string" and "{" in value and path[:1] != ("AlgorithmSpecification",):  # AWS has the value
        return
    measure, unit = (value, "") if isinstance(value, int) else (len(value), "a length of ")
    if not limits.get("min", measure) <= measure <= limits.get("max", measure):
        yield path, f"expects {unit}{_range(limits)}, not {measure}"
    if kind == "string":
        yield from _text(shape, value, path)
    elif kind == "list":
        for index, item in enumerate(value):
            yield from _problems(shape.member, item, (*path, str(index)))
    elif kind == "map":
        for key, item in value.items():
            yield from _problems(shape.value, item, (*path, key))
    elif kind == "structure":
        yield from _members(shape, value, path)


def _members(shape: Any, value: Mapping[str, Any], path: _Path) -> Iterator[tuple[_Path, str]]:
    for key, member in value.items():
        if key not in shape.members:
            yield (*path, key), f"unknown key{nearest(key, shape.members)} (keys: {', '.join(shape.members)})"
        else:
            yield from _problems(shape.members[key], member, (*path, key))
    for key in shape.required_members:
        if key not in value:
            yield path, f"{key} is missing"


def _text(shape: Any, value: str, path: _Path) -> Iterator[tuple[_Path, str]]:
    pattern = shape.metadata.get("pattern", ".*")
    for java, python in _CLASSES.items():
        pattern = pattern.replace(java, python)
    if path == _TYPE:
        if value not in shape.enum and _family(value) in map(_family, shape.enum):
            yield path, f"{_family(value)} has no {value}{nearest(value, shape.enum)}; if AWS has it, upgrade boto3"
    elif shape.enum and value not in shape.enum:
        yield path, f"expects one of {', '.join(shape.enum)}, not {value!r}{nearest(value, shape.enum)}"
    elif not re.fullmatch(pattern, value, re.DOTALL):
        yield path, f"must match {shape.metadata['pattern']}, not {value!r}"


def _family(instance_type: str) -> str:
    return instance_type.rpartition(".")[0]


def _range(limits: Mapping[str, Any]) -> str:
    lower, upper = limits.get("min"), limits.get("max")
    if lower and upper is not None:
        return f"{lower} to {upper}"
    return f"{upper} or less" if upper is not None else f"{lower} or more"


def _origin(path: _Path) -> str:
    """Return the flag or option that set the value, and the place in it."""
    for length in range(len(path), 0, -1):
        if path[:length] in FIELD_SOURCES:
            return ": ".join([FIELD_SOURCES[path[:length]], *path[length:]])
    return "patch: " + ".".join(path)
