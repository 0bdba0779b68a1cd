"""What this machine offers: installed packages, kinds of devices, numeric types.

Whether a package is there is looked up once and remembered. A package counts only when its distribution is
installed too, so that a folder of the same name does not pass for it.
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
    """Whether ``module`` can be imported and one of ``distributions`` (default: its own name) provides it."""
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
    """bitsandbytes with 4-bit types."""
    return _at_least("bitsandbytes", "0.39.0")


def is_8bit_bnb_available() -> bool:
    """bitsandbytes with 8-bit types."""
    return _at_least("bitsandbytes", "0.37.2")


def is_aim_available() -> bool:
    """aim, before version 4, which has another interface."""
    return installed("aim") and compare_versions("aim", "<", "4.0.0")


def is_amdsmi_available() -> bool:
    """amdsmi, AMD's library about its GPUs."""
    return installed("amdsmi")


def is_bitsandbytes_multi_backend_available() -> bool:
    """bitsandbytes for devices other than CUDA."""
    return is_bnb_available() and "multi_backend" in getattr(import_module("bitsandbytes"), "features", ())


def is_bnb_available(min_version: str | None = None) -> bool:
    """bitsandbytes, of at least ``min_version``."""
    return installed("bitsandbytes") if min_version is None else _at_least("bitsandbytes", min_version)


def is_boto3_available() -> bool:
    """boto3, the AWS SDK."""
    return installed("boto3")


def is_clearml_available() -> bool:
    """clearml, a tracker."""
    return installed("clearml")


def is_comet_ml_available() -> bool:
    """comet_ml, a tracker."""
    return installed("comet_ml")


def is_datasets_available() -> bool:
    """datasets."""
    return installed("datasets")


def is_deepspeed_available() -> bool:
    """deepspeed."""
    return installed("deepspeed")


def is_dvclive_available() -> bool:
    """dvclive, a tracker."""
    return installed("dvclive")


def is_import_timer_available() -> bool:
    """import_timer."""
    return installed("import_timer")


def is_lomo_available() -> bool:
    """lomo_optim."""
    return installed("lomo_optim", "lomo_optim", "lomo-optim")


def is_matplotlib_available() -> bool:
    """matplotlib."""
    return installed("matplotlib")


def is_megatron_lm_available() -> bool:
    """megatron-core 0.8 or newer with its training module, where ``ACCELERATE_USE_MEGATRON_LM`` asks for it."""
    if not read_flag(os.environ, "ACCELERATE_USE_MEGATRON_LM") or not installed("megatron", "megatron-core"):
        return False
    return compare_versions("megatron-core", ">=", "0.8.0") and find_spec("megatron.training") is not None


def is_mlflow_available() -> bool:
    """mlflow, a tracker, whole or as mlflow-skinny."""
    return installed("mlflow", "mlflow", "mlflow-skinny")


def is_msamp_available() -> bool:
    """msamp, Microsoft's 8-bit training."""
    return installed("msamp", "ms-amp")


def is_numpy_available(min_version: str = "1.25.0") -> bool:
    """numpy, of at least ``min_version``."""
    return _at_least("numpy", min_version)


def is_pandas_available() -> bool:
    """pandas."""
    return installed("pandas")


def is_peft_available() -> bool:
    """peft."""
    return installed("peft")


def is_pippy_available() -> bool:
    """torch's own pipeline parallelism."""
    return is_torch_version(">=", "2.4.0")


def is_pynvml_available() -> bool:
    """pynvml, NVIDIA's library about its GPUs."""
    return installed("pynvml", "pynvml", "nvidia-ml-py")


def is_pytest_available() -> bool:
    """pytest."""
    return installed("pytest")


def is_rich_available() -> bool:
    """rich, where ``ACCELERATE_ENABLE_RICH`` asks for it."""
    return installed("rich") and parse_flag_from_env("ACCELERATE_ENABLE_RICH")


def is_sagemaker_available() -> bool:
    """sagemaker, the AWS SDK for it."""
    return installed("sagemaker")


def is_schedulefree_available() -> bool:
    """schedulefree, optimizers without a schedule."""
    return installed("schedulefree")


def is_swanlab_available() -> bool:
    """swanlab, a tracker."""
    return installed("swanlab")


def is_tensorboard_available() -> bool:
    """A writer of TensorBoard's files: tensorboard or tensorboardX."""
    return installed("tensorboard") or installed("tensorboardX")


def is_timm_available() -> bool:
    """timm."""
    return installed("timm")


def is_torchao_available() -> bool:
    """torchao 0.6.1 or newer."""
    return _at_least("torchao", "0.6.1")


def is_torchdata_available() -> bool:
    """torchdata."""
    return installed("torchdata")


def is_torchdata_stateful_dataloader_available() -> bool:
    """torchdata with `StatefulDataLoader`."""
    return _at_least("torchdata", "0.8.0")


def is_torchvision_available() -> bool:
    """torchvision."""
    return installed("torchvision")


def is_tqdm_available() -> bool:
    """tqdm."""
    return installed("tqdm")


def is_trackio_available() -> bool:
    """trackio, a tracker."""
    return installed("trackio")


def is_transformer_engine_available() -> bool:
    """NVIDIA's transformer engine, or Intel's on its HPUs."""
    if is_hpu_available():
        return installed("intel_transformer_engine", "intel-transformer-engine")
    return installed("transformer_engine", "transformer-engine")


def is_transformer_engine_mxfp8_available() -> bool:
    """NVIDIA's transformer engine on a GPU with block-scaled 8-bit types."""
    if not installed("transformer_engine", "transformer-engine"):
        return False
    return bool(import_module("transformer_engine.pytorch.fp8").check_mxfp8_support()[0])


def is_transformers_available() -> bool:
    """transformers."""
    return installed("transformers")


def is_triton_available() -> bool:
    """triton, or Intel's build of it on its GPUs."""
    return installed("triton", "triton-xpu") if is_xpu_available() else installed("triton")


def is_wandb_available() -> bool:
    """wandb, a tracker."""
    return installed("wandb")


def is_torch_distributed_available() -> bool:
    """Whether this build of torch can form worlds."""
    return torch.distributed.is_available()


def is_weights_only_available() -> bool:
    """Whether `torch.load` can be restricted to named types."""
    return is_torch_version(">=", "2.4.0")


def is_xccl_available() -> bool:
    """Whether this build of torch has Intel's collectives."""
    return bool(getattr(torch.distributed, "is_xccl_available", lambda: False)())


@cache
def is_torch_xla_available(check_is_tpu: bool = False, check_is_gpu: bool = False) -> bool:
    """Whether torch_xla is there, for a TPU or a GPU if asked, unless ``USE_TORCH_XLA`` is off."""
    if not read_flag(os.environ, "USE_TORCH_XLA", True) or not installed("torch_xla"):
        return False
    if not (check_is_tpu or check_is_gpu):
        return True
    kind = import_module("torch_xla.runtime").device_type()
    return kind == "TPU" if check_is_tpu else kind in ("GPU", "CUDA")


def is_fp8_available() -> bool:
    """Whether a library for 8-bit training is installed."""
    return is_msamp_available() or is_transformer_engine_available() or is_torchao_available()


def torchao_required(func: Function) -> Function:
    """Decorate a function that needs torchao: without it a call raises `ImportError` and says how to get it."""

    @wraps(func)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not is_torchao_available():
            raise ImportError(f"{func.__name__} needs torchao 0.6.1 or newer: pip install torchao")
        return func(*args, **kwargs)

    return cast(Function, run)


def deepspeed_required(func: Function) -> Function:
    """Decorate a function that needs a run under DeepSpeed: in any other a call raises `StateError`."""

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
    """Whether the device computes in bfloat16; a TPU counts as one that does not, with ``ignore_tpu``."""
    if is_torch_xla_available(check_is_tpu=True):
        return not ignore_tpu
    for kind, found in (("cuda", is_cuda_available()), ("mlu", is_mlu_available()), ("xpu", is_xpu_available())):
        if found:
            return bool(getattr(torch, kind).is_bf16_supported())
    if is_mps_available():
        return torch.backends.mps.is_macos_or_newer(14, 0)
    return True
