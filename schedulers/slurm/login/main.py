"""Query or watch this user's Slurm jobs on a machine with Slurm's commands.

Reads one line of JSON:

    {"root": "~/.accel", "do": [{"op": "status", "jobs": [{"job": "…", "slurm": "123"}]}]}

Writes one line, `{"done": […]}` or `{"error": "…", "unreachable": false}`, and then the bytes of the logs.

    {"root": "~/.accel", "watch_s": 600, "clusters": null}

is followed by one line per job, `id number`; the id of each finished job is written on a line.

Sent to login nodes, with its imports.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time

from ...node import program
from . import job_ops as slurm
from . import slurm_commands as commands

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Step = dict[str, Any]


def main() -> None:
    os.umask(0o077)
    commands.extend_path()
    contents: list[bytes] = []
    try:
        request = json.loads(sys.stdin.buffer.readline())
        root = os.path.expanduser(request["root"])
        if "watch_s" in request:
            watch(root, request)
            return
        line: dict[str, Any] = {"done": [slurm.OPERATIONS[step["op"]](root, step, contents) for step in request["do"]]}
    except slurm.REFUSALS as error:
        line = {"error": str(error)}
    except commands.Unanswered as error:
        line = {"error": str(error), "unreachable": True}
    except OSError as error:
        line = {"error": program.describe_error(error)}
    program.write_reply(line, contents if "done" in line else ())


def watch(root: str, request: Step) -> None:
    watched: dict[str, Step] = {}

    def receive_jobs() -> None:
        for line in sys.stdin.buffer:
            job, number = line.decode("ascii", "replace").split()
            watched[job] = {"job": job, "slurm": number}
        os._exit(0)

    threading.Thread(target=receive_jobs, daemon=True).start()
    started_at = time.monotonic()
    for finished in slurm.ends(root, watched, request):
        for job in finished:
            del watched[job]
            os.write(1, job.encode() + b"\n")
        if time.monotonic() - started_at >= request["watch_s"]:
            return
        time.sleep(slurm.LOOK_S)
