"""`accel serve`: serve this computer's targets to other computers, over a REST API.

`accel serve check` checks the settings, the database and the targets; `accel serve migrate` migrates the database's
tables, or with --sql prints the statements that create them.

--json  with check: [{"part", "ok", "detail"}]
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import shlex
import sys
from typing import TYPE_CHECKING, Any

from accel.launch import signals

from . import arguments, exit_status
from .argv import UsageError
from .output import note, print_json, print_rows

if TYPE_CHECKING:
    from argparse import Namespace

    from accel.serve.settings import Settings

    from .arguments import Parser

EXAMPLES = """\
  accel serve
  accel serve check
  accel serve --host 0.0.0.0 --url https://jobs.example.org --tls-cert cert.pem --tls-key key.pem
  accel login http://127.0.0.1:8765 --token-file ~/.local/share/accel/service/owner-token

Settings are in serve.yaml, next to accel.yaml; flags override them. docs/serve.md describes both."""

_ACTIONS = ("check", "migrate")
_FLAGS = ("host", "port", "url", "home", "database", "tls_cert", "tls_key", "behind_proxy")
_PACKAGES = ("fastapi", "uvicorn", "sqlalchemy", "alembic", "prometheus_client")


def add_arguments(parser: Parser) -> None:
    action = "check the settings, or migrate the database's tables"
    parser.add_argument("action", nargs="?", choices=_ACTIONS, help=action)
    parser.add_argument("--config", metavar="FILE", help="settings (default: serve.yaml next to accel.yaml)")
    parser.add_argument("--host", metavar="ADDRESS", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", metavar="N", type=arguments.count, help="port to listen on (default: 8765)")
    parser.add_argument("--url", metavar="URL", help="public address of the server")
    parser.add_argument("--home", metavar="DIR", help="directory of the server's files (default: $ACCEL_HOME/service)")
    database = "sqlite (default), or env:NAME or file:PATH of a PostgreSQL URL"
    parser.add_argument("--database", metavar="WHERE", help=database)
    parser.add_argument("--tls-cert", metavar="FILE", help="certificate, with its chain, in PEM")
    parser.add_argument("--tls-key", metavar="FILE", help="private key of the certificate")
    proxy = "network of the proxies that end TLS, such as 10.0.0.0/8; repeatable"
    parser.add_argument("--behind-proxy", metavar="CIDR", action="append", default=None, help=proxy)
    parser.add_argument("--sql", action="store_true", help="with migrate: print the SQL statements instead")
    parser.add_argument("--json", action="store_true", help="with check: print JSON")


def run(args: Namespace) -> int:
    if args.sql and args.action != "migrate":
        raise UsageError("accel serve", "--sql is for migrate")
    if args.json and args.action != "check":
        raise UsageError("accel serve", "--json is for check")
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError("accel serve", f"needs {', '.join(missing)}: pip install 'accel-launch[serve]'")
    from accel.serve.settings import read_settings

    flags = {name: getattr(args, name) for name in _FLAGS if getattr(args, name) is not None}
    settings = read_settings(args.config, flags)
    if args.action == "check":
        return _check(settings, as_json=args.json)
    if args.action == "migrate":
        return _migrate(settings, sql=args.sql)
    return _serve(settings)


def _serve(settings: Settings) -> int:
    # In a container: nobody else would reap the supervisors of local jobs.
    code = signals.stay_as_pid1() if os.getpid() == 1 else None
    if code is not None:
        return code
    from accel.serve import people, server
    from accel.serve.targets import offered_targets
    from schedulers.config.named_targets import config_files
    from schedulers.store.paths import config_home

    _log_to_stderr()
    with server.open_context(settings) as context, server.bind(settings) as listener:
        owner = people.start(context)
        if not settings.port:
            settings = dataclasses.replace(settings, port=listener.getsockname()[1])
        targets = ", ".join(offered_targets(settings)) + "".join(f" ({path})" for path in config_files(config_home()))
        print(f"accel serve: {settings.address}, as {owner}; targets: {targets}")
        token_file = os.path.join(settings.home, people.TOKEN_FILE)
        print(f"accel serve: from another shell: accel login {settings.address} --token-file {shlex.quote(token_file)}")
        sys.stdout.flush()
        server.serve(context, listener)
    return exit_status.OK


def _check(settings: Settings, *, as_json: bool) -> int:
    from accel.serve.server import check

    rows = check(settings)
    if as_json:
        print_json([{"part": part, "ok": is_ok, "detail": detail} for part, is_ok, detail in rows])
    else:
        texts = [(part, "ok" if is_ok else "fails", detail if is_ok else "") for part, is_ok, detail in rows]
        print_rows(("PART", "RESULT", "DETAIL"), texts, on_terminal=texts)
        sys.stdout.flush()
        for part, is_ok, detail in rows:
            if not is_ok:
                note(f"{part} fails: {detail}")
    return exit_status.OK if all(is_ok for _, is_ok, _ in rows) else exit_status.ERROR


def _migrate(settings: Settings, *, sql: bool) -> int:
    from accel.serve import database
    from accel.serve.server import create_home

    if sql:
        database.print_sql(settings)
        return exit_status.OK
    create_home(settings.home)
    engine = database.connect(settings)
    try:
        before, newest = database.revisions(engine)
        database.migrate(engine)
    finally:
        engine.dispose()
    note(f"the database has revision {newest}" + (" already" if before == newest else f" (before: {before or 'none'})"))
    return exit_status.OK


def _log_to_stderr() -> None:
    import logging

    from schedulers.printable import one_line

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            print(f"accel serve: {one_line(self.format(record))}", file=sys.stderr)

    handler: Any = Lines(logging.WARNING)
    logging.getLogger().addHandler(handler)
