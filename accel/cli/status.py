"""`accel status JOB`: show the state of a job.

--json  one object, in the shape of `accel.cli.job_format`.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from . import exit_status, job_args
from .output import age, moment, print_fields, print_json

if TYPE_CHECKING:
    from argparse import Namespace

    from .parser import Parser

EXAMPLES = """\
  accel status @last
  accel status --json 1k2m | jq -r .state
  accel status 2mxh4k0r7ab --target lab          # submitted by another machine
  accel status 2mxh4k0r7ab --target ssh --hosts gpu01

A job that was found on a target once is known here: by list, logs, wait, cancel and describe too, which take --target
as well."""


def add_arguments(parser: Parser) -> None:
    parser.add_argument("job", metavar="JOB", help="an id, a unique prefix of one, or @last")
    parser.add_argument("--json", action="store_true", help="answer in JSON")
    job_args.add_arguments(parser)


def run(args: Namespace) -> int:
    from .job_format import phrase, record_json

    job = job_args.find("accel status", args.job, args)
    status = job.status()
    record = job.record
    if args.json:
        print_json(record_json(record))
        return exit_status.OK
    now = time.time()
    print_fields(
        [
            ("job", f"{record.id} ({record.name})"),
            ("state", phrase(status)),
            ("target", record.target if record.target == record.kind else f"{record.target} ({record.kind})"),
            (
                "submitted",
                f"{moment(record.created_at)} ({age(now - record.created_at)} ago)"
                + (", by another machine" if record.adopted else ""),
            ),
            ("warning", record.warning),
            ("last seen", f"{age(now - status.observed_at)} ago" if status.observed_at else ""),
        ]
    )
    return exit_status.OK
