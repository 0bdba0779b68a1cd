"""The program in the container, by its parts."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from schedulers.sagemaker import entry


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
    env = entry.environment(str(tmp_path), str(tmp_path), {"environment": {}, "secrets": {}})
    assert {name: value for name, value in env.items() if name.startswith("FI_") or "SOCKET_IFNAME" in name} == given
