"""Tensor parallelism gives the losses, norms, rows and checkpoints of one process on every mesh."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.utils.data import DataLoader, TensorDataset

from accel import Accelerator, set_seed
from accel.enums import DistributedType
from accel.parallel.shares import full_tensor, share
from accel.plugins.fsdp import FullyShardedDataParallelPlugin as Plugin
from accel.plugins.parallelism import ParallelismConfig
from accel.state import AcceleratorState
from tests.runtime.worlds import run, run_one

from .training import WIDTH, WORDS, decoder, train

PLAN: Any = {
    "embed": "rowwise",
    "head": "colwise_gather_output",  # tied to embed
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
}
# Name -> processes, sizes, and whether a plug-in for FSDP is passed.
MESHES: dict[str, tuple[int, dict[str, Any], bool]] = {
    "tp 2": (2, {"tp_size": 2}, False),
    "tp 4": (4, {"tp_size": 4}, True),
    "fsdp 2, tp 2": (4, {"tp_size": 2}, True),
    "replicas 2, tp 2": (4, {"dp_replicate_size": 2, "tp_size": 2}, False),
}
ROWS = 24


class Attention(nn.Module):
    """Two layers of causal attention with heads of 4 over rows of 3 numbers."""

    _no_split_modules = ["Layer"]  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(3, 16)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.leave = nn.Linear(16, 1)
        plan: Any = {"layers.*.[qkv]": "colwise", "layers.1.q": ColwiseParallel(), "layers.*.out": "rowwise"}
        self.tp_plan = plan

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden = self.enter(rows)
        for layer in self.layers:
            hidden = layer(hidden)
        result: torch.Tensor = self.leave(hidden)[:, -1, 0]
        return result


class Layer(nn.Module):
    """Attention with as many heads as the process has weights for."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        q, k, v = (part(hidden).unflatten(-1, (-1, 4)).transpose(1, 2) for part in (self.q, self.k, self.v))
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: torch.Tensor = self.out(seen.transpose(1, 2).flatten(2))
        return result  # a view, on which a script may compute in place


class Norm(nn.Module):
    """A norm of the process's part of the sequence, between layers that are split by features."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WORDS)
        self.tp_plan: Any = {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": "sequence_parallel",
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": "rowwise",
        }

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down(torch.relu(self.up(self.norm(self.embed(words)))))
        return result


def _accelerator(mesh: str | None, **how: Any) -> Any:
    AcceleratorState._reset_state()
    os.environ.pop("ACCELERATE_USE_FSDP", None)  # an earlier plugin's
    _, sizes, shards = MESHES.get(mesh or "", (1, {}, False))
    checkpointing = how.pop("activation_checkpointing", False)
    return Accelerator(
        fsdp_plugin=Plugin(activation_checkpointing=checkpointing) if shards else None,
        parallelism_config=ParallelismConfig(**sizes) if mesh else None,
        **how,
    )


def _decoder(accelerator: Any, optimizer: Any, **how: Any) -> tuple[Any, Any]:
    model = decoder(accelerator.process_index)  # only the main process has the right weights
    model.tp_plan = PLAN
    prepared: tuple[Any, Any] = accelerator.prepare(model, optimizer(model.parameters(), **how))
    return prepared


def _epoch(accelerator: Any) -> dict[str, Any]:
    """The losses and norms of an epoch over a prepared loader, and the rows that were seen, on all processes."""
    set_seed(1)
    rows = torch.randn(ROWS, 5, 3, dtype=torch.float64)
    numbers = torch.arange(ROWS)
    model = Attention().double()
    loader = DataLoader(TensorDataset(rows, numbers), 4 // accelerator.strategy.data_place[0], shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.02), loader)
    seen: dict[str, Any] = {"losses": [], "rows": [], "names": []}
    for part, numbers in loader:
        loss = (model(part) - numbers).square().mean()
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        seen["losses"] += [accelerator.reduce(loss.detach(), "mean").item(), norm.item()]
        seen["rows"] += accelerator.gather_for_metrics(numbers).tolist()
        seen["names"] += accelerator.gather_for_metrics([str(number) for number in numbers.tolist()])
    return seen


def _all(mesh: str | None) -> dict[str, Any]:
    accelerator = _accelerator(mesh)
    seen: dict[str, Any] = {"AdamW": train(accelerator, *_decoder(accelerator, torch.optim.AdamW, lr=0.02), clip=0.3)}
    for kind in (2.0, float("inf")):
        model, optimizer = _decoder(accelerator, torch.optim.SGD, lr=0.5, momentum=0.9)
        seen[f"SGD {kind}"] = train(accelerator, model, optimizer, clip=0.3, norm_type=kind)
    if mesh != "tp 4":  # whose processes cannot have equal parts of 6 words
        torch.manual_seed(accelerator.process_index)
        norm = Norm().double()
        prepared = accelerator.prepare(norm, torch.optim.AdamW(norm.parameters(), lr=0.02))
        seen["norm"] = train(accelerator, *prepared, clip=0.3)
    seen |= _epoch(accelerator)
    set_seed(0, device_specific=True)
    ranks = accelerator.tensor_parallel_rank, accelerator.data_parallel_rank, accelerator.data_parallel_shard_rank
    seen["apart"] = {
        "ranks": ranks,
        "seed": torch.initial_seed(),
        "gathered": accelerator.gather(torch.tensor([accelerator.process_index])).tolist(),
        "type": accelerator.distributed_type,
        "bytes": {
            name: share(parameter).untyped_storage().nbytes() // 8 for name, parameter in model.named_parameters()
        },
    }
    return seen


def _otherwise(mesh: str | None) -> dict[str, Any]:
    """As `_epoch`, with activations that are computed again, and compiled."""
    return {
        "plain": _epoch(_accelerator(mesh, activation_checkpointing=True))["losses"],
        "compiled": _epoch(_accelerator(mesh, dynamo_backend="aot_eager"))["losses"],
    }


def _values(accelerator: Any, model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    """Every weight and every moment, whole."""
    values = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
    names = {parameter: name for name, parameter in accelerator.unwrap_model(model).named_parameters()}
    for parameter, state in optimizer.optimizer.state.items():
        for key, value in state.items():
            values[f"{names[parameter]} {key}"] = full_tensor(value).clone()
    return values


def _save(folder: str, mesh: str) -> dict[str, torch.Tensor]:
    accelerator = _accelerator(mesh)
    model, optimizer = _decoder(accelerator, torch.optim.AdamW, lr=0.02)
    train(accelerator, model, optimizer, steps=2)
    accelerator.save_state(folder)
    accelerator.save_model(model, f"{folder}/whole")
    return _values(accelerator, model, optimizer)


def _load(folders: list[str], mesh: str | None, plugin: bool) -> list[dict[str, torch.Tensor]]:
    accelerator = _accelerator(mesh) if mesh else Accelerator(fsdp_plugin=Plugin() if plugin else None)
    model, optimizer = _decoder(accelerator, torch.optim.AdamW, lr=0.02)
    values = []
    for folder in folders:
        accelerator.load_state(folder)
        values.append(_values(accelerator, model, optimizer))
        train(accelerator, model, optimizer, steps=1)
    return values


def _world(processes: int, folder: Path) -> dict[str, Any]:
    """Train and save on the meshes of ``processes``, in one world as each takes seconds to start."""
    seen: dict[str, Any] = {mesh: _all(mesh) for mesh, (count, *_) in MESHES.items() if count == processes}
    mesh = {2: "tp 2", 4: "fsdp 2, tp 2"}[processes]
    seen["saved"] = _save(str(folder / mesh), mesh)
    warnings.simplefilter("ignore")  # dynamo looks at the gradients of what is no leaf
    return seen | {"otherwise": _otherwise(mesh)}


Worlds = Callable[[int], list[dict[str, Any]]]
Saved = dict[str, tuple[str, dict[str, torch.Tensor]]]


@pytest.fixture(scope="module")
def alone() -> Any:
    return run_one(_all, None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def worlds(folder: Path) -> Worlds:
    """Return the results of each process, for a number of processes."""
    return cache(lambda processes: run(_world, processes, folder, processes=processes))


@pytest.fixture(scope="module")
def saved(folder: Path, worlds: Worlds) -> Saved:
    return {mesh: (str(folder / mesh), worlds(MESHES[mesh][0])[0]["saved"]) for mesh in ("tp 2", "fsdp 2, tp 2")}


@pytest.mark.parametrize("mesh", MESHES)
def test_losses_norms_and_rows_are_those_of_one_process(mesh: str, alone: dict[str, Any], worlds: Worlds) -> None:
    processes, sizes, shards = MESHES[mesh]
    for rank, world in enumerate(worlds(processes)):
        seen, share = dict(world[mesh]), rank // sizes["tp_size"]
        apart = seen.pop("apart")
        replicas = sizes.get("dp_replicate_size", 1)
        assert apart.pop("ranks") == (rank % sizes["tp_size"], *((share, 0) if replicas > 1 else (0, share)))
        assert apart.pop("seed") == share
        assert apart.pop("gathered") == list(range(processes))
        assert (apart.pop("type") == DistributedType.FSDP) is shards
        for name, bytes_here in apart.pop("bytes").items():
            if "up" in name or "down.weight" in name:
                assert bytes_here == (1024 if "weight" in name else 64) * replicas // processes, name
        assert sorted(seen.pop("rows")) == list(range(ROWS))
        assert sorted(map(int, seen.pop("names"))) == list(range(ROWS))
        for name, numbers in seen.items():
            expected = torch.tensor(alone[name], dtype=torch.float64)
            torch.testing.assert_close(torch.tensor(numbers, dtype=torch.float64), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("processes", [2, 4])
def test_with_activation_checkpointing_and_compiled(processes: int, alone: dict[str, Any], worlds: Worlds) -> None:
    for world in worlds(processes):
        for losses in world["otherwise"].values():
            torch.testing.assert_close(losses, alone["losses"], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("mesh", "processes", "plugin"),
    [(None, 1, False), (None, 2, False), (None, 2, True), (None, 3, True), ("tp 2", 2, False)],
)
def test_a_checkpoint_loads_on_every_other_mesh(mesh: str | None, processes: int, plugin: bool, saved: Saved) -> None:
    loaded = run(_load, [folder for folder, _ in saved.values()], mesh, plugin, processes=processes)[0]
    for own_values, (_, values) in zip(loaded, saved.values(), strict=True):
        assert own_values.keys() == values.keys()
        for name, value in values.items():
            assert torch.equal(own_values[name], value), name


def test_full_weights_have_the_names_and_values_of_the_model(saved: Saved) -> None:
    from safetensors.torch import load_file

    for folder, values in saved.values():
        weights = load_file(Path(folder) / "whole/model.safetensors")
        assert weights
        for name, value in weights.items():
            assert torch.equal(value, values[name]), name
