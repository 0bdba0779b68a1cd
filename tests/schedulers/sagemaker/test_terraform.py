"""deploy/sagemaker: the Terraform module says what the AWS provider knows, and reads the policies that are there."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from tests.hcl import module, plain
from tests.needs import package

from .aws_provider import FILE
from .test_policies import HERE, NAMES

PROVIDER: Mapping[str, Any] = json.loads(FILE.read_text())
_REFERENCE = re.compile(r"\b((?:data\.)?aws_\w+)\.(\w+)\.(\w+)")


def resources() -> dict[str, dict[str, Any]]:
    """`aws_s3_bucket.jobs`, and with `data.` before it, -> its arguments."""
    return {
        f"{prefix}{kind}.{name}": body
        for word, prefix in (("resource", ""), ("data", "data."))
        for each in module(HERE)[word] for kind, named in each.items() for name, body in named.items()
    }  # fmt: skip


def problems(known: Mapping[str, Any], said: Mapping[str, Any], where: str) -> Iterator[str]:
    for name, value in said.items():
        if name not in known["arguments"]:
            yield f"{where}: no argument {name}"
        elif (inner := known["arguments"][name]) is not None and isinstance(value, list):
            for each in value:
                yield from problems(inner, each, f"{where}.{name}")
    yield from (f"{where}: {name} is missing" for name in known["required"] if name not in said)


@pytest.mark.parametrize("address", resources())
def test_a_resource_is_what_the_provider_takes(address: str) -> None:
    assert list(problems(PROVIDER[address.rpartition(".")[0]], resources()[address], address)) == []


def test_what_the_provider_does_not_take_is_seen() -> None:
    rule = {"bucket": "b", "rule": [{"name": "x", "status": "Enabled"}]}
    found = list(problems(PROVIDER["aws_s3_bucket_lifecycle_configuration"], rule, "it"))
    assert found == ["it.rule: no argument name", "it.rule: id is missing"]


def test_references_lead_somewhere() -> None:
    text = "".join(path.read_text() for path in sorted(HERE.glob("*.tf")))
    known = resources()
    references = set(_REFERENCE.findall(text))
    assert references
    for kind, name, attribute in references:
        assert f"{kind}.{name}" in known
        assert attribute in PROVIDER[kind]["attributes"]
    variables = {name for each in module(HERE)["variable"] for name in each}
    assert set(re.findall(r"\bvar\.(\w+)", text)) == variables


def test_it_reads_the_policies() -> None:
    """Each of them, with a value for all that stands in braces."""
    (local,) = module(HERE)["locals"]
    assert set(local["names"]) == set(NAMES)
    known = resources()
    path = '"${path.module}/%s.json"'
    assert known["aws_iam_role.execution"]["assume_role_policy"] == f"${{file({path % 'trust'})}}"
    for address, name in (("aws_iam_role_policy.execution", "execution"), ("aws_iam_policy.launcher", "launcher")):
        assert known[address]["policy"] == f"${{templatefile({path % name}, local.names)}}"


def test_the_page_says_what_is_there() -> None:
    page = (HERE / "README.md").read_text()
    files = {path.name for path in HERE.iterdir()} - {"README.md"}
    assert [name for name in sorted(files) if f"`{name}`" not in page] == []
    (example,) = re.findall(r"```hcl\n(.*?)```", page, re.DOTALL)
    (call,) = plain(package("hcl2").loads(example))["module"]
    variables = {name: body for each in module(HERE)["variable"] for name, body in each.items()}
    assert set(call["accel"]) - {"source"} == {name for name, body in variables.items() if "default" not in body}
    outputs = {name for each in module(HERE)["output"] for name in each}
    assert outputs == {"role", "s3_output_path", "launcher_policy"}
    assert [name for name in sorted(outputs) if f"`{name}`" not in page] == []
    (exported,) = re.findall(r"^\$ export (.*)$", page, re.MULTILINE)
    assert {word.partition("=")[0] for word in exported.split()} == set(NAMES)
