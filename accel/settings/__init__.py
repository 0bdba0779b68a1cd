"""The settings of a launch, each described once, from which flags, files, prompts and documents are made; not what
is done with them (`launch`).

`accel launch`'s parser and help, the configuration file and its validation, the variables of the workers, the
questionnaire of `accel config` and the pages in `docs/reference` are all generated from `GROUPS`.
"""

from __future__ import annotations

from .deepspeed import DEEPSPEED
from .fp8 import FP8
from .fsdp import FSDP
from .hardware_use import DYNAMO, HARDWARE, RESOURCES, WAYS
from .megatron import MEGATRON
from .multi_node import FAILURES, MACHINES, MPI, PROGRAM, RENDEZVOUS
from .parallelism import PARALLELISM
from .sagemaker_tpu import FILE, SAGEMAKER, TPU
from .setting import Group, Setting

__all__ = ["BY_NAME", "GROUPS", "Group", "Setting", "defaults", "group_of"]

GROUPS: tuple[Group, ...] = (
    PROGRAM, HARDWARE, RESOURCES, MACHINES, RENDEZVOUS, FAILURES, DYNAMO, WAYS, FSDP, PARALLELISM, DEEPSPEED, MEGATRON,
    FP8, TPU, MPI, SAGEMAKER, FILE,
)  # fmt: skip

BY_NAME: dict[str, Setting] = {setting.name: setting for group in GROUPS for setting in group.settings}


def defaults() -> dict[str, object]:
    """Return every setting's default value."""
    return {setting.name: setting.default for group in GROUPS for setting in group.settings}


def group_of(name: str) -> Group:
    """Return the group of the setting with this name. Raises KeyError."""
    for group in GROUPS:
        if any(setting.name == name for setting in group.settings):
            return group
    raise KeyError(name)
