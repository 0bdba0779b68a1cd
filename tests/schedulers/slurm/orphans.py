"""Whether anything of a job is left on a cluster's nodes."""

from __future__ import annotations

from pathlib import Path

from schedulers import Job
from tests.clusters.slurm import Slurm
from tests.waiting import until


def nothing_left(slurm: Slurm, *jobs: Job, seconds: float = 60) -> None:
    """No node has a process that carries a job's mark, or that names its directory; and Slurm has none of them."""
    until(lambda: not left(slurm, *jobs), f"nothing is left of {[job.id for job in jobs]}", seconds)


def left(slurm: Slurm, *jobs: Job) -> list[str]:
    """A line for each process."""
    return [
        found
        for machine in (*slurm.nodes, slurm.head, slurm.login)
        if machine.alive()
        for process in machine.processes()
        if (found := _of(f"{machine.name} {process.pid}", Path(f"/proc/{process.pid}"), jobs))
    ]


def _of(name: str, folder: Path, jobs: tuple[Job, ...]) -> str:
    try:
        command, environ = (folder / "cmdline").read_bytes(), (folder / "environ").read_bytes()
    except OSError:
        return ""
    marks = [f"ACCEL_JOB_ID={job.id}".encode() for job in jobs]
    ours = any(mark in environ.split(b"\0") for mark in marks) or any(job.id.encode() in command for job in jobs)
    return f"{name} {command.replace(bytes(1), b' ').decode(errors='replace')}" if command and ours else ""
