"""The public names, and what importing them costs."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import accel
from accel.errors import ArgumentError
from accel.logging import get_logger

from .worlds import run, run_one

ROOT = Path(__file__).parents[2]

NAMES = """
AccelError Accelerator AcceleratorState AutocastKwargs BatchSamplerShard CollectiveError DDPCommunicationHookType
DataLoaderConfiguration DataLoaderDispatcher DataLoaderShard DeepSpeedPlugin DistributedDataParallelKwargs
DistributedType DummyOptim DummyScheduler
FullyShardedDataParallelPlugin GeneralTracker GradScalerKwargs GradientAccumulationPlugin GradientState
InitProcessGroupKwargs IterableDatasetShard Job JobSpec LocalSGD LogLine LoggerType ParallelismConfig PartialState
ProcessError ProfileKwargs ProjectConfiguration Reason Resources
Retry SeedableRandomSampler SkipBatchSampler SkipDataLoader State Status TorchDynamoPlugin broadcast
broadcast_object_list compile_regions concatenate cpu_offload cpu_offload_with_hook debug_launcher disk_offload
dispatch_model extract_model_from_parallel find_executable_batch_size gather gather_object get_logger get_sampler
infer_auto_device_map init_empty_weights init_on_device load_checkpoint_and_dispatch load_checkpoint_in_model
notebook_launcher pad_across_processes prepare_data_loader prepare_pippy reduce register_tracker_class send_to_device
set_seed skip_first_batches submit submit_async synchronize_rng_states
""".split()

MEMBERS = """
accumulate autocast backward check_trigger checkpoint_on_preemption clear clip_grad_norm_ clip_grad_value_
context_parallel_rank data_parallel_rank data_parallel_shard_rank deepspeed_config deepspeed_engine_wrapped
deepspeed_plugin deepspeed_ulysses_dl_adapter device
dispatch_batches distributed_type end_training even_batches fp8_backend free_memory gather gather_for_metrics
get_state_dict get_tracker gradient_accumulation_steps init_trackers is_composable_parallelism_enabled is_fsdp2
is_last_process is_local_main_process is_main_process join_uneven_inputs load_state local_main_process_first
local_process_index log logging_dir lomo_backward main_process_first maybe_context_parallel mixed_precision
multi_device native_amp no_sync non_blocking num_processes on_last_process on_local_main_process on_local_process
on_main_process on_process optimizer_step_was_skipped pad_across_processes parallelism_config pipeline_parallel_rank
preempted prepare prepare_data_loader prepare_model prepare_optimizer prepare_scheduler print process_index profile
project_dir reduce register_for_checkpointing register_load_state_pre_hook register_save_state_pre_hook save
save_iteration save_model save_state scaler set_trigger should_save_model skip_first_batches split_batches
split_between_processes step sync_gradients tensor_parallel_rank torch_device_mesh trigger_sync_in_backward
unscale_gradients unwrap_model use_distributed use_seedable_sampler use_stateful_dataloader verify_device_map
wait_for_checkpoint wait_for_everyone
""".split()


def test_public_names() -> None:
    assert sorted(accel.__all__) == sorted(NAMES) == sorted(accel._HOME_OF)
    assert set(accel.__all__) <= set(dir(accel))
    runtime = [name for name in NAMES if accel._HOME_OF[name] != "schedulers"]
    for name in runtime:
        value: Any = getattr(accel, name)
        assert value.__doc__
    with pytest.raises(AttributeError, match="module 'accel' has no attribute 'Acelerator'"):
        accel.Acelerator  # noqa: B018


def test_members_of_accelerator_are_there_and_documented() -> None:
    for name in MEMBERS:
        assert getattr(accel.Accelerator, name).__doc__, name


def test_importing_accel_imports_nothing_heavy() -> None:
    code = "import sys, accel; print([m for m in ('torch', 'numpy', 'rich', 'yaml', 'schedulers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_importing_the_runtime_has_no_effects() -> None:
    code = """
import os, threading
import torch, torch._dynamo
before = threading.active_count(), dict(os.environ), torch.get_rng_state().tolist(), len(os.listdir("/proc/self/task"))
import accel.accelerator
after = threading.active_count(), dict(os.environ), torch.get_rng_state().tolist(), len(os.listdir("/proc/self/task"))
print(before == after, torch.cuda.is_initialized(), torch.distributed.is_initialized())
from accel.state import AcceleratorState, GradientState, PartialState
print(PartialState._shared_state, GradientState._shared_state)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "True False False\n{} {}\n"


def _logged() -> list[tuple[str, str]]:
    seen: list[tuple[str, str]] = []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append((record.getMessage(), record.funcName))  # type: ignore[method-assign]
    logger = get_logger("a script", log_level="INFO")
    logger.logger.addHandler(handler)
    logger.info("main %s", "only")
    logger.info("all", main_process_only=False)
    logger.debug("never")
    logger.warning("in turn", in_order=True)
    return seen


def test_logging_knows_the_process_and_the_caller() -> None:
    main, other = run(_logged)
    assert main == [("main only", "_logged"), ("all", "_logged"), ("in turn", "_logged")]
    assert other == [("all", "_logged"), ("in turn", "_logged")]
    assert run_one(_logged) == main


def test_a_level_that_does_not_exist_is_named() -> None:
    with pytest.raises(ArgumentError, match=r"log_level: 'INFOO' is not one of .*; did you mean 'INFO'?"):
        get_logger("x", "infoo")


def _seeded() -> list[Any]:
    import random

    import numpy
    import torch

    from accel import set_seed, synchronize_rng_states

    seen = []
    for specific in (False, True):
        set_seed(3, device_specific=specific)
        seen.append([random.random(), float(numpy.random.rand()), torch.rand(()).item()])
    synchronize_rng_states(["torch"])
    seen.append([torch.rand(()).item()])
    return seen


def test_seeds() -> None:
    main, other = run(_seeded)
    assert main[0] == other[0]
    assert all(a != b for a, b in zip(main[1], other[1], strict=True))
    assert main[2] == other[2]
