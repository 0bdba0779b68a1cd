"""The request of a job: exactly what is sent, what is refused before, and by which words."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from typing import Any

import pytest

from schedulers import Resources, Retry, SpecError
from schedulers.sagemaker import options as meaning
from schedulers.sagemaker import request
from schedulers.sagemaker.options import SageMakerOptions
from tests.clusters.sagemaker_sdk import image_table
from tests.needs import package

from .support import JOB_ID, ROLE, options, spec

EVERYTHING: dict[str, Any] = {
    "volume_size_in_gb": 200, "volume_kms_key_id": "key-1", "subnets": ("subnet-1",), "security_group_ids": ("sg-1",),
    "enable_network_isolation": True, "enable_inter_container_traffic_encryption": True,
    "enable_managed_spot_training": True, "max_wait_time_in_seconds": 7200, "max_pending_time_in_seconds": 7200,
    "maximum_retry_attempts": 3, "checkpoint_s3_uri": "s3://results/checkpoints", "output_kms_key_id": "key-2",
    "training_plan_arn": "arn:aws:sagemaker:us-east-1:123456789012:training-plan/plan-1",
    "input_data_config": (
        {"channel_name": "train",
         "data_source": {"s3_data_source": {"s3_uri": "s3://data/x", "s3_data_type": "S3Prefix"}}},
        {"channel_name": "shared", "data_source": {"file_system_data_source": {
            "file_system_id": "fs-0123456789a", "file_system_access_mode": "ro", "file_system_type": "FSxLustre",
            "directory_path": "/fsx"}}},
    ),
    "metric_definitions": ({"name": "loss", "regex": "loss=([0-9.]+)"},), "tags": {"team": "vision"},
    "output_compression_type": "NONE", "enable_remote_debug": True,
    "patch": {"InfraCheckConfig": {"EnableInfraCheck": True}, "RetryStrategy": None},
}  # fmt: skip


def build(given: SageMakerOptions, **wanted: Any) -> dict[str, Any]:
    return request.build(spec(**wanted), request.resolved(given), JOB_ID, "aws")


def test_the_least_request() -> None:
    made = build(options())
    assert made == {
        "TrainingJobName": "train-2mxaaaaaaaa",
        "RoleArn": ROLE,
        "AlgorithmSpecification": {
            "TrainingImage": "763104351884.dkr.ecr.us-east-1.amazonaws.com/pytorch-training:2.8.0-cpu-py312",
            "TrainingInputMode": "File",
            "ContainerEntrypoint": ["python3", "/opt/ml/input/data/code/entry.py"],
        },
        "InputDataConfig": [
            {
                "ChannelName": "code",
                "DataSource": {
                    "S3DataSource": {
                        "S3DataType": "S3Prefix",
                        "S3Uri": "s3://results/team/accel/jobs/2mxaaaaaaaa/code/",
                        "S3DataDistributionType": "FullyReplicated",
                    }
                },
                "InputMode": "File",
            }
        ],
        "OutputDataConfig": {"S3OutputPath": "s3://results/team"},
        "ResourceConfig": {"InstanceCount": 1, "InstanceType": "ml.m5.xlarge", "VolumeSizeInGB": 30},
        "StoppingCondition": {"MaxRuntimeInSeconds": 3600},
        "Tags": [{"Key": "accel.dev/job-id", "Value": "2mxaaaaaaaa"}],
    }


def test_each_option_reaches_the_request() -> None:
    """An option that is forgotten changes nothing."""
    package("botocore")
    whole = build(options(**EVERYTHING), nodes=4)
    assert whole["InputDataConfig"][2]["DataSource"]["FileSystemDataSource"]["FileSystemId"] == "fs-0123456789a"
    assert whole["AlgorithmSpecification"]["MetricDefinitions"] == [{"Name": "loss", "Regex": "loss=([0-9.]+)"}]
    assert "RetryStrategy" not in whole
    assert whole["InfraCheckConfig"] == {"EnableInfraCheck": True}
    for field in dataclasses.fields(SageMakerOptions):
        if field.name in EVERYTHING and field.name not in ("patch", "maximum_retry_attempts"):
            rest = {key: value for key, value in EVERYTHING.items() if key != field.name}
            with contextlib.suppress(SpecError):  # subnets and security groups go together
                assert build(options(**rest), nodes=4) != whole, field.name


def test_what_only_aws_can_tell_is_open() -> None:
    made = build(options(region=None, s3_output_path=None, role="train"))
    assert made["OutputDataConfig"]["S3OutputPath"] == "s3://sagemaker-{region}-{account}"
    assert made["RoleArn"] == "arn:{partition}:iam::{account}:role/train"
    assert made["AlgorithmSpecification"]["TrainingImage"] == "pytorch:2.8"
    known = request.resolved(options(region=None, s3_output_path=None), "1" * 12, "cn-north-1", ROLE)
    complete = request.build(spec(), known, JOB_ID, "aws")
    assert not any(word in json.dumps(complete) for word in ("{account}", "{region}", "{partition}"))
    assert complete["AlgorithmSpecification"]["TrainingImage"].startswith(
        "727897471807.dkr.ecr.cn-north-1.amazonaws.com.cn/"
    )


@pytest.mark.parametrize(
    ("given", "wanted", "said"),
    [
        ({"image": None}, {}, "no image: set --image, or image: in accel.yaml (a URI, or pytorch:2.10.0)"),
        ({}, {"after": ("2mxb",)}, "--after is not supported: SageMaker starts jobs at once"),
        ({}, {"resources": Resources(cpus=4)}, "--cpus 4: fixed by instance_type (ml.m5.xlarge)"),
        ({}, {"resources": Resources(memory_gb=4)}, "--memory 4: fixed by instance_type"),
        ({"python": "~/venv/bin/python"}, {}, "python: ~/venv/bin/python: an image has no home directory"),
        ({}, {"resources": Resources(accelerator="a100")}, "--accelerator a100: fixed by instance_type"),
        ({}, {"grace_s": 121.0}, "--grace 121: SageMaker kills 120 s after SIGTERM"),
        ({"instance_type": "ml.g5.12xlarge"}, {"resources": Resources(gpus=8)}, "--gpus 8: an ml.g5.12xlarge has 4"),
        ({"instance_type": "ml.trn9.48xlarge"}, {}, "unknown number of GPUs of ml.trn9.48xlarge"),
        ({"instance_type": "ml.p4dn.24xlarge"}, {},
         "unknown number of GPUs of ml.p4dn.24xlarge; did you mean 'ml.p4d.24xlarge'?: set --gpus"),
        ({"instance_type": "ml.g5.7xlarge"}, {}, "unknown number of GPUs of ml.g5.7xlarge; did you mean 'ml.g5."),
        ({}, {"secrets": {"T": "env:HF_TOKEN"}}, "--secret T: env: is not supported"),
        ({"enable_network_isolation": True, "subnets": ("s",), "security_group_ids": ("g",)},
         {"secrets": {"T": "ssm:token"}}, "--secret: the container has no network under enable_network_isolation"),
        ({"enable_network_isolation": True, "requirements": "r.txt"}, {}, "requirements: pip has no network"),
        ({"subnets": ("subnet-1",)}, {}, "set both subnets and security_group_ids, or neither"),
        ({"enable_managed_spot_training": True}, {}, "enable_managed_spot_training needs max_wait"),
        ({"max_wait_time_in_seconds": 5}, {}, "max_wait_time_in_seconds needs enable_managed_spot"),
    ],
)  # fmt: skip
def test_what_sagemaker_cannot_run(given: dict[str, Any], wanted: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError) as raised:
        meaning.check(spec(**wanted), options(**given), "aws")
    assert f"target aws: {said}" in str(raised.value)


@pytest.mark.parametrize("image", ["pytorch:2.8", "1.dkr.ecr.eu-west-1.amazonaws.com/x:2.8.0-gpu-py39-cu129-sagemaker"])
def test_a_function_needs_the_python_of_the_image(image: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(meaning.VERSIONS, "2.8.0", "py39")
    job = spec("accel.launch.run_function", "train", entry="module")
    with pytest.raises(SpecError, match=rf"target aws: {image} has Python 3\.9, and this is Python 3\.\d+: functions"):
        meaning.check(job, options(image=image), "aws")
    for other in (
        "team/train:1",
        "localhost:5000/team-py39/train:1",
        "localhost:5000/team/train:{}-py{}{}".format("1", *sys.version_info),
    ):
        meaning.check(job, options(image=other), "aws")
    meaning.check(spec(), options(image=image), "aws")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"volume_size_in_gb": -1}, "volume_size_in_gb: expects 0 or more, not -1"),
        ({"maximum_retry_attempts": 31}, "maximum_retry_attempts: expects 1 to 30, not 31"),
        ({"tags": {"a€": "b"}}, "tags: 0: Key: must match"),
        ({"tags": {f"k{n}": "v" for n in range(60)}}, "tags: expects a length of 50 or less, not 61"),
        ({"s3_output_path": "results"}, "must match (https|s3)"),
        ({"input_data_config": ({"channel_name": "a b"},)}, "input_data_config: 1: ChannelName: must match"),
        ({"input_data_config": ({"chanel_name": "a"},)}, "unknown key; did you mean 'ChannelName'?"),
        ({"checkpoint_s3_uri": "s3://a", "checkpoint_local_path": "/x" * 3000}, "expects a length of 4096 or less"),
        ({"patch": {"StopingCondition": {}}}, "patch: StopingCondition: unknown key"),
        ({"metric_definitions": ({"name": "loss"},)}, "Regex is missing"),
        ({"instance_type": "ml.m5.xlargee"}, "instance_type: ml.m5 has no ml.m5.xlargee; did you mean 'ml.m5.xlarge'?"),
        ({"patch": {"ResourceConfig": {"InstanceCount": "two"}}}, "--nodes: expects a whole number, not 'two'"),
    ],
)  # fmt: skip
def test_the_limits_of_the_api_are_named_by_what_broke_them(given: dict[str, Any], said: str) -> None:
    package("botocore")
    with pytest.raises(SpecError) as raised:
        build(options(**given))
    assert said in str(raised.value)


@pytest.mark.parametrize("botocore", [True, False])
@pytest.mark.parametrize(
    ("given", "wanted", "said"),
    [
        ({"enable_managed_spot_training": True, "max_wait_time_in_seconds": 3599}, {},
         "max_wait_time_in_seconds: 3599 is below the run time (--time-limit), 3600 s"),
        ({"patch": {"StoppingCondition": {"MaxWaitTimeInSeconds": 5}}}, {}, "max_wait_time_in_seconds: 5 is below"),
        ({}, {"time_limit_s": 28 * 86400.0 + 1}, "--time-limit: 2419201 s is above AWS's limit of 28 days"),
        ({"input_data_config": ({"channel_name": "code", "data_source": {}},)}, {},
         "input_data_config: the channel code is accel's own"),
        ({"tags": {"aws:team": "vision"}}, {}, "tags: aws:team: AWS reserves names that begin with aws:"),
        ({"tags": {"AWS:team": "vision"}}, {}, "tags: AWS:team: AWS reserves"),
    ],
)  # fmt: skip
def test_rules_that_the_api_states_in_its_text_only(
    given: dict[str, Any], wanted: dict[str, Any], said: str, botocore: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if botocore:
        package("botocore")
    else:
        monkeypatch.setattr(request, "_model", lambda: None)
    with pytest.raises(SpecError) as raised:
        build(options(**given), **wanted)
    assert f"target aws: {said}" in str(raised.value)
    build(options(), time_limit_s=28 * 86400.0)


@pytest.mark.parametrize(
    "given",
    [
        {"input_data_config": ({"chanel_name": "a"},)},
        {"patch": {"StoppingCondition": "one day"}},
        {"patch": {"Tags": 1}},
    ],
)
def test_without_botocore_a_malformed_part_is_left_to_aws(
    given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request, "_model", lambda: None)
    build(options(**given))


def test_an_instance_type_that_is_newer_than_botocore_is_a_warning() -> None:
    package("botocore")
    build(options(instance_type="ml.m55.xlarge"))
    assert request.unknown_type("ml.m5.xlarge") is None
    warning = request.unknown_type("ml.m55.xlarge")
    assert warning == "instance_type: botocore lists no ml.m55.xlarge; did you mean 'ml.m5.xlarge'?"


def test_a_repeated_request_has_the_same_digest_and_another_has_not() -> None:
    made = build(options())
    said = request.settings(spec(), options(), JOB_ID)
    one = request.digest_of(request.with_digest(made, said)["Tags"])
    assert one == request.digest_of(request.with_digest(build(options()), said)["Tags"])
    others = [
        request.with_digest(build(options(volume_size_in_gb=31)), said),
        request.with_digest(made, request.settings(spec("train.py", "--lr", "1"), options(), JOB_ID)),
    ]
    assert one not in {request.digest_of(each["Tags"]) for each in others}


def test_arguments_and_variables_go_through_the_channel() -> None:
    """Which changes nothing of them: hyperparameters would."""
    words = ("train.py", "007", "1.10", "-1", "", "a b", "a\nb", "--x", "--x", "$HOME", "é\udcff")
    made = request.settings(spec(*words, env={"LONG": "x" * 5000}, retry=Retry(max_restarts=2)), options(), JOB_ID)
    again = json.loads(json.dumps(made))
    launch = again["launch"]
    assert launch[launch.index("--") + 1 :] == list(words)
    assert launch[: launch.index("--")] == [
        "--num_processes", "1", "--cpu", "--max_restarts", "2", "--shutdown_timeout", "30", "--tee", "3",
    ]  # fmt: skip
    root = {"ACCEL_PROJECT_ROOT": "/opt/ml/checkpoints"}
    assert again["environment"] == {"ACCEL_JOB_ID": JOB_ID, "LONG": "x" * 5000, **root}


@pytest.mark.parametrize(
    ("instance_type", "count"),
    [
        ("ml.m5.xlarge", 0), ("ml.p4d.24xlarge", 8), ("ml.g5.12xlarge", 4), ("ml.g4dn.xlarge", 1), ("ml.p5.4xlarge", 1),
        ("ml.p9.48xlarge", None), ("ml.g5.7xlarge", None), ("ml.g7e.2xlarge", None),
        ("ml.trn1.32xlarge", None), ("local", None),
    ],
)  # fmt: skip
def test_gpus_of_an_instance(instance_type: str, count: int | None) -> None:
    assert meaning.gpus(instance_type) == count


@pytest.mark.parametrize(
    ("image", "region", "instance_type", "address"),
    [
        ("team/x:1", "us-east-1", "ml.m5.large", "team/x:1"),
        ("pytorch:2.7.1", "eu-west-1", "ml.g5.xlarge",
         "763104351884.dkr.ecr.eu-west-1.amazonaws.com/pytorch-training:2.7.1-gpu-py312"),
        ("pytorch:2.6", "us-gov-west-1", "ml.m5.large",
         "442386744353.dkr.ecr.us-gov-west-1.amazonaws.com/pytorch-training:2.6.0-cpu-py312"),
        ("pytorch:2.10", "eusc-de-east-1", "ml.g5.xlarge",
         "204133271717.dkr.ecr.eusc-de-east-1.amazonaws.eu/pytorch-training:2.10.0-gpu-py313"),
    ],
)  # fmt: skip
def test_the_address_of_an_image(image: str, region: str, instance_type: str, address: str) -> None:
    assert meaning.image_address(image, region, instance_type, "target aws") == address


def test_the_registries_and_python_tags_of_images_are_those_of_the_sdk() -> None:
    known = image_table()["training"]["versions"]
    current = {version: entry for version, entry in known.items() if tuple(map(int, version.split(".")))[:2] >= (2, 6)}
    assert {version: entry["py_versions"][0] for version, entry in current.items()} == meaning.VERSIONS
    for version, entry in current.items():
        for region, account in entry["registries"].items():
            address = meaning.image_address(f"pytorch:{version}", region, "ml.m5.large", "target aws")
            assert address.startswith(f"{account}.dkr.ecr.{region}."), (version, region)


def test_a_version_that_is_not_known() -> None:
    with pytest.raises(SpecError, match=r"pytorch:1.10: unknown version \(known: 2.6.0, 2.7.1, .*2.10.0\)"):
        meaning.image_address("pytorch:1.10", "us-east-1", "ml.m5.large", "target aws")
