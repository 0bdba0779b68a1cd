"""`accel status JOB`: show the state of a job.

--json  one object, in the shape of `accel.cli.output`.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from . import arguments, exit_status
from .output import age, moment, phrase, print_fields, print_json, record_json

if TYPE_CHECKING:
    from argparse import Namespace

    from .arguments import Parser

EXAMPLES = """\
  accel status @last
  accel status --json 1k2m | jq -r .state
  accel status 2mxh4k0r7ab --target lab          # submitted by another machine
  accel status 2mxh4k0r7ab --target ssh --hosts gpu01

--target records the job on this machine; list, logs, wait, cancel and describe then find it by its id alone."""


def add_arguments(parser: Parser) -> None:
    parser.add_argument("job", metavar="JOB", help="job id, unique prefix of an id, or @last")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments.add_job_arguments(parser)


def run(args: Namespace) -> int:
    job = arguments.find_job("accel status", args.job, args)
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
