"""Settings of fully sharded data parallelism."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from accel.errors import ArgumentError, nearest, one_of
from accel.world.environment import read_flag, read_int

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

# In the order of torch's `ShardingStrategy`, `BackwardPrefetch` and `StateDictType`, which begin at 1.
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
PREFETCHES = ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH")
STATES = ("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT")
WRAPS = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
UNIT_SIZE = 100_000_000  # default number of parameters that make a module a unit of its own
_RESHARDING = ("FULL_SHARD", "HYBRID_SHARD")  # strategies that reshard after the forward
_RESHARDS = {"true": True, "yes": True, "false": False, "no": False, "no_reshard": False}
_DTYPES = {"fp32": torch.float32, "no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_POLICY = ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs", "buffer_dtype")


@dataclass
class FullyShardedDataParallelPlugin:
    """Settings of sharding by torch's `fully_shard`. The fields are Accelerate's; ``fsdp_version`` reads as 2.

    Missing values are read from ``FSDP_VERSION``, ``FSDP_RESHARD_AFTER_FORWARD`` and so on. A unit is a module
    whose parameters are gathered at once.

    ``auto_wrap_policy``: ``"transformer_based_wrap"`` (classes in ``transformer_cls_names_to_wrap``, else the
        model's ``_no_split_modules``), ``"size_based_wrap"`` (from ``min_num_params`` parameters on),
        ``"no_wrap"`` (the whole model is one unit), or a policy of `torch.distributed.fsdp.wrap`. Default: the
        model's ``_no_split_modules``, else size.
    ``reshard_after_forward``: True to gather parameters again for the backward pass; an int is the number of
        ranks (a divisor of the shards) that keep them meanwhile.
    ``sync_module_states=False``: every rank has the same weights already.
    ``ignored_modules``: modules, or a regular expression for full names, that are not sharded; their gradients
        are averaged.

    Settings of version 1 are mapped to the closest ones here, with one warning for those without an equivalent;
    docs/migrating.md has the table. Raises `ArgumentError` for invalid and contradictory settings.
    """

    fsdp_version: int = None  # type: ignore[assignment]
    sharding_strategy: Any = None
    reshard_after_forward: Any = None
    backward_prefetch: Any = None
    mixed_precision_policy: MixedPrecisionPolicy | Mapping[str, Any] | torch.dtype | str | None = None
    auto_wrap_policy: Callable[..., Any] | str | None = None
    cpu_offload: Any = None
    ignored_modules: Iterable[torch.nn.Module] | str | None = None
    state_dict_type: Any = None
    state_dict_config: Any = None
    optim_state_dict_config: Any = None
    limit_all_gathers: bool = True
    use_orig_params: bool | None = None
    param_init_fn: Callable[[torch.nn.Module], None] | None = None
    sync_module_states: bool | None = None
    forward_prefetch: bool = None  # type: ignore[assignment]
    activation_checkpointing: bool = None  # type: ignore[assignment]
    cpu_ram_efficient_loading: bool = None  # type: ignore[assignment]
    transformer_cls_names_to_wrap: list[str] | str | None = None
    min_num_params: int | None = None
    activation_checkpointing_offload: bool = None  # type: ignore[assignment]
    # Derived from the fields above.
    hybrid: bool = field(default=False, init=False, repr=False)  # sharded on a node, replicated over nodes
    whole: bool = field(default=False, init=False, repr=False)  # NO_SHARD: data parallel, nothing is sharded
    wraps: str | None = field(default=None, init=False, repr=False)  # one of WRAPS; None: the model's own, or size

    def __post_init__(self) -> None:
        env = os.environ
        self._unsupported: list[str] = []  # settings without an equivalent in version 2
        version = self.fsdp_version or env.get("FSDP_VERSION") or "2"
        old = one_of(str(version), ("1", "2"), source=_source(self.fsdp_version, "fsdp_version", "FSDP_VERSION")) == "1"
        self.fsdp_version = 2
        self._resolve_sharding(env)
        self._resolve_prefetch(env, old)
        self._resolve_units(env)
        if self.activation_checkpointing is None:
            self.activation_checkpointing = read_flag(env, "FSDP_ACTIVATION_CHECKPOINTING")
        if self.activation_checkpointing_offload is None:
            self.activation_checkpointing_offload = read_flag(env, "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD")
        if self.cpu_ram_efficient_loading is None:
            self.cpu_ram_efficient_loading = read_flag(env, "FSDP_CPU_RAM_EFFICIENT_LOADING")
        if self.activation_checkpointing_offload and not self.activation_checkpointing:
            raise ArgumentError(f"{_NAME}(activation_checkpointing_offload=True) needs activation_checkpointing=True")
        # transformers reads it when it loads a model.
        env["FSDP_CPU_RAM_EFFICIENT_LOADING"] = str(self.cpu_ram_efficient_loading).lower()
        if self.ignored_modules is None:
            self.ignored_modules = env.get("FSDP_IGNORED_MODULES") or None
        elif not isinstance(self.ignored_modules, str):
            self.ignored_modules = list(self.ignored_modules)
        if self.sync_module_states is None and old:
            self.sync_module_states = read_flag(env, "FSDP_SYNC_MODULE_STATES", True)
        self._resolve_offload(env)
        self.set_state_dict_type()
        if self.mixed_precision_policy is not None:
            self.set_mixed_precision(self.mixed_precision_policy)
        self._warn_unsupported(old)

    def _resolve_sharding(self, env: Mapping[str, str]) -> None:
        strategy, source = self.sharding_strategy, f"{_NAME}(sharding_strategy=…)"
        reshard, reshard_source = self.reshard_after_forward, f"{_NAME}(reshard_after_forward=…)"
        if strategy is None and reshard is None:
            strategy, source = env.get("FSDP_SHARDING_STRATEGY"), "environment variable FSDP_SHARDING_STRATEGY"
        if reshard is None:
            reshard_source = "environment variable FSDP_RESHARD_AFTER_FORWARD"
            reshard = env.get("FSDP_RESHARD_AFTER_FORWARD", "true")
        if not isinstance(reshard, (bool, int)):
            parsed = _RESHARDS.get(str(reshard).lower())
            if parsed is None:  # a strategy, which version 1 accepts here
                strategy, source = reshard, reshard_source
            reshard = parsed is not False
        if strategy is not None:
            strategy_name = _named(strategy, STRATEGIES, source)
            self.hybrid, self.whole = strategy_name.startswith("HYBRID"), strategy_name == "NO_SHARD"
            reshard = reshard if strategy_name in _RESHARDING else False
        self.reshard_after_forward = reshard

    def _resolve_prefetch(self, env: Mapping[str, str], old: bool) -> None:
        prefetch = self.backward_prefetch
        if prefetch is None and old:
            prefetch = env.get("FSDP_BACKWARD_PREFETCH")
        if prefetch is not None:
            source = _source(self.backward_prefetch, "backward_prefetch", "FSDP_BACKWARD_PREFETCH")
            choice = _named(prefetch, PREFETCHES, source)
            if choice != "BACKWARD_PRE":
                self._unsupported.append(
                    f"backward_prefetch={choice}: parameters are gathered ahead of the backward pass"
                )
        self.backward_prefetch = None
        if self.forward_prefetch is None:
            self.forward_prefetch = read_flag(env, "FSDP_FORWARD_PREFETCH")
        if not self.limit_all_gathers:
            self._unsupported.append("limit_all_gathers=False: they are always limited")
        if self.use_orig_params is None and old:
            self.use_orig_params = read_flag(env, "FSDP_USE_ORIG_PARAMS", True)
        if self.use_orig_params is False:
            self._unsupported.append("use_orig_params=False: parameters stay the script's own")
        self.use_orig_params = None

    def _resolve_units(self, env: Mapping[str, str]) -> None:
        policy = self.auto_wrap_policy
        if policy is None:
            policy = env.get("FSDP_AUTO_WRAP_POLICY") or None
        if self.transformer_cls_names_to_wrap is None:
            self.transformer_cls_names_to_wrap = env.get("FSDP_TRANSFORMER_CLS_TO_WRAP") or None
        if isinstance(self.transformer_cls_names_to_wrap, str):
            names = self.transformer_cls_names_to_wrap.split(",")
            self.transformer_cls_names_to_wrap = [name.strip() for name in names if name.strip()]
        if self.min_num_params is None:
            self.min_num_params = read_int(env, "FSDP_MIN_NUM_PARAMS", minimum=0)
        if isinstance(policy, (str, int)):
            source = _source(self.auto_wrap_policy, "auto_wrap_policy", "FSDP_AUTO_WRAP_POLICY")
            self.wraps = _named(policy, WRAPS, source)
            self.auto_wrap_policy = None
        elif policy is None and self.transformer_cls_names_to_wrap:
            self.wraps = "TRANSFORMER_BASED_WRAP"

    def _resolve_offload(self, env: Mapping[str, str]) -> None:
        from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

        requested = read_flag(env, "FSDP_OFFLOAD_PARAMS") if self.cpu_offload is None else self.cpu_offload
        if isinstance(requested, OffloadPolicy):
            return
        # torch's default pins memory, which requires CUDA.
        policy = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
        self.cpu_offload = policy if getattr(requested, "offload_params", requested) else OffloadPolicy()

    def set_state_dict_type(self, state_dict_type: Any = None) -> None:
        """Set how checkpoints store the model: as one file, or in the ranks' shards (the default)."""
        from torch.distributed.fsdp import StateDictType

        explicit = state_dict_type if state_dict_type is not None else self.state_dict_type
        requested = explicit if explicit is not None else os.environ.get("FSDP_STATE_DICT_TYPE", "SHARDED_STATE_DICT")
        source = _source(explicit, "state_dict_type", "FSDP_STATE_DICT_TYPE")
        type_name = _named(requested, STATES, source)
        if type_name == "LOCAL_STATE_DICT":
            raise ArgumentError(f"{source}: LOCAL_STATE_DICT holds flat parameters: use SHARDED_STATE_DICT")
        self.state_dict_type = StateDictType[type_name]

    def set_mixed_precision(self, mixed_precision: Any, buffer_autocast: bool = False, override: bool = False) -> None:
        """Set the types in which units compute and reduce gradients: by a name, torch's policy, or its fields.

        A name is ``"bf16"``, ``"fp16"`` or ``"fp32"``, or a torch dtype; gradients are then reduced in fp32.
        """
        from torch.distributed.fsdp import MixedPrecisionPolicy

        if isinstance(mixed_precision, MixedPrecisionPolicy):
            self.mixed_precision_policy = mixed_precision
            return
        if isinstance(mixed_precision, (str, torch.dtype)):
            kind = _dtype(mixed_precision)
            self.mixed_precision_policy = MixedPrecisionPolicy(param_dtype=kind, reduce_dtype=torch.float32)
            return
        # A policy of version 1 casts inputs only at the root, where they do not have the right type yet.
        old = {name: getattr(mixed_precision, name, None) for name in ("param_dtype", "reduce_dtype", "buffer_dtype")}
        fields = mixed_precision if isinstance(mixed_precision, Mapping) else old
        dtypes = {name: _dtype(value) for name, value in fields.items() if name in _POLICY and value is not None}
        for name in mixed_precision if isinstance(mixed_precision, Mapping) else ():
            one_of(name, _POLICY, source=f"{_NAME}(mixed_precision_policy=…)")
        if dtypes.pop("buffer_dtype", None) is not None:
            self._unsupported.append("buffer_dtype: buffers keep their type")
        self.mixed_precision_policy = MixedPrecisionPolicy(**{"reduce_dtype": torch.float32, **dtypes})

    def world_options(self) -> dict[str, str]:
        """Return options of the process group: with offloading, CPU collectives besides the device's own."""
        from torch.distributed.fsdp import CPUOffloadPolicy

        needs_both = isinstance(self.cpu_offload, CPUOffloadPolicy) and torch.cuda.is_available()
        return {"backend": "cpu:gloo,cuda:nccl"} if needs_both else {}

    def _warn_unsupported(self, old: bool) -> None:
        unsupported = self.__dict__.pop("_unsupported")
        if old:
            unsupported = ["fsdp_version=1: models are sharded by fully_shard (version 2)", *unsupported]
        if self.whole:
            unsupported.append("NO_SHARD: models are trained by DDP")
        if unsupported and os.environ.get("RANK", "0") == "0":
            warnings.warn(f"{_NAME}: {'; '.join(unsupported)}. docs/migrating.md has all settings", stacklevel=4)


_NAME = FullyShardedDataParallelPlugin.__name__


def _source(explicit: Any, argument: str, variable: str) -> str:
    return f"environment variable {variable}" if explicit is None else f"{_NAME}({argument}=…)"


def _named(value: Any, names: tuple[str, ...], source: str) -> str:
    """Return the member of ``names`` for ``value``: a name in any case, its number (from 1), or torch's enum member."""
    word = str(getattr(value, "name", value)).upper().removeprefix("_")
    if word.isdigit() and 1 <= int(word) <= len(names):
        return names[int(word) - 1]
    if word not in names:
        raise ArgumentError(f"{source}: {value!r} is not one of {', '.join(names)}{nearest(word, names)}")
    return word


def _dtype(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    word = value.removeprefix("torch.")
    torch_dtype = getattr(torch, word, None)
    if isinstance(torch_dtype, torch.dtype):
        return torch_dtype
    return _DTYPES[one_of(word, list(_DTYPES), source=f"{_NAME}(mixed_precision_policy=…)")]
