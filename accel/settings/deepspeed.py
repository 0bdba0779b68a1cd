"""Settings of DeepSpeed, for Accelerate's DeepSpeedPlugin and the `deepspeed` command."""

from __future__ import annotations

from typing import Any

from .setting import Group, Setting

LAUNCHERS = ("pdsh", "standard", "openmpi", "mvapich", "mpich", "nossh", "slurm")
_DEVICES = ("none", "cpu", "nvme")


def _zero(name: str, help: str, kind: str = "text", **rest: Any) -> Setting:
    return Setting(name, help, kind, used_by=("deepspeed",), **rest)


DEEPSPEED = Group(
    "DeepSpeed",
    "With --use_deepspeed.",
    (
        _zero("deepspeed_config_file", "DeepSpeed's own configuration, in JSON", metavar="FILE",
              env="ACCELERATE_DEEPSPEED_CONFIG_FILE"),
        _zero("zero_stage", "0 nothing, 1 optimizer, 2 gradients, 3 parameters are sharded (default: 2)", "whole",
              choices=("0", "1", "2", "3"), env="ACCELERATE_DEEPSPEED_ZERO_STAGE"),
        _zero("offload_optimizer_device", "where the optimizer's state is kept", choices=_DEVICES,
              env="ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE"),
        _zero("offload_param_device", "where the parameters are kept", choices=_DEVICES,
              env="ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE"),
        _zero("offload_optimizer_nvme_path", "a directory of the drive for the optimizer's state", metavar="DIR",
              env="ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH"),
        _zero("offload_param_nvme_path", "a directory of the drive for the parameters", metavar="DIR",
              env="ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH"),
        _zero("gradient_clipping", "the largest norm of the gradients", "number", metavar="X",
              also=("auto",), env="ACCELERATE_GRADIENT_CLIPPING"),
        _zero("zero3_init_flag", "make the model's parameters sharded from the beginning (stage 3)", "yesno",
              env="ACCELERATE_DEEPSPEED_ZERO3_INIT", style="lower"),
        _zero("zero3_save_16bit_model", "gather the weights in 16 bits when saving (stage 3)", "yesno",
              env="ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL", style="lower"),
        _zero("deepspeed_hostfile", "the machines: `HOST slots=GPUS` a line", metavar="FILE"),
        _zero("deepspeed_exclusion_filter", "machines and GPUs of the hostfile to leave out", metavar="FILTER"),
        _zero("deepspeed_inclusion_filter", "machines and GPUs of the hostfile to use", metavar="FILTER"),
        _zero("deepspeed_multinode_launcher", "what starts the ranks of several machines (default: pdsh)",
              choices=LAUNCHERS),
        _zero("deepspeed_moe_layer_cls_names", "class names of mixture-of-experts layers", metavar="NAMES",
              env="ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES"),
    ),
    section="deepspeed_config",
    on=("use_deepspeed", True),
    example="--use_deepspeed --zero_stage 3 --offload_optimizer_device cpu train.py",
)  # fmt: skip
