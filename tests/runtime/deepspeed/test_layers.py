"""DeepSpeed's automatic tensor parallelism: the losses and norms of one process, whole weights, and any other size."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from accel.plugins.parallelism import ParallelismConfig
from accel.state import AcceleratorState
from tests import needs
from tests.runtime.worlds import run, run_one

from .language import (
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

STAGES = (0, 1, 2)
KEYS: dict[str, Any] = {"num_key_value_heads": 2}
Seen = dict[int, dict[str, Any]]
Saved = tuple[Path, Seen]


def _batches(groups: int, rows: int) -> Any:
    return DataLoader(rows_of(groups), batch_size=rows)  # type: ignore[arg-type]


def _whole() -> dict[str, Run]:
    return {
        f"{groups} groups, window {window}": train(
            accelerator_of(window), _batches(groups, ROWS * groups), loss_of_whole, **KEYS
        )
        for groups in (1, 2)
        for window in WINDOWS
    }


@pytest.fixture(scope="module")
def whole() -> dict[str, Run]:
    runs: dict[str, Run] = run_one(_whole)
    check_clipped(runs)
    return runs


def _accelerators(size: int) -> Any:
    """Return a function of the stage and the window that makes an `Accelerator` with layers over ``size`` processes."""
    quiet()
    config: dict[str, Any] = {"parallelism_config": ParallelismConfig(tp_size=size)} if size > 1 else {}
    plugins = {str(stage): plugin(stage) for stage in STAGES}
    state = accelerator_of(deepspeed_plugins=plugins, **config).state

    def make(stage: int, window: int = 1) -> Any:
        state.select_deepspeed_plugin(str(stage))
        return accelerator_of(window)

    return make


def _metrics(accelerator: Any) -> list[int]:
    """The numbers below 7 that `gather_for_metrics` returns from a prepared loader, in order."""
    numbers = accelerator.prepare(DataLoader(torch.arange(7), batch_size=2))  # type: ignore[arg-type]
    return sorted(number for batch in numbers for number in accelerator.gather_for_metrics(batch).tolist())


def _split() -> tuple[dict[str, Run], list[int]]:
    make = _accelerators(2)
    runs = {}
    for stage in STAGES:
        for window in WINDOWS:
            accelerator = make(stage, window)
            groups = accelerator.num_processes // 2
            name = f"stage {stage}, {groups} groups, window {window}"
            runs[name] = train(accelerator, _batches(groups, ROWS), loss_of_whole, **KEYS)
    return runs, _metrics(accelerator)


@pytest.mark.parametrize("processes", [2, 4])
def test_losses_and_norms_are_those_of_one_process(whole: dict[str, Run], processes: int) -> None:
    for seen, metrics in run(_split, processes=processes):
        assert metrics == list(range(7))
        assert len(seen) == len(STAGES) * len(WINDOWS)
        assert_near(seen, whole)


def _prepared(accelerator: Any, seed: int, tied: bool) -> tuple[Any, Any, Any]:
    model = causal_model(tie_word_embeddings=tied, **KEYS)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    batches = _batches(2, 2 * ROWS // accelerator.strategy.data_place[0])
    prepared: tuple[Any, Any, Any] = accelerator.prepare(model, optimizer, batches)
    return prepared


def _saved(folder: Path, size: int) -> Seen:
    """Save after an epoch at every stage, train on, and come back: into the same engine, then into a fresh one."""
    make = _accelerators(size)
    seen: Seen = {}
    for stage in STAGES:
        tied = stage == 1
        accelerator = make(stage)
        model, optimizer, batches = _prepared(accelerator, 0, tied)
        epoch_of(accelerator, model, optimizer, batches, loss_of_whole)
        path = folder / str(stage)
        accelerator.save_state(path)
        weights = accelerator.get_state_dict(model)
        accelerator.save_model(model, folder / f"model {stage}")
        accelerator.unwrap_model(model).save_pretrained(
            folder / f"pretrained {stage}", is_main_process=accelerator.is_main_process, state_dict=dict(weights)
        )
        after = epoch_of(accelerator, model, optimizer, batches, loss_of_whole)
        accelerator.load_state(path)
        again = epoch_of(accelerator, model, optimizer, batches, loss_of_whole)
        accelerator.free_memory()
        accelerator = make(stage)
        model, optimizer, batches = _prepared(accelerator, 5, tied)
        accelerator.load_state(path)
        loaded = accelerator.get_state_dict(model)
        fresh = epoch_of(accelerator, model, optimizer, batches, loss_of_whole)
        accelerator.free_memory()
        seen[stage] = {
            "after": after,
            "again": again,
            "fresh": fresh,
            "weights": {name: value.tolist() for name, value in weights.items()},
            "loaded": {name: value.tolist() for name, value in loaded.items()},
        }
    return seen


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Return the folder of the checkpoints of two processes that split layers, and their runs."""
    folder = tmp_path_factory.mktemp("saved")
    first, second = run(_saved, folder, 2)
    for stage in STAGES:
        for name in ("after", "again", "fresh"):
            assert first[stage][name] == second[stage][name]
    return folder, first


def test_a_run_resumes_to_the_bit(saved: Saved) -> None:
    for stage, runs in saved[1].items():
        assert runs["again"] == runs["after"], stage
        assert runs["fresh"] == runs["after"], stage
        assert runs["loaded"] == runs["weights"], stage


def test_whole_weights_are_saved(saved: Saved) -> None:
    from transformers import LlamaForCausalLM

    from accel.tensor_files import SafetensorsFile, read_all

    folder, seen = saved
    for stage in STAGES:
        weights = seen[stage]["weights"]
        expected = causal_model(tie_word_embeddings=stage == 1, **KEYS).state_dict()
        assert {name: torch.tensor(value).shape for name, value in weights.items()} == {
            name: value.shape for name, value in expected.items()
        }
        file = SafetensorsFile(folder / f"model {stage}" / "model.safetensors")
        written = {name: read_all(value).tolist() for name, value in file.tensors.items()}
        assert written == {name: value for name, value in weights.items() if name in written}
        assert set(weights) - set(written) <= {"lm_head.weight"}  # tied
        again = LlamaForCausalLM.from_pretrained(folder / f"pretrained {stage}").state_dict()
        assert {name: value.tolist() for name, value in again.items()} == weights


def _resumed(folder: Path, size: int) -> dict[int, Run | str]:
    """Load each stage's checkpoint where ``size`` processes split layers, and train on."""
    make = _accelerators(size)
    runs: dict[int, Run | str] = {}
    for stage in STAGES:
        accelerator = make(stage)
        model, optimizer, batches = _prepared(accelerator, 5, tied=stage == 1)
        problem = message_of(lambda: accelerator.load_state(folder / str(stage)))  # noqa: B023 - called at once
        if problem == "no error":
            runs[stage] = epoch_of(accelerator, model, optimizer, batches, loss_of_whole)
        else:
            runs[stage] = problem
        accelerator.free_memory()
    return runs


def _compare(folder: Path, saved_size: int, size: int, processes: int, expected: Seen) -> None:
    runs = run(_resumed, folder, size, processes=processes)[0] if processes > 1 else run_one(_resumed, folder, size)
    for stage, seen in runs.items():
        if stage == 0 and size != saved_size:
            what = f"was saved with tp_size={saved_size}, this run has tp_size={size}: set it to {saved_size}"
            assert str(seen).endswith(what)
        else:
            assert not isinstance(seen, str), seen
            losses, norms = seen
            assert losses == pytest.approx(expected[stage]["after"][0], abs=1e-5), stage
            assert norms == pytest.approx(expected[stage]["after"][1], abs=1e-5), stage


@pytest.mark.parametrize(("size", "processes"), [(1, 1), pytest.param(1, 2, marks=pytest.mark.long), (2, 4)])
def test_a_run_resumes_with_other_sizes(saved: Saved, size: int, processes: int) -> None:
    _compare(saved[0], 2, size, processes, saved[1])


@pytest.mark.long
def test_a_run_of_whole_layers_resumes_with_split_ones(tmp_path: Path) -> None:
    expected = run(_saved, tmp_path, 1)[0]
    _compare(tmp_path, 1, 2, 2, expected)


_CANNOT = "tp_size under DeepSpeed: DeepSpeed cannot split"


def _sizes() -> dict[str, str]:
    """Sizes and models that DeepSpeed cannot split, each by an `Accelerator` of its own."""
    quiet()
    import transformers

    def prepared(model: Any, stage: int = 2, config: dict[str, Any] | None = None, **sizes: int) -> Callable[[], Any]:
        def action() -> None:
            AcceleratorState._reset_state()
            split = ParallelismConfig(**{"tp_size": 2, **sizes})  # type: ignore[arg-type]
            own = plugin(stage) if config is None else plugin(None, hf_ds_config=config)  # type: ignore[arg-type]
            accelerator = accelerator_of(deepspeed_plugin=own, parallelism_config=split)
            accelerator.prepare(model, sgd_of(model), _batches(1, ROWS))

        return action

    phi = transformers.Phi3Config(**SIZES, num_attention_heads=4, num_key_value_heads=2, pad_token_id=0)  # type: ignore[arg-type]
    gpt2 = transformers.GPT2Config(vocab_size=WORDS, n_embd=32, n_layer=2, n_head=4)
    file = {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 1}
    messages = {
        "stage 3": message_of(prepared(None, stage=3)),
        "world": message_of(prepared(None, tp_size=4)),
        "file": message_of(prepared(None, config={**file, "tensor_parallel": {"autotp_size": 4}})),
        "text": message_of(prepared(None, config={**file, "tensor_parallel": {"autotp_size": "two"}})),
        "no layers": message_of(prepared(torch.nn.BatchNorm1d(2))),
        "fused": message_of(prepared(transformers.Phi3ForCausalLM(phi))),
        "transposed": message_of(prepared(transformers.GPT2LMHeadModel(gpt2))),
    }
    torch.distributed.barrier()  # the store of the first process serves the groups of the others
    return messages


def test_what_cannot_be_split_is_one_line() -> None:
    first, second = run(_sizes)
    assert first == second == {
        "stage 3": "DeepSpeed: tp_size=2 is for stages 0 to 2: set zero_stage=2 or tp_size=1",
        "world": "ParallelismConfig: number of processes (2) is not divisible by tp_size=4",
        "file": "tp_size is 2, but tensor_parallel.autotp_size is 4 in the DeepSpeed configuration: remove one of the "
                "two",
        "text": "tensor_parallel.autotp_size is 'two' in the DeepSpeed configuration: it must be a number of processes",
        "no layers": f"{_CANNOT} BatchNorm1d over 2 processes: Not able to determine model policy automatically. "
                     "Please provide policy.",
        "fused": f"{_CANNOT} Phi3ForCausalLM over 2 processes: HuggingFace tp_plan contains unsupported partition "
                 "style(s): ['rowwise_split_input']. Applying only the supported entries could shard one half of a "
                 "column/row pair, so the plan is rejected as a whole. Provide an explicit "
                 "'tensor_parallel.partition_config' for this model instead.",
        "transposed": f"{_CANNOT} GPT2LMHeadModel over 2 processes: AutoTP not supported for model. Please use kernel "
                      "injection since container policy for model exists.",
    }  # fmt: skip
