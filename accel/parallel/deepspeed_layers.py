"""DeepSpeed's automatic tensor parallelism: the processes of a group have parts of the layers of one model."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accel.errors import ArgumentError
from accel.precision.float8 import refuse_8_bits
from accel.world.versions import compare_versions

_CALL = "tp_size under DeepSpeed"
_OLDEST = "0.19.8"
_TRANSPOSED = ("conv_LinearLayer", "Conv_LinearALlreduce")  # DeepSpeed gathers them along the wrong dimension


@contextmanager
def splitting(model: nn.Module, size: int) -> Iterator[None]:
    """Make DeepSpeed split the layers of ``model`` over ``size`` processes in the block.

    Raises `ArgumentError` for a model that it cannot split, or cannot gather again, and while an engine of this process
    has another size: DeepSpeed has one set of groups.
    """
    from deepspeed.utils import groups

    live = None if groups._TENSOR_MODEL_PARALLEL_GROUP is None else groups.get_tensor_model_parallel_world_size()
    if live not in (None, size):
        raise ArgumentError(
            f"tp_size={size}: this process has an engine of DeepSpeed with tp_size={live}: call free_memory() of its "
            "Accelerator first"
        )
    if size == 1:
        yield
        return
    refuse_8_bits(model, _CALL)
    name = type(model).__name__
    if compare_versions("deepspeed", "<", _OLDEST):
        raise ArgumentError(f"{_CALL} needs DeepSpeed {_OLDEST} or later: pip install --upgrade deepspeed")
    try:
        yield
    except (AssertionError, NotImplementedError, ValueError) as error:
        release_groups()
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ArgumentError(f"{_CALL}: DeepSpeed cannot split {name} over {size} processes: {reason}") from error
    reasons = {layout["unsupported_reason"] for layout in _layouts(model) if layout["unsupported_reason"]}
    reasons |= {f"it has {type(layer).__name__}" for layer in model.modules() if type(layer).__name__ in _TRANSPOSED}
    if reasons or not any(map(_is_split, model.parameters())):
        release_groups()
        reason = f"its weights could not be saved: {', '.join(sorted(reasons))}" if reasons else "it splits no layer"
        raise ArgumentError(f"{_CALL}: DeepSpeed cannot split {name} over {size} processes: {reason}")


def _layouts(model: nn.Module) -> list[dict[str, Any]]:
    from deepspeed.checkpoint.constants import DS_AUTOTP_UC_META

    layouts = [getattr(parameter, DS_AUTOTP_UC_META, None) for parameter in model.parameters()]
    return [layout["conversion"] for layout in layouts if layout]


def _is_split(parameter: torch.Tensor) -> bool:
    return getattr(parameter, "ds_is_replaced_module", False)


def release_groups() -> None:
    """Let other engines be without these groups, and without what `deepspeed.tp_model_init` (Trainer) keeps."""
    from deepspeed.runtime.tensor_parallel import init_utils
    from deepspeed.utils import groups

    init_utils._TP_MODEL_INIT_ARGS = None
    groups.mpu = None
    groups._TENSOR_MODEL_PARALLEL_GROUP = groups._MODEL_PARALLEL_GROUP = groups._DATA_PARALLEL_GROUP = None


def saved_size(folder: Path) -> int:
    """Return the number of processes that split the layers of the checkpoint in ``folder``, by its files' names."""
    return len({part for path in folder.iterdir() for part in re.findall(r"mp_rank_(\d+)_model_states", path.name)})


def gathered_state(model: nn.Module, *, keep: bool) -> dict[str, torch.Tensor]:
    """Return the state dict of ``model`` with whole parameters, on the host; without ``keep``, an empty one.

    All processes must call it: split layers, and parameters of stage 3, are gathered module by module.
    """
    from deepspeed import zero

    gathered: dict[int, torch.Tensor] = {}  # tied parameters are gathered once
    for module in model.modules():
        own = [parameter for parameter in module.parameters(recurse=False) if id(parameter) not in gathered]
        with zero.GatheredParameters(own), _whole(own) if any(map(_is_split, own)) else nullcontext():
            for parameter in own:
                gathered[id(parameter)] = parameter.detach().to("cpu", copy=True) if keep else torch.empty(0)
    if not keep:
        return {}
    return {name: gathered.get(id(value), value) for name, value in model.state_dict(keep_vars=True).items()}


@contextmanager
def _whole(parameters: Sequence[Any]) -> Iterator[None]:
    """Gather a layer in the block. Its parts stay views of the optimizer's buffers, unlike with DeepSpeed's class."""
    parts = [parameter.data for parameter in parameters]
    try:
        parameters[0].gather_params(parameters)
        yield
    finally:
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.data = part


def total_norm(engine: Any) -> float:
    """Return the norm of an engine's gradients at stage 0, over all processes that split its layers."""
    if engine.mpu is None:
        gradients = [parameter.grad for parameter in engine.module.parameters() if parameter.grad is not None]
        return torch.nn.utils.get_total_norm(gradients).item()
    from deepspeed.runtime.utils import clip_grad_norm_

    return float(clip_grad_norm_(engine.module.parameters(), float("inf"), mpu=engine.mpu))
