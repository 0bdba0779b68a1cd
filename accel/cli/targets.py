"""`accel targets`: the places where jobs can run.

Piped, a line for each without a heading, and between tabs: name, kind, where it is defined, its options.

--json  {"targets": [{"name", "kind", "options", "source"}], "ignored": […]}: `ignored` has a line for each installed
        plug-in that tried to take a built-in name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import exits
from .output import note, print_json, print_rows

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Mapping

    from .parser import Parser

EXAMPLES = """\
  accel targets
  accel targets --json | jq -r '.targets[].name'

Names come from accel.yaml in the project (this directory or the nearest above) and in the user's config directory."""

COLUMNS = ("NAME", "KIND", "DEFINED IN", "OPTIONS")


def add_arguments(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="answer in JSON")


def run(args: Namespace) -> int:
    from schedulers.config import known_targets
    from schedulers.target import refused_entry_points

    targets = known_targets()
    ignored = refused_entry_points()
    if args.json:
        shown = [{"name": t.name, "kind": t.kind, "options": dict(t.options), "source": t.source} for t in targets]
        print_json({"targets": shown, "ignored": ignored})
        return exits.OK
    rows = [(t.name, t.kind, t.source, _words(t.options)) for t in targets]
    print_rows(COLUMNS, rows, on_terminal=rows)
    for line in ignored:
        note(f"warning: {line}")
    return exits.OK


def _words(options: Mapping[str, Any]) -> str:
    import json

    return " ".join(f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in options.items())
