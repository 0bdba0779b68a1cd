"""Models of transformers, split by `prepare` or by `from_pretrained`, train as on one process."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from accel import Accelerator
from accel.errors import ArgumentError
from accel.plugins.fsdp import FullyShardedDataParallelPlugin as Plugin
from accel.plugins.parallelism import ParallelismConfig
from accel.state import AcceleratorState, PartialState
from tests.needs import package
from tests.runtime.worlds import run, run_one

PRELOAD = ("transformers.models.llama.modeling_llama",)

package("transformers")

_SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
_EXPERTS: dict[str, Any] = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8,
}  # fmt: skip
KINDS = ("tied", "llama", "mistral", "experts")


def _model(kind: str, **more: Any) -> Any:
    import transformers

    torch.manual_seed(0)
    if kind == "mistral":
        return transformers.MistralForCausalLM(transformers.MistralConfig(**_SIZES, sliding_window=4, **more))
    if kind == "experts":
        return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**_SIZES, **_EXPERTS, **more))
    config = transformers.LlamaConfig(**{**_SIZES, "tie_word_embeddings": kind == "tied", **more})
    return transformers.LlamaForCausalLM(config)


def _loaded(path: str, **spread: Any) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.distributed.configuration_utils import DistributedConfig

    return AutoModelForCausalLM.from_pretrained(path, distributed_config=DistributedConfig(**spread))


def _train(accelerator: Any, model: Any) -> list[float]:
    """The losses and norms of four steps of the same batches on every mesh."""
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    shares, place = accelerator.strategy.data_place
    seen = []
    for step in range(4):
        rows = torch.randint(0, 64, (8, 12), generator=torch.Generator().manual_seed(step)).chunk(shares)[place]
        loss = model(input_ids=rows, labels=rows).loss
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        optimizer.zero_grad()
        seen += [accelerator.reduce(loss.detach(), "mean").item(), norm.item()]
    return seen


def _alone(folder: str) -> dict[str, list[float]]:
    warnings.simplefilter("ignore")  # transformers' own
    seen = {}
    for kind in KINDS:
        _model(kind).save_pretrained(f"{folder}/{kind}")
        seen[kind] = _train(Accelerator(), _model(kind))
    return seen


def _reset() -> None:
    AcceleratorState._reset_state()
    os.environ.pop("ACCELERATE_USE_FSDP", None)  # an earlier plugin's


def _split(folder: str, kinds: tuple[str, ...], plugin: Plugin | None, spread: dict[str, Any]) -> dict[str, Any]:
    """Models split by `prepare`; and two that `from_pretrained` has spread over the same mesh."""
    warnings.simplefilter("ignore")
    sizes: dict[str, Any] = {"dp_shard_size": spread["fsdp_size"]} if "fsdp_size" in spread else {}
    config = ParallelismConfig(tp_size=2, **sizes)
    accelerator = Accelerator(fsdp_plugin=plugin, parallelism_config=config)
    seen: dict[str, Any] = {}
    for kind in kinds:
        model = _model(kind)
        seen[kind] = _train(accelerator, model)
        if kind == "tied":
            assert model.lm_head.weight is model.model.embed_tokens.weight
    for kind in ("llama", "experts"):
        seen[f"{kind} loaded"] = _train(accelerator, _loaded(f"{folder}/{kind}", **spread))
    return seen


# Mistakes.


def _heads(folder: str) -> None:
    Accelerator(parallelism_config=ParallelismConfig(tp_size=2)).prepare(_model("llama", num_key_value_heads=1))


def _spread(folder: str) -> None:
    Accelerator().prepare(_loaded(f"{folder}/llama", tp_size=2))


def _spread_and_sharded(folder: str) -> None:
    Accelerator(fsdp_plugin=Plugin()).prepare(_loaded(f"{folder}/llama", tp_size=2, fsdp_size=2))


def _sharded(folder: str) -> None:
    Accelerator().prepare(_loaded(f"{folder}/llama", fsdp_size=2))


def _adapted(folder: str) -> None:
    import peft

    model = peft.get_peft_model(_model("llama"), peft.LoraConfig(target_modules=["q_proj"]))
    Accelerator(parallelism_config=ParallelismConfig(tp_size=2)).prepare(model)


SPREAD = (
    "prepare: the layers of the LlamaForCausalLM are split over 2 processes, by from_pretrained, and the configuration "
    "has tp_size=1: pass parallelism_config=ParallelismConfig(tp_size=2) to the Accelerator, and "
    "distributed_config=DistributedConfig(tp_size=2) to from_pretrained"
)
MISTAKES: dict[int, list[tuple[Callable[[str], None], str]]] = {  # by the number of processes
    2: [
        (_heads, "num_key_value_heads (1) of the LlamaForCausalLM is not divisible by tp_size (2)"),
        (_spread, SPREAD),
        (_sharded, "prepare: from_pretrained has sharded the FSDPLlamaForCausalLM over 2 processes: pass "
                   "parallelism_config=ParallelismConfig(dp_shard_size=2) to the Accelerator"),
        (_adapted, "tp_plan: model.layers.0.self_attn.q_proj has an adapter, and tensor parallelism would split the "
                   "layer without it: leave out tp_size, or the adapter"),
    ],
    4: [(_spread_and_sharded, SPREAD.replace("Llama", "FSDPLlama"))],  # `fully_shard` renames the class
}  # fmt: skip


def _messages(folder: str, processes: int) -> list[str]:
    messages = []
    for mistake, _ in MISTAKES[processes]:
        _reset()
        try:
            mistake(folder)
        except ArgumentError as error:
            messages.append(str(error))
    PartialState().wait_for_everyone()  # the first process has the store, for groups of the others
    return messages


def _two(folder: str) -> dict[str, Any]:
    return _split(folder, KINDS, None, {"tp_size": 2}) | {"messages": _messages(folder, 2)}


def _four(folder: str) -> dict[str, Any]:
    seen = _split(folder, ("tied", "experts"), Plugin(), {"tp_size": 2, "fsdp_size": 2})
    return seen | {"messages": _messages(folder, 4)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    package("peft")
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, list[float]]:
    numbers: dict[str, list[float]] = run_one(_alone, str(folder))
    return numbers


@pytest.mark.parametrize(("function", "processes"), [(_two, 2), (_four, 4)])
def test_losses_norms_and_mistakes(
    function: Callable[[str], dict[str, Any]], processes: int, folder: Path, alone: dict[str, list[float]]
) -> None:
    for seen in run(function, str(folder), processes=processes):
        assert seen.pop("messages") == [message for _, message in MISTAKES[processes]]
        for name, numbers in seen.items():
            torch.testing.assert_close(numbers, alone[name.removesuffix(" loaded")], rtol=2e-6, atol=0, msg=name)
