"""Models of transformers that are loaded in shards at stage 3, and several plug-ins in one run."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from accel.errors import StateError
from accel.plugins.deepspeed import DeepSpeedPlugin
from tests import needs
from tests.runtime.worlds import run, run_one

from .training import CLIP, accelerator_of, message_of, quiet

if find_spec("deepspeed") is None:
    needs.missing("deepspeed", "pip install --no-build-isolation -c constraints.txt deepspeed")
needs.package("transformers")


def _saved(folder: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes: Any = {"vocab_size": 16, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2)).save_pretrained(folder)


def _loaded(folder: Path, **how: Any) -> Any:
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(folder, **how)


def _step(accelerator: Any, model: Any, optimizer: Any) -> list[float]:
    losses = []
    for step in range(3):
        words = torch.randint(0, 16, (4, 8), generator=torch.Generator().manual_seed(step))
        words = words.chunk(accelerator.num_processes)[accelerator.process_index]
        loss = model(input_ids=words, labels=words).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return losses


def _whole(folder: Path) -> list[float]:
    _saved(folder)
    accelerator: Any = accelerator_of()
    model: Any = _loaded(folder)
    return _step(accelerator, *accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.02)))


def _plugins() -> dict[str, Any]:
    config = {
        "zero_optimization": {
            "stage": 3,
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": CLIP,
    }
    return {name: DeepSpeedPlugin(config) for name in ("student", "teacher")}


def _in_shards(folder: Path) -> dict[str, Any]:
    """Train a model that was loaded in shards; shard a teacher, by another plug-in, for inference."""
    quiet()
    accelerator: Any = accelerator_of(deepspeed_plugins=_plugins())
    model: Any = _loaded(folder)
    seen: dict[str, Any] = {"sharded": {hasattr(parameter, "ds_id") for parameter in model.parameters()}}
    with accelerator.deepspeed_plugin.zero3_init_context_manager(enable=False):
        unsharded = _loaded(folder)
        seen["unsharded"] = {hasattr(parameter, "ds_id") for parameter in unsharded.parameters()}
    seen["again"] = accelerator.deepspeed_plugin.is_zero3_init_enabled()
    with accelerator.main_process_first():
        try:
            _loaded(folder)
        except StateError as error:
            seen["first"] = str(error)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.02))
    seen["losses"] = _step(accelerator, model, optimizer)
    zero = accelerator.deepspeed_config["zero_optimization"]
    seen["sizes"] = [zero["reduce_bucket_size"], zero["stage3_prefetch_bucket_size"]]
    accelerator.state.select_deepspeed_plugin("teacher")
    teacher = accelerator.prepare(_loaded(folder))
    with torch.no_grad():
        seen["logits"] = teacher(input_ids=torch.arange(8).view(1, 8)).logits.sum().item()
    seen["teacher"] = [
        type(teacher).__name__,
        accelerator.prepare(teacher) is teacher is not model is accelerator.deepspeed_engine_wrapped.engine,
        accelerator._models == [model],  # a checkpoint leaves the teacher out
    ]
    seen["weights"] = sorted(accelerator.get_state_dict(teacher))
    return seen


def test_a_model_is_loaded_in_shards_and_trains_as_on_one_process(tmp_path: Path) -> None:
    expected = run_one(_whole, tmp_path)
    for rank, seen in enumerate(run(_in_shards, tmp_path)):
        assert (seen["sharded"], seen["unsharded"], seen["again"]) == ({True}, {False}, True)
        assert "with zero3_init_flag all processes must load a model together: move the call out" in seen["first"]
        assert seen["losses"] == pytest.approx(expected, abs=1e-5)
        assert seen["sizes"] == [256, 230]
        assert seen["teacher"] == ["DeepSpeedEngine", True, True]
        assert bool(seen["weights"]) is (rank == 0)


def _apart(folder: Path) -> dict[str, Any]:
    """A student at stage 2 beside a teacher at stage 3, by a plug-in that does not gather weights to save them."""
    quiet()
    common = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": CLIP}
    plugins = {
        name: DeepSpeedPlugin({"zero_optimization": {"stage": stage}, **common})
        for name, stage in (("student", 2), ("teacher", 3))
    }
    accelerator: Any = accelerator_of(deepspeed_plugins=plugins)
    model: Any = _loaded(folder)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.02))
    accelerator.state.select_deepspeed_plugin("teacher")
    teacher = accelerator.prepare(_loaded(folder))
    if accelerator.is_main_process:  # alone, as a whole model may be saved
        accelerator.save_model(model, folder / "student")
    return {
        "losses": _step(accelerator, model, optimizer),
        "sharded": [accelerator.strategy.shards(item) for item in (model, teacher)],
        "student": sorted(accelerator.get_state_dict(model, unwrap=False)) == sorted(model.state_dict()),
        "teacher": {message_of(partial(accelerator.get_state_dict, teacher, unwrap=way)) for way in (True, False)},
    }


def test_each_model_is_at_the_stage_of_its_own_plugin(tmp_path: Path) -> None:
    expected = run_one(_whole, tmp_path)
    for seen in run(_apart, tmp_path):
        assert seen["losses"] == pytest.approx(expected, abs=1e-5)
        assert seen["sharded"] == [False, True]
        assert seen["student"]
        assert [message[:43] for message in seen["teacher"]] == ["weights of a model at stage 3 are gathered "]
    assert sorted(path.name for path in (tmp_path / "student").iterdir()) == ["model.safetensors"]
