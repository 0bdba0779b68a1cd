"""`accel config`: write the default configuration file for `accel launch`, in Accelerate's place and form.

For jobs elsewhere (SSH, Slurm, Kubernetes, TPU, SageMaker) it also writes the target, into `accel.yaml`.

The paths of the files go to stdout. `--answers FILE` replaces the terminal: one `name: answer` a line, by
question; questions that it does not answer get the default.
"""

from __future__ import annotations

import os
import shlex
from typing import TYPE_CHECKING, Any, NamedTuple

from . import atomic_write, exit_status
from .argv import UsageError
from .launch_file import default_path
from .output import note, print_json

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Mapping

    from accel.settings.wizard import Machine

    from .arguments import Parser
    from .config_target import TargetFile

EXAMPLES = """\
  accel config                                         prompt, write the default file
  accel config --config_file fsdp.yaml                 write another file
  accel config --answers answers.yaml                  answers from a file (- for stdin)
  accel config default --mixed_precision bf16          defaults for this machine, no prompts
  accel config update                                  convert an older file"""

_COMMAND = "accel config"
_ACTIONS = ("ask", "default", "update")


def add_arguments(parser: Parser) -> None:
    action = "default: write the defaults; update: convert an older file; omitted: prompt"
    parser.add_argument("action", nargs="?", default="ask", metavar="ACTION", help=action)
    parser.add_argument("--config_file", metavar="FILE", help="file to write (default: Accelerate's default file)")
    parser.add_argument("--answers", metavar="FILE", help="YAML file with the answers (- for stdin); no prompts")
    parser.add_argument("--mixed_precision", metavar="NAME", help="with `default`: no, fp16, bf16 or fp8 (default: no)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: Namespace) -> int:
    _check(args)
    path = args.config_file or default_path()
    if args.action == "default":
        return _write_default(args, path)
    if args.action == "update":
        return _update(args, path)
    machine = _machine()
    if args.answers is not None:
        return _finish(args, path, _answers_from_file(args.answers, machine), machine)
    from . import config_prompts

    config_prompts.need_terminal()
    answers = config_prompts.ask(machine, _offered(path), lambda answers: _build_files(path, answers, machine).files())
    if answers is None:
        note("config: nothing was written")
        return exit_status.INTERRUPTED
    return _finish(args, path, answers, machine)


def _offered(path: str) -> dict[str, Any]:
    """Return the answers of existing targets and of the existing file, unless it cannot be read."""
    from accel.settings.wizard import answers_of

    from . import config_target
    from .launch_file import read_file

    targets = config_target.offered()
    if not os.path.exists(path):
        return targets
    try:
        values = {name: entry.value for name, entry in read_file(_COMMAND, path).entries.items()}
    except UsageError as error:
        note(f"config: {error}")
        return targets
    return targets | answers_of(values)


def _check(args: Namespace) -> None:
    if args.action not in _ACTIONS:
        from schedulers.errors import nearest

        suggestion = nearest(args.action, _ACTIONS[1:])
        raise UsageError(_COMMAND, f"unknown action {args.action!r}: use default or update{suggestion}")
    if args.mixed_precision is not None and args.action != "default":
        raise UsageError(_COMMAND, "--mixed_precision needs default: accel config default --mixed_precision bf16")
    if args.answers is not None and args.action != "ask":
        raise UsageError(_COMMAND, f"--answers and {args.action} contradict each other: keep one")


def _write_default(args: Namespace, path: str) -> int:
    from accel.settings import BY_NAME
    from accel.settings.setting import BadValue, read

    if os.path.exists(path):
        raise UsageError(_COMMAND, f"{path} already exists: `accel config` replaces it, `config update` converts it")
    machine = _machine()
    try:
        precision = read(BY_NAME["mixed_precision"], args.mixed_precision or "no")
    except BadValue as error:
        raise UsageError(_COMMAND, f"--mixed_precision: {error}") from None
    on_cpu = machine.kind == "cpu"
    answers = {
        "place": "this",
        "device": "cpu" if on_cpu else "gpu",
        "way": "none",
        "num_processes": machine.devices if machine.kind in ("cuda", "xpu") else 1,
        "mixed_precision": precision,
    }
    return _finish(args, path, answers, machine)


def _update(args: Namespace, path: str) -> int:
    from accel.settings.config_file import to_document

    from .launch_file import read_file

    file = read_file(_COMMAND, path)
    values = {name: entry.value for name, entry in file.entries.items()}
    if values.get("compute_environment") == "AMAZON_SAGEMAKER":
        values.pop("num_processes", None)  # SageMaker's machines determine it, and Accelerate rejects it in such a file
    document = to_document(values)
    atomic_write.write(_COMMAND, [(path, _text(path, document))])
    _print_result(args, path, document)
    return exit_status.OK


class _ConfigFiles(NamedTuple):
    """The files that the answers produce: the launch's, and the one that describes a target."""

    path: str
    document: dict[str, Any]
    target: TargetFile | None

    def files(self) -> list[tuple[str, str]]:
        target = [] if self.target is None else [(self.target.path, self.target.text)]
        return [(self.path, _text(self.path, self.document)), *target]


def _build_files(path: str, answers: Mapping[str, Any], machine: Machine) -> _ConfigFiles:
    """Return the files. Raises UsageError for answers that `accel launch` would reject."""
    from accel.settings.config_file import to_document
    from accel.settings.wizard import values_of

    from . import config_target

    values = values_of(answers, machine)
    problem = config_target.launch_problem(values)
    if problem:
        raise UsageError(_COMMAND, problem)
    return _ConfigFiles(path, to_document(values), config_target.render_file(answers))


def _finish(args: Namespace, path: str, answers: Mapping[str, Any], machine: Machine) -> int:
    output = _build_files(path, answers, machine)
    atomic_write.write(_COMMAND, output.files())
    _print_result(args, path, output.document, output.target)
    if output.target is not None:
        command = shlex.join(["accel", "submit", "--target", output.target.name, "--config_file", path])
        note(f"config: submit with: {command} SCRIPT")
    return exit_status.OK


def _print_result(args: Namespace, path: str, document: Mapping[str, Any], target: TargetFile | None = None) -> None:
    if args.json:
        target_fields = {} if target is None else {"target": {"path": target.path, "name": target.name, **target.entry}}
        print_json({"path": path, "settings": document, **target_fields})
    else:
        print(path, *([] if target is None else [target.path]), sep="\n")


def _text(path: str, document: Mapping[str, Any]) -> str:
    if path.endswith(".json"):
        import json

        return json.dumps(document, indent=2, sort_keys=True) + "\n"
    import yaml

    return str(yaml.safe_dump(dict(document)))


def _answers_from_file(path: str, machine: Machine) -> dict[str, Any]:
    """Return the answers in a file, with defaults for the rest. Raises UsageError with the line."""
    from accel.settings.setting import BadValue, as_written
    from accel.settings.wizard import QUESTIONS, open_question
    from schedulers.config.yaml_file import YamlFile
    from schedulers.errors import ConfigError, nearest

    from . import config_target

    try:
        file = YamlFile("/dev/stdin" if path == "-" else path)
    except ConfigError as error:
        raise UsageError(_COMMAND, f"--answers: {error}") from None
    file_answers = {} if file.value is None else file.value
    if not isinstance(file_answers, dict):
        raise UsageError(_COMMAND, f"{file.location()}: must hold answers, one `name: answer` per line")
    names = [question.name for question in QUESTIONS]
    for name in file_answers:
        if name not in names:
            suggestion = nearest(str(name), names)
            raise UsageError(_COMMAND, f"{file.key_location(str(name))}: no question {as_written(name)}{suggestion}")
    answers: dict[str, Any] = {}
    while (question := open_question(answers)) is not None:
        offered = question.offered(answers, machine)
        if question.name not in file_answers and offered is None and not question.may_be_empty:
            raise UsageError(_COMMAND, f"{file.shown}: no answer to {question.name}: {question.text}")
        try:
            answer = question.parse(file_answers.get(question.name, offered))
            config_target.check_answer(question, answer, answers, machine)
        except BadValue as error:
            location = file.key_location(question.name) if question.name in file_answers else file.shown
            raise UsageError(_COMMAND, f"{location}: {question.name}: {error}") from None
        answers[question.name] = answer
    extra = [name for name in file_answers if name not in answers]
    if extra:
        raise UsageError(
            _COMMAND, f"{file.key_location(extra[0])}: {extra[0]} does not apply to the other answers: remove it"
        )
    return answers


def _machine() -> Machine:
    from accel.launch.devices import find
    from accel.settings.wizard import Machine

    from . import config_target

    devices = find()
    return Machine(devices.kind, devices.count, devices.cpus, config_target.has_project())
