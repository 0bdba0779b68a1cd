"""Settings of Megatron-LM train models of transformers as on one process."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from accel import Accelerator, DeepSpeedPlugin, FullyShardedDataParallelPlugin, ParallelismConfig
from accel.errors import AccelError, ArgumentError
from accel.plugins.megatron import CORE, CORE_REFUSED, MAPPED, REFUSED, WITHOUT_EFFECT, MegatronLMPlugin
from tests.needs import package
from tests.runtime.worlds import run, run_one

PRELOAD = ("transformers.models.llama.modeling_llama",)

package("transformers")

_CLIPPED = 0.3


def _model() -> Any:
    import transformers

    warnings.simplefilter("ignore")  # transformers' own
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def _train(accelerator: Accelerator, max_norm: float | None) -> list[float]:
    """The losses of four steps; ``max_norm``: to which the script clips."""
    model = _model()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    shares, place = accelerator.strategy.data_place
    losses = []
    for step in range(4):
        rows = torch.randint(0, 64, (8, 12), generator=torch.Generator().manual_seed(step)).chunk(shares)[place]
        loss = model(input_ids=rows, labels=rows).loss
        accelerator.backward(loss)
        if max_norm is not None:
            accelerator.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return losses


def _by_hand(max_norm: float | None) -> list[float]:
    return _train(Accelerator(), max_norm)


def _by_settings() -> dict[str, list[float]]:
    """Two worlds in one: split layers, by the variables of a launcher; and shards, by an argument."""
    os.environ.update(
        ACCELERATE_USE_MEGATRON_LM="true", MEGATRON_LM_TP_DEGREE="2", MEGATRON_LM_GRADIENT_CLIPPING=str(_CLIPPED)
    )
    accelerator = Accelerator()
    assert accelerator.tensor_parallel_rank == accelerator.process_index
    assert Accelerator().strategy.max_norm == _CLIPPED, "a second one has the settings of the first"
    torch.manual_seed(accelerator.process_index)
    order = accelerator.prepare(torch.utils.data.DataLoader(torch.arange(8), shuffle=True))  # type: ignore[arg-type]
    orders = accelerator.gather(torch.cat(list(order))).view(2, -1)
    assert orders[0].tolist() == orders[1].tolist(), "processes that split layers read the same rows"
    losses = {"split": _train(accelerator, None)}
    accelerator.free_memory()
    accelerator.state._reset_state()
    for name in list(os.environ):
        if name.startswith(("ACCELERATE_", "MEGATRON_LM_")):
            del os.environ[name]
    plugin = MegatronLMPlugin(use_distributed_optimizer=True, recompute_activations=True, gradient_clipping=_CLIPPED)
    sharded = Accelerator(megatron_lm_plugin=plugin)
    assert sharded.is_fsdp2
    return {**losses, "sharded": _train(sharded, None)}


def test_losses_are_those_of_one_process_that_clips() -> None:
    expected = run_one(_by_hand, _CLIPPED)
    assert expected != run_one(_by_hand, None), "clipping has an effect"
    for losses in run(_by_settings):
        for name, seen in losses.items():
            torch.testing.assert_close(seen, expected, rtol=2e-6, atol=0, msg=name)


def _four() -> list[float]:
    """Layers split over two processes, and shards over two."""
    settings: Any = {"tp_degree": 2, "use_distributed_optimizer": True, "gradient_clipping": _CLIPPED}
    accelerator = Accelerator(megatron_lm_plugin=MegatronLMPlugin(**settings))
    assert accelerator.strategy.data_place == (2, accelerator.process_index // 2)
    return _train(accelerator, None)


def test_shards_of_split_layers_train_as_one_process() -> None:
    expected = run_one(_by_hand, _CLIPPED)
    for losses in run(_four, processes=4):
        torch.testing.assert_close(losses, expected, rtol=2e-6, atol=0)


def _rows_of(section: str) -> dict[str, str]:
    rows: dict[str, str] = {}
    for names, text in re.findall(r"^\| (`.*`) \| (.*) \|$", section, re.MULTILINE):
        rows |= dict.fromkeys(re.findall(r"`(\w+)`", names), text)
    return rows


def test_every_field_has_a_place_and_a_row_on_the_page() -> None:
    tables = (MAPPED, REFUSED, WITHOUT_EFFECT)
    names = {field.name for field in fields(MegatronLMPlugin)}
    assert sorted(name for table in tables for name in table) == sorted(names)
    assert not CORE.keys() & CORE_REFUSED.keys()
    assert CORE.keys() | CORE_REFUSED.keys() <= names
    page = (Path(__file__).parents[3] / "docs/megatron.md").read_text()
    sections = re.split("\n##+ ", page)
    titles = ("What fields become", "Fields that are refused", "Fields without an effect", "Fields for megatron-core")
    for title, table in zip(titles, (*tables, {**CORE, **CORE_REFUSED}), strict=True):
        (section,) = [part for part in sections if part.startswith(title)]
        assert _rows_of(section) == dict(table)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pp_degree": 2}, "pp_degree=2): split layers (tp_degree)"),
        ({"num_micro_batches": 4}, "gradient_accumulation_steps"),
        ({"custom_loss_function": print}, "for models of megatron-core: pass custom_model_provider_function"),
        ({"custom_model_provider_function": print, "return_logits": True}, "set custom_loss_function"),
        ({"tp_degree": 0}, "tp_degree=0) is not an integer of 1 or more"),
        ({"gradient_clipping": -1.0}, "gradient_clipping=-1.0) is below 0"),
        ({"recompute_activations": True}, "needs use_distributed_optimizer=True"),
    ],
)
def test_what_cannot_be_done_is_one_line(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        MegatronLMPlugin(**arguments)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("name", "value"), [("TP_DEGREE", "two"), ("TP_DEGREE", "0"), ("GRADIENT_CLIPPING", "x")])
def test_a_variable_with_an_invalid_value(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"MEGATRON_LM_{name}", value)
    with pytest.raises(AccelError, match=f"MEGATRON_LM_{name}"):
        MegatronLMPlugin()


def test_fields_without_an_effect_are_named_once() -> None:
    with pytest.warns(UserWarning, match="no effect: sequence_parallelism, lr_decay_style; see docs/megatron.md"):
        MegatronLMPlugin(sequence_parallelism=True, lr_decay_style="cosine")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("fsdp_plugin", FullyShardedDataParallelPlugin),
        ("parallelism_config", ParallelismConfig),
        ("deepspeed_plugin", DeepSpeedPlugin),
    ],
)
def test_another_plugin_beside_it(name: str, kind: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))  # a plug-in sets what transformers reads
    others = {name: kind()}
    with pytest.raises(ArgumentError, match=f"megatron_lm_plugin and {name} contradict each other"):
        Accelerator(megatron_lm_plugin=MegatronLMPlugin(), **others)
