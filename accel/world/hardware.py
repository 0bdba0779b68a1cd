"""The devices of this machine: their types in torch, their drivers, and the processors near them.

Unless documented otherwise, functions initialize no device, so that processes can still be forked.
"""

from __future__ import annotations

import logging
import math
import os
import subprocess
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from accel.enums import DistributedType
from accel.errors import ArgumentError
from accel.world.environment import LAUNCHERS, get_int_from_env, parse_flag_from_env, patch_environment
from accel.world.versions import is_torch_version

# device type → (package that adds it to torch, distributed type of several processes), in order of preference
PLUGINS: dict[str, tuple[str | None, DistributedType]] = {
    "mlu": ("torch_mlu", DistributedType.MULTI_MLU),
    "sdaa": ("torch_sdaa", DistributedType.MULTI_SDAA),
    "musa": ("torch_musa", DistributedType.MULTI_MUSA),
    "npu": ("torch_npu", DistributedType.MULTI_NPU),
    "hpu": ("habana_frameworks.torch", DistributedType.MULTI_HPU),
    "xpu": (None, DistributedType.MULTI_XPU),
    "neuron": ("torch_neuronx", DistributedType.MULTI_NEURON),
}


def is_rocm_available() -> bool:
    """Return True if torch is built for AMD GPUs and finds one."""
    return torch.version.hip is not None and torch.cuda.is_available()


def is_cuda_available() -> bool:
    """Return True if there is an NVIDIA GPU; does not initialize CUDA, so that processes can still be forked."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return True
    with patch_environment(PYTORCH_NVML_BASED_CUDA_CHECK="1"):
        return torch.cuda.is_available()


def is_mps_available(min_version: str = "1.12") -> bool:
    """Return True if there is an Apple GPU, with torch of at least ``min_version``."""
    return is_torch_version(">=", min_version) and torch.backends.mps.is_available() and torch.backends.mps.is_built()


@cache
def _has_device(kind: str, check_device: bool = False) -> bool:
    """Return True if torch, with the plug-in for ``kind``, finds a device of that kind."""
    plugin = PLUGINS[kind][0]
    if plugin is not None:
        if find_spec(plugin.partition(".")[0]) is None:
            return False
        try:
            import_module(plugin)
        except Exception:
            return False  # a plug-in may fail in any way without its device
    module = getattr(torch, kind, None)
    if module is None:
        return False
    try:
        return bool(module.is_available()) and (not check_device or int(module.device_count()) > 0)
    except RuntimeError:
        return False


def is_xpu_available(check_device: bool = False) -> bool:
    """Return True if there is an Intel GPU."""
    return _has_device("xpu", check_device)


def is_mlu_available(check_device: bool = False) -> bool:
    """Return True if there is a Cambricon MLU."""
    return _has_device("mlu", check_device)


def is_musa_available(check_device: bool = False) -> bool:
    """Return True if there is a Moore Threads GPU."""
    return _has_device("musa", check_device)


def is_npu_available(check_device: bool = False) -> bool:
    """Return True if there is an Ascend NPU."""
    return _has_device("npu", check_device)


def is_sdaa_available(check_device: bool = False) -> bool:
    """Return True if there is a Tecorigin SDAA."""
    return _has_device("sdaa", check_device)


def is_neuron_available(check_device: bool = False) -> bool:
    """Return True if there is an AWS Neuron core."""
    return _has_device("neuron", check_device)


def is_hpu_available(init_hccl: bool = False) -> bool:
    """Return True if there is an Intel Gaudi; with ``init_hccl``, load its collectives."""
    available = _has_device("hpu")
    if available and init_hccl:
        import_module("habana_frameworks.torch.distributed.hccl")
    return available


def is_habana_gaudi1() -> bool:
    """Return True if the Gaudi is of the first generation, which lacks fp16 and fp8."""
    if not is_hpu_available():
        return False
    experimental = import_module("habana_frameworks.torch.utils.experimental")
    return bool(experimental._get_device_type() == experimental.synDeviceType.synDeviceGaudi)


def is_fp16_available() -> bool:
    """Return True if the device computes in float16."""
    return not is_habana_gaudi1()


def get_current_device_type() -> tuple[str, str]:
    """Return the device type and the `DistributedType` of a world on it; default ``("cuda", "MULTI_GPU")``."""
    for kind, (_, distributed_type) in PLUGINS.items():
        if _has_device(kind):
            return kind, str(distributed_type)
    return "cuda", str(DistributedType.MULTI_GPU)


def _nvidia_smi(field: str) -> list[str]:
    argv = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader"]
    return subprocess.check_output(argv, text=True).strip().splitlines()


def get_gpu_info() -> tuple[list[str], int]:
    """Return the names of the NVIDIA GPUs and their number. Raises `OSError` without nvidia-smi."""
    names = [line.strip() for line in _nvidia_smi("name")]
    return names, len(names)


def get_driver_version() -> str:
    """Return the version of the NVIDIA driver. Raises `OSError` without nvidia-smi."""
    return _nvidia_smi("driver_version")[0].strip()


def check_cuda_p2p_ib_support() -> bool:
    """Return True unless there are several GeForce RTX 40 GPUs under a driver before 550.40.07.

    NCCL fails on those unless ``NCCL_P2P_DISABLE`` and ``NCCL_IB_DISABLE`` are 1.
    """
    from accel.world.versions import parsed

    try:
        names, count = get_gpu_info()
        if count < 2 or not any("RTX 40" in name for name in names):
            return True
        return parsed(get_driver_version()) >= parsed("550.40.07")
    except (OSError, subprocess.SubprocessError, ArgumentError):
        return True


def avoid_unsafe_links(device: torch.device) -> None:
    """Disable NCCL's direct links between GPUs if `check_cuda_p2p_ib_support` returns False."""
    names = ("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE")
    if all(name in os.environ for name in names) or "RTX 40" not in torch.cuda.get_device_name(device):
        return
    if not check_cuda_p2p_ib_support():
        logging.getLogger(__name__).warning(
            "%s: the driver is too old for direct links: NCCL will not use them", device
        )
        for name in names:
            os.environ.setdefault(name, "1")


@cache
def check_cuda_fp8_capability() -> bool:
    """Return True if the first GPU computes in 8 bits (compute capability 8.9); may initialize CUDA."""
    try:
        major, minor = _nvidia_smi("compute_cap")[0].split(".")
        return (int(major), int(minor)) >= (8, 9)
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return torch.cuda.get_device_capability() >= (8, 9)


@dataclass
class CPUInformation:
    """The ranks of a process and the sizes of its world and node, from the launcher's variables."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1


def get_cpu_distributed_information() -> CPUInformation:
    """Read torchrun's or an MPI launcher's variables without checking them, unlike `environment.read_world`."""
    rank, size, local_rank, local_size = ([names[i] for names in LAUNCHERS.values()] for i in range(4))
    return CPUInformation(
        rank=get_int_from_env(rank, 0),
        world_size=get_int_from_env(size, 1),
        local_rank=get_int_from_env(local_rank, 0),
        local_world_size=get_int_from_env(local_size, 1),
    )


def override_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """Bind this process to the processors near GPU ``local_process_index``; do nothing without a GPU.

    ``verbose`` (default: ``ACCELERATE_DEBUG_MODE``) logs the processors. Raises `ImportError` if the library for
    this is missing. Initializes CUDA.
    """
    if not torch.cuda.is_available():
        return
    cpus = (
        _processors_by_amdsmi(local_process_index) if is_rocm_available() else _processors_by_nvml(local_process_index)
    )
    os.sched_setaffinity(0, cpus)
    if parse_flag_from_env("ACCELERATE_DEBUG_MODE") if verbose is None else verbose:
        logging.getLogger(__name__).info("process %d runs on processors %s", local_process_index, sorted(cpus))


@cache
def set_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """Call `override_numa_affinity`, once for the same arguments."""
    override_numa_affinity(local_process_index, verbose)


def _processors_by_nvml(index: int) -> set[int]:
    nvml = _import_or_raise("pynvml", "nvidia-ml-py")
    nvml.nvmlInit()
    try:
        masks = nvml.nvmlDeviceGetCpuAffinity(
            nvml.nvmlDeviceGetHandleByIndex(index), math.ceil((os.cpu_count() or 1) / 64)
        )
    finally:
        nvml.nvmlShutdown()
    return {64 * position + bit for position, mask in enumerate(masks) for bit in range(64) if mask >> bit & 1}


def _processors_by_amdsmi(index: int) -> set[int]:
    smi = _import_or_raise("amdsmi", "amdsmi")
    smi.amdsmi_init()
    try:
        node = smi.amdsmi_topo_get_numa_node_number(smi.amdsmi_get_processor_handles()[index])
    finally:
        smi.amdsmi_shut_down()
    if node is None or node < 0:
        return set(os.sched_getaffinity(0))
    with open(f"/sys/devices/system/node/node{node}/cpulist") as file:
        return processors(file.read())


def processors(text: str) -> set[int]:
    """Parse a list of numbers in Linux's format: ``0-7,16-23``."""
    indices: set[int] = set()
    for part in filter(None, (part.strip() for part in text.split(","))):
        first, _, last = part.partition("-")
        indices.update(range(int(first), int(last or first) + 1))
    return indices


def _import_or_raise(module: str, distribution: str) -> Any:
    try:
        return import_module(module)
    except ImportError:
        raise ImportError(f"ACCELERATE_CPU_AFFINITY needs {module}: pip install {distribution}") from None
