"""`accel config`: write the file in which `accel launch` finds what no flag says. It has Accelerate's place and form.

Of a place where jobs are submitted (SSH, Slurm, Kubernetes) it also writes the target, into `accel.yaml`.

The paths of the files go to stdout. `--answers FILE` answers without a terminal: `name: answer` a line, of the
questions that it would ask; what it does not name gets the default.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

from . import exits
from .launch_file import default_path
from .output import note, print_json
from .words import UsageError

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Mapping

    from accel.settings.questions import Machine

    from .parser import Parser

EXAMPLES = """\
  accel config                                         ask, and write the file
  accel config --config_file fsdp.yaml                 write another one
  accel config --answers answers.yaml                  ask nothing; also --answers /dev/stdin
  accel config default --mixed_precision bf16          what this machine has, and nothing asked
  accel config update                                  an older file in today's form"""

_COMMAND = "accel config"
_ACTIONS = ("ask", "default", "update")


def add_arguments(parser: Parser) -> None:
    parser.add_argument("action", nargs="?", default="ask", metavar="ACTION", help="default or update; without it: ask")
    parser.add_argument("--config_file", metavar="FILE", help="the file, instead of the default one")
    parser.add_argument("--answers", metavar="FILE", help="take the answers from here, in YAML, and ask nothing")
    parser.add_argument("--mixed_precision", metavar="NAME", help="of `default`: no, fp16, bf16 or fp8")
    parser.add_argument("--json", action="store_true", help="answer in JSON")


def run(args: Namespace) -> int:
    _check(args)
    path = args.config_file or default_path()
    if args.action == "default":
        return _write_default(args, path)
    if args.action == "update":
        return _update(args, path)
    machine = _machine()
    if args.answers is not None:
        return _finish(args, path, _answered(args.answers, machine), machine)
    from . import config_ask

    config_ask.need_terminal()
    answers = config_ask.ask(machine, _offered(path), lambda answers: _files(path, answers, machine))
    if answers is None:
        note("config: nothing was written")
        return exits.INTERRUPTED
    return _finish(args, path, answers, machine)


def _offered(path: str) -> dict[str, Any]:
    """The answers of the file that is there already; none if it cannot be read, for it is to be written anew."""
    from accel.settings.questions import answers_of

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

        near = nearest(args.action, _ACTIONS[1:])
        raise UsageError(_COMMAND, f"{args.action!r} is neither default nor update{near}")
    if args.mixed_precision is not None and args.action != "default":
        raise UsageError(_COMMAND, "--mixed_precision goes with default: accel config default --mixed_precision bf16")
    if args.answers is not None and args.action != "ask":
        raise UsageError(_COMMAND, f"--answers and {args.action} contradict each other: keep one")


def _write_default(args: Namespace, path: str) -> int:
    from accel.settings import BY_NAME
    from accel.settings.values import BadValue, read

    if os.path.exists(path):
        raise UsageError(_COMMAND, f"{path} is there already: `accel config` writes it anew, `update` keeps it")
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
    from accel.settings.file import UNSAID_PROCESSES, to_document

    from .launch_file import read_file

    file = read_file(_COMMAND, path)
    values = {name: entry.value for name, entry in file.entries.items()}
    if values.get("compute_environment") == "AMAZON_SAGEMAKER":
        values.pop("num_processes", None)  # which SageMaker's machines have, and Accelerate refuses in such a file
    elif values.get("num_processes") == UNSAID_PROCESSES or "num_processes" not in values:
        values["num_processes"] = UNSAID_PROCESSES if file.entries.get("num_processes") else 1
    return _store(args, path, to_document(values))


def _finish(args: Namespace, path: str, answers: Mapping[str, Any], machine: Machine) -> int:
    from . import config_target

    target = config_target.written(answers)
    if target is not None:
        _write(target.path, target.text)
    described = {} if target is None else {"target": {"path": target.path, "name": target.name, **target.entry}}
    code = _store(args, path, _document(answers, machine), described)
    if target is not None:
        note(f"config: to run there: accel submit --target {target.name} --config_file {path} SCRIPT")
    return code


def _files(path: str, answers: Mapping[str, Any], machine: Machine) -> list[tuple[str, str]]:
    """Every file that the answers make: its path and its text. Raises UsageError."""
    from . import config_target

    target = config_target.written(answers)
    return [(path, _text(path, _document(answers, machine))), *([] if target is None else [target[:2]])]


def _document(answers: Mapping[str, Any], machine: Machine) -> dict[str, Any]:
    from accel.settings.file import to_document
    from accel.settings.questions import values_of

    return to_document(values_of(answers, machine))


def _text(path: str, document: Mapping[str, Any]) -> str:
    if path.endswith(".json"):
        import json

        return json.dumps(document, indent=2, sort_keys=True) + "\n"
    import yaml

    return str(yaml.safe_dump(dict(document)))


def _store(
    args: Namespace, path: str, document: Mapping[str, Any], target: Mapping[str, Mapping[str, Any]] | None = None
) -> int:
    _write(path, _text(path, document))
    if args.json:
        print_json({"path": path, "settings": document, **(target or {})})
    else:
        print(path, *(described["path"] for described in (target or {}).values()), sep="\n")
    return exits.OK


def _write(path: str, text: str) -> None:
    """Writes the file whole or not at all, in the place that a link leads to. Raises UsageError."""
    path = os.path.realpath(path)
    beside = os.path.join(os.path.dirname(path), f".{os.path.basename(path)}.{os.getpid()}")
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(beside, "w", encoding="utf-8") as file:
            file.write(text)
        if os.path.exists(path):
            os.chmod(beside, os.stat(path).st_mode & 0o7777)
        os.replace(beside, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(beside)
        raise UsageError(_COMMAND, f"cannot write {path}: {error.strerror}") from None


def _answered(path: str, machine: Machine) -> dict[str, Any]:
    """The answers in a file, with the defaults of what it does not answer. Raises UsageError, which says where."""
    from accel.settings.questions import QUESTIONS, open_question
    from accel.settings.values import BadValue
    from schedulers.errors import ConfigError, nearest
    from schedulers.yamlfile import YamlFile

    from . import config_target

    try:
        file = YamlFile(path)
    except ConfigError as error:
        raise UsageError(_COMMAND, f"--answers: {error}") from None
    given = {} if file.value is None else file.value
    if not isinstance(given, dict):
        raise UsageError(_COMMAND, f"{file.where()}: must hold answers, one `name: answer` a line")
    names = [question.name for question in QUESTIONS]
    for name in given:
        if name not in names:
            raise UsageError(_COMMAND, f"{file.where_key(str(name))}: no question {name!r}{nearest(str(name), names)}")
    answers: dict[str, Any] = {}
    while (question := open_question(answers)) is not None:
        offered = question.offered(answers, machine)
        if question.name not in given and offered is None and not question.may_be_empty:
            raise UsageError(_COMMAND, f"{file.shown}: no answer to {question.name}: {question.text}")
        try:
            answer = question.understood(given.get(question.name, offered))
            config_target.check(question, answer, answers)
        except BadValue as error:
            where = file.where_key(question.name) if question.name in given else file.shown
            raise UsageError(_COMMAND, f"{where}: {question.name}: {error}") from None
        answers[question.name] = answer
    moot = [name for name in given if name not in answers]
    if moot:
        raise UsageError(_COMMAND, f"{file.where_key(moot[0])}: {moot[0]} is not asked for after the other answers")
    return answers


def _machine() -> Machine:
    from accel.launch.devices import find
    from accel.settings.questions import Machine

    from . import config_target

    found = find()
    return Machine(found.kind, found.count, found.cpus, config_target.has_project())
