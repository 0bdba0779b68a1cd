"""Pipelines for inference return on 2 and 4 processes what one process returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from accel import PartialState, prepare_pippy
from accel.errors import ArgumentError
from accel.inference import find_pippy_batch_size, generate_device_map
from tests.runtime.worlds import outcomes, run

PRELOAD = ("torch.distributed.pipelining", "transformers.models.llama.modeling_llama")


@dataclass
class Scores:
    """An output that is a dataclass."""

    scores: torch.Tensor
    hidden: torch.Tensor
    kind: str = "scores"
    cache: object = None


class Net(nn.Module):
    """Blocks that all read the mask and a scale without rows; the first and last share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(6, 8)
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])
        self.blocks[3].weight = self.blocks[0].weight
        self.leave = nn.Linear(8, 3)
        self.unused = nn.Linear(2, 2)

    def forward(self, rows: torch.Tensor, mask: torch.Tensor, scale: torch.Tensor, times: int = 1) -> Scores:
        first = hidden = torch.relu(self.enter(rows)) * mask
        for block in self.blocks:
            hidden = hidden + torch.relu(block(hidden)) * mask * scale * times
        return Scores(self.leave(hidden), first, cache=[object()])


def net() -> Net:
    torch.manual_seed(3)
    return Net().eval()


def batch(rows: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return {
        "rows": torch.randn(rows, 6, generator=generator),
        "mask": torch.ones(rows, 8).tril(5),
        "scale": torch.tensor([0.5] * 8),
    }


SIZES = [8, 7, 1, 3, 16, 8]


def everywhere() -> list[Any]:
    """The outputs for batches of `SIZES` rows, and that only the main process's batch counts."""
    model = prepare_pippy(net(), example_kwargs={**batch(6), "times": 2}, gather_output=True)
    outputs = []
    for rows in SIZES:
        inputs = batch(rows)
        output = model(inputs["rows"], **{k: v for k, v in inputs.items() if k != "rows"}, times=2)
        outputs.append([output.scores.tolist(), output.hidden.tolist(), type(output).__name__, output.kind])
        assert not output.scores.requires_grad
    main = PartialState().is_main_process
    last = model(*batch(5).values(), 2) if main else model()
    return [*outputs, last.scores.tolist()]


def here() -> list[Any]:
    model = net()
    with torch.no_grad():
        outputs = [model(**batch(rows), times=2) for rows in [*SIZES, 5]]
    return [[o.scores.tolist(), o.hidden.tolist(), "Scores", "scores"] for o in outputs[:-1]] + [
        outputs[-1].scores.tolist()
    ]


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_outputs_are_those_of_one_process(processes: int) -> None:
    expected = here()
    for outputs in run(everywhere, processes=processes):
        for output, reference in zip(outputs[:-1], expected[:-1], strict=True):
            assert [torch.tensor(o).shape for o in output[:2]] == [torch.tensor(r).shape for r in reference[:2]]
            assert output[0] == [pytest.approx(row, abs=1e-6) for row in reference[0]]
            assert output[1] == [pytest.approx(row, abs=1e-6) for row in reference[1]]
            assert output[2:] == reference[2:]
        assert outputs[-1] == [pytest.approx(row, abs=1e-6) for row in expected[-1]]


def on_the_last() -> Any:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    prepared = prepare_pippy(model, split_points=["2"], example_args=(torch.ones(1, 4),), num_chunks=3)
    assert prepared is model
    assert vars(model)["hf_split_points"] == ["2"]
    first = model(torch.ones(5, 4))
    prepare_pippy(model, split_points="2", example_args=(torch.ones(6, 3, 4),))
    second = model(torch.ones(5, 3, 4))
    return [None if output is None else list(output.shape) for output in (first, second)]


def test_the_last_process_has_the_output() -> None:
    assert run(on_the_last) == [[None, None], [[5, 2], [5, 3, 2]]]


def of_transformers() -> list[float]:
    import transformers as hf

    sizes: Any = {"vocab_size": 64, "num_layers": 2, "num_heads": 2, "d_model": 16, "d_kv": 8, "d_ff": 32}
    more: Any = {"num_hidden_layers": 3, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 32}
    torch.manual_seed(0)
    models: list[Any] = [
        hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=64, tie_word_embeddings=True, **more)),
        hf.T5ForConditionalGeneration(hf.T5Config(**sizes)),
    ]
    mask = torch.ones(5, 8, dtype=torch.long)
    mask[2, 5:] = 0
    of_all = {"input_ids": torch.arange(40).view(5, 8), "attention_mask": mask}
    differences = []
    for model in models:
        model.eval()
        inputs = {**of_all, "decoder_input_ids": of_all["input_ids"][:, :6]} if hasattr(model, "decoder") else of_all
        with torch.no_grad():
            alone = model(**inputs)
        example = {name: value[:4] for name, value in inputs.items()}
        output = prepare_pippy(model, example_kwargs=example, gather_output=True)(**inputs)
        assert type(output) is type(alone)
        assert output["logits"] is output.logits
        differences.append((output.logits - alone.logits).abs().max().item())
    return differences


def test_models_of_transformers() -> None:
    for differences in run(of_transformers, processes=3):
        assert max(differences) < 1e-6


def loss(model: nn.Module) -> None:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.model(rows).mean()
            return result

    prepare_pippy(Loss(), example_args=(torch.ones(4, 4),))


ROWS = (torch.ones(4, 4),)
MISTAKES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "no example": (prepare_pippy, "prepare_pippy needs example_args or example_kwargs with a tensor that has rows"),
    "no module": (
        lambda model: prepare_pippy(model, ["1.weigh"], example_args=ROWS),
        "prepare_pippy: Sequential has no module '1.weigh' to split at",
    ),
    "few": (
        lambda model: prepare_pippy(model[:1], example_args=ROWS),
        "prepare_pippy: Sequential is split into 1 stages for 2 processes: pass 1 split_points, or start 1 processes",
    ),
    "many": (
        lambda model: prepare_pippy(model, ["1", "2"], example_args=ROWS),
        "prepare_pippy: Sequential is split into 3 stages for 2 processes: pass 1 split_points, or start 3 processes",
    ),
    "not called": (
        lambda model: prepare_pippy(net(), ["unused"], example_kwargs=batch(4)),
        "prepare_pippy: split_points unused made 1 stages for 2 processes: forward must call each of these modules "
        "once",
    ),
    "no chunks": (
        lambda model: prepare_pippy(model, example_args=ROWS, num_chunks=0),
        "prepare_pippy(num_chunks=0): it must be 1 or more",
    ),
    "a loss": (
        loss,
        "prepare_pippy: torch cannot trace Loss: output has shape [], without a row for each of the input",
    ),
    "another width": (
        lambda model: prepare_pippy(model, example_args=ROWS)(torch.ones(4, 5)),
        "the batch's ['input'] is (torch.float32, 5); the example of prepare_pippy has (torch.float32, 4)",
    ),
    "no rows": (
        lambda model: prepare_pippy(model, example_args=ROWS)(torch.ones(0, 4)),
        "a batch for a pipeline needs one number of rows above 0, not [0]",
    ),
    "nothing": (
        lambda model: prepare_pippy(model, example_args=ROWS)(),
        "the model's forward: missing a required argument: 'input'",
    ),
}  # fmt: skip


def mistakes() -> dict[str, str]:
    """The message of each mistake, on this process."""
    messages = {}
    for name, (call, _) in MISTAKES.items():
        try:
            call(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)))
        except ArgumentError as error:
            messages[name] = str(error)
    return messages


def test_mistakes_are_one_line_on_every_process() -> None:
    for messages in run(mistakes):
        assert messages == {name: message for name, (_, message) in MISTAKES.items()}


def one_process_prepares() -> None:
    if PartialState().is_main_process:
        prepare_pippy(nn.Linear(4, 4), example_args=ROWS)


def test_a_model_with_one_part_fails_without_the_other_process() -> None:
    first, second = outcomes(one_process_prepares)
    assert first.error == "ArgumentError"
    assert second.error is None


def test_stages_are_even() -> None:
    model = nn.Sequential(nn.Embedding(10, 4), *[nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(5)])
    for count in (2, 3, 4):
        device_map = generate_device_map(model, count)
        assert set(device_map.values()) == set(range(count))
        assert list(device_map.values()) == sorted(device_map.values())
    stages = list(generate_device_map(nn.Sequential(*[nn.Linear(4, 4) for _ in range(6)]), 3).values())
    assert stages == [0, 0, 1, 1, 2, 2]
    assert list(generate_device_map(nn.Sequential(nn.Linear(4, 4)), 3).values()) == [0]
    assert find_pippy_batch_size((), {"none": None, "x": [torch.tensor(1), torch.ones(3, 2)]}) == 3
