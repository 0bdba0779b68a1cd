"""Scripts that train a model of megatron-core: their functions, schedules and checkpoints, and their mistakes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from accel import Accelerator, PartialState
from accel.errors import AccelError
from accel.parallel.megatron_engine import (
    GPTTrainStep,
    avg_losses_across_data_parallel_group,
    cut,
    gather_across_data_parallel_groups,
)
from accel.plugins.deepspeed import DummyOptim
from accel.plugins.megatron import MegatronLMDummyScheduler, MegatronLMPlugin
from accel.state import AcceleratorState
from accel.world.process_group import form_alone
from tests import needs
from tests.runtime.sharding.cuda_by_cpu import install
from tests.runtime.sharding.megatron_run import (
    CLIPPED,
    STEPS,
    Rows,
    Settings,
    accelerator_of,
    forget,
    loader,
    prepared,
    provider,
    train,
)
from tests.runtime.worlds import run_one

PRELOAD = ("megatron.core.models.gpt", "megatron.core.distributed", "torch._inductor.compile_fx")

if find_spec("megatron") is None:
    needs.missing("megatron-core", "pip install -c constraints.txt megatron-core")


class _OwnLoss(GPTTrainStep):
    """A step as in Accelerate's documentation, with fewer parameters than the base class's methods."""

    def __init__(self, megatron_args: Any, **kwargs: Any) -> None:
        assert megatron_args.tp_degree == 1
        super().__init__(megatron_args)
        self.kwargs = kwargs

    def get_loss_func(self) -> Any:  # type: ignore[override]
        def loss_func(tokens: torch.Tensor, loss_mask: torch.Tensor, output_tensor: torch.Tensor) -> Any:
            mask = loss_mask.view(-1).float()
            loss = self.kwargs["scale"] * (output_tensor.float().view(-1) * mask).sum() / mask.sum()
            return loss, {"lm loss": avg_losses_across_data_parallel_group([loss])[0]}

        return loss_func

    def get_forward_step_func(self) -> Any:
        def forward_step(data_iterator: Any, model: Any) -> Any:
            tokens, labels, loss_mask, attention_mask, position_ids = self.get_batch(data_iterator)
            output = model(tokens, position_ids, attention_mask, labels=labels)
            return output, partial(self.loss_func, tokens, loss_mask)

        return forward_step


def _mean_plus_one(mask: torch.Tensor, output: torch.Tensor) -> Any:
    return output.mean(), {"mean": output.detach().mean(), "one": torch.ones(())}


def _by_hand(model: Any, batches: Any) -> list[tuple[float, float]]:
    """A loop of torch with the loss of transformers, on a copy of ``model``."""
    state = model.state_dict()
    model = provider()
    model.load_state_dict(state)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    seen = []
    for batch in batches:
        tokens = batch["input_ids"]
        logits = model(tokens, torch.arange(tokens.shape[1]).expand_as(tokens), None)
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIPPED)
        optimizer.step()
        optimizer.zero_grad()
        seen.append((loss.item(), norm.item()))
    return seen


def _losses(accelerator: Accelerator) -> list[tuple[float, float]]:
    losses = train(accelerator, *prepared(accelerator))
    forget(accelerator)
    return losses


def _rates(accelerator: Accelerator, scheduler_of: Callable[[Any], Any]) -> list[float]:
    """The learning rates of megatron-core's optimizer at each step, before and after a resume."""
    placeholder = torch.nn.Linear(1, 1)
    own = torch.optim.AdamW(placeholder.parameters(), lr=0.01)
    model, optimizer, batches, scheduler = accelerator.prepare(placeholder, own, loader(accelerator), scheduler_of(own))
    seen = []
    for batch in batches:
        accelerator.backward(model(**batch))
        optimizer.step()
        seen.append(optimizer.param_groups[0]["lr"])
        scheduler.step()
        optimizer.zero_grad()
    forget(accelerator)
    return seen


def _scripts(folder: Path) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    accelerator = accelerator_of()
    model, optimizer, batches = prepared(accelerator)
    assert accelerator.unwrap_model(model) is model.module
    seen["hand"] = _by_hand(model.module, batches)
    seen["engine"] = train(accelerator, model, optimizer, batches)
    accelerator.save_model(model, folder / "weights")
    accelerator.save_state(folder / "state")
    rows = torch.arange(3)
    seen["gathered"] = gather_across_data_parallel_groups({"rows": rows})["rows"].tolist()
    forget(accelerator)

    step: Settings = {"custom_train_step_class": _OwnLoss, "custom_train_step_kwargs": {"scale": 2.0}}
    seen["own step"] = [loss for loss, _ in _losses(accelerator_of(**step))]
    functions: Settings = {
        "custom_loss_function": _mean_plus_one,
        "custom_prepare_model_function": lambda build: [build()],
    }
    seen["functions"] = _losses(accelerator_of(**functions))
    seen["linear"] = _rates(accelerator_of(), lambda own: MegatronLMDummyScheduler(own, 3, 1))
    seen["torch's"] = _rates(accelerator_of(), lambda own: torch.optim.lr_scheduler.StepLR(own, 1, gamma=0.1))
    for precision, scale in (("bf16", 1), ("fp16", 2**10), ("fp16", 2**32)):
        dtype = torch.half if precision == "fp16" else torch.bfloat16
        changes = {precision: True, "params_dtype": dtype, "pipeline_dtype": dtype}
        accelerator = accelerator_of(
            changes=changes, precision=precision, other_megatron_args={"initial_loss_scale": scale}
        )
        losses = train(accelerator, *prepared(accelerator))
        seen[f"{precision} {scale}"] = [loss for loss, _ in losses], accelerator.optimizer_step_was_skipped
        forget(accelerator)
    return seen


def _modules() -> dict[str, Any]:
    """Script and placeholder of other kinds: groups of the script's own, and a model of transformers."""
    install()
    from megatron.core import parallel_state

    PartialState()
    form_alone(torch.device("cpu"))
    parallel_state.initialize_model_parallel()
    refused = _message(lambda: Accelerator(megatron_lm_plugin=MegatronLMPlugin(tp_degree=2)))
    AcceleratorState._reset_state()
    accelerator = Accelerator(megatron_lm_plugin=MegatronLMPlugin(gradient_clipping=CLIPPED))
    no_module = _message(lambda: prepared(accelerator))
    torch.manual_seed(0)
    own = provider()
    groups = [
        {"params": [value for name, value in own.named_parameters() if value.ndim > 1], "weight_decay": 0.1},
        {"params": [value for name, value in own.named_parameters() if value.ndim == 1], "weight_decay": 0.0},
    ]
    model, optimizer, batches = accelerator.prepare(own, torch.optim.AdamW(groups, lr=0.01), loader(accelerator))
    assert accelerator.unwrap_model(model) is own
    seen = {
        "refused": [refused, no_module],
        "own": train(accelerator, model, optimizer, batches),
        "decays": sorted(group["weight_decay"] for group in optimizer.param_groups),
    }
    forget(accelerator)
    accelerator = accelerator_of()
    placeholder: Any = torch.nn.Linear(1, 1)
    placeholder.config = SimpleNamespace(return_dict=True)
    optimizer = torch.optim.SGD(placeholder.parameters(), lr=0.01, momentum=0.9)
    model, optimizer, batches = accelerator.prepare(placeholder, optimizer, loader(accelerator))
    plugin = accelerator.state.megatron_lm_plugin
    assert plugin is not None
    sizes = plugin.micro_batch_size, plugin.global_batch_size
    output = model(**next(iter(batches)))
    return {**seen, "kind": type(output).__name__, "loss": output.loss.item(), "sizes": sizes}


def _message(call: Callable[[], Any]) -> str:
    with pytest.raises(AccelError) as caught:
        call()
    return str(caught.value)


def _two_rates(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [part], "lr": 0.1 * (at + 1)} for at, part in enumerate(parameters)])


def _mistakes(folder: Path) -> dict[str, str]:
    """The messages of mistakes, by what they must contain."""
    seen: dict[str, str] = {}

    def preparing(
        expected: str, optimizer_of: Any = None, changes: Any = None, batches: Any = None, **more: Any
    ) -> None:
        accelerator = accelerator_of(changes=changes, **more)
        placeholder = torch.nn.Linear(1, 1)
        optimizer = (optimizer_of or torch.optim.AdamW)(list(placeholder.parameters()))
        objects = (placeholder, optimizer, batches or loader(accelerator))
        seen[expected] = _message(lambda: accelerator.prepare(*objects))
        forget(accelerator)

    half = {"bf16": True, "params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16}
    preparing("TransformerConfig has bf16=True: set both to the same precision", changes=half)
    preparing("TransformerConfig has bf16=False: set both to the same precision", precision="bf16")
    preparing("megatron-core computes in 8 bits by its own configuration: use 'bf16'", precision="fp8")
    preparing("megatron-core has no Adagrad()", torch.optim.Adagrad)
    preparing("megatron-core has no AdamW(amsgrad=True)", partial(torch.optim.AdamW, amsgrad=True))
    preparing("a DummyOptim stands for a part of DeepSpeed's configuration", DummyOptim)
    preparing("one learning rate", _two_rates)
    preparing("did you mean 'overlap_grad_reduce'?", other_megatron_args={"overlap_grad_reduc": True})
    sampler = torch.utils.data.BatchSampler(range(8), 4, False)
    custom = torch.utils.data.DataLoader(Rows(), batch_sampler=sampler)
    preparing("a loader needs a batch_size", batches=custom, num_micro_batches=2)
    preparing("must return one MegatronModule", custom_model_provider_function=lambda **_: torch.nn.Linear(1, 1))

    accelerator = accelerator_of()
    seen["in one call"] = _message(lambda: accelerator.prepare(torch.nn.Linear(1, 1)))
    model, optimizer, batches = prepared(accelerator)
    seen["needs total_num_steps"] = _message(lambda: accelerator.prepare(MegatronLMDummyScheduler(None)))
    seen["trains one model by one optimizer"] = _message(lambda: prepared(accelerator))
    batch = next(iter(batches))
    seen["no input_ids among labels"] = _message(lambda: model(labels=batch["labels"]))
    mask = torch.ones_like(batch["labels"]).index_fill(1, torch.tensor([0]), 0)
    seen["pad them on the right"] = _message(lambda: model(**batch, attention_mask=mask))
    model.zero_grad()
    seen["put it after backward"] = _message(lambda: accelerator.clip_grad_norm_(model.parameters(), CLIPPED))
    accelerator.backward(model(**batch))
    seen["to a 2-norm of 0.3"] = _message(lambda: accelerator.clip_grad_norm_(model.parameters(), 1.0))
    seen["clips norms only"] = _message(lambda: accelerator.clip_grad_value_(model.parameters(), 1.0))
    seen["call step() without one"] = _message(lambda: optimizer.step(lambda: 0.0))
    seen["leave async_save out"] = _message(lambda: accelerator.save_state(folder / "later", async_save=True))
    optimizer.step()
    accelerator.save_state(folder / "plain")
    forget(accelerator)
    accelerator = accelerator_of(use_distributed_optimizer=True)
    prepared(accelerator)
    seen["no_load_optim=True"] = _message(lambda: accelerator.load_state(folder / "plain"))
    forget(accelerator)
    accelerator = accelerator_of(use_distributed_optimizer=True, no_load_optim=True, no_save_optim=True)
    prepared(accelerator)
    accelerator.load_state(folder / "plain")
    forget(accelerator)
    accelerator = accelerator_of(changes={"num_layers": 3})
    prepared(accelerator)
    seen["megatron-core cannot load it"] = _message(lambda: accelerator.load_state(folder / "plain"))
    forget(accelerator)
    accelerator = Accelerator()
    accelerator.prepare(torch.nn.Linear(1, 1))
    seen["saved by megatron-core: pass megatron_lm_plugin"] = _message(lambda: accelerator.load_state(folder / "plain"))
    return seen


def _on_the_cpu(installed: bool) -> str:
    if not installed:
        install()
        for name in [name for name in sys.modules if name.startswith("megatron")]:
            del sys.modules[name]
        sys.modules["megatron"] = None  # type: ignore[assignment]
    plugin = MegatronLMPlugin(custom_model_provider_function=provider)
    return _message(lambda: Accelerator(cpu=True, megatron_lm_plugin=plugin))


def test_scripts(tmp_path: Path) -> None:
    seen = run_one(_scripts, tmp_path)
    torch.testing.assert_close(seen["engine"], seen["hand"], rtol=0, atol=1e-6)
    assert (tmp_path / "weights" / "model.safetensors").exists()
    assert seen["gathered"] == [0, 1, 2]
    assert [round(loss / 2) for loss in seen["own step"]] == [4] * STEPS
    assert all(4.9 < loss < 5.3 for loss, _ in seen["functions"])  # the sum of what the function reports
    assert seen["linear"] == [0.0, 0.01, 0.005]
    assert seen["torch's"] == pytest.approx([0.01, 0.001, 0.0001])
    assert [seen[name][1] for name in ("bf16 1", "fp16 1024", "fp16 4294967296")] == [False, False, True]
    assert all(4 < loss < 5 for name in ("bf16 1", "fp16 1024") for loss in seen[name][0])


def test_a_module_and_groups_of_the_script() -> None:
    seen = run_one(_modules)
    assert "number of processes (1) is not divisible by" in seen["refused"][0]
    assert "Linear is no MegatronModule" in seen["refused"][1]
    assert seen["own"][-1][0] < 5
    assert seen["decays"] == [0.0, 0.1]
    assert (seen["kind"], seen["sizes"]) == ("CausalLMOutput", (8, 8))
    assert 4 < seen["loss"] < 5


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    for expected, message in run_one(_mistakes, tmp_path).items():
        assert expected in message
        assert "\n" not in message


@pytest.mark.parametrize(
    ("installed", "message"),
    [
        (True, "megatron-core computes on CUDA only, but this process uses cpu"),
        (False, "megatron-core is not installed: pip"),
    ],
)
def test_a_run_that_cannot_start(installed: bool, message: str) -> None:
    assert message in run_one(_on_the_cpu, installed)


@pytest.mark.parametrize(
    ("rows", "count", "sizes"), [(8, 4, [2] * 4), (6, 4, [1] * 6), (7, 2, [1] * 7), (2, 4, [1, 1])]
)
def test_batches_are_cut_evenly(rows: int, count: int, sizes: list[int]) -> None:
    parts = cut({"x": torch.arange(rows), "scale": torch.ones(()), "name": "a"}, count)
    assert [len(part["x"]) for part in parts] == sizes
    assert torch.cat([part["x"] for part in parts]).tolist() == list(range(rows))
