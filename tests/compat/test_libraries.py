"""`transformers.Trainer`, `peft` and `trl` train on accel as they do on Accelerate 1.15: the same losses, to the bit.

Each library is run in a process of its own, or two, that does every plan: once on Accelerate, once on accel.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests import warm
from tests.compat.children import ROOT, environment, said
from tests.marks import long
from tests.needs import missing

pytestmark = pytest.mark.timeout(900)  # the first test of each number of processes waits for all of its training

_PROGRAM = str(ROOT / "tests" / "compat" / "trainer_run.py")
_ACCEL = ["-m", "accel", "launch", "--compat", "--cpu", "--num_processes"]

_EVERYTHING = {
    "gradient_accumulation_steps": 2,
    "train_sampling_strategy": "group_by_length",
    "dataloader_num_workers": 1,
    "eval_strategy": "steps",
    "eval_steps": 1,
    "save_strategy": "steps",
    "save_steps": 1,
    "load_best_model_at_end": True,
    "max_steps": 3,
}
_HALVES = {"save_strategy": "steps", "save_steps": 3, "gradient_accumulation_steps": 2, "max_steps": 6}
PLANS: list[dict[str, Any]] = [
    {"name": "everything", "arguments": _EVERYTHING},
    {"name": "whole", "arguments": _HALVES},
    {"name": "resumed", "arguments": _HALVES, "resume": "checkpoint-3"},
    {"name": "metrics", "arguments": {"prediction_loss_only": False, "max_steps": 1}},
    {"name": "stream", "kind": "stream", "arguments": {"max_steps": 4}},
    {"name": "split", "arguments": {"accelerator_config": {"split_batches": True}, "max_steps": 3}},
    {"name": "epochs", "kind": "noting", "arguments": {"train_sampling_strategy": "group_by_length", "max_steps": 12}},
    {"name": "bf16", "arguments": {"bf16": True, "max_steps": 3}},
    {"name": "lora", "kind": "lora", "arguments": {"max_steps": 3}},
    {"name": "sft", "kind": "sft", "arguments": {"max_steps": 3}},
]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], dict[str, Any]]:
    """What rank 0 of a run saw, by library and number of processes: plan → value."""
    for package in ("accelerate", "transformers", "peft", "trl", "datasets", "tokenizers"):
        if find_spec(package) is None:
            missing(package, "pip install 'accel-launch[dev]'")

    @cache
    def outcome(library: str, processes: int) -> dict[str, Any] | str:
        out = tmp_path_factory.mktemp(f"{library}-{processes}")
        plans = [
            {**plan, "out": str(out / ("halves" if plan["arguments"] is _HALVES else plan["name"]))} for plan in PLANS
        ]
        run_plans = [_PROGRAM, json.dumps(plans)]
        start = [*_ACCEL, str(processes), *run_plans] if library == "accel" else [*run_plans, str(processes)]
        env = environment(ACCELERATE_USE_CPU="true", TOKENIZERS_PARALLELISM="false")
        done = warm.run([sys.executable, *start], env=env, cwd=out, timeout=420)
        if done.returncode:
            return done.stdout[-2000:] + done.stderr[-6000:]
        found = {plan["name"]: json.loads(Path(plan["out"], f"{plan['name']}-0.json").read_text()) for plan in plans}
        found["epochs"]["out"] = str(out / "epochs")
        return found

    def run(library: str, processes: int) -> dict[str, Any]:
        found = outcome(library, processes)
        assert isinstance(found, dict), found
        return found

    return run


@pytest.mark.parametrize("processes", [2, *long(1)])
@pytest.mark.parametrize("plan", [plan["name"] for plan in PLANS if plan["name"] != "epochs"])
def test_training_is_the_same_as_on_accelerate(
    seen: Callable[[str, int], dict[str, Any]], plan: str, processes: int
) -> None:
    theirs, ours = seen("accelerate", processes)[plan], seen("accel", processes)[plan]
    assert (theirs.pop("library"), ours.pop("library")) == ("accelerate", "accel")
    assert ours["processes"] == processes
    assert ours["losses"]
    if plan == "split" and processes == 2:
        # The Trainer gathers two rows a sample here. Of the last round's one sample accel keeps both, Accelerate one:
        # its `gather_for_metrics` cuts to as many rows as there are samples. So the means are weighted differently.
        ours = {name: value for name, value in ours.items() if not name.startswith("eval")}
        theirs = {name: value for name, value in theirs.items() if not name.startswith("eval")}
    assert ours == theirs


def test_every_epoch_has_every_sample_once_though_the_sampler_draws_from_each_ranks_own_generator(
    seen: Callable[[str, int], dict[str, Any]],
) -> None:
    def second_epoch(library: str) -> list[str]:
        path = Path(seen(library, 2)["epochs"]["out"])
        ranks = [json.loads((path / f"epochs-{rank}.json").read_text())["noted"] for rank in range(2)]
        return [sample for noted in ranks for sample in noted[len(noted) // 2 :]]

    ours = second_epoch("accel")
    assert len(ours) == len(set(ours)) == 24
    assert len(set(second_epoch("accelerate"))) < 24


@pytest.mark.parametrize("processes", [2, *long(1)])
def test_a_resumed_run_ends_as_one_that_was_never_stopped(
    seen: Callable[[str, int], dict[str, Any]], processes: int
) -> None:
    whole, resumed = seen("accel", processes)["whole"], seen("accel", processes)["resumed"]
    assert resumed["losses"] == whole["losses"]
    assert (resumed["sum"], resumed["eval"]) == (whole["sum"], whole["eval"])


def test_models_are_loaded_onto_devices_and_disk_as_on_accelerate(tmp_path: Path) -> None:
    program = str(ROOT / "tests" / "compat" / "placement_run.py")
    theirs = json.loads(said(program, str(tmp_path / "theirs")).splitlines()[-1])
    ours = json.loads(said("-m", "accel.compat", program, str(tmp_path / "ours")).splitlines()[-1])
    assert ours == theirs
    assert all(model["logits"] and model["generated"] and model["saved"] for model in ours.values())
    assert {name: model["away"] > 0 for name, model in ours.items()} == {
        "whole": False,
        "auto": False,
        "some": True,
        "small": True,
    }
