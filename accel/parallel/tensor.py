"""Tensor parallelism: layers are split over processes, by the styles of torch and of transformers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from accel.errors import ArgumentError
from accel.parallel.shares import is_sharded
from accel.parallel.tensor_plans import has_expanding_plan
from accel.pytree import map_nested

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def split_layers(model: nn.Module, styles: Mapping[str, Any], mesh: DeviceMesh) -> None:
    """Split the modules of ``model`` that ``styles`` names over ``mesh``; all processes have their full weights."""
    from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

    for name, style in styles.items():
        if not isinstance(style, ParallelStyle):
            continue
        module = model.get_submodule(name)
        originals = dict(module.named_parameters())
        parallelize_module(module, mesh, style, src_data_rank=None)
        for key, parameter in module.named_parameters():
            vars(parameter).update(vars(originals[key]))
    named = {name: style for name, style in styles.items() if isinstance(style, str)}
    if named:
        from transformers.distributed.tensor_parallel import apply_tensor_parallelism

        apply_tensor_parallelism(model, mesh, named)


def tie_again(model: nn.Module, names: Iterable[list[str]]) -> None:
    """Give parameters that had several ``names`` one tensor again. Raises `ArgumentError` if they are split apart.

    A model of transformers splits a tied parameter under its first name, and its layers know.
    """
    is_own = not any(map(has_expanding_plan, model.modules()))
    for first_name, *other_names in names:
        first = model.get_parameter(first_name)
        for name in other_names:
            if is_own and _placements(model.get_parameter(name)) != _placements(first):
                raise ArgumentError(
                    f"tp_plan: {first_name} and {name} are one tied parameter and must be split alike: name both "
                    "layers, an embedding as 'rowwise' and a linear layer as 'colwise' or 'colwise_gather_output'"
                )
            owner, _, key = name.rpartition(".")
            model.get_submodule(owner)._parameters[key] = first


def _placements(tensor: Any) -> Any:
    return tensor.placements if is_sharded(tensor) else None


def copy_views(module: nn.Module, args: Any, outputs: Any) -> Any:
    """Return ``outputs`` with copies in place of views; a forward hook, to be registered before `fully_shard`.

    Split layers return views, and an operation in place on a view drops torch's hook for the backward pass.
    """

    def copy(leaf: Any) -> Any:
        return leaf.clone() if isinstance(leaf, torch.Tensor) and leaf.requires_grad and leaf._is_view() else leaf

    return map_nested(copy, outputs)


def check_spread(model: nn.Module, sizes: Mapping[str, int]) -> None:
    """Raise `ArgumentError` unless a model that its loading has spread is split over ``sizes["tp"]`` processes."""
    meshes = {parameter.device_mesh for parameter in model.parameters() if is_sharded(parameter)}  # type: ignore[attr-defined]
    size = max((mesh["tp"].size() for mesh in meshes if "tp" in (mesh.mesh_dim_names or ())), default=1)
    if size != sizes["tp"]:
        raise ArgumentError(
            f"prepare: the layers of the {type(model).__name__} are split over {size} processes, by "
            f"from_pretrained, and the configuration has tp_size={sizes['tp']}: pass "
            f"parallelism_config=ParallelismConfig(tp_size={size}) to the Accelerator, and "
            f"distributed_config=DistributedConfig(tp_size={size}) to from_pretrained"
        )
