"""Files of every version of Accelerate: each key that one has written loads, is migrated, and is rewritten by `update`.

`file_keys.tsv` holds the keys, with the versions whose configuration classes and questionnaires have them;
`file_values.tsv` the values of those that have few, as those versions' enumerations and menus have them.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from accel.cli import exit_status, main
from accel.enums import DynamoBackend
from accel.settings import BY_NAME, Setting
from accel.settings.config_file import (
    _PREFIXES,
    _REMOVED_KEYS,
    _RENAMED,
    _SECTIONS,
    BadEntry,
    read_document,
    to_document,
)
from tests.needs import package

from .lines import options

with open(Path(__file__).with_name("file_keys.tsv"), encoding="utf-8", newline="") as file:
    KEYS = [(row["section"], row["key"], row["versions"].split()) for row in csv.DictReader(file, delimiter="\t")]
with open(Path(__file__).with_name("file_values.tsv"), encoding="utf-8", newline="") as file:
    VALUES = [tuple(row.values()) for row in csv.DictReader(file, delimiter="\t")]
VERSIONS = sorted({version for _, _, versions in KEYS for version in versions}, key=lambda v: [*map(int, v.split("."))])
OF_SAGEMAKER = {"ec2_instance_type", "iam_role_name", "image_uri", "profile", "region", "base_job_name", "py_version",
                "pytorch_version", "transformers_version", "sagemaker_inputs_file", "sagemaker_metrics_file",
                "additional_args"}  # fmt: skip
OF_BOTH = {"compute_environment", "distributed_type", "mixed_precision", "debug", "num_machines", "dynamo_backend",
           "enable_cpu_affinity", "use_cpu"}  # fmt: skip
# What no file has beside the rest of its section, or what the versions after it would refuse there.
_CONTRADICT = {"deepspeed_config_file", "deepspeed_inclusion_filter", "fsdp_version", "gpu_ids"}
BY_HAND: dict[str, Any] = {
    "compute_environment": "LOCAL_MACHINE", "dynamo_backend": "INDUCTOR", "num_machines": 2, "machine_rank": 1,
    "tpu_env": ["A=1"], "additional_args": {"max_run": 60}, "fsdp_reshard_after_forward": True, "downcast_bf16": "no",
    "mpirun_ccl": "1",
}  # fmt: skip
_WAYS = {"deepspeed_config": "DEEPSPEED", "fsdp_config": "FSDP", "megatron_lm_config": "MEGATRON_LM"}


def sample(section: str, key: str) -> Any:
    """A value that the versions with this key write there."""
    if key in BY_HAND:
        return BY_HAND[key]
    renamed, name = _RENAMED.get((section, key), (section, key))
    setting: Setting | None = BY_NAME.get(name) or _SECTIONS.get(renamed, {}).get(name)
    setting = setting or _SECTIONS.get(renamed, {}).get(f"{_PREFIXES.get(renamed, '')}{name}")
    if setting is None:
        return True  # of what nothing reads any more
    numbers = {"whole": 1, "positive": 1, "number": 0.5, "yesno": True, "switch": True, "yesnos": "(true, false, true)"}
    default = setting.choices[0] if setting.choices else numbers.get(setting.kind, "word")
    return ["word"] if setting.kind == "words" else default


def document(version: str, *, way: str, sagemaker: bool) -> dict[str, Any]:
    """A file of that version with all its keys that one file can have."""
    found: dict[str, Any] = {}
    for section, key, versions in KEYS:
        if version not in versions or (not section and key.endswith("_config")) or key in _CONTRADICT:
            continue
        if section in (way, *(("ipex_config", "mpirun_config") if not way and not sagemaker else ())) and section:
            found.setdefault(section, {})[key] = sample(section, key)
        elif not section and (key in OF_BOTH or (key in OF_SAGEMAKER) is sagemaker):
            found[key] = sample(section, key)
    found["distributed_type"] = "DATA_PARALLEL" if sagemaker else _WAYS.get(way, "MULTI_CPU")
    found["use_cpu"] = not way and not sagemaker
    if sagemaker:
        found["compute_environment"] = "AMAZON_SAGEMAKER"
    return found


CASES = [
    *((version, way, False) for version in VERSIONS for way in ("", "fsdp_config", "deepspeed_config")),
    *((version, "", True) for version in VERSIONS),
]


@pytest.mark.parametrize(("version", "way", "sagemaker"), CASES)
@pytest.mark.parametrize("form", ["yaml", "json"])
def test_a_file_with_all_its_keys(version: str, way: str, sagemaker: bool, form: str, somewhere: Path) -> None:
    held = document(version, way=way, sagemaker=sagemaker)
    name = f"old.{form}"
    dump = json.dumps if form == "json" else yaml.safe_dump
    Path(name).write_text(dump(held))
    said = {setting: entry.value for setting, entry in read_document(held).items()}
    loaded = options("--config_file", name)
    assert {key: loaded[key] for key in said} == {**said, "cpu": loaded["cpu"]}
    assert main(["config", "update", "--config_file", name]) == exit_status.OK
    updated = yaml.safe_load(Path(name).read_text())
    again = {setting: entry.value for setting, entry in read_document(updated).items()}
    assert {key: again[key] for key in said} == said
    old = {(section, key) for section in ("", *_PREFIXES) for key in _keys(updated, section)}
    assert not old & (_REMOVED_KEYS | (_RENAMED.keys() - {("deepspeed_config", "gradient_accumulation_steps")}))
    text = Path(name).read_text()
    assert main(["config", "update", "--config_file", name]) == exit_status.OK
    assert Path(name).read_text() == text


def _keys(held: dict[str, Any], section: str) -> list[str]:
    return list(held if not section else held.get(section, {}))


@pytest.mark.parametrize(("version", "way", "sagemaker"), CASES)
@pytest.mark.usefixtures("somewhere")
def test_an_updated_file_is_accelerates_too(version: str, way: str, sagemaker: bool) -> None:
    config_args = package("accelerate.commands.config.config_args")
    Path("old.yaml").write_text(yaml.safe_dump(document(version, way=way, sagemaker=sagemaker)))
    assert main(["config", "update", "--config_file", "old.yaml"]) == exit_status.OK
    loaded = config_args.load_config_from_file("old.yaml")
    assert loaded.distributed_type.value == ("DATA_PARALLEL" if sagemaker else _WAYS.get(way, "MULTI_CPU"))


def test_every_value_that_a_version_has_written_is_read_and_written_as_one_of_today() -> None:
    refused = []
    for section, key, value, versions in VALUES:
        plain: Any = int(value) if value.isdigit() else {"true": True, "false": False}.get(value, value)
        on = {"dynamo_backend": "INDUCTOR"} if section == "dynamo_config" else {}
        held = {section: {**on, key: plain}} if section else {key: plain}
        try:
            first = {name: entry.value for name, entry in read_document(held).items()}
            again = {name: entry.value for name, entry in read_document(to_document(first)).items()}
        except BadEntry as error:
            refused.append(f"{error} ({versions})")
        else:
            assert value in ("NO", "none") or {name: again[name] for name in first} == first
            if key == "dynamo_backend":
                assert first["dynamo_backend"].upper() in DynamoBackend.list()
    assert refused == []


def test_the_values_are_those_of_the_version_beside_us() -> None:
    """What Accelerate's enumerations have today, the table has."""
    theirs = package("accelerate.utils.dataclasses")
    for key, enumeration in (("dynamo_backend", theirs.DynamoBackend), ("distributed_type", theirs.DistributedType)):
        known = {value for _, name, value, versions in VALUES if name == key and VERSIONS[-1] in versions.split()}
        assert {member.value for member in enumeration} <= known


def test_the_versions_are_many() -> None:
    assert (VERSIONS[0], VERSIONS[-1]) == ("0.10.0", "1.15.0")
    assert len(VERSIONS) > 10


def test_tensor_parallelism_as_it_was() -> None:
    found = read_document({"distributed_type": "TP", "tp_config": {"tp_size": 4}})
    assert found["parallelism_config_tp_size"].value == 4
    assert found["distributed_type"].value == "MULTI_GPU"
