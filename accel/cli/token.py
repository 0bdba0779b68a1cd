"""`accel token`: create, list or revoke tokens of the current server.

create prints the new token on stdout; it cannot be shown again.

--json  create: {"id", "user", "token"}; list: [{"id", "user", "created_at", "expires_at", "used_at"}]
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import arguments, exit_status
from .argv import UsageError
from .output import moment, note, print_json, print_rows

if TYPE_CHECKING:
    from argparse import Namespace

    from .arguments import Parser

EXAMPLES = """\
  accel token create
  accel token create --user grace --role submitter --expires 30d
  accel token list
  accel token revoke 7hTq2LpA"""

_COLUMNS = ("ID", "USER", "CREATED", "EXPIRES", "USED")
_ROLES = ("viewer", "submitter", "owner")


def add_arguments(parser: Parser) -> None:
    action = "create a token, list the tokens, or revoke one"
    parser.add_argument("action", choices=("create", "list", "revoke"), metavar="create|list|revoke", help=action)
    parser.add_argument("id", nargs="?", metavar="ID", help="with revoke: the id of the token")
    user = "with create: the user, created if missing (default: you)"
    parser.add_argument("--user", metavar="NAME", help=user)
    parser.add_argument("--role", choices=_ROLES, help="with create: the role of a new user (default: submitter)")
    expires = "with create: lifetime of the token (default: 90d, at most 365d)"
    parser.add_argument("--expires", metavar="TIME", type=arguments.duration, help=expires)
    parser.add_argument("--server", metavar="NAME", help="the server (default: the current one)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: Namespace) -> int:
    from schedulers.config.servers import FROM_ENVIRONMENT, read_servers
    from schedulers.service.client import Client

    if args.action != "create" and (args.user or args.role or args.expires is not None):
        raise UsageError("accel token", "--user, --role and --expires require create")
    if bool(args.id) != (args.action == "revoke"):
        raise UsageError("accel token", "give one ID with revoke" if not args.id else "ID requires revoke")
    servers = read_servers()
    name = args.server or servers.current.partition("/")[0] or FROM_ENVIRONMENT
    client = Client(servers.get(name))
    if args.action == "create":
        body: dict[str, Any] = {"user": args.user, "role": args.role}
        if args.expires is not None:
            body["days"] = args.expires / 86_400
        fields = {key: value for key, value in body.items() if value is not None}
        created = client.request("POST", "/tokens", document=fields).json()
        if args.json:
            print_json(created)
        else:
            print(created["token"])
            note(f"token {created['id']} of {created['user']}: it is shown only now")
    elif args.action == "revoke":
        client.request("DELETE", f"/tokens/{args.id}")
        note(f"token {args.id} is revoked")
    else:
        tokens = client.get("/tokens")
        times = ("created_at", "expires_at", "used_at")
        rows = [(t["id"], t["user"], *(moment(t[name]) if t[name] else "" for name in times)) for t in tokens]
        if args.json:
            print_json(tokens)
        else:
            print_rows(_COLUMNS, rows, on_terminal=rows)
    return exit_status.OK
