"""`accel fetch`: download the results of a job.

--json   {"id", "directory", "artefacts"}
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from . import arguments, exit_status
from .output import note, print_json, progress

if TYPE_CHECKING:
    from .arguments import Parser

EXAMPLES = """\
  accel fetch @last
  accel fetch --output model-3 2myc3whqncn"""


def add_arguments(parser: Parser) -> None:
    parser.add_argument("job", metavar="JOB", help="job id, unique prefix of an id, or @last")
    parser.add_argument("--output", metavar="DIR", help="directory to create (default: ./NAME-ID); must not exist yet")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments.add_job_arguments(parser)


def run(args: Namespace) -> int:
    """Download the results. Raises NotReady, SpecError and the target's errors."""
    job = arguments.find_job("accel fetch", args.job, args)
    directory = Path(args.output or f"{job.name}-{job.id}")
    with progress():
        artefacts = job.fetch(directory)
    if args.json:
        print_json({"id": job.id, "directory": str(directory), "artefacts": artefacts})
    else:
        print(directory)
    note(f"job {job.id}: {' and '.join(artefacts)} in {directory}")
    return exit_status.OK
