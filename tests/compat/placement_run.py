"""A program of the tests: `from_pretrained` with device maps and disk offload, compared with the plain model.

Its argument is a folder to write to.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

PLACES = {
    "whole": {"": "cpu"},
    "auto": "auto",
    "some": {
        "model.embed_tokens": "cpu",
        "model.rotary_emb": "cpu",
        "model.layers.0": "cpu",
        "model.layers.1": "disk",
        "model.layers.2": "disk",
        "model.norm": "cpu",
        "lm_head": "cpu",
    },
}


def run(model: Any, words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The model's logits, and how it continues ``words``."""
    with torch.no_grad():
        return model(words).logits, model.generate(words, max_new_tokens=3, do_sample=False)


def main(folder: Path) -> None:
    """Print a JSON object: by name, whether the model computes and is saved as the plain one, and what is away."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4
    )
    make_plain: Any = transformers.LlamaForCausalLM
    plain = make_plain(config).eval()
    plain.save_pretrained(folder / "plain")
    words = torch.arange(12).reshape(1, 12)
    expected, continued = run(plain, words)
    found = {}
    more: dict[str, dict[str, Any]] = {name: {"device_map": place} for name, place in PLACES.items()}
    more["small"] = {"device_map": "auto", "max_memory": {"cpu": 40_000}}
    for name, how in more.items():
        make: Any = transformers.AutoModelForCausalLM
        model = make.from_pretrained(folder / "plain", offload_folder=folder / name, **how).eval()
        logits, generated = run(model, words)
        model.save_pretrained(folder / f"{name}-again")
        again = make.from_pretrained(folder / f"{name}-again").state_dict()
        found[name] = {
            "logits": torch.equal(logits, expected),
            "generated": torch.equal(generated, continued),
            "saved": all(torch.equal(again[key], value) for key, value in plain.state_dict().items()),
            "away": sum(parameter.device.type == "meta" for parameter in model.parameters()),
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
