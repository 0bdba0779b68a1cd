"""`accel describe JOB`: print everything known about a job.

--json  {"id", "name", "target", "kind", "native_id", "directory", "created_at", "started_at", "ended_at",
"status", "warning", "spec", "plan", "options", "source", "exit", "events"}: "options" are the target's at
submission, "source" is the file and line that described it, "events" is [{"event", "at", …}], oldest first,
and "exit" is the job's exit document, or null.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from schedulers.printable import one_line, printable

from . import arguments, exit_status
from .output import moment, phrase, print_fields, print_json

if TYPE_CHECKING:
    from argparse import Namespace

    from schedulers.job import JobSpec
    from schedulers.store.record import Event, Record

    from .arguments import Parser

EXAMPLES = """\
  accel describe @last
  accel describe --json 1k2m | jq .spec.argv"""


def add_arguments(parser: Parser) -> None:
    parser.add_argument("job", metavar="JOB", help="job id, unique prefix of an id, or @last")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments.add_job_arguments(parser)


def run(args: Namespace) -> int:
    job = arguments.find_job("accel describe", args.job, args)
    job.status()
    if args.json:
        print_json(job.describe())
    else:
        _print(job.record)
    return exit_status.OK


def _print(record: Record) -> None:
    plan = record.plan()
    target = record.target if record.target == record.kind else f"{record.target} ({record.kind})"
    print_fields(
        [
            ("job", f"{record.id} ({record.name})"),
            ("state", phrase(record.status)),
            ("target", target + (f", defined in {one_line(plan.source)}" if plan.source else "")),
            ("files", record.path),
        ]
    )
    print("\nspec")
    print_fields(_indented(_spec_fields(record.spec())))
    print("\nplan")
    print("".join(f"  {line}" for line in printable(str(plan)).splitlines(keepends=True)), end="")
    print("\nevents")
    print_fields(_indented(_event_fields(record.events())))
    exit_record = record.read_exit()
    if exit_record:
        print("\nexit")
        print_fields(
            _indented([(name, _format_value(value)) for name, value in exit_record.items() if name != "schema"])
        )


def _spec_fields(spec: JobSpec) -> list[tuple[str, str]]:
    """Return the spec by the names of `accel submit`'s flags, without defaults."""
    flag = {"script": "", "module": "-m ", "command": "--no-python "}[spec.entry]
    resources = {name: value for name, value in vars(spec.resources).items() if value}
    return [
        ("program", flag + shlex.join(spec.argv)),
        ("code", spec.code),
        ("workdir", spec.workdir if spec.workdir != "." else ""),
        ("nodes", str(spec.nodes) if spec.max_nodes is None else f"{spec.nodes}:{spec.max_nodes}"),
        ("procs-per-node", str(spec.procs_per_node or "")),
        ("needs", _format_pairs(resources)),
        ("env", _format_pairs(spec.env)),
        ("secrets", _format_pairs(spec.secrets)),
        ("time-limit", f"{spec.time_limit_s:g} s" if spec.time_limit_s else ""),
        ("grace", f"{spec.grace_s:g} s"),
        ("max-restarts", str(spec.retry.max_restarts or "")),
        ("after", " ".join(spec.after)),
        ("options", _format_pairs(spec.options)),
    ]


def _event_fields(events: Sequence[Event]) -> list[tuple[str, str]]:
    from schedulers.job import Status

    fields = []
    for event in events:
        status = event.data.get("status")
        text = phrase(Status.from_json(status)) if status else _format_pairs(event.data)
        fields.append((moment(event.at), text if event.name in ("submitting", "status") else f"{event.name} {text}"))
    return fields


def _indented(fields: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    return [(f"  {name}", value) for name, value in fields]


def _format_pairs(values: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={_format_value(value)}" for name, value in values.items())


def _format_value(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)
