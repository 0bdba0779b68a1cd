"""The full state dict of a model with dispatched and offloaded weights."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

from accel.big_models.align import align_module_device, has_offloaded_params
from accel.big_models.checkpoint_shards import some
from accel.big_models.device_names import META, Device

logger = logging.getLogger(__name__)


def get_state_dict_offloaded_model(model: nn.Module) -> dict[str, Any]:
    """Return the state dict of ``model`` with every tensor on the host, moved there module by module.

    A weight offloaded to disk is memory-mapped. Tensors without values anywhere are omitted, with a warning.
    """
    found: dict[str, Any] = {}
    order = list(model.state_dict())
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        with align_module_device(module, "cpu" if has_offloaded_params(module) else None):
            for name, value in module.state_dict(prefix=prefix).items():
                if isinstance(value, torch.Tensor):
                    if value.device == META or name in found:
                        continue
                    value = value.to("cpu")
                found.setdefault(name, value)
    empty = [name for name in order if name not in found]
    if empty:
        logger.warning("left out of the state dict, because they hold no numbers: %s", some(empty))
    return {name: found[name] for name in order if name in found}


def get_state_dict_from_offload(
    module: nn.Module,
    module_name: str,
    state_dict: dict[str, Any],
    device_to_put_offload: Device = "cpu",
) -> dict[str, Any]:
    """Fill in, and return, the entries of ``state_dict`` that belong to ``module``.

    ``module_name`` is the name of one of its tensors. Offloaded weights are moved to ``device_to_put_offload``.
    """
    path = module_name.rpartition(".")[0]
    with align_module_device(module, device_to_put_offload if has_offloaded_params(module) else None):
        for name, value in module.state_dict(prefix=f"{path}." if path else "").items():
            if name in state_dict:
                state_dict[name] = value
    return state_dict
