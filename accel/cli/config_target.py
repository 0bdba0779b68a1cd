"""Write a target into `accel.yaml` for `accel config`, and check each answer as `--target` or `accel launch` would."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from .argv import UsageError

if TYPE_CHECKING:
    from accel.settings.prompts import Machine, Question


_COMMAND = "accel config"
# The options of each kind, and what judges them.
_SCHEMAS = {
    "ssh": ("schedulers.ssh.options", "SshOptions"),
    "slurm": ("schedulers.slurm.options", "SlurmOptions"),
    "kubernetes": ("schedulers.kubernetes.options", "KubernetesOptions"),
    "sagemaker": ("schedulers.sagemaker.options", "SageMakerOptions"),
    "tpu": ("schedulers.tpu.options", "TpuOptions"),
}

# Options that must be given, while they are still to be asked for.
_ASKED_LATER = {"sagemaker": {"role": "it", "instance_type": "ml.m5.xlarge"}}


class Written(NamedTuple):
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

    found: dict[str, Any] = {}
    for kind in KINDS:
        entry = next((one for one in _known().values() if one["kind"] == kind), None)
        if entry is not None:
            answers = answers_of_entry("", entry)
            found |= {name: answer for name, answer in answers.items() if name not in ("place", "target")}
    return found


def check(question: Question, answer: Any, answers: Mapping[str, Any]) -> None:
    """Raise BadValue for an answer that is invalid for a target of this kind, after the other answers."""
    from accel.settings.prompts import entry_of
    from accel.settings.setting import BadValue

    if question.name == "target":
        _check_name(str(answer), str(answers["place"]))
    elif question.target is not None:
        made = entry_of({"target": "it", **answers, question.name: answer})
        problem = None if made is None else _problem(made[0], {**_ASKED_LATER.get(made[1]["kind"], {}), **made[1]})
        if problem:
            raise BadValue(problem)


def written(answers: Mapping[str, Any]) -> Written | None:
    """Return the file with the target that the answers describe, or None without a target. Raises UsageError."""
    from accel.settings.prompts import entry_of

    made = entry_of(answers)
    if made is None:
        return None
    name, entry = made
    path = (_project_file() or os.path.abspath("accel.yaml")) if answers["target_file"] == "project" else _user_file()
    text, held = _read(path, name)
    whole = {key: value for key, value in held.items() if key not in _asked(answers)} | entry
    problem = _problem(name, whole)
    if problem:
        raise UsageError(_COMMAND, f"target {name}: {problem}")
    return Written(path, _edited(text, name, held, whole), name, whole)


def _edited(text: str, name: str, held: Mapping[str, Any], whole: Mapping[str, Any]) -> str:
    """Return the text with the entry changed, key by key if none is removed, which keeps the comments between keys."""
    from .yaml_edit import with_value

    if not held or held.keys() - whole.keys():
        return with_value(text, ["targets", name], dict(whole))
    for key, value in whole.items():
        if key not in held or held[key] != value:
            text = with_value(text, ["targets", name, key], value)
    return text


def _asked(answers: Mapping[str, Any]) -> set[str]:
    """Return the options that the answers determine, including those left empty."""
    from accel.settings.prompts import TARGET_QUESTIONS

    spoken = {q.target[1] for q in TARGET_QUESTIONS if q.target is not None and q.name in answers}
    return {"kind", *(("cpu",) if "device" in answers else ()), *spoken, *(("hostfile",) if "hosts" in spoken else ())}


def _read(path: str, name: str) -> tuple[str, dict[str, Any]]:
    """Return the file's text and the entry of that name; both empty if missing."""
    from schedulers.config.yaml_file import YamlFile
    from schedulers.errors import ConfigError

    if not os.path.exists(path):
        return "", {}
    try:
        held = YamlFile(path).value
    except ConfigError as error:
        raise UsageError(_COMMAND, str(error)) from None
    with open(path, encoding="utf-8-sig") as file:
        text = file.read()
    entry = ((held or {}).get("targets") or {}).get(name) or {}
    return text, dict(entry)


def _check_name(name: str, kind: str) -> None:
    from accel.settings.setting import BadValue
    from schedulers.target import BUILT_IN

    known = _known().get(name)
    if not name.isprintable() or name != name.strip() or "/" in name:
        raise BadValue(f"not a name for a target: {name!r}")
    if name in {*BUILT_IN, *_SCHEMAS} and name != kind:
        raise BadValue(f"{name!r} is a kind of target, and this one is of another: {kind}")
    if known is not None and known["kind"] != kind:
        raise BadValue(f"there is a target {name!r} of the kind {known['kind']} already")


def _problem(name: str, entry: Mapping[str, Any]) -> str:
    """Return why the entry makes no valid target, or ""."""
    from schedulers.config.schema import make_options
    from schedulers.errors import SchedulerError

    module = importlib.import_module(_SCHEMAS[entry["kind"]][0])
    schema = getattr(module, _SCHEMAS[entry["kind"]][1])
    given = {key: value for key, value in entry.items() if key != "kind"}
    try:
        options, _ = make_options(schema, given, {}, lambda path, of_key: f"target {name}")
        if entry["kind"] == "sagemaker":
            _check_sagemaker(options, name)
        else:
            module.check(options, name)
        if entry["kind"] == "ssh":
            module.known_hosts_count(options, f"target {name}: hosts")
    except SchedulerError as error:
        return str(error).removeprefix(f"target {name}: ")
    return ""


def _check_sagemaker(options: Any, name: str) -> None:
    """Raise SpecError for options that no API request can have."""
    from schedulers.job import JobSpec
    from schedulers.sagemaker import request

    request.build(JobSpec(argv=("it",)), options, "it", request.planned(options), name)


def _known() -> dict[str, dict[str, Any]]:
    """Return the entries of all files by name. Raises UsageError for an invalid file."""
    from schedulers.config.named_targets import known_targets
    from schedulers.errors import ConfigError

    try:
        return {one.name: {"kind": one.kind, **one.options} for one in known_targets() if one.file is not None}
    except ConfigError as error:
        raise UsageError(_COMMAND, str(error)) from None


def _user_file() -> str:
    from schedulers.config.named_targets import FILE
    from schedulers.store.paths import config_home

    return os.path.join(config_home(), FILE)


def _project_file() -> str | None:
    from schedulers.config.named_targets import config_files

    return next((path for path in reversed(config_files()) if path != _user_file()), None)


# Check answers against all that `accel launch`, or a target, refuses.

# What is taken for granted of questions that are still to be asked, so that their answers are not missed.
_LAUNCH_ASKED_LATER = {"rdzv_backend": "c10d", "offload_optimizer_nvme_path": ".", "offload_param_nvme_path": "."}
_MACHINE = {"machine_rank": 0, "main_process_ip": ""}


def check_answer(question: Question, answer: Any, before: Mapping[str, Any], machine: Machine) -> None:
    """Raise BadValue for an answer that contradicts the earlier ones or is invalid."""
    from accel.settings.setting import BadValue
    from accel.settings.wizard import values_of

    check(question, answer, before)
    said = {**before, question.name: answer}
    values = values_of(said, machine)
    if "num_processes" not in said:
        values.pop("num_processes", None)
    wrong = launch_refusal({**_LAUNCH_ASKED_LATER, **(_MACHINE if "num_machines" in said else {}), **values})
    if wrong:
        raise BadValue(wrong.removeprefix(f"{_shown(question)} "))


def launch_refusal(values: Mapping[str, Any]) -> str | None:
    """Return why `accel launch` would reject a file with `values` on any machine, or None."""
    from accel.launch.errors import Refused
    from accel.launch.external import started_once
    from accel.launch.machines import check_spread, place
    from accel.settings.config_file import Entry
    from accel.settings.contradictions import contradictions
    from accel.settings.precedence import resolve

    entries = {name: Entry(value, (name,)) for name, value in values.items()}
    options = {name: found.value for name, found in resolve({}, {}, entries, lambda keys: keys[0]).items()}
    wrong = contradictions(options)
    if wrong:
        return wrong
    if options["compute_environment"] == "AMAZON_SAGEMAKER" and options["num_machines"] is not None:
        options |= _MACHINE  # which SageMaker says
    try:
        check_spread(options["num_processes"], 1)
        place(started_once(options), {})
    except Refused as error:
        return str(error)
    return None


def _shown(question: Question) -> str:
    from accel.settings import BY_NAME

    return BY_NAME[question.name].shown if question.name in BY_NAME else ""
