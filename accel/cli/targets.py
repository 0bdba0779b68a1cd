"""`accel targets`: list the targets; `accel targets check NAME`: check one of them.

Piped, prints a tab-separated line per target without a heading: name, kind, where it is defined, its options.

--json  {"targets": [{"name", "kind", "options", "source"}], "ignored": […]}: `ignored` has a line for each
installed plug-in that claims a built-in name, and for each skipped accel.yaml. With `check`: {"name",
"table", "failures", "warnings"}, the table as rows of text under a header. `check` exits with 1 if there is a
failure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import arguments, exit_status
from .argv import UsageError
from .output import note, print_json, print_rows

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Mapping

    from schedulers.config.named_targets import NamedTarget

    from .arguments import Parser

EXAMPLES = """\
  accel targets
  accel targets --json | jq -r '.targets[].name'
  accel targets check lab
  accel targets check ssh --hosts gpu[1-4] --gpus 8

Names come from accel.yaml in the project (this directory or the nearest above, up to the project's root) and in the
user's config directory, and from the current server (accel context)."""

_CHECK = "accel targets check"

_ANSWER_S = 3.0  # for which a server may take to answer

COLUMNS = ("NAME", "KIND", "DEFINED IN", "OPTIONS")


def add_arguments(parser: Parser) -> None:
    parser.add_argument("check", nargs="*", metavar="check NAME", help="check the machines of this target")
    option = "with check: option of the target, typed as in accel.yaml; repeatable"
    parser.add_argument(
        "--option", metavar="KEY=VALUE", type=arguments.target_option, action="append", default=[], help=option
    )
    parser.add_argument("--hosts", metavar="LIST", help="with check: hosts of an ssh target, as for submit")
    parser.add_argument("--hostfile", metavar="FILE", help="with check: file with the hosts, one per line")
    gpus = "with check: GPUs required on each machine"
    parser.add_argument("--gpus", metavar="N", type=arguments.count, help=gpus)
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: Namespace) -> int:
    if args.check:
        return _check(args)
    if args.option or args.hosts or args.hostfile or args.gpus is not None:
        raise UsageError("accel targets", "--option, --hosts, --hostfile and --gpus need check NAME")
    from schedulers.config.named_targets import known_targets, skipped_files
    from schedulers.target import refused_entry_points

    targets = [*known_targets(), *_targets_of_server()]
    ignored = refused_entry_points()
    options = _without_secrets([dict(target.options) for target in targets])
    if args.json:
        entries = [
            {"name": t.name, "kind": t.kind, "options": o, "source": t.source}
            for t, o in zip(targets, options, strict=True)
        ]
        print_json({"targets": entries, "ignored": [*ignored, *skipped_files()]})
        return exit_status.OK
    rows = [(t.name, t.kind, t.source, _format_options(o)) for t, o in zip(targets, options, strict=True)]
    print_rows(COLUMNS, rows, on_terminal=rows)
    for line in ignored:
        note(f"warning: {line}")
    return exit_status.OK


def _targets_of_server() -> list[NamedTarget]:
    """Return the targets of the current server; none, and a note, if it does not answer soon."""
    from schedulers.config.named_targets import NamedTarget
    from schedulers.config.servers import read_servers
    from schedulers.errors import SchedulerError

    server = read_servers().current_server
    if server is None:
        return []
    from schedulers.service.client import Client

    try:
        offered = Client(server).get("/targets", timeout_s=_ANSWER_S, attempts=1)
    except SchedulerError as error:
        note(f"warning: targets of {server.name} are not listed: {error}")
        return []
    return [
        NamedTarget(
            name=f"{server.name}/{target['name']}", kind="service", source=f"server {server.name} ({target['kind']})",
            options={"url": server.url, "target": target["name"]},
        )
        for target in offered
    ]  # fmt: skip


def _check(args: Namespace) -> int:
    from schedulers.config.named_targets import load_target
    from schedulers.errors import ConfigError, nearest
    from schedulers.store.store import Store
    from schedulers.target import SupportsCheck

    verb, *names = args.check
    if verb != "check":
        raise UsageError("accel targets", f"unknown action {verb!r}{nearest(verb, ['check'])} (supported: check NAME)")
    if not names:
        raise UsageError(_CHECK, f"no target given: {_CHECK} NAME")
    if len(names) > 1:
        raise UsageError(_CHECK, f"one target at a time, not {' '.join(names)!r}")
    try:
        target = load_target(names[0], Store.default().jobs, overrides=arguments.target_options(_CHECK, args))
    except ConfigError as error:
        raise UsageError(_CHECK, str(error)) from None
    if not isinstance(target, SupportsCheck):
        raise UsageError(_CHECK, f"target {names[0]} has no machines that can be checked before a submit")
    report = target.check(args.gpus or 0)
    if args.json:
        print_json({"name": names[0], "table": report.table, "failures": report.failures, "warnings": report.warnings})
    else:
        header, *rows = report.table
        print_rows([name.upper() for name in header], rows, on_terminal=rows)
        for line in report.failures:
            note(f"fails: {line}")
        for line in report.warnings:
            note(f"warning: {line}")
    return exit_status.ERROR if report.failures else exit_status.OK


def _without_secrets(options: list[dict[str, Any]]) -> list[dict[str, Any]]:
    import os

    from accel.diagnostics.redaction import secrets_of, without_secrets

    redacted: list[dict[str, Any]] = without_secrets(options, known=secrets_of([dict(os.environ), *options]))
    return redacted


def _format_options(options: Mapping[str, Any]) -> str:
    import json

    return " ".join(f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in options.items())
