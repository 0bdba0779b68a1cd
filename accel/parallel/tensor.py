"""Tensor parallelism: layers are split over processes, by the styles of torch and of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from accel.errors import ArgumentError, nearest
from accel.parallel.shares import is_sharded
from accel.parallel.units import is_inside, set_parameter
from accel.pytree import map_nested

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def find_styles(model: nn.Module, size: int) -> dict[str, Any]:
    """Return the style of each module that a ``tp_plan`` in ``model`` names, by the module's full name.

    A plan is a mapping: a module's name, in which ``*`` stands for any part without a dot → one of ``"colwise"``,
    ``"colwise_gather_output"``, ``"rowwise"``, ``"sequence_parallel"``, or a `ParallelStyle` of torch. That of a model
    of transformers (5.20 or later) names parameters too, and has transformers' styles.

    Raises `ArgumentError` without a plan, for a name of no module, an unknown style, and a layer that ``size``
    processes cannot share equally.
    """
    modules = dict(model.named_modules())
    styles: dict[str, Any] = {}
    expanded: list[str] = []
    for prefix, module in modules.items():
        # Not an attribute that a wrapper passes through, as that of peft does.
        has_plan = ("tp_plan" in vars(module) or hasattr(type(module), "tp_plan")) and module.tp_plan
        if not has_plan or any(is_inside(prefix, other) for other in expanded):
            continue
        start = f"{prefix}." if prefix else ""
        if hasattr(type(module), "_expand_parallel_plan"):
            expanded.append(prefix)  # its plan has the entries of the modules in it
            styles |= {start + name: style for name, style in _plan_of_transformers(module, size).items()}
            continue
        for name_pattern, style in module.tp_plan.items():
            pattern = start + name_pattern
            matches = [name for name in modules if name.count(".") == pattern.count(".") and fnmatchcase(name, pattern)]
            if not matches:
                raise ArgumentError(f"tp_plan: {pattern!r} names no module{nearest(pattern, modules)}")
            styles |= {name: _style(style, name, modules[name], size) for name in matches}
    if not styles:
        raise ArgumentError(
            f"ParallelismConfig(tp_size={size}): the {type(model).__name__} has no tp_plan: set model.tp_plan = "
            "{'layers.*.up': 'colwise', 'layers.*.down': 'rowwise'} with the names of its layers"
        )
    return styles


def _plan_of_transformers(model: Any, size: int) -> dict[str, str]:
    config = model.config.get_text_config()
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, name, None)
        if isinstance(heads, int) and heads % size:
            raise ArgumentError(f"tp_size={size} does not divide the {heads} {name} of the {type(model).__name__}")
    parts = {**dict(model.named_modules()), **dict(model.named_parameters())}  # lists tied parameters once
    plan = {name: style for name, style in model._expand_parallel_plan(dict(model.tp_plan)).items() if name in parts}
    adapted = next((name for name in plan if hasattr(parts[name], "base_layer")), None)
    if adapted is not None:
        raise ArgumentError(
            f"tp_plan: {adapted} has an adapter, and tensor parallelism would split the layer without it: "
            "leave out tp_size, or the adapter"
        )
    return plan


def _style(style: Any, name: str, module: nn.Module, size: int) -> Any:
    """Return torch's `ParallelStyle` for an entry of a plan."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel

    if isinstance(style, ParallelStyle):
        return style
    styles = {
        "colwise": ColwiseParallel(),
        "colwise_gather_output": ColwiseParallel(output_layouts=Replicate()),
        "rowwise": RowwiseParallel(input_layouts=Replicate() if isinstance(module, nn.Embedding) else None),
        "sequence_parallel": SequenceParallel(),
    }
    if str(style) not in styles:
        raise ArgumentError(
            f"tp_plan[{name!r}] is {style!r}: expects a ParallelStyle of torch or one of {', '.join(styles)}"
            f"{nearest(str(style), styles)}"
        )
    if style != "sequence_parallel" and not isinstance(module, (nn.Linear, nn.Embedding)):
        raise ArgumentError(
            f"tp_plan[{name!r}]: {style!r} is for Linear and Embedding, not {type(module).__name__}: name its layers, "
            "or give a ParallelStyle of torch"
        )
    features = {"colwise": "out_features", "rowwise": "in_features"}.get(style, "")
    if isinstance(module, nn.Linear) and getattr(module, features, 0) % size:
        raise ArgumentError(
            f"tp_plan[{name!r}]: {features} ({getattr(module, features)}) is not divisible by tp_size ({size})"
        )
    return styles[style]


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
