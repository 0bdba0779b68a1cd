"""Checks for installed packages, device types and numeric types.

A package is looked up once and cached. It counts only if its distribution is installed too, so that a folder
of the same name does not pass for it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import cache, wraps
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import Any, TypeVar, cast

import torch

from accel.errors import StateError
from accel.world.environment import parse_flag_from_env, read_flag
from accel.world.hardware import is_cuda_available as is_cuda_available
from accel.world.hardware import is_fp16_available as is_fp16_available
from accel.world.hardware import is_habana_gaudi1 as is_habana_gaudi1
from accel.world.hardware import is_hpu_available as is_hpu_available
from accel.world.hardware import is_mlu_available as is_mlu_available
from accel.world.hardware import is_mps_available as is_mps_available
from accel.world.hardware import is_musa_available as is_musa_available
from accel.world.hardware import is_neuron_available as is_neuron_available
from accel.world.hardware import is_npu_available as is_npu_available
from accel.world.hardware import is_rocm_available as is_rocm_available
from accel.world.hardware import is_sdaa_available as is_sdaa_available
from accel.world.hardware import is_xpu_available as is_xpu_available
from accel.world.versions import compare_versions, is_torch_version

Function = TypeVar("Function", bound=Callable[..., Any])


@cache
def installed(module: str, *distributions: str) -> bool:
    """Return True if ``module`` can be imported and one of ``distributions`` (default: its own name) is installed."""
    if find_spec(module) is None:
        return False
    for name in distributions or (module,):
        try:
            metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        return True
    return False


def _at_least(module: str, version: str) -> bool:
    return installed(module) and compare_versions(module, ">=", version)


def is_4bit_bnb_available() -> bool:
    """Return True if bitsandbytes has 4-bit types."""
    return _at_least("bitsandbytes", "0.39.0")


def is_8bit_bnb_available() -> bool:
    """Return True if bitsandbytes has 8-bit types."""
    return _at_least("bitsandbytes", "0.37.2")


def is_aim_available() -> bool:
    """Return True if aim before version 4 is installed, which has another interface."""
    return installed("aim") and compare_versions("aim", "<", "4.0.0")


def is_amdsmi_available() -> bool:
    """Return True if amdsmi, AMD's GPU library, is installed."""
    return installed("amdsmi")


def is_bitsandbytes_multi_backend_available() -> bool:
    """Return True if bitsandbytes supports devices other than CUDA."""
    return is_bnb_available() and "multi_backend" in getattr(import_module("bitsandbytes"), "features", ())


def is_bnb_available(min_version: str | None = None) -> bool:
    """Return True if bitsandbytes of at least ``min_version`` is installed."""
    return installed("bitsandbytes") if min_version is None else _at_least("bitsandbytes", min_version)


def is_boto3_available() -> bool:
    """Return True if boto3, the AWS SDK, is installed."""
    return installed("boto3")


def is_clearml_available() -> bool:
    """Return True if clearml is installed."""
    return installed("clearml")


def is_comet_ml_available() -> bool:
    """Return True if comet_ml is installed."""
    return installed("comet_ml")


def is_datasets_available() -> bool:
    """Return True if datasets is installed."""
    return installed("datasets")


def is_deepspeed_available() -> bool:
    """Return True if deepspeed is installed."""
    return installed("deepspeed")


def is_dvclive_available() -> bool:
    """Return True if dvclive is installed."""
    return installed("dvclive")


def is_import_timer_available() -> bool:
    """Return True if import_timer is installed."""
    return installed("import_timer")


def is_lomo_available() -> bool:
    """Return True if lomo_optim is installed."""
    return installed("lomo_optim", "lomo_optim", "lomo-optim")


def is_matplotlib_available() -> bool:
    """Return True if matplotlib is installed."""
    return installed("matplotlib")


def is_megatron_lm_available() -> bool:
    """Return True for megatron-core 0.8 or newer with its training module, if ``ACCELERATE_USE_MEGATRON_LM`` is on."""
    if not read_flag(os.environ, "ACCELERATE_USE_MEGATRON_LM") or not installed("megatron", "megatron-core"):
        return False
    return compare_versions("megatron-core", ">=", "0.8.0") and find_spec("megatron.training") is not None


def is_mlflow_available() -> bool:
    """Return True if mlflow or mlflow-skinny is installed."""
    return installed("mlflow", "mlflow", "mlflow-skinny")


def is_msamp_available() -> bool:
    """Return True if msamp, Microsoft's 8-bit training, is installed."""
    return installed("msamp", "ms-amp")


def is_numpy_available(min_version: str = "1.25.0") -> bool:
    """Return True if numpy of at least ``min_version`` is installed."""
    return _at_least("numpy", min_version)


def is_pandas_available() -> bool:
    """Return True if pandas is installed."""
    return installed("pandas")


def is_peft_available() -> bool:
    """Return True if peft is installed."""
    return installed("peft")


def is_pippy_available() -> bool:
    """Return True if torch has pipeline parallelism (2.4 or newer)."""
    return is_torch_version(">=", "2.4.0")


def is_pynvml_available() -> bool:
    """Return True if pynvml, NVIDIA's GPU library, is installed."""
    return installed("pynvml", "pynvml", "nvidia-ml-py")


def is_pytest_available() -> bool:
    """Return True if pytest is installed."""
    return installed("pytest")


def is_rich_available() -> bool:
    """Return True if rich is installed and ``ACCELERATE_ENABLE_RICH`` is on."""
    return installed("rich") and parse_flag_from_env("ACCELERATE_ENABLE_RICH")


def is_sagemaker_available() -> bool:
    """Return True if sagemaker, an AWS SDK, is installed."""
    return installed("sagemaker")


def is_schedulefree_available() -> bool:
    """Return True if schedulefree is installed."""
    return installed("schedulefree")


def is_swanlab_available() -> bool:
    """Return True if swanlab is installed."""
    return installed("swanlab")


def is_tensorboard_available() -> bool:
    """Return True if tensorboard or tensorboardX is installed."""
    return installed("tensorboard") or installed("tensorboardX")


def is_timm_available() -> bool:
    """Return True if timm is installed."""
    return installed("timm")


def is_torchao_available() -> bool:
    """Return True if torchao 0.6.1 or newer is installed."""
    return _at_least("torchao", "0.6.1")


def is_torchdata_available() -> bool:
    """Return True if torchdata is installed."""
    return installed("torchdata")


def is_torchdata_stateful_dataloader_available() -> bool:
    """Return True if torchdata has `StatefulDataLoader`."""
    return _at_least("torchdata", "0.8.0")


def is_torchvision_available() -> bool:
    """Return True if torchvision is installed."""
    return installed("torchvision")


def is_tqdm_available() -> bool:
    """Return True if tqdm is installed."""
    return installed("tqdm")


def is_trackio_available() -> bool:
    """Return True if trackio is installed."""
    return installed("trackio")


def is_transformer_engine_available() -> bool:
    """Return True if NVIDIA's transformer engine, or Intel's on HPUs, is installed."""
    if is_hpu_available():
        return installed("intel_transformer_engine", "intel-transformer-engine")
    return installed("transformer_engine", "transformer-engine")


def is_transformer_engine_mxfp8_available() -> bool:
    """Return True if NVIDIA's transformer engine runs on a GPU with block-scaled 8-bit types."""
    if not installed("transformer_engine", "transformer-engine"):
        return False
    return bool(import_module("transformer_engine.pytorch.fp8").check_mxfp8_support()[0])


def is_transformers_available() -> bool:
    """Return True if transformers is installed."""
    return installed("transformers")


def is_triton_available() -> bool:
    """Return True if triton is installed, or Intel's build of it on Intel GPUs."""
    return installed("triton", "triton-xpu") if is_xpu_available() else installed("triton")


def is_wandb_available() -> bool:
    """Return True if wandb is installed."""
    return installed("wandb")


def is_torch_distributed_available() -> bool:
    """Return True if this build of torch has torch.distributed."""
    return torch.distributed.is_available()


def is_weights_only_available() -> bool:
    """Return True if `torch.load` can be restricted to an allowlist of types (torch 2.4 or newer)."""
    return is_torch_version(">=", "2.4.0")


def is_xccl_available() -> bool:
    """Return True if this build of torch has Intel's collectives."""
    return bool(getattr(torch.distributed, "is_xccl_available", lambda: False)())


@cache
def is_torch_xla_available(check_is_tpu: bool = False, check_is_gpu: bool = False) -> bool:
    """Return True if torch_xla is installed, with a TPU or GPU if requested, unless ``USE_TORCH_XLA`` is off."""
    if not read_flag(os.environ, "USE_TORCH_XLA", True) or not installed("torch_xla"):
        return False
    if not (check_is_tpu or check_is_gpu):
        return True
    kind = import_module("torch_xla.runtime").device_type()
    return kind == "TPU" if check_is_tpu else kind in ("GPU", "CUDA")


def is_fp8_available() -> bool:
    """Return True if a library for 8-bit training is installed."""
    return is_msamp_available() or is_transformer_engine_available() or is_torchao_available()


def torchao_required(func: Function) -> Function:
    """Decorate a function that needs torchao: without it a call raises `ImportError` with the install command."""

    @wraps(func)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not is_torchao_available():
            raise ImportError(f"{func.__name__} needs torchao 0.6.1 or newer: pip install torchao")
        return func(*args, **kwargs)

    return cast(Function, run)


def deepspeed_required(func: Function) -> Function:
    """Decorate a function that needs a run under DeepSpeed: in any other run a call raises `StateError`."""

    @wraps(func)
    def run(*args: Any, **kwargs: Any) -> Any:
        states = sys.modules.get("accel.state")
        if states is not None and states.is_initialized():
            kind = states.AcceleratorState().distributed_type
            if kind != "DEEPSPEED":
                raise StateError(f"{func.__name__} needs a run under DeepSpeed, this is {kind}")
        return func(*args, **kwargs)

    return cast(Function, run)


def is_bf16_available(ignore_tpu: bool = False) -> bool:
    """Return True if the device computes in bfloat16; with ``ignore_tpu``, False for a TPU."""
    if is_torch_xla_available(check_is_tpu=True):
        return not ignore_tpu
    for kind, available in (("cuda", is_cuda_available()), ("mlu", is_mlu_available()), ("xpu", is_xpu_available())):
        if available:
            return bool(getattr(torch, kind).is_bf16_supported())
    if is_mps_available():
        return torch.backends.mps.is_macos_or_newer(14, 0)
    return True
