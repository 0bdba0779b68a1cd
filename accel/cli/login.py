"""`accel login`: log in to a server of `accel serve`, whose targets are then NAME/TARGET."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from . import exit_status
from .argv import UsageError
from .output import note, print_json

if TYPE_CHECKING:
    from argparse import Namespace

    from .arguments import Parser

EXAMPLES = """\
  accel login http://127.0.0.1:8765 --token-file ~/.local/share/accel/service/owner-token
  accel login https://jobs.example.org --name team
  echo "$TOKEN" | accel login https://jobs.example.org --token-file -

Prompts for the token on a terminal. In CI, set ACCEL_SERVER and ACCEL_TOKEN instead, and use --target server/NAME."""


def add_arguments(parser: Parser) -> None:
    parser.add_argument("url", metavar="URL", help="address of the server")
    parser.add_argument("--token-file", metavar="FILE", help="file with the token; - for standard input")
    parser.add_argument("--name", help="name of the server here (default: from the URL)")
    parser.add_argument("--json", action="store_true", help='print JSON: {"name", "url", "user", "role", "targets"}')


def run(args: Namespace) -> int:
    from schedulers.config.servers import Server, add_server, checked_url
    from schedulers.service.client import Client

    url = checked_url(args.url)
    name = args.name or _name_of(url)
    client = Client(Server(name=name, url=url, token=_read_token(args.token_file)))
    me = client.get("/me")
    add_server(Server(name=name, url=url, token=client.server.token, user=me["name"]))
    targets = [f"{name}/{target}" for target in me["targets"]]
    if args.json:
        print_json({"name": name, "url": url, "user": me["name"], "role": me["role"], "targets": targets})
    else:
        note(f"logged in to {name} as {me['name']} ({me['role']}); targets: {', '.join(targets) or 'none'}")
    return exit_status.OK


def _name_of(url: str) -> str:
    """Return the first label of the host's name, or its address."""
    from urllib.parse import urlsplit

    host = urlsplit(url).hostname or ""
    is_address = ":" in host or host.replace(".", "").isdigit()
    return host.replace(":", "-").strip("-") if is_address else host.partition(".")[0]


def _read_token(file: str | None) -> str:
    if file is None and sys.stdin.isatty():
        import getpass

        return getpass.getpass("token: ").strip()
    if file is None:
        raise UsageError("accel login", "no token: give --token-file FILE, or --token-file - for standard input")
    if file == "-":
        return sys.stdin.read().strip()
    try:
        with open(file, encoding="ascii", errors="replace") as stream:
            return stream.read().strip()
    except OSError as error:
        raise UsageError("accel login", f"--token-file {file}: {error.strerror}") from None
