"""`accel context`: list the servers that you are logged in to, and choose the current one.

A submit without --target goes to the target of the current server, if one was chosen.

--json  [{"name", "url", "user", "current", "target"}]
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import exit_status
from .argv import UsageError
from .output import note, print_json, print_rows

if TYPE_CHECKING:
    from argparse import Namespace

    from .arguments import Parser

EXAMPLES = """\
  accel context
  accel context use team/lab
  accel context remove team"""

_COLUMNS = ("NAME", "URL", "USER", "CURRENT")


def add_arguments(parser: Parser) -> None:
    action = "use NAME[/TARGET]: make it the current one; remove NAME: forget it, and keep its token valid"
    parser.add_argument("action", nargs="*", metavar="ACTION", help=action)
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: Namespace) -> int:
    from schedulers.config.servers import read_servers, remove_server, use_server

    if args.action:
        verb, *names = args.action
        if verb not in ("use", "remove") or len(names) != 1:
            raise UsageError(
                "accel context", f"expects use NAME[/TARGET] or remove NAME, got {' '.join(args.action)!r}"
            )
        (use_server if verb == "use" else remove_server)(names[0])
        note(f"{'the current server is now' if verb == 'use' else 'removed'} {names[0]}")
        return exit_status.OK
    servers = read_servers()
    current, _, target = servers.current.partition("/")
    entries = [
        {
            "name": server.name, "url": server.url, "user": server.user, "current": server.name == current,
            "target": target if server.name == current else "",
        }
        for server in servers.by_name.values()
    ]  # fmt: skip
    if args.json:
        print_json(entries)
        return exit_status.OK
    rows = [
        (s.name, s.url, s.user, f"current{target and ', target ' + target}" if s.name == current else "")
        for s in servers.by_name.values()
    ]
    print_rows(_COLUMNS, rows, on_terminal=rows)
    if not rows:
        note("no server: log in to one with accel login URL")
    return exit_status.OK
