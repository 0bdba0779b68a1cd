"""Settings of parallelism over several dimensions, for Accelerate's ParallelismConfig."""

from __future__ import annotations

from typing import Any

from .setting import Group, Setting

_PREFIX = "parallelism_config_"


def _size(name: str, help: str, kind: str = "positive", default: Any = 1, **rest: Any) -> Setting:
    env = f"PARALLELISM_CONFIG_{name.upper()}"
    return Setting(_PREFIX + name, help, kind, default, env=env, used_by=("parallelism",), **rest)


PARALLELISM = Group(
    "several dimensions",
    "With --use_parallelism_config: the sizes' product is the number of processes.",
    (
        _size("dp_replicate_size", "replicas of the model", metavar="N"),
        _size("dp_shard_size", "processes among which one replica is sharded", metavar="N"),
        _size("tp_size", "processes among which each tensor is split", metavar="N"),
        _size("cp_size", "processes among which a sequence is split (context parallelism)", metavar="N"),
        _size("cp_backend", "what splits it", "text", "torch", choices=("torch",)),
        _size("cp_comm_strategy", "how keys and values travel", "text", "allgather", choices=("allgather", "alltoall"),
              when=(f"{_PREFIX}cp_size", 2)),
        _size("sp_size", "processes among which a sequence is split (DeepSpeed's Ulysses)", metavar="N"),
        _size("sp_backend", "what splits it", "text", "deepspeed", choices=("deepspeed",)),
        _size("sp_seq_length", "the sequences' length, where it is always the same", "whole", None, metavar="N",
              when=(f"{_PREFIX}sp_size", 2)),
        _size("sp_seq_length_is_variable", "whether the length changes between batches", "yesno", True,
              when=(f"{_PREFIX}sp_size", 2)),
        _size("sp_attn_implementation", "the attention to use: sdpa, flash_attention_2, flash_attention_3, or a kernel",
              "text", "sdpa", metavar="NAME", when=(f"{_PREFIX}sp_size", 2)),
    ),
    section="parallelism_config",
    prefix=_PREFIX,
    on=("use_parallelism_config", True),
    example="--use_fsdp --fsdp_version 2 --use_parallelism_config --parallelism_config_tp_size 2 train.py",
)  # fmt: skip
