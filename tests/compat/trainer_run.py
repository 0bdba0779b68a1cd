"""A program of the tests: trains a tiny GPT-2 on a text that ships with Python, and says what it saw.

It imports `transformers`, `peft` and `trl` alone: whose `import accelerate` they get is for the caller to say. Its
argument is a JSON list of objects with the fields of `Plan`, done one after the other in one process; each rank writes
what it saw to ``OUT/NAME-R.json``. A second argument is a number of ranks that it forks itself, libraries loaded.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
sys.modules["comet_ml"] = None  # type: ignore[assignment]  # transformers would import it: a second in each rank

import torch  # noqa: E402
import transformers  # noqa: E402

_SAMPLES = 24
_ARGUMENTS: dict[str, Any] = {
    "use_cpu": True,
    "report_to": "none",
    "disable_tqdm": True,
    "logging_steps": 1,
    "per_device_train_batch_size": 2,
    "per_device_eval_batch_size": 2,
    "max_steps": 6,
    "save_strategy": "no",
    "seed": 7,
    "learning_rate": 1e-3,
}


@dataclass
class Plan:
    """What to do: ``arguments`` are `TrainingArguments`'; ``resume`` names the checkpoint in ``out`` to go on from."""

    out: str
    name: str
    kind: str = "trainer"
    arguments: dict[str, Any] = field(default_factory=dict)
    resume: str | None = None


def source() -> str:
    """The beginning of a text that every Python installation has."""
    return Path(argparse.__file__).read_text()[:6000]


def tokenizer() -> Any:
    """A byte-pair tokenizer trained on it."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    raw = Tokenizer(models.BPE(unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel()
    special = ["<unk>", "<eos>"]
    raw.train_from_iterator(
        [source()], trainers.BpeTrainer(vocab_size=300, special_tokens=special, show_progress=False)
    )
    make: Any = transformers.PreTrainedTokenizerFast
    return make(tokenizer_object=raw, unk_token="<unk>", eos_token="<eos>", pad_token="<eos>")


def examples(words: Any, count: int) -> list[dict[str, Any]]:
    """``count`` pieces of the text, of unequal length."""
    ids = words(source())["input_ids"]
    pieces, start = [], 0
    for index in range(count):
        length = 8 + (index * 5) % 9
        pieces.append({"input_ids": ids[start : start + length], "length": length})
        start += length
    return pieces


def model(words: Any, dropout: float = 0.1) -> Any:
    """The same tiny model every time."""
    transformers.set_seed(3)
    config = transformers.GPT2Config(
        vocab_size=len(words),
        n_positions=64,
        n_embd=16,
        n_layer=2,
        n_head=2,
        bos_token_id=1,
        eos_token_id=1,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
    )
    return transformers.GPT2LMHeadModel(config)


def trainer(plan: Plan) -> Any:
    """What trains, by ``plan.kind``: ``trainer``, ``stream`` (iterable data), ``noting``, ``lora`` or ``sft``."""
    words = tokenizer()
    arguments = {**_ARGUMENTS, "output_dir": plan.out, **plan.arguments}
    if plan.kind == "sft":
        return _sft(words, arguments, plan)
    # What a stream's loader draws from a rank's generator before the first batch is its own affair; the data are not.
    net = model(words, dropout=0.0 if plan.kind == "stream" else 0.1)
    if plan.kind == "lora":
        from peft import LoraConfig, get_peft_model

        net = get_peft_model(
            net, LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")
        )
    pieces = examples(words, _SAMPLES)
    collate = transformers.DataCollatorForLanguageModeling(words, mlm=False)
    return transformers.Trainer(
        model=net,
        args=transformers.TrainingArguments(**arguments),
        train_dataset=Stream(pieces) if plan.kind == "stream" else pieces,
        eval_dataset=pieces[:7],
        compute_metrics=None if plan.arguments.get("prediction_loss_only", True) else accuracy,
        data_collator=Noting(collate) if plan.kind == "noting" else collate,
        processing_class=words,
    )


class Noting:
    """A collator that notes which samples it was given, by their first words."""

    def __init__(self, collate: Any) -> None:
        self.collate = collate
        self.noted: list[str] = []

    def __call__(self, items: list[dict[str, Any]]) -> Any:
        self.noted += [" ".join(map(str, item["input_ids"])) for item in items]
        return self.collate(items)


class Stream(torch.utils.data.IterableDataset[dict[str, Any]]):
    """The beginnings of the pieces, equally long (Accelerate dispatches no others), without a length."""

    def __init__(self, pieces: list[dict[str, Any]]) -> None:
        self.pieces = pieces

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter([{"input_ids": piece["input_ids"][:8], "length": 8} for piece in self.pieces])


def accuracy(seen: Any) -> dict[str, float]:
    """Of gathered predictions: how many there are, and how many of them are right."""
    known = seen.label_ids != -100
    right = seen.predictions.argmax(-1)[known] == seen.label_ids[known]
    return {"rows": float(len(seen.label_ids)), "words": float(known.sum()), "right": float(right.sum())}


def _sft(words: Any, arguments: dict[str, Any], plan: Plan) -> Any:
    trl, datasets = import_module("trl"), import_module("datasets")
    lines = [line for line in source().splitlines() if len(line) > 20][:_SAMPLES]
    data = datasets.Dataset.from_dict({"text": lines})
    return trl.SFTTrainer(
        model=model(words),
        args=trl.SFTConfig(**arguments, max_length=32, dataset_num_proc=None),
        train_dataset=data,
        eval_dataset=data.select(range(7)),
        processing_class=words,
    )


def run(plan: Plan) -> None:
    """Train, evaluate, and write what was seen."""
    it = trainer(plan)
    it.train(resume_from_checkpoint=str(Path(plan.out, plan.resume)) if plan.resume else None)
    final = {} if plan.kind == "noting" else it.evaluate()
    accelerator, log = it.accelerator, it.state.log_history
    seen = {
        "library": type(accelerator).__module__.partition(".")[0],
        "processes": accelerator.num_processes,
        "losses": [entry["loss"] for entry in log if "loss" in entry],
        "rates": [entry["learning_rate"] for entry in log if "learning_rate" in entry],
        "norms": [entry["grad_norm"] for entry in log if "grad_norm" in entry],
        "evals": [entry["eval_loss"] for entry in log if "eval_loss" in entry],
        "eval": {name: final[name] for name in final if name.endswith(("loss", "rows", "words", "right"))},
        "noted": getattr(it.data_collator, "noted", None),
        "best": it.state.best_model_checkpoint and Path(it.state.best_model_checkpoint).name,
        "sum": float(sum(p.detach().double().abs().sum() for p in accelerator.unwrap_model(it.model).parameters())),
    }
    Path(plan.out, f"{plan.name}-{accelerator.process_index}.json").write_text(json.dumps(seen))


def main(plans: list[dict[str, Any]]) -> None:
    """Do each plan."""
    for plan in plans:
        run(Plan(**plan))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def fork_ranks(count: int) -> None:
    """Import the libraries and return in each of ``count`` ranks; in their parent end, with 1 after a failure."""
    for module, name in (("transformers", "Trainer"), ("peft", "LoraConfig"), ("trl", "SFTTrainer")):
        getattr(import_module(module), name)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count)}
    ranks = set()
    for rank in range(count):
        if (pid := os.fork()) == 0:
            os.environ.update(world, RANK=str(rank), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(count))
            return
        ranks.add(pid)
    while ranks:
        pid, status = os.wait()
        ranks.remove(pid)
        if status:
            for other in ranks:
                os.kill(other, signal.SIGKILL)
            sys.exit(1)
    sys.exit(0)


if __name__ == "__main__":
    if len(sys.argv) > 2:
        fork_ranks(int(sys.argv[2]))
    main(json.loads(sys.argv[1]))
