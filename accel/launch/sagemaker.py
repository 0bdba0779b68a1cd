"""A launch on Amazon SageMaker: what its estimator is given, as Accelerate gives it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from accel.settings.env_variables import variables

from .errors import LaunchError, Refused
from .worker import Program

_DISTRIBUTION = {"DATA_PARALLEL": {"smdistributed": {"dataparallel": {"enabled": True}}}}


def submit(options: Mapping[str, Any], program: Program) -> int:
    """Starts the training job and follows it to its end. Raises LaunchError."""
    arguments = estimator_arguments(options, program)
    inputs = dict(_table(options["sagemaker_inputs_file"])) if options["sagemaker_inputs_file"] else None
    os.environ.update(credentials(options))
    try:
        from sagemaker.huggingface import HuggingFace
    except ImportError:  # version 3 has other classes
        raise LaunchError(
            "compute_environment: AMAZON_SAGEMAKER needs version 2 of the SageMaker SDK: pip install 'sagemaker<3'"
        ) from None

    estimator = HuggingFace(**arguments)
    estimator.fit(inputs=inputs)
    print(f"model: {estimator.model_data}")
    return 0


def credentials(options: Mapping[str, Any]) -> dict[str, str]:
    """The variables by which the SDK finds the account. Raises Refused where none could be found."""
    region = {"AWS_DEFAULT_REGION": str(options["region"])}
    if options["profile"] is not None:
        return region | {"AWS_PROFILE": str(options["profile"])}
    if options["aws_access_key_id"] is not None:
        names = ("aws_access_key_id", "aws_secret_access_key")
        return region | {name.upper(): str(options[name]) for name in names}
    if "AWS_ACCESS_KEY_ID" in os.environ or "AWS_PROFILE" in os.environ:
        return region
    raise Refused(
        "no AWS credentials: name a profile in the configuration file, or set AWS_ACCESS_KEY_ID and "
        "AWS_SECRET_ACCESS_KEY, or give --aws_access_key_id and --aws_secret_access_key"
    )


def estimator_arguments(options: Mapping[str, Any], program: Program) -> dict[str, Any]:
    """What SageMaker's Hugging Face estimator is made with. Raises Refused."""
    folder, script = os.path.split(program.argv[0])
    if program.entry != "script" or not script.endswith(".py"):
        raise Refused(f"SageMaker runs a Python script, not {program.argv[0]!r}: leave out -m and --no_python")
    for name in ("ec2_instance_type", "iam_role_name"):
        if options[name] is None:
            raise Refused(f"the configuration file must say {name} for SageMaker")
    kind = options["distributed_type"] or "NO"
    environment = {"ACCELERATE_USE_SAGEMAKER": "true", "ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE": kind}
    metrics = options["sagemaker_metrics_file"]
    arguments = {
        "image_uri": options["image_uri"],
        "entry_point": script,
        "source_dir": folder or ".",
        "role": options["iam_role_name"],
        "transformers_version": options["transformers_version"],
        "pytorch_version": options["pytorch_version"],
        "py_version": options["py_version"],
        "base_job_name": options["base_job_name"],
        "instance_count": int(options["num_machines"] or 1),
        "instance_type": options["ec2_instance_type"],
        "debugger_hook_config": False,
        "distribution": _DISTRIBUTION.get(kind),
        "hyperparameters": hyperparameters(program.argv[1:]),
        "environment": environment | variables(options),
        "metric_definitions": [{"Name": n, "Regex": r} for n, r in _table(metrics)] if metrics else None,
    }
    return arguments | (options["additional_args"] or {})


def hyperparameters(words: list[str]) -> dict[str, Any]:
    """The script's `--name value` words, by name, with numbers and truth values as such. Raises Refused.

    SageMaker hands every one back as `--name value`: an option without a value cannot pass.
    """
    found: dict[str, Any] = {}
    rest = list(words)
    while rest:
        name, equals, value = rest.pop(0).partition("=")
        if not name.startswith("-"):
            raise Refused(f"SageMaker takes --name value, not {name!r}")
        if not equals:
            if not rest or _is_option(rest[0]):
                raise Refused(f"SageMaker takes no option without a value: {name}")
            value = rest.pop(0)
        found[name.lstrip("-")] = _typed(value)
    return found


def _is_option(word: str) -> bool:
    return word.startswith("-") and isinstance(_typed(word), str)


def _typed(text: str) -> Any:
    if text in ("True", "False"):
        return text == "True"
    try:
        number = float(text)
    except ValueError:
        return text
    return int(number) if number.is_integer() else number


def _table(path: str) -> list[tuple[str, str]]:
    """A file of two columns with a tab between them, after its heading. Raises Refused."""
    try:
        with open(path, encoding="utf-8") as file:
            lines = file.read().splitlines()[1:]
    except OSError as error:
        raise Refused(f"{path} cannot be read: {error.strerror}") from None
    rows = []
    for number, line in enumerate(lines, start=2):
        name, tab, value = line.partition("\t")
        if not tab:
            raise Refused(f"{path}:{number}: two columns with a tab between them, not {line!r}")
        rows.append((name, value.strip()))
    return rows
