"""`accel logout`: revoke the token for a server, and forget the server.

--json  {"name", "revoked": true if the server has revoked the token}
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import exit_status
from .output import note, print_json

if TYPE_CHECKING:
    from argparse import Namespace

    from .arguments import Parser


EXAMPLES = """\
  accel logout
  accel logout team --keep-token"""


def add_arguments(parser: Parser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help="name of the server (default: the current one)")
    parser.add_argument("--keep-token", action="store_true", help="do not revoke the token: it is used elsewhere too")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: Namespace) -> int:
    from schedulers.config.servers import read_servers, remove_server
    from schedulers.errors import SchedulerError
    from schedulers.service.client import Client

    servers = read_servers()
    server = servers.get(args.name or servers.current.partition("/")[0])
    is_revoked = False
    if not args.keep_token:
        try:
            client = Client(server)
            client.request("DELETE", f"/tokens/{client.get('/me')['token']}")
            is_revoked = True
        except SchedulerError as error:
            note(f"warning: the token is not revoked: {error}")
    remove_server(server.name)
    if args.json:
        print_json({"name": server.name, "revoked": is_revoked})
    else:
        note(f"logged out of {server.name}")
    return exit_status.OK
