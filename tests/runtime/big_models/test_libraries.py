"""transformers and peft load, run, save and adapt offloaded models through `accel.compat`."""

from __future__ import annotations

import importlib.util
import os
import warnings
from importlib import import_module
from typing import Any

import pytest
import torch

from tests.marks import long
from tests.needs import missing
from tests.runtime.worlds import run_one

SPREAD: dict[str, Any] = {
    "model.embed_tokens": "cpu",
    "model.layers.0": "disk",
    "model.layers.1": "cpu",
    "model.norm": "disk",
    "model.rotary_emb": "cpu",
    "lm_head": "disk",
}
TIED: dict[str, Any] = {**SPREAD, "model.embed_tokens": "disk"}
ROOM: dict[Any, Any] = {"cpu": 20_000}


def libraries(*names: str) -> None:
    for name in names:
        if importlib.util.find_spec(name) is None:
            missing(name, f"pip install {name}")


def saved(folder: str, tied: bool) -> tuple[Any, torch.Tensor]:
    """A small model in ``folder``, and tokens for it."""
    transformers: Any = import_module("transformers")
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(**shape, num_key_value_heads=2, vocab_size=64, tie_word_embeddings=tied)
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    return model, torch.randint(0, 64, (2, 7))


def logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        out: torch.Tensor = model(tokens).logits
    return out


def offloaded(folder: str, how: dict[str, Any], tied: bool) -> dict[str, Any]:
    """What is true of a model that transformers spread as ``how`` says."""
    import accel.compat

    warnings.simplefilter("ignore")
    loader: Any = import_module("transformers").AutoModelForCausalLM
    plain, tokens = saved(folder, tied)
    model = loader.from_pretrained(folder, offload_folder=f"{folder}/off", **how).eval()
    same = torch.equal(logits(model, tokens), logits(plain, tokens))
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    generates = torch.equal(model.generate(tokens, **options), plain.generate(tokens, **options))
    model.save_pretrained(f"{folder}/again")
    again = loader.from_pretrained(f"{folder}/again")
    return {
        "by": type(model._hf_hook).__module__ + accel.compat.__name__,
        "same": same,
        "generates": generates,
        "saves": torch.equal(logits(again.eval(), tokens), logits(plain, tokens)),
        "devices": sorted(set(model.hf_device_map.values())),
    }


@pytest.mark.parametrize(
    ("how", "tied"),
    [
        *long(({"device_map": SPREAD}, False), ({"device_map": TIED}, True)),
        ({"device_map": "auto", "max_memory": ROOM}, True),
    ],
)
def test_transformers(tmp_path: Any, how: dict[str, Any], tied: bool) -> None:
    libraries("transformers")
    found = run_one(offloaded, str(tmp_path), how, tied)
    assert "disk" in found.pop("devices")
    assert found == {"by": "accel.big_models.alignaccel.compat", "same": True, "generates": True, "saves": True}


def unplaced(folder: str) -> tuple[bool, bool]:
    """Whether transformers can switch the check of a device map off, and whether it is on again after that."""
    import accel.compat
    from accel.big_models import dispatch
    from accel.big_models.device_map import check_device_map

    warnings.simplefilter("ignore")
    assert accel.compat
    integration: Any = import_module("transformers.integrations.accelerate")
    with integration.skip_device_map_check():
        off = dispatch.check_device_map is not check_device_map  # type: ignore[attr-defined]
    return off, dispatch.check_device_map is check_device_map  # type: ignore[attr-defined]


def test_transformers_may_leave_parameters_unplaced(tmp_path: Any) -> None:
    libraries("transformers")
    assert run_one(unplaced, str(tmp_path)) == (True, True)


def adapted(folder: str) -> list[bool]:
    """Whether an adapter on an offloaded model gives what it gives on a plain one: as it is, merged, and not again."""
    import accel.compat

    warnings.simplefilter("ignore")
    os.chdir(folder)  # peft offloads to a path below the current directory, whatever it is told
    assert accel.compat
    peft: Any = import_module("peft")
    loader: Any = import_module("transformers").AutoModelForCausalLM
    plain, tokens = saved(folder, tied=False)
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    with_adapter = peft.get_peft_model(plain, lora).eval()
    with_adapter.save_pretrained(f"{folder}/adapter")
    expected = logits(with_adapter, tokens)
    base = loader.from_pretrained(folder, device_map=SPREAD, offload_folder=f"{folder}/off")
    model = peft.PeftModel.from_pretrained(
        base, f"{folder}/adapter", max_memory=dict(ROOM), offload_folder=f"{folder}/off"
    )
    model.eval()
    found = [torch.equal(logits(model, tokens), expected)]
    model.merge_adapter()
    found.append(torch.allclose(logits(model, tokens), expected, atol=1e-5))
    model.unmerge_adapter()
    found.append(torch.allclose(logits(model, tokens), expected, atol=1e-5))
    return found


def test_peft_on_an_offloaded_model(tmp_path: Any) -> None:
    libraries("transformers", "peft")
    assert run_one(adapted, str(tmp_path)) == [True, True, True]
