"""A small model of megatron-core, its batches and its training, for tests under the stand-in for CUDA."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from accel import Accelerator
from accel.plugins.megatron import MegatronLMPlugin
from tests.runtime.sharding.cuda_by_cpu import install

Settings = dict[str, Any]
CLIPPED = 0.3
ROWS = 8  # of a batch of all processes
STEPS = 3


def provider(
    pre_process: bool = True, post_process: bool = True, *, sizes: Settings | None = None, **changes: Any
) -> Any:
    """Return a small GPT. ``sizes``: the parallel sizes of the plug-in."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    sizes = sizes or {}
    options: Settings = {
        "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "use_cpu_initialization": True,
        "hidden_dropout": 0.0, "attention_dropout": 0.0, "gradient_accumulation_fusion": False,
        "pipeline_dtype": torch.float, "masked_softmax_fusion": False, "bias_dropout_fusion": False,
        "tensor_model_parallel_size": sizes.get("tp_degree", 1),
        "pipeline_model_parallel_size": sizes.get("pp_degree", 1),
        "expert_model_parallel_size": sizes.get("expert_model_parallel_size", 1),
        "gated_linear_unit": True, "activation_func": torch.nn.functional.silu, "bias_activation_fusion": False,
        "add_bias_linear": False,
    } | changes  # fmt: skip
    config = TransformerConfig(**options)
    spec = get_gpt_layer_local_spec(config.num_moe_experts)
    ends = {"pre_process": pre_process, "post_process": post_process}
    return GPTModel(config, spec, 64, 16, share_embeddings_and_output_weights=True, **ends)


def accelerator_of(
    steps: int = 1, changes: Settings | None = None, precision: str | None = None, seed: int = 0, **settings: Any
) -> Accelerator:
    install()
    torch.manual_seed(seed)
    sizes = {name: value for name, value in settings.items() if name.endswith(("degree", "size"))}
    build = partial(provider, sizes=sizes, **(changes or {}))
    fields: Settings = {"gradient_clipping": CLIPPED, "custom_model_provider_function": build, **settings}
    return Accelerator(
        mixed_precision=precision, megatron_lm_plugin=MegatronLMPlugin(**fields), gradient_accumulation_steps=steps
    )


class Rows(torch.utils.data.Dataset[Any]):
    """Sequences of random tokens, whose first ones have no label."""

    def __len__(self) -> int:
        return ROWS * STEPS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = torch.randint(0, 64, (12,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": row, "labels": torch.cat([torch.full((3,), -100), row[3:]])}


def loader(accelerator: Accelerator) -> Any:
    plugin = accelerator.state.megatron_lm_plugin
    assert plugin is not None
    share = ROWS // plugin.num_micro_batches // accelerator.strategy.data_place[0]
    return torch.utils.data.DataLoader(Rows(), batch_size=share)


def prepared(accelerator: Accelerator) -> Any:
    placeholder = torch.nn.Linear(1, 1)
    optimizer = torch.optim.AdamW(placeholder.parameters(), lr=0.01)
    return accelerator.prepare(placeholder, optimizer, loader(accelerator))


def train(accelerator: Accelerator, model: Any, optimizer: Any, batches: Any) -> list[tuple[float, float]]:
    """The loss of every batch, and the norm of every step."""
    seen = []
    for batch in batches:
        with accelerator.accumulate(model):
            loss = model(**batch)
            accelerator.backward(loss)
            norm = accelerator.clip_grad_norm_(model.parameters(), CLIPPED) if accelerator.sync_gradients else 0.0
            optimizer.step()
            optimizer.zero_grad()
        seen.append((loss.item(), float(norm)))
    return seen


def forget(accelerator: Accelerator) -> None:
    """Make place for an `Accelerator` with other sizes."""
    from megatron.core import parallel_state

    accelerator.free_memory()
    accelerator.state._reset_state()
    accelerator.gradient_state._reset_state()
    parallel_state.destroy_model_parallel()


def weights(accelerator: Accelerator, model: Any) -> dict[str, list[Any]]:
    return {name: value.tolist() for name, value in accelerator.get_state_dict(model).items()}


def evaluate(model: Any, batches: Any) -> list[float]:
    model.eval()
    with torch.no_grad():
        losses = [model(**batch).item() for batch in batches]
    model.train()
    return losses
