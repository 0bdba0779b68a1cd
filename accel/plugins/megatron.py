"""Settings of Megatron-LM: for models of megatron-core, and for others, which torch splits and shards."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, NamedTuple

from accel.errors import ArgumentError
from accel.plugins.deepspeed import DummyScheduler
from accel.plugins.fsdp import FullyShardedDataParallelPlugin
from accel.plugins.parallelism import ParallelismConfig
from accel.world.environment import read_flag, read_int

_CORE = "for models of megatron-core: pass custom_model_provider_function, or initialise its parallel_state first"
_SCRIPT = "the script's own"
_MODEL = "a setting of the model"
_LOADER = "pass a DataLoader to prepare"
_NO_STAGES = f"split layers (tp_degree) or shard (use_distributed_optimizer); pipelines are {_CORE}"
_NO_EXPERTS = f"experts are split with the layers: set tp_degree; expert parallelism is {_CORE}"
# Models of transformers, and others with a `tp_plan`: field -> what it becomes.
MAPPED = {
    "tp_degree": "`ParallelismConfig(tp_size)`",
    "context_parallel_size": "`ParallelismConfig(cp_size)`, 1 by default (there: 2)",
    "use_distributed_optimizer": "FSDP that gathers parameters once a step",
    "use_custom_fsdp": "FSDP that gathers parameters for the backward pass again",
    "optimizer_cpu_offload": "`cpu_offload` of FSDP",
    "recompute_activations": "`activation_checkpointing` of FSDP",
    "gradient_clipping": "every step of the optimizer clips to this norm; 0 for none",
}
# Field -> the remedy, if it is set to more than one process or stage, or at all.
REFUSED = {
    "pp_degree": _NO_STAGES,
    "expert_model_parallel_size": _NO_EXPERTS,
    "expert_tensor_parallel_size": _NO_EXPERTS,
    "num_micro_batches": "set Accelerator(gradient_accumulation_steps=…), and use accelerator.accumulate",
    "pipeline_model_parallel_split_rank": "there are no pipeline stages",
    "num_layers_per_virtual_pipeline_stage": "there are no pipeline stages",
    "decoder_last_pipeline_num_layers": "there are no pipeline stages",
    "no_load_optim": "load the model alone, with load_checkpoint_in_model",
    "no_save_optim": "save the model alone, with accelerator.save_model",
    "lr_mult": "set the learning rates of the optimizer's groups",
    "no_wd_decay_cond": "set the weight decay of the optimizer's groups",
    "scale_lr_cond": "set the learning rates of the optimizer's groups",
    "megatron_dataset_flag": _LOADER,
    "return_logits": "models return what they return",
    "other_megatron_args": _CORE,
    **dict.fromkeys(
        (
            "custom_train_step_class", "custom_train_step_kwargs", "custom_model_provider_function",
            "custom_prepare_model_function", "custom_megatron_datasets_provider_function",
            "custom_get_batch_function", "custom_loss_function",
        ),
        _CORE,
    ),
}  # fmt: skip
# Field -> where its effect comes from instead. If one is set, a warning says that it has none.
WITHOUT_EFFECT = {
    "sequence_parallelism": 'layers with the style `"sequence_parallel"` in the `tp_plan` of the model',
    "recompute_granularity": "all layers are recomputed",
    "recompute_method": "all layers are recomputed",
    "recompute_num_layers": "all layers are recomputed",
    "overlap_cpu_optimizer_d2h_h2d": "torch's choice",
    "use_precision_aware_optimizer": "the optimizer keeps the type of its parameters",
    "is_train_batch_min": _SCRIPT,
    **dict.fromkeys(
        (
            "attention_backend", "attention_dropout", "hidden_dropout", "attention_softmax_in_fp32",
            "use_rotary_position_embeddings", "seq_length", "encoder_seq_length", "decoder_seq_length",
        ),
        _MODEL,
    ),
    **dict.fromkeys(
        (
            "eod_mask_loss", "calculate_per_token_loss", "train_iters", "train_samples", "weight_decay_incr_style",
            "start_weight_decay", "end_weight_decay", "lr_decay_style", "lr_decay_iters", "lr_decay_samples",
            "lr_warmup_iters", "lr_warmup_samples", "lr_warmup_fraction", "min_lr", "consumed_samples",
            "tensorboard_dir", "set_all_logging_options", "eval_iters", "eval_interval",
        ),
        _SCRIPT,
    ),
}  # fmt: skip

_SAME = "the same of its optimizer"
_SCHEDULE = "the schedule of a `MegatronLMDummyScheduler`"
_STEP = "a function of its training step"
# Models of megatron-core: field -> what it becomes.
CORE = {
    "tp_degree": "`tensor_model_parallel_size` of its `parallel_state`",
    "pp_degree": "`pipeline_model_parallel_size` of its `parallel_state`",
    "context_parallel_size": "`context_parallel_size` of its `parallel_state`",
    "expert_model_parallel_size": "`expert_model_parallel_size` of its `parallel_state`",
    "expert_tensor_parallel_size": "`expert_tensor_parallel_size` of its `parallel_state`",
    "num_micro_batches": "micro-batches of a step: loaders read as many times their batch size",
    "gradient_clipping": "`clip_grad` of its optimizer",
    "use_distributed_optimizer": "the same of its optimizer and its `DistributedDataParallel`",
    **dict.fromkeys(
        ("optimizer_cpu_offload", "overlap_cpu_optimizer_d2h_h2d", "use_precision_aware_optimizer"), _SAME
    ),
    "no_load_optim": "`load_state` leaves the optimizer as it is",
    "no_save_optim": "`save_state` leaves the optimizer out",
    "is_train_batch_min": "the smallest batch size of the loaders is `micro_batch_size`, else the largest",
    **dict.fromkeys(
        (
            "train_iters", "lr_decay_style", "lr_decay_iters", "lr_warmup_iters", "lr_warmup_fraction", "min_lr",
            "weight_decay_incr_style", "start_weight_decay", "end_weight_decay",
        ),
        _SCHEDULE,
    ),
    "custom_model_provider_function": "builds the model, in place of the one that is prepared",
    "custom_prepare_model_function": "is called with that function, and returns the model",
    **dict.fromkeys(
        ("custom_get_batch_function", "custom_loss_function", "custom_train_step_class", "custom_train_step_kwargs"),
        _STEP,
    ),
    "other_megatron_args": "fields of its `OptimizerConfig` and `DistributedDataParallelConfig`",
}  # fmt: skip
# Models of megatron-core: field -> the remedy, if it is set.
CORE_REFUSED = {
    "use_custom_fsdp": "set use_distributed_optimizer",
    "pipeline_model_parallel_split_rank": "pipelines have decoders only",
    "num_layers_per_virtual_pipeline_stage": "stages are not interleaved",
    "decoder_last_pipeline_num_layers": "set num_layers_in_last_pipeline_stage in the TransformerConfig",
    **dict.fromkeys(("train_samples", "lr_decay_samples", "lr_warmup_samples"), "set train_iters and lr_*_iters"),
    **dict.fromkeys(
        ("no_wd_decay_cond", "scale_lr_cond", "lr_mult"), "its optimizer has two groups: with and without weight decay"
    ),
    **dict.fromkeys(("megatron_dataset_flag", "custom_megatron_datasets_provider_function"), _LOADER),
    "return_logits": "set custom_loss_function",
}  # fmt: skip


class _Variable(NamedTuple):
    """The reader of a field's environment variable, and the field's default."""

    read: Callable[[str], Any]
    default: Any


def _count(name: str) -> int | None:
    return read_int(os.environ, name, minimum=1)


def _flag(name: str) -> bool | None:
    return read_flag(os.environ, name) if os.environ.get(name) else None


def _text(name: str) -> str | None:
    return os.environ.get(name) or None


def _number(name: str) -> float | None:
    try:
        return float(os.environ[name]) if os.environ.get(name) else None
    except ValueError:
        raise ArgumentError(f"environment variable {name}={os.environ[name]!r} is not a number") from None


_SIZES = (
    "tp_degree", "pp_degree", "context_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size",
    "num_micro_batches",
)  # fmt: skip
_VARIABLES: Mapping[str, _Variable] = {
    **dict.fromkeys(("tp_degree", "pp_degree", "num_micro_batches"), _Variable(_count, 1)),
    **dict.fromkeys(("context_parallel_size", "recompute_num_layers"), _Variable(_count, 1)),
    **dict.fromkeys(("expert_model_parallel_size", "expert_tensor_parallel_size"), _Variable(_count, 1)),
    "decoder_last_pipeline_num_layers": _Variable(_count, None),
    **dict.fromkeys(("attention_dropout", "hidden_dropout"), _Variable(_number, 0.0)),
    "gradient_clipping": _Variable(_number, 1.0),
    "recompute_granularity": _Variable(_text, "full"),
    "recompute_method": _Variable(_text, "uniform"),
    **dict.fromkeys(
        ("attention_softmax_in_fp32", "calculate_per_token_loss", "use_rotary_position_embeddings"),
        _Variable(_flag, True),
    ),
    "attention_backend": _Variable(_text, True),
    **dict.fromkeys(
        (
            "use_custom_fsdp", "overlap_cpu_optimizer_d2h_h2d", "no_load_optim", "eod_mask_loss", "no_save_optim",
            "optimizer_cpu_offload", "use_precision_aware_optimizer", "sequence_parallelism", "recompute_activations",
            "use_distributed_optimizer",
        ),
        _Variable(_flag, False),
    ),
}  # fmt: skip


@dataclass
class MegatronLMPlugin:
    """Settings of Megatron-LM.

    The fields are Accelerate's; missing values are read from ``MEGATRON_LM_TP_DEGREE`` and so on. They are for models
    of megatron-core if they have a ``custom_model_provider_function`` or its ``parallel_state`` is initialised, else
    for models of transformers and others with a ``tp_plan``. `CORE` and `MAPPED` have the fields with an effect and
    what they become, `WITHOUT_EFFECT` those that are only warned about, `CORE_REFUSED` and `REFUSED` the others.
    Raises `ArgumentError` for one of those that is set, and for invalid values.

    ``is_core``: True for models of megatron-core.
    ``micro_batch_size``, ``global_batch_size``, ``data_parallel_size``: set by `prepare`, with a model of
        megatron-core and a loader.
    """

    tp_degree: int = None  # type: ignore[assignment]
    pp_degree: int = None  # type: ignore[assignment]
    use_custom_fsdp: bool = None  # type: ignore[assignment]
    overlap_cpu_optimizer_d2h_h2d: bool = None  # type: ignore[assignment]
    no_load_optim: bool = None  # type: ignore[assignment]
    eod_mask_loss: bool = None  # type: ignore[assignment]
    no_save_optim: bool = None  # type: ignore[assignment]
    optimizer_cpu_offload: bool = None  # type: ignore[assignment]
    use_precision_aware_optimizer: bool = None  # type: ignore[assignment]
    decoder_last_pipeline_num_layers: int | None = None
    recompute_granularity: str = None  # type: ignore[assignment]
    recompute_method: str = None  # type: ignore[assignment]
    recompute_num_layers: int = None  # type: ignore[assignment]
    attention_backend: Any = None
    expert_model_parallel_size: int = None  # type: ignore[assignment]
    context_parallel_size: int = None  # type: ignore[assignment]
    attention_dropout: float = None  # type: ignore[assignment]
    hidden_dropout: float = None  # type: ignore[assignment]
    attention_softmax_in_fp32: bool = None  # type: ignore[assignment]
    expert_tensor_parallel_size: int = None  # type: ignore[assignment]
    calculate_per_token_loss: bool = None  # type: ignore[assignment]
    use_rotary_position_embeddings: bool = None  # type: ignore[assignment]
    num_micro_batches: int = None  # type: ignore[assignment]
    gradient_clipping: float = None  # type: ignore[assignment]
    sequence_parallelism: bool = None  # type: ignore[assignment]
    recompute_activations: bool = None  # type: ignore[assignment]
    use_distributed_optimizer: bool = None  # type: ignore[assignment]
    pipeline_model_parallel_split_rank: int | None = None
    num_layers_per_virtual_pipeline_stage: int | None = None
    is_train_batch_min: Any = True
    train_iters: int | None = None
    train_samples: int | None = None
    weight_decay_incr_style: str = "constant"
    start_weight_decay: float | None = None
    end_weight_decay: float | None = None
    lr_decay_style: str = "linear"
    lr_decay_iters: int | None = None
    lr_decay_samples: int | None = None
    lr_warmup_iters: int | None = None
    lr_warmup_samples: int | None = None
    lr_warmup_fraction: float | None = None
    min_lr: float = 0
    consumed_samples: Sequence[int] | None = None
    no_wd_decay_cond: Any = None
    scale_lr_cond: Any = None
    lr_mult: float = 1.0
    megatron_dataset_flag: bool = False
    seq_length: int | None = None
    encoder_seq_length: int | None = None
    decoder_seq_length: int | None = None
    tensorboard_dir: str | None = None
    set_all_logging_options: bool = False
    eval_iters: int = 100
    eval_interval: int = 1000
    return_logits: bool = False
    custom_train_step_class: Any = None
    custom_train_step_kwargs: dict[str, Any] | None = None
    custom_model_provider_function: Callable[..., Any] | None = None
    custom_prepare_model_function: Callable[..., Any] | None = None
    custom_megatron_datasets_provider_function: Callable[..., Any] | None = None
    custom_get_batch_function: Callable[..., Any] | None = None
    custom_loss_function: Callable[..., Any] | None = None
    other_megatron_args: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        defaults = {entry.name: entry.default for entry in fields(self)}
        for name, variable in _VARIABLES.items():
            defaults[name] = variable.default
            if getattr(self, name) is None:
                value = variable.read(f"MEGATRON_LM_{name.upper()}")
                setattr(self, name, variable.default if value is None else value)
        self.is_core = self.custom_model_provider_function is not None or _is_core_initialised()
        self.micro_batch_size: int | None = None
        self.global_batch_size: int | None = None
        self.data_parallel_size: int | None = None
        changed = [name for name, default in defaults.items() if getattr(self, name) != default]
        refused, mapped = (CORE_REFUSED, CORE) if self.is_core else (REFUSED, MAPPED)
        for name in changed:
            if name in refused:
                raise ArgumentError(f"MegatronLMPlugin({name}={getattr(self, name)!r}): {refused[name]}")
        ignored = [name for name in changed if name not in mapped]
        if ignored:
            warnings.warn(f"MegatronLMPlugin: no effect: {', '.join(ignored)}; see docs/megatron.md", stacklevel=2)
        self._check()

    def _check(self) -> None:
        for name in _SIZES:
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise ArgumentError(f"MegatronLMPlugin({name}={getattr(self, name)!r}) is not an integer of 1 or more")
        if not self.gradient_clipping >= 0:
            raise ArgumentError(f"MegatronLMPlugin(gradient_clipping={self.gradient_clipping!r}) is below 0")
        for name in ("recompute_activations", "optimizer_cpu_offload"):
            if getattr(self, name) and self.fsdp_plugin is None and not self.is_core:
                raise ArgumentError(f"MegatronLMPlugin({name}=True) needs use_distributed_optimizer=True")

    @cached_property
    def parallelism_config(self) -> ParallelismConfig | None:
        """The processes that split layers and sequences; the others have data of their own."""
        if self.is_core:
            return None
        return ParallelismConfig(tp_size=self.tp_degree, cp_size=self.context_parallel_size)

    @cached_property
    def fsdp_plugin(self) -> FullyShardedDataParallelPlugin | None:
        """The settings of sharding; None if models are replicated."""
        if self.is_core or not (self.use_distributed_optimizer or self.use_custom_fsdp):
            return None
        return FullyShardedDataParallelPlugin(
            reshard_after_forward=self.use_custom_fsdp,
            cpu_offload=self.optimizer_cpu_offload,
            activation_checkpointing=self.recompute_activations,
        )


class MegatronLMDummyScheduler(DummyScheduler):
    """A placeholder for the schedule of `MegatronLMPlugin`'s fields: `Accelerator.prepare` returns megatron-core's.

    ``total_num_steps`` and ``warmup_num_steps`` count the steps of one process, as for any scheduler of `prepare`. They
    apply where the plug-in has no ``lr_decay_iters`` or ``train_iters``, and no ``lr_warmup_iters``.
    """

    engine, plugin = "megatron-core", "megatron_lm_plugin"

    def __init__(
        self, optimizer: Any, total_num_steps: int | None = None, warmup_num_steps: int = 0, **kwargs: Any
    ) -> None:
        super().__init__(optimizer, total_num_steps, warmup_num_steps, **kwargs)


def _is_core_initialised() -> bool:
    """Return True if the script has set up megatron-core's groups of processes itself."""
    parallel_state = sys.modules.get("megatron.core.parallel_state")
    return parallel_state is not None and bool(parallel_state.model_parallel_is_initialized())
