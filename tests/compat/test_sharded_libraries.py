"""`transformers.Trainer`, `peft` and `trl` train sharded models on accel as they train whole ones.

One launch of two processes does every plan; one of four has its settings from `accel launch` and two replicas.
Accelerate is no measure here: on a CPU it trains DDP and does not say so.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests import warm
from tests.compat.children import ROOT, environment
from tests.needs import missing

pytestmark = pytest.mark.timeout(900)  # the first test of each launch waits for all of its training

Seen = dict[str, list[dict[str, Any]]]  # by plan, what each rank saw

_PROGRAM = str(ROOT / "tests" / "compat" / "sharded_run.py")
_BLOCKS = ["model.layers.0", "model.layers.1"]
_LORA_BLOCKS = [f"base_model.model.{block}" for block in _BLOCKS]
_ADAPTERS = [
    f"{block}.self_attn.{name}_proj.lora_{side}.default" for block in _LORA_BLOCKS for name in "qv" for side in "AB"
]
_WINDOWS = {"gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "max_steps": 4}
_HALVES = {**_WINDOWS, "fsdp": True, "save_strategy": "steps", "save_steps": 2}
_SHARDS = {"fsdp_config": {"state_dict_type": "SHARDED_STATE_DICT"}}

# Name: what trains, and its arguments.
WHOLE: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("trainer", _WINDOWS),
    "plain lora": ("lora trainer", {}),
    "plain sft": ("sft", {}),
    "plain dpo": ("dpo", {}),
    "plain bf16": ("trainer", {"bf16": True}),
}
# Name: what trains, its arguments, the plan that has the same losses, and what else is seen.
SHARDED: dict[str, tuple[str, dict[str, Any], str, dict[str, Any]]] = {
    "defaults": ("trainer", {**_WINDOWS, "fsdp": True}, "plain", {}),
    "words of version 1": (
        "trainer",
        {**_WINDOWS, "fsdp": "shard_grad_op auto_wrap",
         "fsdp_config": {"fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer"}},
        "plain",
        {},
    ),
    "version 1": ("trainer", {**_WINDOWS, "fsdp": True, "fsdp_config": {"version": 1}}, "plain", {}),
    "by size": (
        "trainer",
        {**_WINDOWS, "fsdp": True, "fsdp_config": {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 600}},
        "plain",
        {"units": ["", *(f"{block}.{part}" for block in _BLOCKS for part in ("mlp", "self_attn"))]},
    ),
    "checkpointed": (
        "trainer",
        {**_WINDOWS, "fsdp": True, "fsdp_config": {"activation_checkpointing": True}},
        "plain",
        {"forwards": 2},
    ),
    "checkpointed by the model": (
        "trainer",
        {**_WINDOWS, "fsdp": True, "gradient_checkpointing": True},
        "plain",
        {"forwards": 2},
    ),
    "offloaded": (
        "trainer",
        {**_WINDOWS, "fsdp": True, "fsdp_config": {"cpu_offload": True, "reshard_after_forward": False}},
        "plain",
        {},
    ),
    "bf16": ("trainer", {"bf16": True, "fsdp": True}, "plain bf16", {}),
    "bf16 weights": ("half trainer", {"bf16": True, "fsdp": True}, "plain bf16", {}),
    "bf16 weights, lora": (
        "half lora trainer",
        {"bf16": True, "fsdp": True},
        "plain lora",
        {"units": ["", *_LORA_BLOCKS], "types": ["torch.bfloat16", "torch.float32"]},
    ),
    "lora": ("lora trainer", {"fsdp": True}, "plain lora", {"units": ["", *_LORA_BLOCKS]}),
    "peft's policy": (
        "policy lora trainer",
        {"fsdp": True},
        "plain lora",
        {"units": sorted(["", *_LORA_BLOCKS, *_ADAPTERS])},
    ),
    "sft": ("sft", {"fsdp": True}, "plain sft", {"forwards": 2}),  # trl checkpoints activations
    "dpo": ("dpo", {"fsdp": True}, "plain dpo", {"forwards": 2}),
    "saved whole": ("trainer", _HALVES, "plain", {}),
    "saved as shards": ("trainer", {**_HALVES, **_SHARDS}, "plain", {}),
    "saved lora": (
        "lora trainer",
        {"fsdp": True, "save_strategy": "steps", "save_steps": 2, **_SHARDS},
        "plain lora",
        {"units": ["", *_LORA_BLOCKS]},
    ),
}  # fmt: skip
# The highest loss is the best one here, which is that of the first checkpoint.
BEST = {**_HALVES, "load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}
RESUMED = {"resumed whole": "saved whole", "resumed as shards": "saved as shards", "resumed lora": "saved lora"}
_SEEN = {"type": "FSDP", "placements": ["(Shard(dim=0),)"], "units": ["", *_BLOCKS], "forwards": 1}

_FLAGS = (
    "--use_fsdp --fsdp_state_dict_type FULL_STATE_DICT --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP "
    "--fsdp_transformer_layer_cls_to_wrap LlamaDecoderLayer --fsdp_cpu_ram_efficient_loading true "
    "--use_parallelism_config --parallelism_config_dp_replicate_size 2"
)


def _launch(out: Path, processes: int, plans: list[dict[str, Any]], flags: str = "") -> Seen:
    for package in ("transformers", "peft", "trl", "datasets", "tokenizers"):
        if find_spec(package) is None:
            missing(package, "pip install 'accel-launch[dev]'")
    start = ["-m", "accel", "launch", "--compat", "--cpu", "--num_processes", str(processes), *flags.split()]
    env = environment(TOKENIZERS_PARALLELISM="false", PYTHONPATH=str(ROOT))
    done = warm.run([sys.executable, *start, _PROGRAM, json.dumps(plans)], env=env, cwd=out, timeout=420)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return {
        plan["name"]: [
            json.loads(Path(plan["out"], f"{plan['name']}-{rank}.json").read_text()) for rank in range(processes)
        ]
        for plan in plans
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where every plan writes, into a folder of its name; a resumed one into that of the plan it goes on with."""
    return tmp_path_factory.mktemp("sharded")


@pytest.fixture(scope="module")
def two(folder: Path) -> Callable[[], Seen]:
    """What two processes saw."""

    @cache
    def outcome() -> Seen:
        plans: list[dict[str, Any]] = [
            {"name": name, "kind": kind, "arguments": arguments, "out": str(folder / name)}
            for name, (kind, arguments, *_) in [*WHOLE.items(), *SHARDED.items()]
        ]
        plans += [
            {**plan, "name": name, "resume": "checkpoint-2"}
            for name, first in RESUMED.items()
            for plan in plans
            if plan["name"] == first
        ]
        loaded = str(folder / "plain" / "saved")
        plans.append({"name": "best", "arguments": BEST, "out": str(folder / "best")})
        plans.append({"name": "loaded", "kind": "ones trainer", "load": loaded, "out": str(folder / "loaded")})
        return _launch(folder, 2, plans)

    return outcome


@pytest.fixture(scope="module")
def four(folder: Path, two: Callable[[], Seen]) -> Callable[[], Seen]:
    """What four processes saw, to which no plan says anything of sharding: `accel launch` does."""

    from safetensors.torch import load_file, save_file

    @cache
    def outcome() -> Seen:
        two()
        lacking = folder / "lacking"
        shutil.copytree(folder / "plain" / "saved", lacking)
        weights = load_file(lacking / "model.safetensors")
        del weights["model.norm.weight"]  # from_pretrained makes ones of it
        save_file(weights, lacking / "model.safetensors", {"format": "pt"})
        half = {"per_device_train_batch_size": 1}
        plans = [
            {"name": "flags", "load": str(lacking), "arguments": half},
            {"name": "dpo on four", "kind": "dpo", "arguments": half},
            {
                "name": "resumed on four",
                "arguments": {**_WINDOWS, **half},
                "out": str(folder / "saved whole"),
                "resume": "checkpoint-2",
            },
        ]
        return _launch(folder, 4, [{"out": str(folder / str(plan["name"])), **plan} for plan in plans], _FLAGS)

    return outcome


def _near(seen: dict[str, Any], expected: dict[str, Any], tolerance: float = 1e-6, evals: bool = True) -> None:
    for name in ("losses", "norms", *(("evals", "eval") if evals else ())):
        assert seen[name] == pytest.approx(expected[name], rel=tolerance), name


@pytest.mark.parametrize("name", SHARDED)
def test_losses_are_those_of_whole_models(name: str, two: Callable[[], Seen]) -> None:
    _, arguments, reference, more = SHARDED[name]
    expected = two()[reference][0]
    assert (expected["type"], len(expected["losses"])) == ("MULTI_CPU", 4 if reference == "plain" else 3)
    tolerance = 1e-2 if arguments.get("bf16") else 1e-6
    for seen in two()[name]:
        _near(seen, expected, tolerance)
        assert {key: seen[key] for key in _SEEN} == {**_SEEN, **{key: more[key] for key in more if key in _SEEN}}
        assert seen["types"] == more.get("types", ["torch.float32"])


def test_clipping_was_active_at_every_step(two: Callable[[], Seen]) -> None:
    assert min(two()["plain"][0]["norms"]) > two()["plain"][0]["max norm"]


@pytest.mark.parametrize("name", [name for name in SHARDED if not name.startswith(("bf16", "saved as", "saved lora"))])
def test_saved_weights_are_those_of_whole_models(name: str, folder: Path, two: Callable[[], Seen]) -> None:
    from safetensors.torch import load_file

    seen = two()[name]
    reference = folder / SHARDED[name][2] / "saved"
    (file,) = (folder / name / "saved").glob("*.safetensors")
    weights, expected = load_file(file), load_file(reference / file.name)
    assert weights.keys() == expected.keys()
    assert {key: float((weights[key] - expected[key]).abs().max()) for key in weights} == pytest.approx(
        dict.fromkeys(weights, 0.0), abs=1e-5
    )
    assert [rank["again"] for rank in seen] == [[], []]  # from_pretrained misses nothing, and nothing is left over


@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_run_ends_as_one_that_was_never_stopped(name: str, two: Callable[[], Seen]) -> None:
    for seen, whole in zip(two()[name], two()[RESUMED[name]], strict=True):
        assert len(seen["losses"]) == len(whole["losses"])
        _near(seen, whole)
        assert seen["placements"] == whole["placements"]


def test_the_best_checkpoint_is_loaded_at_the_end(two: Callable[[], Seen]) -> None:
    for seen in two()["best"]:
        _near(seen, two()["plain"][0], evals=False)
        assert seen["eval"] == pytest.approx(seen["evals"][0], rel=1e-6)
        assert seen["evals"][0] > seen["evals"][1] * 1.001
        assert seen["placements"] == ["(Shard(dim=0),)"]


def test_the_launcher_says_it_all_and_weights_that_the_main_process_alone_has_are_sent(
    two: Callable[[], Seen], four: Callable[[], Seen]
) -> None:
    expected = two()["loaded"][0]
    for rank, seen in enumerate(four()["flags"]):
        _near(seen, expected, evals=False)  # batches of an evaluation are others
        assert (seen["placements"], seen["units"]) == (["(Replicate(), Shard(dim=0))"], ["", *_BLOCKS])
        assert seen["away"] == (rank > 0)


def test_replicas_of_shards_train_by_preference_and_resume_what_two_processes_saved(
    two: Callable[[], Seen], four: Callable[[], Seen]
) -> None:
    for seen in four()["dpo on four"]:
        _near(seen, two()["plain dpo"][0], 1e-4, evals=False)  # padded differently: 1.6e-5 apart on some processors
    for seen in four()["resumed on four"]:
        _near(seen, two()["plain"][0], evals=False)
