"""One training script, any cluster: the runtime (`Accelerator`) and the command line.

``import accel`` loads only this table: a public name is imported from its module at its first use, so that
the command line starts without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

_HOME_OF = {
    "AccelError": "accel.errors",
    "Accelerator": "accel.accelerator",
    "AcceleratorState": "accel.state",
    "AutocastKwargs": "accel.plugins",
    "BatchSamplerShard": "accel.data",
    "CollectiveError": "accel.errors",
    "DDPCommunicationHookType": "accel.enums",
    "DataLoaderConfiguration": "accel.plugins",
    "DataLoaderDispatcher": "accel.data",
    "DataLoaderShard": "accel.data",
    "DeepSpeedPlugin": "accel.plugins.deepspeed",
    "DistributedDataParallelKwargs": "accel.plugins",
    "DistributedType": "accel.enums",
    "DummyOptim": "accel.plugins.deepspeed",
    "DummyScheduler": "accel.plugins.deepspeed",
    "FullyShardedDataParallelPlugin": "accel.plugins.fsdp",
    "GeneralTracker": "accel.tracking",
    "GradScalerKwargs": "accel.plugins",
    "GradientAccumulationPlugin": "accel.plugins",
    "GradientState": "accel.state",
    "InitProcessGroupKwargs": "accel.plugins",
    "IterableDatasetShard": "accel.data",
    "Job": "schedulers",
    "JobSpec": "schedulers",
    "LocalSGD": "accel.local_sgd",
    "LogLine": "schedulers",
    "LoggerType": "accel.enums",
    "ParallelismConfig": "accel.plugins.parallelism",
    "PartialState": "accel.state",
    "ProcessError": "accel.errors",
    "ProfileKwargs": "accel.plugins",
    "ProjectConfiguration": "accel.plugins",
    "Reason": "schedulers",
    "Resources": "schedulers",
    "Retry": "schedulers",
    "SeedableRandomSampler": "accel.data",
    "SkipBatchSampler": "accel.data",
    "SkipDataLoader": "accel.data",
    "State": "schedulers",
    "Status": "schedulers",
    "TorchDynamoPlugin": "accel.plugins",
    "broadcast": "accel.collectives",
    "broadcast_object_list": "accel.collectives",
    "compile_regions": "accel.training.compile",
    "concatenate": "accel.collectives",
    "cpu_offload": "accel.big_models",
    "cpu_offload_with_hook": "accel.big_models",
    "debug_launcher": "accel.launch.function",
    "disk_offload": "accel.big_models",
    "dispatch_model": "accel.big_models",
    "extract_model_from_parallel": "accel.parallel.unwrap",
    "find_executable_batch_size": "accel.memory",
    "gather": "accel.collectives",
    "gather_object": "accel.collectives",
    "get_logger": "accel.logging",
    "get_sampler": "accel.data",
    "infer_auto_device_map": "accel.big_models",
    "init_empty_weights": "accel.big_models",
    "init_on_device": "accel.big_models",
    "load_checkpoint_and_dispatch": "accel.big_models",
    "load_checkpoint_in_model": "accel.big_models",
    "notebook_launcher": "accel.launch.function",
    "pad_across_processes": "accel.collectives",
    "prepare_data_loader": "accel.data",
    "prepare_pippy": "accel.inference",
    "reduce": "accel.collectives",
    "register_tracker_class": "accel.tracking",
    "send_to_device": "accel.pytree",
    "set_seed": "accel.collectives.rng",
    "skip_first_batches": "accel.data",
    "submit": "schedulers",
    "submit_async": "schedulers",
    "synchronize_rng_states": "accel.collectives.rng",
}

__all__ = [
    "AccelError",
    "Accelerator",
    "AcceleratorState",
    "AutocastKwargs",
    "BatchSamplerShard",
    "CollectiveError",
    "DDPCommunicationHookType",
    "DataLoaderConfiguration",
    "DataLoaderDispatcher",
    "DataLoaderShard",
    "DeepSpeedPlugin",
    "DistributedDataParallelKwargs",
    "DistributedType",
    "DummyOptim",
    "DummyScheduler",
    "FullyShardedDataParallelPlugin",
    "GeneralTracker",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "GradientState",
    "InitProcessGroupKwargs",
    "IterableDatasetShard",
    "Job",
    "JobSpec",
    "LocalSGD",
    "LogLine",
    "LoggerType",
    "ParallelismConfig",
    "PartialState",
    "ProcessError",
    "ProfileKwargs",
    "ProjectConfiguration",
    "Reason",
    "Resources",
    "Retry",
    "SeedableRandomSampler",
    "SkipBatchSampler",
    "SkipDataLoader",
    "State",
    "Status",
    "TorchDynamoPlugin",
    "broadcast",
    "broadcast_object_list",
    "compile_regions",
    "concatenate",
    "cpu_offload",
    "cpu_offload_with_hook",
    "debug_launcher",
    "disk_offload",
    "dispatch_model",
    "extract_model_from_parallel",
    "find_executable_batch_size",
    "gather",
    "gather_object",
    "get_logger",
    "get_sampler",
    "infer_auto_device_map",
    "init_empty_weights",
    "init_on_device",
    "load_checkpoint_and_dispatch",
    "load_checkpoint_in_model",
    "notebook_launcher",
    "pad_across_processes",
    "prepare_data_loader",
    "prepare_pippy",
    "reduce",
    "register_tracker_class",
    "send_to_device",
    "set_seed",
    "skip_first_batches",
    "submit",
    "submit_async",
    "synchronize_rng_states",
]

if TYPE_CHECKING:
    from types import ModuleType

    from accel.accelerator import Accelerator
    from accel.big_models import (
        cpu_offload,
        cpu_offload_with_hook,
        disk_offload,
        dispatch_model,
        infer_auto_device_map,
        init_empty_weights,
        init_on_device,
        load_checkpoint_and_dispatch,
        load_checkpoint_in_model,
    )
    from accel.collectives import (
        broadcast,
        broadcast_object_list,
        concatenate,
        gather,
        gather_object,
        pad_across_processes,
        reduce,
    )
    from accel.collectives.rng import set_seed, synchronize_rng_states
    from accel.data import (
        BatchSamplerShard,
        DataLoaderDispatcher,
        DataLoaderShard,
        IterableDatasetShard,
        SeedableRandomSampler,
        SkipBatchSampler,
        SkipDataLoader,
        get_sampler,
        prepare_data_loader,
        skip_first_batches,
    )
    from accel.enums import DDPCommunicationHookType, DistributedType, LoggerType
    from accel.errors import AccelError, CollectiveError, ProcessError
    from accel.inference import prepare_pippy
    from accel.launch.function import debug_launcher, notebook_launcher
    from accel.local_sgd import LocalSGD
    from accel.logging import get_logger
    from accel.memory import find_executable_batch_size
    from accel.parallel.unwrap import extract_model_from_parallel
    from accel.plugins import (
        AutocastKwargs,
        DataLoaderConfiguration,
        DistributedDataParallelKwargs,
        GradientAccumulationPlugin,
        GradScalerKwargs,
        InitProcessGroupKwargs,
        ProfileKwargs,
        ProjectConfiguration,
        TorchDynamoPlugin,
    )
    from accel.plugins.deepspeed import DeepSpeedPlugin, DummyOptim, DummyScheduler
    from accel.plugins.fsdp import FullyShardedDataParallelPlugin
    from accel.plugins.parallelism import ParallelismConfig
    from accel.pytree import send_to_device
    from accel.state import AcceleratorState, GradientState, PartialState
    from accel.tracking import GeneralTracker, register_tracker_class
    from accel.training.compile import compile_regions
    from schedulers import Job, JobSpec, LogLine, Reason, Resources, Retry, State, Status, submit, submit_async


def __getattr__(name: str) -> object:
    module_name = _HOME_OF.get(name)
    if module_name is None:
        raise AttributeError(f"module 'accel' has no attribute {name!r}")
    value: object = getattr(_imported(module_name), name)
    globals()[name] = value
    return value


def _imported(module: str) -> ModuleType:
    """Import a module without garbage collection.

    torch leaves the collector just short of a full collection, which would walk all of torch's objects: 100 ms, a
    twentieth of importing torch, and would find almost nothing.
    """
    import gc

    if not gc.isenabled():
        return import_module(module)
    gc.disable()
    try:
        return import_module(module)
    finally:
        gc.enable()


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
