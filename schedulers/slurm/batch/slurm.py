"""Queries of Slurm and of the network, for the first node."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import time

from ...node.listen import server_family
from .outcome import is_requeued
from .unanswered import is_unanswered

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

FIRST_PORT, PORTS = 20000, 12000  # below the ports that systems give out by themselves (32768 on Linux)
_COMMAND_TIMEOUT_S = 5.0
_PAUSES_S = (1, 2, 4, 8, 16, 30, 60, 60, 60, 0)
_END_S = 30.0
_SIOCGIFADDR = 0x8915
_FACT = re.compile(r"\b(JobState|Reason|Restarts|PreemptTime|TimeLimit)=(\S+)")


class Problem(Exception):
    """The job cannot be started. The message has one line."""


def log(text: str) -> None:
    print("accel: " + text, flush=True)


def text_of(problem: Exception) -> str:
    if isinstance(problem, OSError) and problem.strerror:
        return f"{problem.filename or 'a file'}: {problem.strerror}"
    return str(problem)


def own_job() -> str:
    """Return this job's id for Slurm's commands. An array's own number is also that of its last task."""
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    return "{}_{}".format(array, os.environ["SLURM_ARRAY_TASK_ID"]) if array else os.environ["SLURM_JOB_ID"]


def node_names() -> list[str]:
    """Return the names of the job's nodes, by rank."""
    nodelist = os.environ["SLURM_JOB_NODELIST"]
    completed = _call("scontrol", "show", "hostnames", nodelist)
    names = completed.stdout.split() if completed is not None and completed.returncode == 0 else []
    return names or [os.environ.get("SLURMD_NODENAME") or socket.gethostname()]


def reachable(name: str) -> str:
    """Return this node's address for the others: its name in Slurm or, if that does not resolve, its NodeAddr."""
    try:
        socket.getaddrinfo(name, None)
        return name
    except OSError:
        completed = _call("scontrol", "show", "node", "-o", name)
        match = re.search(r"\bNodeAddr=(\S+)", completed.stdout) if completed is not None else None
        return match.group(1) if match else socket.gethostname()


def address_of(interface: str | None) -> str | None:
    """Return this node's address on a network interface, or None without one. Raises Problem."""
    if interface is None:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            packed = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
            return socket.inet_ntoa(packed[20:24])
        except OSError:
            pass
    with contextlib.suppress(OSError), open("/proc/net/if_inet6") as file:
        for line in file:
            digits, _, _, scope, _, name = line.split()
            if name == interface and scope == "00":
                return socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))
    interfaces = ", ".join(name for _, name in socket.if_nameindex())
    raise Problem(f"interface {interface}: {socket.gethostname()} has no address on it (interfaces: {interfaces})")


def hold_port(job: int) -> tuple[int, socket.socket]:
    """Bind a port of this node that no other job can bind while the socket is open, but the ranks' launcher can.

    The socket does not listen. A second bind needs SO_REUSEADDR on both sockets: a search for a free port does
    not set it, but a server does.
    """
    family = server_family()
    for number in range(PORTS):
        port = FIRST_PORT + (job + number) % PORTS
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.bind(("", port))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            return port, sock
        except OSError:
            sock.close()
    raise Problem(f"none of the ports {FIRST_PORT} … {FIRST_PORT + PORTS - 1} is free on this node")


def facts(job: str) -> dict[str, str] | None:
    """Return Slurm's current record of a job, or None if the query fails."""
    for _ in range(2):
        completed = _call("scontrol", "show", "job", "-o", job)
        if completed is not None and completed.returncode == 0:
            # A job's name comes before these, its command and directory after: the first of each is Slurm's.
            fields = dict(reversed(_FACT.findall(completed.stdout.partition(" GroupId=")[2])))
            if "JobState" in fields:
                return fields
    return None


def requeue(job: str, runs_before: int, terminating: Callable[[], bool]) -> str | None:
    """Requeue the job under the same id. Return None, or why Slurm refuses.

    Retries for some minutes while the controller does not respond. Slurm may kill the client with this program,
    which is part of the job too; so this checks whether the job was requeued. If Slurm ends the job for another
    reason, its record of the job shows that.
    """
    message = ""
    for pause in _PAUSES_S:
        completed = _call("scontrol", "requeue", job)
        if completed is not None and completed.returncode == 0:
            return None
        job_facts = facts(job)
        if job_facts is not None and is_requeued(job_facts, runs_before):
            return None
        message = completed.stderr.strip() if completed is not None and completed.returncode > 0 else ""
        if not message:
            if terminating() if job_facts is None else job_facts["JobState"] != "RUNNING":
                return None
        elif terminating() or (job_facts is not None and not is_unanswered(message)):
            break
        time.sleep(pause)
    return (message or "slurmctld does not respond").splitlines()[-1]


def cancel(job: str) -> bool:
    completed = _call("scancel", job)
    return completed is not None and completed.returncode == 0


def await_end(terminating: Callable[[], bool]) -> None:
    """Wait for the signal with which Slurm ends this program."""
    deadline = time.monotonic() + _END_S
    while not terminating() and time.monotonic() < deadline:
        time.sleep(0.05)


def _call(*argv: str) -> subprocess.CompletedProcess[str] | None:
    try:
        return subprocess.run(
            list(argv), stdin=subprocess.DEVNULL, capture_output=True, timeout=_COMMAND_TIMEOUT_S, text=True,
            errors="replace", env=dict(os.environ, LC_ALL="C"), preexec_fn=_ignore_sigterm,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return None
    except OSError as error:
        print(f"accel: {argv[0]}: {error.strerror}", file=sys.stderr, flush=True)
        return None


def _ignore_sigterm() -> None:
    """Ignore SIGTERM, which Slurm sends to all processes of the job, for the duration of a query."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
