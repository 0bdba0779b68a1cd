"""Settings of fully sharded data parallelism, for Accelerate's FullyShardedDataParallelPlugin."""

from __future__ import annotations

from typing import Any

from .setting import Group, Setting

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
_WRAPS = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
_PREFETCHES = ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH")
_STATES = ("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT")


def _fsdp(name: str, help: str, kind: str = "text", default: Any = None, **rest: Any) -> Setting:
    env = rest.pop("env", f"FSDP_{name.upper()}")
    style = rest.pop("style", "lower" if kind == "yesno" else "str")
    return Setting(f"fsdp_{name}", help, kind, default, env=env, style=style, used_by=("fsdp",), **rest)


def _numbered(names: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    return tuple((str(number), name) for number, name in enumerate(names, start=1))


FSDP = Group(
    "FSDP",
    "With --use_fsdp.",
    (
        _fsdp("version", "2: fully_shard; 1: settings of FullyShardedDataParallel, mapped to it by accel's runtime",
              default="2", choices=("1", "2")),
        _fsdp("offload_params", "keep parameters and gradients on the CPU", "yesno", False),
        _fsdp("min_num_params", "parameters from which SIZE_BASED_WRAP makes a unit", "whole", 100_000_000,
              metavar="N"),
        _fsdp("sharding_strategy", "what is sharded (version 1)", default="FULL_SHARD", choices=STRATEGIES,
              aliases=_numbered(STRATEGIES)),
        _fsdp("reshard_after_forward", "true or false (version 2), or a sharding strategy (version 1)", default="true",
              choices=("true", "false", *STRATEGIES, "NO_RESHARD"), aliases=(("yes", "true"), ("no", "false")),
              style="lower"),
        _fsdp("auto_wrap_policy", "how modules are made into units", choices=_WRAPS, aliases=_numbered(_WRAPS)),
        _fsdp("transformer_layer_cls_to_wrap", "class names of the layers that TRANSFORMER_BASED_WRAP makes units",
              metavar="NAMES", env="FSDP_TRANSFORMER_CLS_TO_WRAP"),
        _fsdp("backward_prefetch", "when the next unit's parameters are gathered (version 1)", choices=_PREFETCHES,
              aliases=_numbered(_PREFETCHES)),
        _fsdp("state_dict_type", "how the model is saved", choices=_STATES, aliases=_numbered(_STATES)),
        _fsdp("forward_prefetch", "gather the next unit's parameters during the forward pass (version 1)", "yesno",
              False),
        _fsdp("use_orig_params", "allow frozen and trained parameters in one unit (version 1)", "yesno", True),
        _fsdp("cpu_ram_efficient_loading", "only rank 0 reads the checkpoint of a transformers model", "yesno", True),
        _fsdp("sync_module_states", "send rank 0's parameters to all (version 1)", "yesno", True),
        _fsdp("activation_checkpointing", "compute activations again in the backward pass", "yesno", False),
        _fsdp("activation_checkpointing_offload", "keep the inputs of checkpointed layers on the CPU (version 2)",
              "yesno", False),
        _fsdp("ignored_modules", "a regular expression: names of modules that are not sharded", metavar="REGEX",
              flag=False),
    ),
    section="fsdp_config",
    prefix="fsdp_",
    on=("use_fsdp", True),
    example="--use_fsdp --fsdp_version 2 --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP train.py",
)  # fmt: skip
