"""Models in shards: FSDP 2 (`torch.distributed.fsdp.fully_shard`) over data shares, and tensor parallelism."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import nn

from accel.errors import ArgumentError
from accel.logging import get_logger
from accel.parallel.activation_checkpointing import checkpoint_activations
from accel.parallel.base import Loading, Prepared, Strategy, average_gradients
from accel.parallel.materializer import WeightMaterializer
from accel.parallel.mesh import Mesh
from accel.parallel.optimizers import by_mesh, check_known, clip_norm, rebind_to_shards, split_by_mesh, to_shards
from accel.parallel.plans import find_styles
from accel.parallel.shares import (
    count_versions,
    drop_held_gradients,
    full_state,
    gather_before_inference,
    is_sharded,
    is_split,
    refuse_versions,
    reshard,
)
from accel.parallel.tensor import check_spread, copy_views, split_layers
from accel.parallel.units import (
    check_class_names,
    find_units,
    ignored_parameters,
    members_of,
    refuse_unshardable,
    unit_of,
)
from accel.plugins.fsdp import FullyShardedDataParallelPlugin
from accel.precision.float8 import gather_in_8_bits, refuse_8_bits
from accel.pytree import join_tensors, split_tensors
from accel.state import AcceleratorState
from accel.world.process_group import set_timeout_of_new_groups

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

logger = get_logger(__name__)

# A model in a `no_sync` → the function that switches the reduction of its gradients on or off.
_deferring: WeakKeyDictionary[nn.Module, Callable[[bool], None]] = WeakKeyDictionary()
_METHODS = ("generate",)  # methods other than `forward` that compute with the weights


class Sharded(Strategy):
    """Every process holds a shard of each parameter, its gradient and its optimizer's state.

    The layers that tensor parallelism splits (``tp_size``) are split first. Then FSDP shards all parameters over the
    processes with different data, if there are several. Models are sharded in place, and optimizers of the original
    parameters step the shards.
    """

    joins = True
    lockstep = "with sharded models"
    shards_models = True
    compiles_in_place = True
    state: AcceleratorState
    mesh: Mesh

    def __init__(self, state: AcceleratorState, plugin: FullyShardedDataParallelPlugin | None, mesh: Mesh) -> None:
        from torch.utils.weak import WeakTensorKeyDictionary

        super().__init__(state, mesh)
        self.plugin = plugin or FullyShardedDataParallelPlugin()
        self._has_plugin = plugin is not None
        if mesh.sizes["tp"] > 1:  # it advises to join two all-gathers of a weight that is cut twice, which torch cannot
            logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
        self._models: WeakKeyDictionary[nn.Module, None] = WeakKeyDictionary()  # in one order on all processes
        self._class_names: set[str] = set()  # of the modules in all models
        self._optimizers: WeakSet[torch.optim.Optimizer] = WeakSet()
        # An optimizer that steps the shards → the ids of its parameters, and the number of their device meshes.
        self._checked: WeakKeyDictionary[torch.optim.Optimizer, tuple[list[int], int]] = WeakKeyDictionary()
        # The parameter that a model had before it was sharded → the one it has now.
        self._shards: Any = WeakTensorKeyDictionary()

    def place(self, model: nn.Module, evaluation: bool = False) -> nn.Module:
        """Leave ``model`` where it is, to be moved unit by unit, unless it is for evaluation only."""
        return super().place(model) if evaluation else model

    def prepare(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        schedulers: Sequence[Any] = (),
        loading: Loading | None = None,
    ) -> Prepared:
        """See `Strategy.prepare`; optimizers keep their groups and their state."""
        for optimizer in set(optimizers) - set(self._optimizers):
            self._optimizers.add(optimizer)
            optimizer.register_step_pre_hook(self._check)
        new = [model for model in models if not is_split(self.unwrap(model))]
        if new:
            check_class_names(self.plugin, new, self._class_names)
        prepared = super().prepare(models, optimizers, schedulers)
        self._checked.clear()
        self.finish_pending()
        return prepared

    def _check(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Raise `ArgumentError` for a parameter of no prepared model, at the first step and after groups were added."""
        if self._is_changed(optimizer):
            known = list(self._parameters())
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            check_known(type(optimizer).__name__, parameters, known)
            self._checked[optimizer] = list(map(id, parameters)), len(by_mesh(parameters))

    def _is_changed(self, optimizer: torch.optim.Optimizer) -> bool:
        ids, _ = self._checked.get(optimizer, (None, 0))
        return ids != [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]

    def split_groups(self, optimizer: torch.optim.Optimizer) -> AbstractContextManager[Any]:
        """See `Strategy.split_groups`; it makes a difference if the model has modules that are not sharded."""
        if optimizer not in self._optimizers:
            return nullcontext()
        self._check(optimizer)
        return split_by_mesh(optimizer) if self._checked[optimizer][1] > 1 else nullcontext()

    def needs_autocast(self, model: nn.Module) -> bool:
        """See `Strategy.needs_autocast`. Units cast their parameters themselves; ignored modules are as they are."""
        policy: Any = self._precision()
        unwrapped: Any = self.unwrap(model)
        if _is_sharded_model(unwrapped):  # by the script, or by another `Accelerator`
            policy = unwrapped._get_fsdp_state()._mp_policy
        elif self.mesh.sharding is None or is_split(unwrapped):
            return True
        ignored = ignored_parameters(model, self.plugin.ignored_modules)
        return policy.param_dtype is None or any(p.requires_grad or p.dtype != policy.param_dtype for p in ignored)

    def _parameters(self) -> Iterator[nn.Parameter]:
        self.finish_pending()
        for model in self._models:
            yield from model.parameters()

    def wrap(self, model: nn.Module) -> nn.Module:
        """Shard ``model`` in place; a model that the script has sharded itself stays as it is."""
        from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard, register_fsdp_forward_method

        plugin = self.plugin
        if not isinstance(plugin.cpu_offload, CPUOffloadPolicy):
            _refuse_gloo(self.state.device, dist.get_backend_config())
        self._models[self.unwrap(model)] = None
        if is_split(self.unwrap(model)):
            check_spread(self.unwrap(model), self.mesh.sizes["tp"])
            return model
        if self.mesh.sizes["dp_shard"] > 1 and not self._has_plugin:
            raise ArgumentError(
                f"ParallelismConfig(dp_shard_size={self.mesh.sizes['dp_shard']}) shards models: "
                "pass fsdp_plugin=FullyShardedDataParallelPlugin() too (--use_fsdp)"
            )
        tp_size = self.mesh.sizes["tp"]
        if tp_size > 1:
            refuse_8_bits(model, f"ParallelismConfig(tp_size={tp_size})")
        styles = find_styles(model, tp_size) if tp_size > 1 else {}
        policy = self._precision()
        ignored = ignored_parameters(model, plugin.ignored_modules)
        units = find_units(model, plugin, ignored)
        weights = WeightMaterializer(
            model,
            self.state.device,
            broadcast=plugin.sync_module_states is not False,
            upcast=policy.param_dtype not in (None, torch.float32),
            init=plugin.param_init_fn,
        )
        members = members_of([name for name, _ in units], weights.names, ignored)
        refuse_unshardable(members, weights.names, weights.dtype, policy.param_dtype)
        if plugin.activation_checkpointing:
            _checkpoint(model, [unit for _, unit in units[:-1]], plugin.activation_checkpointing_offload)
        weights.materialize(parameter for parameter in weights.names if parameter in ignored)  # in the model's order
        weights.materialize_buffers()
        unsharded = {model.get_parameter(weights.names[parameter][0]) for parameter in ignored}
        sharding = self.mesh.sharding
        for name, unit in units:
            weights.materialize(members[name])
            if styles:
                own_styles = {layer: styles[layer] for layer in styles if unit_of(f"{layer}.", members) == name}
                own_names = {parameter: weights.names[parameter] for parameter in members[name]}
                split_layers(model, own_styles, self.mesh["tp"], own_names)
            if sharding is None:
                continue
            gather_in_8_bits(model, [weights.names[parameter] for parameter in members[name]])
            if styles:
                unit.register_forward_hook(torch.compiler.disable(copy_views))  # type: ignore[no-untyped-call]
            with set_timeout_of_new_groups():  # torch creates some for reshard_after_forward=N
                fully_shard(
                    unit,
                    mesh=sharding,
                    # The root unit's parameters are used last in the forward pass and first in the backward pass.
                    reshard_after_forward=None if unit is model else plugin.reshard_after_forward,
                    mp_policy=policy,
                    offload_policy=plugin.cpu_offload,
                    ignored_params=unsharded,
                )
        for parameter, names in weights.names.items():
            self._shards[parameter] = model.get_parameter(names[0])
        _prefetch([unit for _, unit in units[:-1]] if plugin.forward_prefetch else [])
        for method in _METHODS:
            if callable(getattr(model, method, None)):
                register_fsdp_forward_method(model, method)
        gather_before_inference(model)
        model.register_forward_hook(_reshard_after_evaluation)
        return model

    def _precision(self) -> MixedPrecisionPolicy:
        if self.plugin.mixed_precision_policy is None and self.state.mixed_precision != "no":
            name = self.state.mixed_precision
            self.plugin.set_mixed_precision("bf16" if name == "fp8" else name)
        from torch.distributed.fsdp import MixedPrecisionPolicy

        policy = self.plugin.mixed_precision_policy
        return policy if isinstance(policy, MixedPrecisionPolicy) else MixedPrecisionPolicy()

    def finish_pending(self) -> None:
        """Make every model's ``parameters()`` and every optimizer's the shards, regardless of what is gathered."""
        for model in self._models:
            reshard(model)
        for optimizer in self._optimizers:
            self._rebind(optimizer)

    def _rebind(self, optimizer: torch.optim.Optimizer) -> None:
        if optimizer in self._optimizers and self._is_changed(optimizer):
            rebind_to_shards(optimizer, self._shards)

    def zero_grad(self, optimizer: torch.optim.Optimizer, **kwargs: Any) -> None:
        """See `Strategy.zero_grad`; groups that were added with parameters listed before `prepare` get the shards."""
        self._rebind(optimizer)
        super().zero_grad(optimizer, **kwargs)

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Keep the full gradients of the block's backward passes on their process, without reducing them.

        With replicas, gradients are still reduced to shards, but not between the replicas. Does nothing for a model
        that is not sharded, and within another such block.
        """
        unwrapped: Any = self.unwrap(model)
        if unwrapped in _deferring or not _is_sharded_model(unwrapped):
            yield
            return
        defer = (
            unwrapped.set_requires_all_reduce
            if self.mesh.sizes["dp_replicate"] > 1
            else unwrapped.set_requires_gradient_sync
        )
        defer(False)
        _deferring[unwrapped] = defer
        try:
            yield
        finally:
            del _deferring[unwrapped]
            defer(True)

    def after_backward(self) -> None:
        """Average the gradients of the parameters that are not sharded. Idempotent."""
        if self.mesh.sharding is not None:  # otherwise all processes have the same
            average_gradients(p for model in self._models for p in model.parameters() if not is_sharded(p))

    def clip_grad_norm(self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float) -> torch.Tensor:
        """See `Strategy.clip_grad_norm`; the norm is over all processes, and all must call it."""
        return clip_norm(self._to_clip(parameters), max_norm, norm_type, self.state.device)

    def clip_grad_value(self, parameters: Iterable[torch.Tensor], clip_value: float) -> None:
        """See `Strategy.clip_grad_value`."""
        for group in by_mesh(self._to_clip(parameters)):
            torch.nn.utils.clip_grad_value_(group, clip_value)

    def _to_clip(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Return the shards of ``parameters``. Raises `ArgumentError` for one of no prepared model."""
        self.finish_pending()
        shards = to_shards([parameters] if isinstance(parameters, torch.Tensor) else parameters, self._shards)
        unsharded = [p for p in shards if not is_sharded(p)]
        if unsharded:
            check_known("clipping", unsharded, self._parameters())
        return [p for p in shards if p.grad is not None]

    def can_save_window(self, sync_each_batch: bool) -> bool:
        """See `Strategy.can_save_window`. Without ``sync_each_batch`` torch gives no access to these gradients."""
        return sync_each_batch

    def drop_held_gradients(self) -> None:
        """See `Strategy.drop_held_gradients`."""
        for model in self._models:
            drop_held_gradients(model)

    @property
    def own_buffers(self) -> bool:
        """See `Strategy.own_buffers`."""
        return True

    @property
    def keeps_shards(self) -> bool:
        """See `Strategy.keeps_shards`."""
        return bool(self.plugin.state_dict_type.name == "SHARDED_STATE_DICT")

    def model_state(self, model: nn.Module, full: bool = True) -> dict[str, torch.Tensor]:
        """See `Strategy.model_state`; a full one is gathered by parameter, and is empty except on main processes."""
        self.finish_pending()
        unwrapped = self.unwrap(model)
        if not full:
            return unwrapped.state_dict(keep_vars=True)
        return full_state(unwrapped.state_dict(keep_vars=True), self.state.is_local_main_process)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """See `Strategy.optimizer_state`; gathered like `model_state`.

        Raises `CheckpointError` for state that is not sharded and differs between processes.
        """
        state, keep = optimizer.state_dict(), self.state.is_local_main_process
        outline, tensors = split_tensors(state)
        refuse_versions(count_versions(tensors))
        full = full_state(tensors, keep)
        return join_tensors(outline, full) if keep else {**state, "state": {}}


@contextmanager
def reduce_in_backward(model: Any) -> Iterator[None]:
    """Reduce the gradients of ``model`` in the block's backward passes, even in a `Sharded.no_sync`."""
    defer = _deferring.get(model)
    if defer is None:
        yield
        return
    defer(True)
    try:
        yield
    finally:
        defer(False)


def _is_sharded_model(model: nn.Module) -> bool:
    from torch.distributed.fsdp import FSDPModule

    return isinstance(model, FSDPModule)


def _refuse_gloo(device: torch.device, backends: str) -> None:
    if device.type == "cuda" and "cuda:gloo" in backends:
        raise ArgumentError(
            f"prepare: models sharded on {device} need a process group over nccl, and this one is over gloo: "
            "leave out the backend, or set it to 'nccl'"
        )


def _checkpoint(model: nn.Module, units: list[nn.Module], offload: bool) -> None:
    if not units:
        logger.warning(f"activation_checkpointing has no effect: a {type(model).__name__} is one unit")
    checkpoint_activations(units, offload)


def _prefetch(units: Sequence[Any]) -> None:
    for unit, following in pairwise(units):
        unit.set_modules_to_forward_prefetch([following])


def _reshard_after_evaluation(model: Any, args: Any, outputs: Any) -> None:
    # Without a backward pass the root unit's parameters, and with reshard_after_forward=False every unit's, would
    # stay gathered, and model.parameters() would not be the shards.
    if not torch.is_grad_enabled():
        reshard(model)
