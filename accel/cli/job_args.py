"""The jobs that a command names: those known here, and those found on a target."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from . import option_values
from .argv import UsageError

if TYPE_CHECKING:
    from argparse import Namespace

    from schedulers.jobs.handle import Job

    from .parser import Parser


def add_arguments(parser: Parser) -> None:
    """Add the options that locate a job submitted by another machine."""
    group = parser.add_argument_group("a job that another machine submitted (its whole id is needed)")
    group.add_argument("--target", metavar="NAME", help="look for it there, and know it here from then on")
    group.add_argument("--hosts", metavar="LIST", help="of an ssh target: on these machines, one of its own is enough")
    group.add_argument("--hostfile", metavar="FILE", help="of an ssh target: on the machines in this file")
    option = "an option of the target, typed as in accel.yaml; repeatable"
    group.add_argument(
        "--option", metavar="KEY=VALUE", type=option_values.option, action="append", default=[], help=option
    )


def find(command: str, reference: str, args: Namespace) -> Job:
    """Return the job. Raises UsageError, UnknownJob, and the errors of loading and querying the target."""
    return find_all(command, [reference], args)[0]


def find_all(command: str, references: Sequence[str], args: Namespace) -> list[Job]:
    from schedulers.jobs import handle

    options = options_of(command, args)
    if options and args.target is None:
        raise UsageError(command, "--hosts, --hostfile and --option go with --target NAME, such as --target ssh")
    return handle.find_all(references, target=args.target, options=options)


def options_of(command: str, args: Namespace) -> dict[str, Any]:
    """Return the target's options on the command line: --option, --hosts and --hostfile (if the command has them).

    Raises UsageError.
    """
    found: dict[str, Any] = {}
    for key, value in args.option:
        if found.setdefault(key, value) != value:
            raise UsageError(command, f"--option gives {key} twice, with two values: keep one")
    if "hosts" not in args:
        return found
    if args.hosts is not None and args.hostfile is not None:
        raise UsageError(command, "--hosts and --hostfile both say where: keep one")
    if args.hosts is not None:
        found |= {"hosts": args.hosts, "hostfile": None}
    if args.hostfile is not None:
        found |= {"hostfile": os.path.abspath(args.hostfile), "hosts": None}
    return found
