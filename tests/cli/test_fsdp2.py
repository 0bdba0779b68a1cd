"""`accel to-fsdp2`: the file it writes says the same to FSDP2."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from accel.cli import exit_status, main
from accel.cli.launch_file import read_file
from tests.needs import package

FSDP1 = {
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_backward_prefetch": "BACKWARD_PRE",
    "fsdp_cpu_ram_efficient_loading": True,
    "fsdp_forward_prefetch": False,
    "fsdp_offload_params": False,
    "fsdp_sharding_strategy": "FULL_SHARD",
    "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    "fsdp_sync_module_states": True,
    "fsdp_transformer_layer_cls_to_wrap": "BertLayer",
    "fsdp_use_orig_params": True,
}
FSDP2 = {
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_cpu_ram_efficient_loading": True,
    "fsdp_offload_params": False,
    "fsdp_reshard_after_forward": True,
    "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    "fsdp_transformer_layer_cls_to_wrap": "BertLayer",
    "fsdp_version": 2,
}
REST = {"distributed_type": "FSDP", "num_processes": 8, "mixed_precision": "bf16", "main_process_ip": None}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one.yaml").write_text(yaml.safe_dump({**REST, "fsdp_config": FSDP1}))
    (tmp_path / "one.json").write_text(json.dumps({**REST, "fsdp_config": FSDP1}))
    return tmp_path


def test_it_is_rewritten(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["to-fsdp2", "--config_file", "one.yaml", "--output_file", "two.yaml"]) == exit_status.OK
    said = capsys.readouterr()
    assert said.out == "two.yaml\n"
    assert [line.split()[2] for line in said.err.splitlines()] == [
        "fsdp_backward_prefetch",
        "fsdp_forward_prefetch",
        "fsdp_sync_module_states",
        "fsdp_use_orig_params",
    ]
    assert yaml.safe_load((here / "two.yaml").read_text()) == {**REST, "fsdp_config": FSDP2}
    assert yaml.safe_load((here / "one.yaml").read_text())["fsdp_config"] == FSDP1


def test_in_place_and_json(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["to-fsdp2", "--config-file", "one.json", "--overwrite", "--json"]) == exit_status.OK
    shown = json.loads(capsys.readouterr().out)
    assert shown["file"] == "one.json"
    assert shown["settings"] == FSDP2
    assert len(shown["dropped"]) == 4
    assert json.loads((here / "one.json").read_text()) == {**REST, "fsdp_config": FSDP2}
    assert sorted(os.listdir(here)) == ["one.json", "one.yaml"]


@pytest.mark.parametrize("name", ["yaml", "json"])
def test_the_result_is_what_accelerate_makes_and_loads(here: Path, name: str) -> None:
    package("accelerate")
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.to_fsdp2 import convert_config_to_fsdp2

    assert main(["to-fsdp2", "--config_file", f"one.{name}", "--output_file", f"two.{name}"]) == exit_status.OK
    loaded = load_config_from_file(str(here / f"two.{name}"))
    assert loaded.fsdp_config == convert_config_to_fsdp2({"fsdp_config": dict(FSDP1)})["fsdp_config"]


def test_the_result_is_what_launch_takes(here: Path) -> None:
    assert main(["to-fsdp2", "--config_file", "one.yaml", "--output_file", "two.yaml"]) == exit_status.OK
    entries = read_file("accel launch", "two.yaml").entries
    assert entries["fsdp_version"].value in (2, "2")
    assert entries["fsdp_reshard_after_forward"].value in (True, "true")
    assert entries["num_processes"].value == 8


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"fsdp_sharding_strategy": "SHARD_GRAD_OP"}, False),
        ({"fsdp_sharding_strategy": 1}, True),
        ({"fsdp_sharding_strategy": "2"}, False),
        ({"fsdp_sharding_strategy": "HYBRID_SHARD"}, True),
        ({"fsdp_sharding_strategy": "NO_SHARD"}, False),
        ({"fsdp_reshard_after_forward": "FULL_SHARD"}, True),
        ({"fsdp_reshard_after_forward": False}, False),
        ({"fsdp_reshard_after_forward": "true"}, True),
        ({"fsdp_reshard_after_forward": True, "fsdp_sharding_strategy": "SHARD_GRAD_OP"}, False),
        ({"sharding_strategy": "SHARD_GRAD_OP", "backward_prefetch": "BACKWARD_PRE", "version": 1}, False),
        ({"sharding_strategy": 1, "backward_prefetch_policy": "BACKWARD_PRE", "use_orig_params": True}, True),
    ],
)
def test_strategies(here: Path, given: dict[str, Any], expected: bool, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "a.yaml").write_text(yaml.safe_dump({"fsdp_config": given}))
    (here / "a.yaml").chmod(0o600)
    assert main(["to-fsdp2", "--config_file", "a.yaml", "--overwrite"]) == exit_status.OK
    assert (here / "a.yaml").stat().st_mode & 0o777 == 0o600
    written = yaml.safe_load((here / "a.yaml").read_text())
    assert written == {"fsdp_config": {"fsdp_reshard_after_forward": expected, "fsdp_version": 2}}
    shards_otherwise = any(word in str(given) for word in ("HYBRID", "NO_SHARD"))
    assert ("is a device mesh in FSDP2" in capsys.readouterr().err) == shards_otherwise


@pytest.mark.parametrize(
    ("text", "argv", "message"),
    [
        (None, ["--overwrite"], "--config_file: cannot read a.yaml: it does not exist"),
        ("", ["--overwrite"], "a.yaml has no fsdp_config"),
        ("a: 2024-13-99", ["--overwrite"], "--config_file: a.yaml:1: a value cannot be read"),
        ("[" * 3000, ["--overwrite"], "--config_file: a.yaml:1: nested too deeply"),
        ("fsdp_config: {fsdp_shardin_strategy: 1}", ["--overwrite"], "did you mean 'fsdp_sharding_strategy'?"),
        ("fsdp_config: {version: 2}", ["--overwrite"], "a.yaml is for FSDP2 already"),
        ("fsdp_config: 3", ["--overwrite"], "a.yaml:1: fsdp_config must hold settings, not 3"),
        ("num_processes: 1", ["--overwrite"], "a.yaml has no fsdp_config"),
        ("fsdp_config: {fsdp_version: 2}", ["--overwrite"], "a.yaml is for FSDP2 already"),
        ("fsdp_config: {fsdp_version: 3}", ["--overwrite"], "fsdp_version: 3 is not one of 1, 2"),
        ("fsdp_config: {fsdp_sharding_strategy: FULL}", ["--overwrite"], "'FULL' is not one of FULL_SHARD"),
        ("fsdp_config: {version: 1}", [], "no output file: give --output_file FILE, or --overwrite"),
        (
            "fsdp_config: {version: 1}",
            ["--output_file", "one.yaml"],
            "one.yaml already exists: --overwrite replaces it",
        ),
        ("fsdp_config: {version: 1}", ["--output_file", "one.yaml/two.yaml"], "two.yaml: Not a directory"),
    ],
)
def test_what_cannot_be_rewritten_is_one_line(
    here: Path, text: str | None, argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if text is not None:
        (here / "a.yaml").write_text(text)
    assert main(["to-fsdp2", "--config_file", "a.yaml", *argv]) == exit_status.USAGE
    said = capsys.readouterr()
    assert message in said.err
    assert said.err.count("\n") == 1
    assert text is None or (here / "a.yaml").read_text() == text
