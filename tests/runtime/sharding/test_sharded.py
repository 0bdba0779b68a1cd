"""What a sharded model is: its shares, its buffers, what is left out of it, its methods, and its windows."""

from __future__ import annotations

import inspect
import os
import pickle
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from accel import Accelerator
from accel.data.transfer import host_group
from accel.enums import DistributedType
from accel.parallel.activation_checkpointing import CheckpointedForward
from accel.plugins import InitProcessGroupKwargs
from accel.plugins.fsdp import FullyShardedDataParallelPlugin as Plugin
from accel.plugins.parallelism import ParallelismConfig
from accel.state import PartialState
from tests.runtime.worlds import run

from .training import Decoder, batch, decoder, loss_of, train

_DIMENSIONS = ("dp_replicate", "dp_shard", "cp", "sp", "tp")


def _here(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


def _bytes(tensors: Any) -> int:
    storages = {part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in map(_here, tensors)}
    return sum(storages.values())


def _step(accelerator: Accelerator, model: Any, optimizer: Any, step: int = 0) -> None:
    accelerator.backward(loss_of(model, batch(step, accelerator)))
    optimizer.step()
    optimizer.zero_grad()


def _shares(folder: str) -> list[float]:
    """The share of parameters and optimizer state of this process over that of an equal cut: at rest, after an
    evaluation in the middle of a window, after the weights were gathered, and after a checkpoint."""
    accelerator = Accelerator(gradient_accumulation_steps=2, fsdp_plugin=Plugin())
    model: Any = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)), nn.Linear(64, 8))
    whole: int = sum(p.numel() * 4 for p in model.parameters())
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    rows = torch.ones(2, 64)

    def share() -> float:
        states = [value for state in optimizer.state.values() for value in state.values() if value.ndim]
        held = _bytes(model.parameters()) + _bytes(states)
        return held * accelerator.num_processes / (3 * whole)

    found = []
    for step in range(4):
        with accelerator.accumulate(model):
            accelerator.backward(model(rows).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        if step >= 1:
            found.append(share())
        if step == 2:
            with torch.no_grad():
                model(rows)
            found.append(share())
            accelerator.get_state_dict(model)
            found.append(share())
    accelerator.save_state(folder)
    found.append(share())
    accelerator.load_state(folder)
    found.append(share())
    return found


def test_a_process_holds_its_share_of_parameters_and_optimizer_state(tmp_path: Any) -> None:
    for found in run(_shares, str(tmp_path / "kept"), processes=4):
        assert max(found) <= 1.1, found


def _mesh() -> dict[str, Any]:
    config = ParallelismConfig(dp_replicate_size=2)
    accelerator: Any = Accelerator(fsdp_plugin=Plugin(), parallelism_config=config)
    mesh: Any = accelerator.torch_device_mesh
    again = Accelerator(fsdp_plugin=Plugin())
    warnings.simplefilter("ignore")  # torch's, of slicing by a flattened name
    return {
        "names": mesh.mesh_dim_names,
        "shape": tuple(mesh.shape),
        "flattened": [mesh[name].size() for name in ("dp", "dp_shard_cp", "dp_cp", "sp")],
        "sizes": list(accelerator.parallelism_config.sizes.values()),
        "made": config.get_device_mesh("cpu") is mesh,
        "type": (accelerator.distributed_type, accelerator.is_fsdp2, again.is_fsdp2),
        "ranks": (
            accelerator.data_parallel_rank, accelerator.data_parallel_shard_rank, accelerator.tensor_parallel_rank,
            accelerator.strategy.data_place,
        ),
    }  # fmt: skip


def test_the_mesh_has_every_dimension_and_answers_what_several_are_together() -> None:
    for rank, seen in enumerate(run(_mesh, processes=4)):
        assert seen == {
            "names": _DIMENSIONS,
            "shape": (2, 2, 1, 1, 1),
            "flattened": [4, 2, 4, 1],
            "sizes": [2, 2, 1, 1, 1],
            "made": True,
            "type": (DistributedType.FSDP, True, True),
            "ranks": (rank // 2, rank % 2, 0, (4, rank)),
        }


def _timeouts(folder: str, replicas: int) -> tuple[int, set[timedelta]]:
    """The timeouts of all groups, and their number."""
    accelerator = Accelerator(
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(minutes=2))],
        fsdp_plugin=Plugin(reshard_after_forward=replicas > 1 or 2),
        parallelism_config=ParallelismConfig(dp_replicate_size=replicas),
    )
    model: Any = accelerator.prepare(decoder())
    accelerator.backward(loss_of(model, batch(0, accelerator)))
    accelerator.save_state(folder, async_save=True)
    assert not accelerator.preempted
    accelerator.state.backend = "nccl"  # as on GPUs, where batches are dispatched in a group of their own
    assert host_group() is not None
    groups = torch.distributed.distributed_c10d._world.pg_map
    cpu = torch.device("cpu")
    return len(groups), {group._get_backend(cpu).options._timeout for group in groups}


@pytest.mark.parametrize("replicas", [1, 2])
def test_every_group_has_the_timeout_of_the_world(replicas: int, tmp_path: Path) -> None:
    for count, timeouts in run(_timeouts, str(tmp_path / "saved"), replicas, processes=4):
        assert count >= 5
        assert timeouts == {timedelta(minutes=2)}


def _unsaid() -> dict[str, Any]:
    """What libraries read of a run that nobody gave a `ParallelismConfig`."""
    accelerator = Accelerator(fsdp_plugin=Plugin(auto_wrap_policy=lambda module, **_: False))
    warnings.simplefilter("ignore")  # torch's, of slicing by a flattened name
    config: Any = accelerator.parallelism_config
    mesh: Any = accelerator.torch_device_mesh
    state: Any = pickle.loads(pickle.dumps(PartialState()))  # as beside a model; a lambda cannot be pickled
    return {
        "sizes": list(config.sizes.values()),
        "sharded over": mesh[tuple(config.fsdp_dim_names)].size(),
        "pickled": (state.process_index, state.distributed_type, "fsdp_plugin" in vars(state)),
    }


def test_sizes_that_nobody_said_are_there_to_read_and_states_pickle_without_them() -> None:
    for rank, seen in enumerate(run(_unsaid)):
        assert seen == {
            "sizes": [1, 2, 1, 1, 1],
            "sharded over": 2,
            "pickled": (rank, DistributedType.FSDP, False),
        }


def _evaluated(inference: bool) -> tuple[list[str], list[float]]:
    """The parameters that an evaluation before training leaves whole, and the losses after it."""
    accelerator = Accelerator(fsdp_plugin=Plugin(reshard_after_forward=False))
    model: Any = decoder()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.02))
    with torch.inference_mode() if inference else torch.no_grad():
        model(batch(0, accelerator)[:, :-1])
    whole = [name for name, p in model.named_parameters() if not isinstance(p, DTensor)]
    return whole, train(accelerator, model, optimizer, steps=3)[0]


@pytest.mark.parametrize("inference", [False, True])
def test_an_evaluation_before_training_leaves_nothing_gathered_and_changes_nothing(inference: bool) -> None:
    expected = run(_plain_losses, processes=1)[0]
    for whole, losses in run(_evaluated, inference):
        assert whole == []
        assert losses == pytest.approx(expected, abs=1e-9)


def _named_in_one() -> list[str]:
    accelerator = Accelerator(fsdp_plugin=Plugin(transformer_cls_names_to_wrap="Block"))
    other, model = accelerator.prepare(nn.Sequential(nn.Linear(2, 2)), decoder())
    later = accelerator.prepare(nn.Sequential(nn.Linear(2, 2)))
    return [type(module).__name__ for module in (other[0], model.blocks[0], later, later[0])]


def test_a_named_class_is_in_one_of_the_models() -> None:
    assert run(_named_in_one) == [["Linear", "FSDPBlock", "FSDPSequential", "Linear"]] * 2


def _transposed() -> list[list[float]]:
    model: Any = nn.Linear(2, 3, bias=False)
    model.weight = nn.Parameter(torch.arange(6.0).view(2, 3).t())
    model = Accelerator(fsdp_plugin=Plugin(sync_module_states=False)).prepare(model)
    values: list[list[float]] = model.weight.full_tensor().tolist()
    return values


def test_parameters_need_not_be_contiguous() -> None:
    assert run(_transposed) == [[[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]] * 2


def _by_node() -> tuple[Any, Any]:
    os.environ.update(LOCAL_WORLD_SIZE="2", LOCAL_RANK=str(int(os.environ["RANK"]) % 2))  # as of two nodes
    accelerator = Accelerator(fsdp_plugin=Plugin(sharding_strategy="HYBRID_SHARD"))
    mesh: Any = accelerator.torch_device_mesh
    return tuple(mesh.shape), accelerator.prepare(nn.Linear(4, 4)).weight.placements


def test_hybrid_sharding_is_within_a_node() -> None:
    from torch.distributed.tensor import Replicate, Shard

    for shape, placements in run(_by_node, processes=4):
        assert (shape, placements) == ((2, 2, 1, 1, 1), (Replicate(), Shard(0)))


def _left_out() -> dict[str, Any]:
    """Ignored modules are whole, alike on all processes, and so are buffers."""
    accelerator = Accelerator(fsdp_plugin=Plugin(ignored_modules="norm"), gradient_accumulation_steps=2)
    model: Any = decoder(accelerator.process_index)
    model.scale.fill_(1.0 + accelerator.process_index)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    _, norms = train(accelerator, model, optimizer, steps=4, clip=0.1)
    return {
        "sharded": sorted({name.split(".")[0] for name, p in model.named_parameters() if isinstance(p, DTensor)}),
        "whole": [name for name, p in model.named_parameters() if not isinstance(p, DTensor)],
        "norm": model.norm.weight.tolist(),
        "scale": model.scale.item(),
        "norms": norms,
    }


def test_what_is_ignored_is_whole_and_stays_alike_on_all_processes() -> None:
    first, second = run(_left_out)
    assert first == second
    assert (first["sharded"], first["whole"]) == (["blocks", "embed", "position"], ["norm.weight", "norm.bias"])
    assert first["scale"] == 1.0
    assert len(set(first["norm"])) > 1  # it was trained


def _left_out_in_order() -> list[int]:
    """What ignored parameters hold on a process that created them in another order than the main process."""
    accelerator = Accelerator(fsdp_plugin=Plugin(ignored_modules=".*left_out"))
    main = accelerator.is_main_process
    values = [nn.Parameter(torch.tensor([float(n)])) for n in (range(40) if main else reversed(range(40)))]
    model: Any = nn.Linear(2, 2)
    model.left_out = nn.ParameterList(values if main else reversed(values))
    return [int(p.item()) for p in accelerator.prepare(model).left_out]


def test_ignored_parameters_are_sent_in_the_order_of_the_model() -> None:
    assert run(_left_out_in_order) == [[*range(40)]] * 2


def _several_left_out() -> list[float]:
    accelerator = Accelerator(fsdp_plugin=Plugin(ignored_modules="1"))
    bare = {
        index: nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
        for index in range(8)[:: 1 - 2 * accelerator.process_index]
    }
    models = accelerator.prepare(*(bare[index] for index in range(8)))
    ones = torch.ones(1, 1)
    accelerator.backward(sum(index * model[1](ones).sum() for index, model in enumerate(models)))
    return [model[1].bias.grad.item() for model in models]


def test_gradients_of_ignored_parameters_are_exchanged_in_the_order_of_preparation() -> None:
    assert run(_several_left_out) == [[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]] * 2


def _stepped(how: dict[str, Any]) -> dict[str, Any]:
    """An optimizer of shards and an ignored module, beside a second model, and what the script sees of its groups."""
    model: Any = decoder()
    second: Any = decoder(1)
    accelerator = Accelerator(fsdp_plugin=Plugin(ignored_modules=[model.norm]))
    optimizer: Any = torch.optim.AdamW([
        {"params": [*model.parameters()], "lr": 0.02}, {"params": [*second.norm.parameters()], "lr": 0.1}
    ], **how)  # fmt: skip
    scheduler: Any = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    model, second, optimizer, scheduler = accelerator.prepare(model, second, optimizer, scheduler)
    groups = optimizer.param_groups
    lists = [group["params"] for group in groups]
    losses = []
    for step in range(3):
        loss = loss_of(model, batch(step, accelerator)) + loss_of(second, batch(step, accelerator))
        accelerator.backward(loss)
        accelerator.clip_grad_norm_([*model.parameters(), *second.parameters()], 0.1)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.scheduler.step()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())

    def fail(stepped: Any, *_: Any) -> None:
        for group in stepped.param_groups:
            group["steps"] = 3  # as schedule-free optimizers count in their groups
        raise ArithmeticError(len(stepped.param_groups))

    optimizer.optimizer.register_step_pre_hook(fail)
    with pytest.raises(ArithmeticError) as failed:
        optimizer.step()
    return {
        "losses": losses,
        "groups": optimizer.param_groups is groups,
        "lists": [group["params"] is params for group, params in zip(groups, lists, strict=True)],
        "rates": [group["lr"] for group in groups],
        "written": [group["steps"] for group in groups],
        "stepped as": failed.value.args[0],
    }


@pytest.mark.parametrize("how", [{"foreach": True}, {"fused": True}], ids=str)
def test_optimizers_step_shards_and_ignored_modules_together(how: dict[str, Any]) -> None:
    expected = run(_stepped, how, processes=1)[0]
    expected["losses"] = pytest.approx(expected["losses"], abs=1e-9)
    assert (expected["groups"], expected["lists"]) == (True, [True, True])
    assert expected["rates"] == [0.0025, 0.0125]
    assert expected["written"] == [3, 3]
    for seen in run(_stepped, how):
        assert seen == {**expected, "stepped as": 3}


class _Speaker(Decoder):
    def generate(self, words: torch.Tensor) -> torch.Tensor:
        first: torch.Tensor = self.head(self.embed(words))  # the weights of the root, outside forward
        rest: torch.Tensor = self(words)
        return first + rest


def _features() -> dict[str, Any]:
    accelerator = Accelerator(
        fsdp_plugin=Plugin(
            activation_checkpointing=True, activation_checkpointing_offload=True, forward_prefetch=True,
            reshard_after_forward=False, cpu_offload=True,
        )
    )  # fmt: skip
    torch.manual_seed(0)
    bare = _Speaker().double()
    names = list(bare.state_dict())
    model, optimizer = accelerator.prepare(bare, torch.optim.AdamW(bare.parameters(), lr=0.02))
    calls: list[int] = []
    model.blocks[0].up.register_forward_hook(lambda *_: calls.append(1))
    losses = train(accelerator, model, optimizer, steps=3)[0]
    forward = vars(model.blocks[0])["forward"]
    with torch.no_grad():
        spoken = model.generate(batch(0, accelerator)[:, :-1])
    return {
        "losses": losses,
        "forwards": len(calls),
        "names": list(model.state_dict()) == names,
        "signature": list(inspect.signature(model.blocks[0].forward).parameters),
        "pickles": isinstance(
            pickle.loads(pickle.dumps(CheckpointedForward(nn.Identity(), True))), CheckpointedForward
        ),
        "kind": type(forward).__name__,
        "spoken": tuple(spoken.shape),
        "gathered": [name for name, p in model.named_parameters() if not isinstance(p, DTensor)],
    }


def _plain_losses() -> list[float]:
    accelerator = Accelerator()
    model = decoder()
    return train(accelerator, *accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.02)), steps=3)[0]


def test_activations_are_computed_again_and_methods_beside_forward_gather() -> None:
    expected = run(_plain_losses, processes=1)[0]
    for seen in run(_features):
        assert seen.pop("losses") == pytest.approx(expected, abs=1e-9)
        assert seen == {
            "forwards": 7,  # twice a step, and once in generate
            "names": True,
            "signature": ["hidden"],
            "pickles": True,
            "kind": "CheckpointedForward",
            "spoken": (6, 6, 33),
            "gathered": [],
        }


def _windows(replicas: bool) -> list[bool]:
    """Whether the gradient of a batch came to the shares: held back, triggered, held back again, and at the end."""
    config = ParallelismConfig(dp_replicate_size=2) if replicas else None
    accelerator = Accelerator(fsdp_plugin=Plugin(), parallelism_config=config)
    model = accelerator.prepare(decoder())
    rows = batch(accelerator.process_index, accelerator)

    def arrives() -> bool:
        model.zero_grad()
        accelerator.backward(loss_of(model, rows))
        return model.norm.weight.grad is not None

    with accelerator.no_sync([model]):
        seen = [arrives()]
        with accelerator.trigger_sync_in_backward(model):
            seen.append(arrives())
        seen.append(arrives())
    return [*seen, arrives()]


def test_windows_hold_gradients_back_until_they_end_or_are_triggered() -> None:
    assert run(_windows, False) == [[False, True, False, True]] * 2
    # What is held back are the sums over replicas: torch keeps shards of gradients for itself meanwhile.
    assert run(_windows, True, processes=4) == [[False, True, False, True]] * 4


def _nested_windows() -> list[bool]:
    """Return True where the shares have gradients: within two regions, after the inner one, and at the window's end."""
    accelerator = Accelerator(fsdp_plugin=Plugin(), gradient_accumulation_steps=2)
    model = accelerator.prepare(decoder())
    evaluated = accelerator.prepare_model(nn.Linear(2, 2), evaluation_mode=True)
    rows = batch(0, accelerator)

    def arrives() -> bool:
        accelerator.backward(loss_of(model, rows))
        return model.norm.weight.grad is not None

    with accelerator.accumulate(model, model, evaluated, nn.Linear(2, 2)):
        with accelerator.no_sync(model):
            seen = [arrives()]
        seen.append(arrives())
    with accelerator.accumulate(model):
        return [*seen, arrives()]


def test_windows_within_windows_end_with_the_outermost() -> None:
    assert run(_nested_windows) == [[False, False, True]] * 2


def _compiled(regional: bool) -> dict[str, Any]:
    from accel.plugins import TorchDynamoPlugin

    warnings.simplefilter("ignore")  # dynamo looks at the gradients of what is no leaf
    plugin = TorchDynamoPlugin(backend="aot_eager", use_regional_compilation=regional)
    accelerator = Accelerator(fsdp_plugin=Plugin(), dynamo_plugin=plugin)
    model, optimizer = accelerator.prepare(bare := decoder(), torch.optim.AdamW(bare.parameters(), lr=0.02))
    losses = train(accelerator, model, optimizer, steps=3, clip=10.0)[0]
    inside = accelerator.unwrap_model(model)
    return {"losses": losses, "block": type(bare.blocks[0]).__name__, "same": inside is bare or inside is model}


@pytest.mark.parametrize("regional", [True, False])
def test_a_compiled_model_trains_as_the_plain_one(regional: bool) -> None:
    expected = run(_plain_losses, processes=1)[0]
    for seen in run(_compiled, regional):
        assert seen.pop("losses") == pytest.approx(expected, abs=1e-9)
        assert seen == {"block": "FSDPBlock", "same": True}


def _saved(folder: str) -> Any:
    accelerator = Accelerator(fsdp_plugin=Plugin())
    model = accelerator.prepare(decoder())
    accelerator.save_model(model, folder)
    return sorted(accelerator.get_state_dict(model))


def test_the_weights_are_saved_whole(tmp_path: Any) -> None:
    from safetensors.torch import load_file

    names, _ = run(_saved, str(tmp_path))
    expected = decoder().state_dict()
    assert names == sorted(expected)
    written = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(written[name], expected[name]) for name in written)
    assert written.keys() == expected.keys() - {"head.weight"}
