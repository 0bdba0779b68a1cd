"""Tensor parallelism: layers are split over processes, by the styles of torch and of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from accel.errors import ArgumentError
from accel.parallel.shares import is_sharded
from accel.parallel.units import set_parameter
from accel.pytree import map_nested

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def split_layers(
    model: nn.Module, styles: Mapping[str, Any], mesh: DeviceMesh, parameters: Mapping[nn.Parameter, list[str]]
) -> None:
    """Split the modules of ``model`` that ``styles`` names over ``mesh``; all processes have their full weights.

    ``parameters``: the original ones, whose attributes the parts get, with all of their names. Raises `ArgumentError`
    if one with several names is split apart.
    """
    from torch.distributed.tensor.parallel import parallelize_module

    named = {name: style for name, style in styles.items() if isinstance(style, str)}
    for name in (name for name in styles if name not in named):
        parallelize_module(model.get_submodule(name), mesh, styles[name], src_data_rank=None)
    if named:
        from transformers.distributed.tensor_parallel import apply_tensor_parallelism

        apply_tensor_parallelism(model, mesh, named)
    for original, (first_name, *other_names) in parameters.items():
        first, *others = (model.get_parameter(name) for name in (first_name, *other_names))
        vars(first).update(vars(original))
        for name, other in zip(other_names, others, strict=True):
            # A model of transformers splits a tied parameter under its first name, and its layers know.
            if not named and getattr(other, "placements", None) != getattr(first, "placements", None):
                raise ArgumentError(
                    f"tp_plan: {first_name} and {name} are one tied parameter and must be split alike: name both "
                    "layers, an embedding as 'rowwise' and a linear layer as 'colwise' or 'colwise_gather_output'"
                )
        set_parameter(model, other_names, first)


def copy_views(module: nn.Module, args: Any, outputs: Any) -> Any:
    """Return ``outputs`` with copies in place of views; a forward hook, to be registered before `fully_shard`.

    Split layers return views, and an operation in place on a view drops torch's hook for the backward pass.
    """

    def copy(leaf: Any) -> Any:
        return leaf.clone() if isinstance(leaf, torch.Tensor) and leaf.requires_grad and leaf._is_view() else leaf

    return map_nested(copy, outputs)


def check_spread(model: nn.Module, tp_size: int) -> None:
    """Raise `ArgumentError` unless a model that its loading has spread is split over ``tp_size`` processes."""
    meshes = {parameter.device_mesh for parameter in model.parameters() if is_sharded(parameter)}  # type: ignore[attr-defined]
    size = max((mesh["tp"].size() for mesh in meshes if "tp" in (mesh.mesh_dim_names or ())), default=1)
    if size != tp_size:
        raise ArgumentError(
            f"prepare: the layers of the {type(model).__name__} are split over {size} processes, by "
            f"from_pretrained, and the configuration has tp_size={tp_size}: pass "
            f"parallelism_config=ParallelismConfig(tp_size={size}) to the Accelerator, and "
            f"distributed_config=DistributedConfig(tp_size={size}) to from_pretrained"
        )
