"""Units of sharding: modules whose parameters are gathered, and gradients reduced, together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from accel.errors import ArgumentError
from accel.plugins.fsdp import UNIT_SIZE, FullyShardedDataParallelPlugin


def find_units(
    model: nn.Module, plugin: FullyShardedDataParallelPlugin, ignored: Iterable[torch.Tensor] = ()
) -> list[tuple[str, nn.Module]]:
    """Return the units of ``model`` by name, children before their parents and ``("", model)`` last.

    Modules that share a parameter are in one unit; a unit that would split them is merged into the one around it.
    """
    policy = _policy(model, plugin)
    ignored_ids = {id(parameter) for parameter in ignored}
    names = {module: name for name, module in reversed(list(model.named_modules()))}
    chosen = (
        [] if policy is None else [unit for unit in _select_by_policy(model, policy, ignored_ids) if unit is not model]
    )
    units = _without_ties(model, {names[unit] for unit in chosen}, ignored_ids)
    return [*((names[unit], unit) for unit in chosen if names[unit] in units), ("", model)]


def check_class_names(plugin: FullyShardedDataParallelPlugin, models: Iterable[nn.Module], known: set[str]) -> None:
    """Add the classes of ``models`` to ``known``. Raises `ArgumentError` if ``plugin`` names one that is not there."""
    known.update(type(module).__name__ for model in models for module in model.modules())
    for name in plugin.transformer_cls_names_to_wrap or ():
        if name not in known:
            raise ArgumentError(
                f"Could not find the transformer layer class {name} in the prepared models, which have "
                f"{', '.join(sorted(known))}"
            )


def unit_of(name: str, units: Iterable[str]) -> str:
    """Return the name of the unit, among ``units``, that contains the parameter or buffer called ``name``."""
    owner = name.rpartition(".")[0]
    unit_names = set(units)
    while owner and owner not in unit_names:
        owner = owner.rpartition(".")[0]
    return owner


def is_inside(name: str, other: str) -> bool:
    """Return True if the module ``name`` is inside the module ``other``, or is it and the model."""
    return not other or name.startswith(f"{other}.")


def aliases(model: nn.Module) -> dict[torch.nn.Parameter, list[str]]:
    """Return every parameter of ``model`` with all of its names, in the model's order."""
    by_id: dict[int, tuple[nn.Parameter, list[str]]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        by_id.setdefault(id(parameter), (parameter, []))[1].append(name)
    return dict(by_id.values())


def set_parameter(model: nn.Module, names: Iterable[str], parameter: nn.Parameter) -> None:
    """Register ``parameter`` in ``model`` under all ``names``."""
    for name in names:
        owner, _, key = name.rpartition(".")
        model.get_submodule(owner)._parameters[key] = parameter


def ignored_parameters(model: nn.Module, ignored: Any) -> set[nn.Parameter]:
    """Return the parameters of ``model`` in ``ignored``: modules, or a regular expression for modules' full names.

    Raises `ArgumentError` for an invalid expression, or one that matches no module's full name.
    """
    if isinstance(ignored, str):
        import re

        try:
            pattern = re.compile(ignored)
        except re.error as error:
            raise ArgumentError(f"ignored_modules={ignored!r} is not a regular expression: {error}") from None
        modules = [module for name, module in model.named_modules() if pattern.fullmatch(name)]
        if not modules:
            raise ArgumentError(f"ignored_modules={ignored!r} matches no module of the {type(model).__name__}")
    else:
        modules = list(ignored or ())
    return {parameter for module in modules for parameter in module.parameters()} & set(model.parameters())


def members_of(
    units: Iterable[str], names: Mapping[nn.Parameter, list[str]], ignored: Container[nn.Parameter]
) -> dict[str, list[nn.Parameter]]:
    """Return the parameters of every unit, by its name, except ``ignored`` ones."""
    members: dict[str, list[nn.Parameter]] = {unit: [] for unit in units}
    for parameter, parameter_names in names.items():
        if parameter not in ignored:
            members[unit_of(parameter_names[0], members)].append(parameter)
    return members


def refuse_unshardable(
    members: Mapping[str, Iterable[nn.Parameter]],
    names: Mapping[nn.Parameter, list[str]],
    dtype: Callable[[nn.Parameter], torch.dtype],
    compute_dtype: torch.dtype | None,
) -> None:
    """Raise `ArgumentError` for a parameter without dimensions, and for a unit that trains parameters of two types.

    Also for weights in 4 bits whose bytes are stored as numbers that the units would convert to ``compute_dtype``.
    """
    for unit, parameters in members.items():
        trained: dict[torch.dtype, str] = {}
        for parameter in parameters:
            name = names[parameter][0]
            if parameter.ndim == 0:
                raise ArgumentError(f"prepare: {name} has no dimension that can be sharded: reshape it to (1,)")
            is_packed = type(parameter).__name__ == "Params4bit" and parameter.is_floating_point()
            if is_packed and compute_dtype not in (None, parameter.dtype):
                raise ArgumentError(
                    f"prepare: {name} is in 4 bits, stored as {parameter.dtype}, which mixed precision would convert "
                    f"to {compute_dtype}: load the model with bnb_4bit_quant_storage={compute_dtype}, or torch.uint8"
                )
            if parameter.requires_grad:
                trained.setdefault(dtype(parameter), name)
        if len(trained) > 1:
            (kind, name), (other, second) = list(trained.items())[:2]
            raise ArgumentError(
                f"prepare: {name} is {kind} and {second} is {other}, both trained in one unit ({unit or 'the model'}): "
                "convert one, or put them in different units"
            )


def _policy(model: nn.Module, plugin: FullyShardedDataParallelPlugin) -> Callable[..., bool] | None:
    from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

    if plugin.auto_wrap_policy is not None:
        return plugin.auto_wrap_policy  # type: ignore[return-value]
    if plugin.wraps == "NO_WRAP":
        return None
    if plugin.wraps in (None, "TRANSFORMER_BASED_WRAP"):
        classes = _classes_by_name(model, plugin.transformer_cls_names_to_wrap or ()) or _own_classes(model)
        if classes:
            return partial(transformer_auto_wrap_policy, transformer_layer_cls=classes)
        if plugin.wraps is not None and not plugin.transformer_cls_names_to_wrap:
            raise ArgumentError(
                f"transformer_based_wrap: a {type(model).__name__} has no _no_split_modules: "
                "pass transformer_cls_names_to_wrap (--fsdp_transformer_layer_cls_to_wrap)"
            )
    min_params = UNIT_SIZE if plugin.min_num_params is None else plugin.min_num_params
    return partial(size_based_auto_wrap_policy, min_num_params=min_params) if min_params else None


def _classes_by_name(model: nn.Module, names: Container[str]) -> set[type[nn.Module]]:
    return {type(module) for module in model.modules() if type(module).__name__ in names}


def _own_classes(model: nn.Module) -> set[type[nn.Module]]:
    """Return the classes that transformers models inside ``model`` list as not to be split."""
    names = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    return _classes_by_name(model, names)


def _select_by_policy(model: nn.Module, policy: Callable[..., bool], ignored: set[int]) -> list[nn.Module]:
    """Return the modules that ``policy`` (of `torch.distributed.fsdp.wrap`) selects, children first."""
    chosen: list[nn.Module] = []
    covered: set[int] = set(ignored)

    def own_numel(module: nn.Module) -> int:
        return sum(p.numel() for p in module.parameters() if id(p) not in covered)

    def visit(module: nn.Module) -> None:
        if any(module is unit for unit in chosen):
            return
        if policy(module=module, recurse=True, nonwrapped_numel=own_numel(module)):
            for child in module.children():
                visit(child)
            if policy(module=module, recurse=False, nonwrapped_numel=own_numel(module)):
                chosen.append(module)
                covered.update(id(parameter) for parameter in module.parameters())

    visit(model)
    return chosen


def _without_ties(model: nn.Module, units: set[str], ignored: set[int]) -> set[str]:
    """Return ``units`` without those that share parameters: they are merged into the unit around them."""
    while True:
        owners: defaultdict[int, set[str]] = defaultdict(set)
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if id(parameter) not in ignored:
                owners[id(parameter)].add(unit_of(name, units))
        tied = next((unit_names for unit_names in owners.values() if len(unit_names) > 1), None)
        if tied is None:
            return units
        deepest = max(name.count(".") + bool(name) for name in tied)
        units = units - {name for name in tied if name.count(".") + bool(name) == deepest}
