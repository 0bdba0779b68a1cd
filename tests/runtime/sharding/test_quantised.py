"""A model in 4 bits trains adapters under FSDP as in one process, whatever type stores its quantised weights."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from accel import Accelerator
from accel.errors import ArgumentError
from accel.plugins.fsdp import FullyShardedDataParallelPlugin as Plugin
from accel.state import AcceleratorState
from tests.needs import package
from tests.runtime.worlds import run, run_one

PRELOAD = ("bitsandbytes", "transformers.models.llama.modeling_llama")

package("transformers")
package("peft")
package("bitsandbytes")

ROWS, LENGTH, WORDS, STEPS = 4, 8, 64, 2
CASES = (("no", "uint8"), ("no", "float32"), ("bf16", "bfloat16"), ("bf16", "uint8"), ("bf16", "float32"))
Seen = dict[str, Any]


def _save(folder: str) -> None:
    """Save a tiny Llama, the base of all models here."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def _model(folder: str, storage: str) -> Any:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    quantisation = BitsAndBytesConfig(  # type: ignore[no-untyped-call]
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32,
        bnb_4bit_quant_storage=getattr(torch, storage),
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=quantisation, dtype=torch.float32)
    torch.manual_seed(1)
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    # Layers that are not training are packed anew by bitsandbytes on some CPUs, in a form that cannot be sharded.
    return adapted.train()


def _train(accelerator: Any, folder: str, storage: str) -> Seen:
    """Losses, norms, and the weights after training, as they are saved."""
    model = _model(folder, storage)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    model, optimizer = accelerator.prepare(model, optimizer)
    losses, norms = [], []
    shares, place = accelerator.strategy.data_place
    for step in range(STEPS):
        rows = torch.randint(0, WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step))
        own = rows.chunk(shares)[place]
        loss = model(input_ids=own, labels=own).loss
        accelerator.backward(loss)
        norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    weights = accelerator.get_state_dict(model)
    accelerator.free_memory()
    return {"losses": losses, "norms": norms, "weights": weights}


def _all(folder: str, sharded: bool) -> dict[str, Seen]:
    warnings.simplefilter("ignore")  # of transformers and bitsandbytes
    seen = {}
    for precision, storage in CASES:
        AcceleratorState._reset_state()
        plugin = Plugin(auto_wrap_policy="transformer_based_wrap") if sharded else None
        accelerator = Accelerator(fsdp_plugin=plugin, mixed_precision=precision)
        try:
            seen[f"{precision} {storage}"] = _train(accelerator, folder, storage)
        except ArgumentError as error:
            seen[f"{precision} {storage}"] = {"error": str(error)}
    return seen


def test_adapters_train_as_in_one_process(tmp_path: Path) -> None:
    folder = str(tmp_path / "base")
    run_one(_save, folder)
    alone = run_one(_all, folder, False)
    for rank, seen in enumerate(run(_all, folder, True)):
        refused = seen.pop("bf16 float32")["error"]
        assert "stored as torch.float32, which mixed precision would convert to torch.bfloat16: load" in refused
        assert seen.keys() == alone.keys() - {"bf16 float32"}
        for name in seen:
            expected = alone[name]
            tolerance = 2e-6 if name.startswith("no") else 2e-2
            assert seen[name]["losses"] == pytest.approx(expected["losses"], rel=tolerance), name
            assert seen[name]["norms"] == pytest.approx(expected["norms"], rel=10 * tolerance), name
            if rank == 0:
                adapters = {key: value for key, value in expected["weights"].items() if "lora" in key}
                assert len(adapters) == 28
                for key, value in adapters.items():
                    torch.testing.assert_close(seen[name]["weights"][key], value, rtol=0, atol=10 * tolerance)
