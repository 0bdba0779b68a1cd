"""Accelerate's configuration files for SageMaker: `accel submit` and `accel launch` make jobs of them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from accel.cli import exit_status, main
from accel.cli.launch import resolve_settings
from accel.cli.submit_config import use_keys
from tests.clusters.sagemaker import SageMaker

from .support import ROLE

# As Accelerate 1.15 writes it, with every question answered.
FILE = f"""\
additional_args:
  max_run: 600
  volume_size: 40
  environment: {{SEED: 7}}
  tags: [{{Key: team, Value: vision}}]
base_job_name: accelerate-sagemaker-1
compute_environment: AMAZON_SAGEMAKER
debug: false
distributed_type: DATA_PARALLEL
ec2_instance_type: ml.m5.xlarge
enable_cpu_affinity: false
gpu_ids: all
iam_role_name: {ROLE}
mixed_precision: bf16
num_machines: 2
py_version: py38
pytorch_version: 1.10.2
region: us-east-1
sagemaker_inputs_file: inputs.tsv
sagemaker_metrics_file: metrics.tsv
transformers_version: 4.17.0
use_cpu: false
"""
INPUTS = "channel_name\tdata_location\ntrain\ts3://data/train\n\n"
METRICS = "metric_name\tmetric_regex\nloss\tloss = (.*?);\n"
LEAST = f"compute_environment: AMAZON_SAGEMAKER\nec2_instance_type: ml.m5.xlarge\niam_role_name: {ROLE}\n"
OLDER = (
    "pytorch_version 1.10.2, py_version py38: accel does not run on this image; using pytorch:2.10.0 (py313), "
    "without Transformers: name packages in requirements.txt, or give image_uri"
)


@pytest.fixture(autouse=True)
def here(project: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(project)
    monkeypatch.setenv("ACCEL_CONFIG_HOME", str(home / "conf"))
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    (project / "train.py").write_text("")
    (project / "inputs.tsv").write_text(INPUTS)
    (project / "metrics.tsv").write_text(METRICS)
    return project


def planned(text: str, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[dict[str, Any], dict[str, Any], str]:
    """The request, what the containers read, and what stderr says."""
    Path("c.yaml").write_text(text)
    line = ["submit", "--config_file", "c.yaml", "--dry-run", "--json", *words, "train.py", "--lr", "1e-3"]
    assert main(line) == exit_status.OK
    shown = capsys.readouterr()
    files = json.loads(shown.out)["files"]
    return json.loads(files["sagemaker/request.json"]), json.loads(files["sagemaker/job.json"]), shown.err


def test_the_request(capsys: pytest.CaptureFixture[str]) -> None:
    request, job, said = planned(FILE, capsys)
    assert request["TrainingJobName"].startswith("accelerate-sagemaker-1-dry-run")
    assert request["RoleArn"] == ROLE
    assert request["ResourceConfig"] == {"InstanceCount": 2, "InstanceType": "ml.m5.xlarge", "VolumeSizeInGB": 40}
    assert request["StoppingCondition"] == {"MaxRuntimeInSeconds": 600}
    algorithm = request["AlgorithmSpecification"]
    assert algorithm["TrainingImage"].endswith(".us-east-1.amazonaws.com/pytorch-training:2.10.0-cpu-py313")
    assert algorithm["MetricDefinitions"] == [{"Name": "loss", "Regex": "loss = (.*?);"}]
    assert request["InputDataConfig"][1] == {
        "ChannelName": "train",
        "DataSource": {"S3DataSource": {"S3DataType": "S3Prefix", "S3Uri": "s3://data/train",
                                        "S3DataDistributionType": "FullyReplicated"}},
    }  # fmt: skip
    assert {"Key": "team", "Value": "vision"} in request["Tags"]
    assert job["environment"]["SEED"] == "7"
    assert job["environment"]["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert job["requirements"] is None
    assert job["launch"][-3:] == ["train.py", "--lr", "1e-3"]
    assert said.splitlines() == [
        "accel: warning: c.yaml:9: distributed_type DATA_PARALLEL runs as DDP, without SageMaker's own library",
        f"accel: warning: c.yaml:17: {OLDER}",
    ]


def test_flags_lie_over_the_file_and_the_file_over_the_target(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "accel.yaml").write_text(
        "targets:\n  aws: {kind: sagemaker, role: other, instance_type: ml.c5.xlarge, s3_output_path: s3://results}\n"
        "  lab: {kind: local}\n"
    )
    words = "--target aws --nodes 3 --name mine --image team/train:1 --time-limit 1h --option volume_size_in_gb=50"
    request, _, _ = planned(FILE, capsys, *words.split())
    assert request["TrainingJobName"].startswith("mine-dry-run")
    assert request["ResourceConfig"] == {"InstanceCount": 3, "InstanceType": "ml.m5.xlarge", "VolumeSizeInGB": 50}
    assert request["StoppingCondition"] == {"MaxRuntimeInSeconds": 3600}
    assert request["AlgorithmSpecification"]["TrainingImage"] == "team/train:1"
    assert (request["OutputDataConfig"], request["RoleArn"]) == ({"S3OutputPath": "s3://results"}, ROLE)
    assert main("submit --config_file c.yaml --target lab --dry-run train.py".split()) == exit_status.USAGE
    said = "accel submit: --config_file c.yaml is for a sagemaker target, and lab is of kind local\n"
    assert capsys.readouterr().err.splitlines()[-1] == said.strip()


@pytest.mark.parametrize(
    ("text", "image", "warned"),
    [
        ("image_uri: team/train:2", "team/train:2", False),
        ("additional_args: {image_uri: team/train:3}", "team/train:3", False),
        ("pytorch_version: '2.7'", "pytorch-training:2.7.1-cpu-py312", False),
        ("pytorch_version: 2.6.0", "pytorch-training:2.6.0-cpu-py312", False),
        ("py_version: py38", "pytorch-training:2.10.0-cpu-py313", True),
    ],
)
def test_the_image(text: str, image: str, warned: bool, capsys: pytest.CaptureFixture[str]) -> None:
    request, _, said = planned(f"{LEAST}{text}", capsys)
    assert request["AlgorithmSpecification"]["TrainingImage"].endswith(image)
    assert (OLDER in said) is warned


def test_every_argument_of_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = {
        "max_run": 60, "max_wait": 120, "use_spot_instances": True, "subnets": ["subnet-1"],
        "security_group_ids": ["sg-1"], "output_path": "s3://out", "output_kms_key": "k1", "volume_kms_key": "k2",
        "checkpoint_s3_uri": "s3://points", "checkpoint_local_path": "/opt/ml/points", "max_retry_attempts": 2,
        "encrypt_inter_container_traffic": True, "enable_network_isolation": True, "enable_remote_debug": True,
        "disable_output_compression": True, "metric_definitions": [{"Name": "acc", "Regex": "acc=(.*)"}],
        "instance_count": 2, "instance_type": "ml.c5.xlarge", "role": ROLE + "2", "base_job_name": "mine",
    }  # fmt: skip
    request, _, _ = planned(f"{LEAST}additional_args: {json.dumps(arguments)}", capsys)
    assert request["StoppingCondition"] == {"MaxRuntimeInSeconds": 60, "MaxWaitTimeInSeconds": 120}
    assert request["VpcConfig"] == {"Subnets": ["subnet-1"], "SecurityGroupIds": ["sg-1"]}
    assert request["CheckpointConfig"] == {"S3Uri": "s3://points", "LocalPath": "/opt/ml/points"}
    assert request["OutputDataConfig"] == {"S3OutputPath": "s3://out", "KmsKeyId": "k1", "CompressionType": "NONE"}
    assert request["ResourceConfig"]["VolumeKmsKeyId"] == "k2"
    assert request["ResourceConfig"]["InstanceType"] == "ml.c5.xlarge"
    assert request["RetryStrategy"] == {"MaximumRetryAttempts": 2}
    assert request["AlgorithmSpecification"]["MetricDefinitions"] == [{"Name": "acc", "Regex": "acc=(.*)"}]
    assert request["RoleArn"] == ROLE + "2"
    for switch in ("EnableInterContainerTrafficEncryption", "EnableNetworkIsolation", "EnableManagedSpotTraining"):
        assert request[switch] is True


def test_a_requirements_file_beside_the_script_is_installed(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "requirements.txt").write_text("six\n")
    assert planned(LEAST, capsys)[1]["requirements"] == "requirements.txt"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"{LEAST}distributed_type: MODEL_PARALLEL", "c.yaml:4: distributed_type MODEL_PARALLEL: SageMaker's library"),
        (f"{LEAST}additional_args:\n  max_runs: 3", "c.yaml:4: additional_args: max_runs: not supported; did you mean "
         "'max_run'? (supported: base_job_name, checkpoint_local_path"),
        (f"{LEAST}additional_args: {{hyperparameters: {{a: 1}}}}", "c.yaml:4: additional_args: hyperparameters: not"),
        (f"{LEAST}additional_args: {{max_run: soon}}", "c.yaml:4: additional_args: max_run: not a value of SageMaker's "
         "estimators: 'soon'"),
        (f"{LEAST}additional_args: {{tags: [team]}}", "c.yaml:4: additional_args: tags: not a value of"),
        (f"{LEAST}additional_args: {{volume_size: big}}", "c.yaml:4: additional_args: volume_size: volume_size_in_gb: "
         "expects int"),
        ("compute_environment: AMAZON_SAGEMAKER\niam_role_name: r", "c.yaml:1: SageMaker needs ec2_instance_type"),
        (LEAST.replace("ml.m5.xlarge", "local_gpu"), "instance_type: local_gpu is the local mode of S"),
        (f"{LEAST}additional_args: {{instance_type: local}}", "write accel launch TRAIN.py or accel submit --target l"),
        (f"{LEAST}sagemaker_inputs_file: no.tsv", "c.yaml:4: cannot read no.tsv: No such file or directory"),
        (f"{LEAST}sagemaker_inputs_file: bad.tsv", "bad.tsv:2: expects two columns with a tab between them, not 'x y'"),
        (f"{LEAST}sagemaker_inputs_file: code.tsv", "code.tsv:2: channel code: accel uses this name: choose another"),
        (f"{LEAST}sagemaker_inputs_file: local.tsv", "local.tsv:2: channel a: not an s3:// location: '/data'"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("command", ["launch", "submit"])
def test_what_is_refused(command: str, text: str, said: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "c.yaml").write_text(text)
    (here / "bad.tsv").write_text("name\tplace\nx y\n")
    (here / "code.tsv").write_text("name\tplace\ncode\ts3://b/c\n")
    (here / "local.tsv").write_text("name\tplace\na\t/data\n")
    assert main([command, "--config_file", "c.yaml", "train.py"]) == exit_status.USAGE
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"accel {command}: ") or said.startswith("option"), last
    assert said in last


def test_submitted_two_instances_run_to_the_end(
    sagemaker: SageMaker, here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """With its inputs and metrics, and no accel.yaml."""
    sagemaker.client("s3").put_object(Bucket=sagemaker.bucket, Key="digits/a.txt", Body=b"seven")
    (here / "inputs.tsv").write_text(f"channel_name\tdata_location\ntrain\ts3://{sagemaker.bucket}/digits\n")
    (here / "c.yaml").write_text(whole(sagemaker))
    (here / "train.py").write_text(TRAIN)
    assert main("submit --config_file c.yaml --follow train.py --lr 1e-3".split()) == exit_status.OK, capfd.readouterr()
    lines = [line.partition("] ")[2] for line in capfd.readouterr().out.splitlines()]
    assert sorted(line for line in lines if "of 2" in line) == [f"{n} of 2 bf16 seven ['--lr', '1e-3']" for n in (0, 1)]
    (call,) = sagemaker.calls("sagemaker", "CreateTrainingJob")
    assert call.request["ResourceConfig"]["InstanceCount"] == 2
    assert call.request["AlgorithmSpecification"]["MetricDefinitions"] == [{"Name": "loss", "Regex": "loss = (.*?);"}]


def test_launched_it_is_followed_and_its_exit_code_is_the_job_s(
    sagemaker: SageMaker, here: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With keys on the command line, which hold for this process and are written nowhere; inside a job of Slurm."""
    secret = sagemaker.env["AWS_SECRET_ACCESS_KEY"] + "-of-the-line"
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "nothing")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "expired")
    for name, value in (("SLURM_JOB_ID", "1"), ("SLURM_NNODES", "1"), ("SLURM_NODEID", "0")):
        monkeypatch.setenv(name, value)
    (here / "c.yaml").write_text(whole(sagemaker).replace("sagemaker_inputs_file: inputs.tsv\n", ""))
    (here / "train.py").write_text("import os, sys; print(os.environ['WORLD_SIZE'], sys.argv[1:]); sys.exit(3)")
    keys = ["--aws_access_key_id", sagemaker.env["AWS_ACCESS_KEY_ID"], "--aws_secret_access_key", secret]
    assert main(["launch", *keys, "--config_file", "c.yaml", "train.py", "--fast"]) == 3
    shown = capfd.readouterr()
    assert "2 ['--fast']" in shown.out
    assert shown.err.count("leave keys to AWS's credential chain") == 1
    assert sagemaker.calls("sagemaker", "CreateTrainingJob")
    for path in (path for path in here.parent.rglob("*") if path.is_file()):
        assert secret.encode() not in path.read_bytes(), path
    assert secret not in shown.out + shown.err


def test_keys_of_the_command_line_are_used_without_the_session_token_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.setenv(name, "of others")
    use_keys(resolve_settings({"aws_access_key_id": "A", "aws_secret_access_key": "B"}, {}))
    assert (os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"]) == ("A", "B")
    assert "AWS_SESSION_TOKEN" not in os.environ


TRAIN = """\
import os, sys
folder = os.environ["SM_CHANNEL_TRAIN"]
text = open(os.path.join(folder, "a.txt")).read()
print(os.environ["RANK"], "of", os.environ["WORLD_SIZE"], os.environ["ACCELERATE_MIXED_PRECISION"], text, sys.argv[1:])
"""


def whole(sagemaker: SageMaker) -> str:
    return FILE.replace("iam_role_name: " + ROLE, f"iam_role_name: {sagemaker.role}").replace(
        "  max_run", f"  output_path: s3://{sagemaker.bucket}/team\n  max_run"
    ).replace("region:", "image_uri: team/train:1\nregion:")  # fmt: skip
