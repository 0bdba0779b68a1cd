"""Options of a SageMaker target, and the validation of jobs against them."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ..errors import SpecError, nearest
from ..job import JobSpec

KIND = "sagemaker"
GRACE_S = 120.0  # from SIGTERM to SIGKILL, whatever a job asks (API_StopTrainingJob)
_PREFIXES = ("secretsmanager:", "ssm:")


@dataclass(frozen=True, kw_only=True)
class SageMakerOptions:
    """The options of a SageMaker target in `accel.yaml`. The names are boto3's, in snake case.

    profile, region:  of AWS's configuration files; default: boto3's choice.
    role:             the execution role, by its ARN or its name.
    image:            a URI, or `pytorch:VERSION`: AWS's image of that version. A job's --image comes first.
    instance_type:    such as `ml.g5.12xlarge`; each node is one instance.
    s3_output_path:   the place of artefacts and of accel's uploads; default: the account's default bucket for
                      SageMaker, which must exist.
    checkpoint_s3_uri: AWS copies checkpoint_local_path there, and back when the job starts. `{id}` in it is the
                      job's id; without it, jobs continue from each other's checkpoints.
    input_data_config: further channels, with boto3's keys in snake case.
    metric_definitions: `{name, regex}` of lines of the log.
    requirements:     a file for pip in the code directory, installed in the container before the ranks start.
    setup:            argvs run once in every container before the ranks start, before those of the job.
    python:           the interpreter in the image.
    cpu:              train on the CPU even if there are GPUs.
    start_timeout_s:  the time that the containers wait for each other.
    patch:            a JSON merge patch on the request, applied last.
    """

    profile: str | None = None
    region: str | None = None
    role: str
    image: str | None = None
    instance_type: str
    volume_size_in_gb: int = 30
    volume_kms_key_id: str | None = None
    keep_alive_period_in_seconds: int | None = None
    training_plan_arn: str | None = None
    subnets: tuple[str, ...] = ()
    security_group_ids: tuple[str, ...] = ()
    enable_network_isolation: bool = False
    enable_inter_container_traffic_encryption: bool = False
    enable_managed_spot_training: bool = False
    max_wait_time_in_seconds: int | None = None
    max_pending_time_in_seconds: int | None = None
    maximum_retry_attempts: int | None = None
    checkpoint_s3_uri: str | None = None
    checkpoint_local_path: str = "/opt/ml/checkpoints"
    s3_output_path: str | None = None
    output_kms_key_id: str | None = None
    output_compression_type: Literal["GZIP", "NONE"] | None = None
    input_data_config: tuple[Mapping[str, Any], ...] = ()
    metric_definitions: tuple[Mapping[str, str], ...] = ()
    tags: Mapping[str, str] = field(default_factory=dict)
    enable_remote_debug: bool = False
    requirements: str | None = None
    setup: tuple[tuple[str, ...], ...] = ()
    python: str = "python3"
    cpu: bool = False
    start_timeout_s: float = 1800.0
    patch: Mapping[str, Any] = field(default_factory=dict)


def check(spec: JobSpec, options: SageMakerOptions, target: str) -> None:
    """Raise SpecError for a job that SageMaker cannot run."""
    for problem in _problems(spec, options):
        raise SpecError(f"target {target}: {problem}")
    if spec.calls_function:
        image, here = str(spec.image or options.image), ".".join(map(str, sys.version_info[:2]))
        tag = re.search(r":[^/]*-py(\d)(\d+)", image_address(image, "", options.instance_type, f"target {target}"))
        if tag is not None and ".".join(tag.groups()) != here:
            raise SpecError(
                f"target {target}: {image} has Python {'.'.join(tag.groups())}, and this is Python {here}: functions "
                "need the same version on both sides"
            )


def _problems(spec: JobSpec, options: SageMakerOptions) -> Iterator[str]:
    resources = spec.resources
    if not (spec.image or options.image):
        yield f"no image: set --image, or image: in accel.yaml (a URI, or pytorch:{NEWEST})"
    if spec.after:
        yield "--after is not supported: SageMaker starts jobs at once. Submit this job after the others"
    fixed = {"cpus": "cpus", "memory": "memory_gb", "shm": "shm_gb", "accelerator": "accelerator"}
    for flag, value in ((flag, getattr(resources, name)) for flag, name in fixed.items()):
        if value is not None:
            yield f"--{flag} {value}: fixed by instance_type ({options.instance_type}); choose another"
    if spec.grace_s > GRACE_S:
        yield f"--grace {spec.grace_s:g}: SageMaker kills 120 s after SIGTERM; give 120 or less"
    if options.instance_type in ("local", "local_gpu"):
        yield (
            f"instance_type: {options.instance_type} is the local mode of SageMaker's SDK. To run on this machine, "
            "write accel launch TRAIN.py or accel submit --target local TRAIN.py, without this file or target"
        )
    type_gpus = gpus(options.instance_type)
    if resources.gpus and type_gpus is not None and resources.gpus != type_gpus:
        yield f"--gpus {resources.gpus}: an {options.instance_type} has {type_gpus}"
    if type_gpus is None and not resources.gpus and spec.procs_per_node is None and not options.cpu:
        known = nearest(options.instance_type, (f"ml.{family}.{size}" for family in _GPUS for size in _GPUS[family]))
        yield f"unknown number of GPUs of {options.instance_type}{known}: set --gpus or --procs-per-node"
    if options.enable_network_isolation:  # with subnets too: API_CreateTrainingJob, EnableNetworkIsolation
        if options.requirements is not None:
            yield "requirements: pip has no network under enable_network_isolation; install them in the image"
        if spec.secrets:
            yield "--secret: the container has no network under enable_network_isolation, with subnets too"
    for name, reference in spec.secrets.items():
        if not reference.startswith(_PREFIXES):
            yield (
                f"--secret {name}: {reference.partition(':')[0]}: is not supported: store the value in AWS, "
                "and give secretsmanager:ID[#KEY] or ssm:NAME"
            )
    if options.python.startswith("~"):
        yield f"python: {options.python}: an image has no home directory. Write an absolute path"
    if bool(options.subnets) != bool(options.security_group_ids):
        yield "set both subnets and security_group_ids, or neither"
    if options.enable_managed_spot_training:
        if options.keep_alive_period_in_seconds is not None:
            yield "keep_alive_period_in_seconds: spot instances have no warm pools"
        if options.max_wait_time_in_seconds is None:
            yield "enable_managed_spot_training needs max_wait_time_in_seconds, for the wait and the run together"
    elif options.max_wait_time_in_seconds is not None:
        yield "max_wait_time_in_seconds needs enable_managed_spot_training: true"


def warnings(spec: JobSpec, options: SageMakerOptions) -> Iterator[str]:
    if spec.time_limit_s is None:
        yield "without --time-limit SageMaker stops the job after one day"
    if options.enable_managed_spot_training and options.checkpoint_s3_uri is None:
        yield "spot instances without checkpoint_s3_uri: an interrupted job starts from the beginning"


# AWS's images and instance types as known offline: registries, tags, and the GPUs of an instance.
# https://docs.aws.amazon.com/sagemaker/latest/dg-ecr-paths/sagemaker-algo-docker-registry-paths.html
# https://aws.amazon.com/sagemaker/pricing/

_NAMED = "pytorch:"
# Version -> the tag of its Python. The torch of older images is too old for accel.
VERSIONS = {"2.6.0": "py312", "2.7.1": "py312", "2.8.0": "py312", "2.9.0": "py312", "2.10.0": "py313"}
NEWEST = [*VERSIONS][-1]
_COMMON = "763104351884"
_REGISTRIES = {
    "af-south-1": "626614931356", "ap-east-1": "871362719292", "ap-east-2": "975050140332",
    "ap-northeast-3": "364406365360", "ap-south-2": "772153158452", "ap-southeast-3": "907027046896",
    "ap-southeast-4": "457447274322", "ap-southeast-5": "550225433462", "ap-southeast-6": "633930458069",
    "ap-southeast-7": "590183813437", "ca-west-1": "204538143572", "cn-north-1": "727897471807",
    "cn-northwest-1": "727897471807", "eu-central-2": "380420809688", "eu-isoe-west-1": "371248457586",
    "eu-south-1": "692866216735", "eu-south-2": "503227376785", "eusc-de-east-1": "204133271717",
    "il-central-1": "780543022126", "me-central-1": "914824155844", "me-south-1": "217643126080",
    "me-west-1": "124382933778", "mx-central-1": "637423239942", "us-gov-east-1": "446045086412",
    "us-gov-west-1": "442386744353", "us-iso-east-1": "886529160074", "us-isob-east-1": "094389454867",
    "us-isof-east-1": "303241398832", "us-isof-south-1": "454834333376",
}  # fmt: skip
_SUFFIXES = {
    "cn-": "amazonaws.com.cn", "us-iso-": "c2s.ic.gov", "us-isob-": "sc2s.sgov.gov", "us-isof-": "csp.hci.ic.gov",
    "eu-isoe-": "cloud.adc-e.uk", "eusc-": "amazonaws.eu",
}  # fmt: skip

_INSTANCE = re.compile(r"ml\.(?P<family>[a-z0-9-]+)\.(?P<size>[a-z0-9]+)\Z")
_ONE_GPU = dict.fromkeys(("xlarge", "2xlarge", "4xlarge", "8xlarge", "16xlarge"), 1)
_G5 = {**_ONE_GPU, "12xlarge": 4, "24xlarge": 4, "48xlarge": 8}
# Family -> GPUs by size.
_GPUS: dict[str, dict[str, int]] = {
    "p2": {"xlarge": 1, "8xlarge": 8, "16xlarge": 16}, "p3": {"2xlarge": 1, "8xlarge": 4, "16xlarge": 8},
    "p3dn": {"24xlarge": 8}, "p4d": {"24xlarge": 8}, "p4de": {"24xlarge": 8}, "p5": {"4xlarge": 1, "48xlarge": 8},
    "p5e": {"48xlarge": 8}, "p5en": {"48xlarge": 8}, "p6-b200": {"48xlarge": 8}, "p6-b300": {"48xlarge": 8},
    "g4dn": {**_ONE_GPU, "12xlarge": 4}, "g5": _G5, "g6": _G5, "g6e": _G5,
}  # fmt: skip
_ACCELERATED = re.compile(r"(p|g|trn|inf|dl)\d")  # GPUs, or AWS's and Habana's chips


def image_address(image: str, region: str, instance_type: str, subject: str) -> str:
    """Return the address of an image. For `pytorch:VERSION`, it depends on the region. Raises SpecError."""
    if not image.startswith(_NAMED):
        return image
    version = image.removeprefix(_NAMED)
    full_version = next((full for full in VERSIONS if version in (full, full.rpartition(".")[0])), None)
    if full_version is None:
        known = f"(known: {', '.join(VERSIONS)}){nearest(version, VERSIONS)}"
        raise SpecError(f"{subject}: {image}: unknown version {known}; give a URI")
    kind = "cpu" if gpus(instance_type) == 0 else "gpu"
    suffix = next((candidate for start, candidate in _SUFFIXES.items() if region.startswith(start)), "amazonaws.com")
    registry = f"{_REGISTRIES.get(region, _COMMON)}.dkr.ecr.{region}.{suffix}"
    return f"{registry}/pytorch-training:{full_version}-{kind}-{VERSIONS[full_version]}"


def gpus(instance_type: str) -> int | None:
    """Return the number of GPUs of an instance type, or None if unknown or if its accelerators are not GPUs."""
    match = _INSTANCE.match(instance_type)
    if match is None:
        return None
    sizes = _GPUS.get(match["family"])
    if sizes is not None:
        return sizes.get(match["size"])
    return None if _ACCELERATED.match(match["family"]) else 0
