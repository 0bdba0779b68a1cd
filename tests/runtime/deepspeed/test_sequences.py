"""DeepSpeed's sequence parallelism has the losses and norms of one process, and refuses what it would compute wrong."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from accel.plugins.parallelism import DeepSpeedSequenceParallelConfig, ParallelismConfig
from accel.state import AcceleratorState
from tests import needs
from tests.runtime.worlds import run, run_one

from .language import (
    BATCHES,
    LENGTH,
    ROWS,
    SIZES,
    WINDOWS,
    WORDS,
    causal_model,
    check_clipped,
    epoch_of,
    loss_of_whole,
    rows_of,
    sgd_of,
    train,
)
from .training import Run, accelerator_of, assert_near, message_of, plugin, quiet

if find_spec("deepspeed") is None:
    needs.missing("deepspeed", "pip install --no-build-isolation -c constraints.txt deepspeed")
needs.package("transformers")

STAGES = (0, 2, 3)


def _loss(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The mean over the tokens of a sequence, as Accelerate's documents compute it.

    They use `torch.distributed.nn.functional.all_gather`, whose backward fails over gloo in a group without rank 0.
    """
    from deepspeed.utils import groups
    from torch.distributed._functional_collectives import all_gather_tensor_autograd

    group = groups._get_sequence_parallel_group()
    count = (batch["shift_labels"] != -100).sum()
    own = model(**batch, labels=batch["shift_labels"]).loss * count
    sums = all_gather_tensor_autograd(torch.stack([own, count]), 0, group).view(-1, 2).sum(0)
    loss: torch.Tensor = sums[0] / sums[1].detach()
    return loss


def _in_steps(groups: int) -> list[dict[str, torch.Tensor]]:
    """Return the rows in the order of training by ``groups`` groups of two processes."""
    order = torch.arange(BATCHES * ROWS * groups).view(-1, groups, 2, ROWS).transpose(1, 2)
    rows = rows_of(groups)
    return [rows[index] for index in order.flatten()]


def _whole() -> dict[str, Run]:
    runs = {}
    for groups in (1, 2):
        batches: Any = DataLoader(_in_steps(groups), batch_size=ROWS * groups)  # type: ignore[arg-type]
        for window in WINDOWS:
            runs[f"{groups} groups, window {window}"] = train(accelerator_of(window), batches, loss_of_whole)
    return runs


@pytest.fixture(scope="module")
def whole() -> dict[str, Run]:
    runs: dict[str, Run] = run_one(_whole)
    check_clipped(runs)
    return runs


def _split() -> dict[str, Run]:
    quiet()
    config = ParallelismConfig(sp_size=2)
    plugins = {str(stage): plugin(stage) for stage in STAGES}
    accelerator = accelerator_of(deepspeed_plugins=plugins, parallelism_config=config)
    groups = accelerator.num_processes // 2
    batches: Any = DataLoader(rows_of(groups), batch_size=ROWS)  # type: ignore[arg-type]
    assert (accelerator.parallelism_config.sp_size, config.data_parallel_size) == (2, groups)
    runs = {}
    for stage in STAGES:
        accelerator.state.select_deepspeed_plugin(str(stage))
        for window in WINDOWS:
            name = f"stage {stage}, {groups} groups, window {window}"
            runs[name] = train(accelerator_of(window), batches, _loss)
    return runs


@pytest.mark.parametrize("processes", [2, 4])
def test_losses_and_norms_are_those_of_one_process(whole: dict[str, Run], processes: int) -> None:
    for seen in run(_split, processes=processes):
        assert len(seen) == len(STAGES) * len(WINDOWS)
        assert_near(seen, whole)


def _prepared(stage: int, groups: int, split: bool) -> tuple[Any, Any, Any, Any]:
    """An accelerator, a model, its optimizer and batches; ``groups`` groups of processes read the rows of a step."""
    quiet()
    AcceleratorState._reset_state()
    config = ParallelismConfig(sp_size=2) if split else None
    accelerator = accelerator_of(deepspeed_plugin=plugin(stage), parallelism_config=config)
    rows, size = (rows_of(groups), ROWS) if split else (_in_steps(groups), ROWS * groups)
    model = causal_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer, batches = accelerator.prepare(model, optimizer, DataLoader(rows, batch_size=size))  # type: ignore[arg-type]
    return accelerator, model, optimizer, batches


def _saved(folder: Path) -> dict[int, tuple[Run, Run]]:
    """Save after an epoch, train on, come back and train again, at every stage."""
    runs = {}
    for stage in STAGES:
        prepared = _prepared(stage, 1, split=True)
        epoch_of(*prepared, _loss)
        prepared[0].save_state(folder / str(stage))
        after = epoch_of(*prepared, _loss)
        prepared[0].load_state(folder / str(stage))
        runs[stage] = after, epoch_of(*prepared, _loss)
        prepared[0].free_memory()
    return runs


def _resumed(folder: Path, split: bool) -> dict[tuple[int, int], Run]:
    """Load the checkpoint of each stage, and train on: without a split on the rows of one group and of two groups."""
    runs = {}
    for stage in STAGES:
        for groups in (2,) if split else (1, 2):
            prepared = _prepared(stage, groups, split)
            prepared[0].load_state(folder / str(stage))
            runs[stage, groups] = epoch_of(*prepared, _loss if split else loss_of_whole)
            prepared[0].free_memory()
    return runs


def test_a_run_resumes_with_whole_sequences_and_with_more_groups(tmp_path: Path) -> None:
    first, second = run(_saved, tmp_path)
    assert first == second
    assert all(again == after for after, again in first.values())
    unsplit = run_one(_resumed, tmp_path, False)
    split = run(_resumed, tmp_path, True, processes=4)[0]
    for stage in STAGES:
        for group, expected in ((1, first[stage][0]), (2, split[stage, 2])):
            losses, norms = unsplit[stage, group]
            assert losses == pytest.approx(expected[0], abs=1e-5), stage
            assert norms == pytest.approx(expected[1], abs=1e-5), stage


def _sizes() -> dict[str, str]:
    """Sizes and models that DeepSpeed cannot split, each by an `Accelerator` of its own."""
    quiet()
    import transformers

    def prepared(model: Any, attention: str | None = None, **sizes: int) -> Callable[[], Any]:
        def action() -> None:
            AcceleratorState._reset_state()
            handler = DeepSpeedSequenceParallelConfig(sp_attn_implementation=attention)
            config = ParallelismConfig(sp_handler=handler, **{"sp_size": 2, **sizes})  # type: ignore[arg-type]
            accelerator = accelerator_of(deepspeed_plugin=plugin(2), parallelism_config=config)
            accelerator.prepare(model, sgd_of(model), DataLoader(rows_of(1), batch_size=ROWS))  # type: ignore[arg-type]

        return action

    t5 = transformers.T5Config(vocab_size=WORDS, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=4)
    bert = transformers.BertConfig(**SIZES, num_attention_heads=4)  # type: ignore[arg-type]
    return {
        "cp": message_of(prepared(None, cp_size=2, sp_size=1)),
        "both": message_of(prepared(None, tp_size=2)),
        "world": message_of(prepared(None, sp_size=4)),
        "no model of transformers": message_of(prepared(torch.nn.Linear(2, 2))),
        "eager": message_of(prepared(causal_model(attn_implementation="eager"))),
        "other attention": message_of(prepared(causal_model(), attention="flash_attention_2")),
        "heads": message_of(prepared(causal_model(num_attention_heads=3, hidden_size=24))),
        "encoder": message_of(prepared(transformers.T5ForConditionalGeneration(t5))),
        "linear": message_of(prepared(causal_model("Llama", layer_types=["linear_attention", "full_attention"]))),
        "loss": message_of(prepared(transformers.BertForMaskedLM(bert))),
    }


def test_what_cannot_be_split_is_one_line() -> None:
    first, second = run(_sizes)
    assert first == second == {
        "cp": "ParallelismConfig(cp_size=2) and deepspeed_plugin: use sp_size",
        "both": "DeepSpeed: tp_size=2 and sp_size=2: an engine splits layers or sequences, not both",
        "world": "ParallelismConfig: number of processes (2) is not divisible by sp_size=4",
        "no model of transformers": "sp_size under DeepSpeed needs a model of transformers, not a Linear",
        "eager": "sp_size under DeepSpeed: LlamaForCausalLM computes attention by 'eager': load it with "
                 "attn_implementation='sdpa'",
        "other attention": "sp_size under DeepSpeed: LlamaForCausalLM computes attention by 'sdpa': load it with "
                           "attn_implementation='flash_attention_2'",
        "heads": "sp_size under DeepSpeed: 3 heads (1 of keys) cannot be shared equally by 2 processes",
        "encoder": "sp_size under DeepSpeed: T5ForConditionalGeneration has an encoder and a decoder: only "
                   "self-attention can be split",
        "linear": "sp_size under DeepSpeed: LlamaForCausalLM has linear_attention: only layers of self-attention can "
                  "be split",
        "loss": "sp_size under DeepSpeed is for models with the loss of next tokens, which BertForMaskedLM does not "
                "have",
    }  # fmt: skip


def _batches() -> dict[str, str]:
    """Batches that DeepSpeed's adapter or attention cannot split."""
    quiet()
    accelerator = accelerator_of(deepspeed_plugin=plugin(2), parallelism_config=ParallelismConfig(sp_size=2))
    words = torch.ones(4, LENGTH, dtype=torch.long)
    plain = {"input_ids": words, "labels": words}

    def loader(rows: dict[str, torch.Tensor]) -> Any:
        data = [{key: item[index] for key, item in rows.items()} for index in range(4)]
        return accelerator.prepare(DataLoader(data, batch_size=ROWS))  # type: ignore[arg-type]

    early = message_of(lambda: accelerator.deepspeed_ulysses_dl_adapter(loader(plain), None))
    model = causal_model("Mistral", sliding_window=LENGTH)
    engine, _, same = accelerator.prepare(model, sgd_of(model), unsplit := loader(plain))
    assert same.loader is unsplit
    assert accelerator.deepspeed_ulysses_dl_adapter(same, engine) is same

    def split(**more: torch.Tensor) -> Callable[[], Any]:
        rows = {key: item for key, item in {**plain, **more}.items() if item is not None}
        return lambda: next(iter(accelerator.deepspeed_ulysses_dl_adapter(loader(rows), engine)))

    def through(batches: Any, training: bool = True) -> Callable[[], Any]:
        engine.train(training)
        return lambda: [engine(input_ids=batch["input_ids"]) for batch in batches]

    other = causal_model("Mistral", sliding_window=LENGTH).train()
    window = {"input_ids": torch.ones(4, 2 * LENGTH, dtype=torch.long), "labels": torch.ones(4, 2 * LENGTH)}
    start = torch.arange(LENGTH) % 4
    return {
        "no model yet": early,
        "not prepared": message_of(lambda: accelerator.deepspeed_ulysses_dl_adapter(DataLoader(rows_of(1)), engine)),  # type: ignore[arg-type]
        "labels": message_of(split(labels=None)),  # type: ignore[arg-type]
        "length": message_of(split(input_ids=words[:, 1:], labels=words[:, 1:])),
        "other tensor": message_of(split(images=torch.ones(4, 3))),
        "left padding": message_of(split(attention_mask=(torch.arange(LENGTH) > 1).long().expand(4, -1))),
        "packed": message_of(split(position_ids=start.expand(4, -1))),
        "not split": message_of(through(unsplit)),
        "another model": message_of(lambda: [other(input_ids=batch["input_ids"]) for batch in unsplit]),
        "evaluation": message_of(through(same, training=False)),
        "evaluation of whole": message_of(through(unsplit, training=False)),
        "window": message_of(through(accelerator.deepspeed_ulysses_dl_adapter(loader(window), engine))),
        "window is long enough": message_of(through(same)),
    }


def test_batches_that_cannot_be_split_are_one_line() -> None:
    first, second = run(_batches)
    assert first == second == {
        "no model yet": "deepspeed_ulysses_dl_adapter: prepare the model and its optimizer first",
        "not prepared": "deepspeed_ulysses_dl_adapter: pass a loader that accelerator.prepare has returned",
        "labels": "sp_size under DeepSpeed: a batch must be a dict with input_ids and labels: this one has input_ids",
        "length": "sp_size under DeepSpeed: sequence length (7) is not divisible by sp_size (2): pad it to 8",
        "other tensor": "sp_size under DeepSpeed: images of shape (2, 3) cannot be split as input_ids of shape (2, 8): "
                        "leave it out of the batch",
        "left padding": "sp_size under DeepSpeed: attention_mask has padding before tokens, which is not masked: pad "
                        "on the right",
        "packed": "sp_size under DeepSpeed: position_ids restart within a row, and 'sdpa' would attend across "
                  "packed sequences: use flash attention",
        "not split": "sp_size under DeepSpeed: the batches of this loader are not split: prepare it in one call with "
                     "the model, or by deepspeed_ulysses_dl_adapter(loader, model)",
        "another model": "no error",
        "evaluation": "sp_size under DeepSpeed: a model in evaluation has whole sequences: prepare its loader in a "
                      "call of prepare() without the model",
        "evaluation of whole": "no error",
        "window": "sp_size under DeepSpeed: 'sdpa' would ignore the sliding window of 8 in a sequence of 16: use flash "
                  "attention",
        "window is long enough": "no error",
    }  # fmt: skip
