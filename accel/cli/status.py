"""`accel status JOB`: where a job is.

--json  one object, in the shape that `accel.cli.rows` gives.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from . import exits
from .output import age, moment, print_fields, print_json

if TYPE_CHECKING:
    from argparse import Namespace

    from .parser import Parser

EXAMPLES = """\
  accel status @last
  accel status --json 1k2m | jq -r .state"""


def add_arguments(parser: Parser) -> None:
    parser.add_argument("job", metavar="JOB", help="an id, a unique prefix of one, or @last")
    parser.add_argument("--json", action="store_true", help="answer in JSON")


def run(args: Namespace) -> int:
    from schedulers.handle import find

    from .rows import phrase, record_json

    job = find(args.job)
    status = job.status()
    record = job.record
    if args.json:
        print_json(record_json(record))
        return exits.OK
    now = time.time()
    print_fields(
        [
            ("job", f"{record.id} ({record.name})"),
            ("state", phrase(status)),
            ("target", record.target if record.target == record.kind else f"{record.target} ({record.kind})"),
            ("submitted", f"{moment(record.created_at)} ({age(now - record.created_at)} ago)"),
            ("warning", record.warning),
            ("last seen", f"{age(now - status.observed_at)} ago" if status.observed_at else ""),
        ]
    )
    return exits.OK
