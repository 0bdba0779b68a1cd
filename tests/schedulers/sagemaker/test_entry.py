"""The program in the container, by its parts."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from schedulers.sagemaker import entry, toolkit_env
from tests.clusters.sagemaker_sdk import toolkit


def test_an_old_python_can_tell_why_it_cannot_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    ast.parse(Path(entry.__file__).read_text(), feature_version=(3, 8))
    monkeypatch.setattr(entry, "_PYTHON", (3, 99))
    with pytest.raises(entry.EntryError, match=r"the image has Python 3\.[\d.]+, and accel needs 3\.99"):
        entry.check()


@pytest.mark.parametrize(
    ("adapters", "instance_type", "given"),
    [
        ((), "ml.p4d.24xlarge", {}),
        (("efa_0",), "ml.g5.48xlarge", {"FI_PROVIDER": "efa"}),
        (("rdmap16s27",), "ml.p5.48xlarge", {"FI_PROVIDER": "efa", "FI_EFA_USE_DEVICE_RDMA": "1"}),
    ],
)
def test_variables_of_efa(
    adapters: tuple[str, ...],
    instance_type: str,
    given: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for directory in ("input/data/code", "input/config", "sys", *(f"sys/{name}" for name in adapters)):
        (tmp_path / directory).mkdir(parents=True)
    resources = {"current_instance_type": instance_type, "network_interface_name": "ethwe"}
    (tmp_path / "input/config/resourceconfig.json").write_text(json.dumps(resources))
    monkeypatch.setattr(entry, "_EFA", str(tmp_path / "sys"))
    settings = {"environment": {}, "secrets": {}, "spec": {"argv": ["train.py"]}}
    env = entry.environment(str(tmp_path), str(tmp_path), settings)
    assert {name: value for name, value in env.items() if name.startswith("FI_") or "SOCKET_IFNAME" in name} == given


RESOURCES = {
    "current_host": "algo-2",
    "current_instance_type": "ml.m5.xlarge",
    "current_group_name": "workers",
    "hosts": ["algo-1", "algo-2"],
    "instance_groups": [
        {"instance_group_name": "workers", "instance_type": "ml.m5.xlarge", "hosts": ["algo-2"]},
        {"instance_group_name": "head", "instance_type": "ml.m5.large", "hosts": ["algo-1"]},
    ],
    "network_interface_name": "eth0",
}
PARAMETERS = {
    "lr": "0.1",
    "n": '{"b": 1, "a": null}',
    "name": "x y",
    "sagemaker_region": '"eu-west-1"',
    "sagemaker_x": "1",
}
PRINT = """
import json, os
from sagemaker_training import environment
names = ("CURRENT_HOST", "SAGEMAKER_JOB_NAME", "SAGEMAKER_REGION")
variables = environment.Environment().to_env_vars()
print(json.dumps({**variables, **{name: os.environ[name] for name in names}}))
"""


def decoded(variables: dict[str, str]) -> dict[str, Any]:
    return {**variables, "SM_TRAINING_ENV": json.loads(variables["SM_TRAINING_ENV"])}


def test_the_variables_are_those_of_the_toolkit(tmp_path: Path) -> None:
    files = {
        "resourceconfig": RESOURCES,
        "hyperparameters": PARAMETERS,
        "inputdataconfig": {"code": {}, "train": {"a": 1}},
    }
    (tmp_path / "input/config").mkdir(parents=True)
    for name, content in files.items():
        (tmp_path / f"input/config/{name}.json").write_text(json.dumps(content))
    (tmp_path / "input/data/code").mkdir(parents=True)
    env = {
        **os.environ,
        "PYTHONPATH": str(toolkit()),
        "SAGEMAKER_BASE_DIR": str(tmp_path),
        "SAGEMAKER_PROGRAM": "train.py",
        "TRAINING_JOB_NAME": "run-1",
    }
    done = subprocess.run([sys.executable, "-c", PRINT], env=env, capture_output=True, check=True)
    ours = toolkit_env.variables(str(tmp_path), str(tmp_path / "code"), "train.py", env)
    assert decoded(ours) == decoded(json.loads(done.stdout))
