"""The full values of a unit's parameters, the same on every process, just before it is sharded.

Units are handled one at a time, so that a process only ever holds its shards, one full unit and the original model.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from accel import collectives
from accel.errors import ArgumentError
from accel.parallel.units import aliases, set_parameter

_SHORT = (torch.float16, torch.bfloat16)
_TRIM_BYTES = 64 << 20  # bytes of weights; returning memory takes a tenth of the time that sharding them does


class WeightMaterializer:
    """The full values of ``model``'s parameters: those of the main process, or of ``init``.

    ``device``: the device to put them on.
    ``broadcast``: send the main process's values; otherwise every process keeps its own.
    ``upcast``: convert trained parameters in 16 bits to fp32.
    ``init``: initializes a module's own parameters that are on the meta device on the main process too; by
        default the module's ``reset_parameters``, or the ``_init_weights`` of a transformers model.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        *,
        broadcast: bool,
        upcast: bool,
        init: Callable[[nn.Module], Any] | None,
    ) -> None:
        self.model = model
        self.device = device
        self.broadcast = broadcast
        self.upcast = upcast
        self.init = init
        self.names = aliases(model)
        self.is_main = dist.get_rank() == 0
        self._materialized = 0  # bytes
        self._missing = _parameters_without_value(model, self.names)
        if self._missing and not broadcast:
            raise ArgumentError(
                f"prepare: {self._missing[0]} is on the meta device and has no value, but with "
                "sync_module_states=False every process keeps its own: remove sync_module_states"
            )

    def dtype(self, parameter: torch.Tensor) -> torch.dtype:
        """Return the type that ``parameter`` will have."""
        return (
            torch.float32 if self.upcast and parameter.requires_grad and parameter.dtype in _SHORT else parameter.dtype
        )

    def materialize(self, parameters: Iterable[nn.Parameter]) -> None:
        """Put ``parameters`` on the device, with their values, under all of their names."""
        parameters = list(parameters)
        if self._materialized >= _TRIM_BYTES:  # most of these weights are sharded by now
            _trim_malloc()
            self._materialized = 0
        self._materialized += sum(parameter.nbytes for parameter in parameters)
        for parameter in parameters:
            self._initialise(self.names[parameter])
        for parameter in parameters:
            names = self.names[parameter]
            current = next((p for p in map(self.model.get_parameter, names) if not p.is_meta), parameter)
            set_parameter(self.model, names, self._new_parameter(current, parameter))

    def materialize_buffers(self) -> None:
        """Put all buffers, which are not sharded, on the device, with their values."""
        for name, buffer in list(self.model.named_buffers(remove_duplicate=False)):
            owner, _, key = name.rpartition(".")
            value = self._value(buffer)
            if self.broadcast:
                dist.broadcast(value, 0)
            self.model.get_submodule(owner)._buffers[key] = value

    def _value(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the value to send, or an empty tensor to receive one, on the device."""
        receives = self.broadcast and not self.is_main
        reusable = tensor.device == self.device and tensor.is_contiguous()
        if tensor.is_meta or (receives and not reusable):
            return torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
        # As the receivers' memory is, and as `fully_shard` requires.
        return tensor.detach().to(self.device).resolve_conj().resolve_neg().contiguous()

    def _new_parameter(self, current: nn.Parameter, original: nn.Parameter) -> nn.Parameter:
        value = self._value(current)
        if self.broadcast:
            dist.broadcast(value, 0)
        parameter = nn.Parameter(value.to(self.dtype(original)), requires_grad=original.requires_grad)
        vars(parameter).update(vars(original))
        return parameter

    def _initialise(self, names: list[str]) -> None:
        """Initialize the module of a parameter that has no value even on the main process."""
        if names[0] not in self._missing:
            return
        module = self.model.get_submodule(names[0].rpartition(".")[0])
        if not any(p.is_meta for p in module.parameters(recurse=False)):
            return
        if self.init is not None:
            self.init(module)
            return
        reset = getattr(module, "reset_parameters", None)
        inits: list[Any] = [part for part in self.model.modules() if callable(getattr(part, "_init_weights", None))]
        if reset is None and not inits:
            raise ArgumentError(
                f"prepare: {names[0]} is on the meta device on the main process too, and a {type(module).__name__} has "
                "no reset_parameters: pass FullyShardedDataParallelPlugin(param_init_fn=…)"
            )
        module.to_empty(device=self.device, recurse=False)
        with torch.no_grad():
            reset() if reset is not None else inits[0]._init_weights(module)


def _trim_malloc() -> None:
    """Make the C library return freed memory to the system, if it can (glibc).

    Otherwise it keeps the memory of a unit's full weights, in gaps among the shards that fit no later unit.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _parameters_without_value(model: nn.Module, names: Mapping[nn.Parameter, list[str]]) -> list[str]:
    """Return the parameters without a value on the main process. Raises `ArgumentError` if models differ."""
    signature = [
        (parameter_names[0], tuple(p.shape), str(p.dtype), p.requires_grad) for p, parameter_names in names.items()
    ]
    digests = collectives.all_objects(hashlib.sha256(repr(signature).encode()).digest())
    differing = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if differing:
        raise ArgumentError(
            f"prepare: the {type(model).__name__} of process {differing[0]} differs from that of process 0 "
            "in names, shapes, types or requires_grad of parameters"
        )
    without_value = [[parameter_names[0] for p, parameter_names in names.items() if p.is_meta]]
    missing: list[str] = collectives.broadcast_object_list(without_value)[0]
    return missing
