"""Arguments of commands: the parser, the types of option values, and the jobs that a command line names."""

from __future__ import annotations

import argparse
import os
import re
import sys
from argparse import ArgumentTypeError
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from .argv import UsageError, columns, split

if TYPE_CHECKING:
    from argparse import Namespace

    from schedulers.jobs.handle import Job


# The parser: argparse without abbreviations, with `-` and `_` alike, and with errors in one line.


class _Formatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str, **kwargs: Any) -> None:
        # Without a width argparse imports shutil, with three compression libraries, each time an option is added.
        width = columns() - 2
        super().__init__(prog, **{"width": width, "max_help_position": 30 if width >= 60 else 8} | kwargs)


class Parser(argparse.ArgumentParser):
    """The parser of one command. Arguments are read with `read` or `read_before_script`, not `parse_args`."""

    def __init__(self, name: str, summary: str, examples: str = "", usage: str | None = None) -> None:
        super().__init__(
            prog=f"accel {name}",
            usage=usage,
            description=f"{summary}.",
            epilog=f"examples:\n{examples}" if examples else None,
            formatter_class=_Formatter,
            allow_abbrev=False,
        )

    def read(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse options and positional arguments in any order. Raises UsageError."""
        own_options, positional = split(
            self.prog,
            self._takes_value(),
            argv,
            first_word_ends=False,
            multi_value=self._with("+"),
            optional_value=self._with("?"),
        )
        return self.parse_args([*own_options, "--", *positional] if positional else own_options)

    def read_before_script(self, argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
        """Parse the options before the script. Return them, and the script with its own arguments."""
        own_options, script = split(
            self.prog, self._takes_value(), argv, first_word_ends=True, optional_value=self._with("?")
        )
        return self.parse_args(own_options), script

    def error(self, message: str) -> NoReturn:
        raise UsageError(self.prog, message.removeprefix("argument ").replace(" with argument ", " with "))

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        sys.stdout.flush()  # `--help | head -1` breaks the pipe here, where `main` sees it
        super().exit(status, message)

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        if action.option_strings and action.nargs is None:  # up to Python 3.12 argparse drops a value that is `--`
            value = self._get_value(action, arg_strings[0])
            self._check_value(action, value)
            return value
        return super()._get_values(action, arg_strings)

    def _takes_value(self) -> dict[str, bool]:
        return {spelling: action.nargs != 0 for spelling, action in self._option_string_actions.items()}

    def _with(self, nargs: str) -> list[str]:
        return [spelling for spelling, action in self._option_string_actions.items() if action.nargs == nargs]


# Types of option values: durations, memory, KEY=VALUE. Each raises ArgumentTypeError with one line.

_SECONDS = {"w": 604_800, "d": 86_400, "h": 3600, "m": 60, "s": 1, "": 1}
_DURATION = re.compile(r"(?:\d+(?:\.\d*)?|\.\d+)[wdhms]", re.ASCII)
_CLOCK = re.compile(r"(?:(\d+)-)?(\d+):([0-5]\d):([0-5]\d)", re.ASCII)
_NUMBER = re.compile(r"\d+(?:\.\d*)?|\.\d+", re.ASCII)
_MEMORY = re.compile(r"(\d+(?:\.\d*)?|\.\d+) ?([KMGT]?)(?:i?B)?", re.ASCII | re.IGNORECASE)
_GIGABYTES = {"K": 1 / 1024**2, "M": 1 / 1024, "G": 1.0, "": 1.0, "T": 1024.0}
_REFERENCE = re.compile(r"[a-z][a-z0-9+-]*:.+", re.ASCII | re.DOTALL)


def duration(text: str) -> float:
    """Return seconds: `90`, `45s`, `30m`, `1h30m`, `1.5d`, `2w`, or Slurm's `HH:MM:SS` and `D-HH:MM:SS`."""
    if _NUMBER.fullmatch(text):
        return float(text)
    if clock := _CLOCK.fullmatch(text):
        days, hours, minutes, seconds = (float(part or 0) for part in clock.groups())
        return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    parts = _DURATION.findall(text)
    units = [part[-1] for part in parts]
    # Each unit once and the longest first, so that a slip such as 30m1h is not silently added up.
    if not parts or "".join(parts) != text or units != sorted(set(units), key="wdhms".index):
        raise ArgumentTypeError(f"not a duration: {text!r} (90 is seconds; 45s, 30m, 1h30m, 2d, HH:MM:SS)")
    return sum(float(part[:-1]) * _SECONDS[part[-1]] for part in parts)


def memory(text: str) -> float:
    """Return gigabytes: `16`, `16G`, `512M`, `1.5T`. As in Slurm, 1G is 1024M; `G`, `GB` and `GiB` are the same."""
    match = _MEMORY.fullmatch(text)
    if not match:
        raise ArgumentTypeError(f"not an amount of memory: {text!r} (16 is gigabytes; 512M, 16G, 1.5T)")
    return float(match[1]) * _GIGABYTES[match[2].upper()]


def integer(text: str) -> int:
    if not re.fullmatch(r"[+-]?\d+", text, re.ASCII):
        raise ArgumentTypeError(f"not a whole number: {text!r}")
    return int(text)


def count(text: str) -> int:
    """Return a whole number of 0 or more."""
    if not re.fullmatch(r"\d+", text, re.ASCII):
        raise ArgumentTypeError(f"expects a whole number of 0 or more, not {text!r}")
    return int(text)


def nodes(text: str) -> tuple[int, int | None]:
    """Parse `4`, or `2:8` for an elastic job of 2 to 8 nodes."""
    low, colon, high = text.partition(":")
    return integer(low), integer(high) if colon else None


def key_value(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise ArgumentTypeError(f"expects KEY=VALUE, not {text!r}")
    return key, value


def command(text: str) -> tuple[str, ...]:
    """Return a command's words, quoted as in a shell. No shell runs it: `$` and `|` have no meaning."""
    import shlex

    try:
        argv = tuple(shlex.split(text))
    except ValueError as error:
        raise ArgumentTypeError(f"not a command: {text!r} ({str(error).lower()})") from None
    if not argv or not argv[0]:
        raise ArgumentTypeError(f"not a command: {text!r} (it names no program)")
    return argv


def axis(text: str) -> tuple[str, list[str]]:
    """Parse `NAME=V1,V2,…`. A value with a comma is in double quotes, as in CSV."""
    import csv

    name, values = key_value(text)
    try:
        return name, next(csv.reader([values], strict=True))
    except (csv.Error, StopIteration):
        raise ArgumentTypeError(f"expects NAME=V1,V2, not {text!r}") from None


def environment(text: str) -> tuple[str, str]:
    """Parse `NAME=VALUE`, or `NAME` with its value in this environment."""
    name, equals, value = text.partition("=")
    if equals:
        return name, value
    if name not in os.environ:
        raise ArgumentTypeError(f"{name} is not set here; give its value: --env {name}=VALUE")
    return name, os.environ[name]


def secret(text: str) -> tuple[str, str]:
    """Parse `NAME=REFERENCE`. The error message does not repeat the text, which may be the secret itself."""
    name, _, reference = text.partition("=")
    if not (name and _REFERENCE.fullmatch(reference)):
        raise ArgumentTypeError("expects NAME=REFERENCE, such as HF_TOKEN=env:HF_TOKEN or KEY=file:/run/key")
    return name, reference


def target_option(text: str) -> tuple[str, Any]:
    """Parse `KEY=VALUE`, VALUE typed as in `accel.yaml`: 4 is a number, true is yes, [a, b] a list, "4" a word."""
    key, value = key_value(text)
    import json

    import yaml

    try:
        parsed = yaml.safe_load(value)
        json.dumps(parsed)
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", None) or "not YAML"
        raise ArgumentTypeError(f"the value of {key} is not a YAML value: {value!r} ({problem})") from None
    except TypeError:
        parsed = value  # YAML read it as a date, a type that no target option has
    return key, parsed


# Jobs on a command line: recorded on this machine, or searched on a target.


def add_job_arguments(parser: Parser) -> None:
    """Add the options that locate a job submitted by another machine."""
    group = parser.add_argument_group("jobs submitted from another machine (need the full id)")
    group.add_argument("--target", metavar="NAME", help="target to search; the job is then recorded here")
    group.add_argument("--hosts", metavar="LIST", help="hosts of an ssh target to search: one of the job's is enough")
    group.add_argument("--hostfile", metavar="FILE", help="file with the hosts of an ssh target to search")
    option = "option of the target, typed as in accel.yaml; repeatable"
    group.add_argument("--option", metavar="KEY=VALUE", type=target_option, action="append", default=[], help=option)


def find_job(command: str, reference: str, args: Namespace) -> Job:
    """Return the job. Raises UsageError, UnknownJob, and the errors of loading and querying the target."""
    return find_jobs(command, [reference], args)[0]


def find_jobs(command: str, references: Sequence[str], args: Namespace) -> list[Job]:
    from schedulers.jobs import handle

    options = target_options(command, args)
    if options and args.target is None:
        raise UsageError(command, "--hosts, --hostfile and --option need --target NAME, such as --target ssh")
    return handle.find_all(references, target=args.target, options=options)


def target_options(command: str, args: Namespace) -> dict[str, Any]:
    """Return the target's options on the command line: --option, --hosts and --hostfile (if the command has them).

    Raises UsageError.
    """
    options: dict[str, Any] = {}
    for key, value in args.option:
        if options.setdefault(key, value) != value:
            raise UsageError(command, f"--option sets {key} twice, to different values: keep one")
    if "hosts" not in args:
        return options
    if args.hosts is not None and args.hostfile is not None:
        raise UsageError(command, "--hosts and --hostfile contradict each other: keep one")
    if args.hosts is not None:
        options |= {"hosts": args.hosts, "hostfile": None}
    if args.hostfile is not None:
        options |= {"hostfile": os.path.abspath(args.hostfile), "hosts": None}
    return options
