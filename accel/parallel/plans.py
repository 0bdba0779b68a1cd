"""Plans of tensor parallelism: the style that splits each layer of a model, read from its ``tp_plan``."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from accel.errors import ArgumentError, nearest
from accel.parallel.units import is_inside


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
            raise ArgumentError(f"{name} ({heads}) of the {type(model).__name__} is not divisible by tp_size ({size})")
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
