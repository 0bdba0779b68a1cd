"""The settings of a launch, each described once: flags, files, prompts and documents are generated from them.

`accel launch`'s parser and help, the configuration file and its validation, the variables of the workers, the
questionnaire of `accel config` and the pages in `docs/reference` are all generated from `GROUPS`.
"""

from __future__ import annotations

from .schema import (
    DEEPSPEED,
    DYNAMO,
    FAILURES,
    FILE,
    FP8,
    FSDP,
    HARDWARE,
    MACHINES,
    MEGATRON,
    MPI,
    PARALLELISM,
    PROGRAM,
    RENDEZVOUS,
    RESOURCES,
    SAGEMAKER,
    TPU,
    WAYS,
)
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
