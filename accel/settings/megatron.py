"""Settings of Megatron-LM, for Accelerate's MegatronLMPlugin."""

from __future__ import annotations

from typing import Any

from .setting import Group, Setting


def _lm(name: str, help: str, kind: str = "yesno", default: Any = None, **rest: Any) -> Setting:
    name = f"megatron_lm_{name}"
    return Setting(name, help, kind, default, env=name.upper(), used_by=("megatron",), **rest)


MEGATRON = Group(
    "Megatron-LM",
    "With --use_megatron_lm.",
    (
        _lm("tp_degree", "processes among which each tensor is split", "positive", 1, metavar="N"),
        _lm("use_custom_fsdp", "Megatron's own fully sharded data parallelism", default=False),
        _lm("no_load_optim", "leave the optimizer's state out when loading", default=False),
        _lm("eod_mask_loss", "no loss for end-of-document tokens", default=False),
        _lm("overlap_cpu_optimizer_d2h_h2d", "copy gradients and parameters while the CPU's optimizer steps",
            default=False),
        _lm("no_save_optim", "leave the optimizer's state out when saving", default=False),
        _lm("optimizer_cpu_offload", "run the optimizer on the CPU", default=False),
        _lm("use_precision_aware_optimizer", "keep the optimizer's state in lower precision", default=False),
        _lm("decoder_last_pipeline_num_layers", "layers of the last pipeline stage (default: an equal share)", "whole",
            metavar="N"),
        _lm("pp_degree", "pipeline stages", "positive", 1, metavar="N"),
        _lm("num_micro_batches", "micro-batches in the pipeline", "whole", metavar="N"),
        _lm("sequence_parallelism", "split sequences too where tensors are split"),
        _lm("recompute_activations", "compute selected activations again in the backward pass"),
        _lm("use_distributed_optimizer", "shard the optimizer's state and gradients among replicas"),
        _lm("gradient_clipping", "the largest norm of the gradients; 0 is none", "number", 1.0, metavar="X"),
        _lm("recompute_granularity", "what is computed again", "text", choices=("full", "selective")),
        _lm("recompute_method", "which layers are", "text", choices=("uniform", "block")),
        _lm("recompute_num_layers", "how many are", "whole", metavar="N"),
        _lm("attention_backend", "Megatron's attention backend", "text", metavar="NAME"),
        _lm("expert_model_parallel_size", "processes among which experts are spread", "whole", metavar="N"),
        _lm("context_parallel_size", "processes among which a sequence is split", "whole", metavar="N"),
        _lm("attention_dropout", "dropout of the attention", "number", metavar="X"),
        _lm("hidden_dropout", "dropout of the hidden layers", "number", metavar="X"),
        _lm("attention_softmax_in_fp32", "compute the attention's softmax in 32 bits"),
        _lm("expert_tensor_parallel_size", "processes among which each expert's tensors are split", "whole",
            metavar="N"),
        _lm("calculate_per_token_loss", "weigh the loss by tokens"),
        _lm("use_rotary_position_embeddings", "rotary position embeddings"),
    ),
    section="megatron_lm_config",
    prefix="megatron_lm_",
    on=("use_megatron_lm", True),
    example="--use_megatron_lm --megatron_lm_tp_degree 2 --megatron_lm_pp_degree 2 train.py",
)  # fmt: skip
