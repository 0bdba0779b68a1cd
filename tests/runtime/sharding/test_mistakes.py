"""What cannot be is one line, on every process, before anything waits for anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from accel import Accelerator
from accel.local_sgd import LocalSGD
from accel.plugins.fsdp import FullyShardedDataParallelPlugin as Plugin
from accel.plugins.parallelism import ParallelismConfig, TorchTensorParallelPlugin
from tests.runtime.worlds import outcomes, run_one

from .training import decoder


def _sizes() -> Any:
    Accelerator(fsdp_plugin=Plugin(), parallelism_config=ParallelismConfig(dp_replicate_size=2, dp_shard_size=2))


def _divides() -> Any:
    Accelerator(fsdp_plugin=Plugin(), parallelism_config=ParallelismConfig(dp_replicate_size=3))


def _split(plan: Any) -> Any:
    model = decoder()
    model.tp_plan = plan
    Accelerator(parallelism_config=ParallelismConfig(tp_size=2)).prepare(model)


def _no_plan() -> Any:
    _split(None)


def _no_layer() -> Any:
    _split({"blocks.*.upp": "colwise"})


def _no_style() -> Any:
    _split({"blocks.*.up": "columnwise"})


def _no_linear_layer() -> Any:
    _split({"blocks.*": "colwise"})


def _odd() -> Any:
    _split({"head": "colwise"})


def _tied_apart() -> Any:
    _split({"head": "colwise_gather_output"})


def _plugin_and_config() -> Any:
    Accelerator(torch_tp_plugin=TorchTensorParallelPlugin(2), parallelism_config=ParallelismConfig(tp_size=2))


def _no_plugin() -> Any:
    Accelerator(torch_tp_plugin=ParallelismConfig(tp_size=2))


def _unsharded() -> Any:
    Accelerator(parallelism_config=ParallelismConfig(dp_shard_size=2)).prepare(decoder())


def _class() -> Any:
    Accelerator(fsdp_plugin=Plugin(transformer_cls_names_to_wrap=["Blok"])).prepare(decoder())


def _scalar() -> Any:
    model = nn.Linear(2, 2)
    model.temperature = nn.Parameter(torch.tensor(1.0))
    Accelerator(fsdp_plugin=Plugin()).prepare(model)


def _types() -> Any:
    Accelerator(fsdp_plugin=Plugin()).prepare(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).bfloat16()))


def _stranger() -> Any:
    accelerator = Accelerator(fsdp_plugin=Plugin())
    model = decoder()
    stray = nn.Parameter(torch.ones(5))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD([*model.parameters(), stray], lr=0.1))
    optimizer.step()


def _joined() -> Any:
    accelerator = Accelerator(fsdp_plugin=Plugin())
    with accelerator.join_uneven_inputs([accelerator.prepare(decoder())]):
        pass


def _local_sgd() -> Any:
    accelerator = Accelerator(fsdp_plugin=Plugin())
    LocalSGD(accelerator, accelerator.prepare(decoder()), 2)


def _stale() -> Any:
    accelerator = Accelerator(fsdp_plugin=Plugin())
    model = accelerator.prepare(decoder())
    model(torch.zeros(1, 6, dtype=torch.int64))
    listed = list(model.parameters())
    accelerator.clip_grad_norm_(listed, 1.0)


def _strange() -> Any:
    accelerator = Accelerator(fsdp_plugin=Plugin())
    model = accelerator.prepare(decoder())
    accelerator.clip_grad_norm_([*model.parameters(), nn.Parameter(torch.ones(5))], 1.0)


def _added() -> Any:
    accelerator = Accelerator(fsdp_plugin=Plugin())
    model = decoder()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    optimizer.step()
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(5))]})
    optimizer.step()


def _gloo() -> Any:
    accelerator = Accelerator(fsdp_plugin=Plugin())
    accelerator.state.device = torch.device("cuda", 0)  # as with InitProcessGroupKwargs(backend="gloo") on a GPU
    both = patch.object(torch.distributed, "get_backend_config", return_value="cpu:gloo,cuda:nccl")
    with both, pytest.raises((AssertionError, RuntimeError), match=r"CUDA|NVIDIA"):  # torch's, of this machine
        accelerator.prepare(decoder())
    accelerator.prepare(decoder())


def _other() -> Any:
    accelerator = Accelerator(fsdp_plugin=Plugin())
    accelerator.prepare(nn.Linear(2, 2 + accelerator.process_index))


def _late() -> Any:
    Accelerator()
    Accelerator(fsdp_plugin=Plugin())


def _wrong() -> Any:
    Accelerator(fsdp_plugin="full_shard")


def _no_value() -> Any:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(3, 2, device="meta"))

    Accelerator(fsdp_plugin=Plugin()).prepare(Odd())


CASES: list[tuple[Callable[[], Any], str]] = [
    (_sizes, "ParallelismConfig: dp_replicate_size=2 × dp_shard_size=2 is 4, but this world has 2 processes"),
    (_divides, "ParallelismConfig: number of processes (2) is not divisible by dp_replicate_size=3"),
    (_no_plan, "ParallelismConfig(tp_size=2): the Decoder has no tp_plan: set model.tp_plan = {'layers.*.up': "
               "'colwise', 'layers.*.down': 'rowwise'} with the names of its layers"),
    (_no_layer, "tp_plan: 'blocks.*.upp' names no module; did you mean 'blocks.2.up'?"),
    (_no_style, "tp_plan['blocks.0.up'] is 'columnwise': expects a ParallelStyle of torch or one of colwise, "
                "colwise_gather_output, rowwise, sequence_parallel; did you mean 'colwise'?"),
    (_no_linear_layer, "tp_plan['blocks.0']: 'colwise' is for Linear and Embedding, not Block: name its layers, or "
                       "give a ParallelStyle of torch"),
    (_odd, "tp_plan['head']: out_features (33) is not divisible by tp_size (2)"),
    (_tied_apart, "tp_plan: embed.weight and head.weight are one tied parameter and must be split alike: name both "
                  "layers, an embedding as 'rowwise' and a linear layer as 'colwise' or 'colwise_gather_output'"),
    (_plugin_and_config, "pass parallelism_config=ParallelismConfig(tp_size=…) or torch_tp_plugin, not both"),
    (_no_plugin, "Accelerator(torch_tp_plugin=…) must be a TorchTensorParallelPlugin, not ParallelismConfig"),
    (_unsharded, "ParallelismConfig(dp_shard_size=2) shards models: pass fsdp_plugin=FullyShardedDataParallelPlugin() "
                 "too (--use_fsdp)"),
    (_class, "Could not find the transformer layer class Blok in the prepared models, which have Block, Decoder, "
             "Embedding, LayerNorm, Linear, ModuleList"),
    (_scalar, "prepare: temperature has no dimension that can be sharded: reshape it to (1,)"),
    (_types, "prepare: 0.weight is torch.float32 and 1.weight is torch.bfloat16, both trained in one unit (the model): "
             "convert one, or put them in different units"),
    (_stranger, "SGD: a parameter of shape (5,) belongs to no prepared model, so nothing would change: "
                "prepare its model too, or list model.parameters() after prepare"),
    (_added, "SGD: a parameter of shape (5,) belongs to no prepared model, so nothing would change: "
             "prepare its model too, or list model.parameters() after prepare"),
    (_strange, "clipping: a parameter of shape (5,) belongs to no prepared model, so nothing would change: "
               "prepare its model too, or list model.parameters() after prepare"),
    (_gloo, "prepare: models sharded on cuda:0 need a process group over nccl, and this one is over gloo: "
            "leave out the backend, or set it to 'nccl'"),
    (_joined, "join_uneven_inputs is for DDP: with sharded models all processes must run the same number of "
              "batches. Remove it, and keep even_batches=True"),
    (_local_sgd, "LocalSGD needs a complete model on each process: it does not support sharded models"),
    (_stale, "clipping: these parameters were listed while the model had them gathered: pass model.parameters()"),
    (_other, "prepare: the Linear of process 1 differs from that of process 0 in names, shapes, types or "
             "requires_grad of parameters"),
    (_late, "fsdp_plugin: this process already runs without one: pass it to the first Accelerator or "
            "AcceleratorState"),
    (_wrong, "Accelerator(fsdp_plugin=…) must be a FullyShardedDataParallelPlugin, not str"),
    (_no_value, "prepare: weight is on the meta device on the main process too, and a Odd has no reset_parameters: "
                "pass FullyShardedDataParallelPlugin(param_init_fn=…)"),
]  # fmt: skip


@pytest.mark.parametrize(("mistake", "words"), CASES, ids=[case[0].__name__ for case in CASES])
def test_a_mistake_is_one_line_on_every_process(mistake: Callable[[], Any], words: str) -> None:
    ended = outcomes(mistake)
    assert [outcome.message for outcome in ended] == [words, words], ended[0].trace


def _alone() -> list[Any]:
    """One process has nothing to share: the same script trains there."""
    accelerator = Accelerator(fsdp_plugin=Plugin(), parallelism_config=ParallelismConfig())
    model = accelerator.prepare(nn.Linear(2, 2))
    return [
        str(accelerator.distributed_type),
        type(model).__name__,
        accelerator.torch_device_mesh,
        accelerator.is_fsdp2,
    ]


def test_on_one_process_nothing_is_sharded() -> None:
    assert run_one(_alone) == ["NO", "Linear", None, False]
