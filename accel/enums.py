"""The words the runtime uses, each an enum whose members are also strings."""

from __future__ import annotations

from enum import Enum


class Word(str, Enum):
    """An enum whose members print and compare as their value."""

    def __str__(self) -> str:
        return str(self.value)

    @classmethod
    def list(cls) -> list[str]:
        """Every value, in order of definition."""
        return [str(member.value) for member in cls]


class DistributedType(Word):
    """How the processes of a run work together; the names are Accelerate's."""

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    MULTI_XPU = "MULTI_XPU"
    FSDP = "FSDP"
    DEEPSPEED = "DEEPSPEED"
    MEGATRON_LM = "MEGATRON_LM"
    XLA = "XLA"


class PrecisionType(Word):
    """The values of ``mixed_precision``."""

    NO = "no"
    BF16 = "bf16"
    FP16 = "fp16"


class RNGType(Word):
    """Random number generators that can be made equal on all processes."""

    TORCH = "torch"
    CUDA = "cuda"
    XPU = "xpu"
    GENERATOR = "generator"


class DDPCommunicationHookType(Word):
    """How DistributedDataParallel compresses gradients on the wire."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"
