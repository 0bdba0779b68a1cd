"""Validation of requests to SageMaker: botocore's model of the service, and the rules between parameters."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from tests.needs import package

_DAYS_28 = 28 * 24 * 3600
# Java's classes, inside the brackets of a character class. `\w` has an underscore that is not of `\p{L}` or `\p{N}`,
# but of every class that botocore's model has together with these.
_SEPARATORS = r" \u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_JAVA = {r"\p{L}": r"\w", r"\p{N}": "", r"\p{Z}": _SEPARATORS, r"\p{Alnum}": "a-zA-Z0-9"}


class Refused(Exception):
    """An error reply, as AWS words it."""

    def __init__(self, code: str, message: str, status: int = 400) -> None:
        super().__init__(f"{code}: {message}")
        self.code, self.message, self.status = code, message, status


def not_valid(message: str) -> Refused:
    return Refused("ValidationException", message)


@cache
def service_model(service: str) -> Any:
    return package("botocore.session").get_session().get_service_model(service)


def check_request(operation: str, request: Mapping[str, Any], service: str = "sagemaker") -> None:
    """Raise Refused where a parameter breaks the model, or two of them do not go together."""
    shape = service_model(service).operation_model(operation).input_shape
    problems = list(_problems(shape, request, ""))
    if problems:
        count = "1 validation error" if len(problems) == 1 else f"{len(problems)} validation errors"
        raise not_valid(f"{count} detected: {'; '.join(problems)}")
    report = package("botocore.validate").ParamValidator().validate(request, shape)
    if report.has_errors():  # a wrong type, or a parameter that does not exist
        raise Refused("SerializationException", report.generate_report())
    if operation == "CreateTrainingJob":
        for message in _conflicts(request):
            raise not_valid(message)


def check_reply(operation: str, reply: Mapping[str, Any], service: str = "sagemaker") -> None:
    """Raise AssertionError for a reply that the service would not send."""
    shape = service_model(service).operation_model(operation).output_shape
    if shape is not None:
        report = package("botocore.validate").ParamValidator().validate(reply, shape)
        assert not report.has_errors(), report.generate_report()


def _problems(shape: Any, value: Any, path: str) -> Iterator[str]:
    """What the service checks and its client does not: null, lengths, patterns, enums, at any depth."""
    kind = shape.type_name
    if kind == "structure" and isinstance(value, dict):
        for name in shape.required_members:
            if value.get(name) is None:
                yield _problem(None, _join(path, name), "Member must not be null")
        for name in shape.members.keys() & value.keys():
            yield from _problems(shape.members[name], value[name], _join(path, name))
    elif kind == "list" and isinstance(value, list):
        yield from _sizes(shape, value, path, "length", len(value))
        for number, item in enumerate(value, start=1):
            yield from _problems(shape.member, item, f"{path}.{number}.member")
    elif kind == "map" and isinstance(value, dict):
        yield from _sizes(shape, value, path, "length", len(value))
        for key, item in value.items():
            yield from _problems(shape.key, key, f"{path}.key")
            yield from _problems(shape.value, item, f"{path}.{key}.member")
    elif kind == "string" and isinstance(value, str):
        yield from _sizes(shape, value, path, "length", len(value))
        pattern = shape.metadata.get("pattern")
        if pattern is not None and not _compiled(pattern).fullmatch(value):
            yield _problem(value, path, f"Member must satisfy regular expression pattern: {pattern}")
        # New instance types are accepted before botocore lists them.
        if shape.enum and value not in shape.enum and not shape.name.endswith("InstanceType"):
            yield _problem(value, path, f"Member must satisfy enum value set: [{', '.join(shape.enum)}]")
    elif kind in ("integer", "long") and isinstance(value, int):
        yield from _sizes(shape, value, path, "value", value)


def _sizes(shape: Any, value: Any, path: str, what: str, size: int) -> Iterator[str]:
    bounds = shape.metadata
    if "min" in bounds and size < bounds["min"]:
        yield _problem(value, path, f"Member must have {what} greater than or equal to {bounds['min']}")
    if "max" in bounds and size > bounds["max"]:
        yield _problem(value, path, f"Member must have {what} less than or equal to {bounds['max']}")


def _problem(value: Any, path: str, constraint: str) -> str:
    quoted = "Value" if value is None else f"Value '{value}'"
    return f"{quoted} at '{path}' failed to satisfy constraint: {constraint}"


def _join(path: str, name: str) -> str:
    return f"{path}.{name[0].lower()}{name[1:]}" if path else name[0].lower() + name[1:]


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    """A pattern of Java, in which `\\d`, `\\w` and `\\s` are ASCII and `.` is no line break."""
    translated = pattern
    for java, python in _JAVA.items():
        translated = translated.replace(java, python)
    return re.compile(translated, re.UNICODE if r"\p{L}" in pattern else re.ASCII)


def _conflicts(request: Mapping[str, Any]) -> Iterator[str]:
    """The rules of CreateTrainingJob that its model does not hold."""
    if absent := [name for name in ("AlgorithmSpecification", "ResourceConfig") if name not in request]:
        yield f"{absent[0]} is required."
    algorithm = request.get("AlgorithmSpecification", {})
    if ("TrainingImage" in algorithm) == ("AlgorithmName" in algorithm):
        yield "You must provide exactly one of TrainingImage and AlgorithmName in AlgorithmSpecification."
    yield from _resource_conflicts(request.get("ResourceConfig", {}))
    stopping = request.get("StoppingCondition", {})
    runtime, wait = stopping.get("MaxRuntimeInSeconds", 24 * 3600), stopping.get("MaxWaitTimeInSeconds")
    spot = request.get("EnableManagedSpotTraining", False)
    if runtime > _DAYS_28:
        yield f"MaxRuntimeInSeconds {runtime} exceeds the limit of {_DAYS_28} seconds."
    if spot and wait is None:
        yield "MaxWaitTimeInSeconds is required when EnableManagedSpotTraining is true."
    if not spot and wait is not None:
        yield "MaxWaitTimeInSeconds must not be set when EnableManagedSpotTraining is false."
    if wait is not None and wait < runtime:
        yield "Invalid MaxWaitTimeInSeconds. It must be present and be greater than or equal to MaxRuntimeInSeconds."
    if spot and request.get("ResourceConfig", {}).get("KeepAlivePeriodInSeconds"):
        yield "KeepAlivePeriodInSeconds is not supported when EnableManagedSpotTraining is true."
    channels = [channel["ChannelName"] for channel in request.get("InputDataConfig", [])]
    if len(set(channels)) != len(channels):
        yield f"Duplicate channel names: {', '.join(channels)}."
    keys = [tag["Key"] for tag in request.get("Tags", [])]
    if len(set(keys)) != len(keys):
        yield f"Duplicate tag keys: {', '.join(keys)}."
    if any(key.lower().startswith("aws:") for key in keys):
        yield "aws: prefixed tag key names are not allowed for external use."


def _resource_conflicts(resources: Mapping[str, Any]) -> Iterator[str]:
    groups = resources.get("InstanceGroups")
    if groups:
        if "InstanceType" in resources or "InstanceCount" in resources:
            yield "InstanceGroups cannot be combined with InstanceType and InstanceCount."
    elif "InstancePreferences" not in resources and ("InstanceType" not in resources):
        yield "InstanceType is required in ResourceConfig."
    counts = [group.get("InstanceCount", 0) for group in groups or [resources]]
    if "InstancePreferences" not in resources and min(counts) < 1:
        yield "InstanceCount must be greater than or equal to 1."
