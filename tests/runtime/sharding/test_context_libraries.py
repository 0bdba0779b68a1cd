"""Models of transformers whose sequences are split have the losses and norms of one process, with every mask."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel import Accelerator
from accel.errors import ArgumentError
from accel.plugins.fsdp import FullyShardedDataParallelPlugin as Plugin
from accel.plugins.parallelism import ParallelismConfig, TorchContextParallelConfig
from accel.state import AcceleratorState, PartialState
from tests.needs import package
from tests.runtime.worlds import run, run_one

PRELOAD = (
    "accel.compat",  # `Trainer` imports accelerate
    "transformers.trainer",
    "transformers.distributed.configuration_utils",
    *(f"transformers.models.{name}.modeling_{name}" for name in ("llama", "mistral", "qwen3_moe", "llama4", "gpt2")),
    "transformers.models.bert.modeling_bert",
    "torch._inductor.compile_fx",
)
package("transformers")

LENGTH, ROWS, WORDS = 16, 4, 64
_SIZES: dict[str, Any] = {
    "vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
_GROUPED = {**_SIZES, "num_key_value_heads": 2}
# Name → class, its configuration's class, and arguments.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", _GROUPED),
    "small": ("LlamaForCausalLM", "LlamaConfig", {**_GROUPED, "num_hidden_layers": 1}),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**_GROUPED, "sliding_window": 5}),
    "experts": (
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {**_GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8},
    ),
    "chunks": (
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        {**_GROUPED, "attention_chunk_size": 6, "head_dim": 8, "num_local_experts": 2, "intermediate_size_mlp": 64},
    ),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {"vocab_size": WORDS, "n_positions": 64, "n_embd": 32, "n_layer": 2,
                                              "n_head": 4, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
    "bert": ("BertForMaskedLM", "BertConfig", {**_SIZES, "hidden_dropout_prob": 0.0,
                                               "attention_probs_dropout_prob": 0.0}),
}  # fmt: skip
FEW = [("llama", "packed"), ("mistral", "left"), ("chunks", "left")]
CASES = [
    *FEW, ("llama", "plain"), ("llama", "left"), ("mistral", "plain"), ("mistral", "right"), ("mistral", "packed"),
    ("experts", "plain"), ("chunks", "plain"), ("gpt2", "packed"), ("bert", "right"),
    ("small", "packed"),
]  # fmt: skip


def _model(name: str, **more: Any) -> Any:
    import transformers

    kind, config, sizes = MODELS[name]
    torch.manual_seed(0)
    return getattr(transformers, kind)(getattr(transformers, config)(**{**sizes, **more}))


def _batch(name: str, rows: str, step: int) -> dict[str, torch.Tensor]:
    """The model's inputs of the whole batch; labels of padding are left out."""
    words = torch.randint(1, WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step))
    lengths = torch.tensor([LENGTH, 9, 12, 5])[:, None]
    places = torch.arange(LENGTH)[None]
    batch = {"input_ids": words, "labels": words.clone()}
    if rows in ("left", "right"):
        real = places < lengths if rows == "right" else places >= LENGTH - lengths
        batch["attention_mask"] = real.long()
        batch["labels"][~real] = -100
    if rows == "packed":
        batch["position_ids"] = torch.cat([torch.arange(count) for count in (6, 7, 3)]).expand(ROWS, -1).clone()
    elif name in ("gpt2", "bert"):
        batch["position_ids"] = places.expand(ROWS, -1).clone()
    if name != "bert":
        batch["shift_labels"] = nn.functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:].contiguous()
    return batch


def _train(accelerator: Any, name: str, rows: str, model: Any = None, steps: int = 2) -> list[float]:
    model = _model(name, use_cache=False) if model is None else model
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    shares, place = accelerator.strategy.data_place
    seen = []
    for step in range(steps):
        full_batch = _batch(name, rows, step)
        targets = full_batch["labels" if name == "bert" else "shift_labels"]
        batch = {key: value.chunk(shares)[place].clone() for key, value in full_batch.items()}
        # One model's mask stays whole.
        uncut = "attention_mask" if name == "mistral" else ""
        buffers = [value for key, value in batch.items() if key != uncut]
        with accelerator.maybe_context_parallel(buffers, [1] * len(buffers), no_restore_buffers=set(buffers)):
            logits = model(**batch).logits
            own = batch["labels" if name == "bert" else "shift_labels"]
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), own.flatten(), reduction="sum")
            parts = accelerator.num_processes // (accelerator.parallelism_config or ParallelismConfig()).tp_size
            loss = loss * parts / (targets != -100).sum()
            accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        seen += [accelerator.reduce(loss.detach(), "mean").item(), norm.item()]
    return seen


def _reset() -> None:
    AcceleratorState._reset_state()
    os.environ.pop("ACCELERATE_USE_FSDP", None)  # an earlier plugin's


def _accelerator(plugin: Plugin | None = None, dynamo: str | None = None, **sizes: Any) -> Any:
    _reset()
    config = ParallelismConfig(**sizes) if sizes else None
    return Accelerator(fsdp_plugin=plugin, parallelism_config=config, dynamo_backend=dynamo)


class Backbone(nn.Module):
    """A model of one's own around a model of transformers, whose mask is a positional argument."""

    def __init__(self) -> None:
        super().__init__()
        self.body = _model("llama", use_cache=False).model
        self.head = nn.Linear(32, WORDS)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **labels: torch.Tensor) -> Any:
        from transformers.modeling_outputs import CausalLMOutput

        return CausalLMOutput(logits=self.head(self.body(input_ids, attention_mask).last_hidden_state))


def _split(accelerator: Any, cases: list[tuple[str, str]]) -> dict[str, list[float]]:
    return {f"{name}, {rows}": _train(accelerator, name, rows) for name, rows in cases}


def _backbone(accelerator: Any) -> dict[str, list[float]]:
    torch.manual_seed(1)
    return {"backbone": _train(accelerator, "llama", "left", Backbone())}


def _checkpointed(accelerator: Any) -> dict[str, list[float]]:
    model = _model("mistral", use_cache=False)
    model.gradient_checkpointing_enable()
    return {"mistral, left": _train(accelerator, "mistral", "left", model)}


def _compiled() -> dict[str, Any]:
    warnings.simplefilter("ignore")
    accelerator = _accelerator(dynamo="aot_eager", cp_size=2)
    model = accelerator.prepare(_model("small", use_cache=False))
    model(**_batch("small", "packed", 7))  # outside of a block first
    return {"compiled": {"small, packed": _train(accelerator, "small", "packed", model)}}


def _trainer(out: str, model: Any = None, **more: Any) -> dict[str, list[float]]:
    """Train on right-padded rows with ``accelerate`` from accel, evaluate and save."""
    import transformers

    _reset()
    rows = [
        {key: value[row] for key, value in _batch("llama", "right", step).items() if key != "shift_labels"}
        for step in range(3)
        for row in range(ROWS)
    ]
    arguments: Any = transformers.TrainingArguments(
        out, use_cpu=True, max_steps=3, per_device_train_batch_size=ROWS, per_device_eval_batch_size=ROWS,
        logging_steps=1, report_to="none", disable_tqdm=True, save_strategy="no", max_grad_norm=0.5, optim="sgd",
        learning_rate=0.1, train_sampling_strategy="sequential", **more,
    )  # fmt: skip
    model = _model("llama") if model is None else model
    trainer = transformers.Trainer(model, arguments, train_dataset=rows, eval_dataset=rows[:ROWS])
    trainer.train()
    log = trainer.state.log_history
    losses = {key: [entry[key] for entry in log if key in entry] for key in ("loss", "grad_norm")}
    trainer.save_model(f"{out}/saved")
    assert '"cp_size"' in arguments.to_json_string() or arguments.parallelism_config is None
    return {"Trainer": [*losses["loss"], *losses["grad_norm"], trainer.evaluate()["eval_loss"]]}


def _alone(out: str) -> dict[str, list[float]]:
    warnings.simplefilter("ignore")  # transformers' own
    import_module("accel.compat")  # for Trainer, which imports accelerate
    _model("llama").save_pretrained(f"{out}/llama")
    accelerator = _accelerator()
    return _split(accelerator, CASES) | _backbone(accelerator) | _trainer(f"{out}/alone")


def _two(out: str) -> dict[str, Any]:
    """Train with every setting for two processes but compilation, in one world."""
    warnings.simplefilter("ignore")
    import_module("accel.compat")
    from transformers import AutoModelForCausalLM
    from transformers.distributed.configuration_utils import DistributedConfig

    sequences: Any = {"cp_size": 2}
    accelerator = _accelerator(**sequences)
    seen: dict[str, Any] = {
        "sequences": _split(accelerator, CASES) | _backbone(accelerator),
        "heads": _split(_accelerator(sp_size=2), [*FEW, ("llama", "plain"), ("bert", "right")]),
        "ring": _split(
            _accelerator(cp_handler=TorchContextParallelConfig("alltoall"), **sequences), [("llama", "plain")]
        ),
        "sharded": _split(_accelerator(Plugin(), **sequences), FEW[:2]),
        "activations computed again": _checkpointed(_accelerator(**sequences)),
        "Trainer, sequences": _trainer(f"{out}/sequences", parallelism_config=ParallelismConfig(cp_size=2)),
    }
    model = AutoModelForCausalLM.from_pretrained(f"{out}/llama", distributed_config=DistributedConfig(tp_size=2))
    seen["Trainer, layers"] = _trainer(f"{out}/layers", model)
    layers = ParallelismConfig(tp_size=2)
    seen["Trainer, layers split by prepare"] = _trainer(f"{out}/prepared", parallelism_config=layers, fsdp=True)
    return seen | {"messages": _messages()}


def _four(out: str) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    sequences: Any = {"cp_size": 2}
    return {
        "four parts": _split(_accelerator(cp_size=4), FEW),
        "layers": _split(_accelerator(tp_size=2, **sequences), FEW[:1]),
        "shards": _split(_accelerator(Plugin(), **sequences), FEW[:1]),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def alone(folder: Path) -> Any:
    return run_one(_alone, str(folder))


@pytest.fixture(scope="module")
def two(folder: Path, alone: Any) -> list[dict[str, Any]]:
    return run(_two, str(folder))


def _compare(world: list[dict[str, Any]], alone: dict[str, list[float]]) -> None:
    for seen in world:
        for setting, results in seen.items():
            for name, numbers in results.items() if setting != "messages" else ():
                assert numbers == pytest.approx(alone[name], rel=2e-6), f"{setting}: {name}"


def test_losses_and_norms_are_those_of_one_process(two: list[dict[str, Any]], alone: dict[str, list[float]]) -> None:
    _compare(two, alone)


def test_compiled(alone: dict[str, list[float]]) -> None:
    _compare(run(_compiled), alone)


def test_on_four_processes(folder: Path, alone: dict[str, list[float]]) -> None:
    _compare(run(_four, str(folder), processes=4), alone)


@pytest.mark.parametrize("run", ["sequences", "layers", "prepared"])
def test_trainer_saves_whole_weights(run: str, folder: Path, two: list[dict[str, Any]]) -> None:
    from safetensors.torch import load_file

    saved, weights = (load_file(folder / f"{name}/saved/model.safetensors") for name in (run, "alone"))
    assert saved.keys() == weights.keys()
    for key, value in weights.items():
        torch.testing.assert_close(saved[key], value, rtol=1e-5, atol=1e-6)


# Mistakes.


def _call(model: Any, batch: dict[str, torch.Tensor], cut: bool = True) -> None:
    accelerator = _accelerator(cp_size=2)
    words = batch["input_ids"]
    buffers = [words if cut else words.clone()]
    model = accelerator.prepare(model)
    with accelerator.maybe_context_parallel(buffers, [1]):
        model(**batch)


def _words(**more: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.ones(2, LENGTH, dtype=torch.long), **more}


def _eager() -> None:
    _call(_model("llama", attn_implementation="eager"), _words())


def _labels() -> None:
    _call(_model("llama"), _words(labels=torch.ones(2, LENGTH, dtype=torch.long)))


def _classification() -> None:
    import transformers

    classifier: Any = transformers.LlamaForSequenceClassification
    _call(classifier(transformers.LlamaConfig(**_GROUPED)), _words())


def _convolutions() -> None:
    import transformers

    _call(
        transformers.Lfm2ForCausalLM(transformers.Lfm2Config(**_GROUPED, layer_types=["conv", "full_attention"])),
        _words(),
    )


def _encoder_and_decoder() -> None:
    import transformers

    config = transformers.T5Config(vocab_size=WORDS, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=4)
    words = torch.ones(2, LENGTH, dtype=torch.long)
    _call(transformers.T5ForConditionalGeneration(config), _words(decoder_input_ids=words))


def _older_masks() -> None:
    from transformers import masking_utils

    current = masking_utils.sdpa_mask

    def sdpa_mask(batch_size: int, cache_position: torch.Tensor, kv_length: int, **more: Any) -> None:
        """Have the arguments of transformers 4.57."""

    masking_utils.sdpa_mask = sdpa_mask  # type: ignore[assignment]
    try:
        _call(_model("llama"), _words())
    finally:
        masking_utils.sdpa_mask = current


def _own_positions() -> None:
    _call(_model("gpt2"), _words())


def _rotary() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    _call(_model("llama", rope_parameters=rope, max_position_embeddings=8), _words())


def _other_mask() -> None:
    _call(_model("llama"), _words(attention_mask=torch.ones(2, 12)))


def _not_cut() -> None:
    _call(_model("llama"), _words(), cut=False)


def _not_prepared() -> None:
    model = _model("llama")
    with _accelerator(cp_size=2).maybe_context_parallel():
        model(**_words())


def _blocks() -> None:
    from transformers.masking_utils import create_causal_mask

    accelerator, model = _accelerator(cp_size=2), _model("llama")
    accelerator.prepare(model)
    with accelerator.maybe_context_parallel():
        embeds = torch.zeros(2, LENGTH // 2, 32)
        create_causal_mask(model.config, embeds, None, None, block_sequence_ids=torch.zeros(2, LENGTH // 2))


CALL = "maybe_context_parallel: "
MISTAKES: list[tuple[Callable[[], None], str]] = [
    (_eager, "LlamaModel computes attention by 'eager', which cannot be split: load it with "
             "attn_implementation='sdpa'"),
    (_labels, "LlamaForCausalLM would shift labels after the sequence was cut: shift them before the block, name them "
              "in buffers, and pass them as shift_labels too"),
    (_classification, "the output of LlamaForSequenceClassification is for whole sequences, and a process has parts of "
                      "them"),
    (_convolutions, "Lfm2Model has conv: only layers of self-attention can be split"),
    (_encoder_and_decoder, "T5ForConditionalGeneration has an encoder and a decoder: only self-attention can be split"),
    (_older_masks, "masks of this version of transformers cannot be split: install 5.23 or later"),
    (_own_positions, "GPT2LMHeadModel would count positions from 0 on each process: pass position_ids, and name them "
                     "in buffers"),
    (_rotary, "rotary positions of LlamaModel depend on the length of sequences above 8, and this one has 16: set "
              "another rope_type"),
    (_other_mask, "attention_mask has shape (2, 12) (sequence: 16, this process: 8): pass a mask of the sequence, or "
                  "name it in buffers"),
    (_not_cut, "LlamaForCausalLM got a sequence of 16, and a process has 8 of 16: name its inputs in buffers"),
    (_not_prepared, "a model of transformers (llama) was not prepared, and would count positions from 0 on each "
                    "process: pass it to accelerator.prepare"),
    (_blocks, "a mask is computed by blockwise_overlay from a tensor of shape (2, 8), over the part of the sequence "
              "that a process has: it cannot be split"),
]  # fmt: skip


def _messages() -> list[str]:
    messages = []
    for mistake, _ in MISTAKES:
        try:
            mistake()
        except ArgumentError as error:
            messages.append(str(error))
    PartialState().wait_for_everyone()  # the first process has the store, for groups of the others
    return messages


def test_mistakes_are_one_line_on_every_process(two: list[dict[str, Any]]) -> None:
    expected = [CALL + words for _, words in MISTAKES]
    assert [seen["messages"] for seen in two] == [expected, expected]
