"""Trains a tiny Llama by transformers' Trainer on accel, with the ZeRO stages of the command line (-1: by DDP).

After a stage, ``s`` stands for sequences that two processes split, and ``t`` for layers; then a step has twice as many
batches.

Each run stops at its checkpoint of step 2, and another Trainer resumes it. Losses and norms go to a file.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import accel.compat  # noqa: F401  # before transformers imports accelerate

sys.modules["comet_ml"] = None  # type: ignore[assignment]  # transformers would import it: a second in each rank

import torch  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments  # noqa: E402

from accel.plugins.parallelism import ParallelismConfig  # noqa: E402
from accel.state import AcceleratorState  # noqa: E402


def _config(stage: int, split: str) -> dict[str, Any]:
    keys = ("train_micro_batch_size_per_gpu", "train_batch_size", "gradient_accumulation_steps", "gradient_clipping")
    zero = {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True}
    layers = {"tensor_parallel": {"autotp_size": 2}} if split == "t" else {}
    return {"zero_optimization": zero, "zero_force_ds_cpu_optimizer": False, **layers, **dict.fromkeys(keys, "auto")}


def _trainer(folder: Path, stage: int, split: str) -> Any:
    arguments = TrainingArguments(
        output_dir=str(folder),
        deepspeed=None if stage < 0 else _config(stage, split),
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        logging_steps=1,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4 if split else 2,
        parallelism_config=ParallelismConfig(sp_size=2) if split == "s" else None,
        max_steps=4,
        save_steps=2,
        optim="sgd",  # its losses show the scale of the gradients
        learning_rate=0.5,
        lr_scheduler_type="constant",
        max_grad_norm=0.6,
        seed=7,
    )
    sizes: Any = {"vocab_size": 16, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    config = LlamaConfig(**sizes, num_attention_heads=2)
    rows = torch.randint(0, 16, (32, 8), generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    data = [{"input_ids": row, "labels": row} for row in rows]
    model = LlamaForCausalLM(config)
    if stage == 3 and not split:  # loaded in shards
        with TemporaryDirectory() as saved:
            save_file(model.state_dict(), f"{saved}/model.safetensors", {"format": "pt"})
            config.save_pretrained(saved)
            model = LlamaForCausalLM.from_pretrained(saved)
        assert all(hasattr(parameter, "ds_id") for parameter in model.parameters())
    return Trainer(model, arguments, train_dataset=data)


def main(out: Path, runs: list[str]) -> None:
    """Train at every stage; the main process writes what it has seen."""
    warnings.simplefilter("ignore")
    seen: dict[str, Any] = {}
    for name in runs:
        folder = out / f"stage {name}"
        stage = name.rstrip("st")
        how = int(stage), name.removeprefix(stage)
        trainer = _trainer(folder, *how)
        trainer.train()
        kind, log = str(trainer.accelerator.distributed_type), trainer.state.log_history
        AcceleratorState._reset_state()
        resumed = _trainer(folder, *how)
        resumed.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
        resumed.accelerator.free_memory()
        AcceleratorState._reset_state()
        seen[name] = {
            "type": kind,
            "losses": [entry["loss"] for entry in log if "loss" in entry],
            "norms": [entry["grad_norm"] for entry in log if "loss" in entry],
            "resumed": [entry["loss"] for entry in resumed.state.log_history if "loss" in entry],
        }
        if trainer.is_world_process_zero():
            (out / "seen.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
