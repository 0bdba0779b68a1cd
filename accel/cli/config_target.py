"""Write a target into `accel.yaml` for `accel config`, and check each answer as `--target` or `accel launch` would."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from .argv import UsageError

if TYPE_CHECKING:
    from accel.settings.prompts import Machine, Question


_COMMAND = "accel config"
# Kind -> (module, class) of its options.
_SCHEMAS = {
    "ssh": ("schedulers.ssh.target", "SshOptions"),
    "slurm": ("schedulers.slurm.options", "SlurmOptions"),
    "kubernetes": ("schedulers.kubernetes.options", "KubernetesOptions"),
    "sagemaker": ("schedulers.sagemaker.options", "SageMakerOptions"),
    "tpu": ("schedulers.tpu.options", "TpuOptions"),
}

# Stand-ins for required options whose questions come later.
_PLACEHOLDERS = {"sagemaker": {"role": "it", "instance_type": "ml.m5.xlarge"}}


class TargetFile(NamedTuple):
    """A file to be written, and the target in it."""

    path: str
    text: str
    name: str
    entry: dict[str, Any]


def has_project() -> bool:
    """Return True if this directory belongs to a project with an `accel.yaml`."""
    return _project_file() is not None


def offered() -> dict[str, Any]:
    """Return answers from the existing entries, the first of each kind, as defaults. Raises UsageError."""
    from accel.settings.prompts import KINDS, answers_of_entry

    defaults: dict[str, Any] = {}
    for kind in KINDS:
        entry = next((candidate for candidate in _targets_by_name().values() if candidate["kind"] == kind), None)
        if entry is not None:
            answers = answers_of_entry("", entry)
            defaults |= {name: answer for name, answer in answers.items() if name not in ("place", "target")}
    return defaults


def check(question: Question, answer: Any, answers: Mapping[str, Any]) -> None:
    """Raise BadValue for an answer that is invalid for a target of this kind, after the other answers."""
    from accel.settings.prompts import entry_of
    from accel.settings.setting import BadValue

    if question.name == "target":
        _check_name(str(answer), str(answers["place"]))
    elif question.target is not None:
        pair = entry_of({"target": "it", **answers, question.name: answer})
        problem = None if pair is None else _problem(pair[0], {**_PLACEHOLDERS.get(pair[1]["kind"], {}), **pair[1]})
        if problem:
            raise BadValue(problem)


def render_file(answers: Mapping[str, Any]) -> TargetFile | None:
    """Return the file with the target that the answers describe, or None without a target. Raises UsageError."""
    from accel.settings.prompts import entry_of

    pair = entry_of(answers)
    if pair is None:
        return None
    name, entry = pair
    path = (_project_file() or os.path.abspath("accel.yaml")) if answers["target_file"] == "project" else _user_file()
    text, existing = _read(path, name)
    merged = {key: value for key, value in existing.items() if key not in _answered_options(answers)} | entry
    problem = _problem(name, merged)
    if problem:
        raise UsageError(_COMMAND, f"target {name}: {problem}")
    return TargetFile(path, _edited(text, name, existing, merged), name, merged)


def _edited(text: str, name: str, existing: Mapping[str, Any], merged: Mapping[str, Any]) -> str:
    """Return the text with the entry changed, key by key if none is removed, which keeps the comments between keys."""
    from .yaml_edit import with_value

    if not existing or existing.keys() - merged.keys():
        return with_value(text, ["targets", name], dict(merged))
    for key, value in merged.items():
        if key not in existing or existing[key] != value:
            text = with_value(text, ["targets", name, key], value)
    return text


def _answered_options(answers: Mapping[str, Any]) -> set[str]:
    """Return the options that the answers determine, including those left empty."""
    from accel.settings.prompts import TARGET_QUESTIONS

    named = {q.target[1] for q in TARGET_QUESTIONS if q.target is not None and q.name in answers}
    return {"kind", *(("cpu",) if "device" in answers else ()), *named, *(("hostfile",) if "hosts" in named else ())}


def _read(path: str, name: str) -> tuple[str, dict[str, Any]]:
    """Return the file's text and the entry of that name; both empty if missing."""
    from schedulers.config.schema import as_written
    from schedulers.config.yaml_file import YamlFile, read_text
    from schedulers.errors import ConfigError

    if not os.path.exists(path):
        return "", {}
    try:
        file = YamlFile(path, core=True)
        text = read_text(path)
        entry = dict(((file.value or {}).get("targets") or {}).get(name) or {})
        if entry.get("kind") in _SCHEMAS:
            keys = ("targets", name)
            entry = as_written(
                _schema(entry["kind"]),
                entry,
                lambda path: file.spelling(*keys, *path),
                lambda path, of_key: file.location(*keys, *path),
            )
    except ConfigError as error:
        raise UsageError(_COMMAND, str(error)) from None
    return text, entry


def _schema(kind: str) -> type:
    module, name = _SCHEMAS[kind]
    schema: type = getattr(importlib.import_module(module), name)
    return schema


def _check_name(name: str, kind: str) -> None:
    from accel.settings.setting import BadValue
    from schedulers.target import BUILT_IN

    existing = _targets_by_name().get(name)
    if not name.isprintable() or name != name.strip() or "/" in name:
        raise BadValue(f"not a name for a target: {name!r}")
    if name in {*BUILT_IN, *_SCHEMAS} and name != kind:
        raise BadValue(f"{name!r} is another kind of target: this one is of kind {kind}")
    if existing is not None and existing["kind"] != kind:
        raise BadValue(f"a target {name!r} of kind {existing['kind']} already exists")


def _problem(name: str, entry: Mapping[str, Any]) -> str:
    """Return why the entry makes no valid target, or ""."""
    from schedulers.config.schema import make_options
    from schedulers.errors import SchedulerError
    from schedulers.target import TargetContext

    module = importlib.import_module(_SCHEMAS[entry["kind"]][0])
    schema = getattr(module, _SCHEMAS[entry["kind"]][1])
    raw_options = {key: value for key, value in entry.items() if key != "kind"}
    try:
        options, _ = make_options(schema, raw_options, {}, lambda path, of_key: f"target {name}")
        if entry["kind"] == "sagemaker":
            _check_sagemaker(options, name)
        elif entry["kind"] == "ssh":
            module.SshTarget(TargetContext(name=name, options=options, jobs=Path())).known_host_count()
        else:
            module.check(options, name)
    except SchedulerError as error:
        return str(error).removeprefix(f"target {name}: ")
    return ""


def _check_sagemaker(options: Any, name: str) -> None:
    """Raise SpecError for options that no API request can have."""
    from schedulers.job import JobSpec
    from schedulers.sagemaker import request

    request.build(JobSpec(argv=("it",)), request.resolved(options), "it", name)


def _targets_by_name() -> dict[str, dict[str, Any]]:
    """Return the entries of all files by name. Raises UsageError for an invalid file."""
    from schedulers.config.named_targets import known_targets
    from schedulers.errors import ConfigError

    try:
        return {
            entry.name: {"kind": entry.kind, **entry.options} for entry in known_targets() if entry.file is not None
        }
    except ConfigError as error:
        raise UsageError(_COMMAND, str(error)) from None


def _user_file() -> str:
    from schedulers.config.named_targets import FILE
    from schedulers.store.paths import config_home

    return os.path.join(config_home(), FILE)


def _project_file() -> str | None:
    from schedulers.config.named_targets import config_files

    return next((path for path in reversed(config_files()) if path != _user_file()), None)


# Checks of answers against all that `accel launch` or a target would reject.

# Stand-ins for settings whose questions come later.
_LAUNCH_PLACEHOLDERS = {"rdzv_backend": "c10d", "offload_optimizer_nvme_path": ".", "offload_param_nvme_path": "."}
_MACHINE = {"machine_rank": 0, "main_process_ip": ""}


def check_answer(question: Question, answer: Any, earlier: Mapping[str, Any], machine: Machine) -> None:
    """Raise BadValue for an answer that contradicts the earlier ones or is invalid."""
    from accel.settings.setting import BadValue
    from accel.settings.wizard import values_of

    check(question, answer, earlier)
    answers = {**earlier, question.name: answer}
    values = values_of(answers, machine)
    if "num_processes" not in answers:
        values.pop("num_processes", None)
    problem = launch_problem({**_LAUNCH_PLACEHOLDERS, **(_MACHINE if "num_machines" in answers else {}), **values})
    if problem:
        raise BadValue(problem.removeprefix(f"{_flag_of(question)} "))


def launch_problem(values: Mapping[str, Any]) -> str | None:
    """Return why `accel launch` would reject a file with `values` on any machine, or None."""
    from accel.launch.errors import LaunchConfigError
    from accel.launch.external import with_default_rank
    from accel.launch.machines import check_spread, node_layout
    from accel.settings.config_file import Entry
    from accel.settings.contradictions import contradictions
    from accel.settings.precedence import resolve

    entries = {name: Entry(value, (name,)) for name, value in values.items()}
    options = {name: setting.value for name, setting in resolve({}, {}, entries, lambda keys: keys[0]).items()}
    problem = contradictions(options)
    if problem:
        return problem
    if options["compute_environment"] == "AMAZON_SAGEMAKER" and options["num_machines"] is not None:
        options |= _MACHINE  # SageMaker determines them
    try:
        check_spread(options["num_processes"], 1)
        node_layout(with_default_rank(options), {})
    except LaunchConfigError as error:
        return str(error)
    return None


def _flag_of(question: Question) -> str:
    from accel.settings import BY_NAME

    return BY_NAME[question.name].display_name if question.name in BY_NAME else ""
