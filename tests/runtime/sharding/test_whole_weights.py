"""Where the weights of a sharded model come from, and what room they take meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from accel import Accelerator
from accel.plugins.fsdp import FullyShardedDataParallelPlugin as Plugin
from accel.plugins.parallelism import ParallelismConfig
from tests.runtime.worlds import run

from .training import Decoder


class _Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3, 2))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows @ self.weight.T


def _from_meta(case: str, replicas: int = 1) -> Any:
    config = ParallelismConfig(dp_replicate_size=replicas) if replicas > 1 else None
    plugin = Plugin(param_init_fn=_ones if case == "init" else None, cpu_ram_efficient_loading=True)
    main = Accelerator(fsdp_plugin=plugin, parallelism_config=config)
    torch.manual_seed(main.process_index)
    if case == "main":  # as transformers loads: only the main process has read the weights
        with torch.device("cpu" if main.is_main_process else "meta"):
            model: Any = Decoder()
    else:
        with torch.device("meta"):
            model = nn.Sequential(_Odd()) if case in ("init", "nothing") else nn.Sequential(nn.Linear(4, 4))
    kept = {name: value.clone() for name, value in model.state_dict().items()} if case == "main" else {}
    model = main.prepare(model)
    found = {
        name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in model.state_dict().items()
    }
    if main.is_main_process:
        assert all(torch.equal(found[name], kept[name]) for name in kept)
        assert case != "main" or model.head.weight is model.embed.weight
    return {name: value.tolist() for name, value in found.items()}


def _ones(module: nn.Module) -> None:
    module.to_empty(device="cpu", recurse=False)
    for parameter in module.parameters(recurse=False):
        nn.init.ones_(parameter)


def test_weights_come_from_the_main_process_or_are_made_where_no_process_has_them() -> None:
    for replicas in (1, 2):
        first, *others = run(_from_meta, "main", replicas, processes=2 * replicas)
        assert others == [first] * len(others)
    first, second = run(_from_meta, "reset")
    assert first == second
    assert any(any(row) for row in first["0.weight"])
    assert run(_from_meta, "init") == [{"0.weight": [[1.0, 1.0]] * 3}] * 2


class _Layer(nn.Linear):
    """A unit of 64 MB."""

    def __init__(self) -> None:
        super().__init__(4096, 4096, bias=False)


def _peak() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def _grown() -> tuple[float, int]:
    """By how much more than its share the peak of this process's memory grows, in units; and its rank."""
    accelerator = Accelerator(
        fsdp_plugin=Plugin(cpu_ram_efficient_loading=True, transformer_cls_names_to_wrap=["_Layer"])
    )
    accelerator.prepare(_Layer())  # torch imports its modules
    with torch.device("cpu" if accelerator.is_main_process else "meta"):
        model = nn.Sequential(*(_Layer() for _ in range(8)))
    sizes = [parameter.numel() * 4 for parameter in model.parameters()]
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from now on
    before = _peak()
    accelerator.prepare(model)
    more = _peak() - before - sum(sizes) / accelerator.num_processes
    return more / max(sizes), accelerator.process_index


def test_a_process_that_has_read_no_weights_needs_room_for_its_share_and_two_units() -> None:
    others = [grown for grown, rank in run(_grown) if rank]
    assert max(others) <= 2
