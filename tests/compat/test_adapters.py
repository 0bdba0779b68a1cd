"""Adapters of `accel.compat`: checkpoints without an Accelerator, placeholders of DeepSpeed, small helpers."""

from __future__ import annotations

import pytest

from tests.compat.children import python, said

_CHECKPOINT = """
import os, sys, torch
if {compat}:
    import accel.compat
from accelerate.checkpointing import (
    load_accelerator_state, load_custom_state, save_accelerator_state, save_custom_state)
from accelerate.state import PartialState
PartialState(cpu=True)
torch.manual_seed({seed})
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
model(torch.randn(4, 3)).sum().backward()
optimizer.step()
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
folder = sys.argv[1]
if {save}:
    save_accelerator_state(folder, [model.state_dict()], [optimizer], [scheduler], [], 0, 7)
    save_custom_state(scheduler, folder, 2)
    print(torch.rand(1).item())
else:
    print(load_accelerator_state(folder, [model], [optimizer], [scheduler], [], 0))
    load_custom_state(scheduler, folder, 2)
    print(torch.rand(1).item())
print(float(sum(p.double().sum() for p in model.parameters())), optimizer.state_dict()["state"][0]["exp_avg"].tolist())
"""


@pytest.mark.parametrize(("writer", "reader"), [(True, True), (True, False), (False, True)])
def test_checkpoint_functions_read_each_others_files(writer: bool, reader: bool, tmp_path: object) -> None:
    wrote = said("-c", _CHECKPOINT.format(compat=writer, save=True, seed=1), str(tmp_path)).splitlines()
    read = said("-c", _CHECKPOINT.format(compat=reader, save=False, seed=2), str(tmp_path)).splitlines()
    assert read[0] == "{'step': 7}"
    assert read[1:] == wrote


def test_a_checkpoint_file_that_is_missing_is_named(tmp_path: object) -> None:
    code = "import accel.compat\nfrom accelerate.checkpointing import load_custom_state\n"
    done = python("-c", f"{code}load_custom_state(None, {str(tmp_path)!r}, 3)")
    assert done.stderr.strip().splitlines()[-1].endswith(f"CheckpointError: {tmp_path} has no custom_checkpoint_3.pkl")


@pytest.mark.parametrize("placeholder", ["DummyOptim([])", "DummyScheduler(None)"])
def test_placeholders_of_deepspeed_are_refused_without_it(placeholder: str) -> None:
    name = placeholder.partition("(")[0]
    code = f"import accel.compat\nfrom accelerate import Accelerator\nfrom accelerate.utils import {name}\n"
    done = python("-c", f"{code}Accelerator(cpu=True).prepare({placeholder})")
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"accel.errors.ArgumentError: prepare: a {name} stands for a part of DeepSpeed's")


def test_an_accelerator_answers_for_dimensions_that_it_does_not_have() -> None:
    code = """
import accel.compat
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
print(accelerator.data_parallel_rank, accelerator.tensor_parallel_rank, accelerator.pipeline_parallel_rank,
      accelerator.context_parallel_rank, accelerator.data_parallel_shard_rank, accelerator.parallelism_config,
      accelerator.torch_device_mesh, accelerator.should_save_model, accelerator.is_fsdp2, accelerator.fp8_backend.value,
      accelerator.deepspeed_plugin, accelerator.deepspeed_ulysses_dl_adapter([1], None),
      accelerator.is_composable_parallelism_enabled)
"""
    assert said("-c", code) == "0 0 0 0 0 None None True False NO None [1] False"


def test_loading_on_one_process_is_switched_for_the_next_plugin() -> None:
    code = """
import os
import accel.compat
from accelerate import FullyShardedDataParallelPlugin
from accelerate.utils import disable_fsdp_ram_efficient_loading, enable_fsdp_ram_efficient_loading
for switch in (enable_fsdp_ram_efficient_loading, disable_fsdp_ram_efficient_loading):
    switch()
    print(FullyShardedDataParallelPlugin().cpu_ram_efficient_loading, os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"])
"""
    assert said("-c", code).splitlines() == ["True true", "False false"]


def test_small_helpers_do_what_they_say() -> None:
    code = """
import torch
import accel.compat
from accelerate.utils import (GatheredParameters, compile_regions_fsdp2, get_grad_scaler,
    get_mixed_precision_context_manager, is_peft_model)
from accelerate.utils.dataclasses import get_module_class_from_name
from accelerate.utils.fsdp_utils import get_fsdp2_grad_scaler, get_parameters_from_modules
from accelerate.utils.operations import chained_operation, verify_operation
from accelerate.optimizer import move_to_device
from accelerate.state import AcceleratorState
AcceleratorState(mixed_precision="bf16", cpu=True)
net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Linear(2, 1)))
assert get_module_class_from_name(net, "ReLU") is torch.nn.ReLU and get_module_class_from_name(net, "Conv1d") is None
assert get_parameters_from_modules("1\\\\.1", net, "cpu") == set(net[1][1].parameters())
assert get_parameters_from_modules([net[0]], net, "cpu") == set(net[0].parameters())
assert get_parameters_from_modules(None, net, "cpu") == set()
with get_mixed_precision_context_manager(native_amp=True):
    assert net(torch.ones(1, 2)).dtype is torch.bfloat16
with get_mixed_precision_context_manager(), GatheredParameters(net.parameters()):
    assert net(torch.ones(1, 2)).dtype is torch.float32
assert not is_peft_model(net)
assert chained_operation(len) is verify_operation(len) is len
assert move_to_device({"a": [torch.ones(1)]}, torch.device("meta"))["a"][0].device.type == "meta"
assert get_grad_scaler(enabled=False).is_enabled() is False
assert type(get_fsdp2_grad_scaler(enabled=False)) is torch.amp.GradScaler
blocks = torch.nn.Sequential(torch.nn.ModuleList([torch.nn.Linear(2, 2) for _ in range(2)]), torch.nn.ReLU())
assert compile_regions_fsdp2(blocks, backend="eager") is blocks
assert [type(block) for block in blocks[0]] == [torch.nn.Linear] * 2
assert all(part._compiled_call_impl is not None for part in [*blocks[0], blocks[1]])
print("ok")
"""
    assert said("-c", code) == "ok"
