"""Settings of TPU hosts and pods, and of Amazon SageMaker."""

from __future__ import annotations

from typing import Any

from .setting import Group, Setting, switch


def _pod(name: str, help: str, kind: str = "text", default: Any = None, **rest: Any) -> Setting:
    return Setting(name, help, kind, default, used_by=rest.pop("used_by", ("pod",)), **rest)


TPU = Group(
    "TPU",
    "With --tpu.",
    (
        switch("tpu_use_cluster", "run on every host of a TPU pod", spelling="tpu_cluster", used_by=("pod",)),
        switch("no_tpu_cluster", "run on this host, whatever the file says", key="-", used_by=("pod",)),
        switch("tpu_use_sudo", "run the script with sudo on the pod's hosts", used_by=("pod",)),
        _pod("vm", "a host of the pod", "words", metavar="NAME", key="tpu_vm"),
        _pod("env", "NAME=VALUE for the pod's hosts", "words", metavar="NAME=VALUE", key="tpu_env"),
        Setting("tpu_runtime", "torch_tpu: a rank a chip; torch_xla: it calls the script's function on every core "
                "(default: the one that is installed)", choices=("torch_tpu", "torch_xla"), key="-",
                used_by=("tpu", "pod")),
        _pod("main_training_function", "the script's function that torch_xla calls on every core (default: main)",
             metavar="NAME", used_by=("tpu", "pod")),
        switch("downcast_bf16", "with bf16, make doubles float32 and floats bfloat16", env="XLA_DOWNCAST_BF16",
               style="one", used_by=("tpu", "pod")),
        _pod("tpu_name", "the pod's name", flag=False),
        _pod("tpu_zone", "its zone", flag=False),
        _pod("command_file", "a script that `accel tpu-config` runs on every host", flag=False),
        _pod("commands", "commands that `accel tpu-config` runs on every host", "words", flag=False),
    ),
    on=("tpu", True),
    example="--tpu --main_training_function main --mixed_precision bf16 train.py",
)  # fmt: skip


def _aws(name: str, help: str, kind: str = "text", default: Any = None, **rest: Any) -> Setting:
    return Setting(name, help, kind, default, used_by=("sagemaker",), **{"flag": False} | rest)


SAGEMAKER = Group(
    "Amazon SageMaker",
    "With a configuration file of compute_environment: AMAZON_SAGEMAKER.",
    (
        _aws("aws_access_key_id", "the key's id, where the file names no profile", metavar="ID", key="-", flag=True,
             env="AWS_ACCESS_KEY_ID"),
        _aws("aws_secret_access_key", "the key; better in the environment than on a command line", metavar="KEY",
             key="-", flag=True, env="AWS_SECRET_ACCESS_KEY"),
        _aws("ec2_instance_type", "the machines' type, such as ml.p3.2xlarge"),
        _aws("iam_role_name", "the role that the job runs as"),
        _aws("image_uri", "a container image, instead of a published one"),
        _aws("profile", "the profile with the credentials", env="AWS_PROFILE"),
        _aws("region", "the region", default="us-east-1", env="AWS_DEFAULT_REGION"),
        _aws("base_job_name", "what the job's name begins with", default="accelerate-sagemaker-1"),
        _aws("pytorch_version", "of the published image", default="1.10.2"),
        _aws("transformers_version", "of the published image", default="4.17.0"),
        _aws("py_version", "of the published image", default="py38"),
        _aws("sagemaker_inputs_file", "input channels: name and location a line, with tabs"),
        _aws("sagemaker_metrics_file", "metrics: name and regular expression a line, with tabs"),
        _aws("additional_args", "further arguments of the SageMaker estimator", "table"),
    ),
    example="--config_file sagemaker.yaml train.py --epochs 3",
)  # fmt: skip

ENVIRONMENTS = ("LOCAL_MACHINE", "AMAZON_SAGEMAKER")
TYPES = ("NO", "MULTI_CPU", "MULTI_GPU", "MULTI_XPU", "MULTI_HPU", "MULTI_NPU", "MULTI_MLU", "MULTI_SDAA",
         "MULTI_MUSA", "MULTI_NEURON", "DEEPSPEED", "FSDP", "XLA", "MEGATRON_LM")  # fmt: skip
SAGEMAKER_TYPES = ("NO", "DATA_PARALLEL", "MODEL_PARALLEL")

FILE = Group(
    "the file",
    "What only the configuration file says.",
    (
        Setting("compute_environment", "where it runs", default="LOCAL_MACHINE", choices=ENVIRONMENTS, flag=False),
        Setting("distributed_type", "how the work is spread; flags for that go before it",
                choices=(*TYPES, "DATA_PARALLEL", "MODEL_PARALLEL"), aliases=(("TPU", "XLA"),), flag=False),
    ),
)  # fmt: skip
