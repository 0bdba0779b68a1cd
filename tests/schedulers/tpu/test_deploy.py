"""deploy/tpu: the files are HCL and JSON, their references lead somewhere, and the page says what is there."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from schedulers.config.schema import make_options
from schedulers.tpu.options import TpuOptions, check
from tests.hcl import module, plain
from tests.needs import package

from .conftest import ROOT

HERE = ROOT / "deploy/tpu"
# https://cloud.google.com/iam/docs/roles-permissions/tpu
PERMISSIONS = {
    *(f"tpu.nodes.{verb}" for verb in (
        "create", "delete", "get", "list", "performMaintenance", "reimage", "reset", "simulateMaintenanceEvent",
        "start", "stop", "update",
    )),
    "tpu.operations.get", "tpu.operations.list",
}  # fmt: skip


def resources() -> dict[str, dict[str, object]]:
    return {
        f"{kind}.{name}": body
        for each in module(HERE)["resource"] for kind, named in each.items() for name, body in named.items()
    }  # fmt: skip


def test_references_lead_somewhere() -> None:
    text = "".join(path.read_text() for path in sorted(HERE.glob("*.tf")))
    references = set(re.findall(r"\b(google_\w+\.\w+)[.\[]", text))
    assert references
    assert references <= set(resources())
    assert set(re.findall(r"\bvar\.(\w+)", text)) == {name for each in module(HERE)["variable"] for name in each}
    (local,) = module(HERE)["locals"]
    assert set(re.findall(r"\blocal\.(\w+)", text)) == set(local)


@pytest.mark.parametrize("name", ["slice", "launcher"])
def test_the_roles(name: str) -> None:
    role = json.loads((HERE / f"{name}.json").read_text())
    assert set(role) == {"title", "description", "stage", "includedPermissions"}
    assert set(role["includedPermissions"]) <= PERMISSIONS
    assert role["includedPermissions"] == sorted(role["includedPermissions"])
    made = resources()[f"google_project_iam_custom_role.{name}"]
    assert made["permissions"] == f"${{local.{name}.includedPermissions}}"


def test_a_slice_may_do_least() -> None:
    """It deletes itself; its account has the bucket's objects and logs, and nothing else."""
    role = json.loads((HERE / "slice.json").read_text())
    assert role["includedPermissions"] == ["tpu.nodes.delete", "tpu.nodes.get"]
    member = "${google_service_account.slice.member}"
    held = {str(each["role"]) for each in resources().values() if each.get("member") == member}
    own = "${google_project_iam_custom_role.slice.id}"
    assert held == {own, "roles/logging.logWriter", "roles/storage.objectUser"}


def test_terraform_would_write_it_the_same() -> None:
    if shutil.which("terraform") is None:  # in CI too, where no package has it
        pytest.skip("terraform is missing: https://developer.hashicorp.com/terraform/install")
    done = subprocess.run(["terraform", "fmt", "-check", "-diff", HERE], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_what_comes_out_of_it_is_a_target() -> None:
    outputs = {name for each in module(HERE)["output"] for name in each}
    assert outputs == {"service_account", "checkpoint_uri", "name"}
    given = {
        "zone": "us-central2-b", "accelerator_type": "v4-32", "version": "v", "service_account": "a@b",
        "checkpoint_uri": "gs://my-results/checkpoints/{id}",
    }  # fmt: skip
    check(make_options(TpuOptions, given, {}, lambda path, of_key: "target t")[0], "t")


def test_the_page_says_what_is_there() -> None:
    page = (HERE / "README.md").read_text()
    files = {path.name for path in HERE.iterdir()} - {"README.md"}
    assert [name for name in sorted(files) if f"`{name}`" not in page] == []
    (example,) = re.findall(r"```hcl\n(.*?)```", page, re.DOTALL)
    (call,) = plain(package("hcl2").loads(example))["module"]
    variables = {name: body for each in module(HERE)["variable"] for name, body in each.items()}
    assert set(call["accel"]) - {"source"} == {name for name, body in variables.items() if "default" not in body}
    (script,) = re.findall(r"`(schedulers/\S+\.py)`", page)
    assert (ROOT / script).exists()
    lines = re.sub(r" \\\n +", " ", page)
    commands = [shlex.split(line) for line in re.findall(r"^\$ gcloud (.*)$", lines, re.MULTILINE)]
    named = {word.rpartition("/")[2] for words in commands for word in words if word.endswith(".json")}
    assert named == {"slice.json", "launcher.json"}
    roles = {words[words.index("--role") + 1].rpartition("/")[2] for words in commands if "--role" in words}
    assert roles == {
        "accelSlice", "accelLauncher", "logging.logWriter", "storage.objectUser", "iam.serviceAccountUser",
    }  # fmt: skip
    assert Path(HERE / "main.tf").read_text().count("roles/storage.objectUser") == 1
