"""A program of the tests: trains a tiny Llama with `transformers`, `peft` and `trl`, sharded or not.

Its argument is a JSON list of objects with the fields of `Plan`, done one after the other in one process; each rank
writes what it saw to ``OUT/NAME-R.json``. It imports no accel: `accel launch --compat` runs it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.compat.trainer_run import examples, source, tokenizer  # first: it settles what transformers imports

import torch  # isort: skip
import transformers  # isort: skip

_SAMPLES = 24
_ARGUMENTS: dict[str, Any] = {
    "use_cpu": True,
    "report_to": "none",
    "disable_tqdm": True,
    "logging_steps": 1,
    "per_device_train_batch_size": 2,
    "per_device_eval_batch_size": 2,
    "max_steps": 3,
    "save_strategy": "no",
    "seed": 7,
    "learning_rate": 1e-2,
    "max_grad_norm": 0.5,  # below every norm of these runs
}


@dataclass
class Plan:
    """What to do: ``arguments`` are `TrainingArguments`'.

    kind:   ``trainer``, ``sft`` or ``dpo``, after ``lora`` for an adapter, ``policy`` for the units that `peft` takes,
            ``half`` for weights in bf16 and ``ones`` for a last norm that begins with ones.
    load:   a folder from which `from_pretrained` takes the model.
    resume: the checkpoint in ``out`` to go on from.
    """

    out: str
    name: str
    kind: str = "trainer"
    arguments: dict[str, Any] = field(default_factory=dict)
    load: str | None = None
    resume: str | None = None


def llama(words: Any) -> Any:
    """The same tiny Llama every time."""
    transformers.set_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=len(words),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=1,
        pad_token_id=1,
    )
    return transformers.LlamaForCausalLM(config)


def trainer(plan: Plan) -> Any:
    """What trains, by ``plan.kind``."""
    words = tokenizer()
    kinds = plan.kind.split()
    arguments = {**_ARGUMENTS, "output_dir": plan.out, **plan.arguments}
    # They come first: what they say of sharding is read when a model is loaded.
    args = _arguments(kinds[-1], arguments)
    if plan.load is None:
        net = llama(words)
    else:
        net = transformers.AutoModelForCausalLM.from_pretrained(plan.load, dtype=torch.float32)
    if "half" in kinds:
        net = net.to(torch.bfloat16)
    if "ones" in kinds:
        torch.nn.init.ones_(net.model.norm.weight)
    away = sum(parameter.is_meta for parameter in net.parameters())
    if "lora" in kinds:
        peft = import_module("peft")
        lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        net = peft.get_peft_model(net, lora)
    it = _trainer(kinds[-1], net, args, words)
    if "policy" in kinds:
        policy = import_module("peft.utils.other").fsdp_auto_wrap_policy
        it.accelerator.state.fsdp_plugin.auto_wrap_policy = policy(it.model)
    it.away = away
    return it


def _arguments(kind: str, arguments: dict[str, Any]) -> Any:
    if kind == "trainer":
        return transformers.TrainingArguments(**arguments)
    make = import_module("trl").SFTConfig if kind == "sft" else import_module("trl").DPOConfig
    return make(**{"bf16": False, **arguments}, max_length=32, dataset_num_proc=None)


def _trainer(kind: str, net: Any, args: Any, words: Any) -> Any:
    if kind == "trainer":
        pieces = examples(words, _SAMPLES)
        return transformers.Trainer(
            model=net,
            args=args,
            train_dataset=pieces,
            eval_dataset=pieces[:7],
            data_collator=transformers.DataCollatorForLanguageModeling(words, mlm=False),
            processing_class=words,
        )
    lines = [line for line in source().splitlines() if len(line) > 20][:_SAMPLES]
    columns = {"text": lines} if kind == "sft" else {"prompt": lines, "chosen": lines[::-1], "rejected": lines[::2] * 2}
    data = import_module("datasets").Dataset.from_dict(columns)
    make = import_module("trl").SFTTrainer if kind == "sft" else import_module("trl").DPOTrainer
    more = {"ref_model": llama(words)} if kind == "dpo" and not hasattr(net, "peft_config") else {}
    few = data.select(range(7))
    return make(model=net, args=args, train_dataset=data, eval_dataset=few, processing_class=words, **more)


def run(plan: Plan) -> None:
    """Train, evaluate, save, and write what was seen."""
    it = trainer(plan)
    forwards = _count_forwards(it.model)
    it.train(resume_from_checkpoint=str(Path(plan.out, plan.resume)) if plan.resume else None)
    final = it.evaluate()
    accelerator, log, net = it.accelerator, it.state.log_history, it.model
    parameters = list(accelerator.unwrap_model(net).parameters())
    norms = [entry["grad_norm"] for entry in log if "grad_norm" in entry]
    saved = Path(plan.out, "saved")
    it.save_model(str(saved))
    accelerator.wait_for_everyone()
    seen = {
        "library": type(accelerator).__module__.partition(".")[0],
        "processes": accelerator.num_processes,
        "type": str(accelerator.distributed_type),
        "losses": [entry["loss"] for entry in log if "loss" in entry],
        "norms": norms,
        "evals": [entry["eval_loss"] for entry in log if "eval_loss" in entry],
        "eval": final["eval_loss"],
        "placements": sorted({str(getattr(p, "placements", None)) for p in parameters}),
        "units": sorted(name for name, part in net.named_modules() if hasattr(part, "unshard")),
        "types": sorted({str(p.dtype) for p in parameters}),
        "away": it.away,
        "forwards": sum(forwards) // (it.args.gradient_accumulation_steps * max(1, len(norms))),
        "max norm": it.args.max_grad_norm,
        "again": _loaded(saved) if saved.exists() else None,
    }
    Path(plan.out, f"{plan.name}-{accelerator.process_index}.json").write_text(json.dumps(seen))


def _count_forwards(net: Any) -> list[int]:
    """A list that grows by a 1 at each pass of a block in training."""
    passes: list[int] = []
    layer = next(part for name, part in net.named_modules() if name.endswith("layers.0.self_attn"))
    layer.register_forward_hook(lambda module, *_: passes.append(1) if module.training else None)
    return passes


def _loaded(saved: Path) -> list[str]:
    """What `from_pretrained` misses in a folder, or does not know: nothing of a whole model."""
    if (saved / "adapter_config.json").exists():
        return []
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
    load: Any = transformers.AutoModelForCausalLM.from_pretrained
    _, info = load(saved, output_loading_info=True)
    odd: Mapping[str, Any] = info
    return sorted(str(name) for kind in ("missing_keys", "unexpected_keys", "mismatched_keys") for name in odd[kind])


def main(plans: list[dict[str, Any]]) -> None:
    """Do each plan."""
    launched = {name: value for name, value in os.environ.items() if "FSDP" in name}
    for plan in plans:
        for name in [name for name in os.environ if "FSDP" in name]:
            del os.environ[name]
        os.environ.update(launched)
        run(Plan(**plan))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
