"""`accel shell`: open a shell where a rank runs, or run one command there, with this process's streams.

A terminal is passed on with its size; pipes stay pipes. Exits with the command's exit code.

--json  {"id", "target", "node", "rank", "exit_code", "stdout", "stderr"}: of a command, after it has ended
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from . import arguments, exit_status
from .argv import UsageError

if TYPE_CHECKING:
    from argparse import Namespace

    from schedulers.job import JobSpec
    from schedulers.jobs.handle import Job

    from .arguments import Parser

EXAMPLES = """\
  accel shell @last
  accel shell --rank 3 1k2m -- nvidia-smi
  accel shell --node 1 1k2m -- df -h /dev/shm
  accel shell 1k2m -- tar c -C /tmp/profile . > profile.tar"""

_COMMAND = "accel shell"


def add_arguments(parser: Parser) -> None:
    parser.add_argument("job", metavar="JOB", help="job id, unique prefix of an id, or @last")
    parser.add_argument("command", metavar="-- COMMAND", nargs="*", help="command to run instead of a shell")
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--rank", metavar="N", type=arguments.count, help="on the node of this rank (default: 0)")
    group.add_argument("--node", metavar="N", type=arguments.count, help="on this node of the job, from 0")
    parser.add_argument("--json", action="store_true", help="print JSON with the command's output")
    arguments.add_job_arguments(parser)


def run(args: Namespace) -> int:
    """Open the shell or run the command. Raises UsageError and the target's errors."""
    if args.json and not args.command:
        raise UsageError(_COMMAND, "--json needs a command: accel shell JOB --json -- COMMAND")
    job = arguments.find_job(_COMMAND, args.job, args)
    node = _node(job.spec, args.rank, args.node)
    _check_runs(job)
    if args.json:
        return _as_json(args, job, node)
    terminal = sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()
    sys.stdout.flush()
    return job.shell(node, args.command, terminal=terminal)


def _node(spec: JobSpec, rank: int | None, node: int | None) -> int:
    """Return the selected node. Raises UsageError for one that the job does not have."""
    node_count = spec.max_nodes or spec.nodes
    if node is not None:
        if not 0 <= node < node_count:
            raise UsageError(_COMMAND, f"--node {node}: the job has {_range('node', node_count)}")
        return node
    if rank is None:
        return 0
    if spec.max_nodes is not None:
        raise UsageError(_COMMAND, "--rank: the ranks of an elastic job may change nodes: use --node N, from 0")
    per_node = spec.procs_per_node or spec.resources.gpus or 1
    if not 0 <= rank < per_node * spec.nodes:
        raise UsageError(_COMMAND, f"--rank {rank}: the job has {_range('rank', per_node * spec.nodes)}")
    return rank // per_node


def _range(noun: str, count: int) -> str:
    return f"one {noun}: 0" if count == 1 else f"{noun}s 0 to {count - 1}"


def _check_runs(job: Job) -> None:
    from schedulers.errors import SubmitError
    from schedulers.job import State

    status = job.status()
    if status.state is State.RUNNING:
        return
    detail = f": {status.message}" if status.message and status.message != status.state.value else ""
    condition = (
        f"has ended ({status.state.value}{detail})" if status.state.final else f"is {status.state.value}{detail}"
    )
    raise SubmitError(f"job {job.id} {condition}; a shell needs a running job")


def _as_json(args: Namespace, job: Job, node: int) -> int:
    """Run accel once more as a child process, to capture the command's output."""
    import subprocess

    from .output import print_json

    argv = [sys.executable, "-m", "accel", "shell", job.id, f"--node={node}", "--", *args.command]
    completed = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True)
    print_json(
        {
            "id": job.id,
            "target": job.target,
            "node": node,
            "rank": args.rank,
            "exit_code": completed.returncode,
            "stdout": completed.stdout.decode(errors="backslashreplace"),
            "stderr": completed.stderr.decode(errors="backslashreplace"),
        }
    )
    return exit_status.OK if completed.returncode == 0 else completed.returncode
