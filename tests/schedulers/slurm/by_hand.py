"""A job on the tests' Slurm cluster, put there by hand: what the slurm target does, without it."""

from __future__ import annotations

import json
import secrets
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from schedulers.slurm.node import NodeMain
from schedulers.slurm.submit import PROGRAM, program
from tests.clusters.netns import wait_until
from tests.clusters.slurm import Slurm

ROOT = Path(__file__).parents[3]


class ByHand:
    """A job of `nodes` nodes whose ranks run `script`, the text of a shell script, or the command in `argv`."""

    def __init__(self, slurm: Slurm, directory: Path, script: str = "", *, nodes: int = 2, **settings: Any) -> None:
        self.slurm, self.directory = slurm, directory
        for name in ("logs", "slurm/pickles", "code"):
            (directory / name).mkdir(parents=True, exist_ok=True)
        program_file = directory / "code/job.sh"
        program_file.write_text(f"#!/bin/sh\n{script}\n")
        program_file.chmod(0o755)
        pickles = str(directory / "slurm/pickles")
        self.settings: dict[str, Any] = {
            "schema": 1, "job_id": f"t-{secrets.token_hex(4)}", "name": "by hand", "nodes": nodes,
            "procs_per_node": 1, "argv": ["./job.sh"], "entry": "command", "env": {}, "setup": [],
            "directory": str(directory), "workdir": "code", "python": sys.executable, "launch": ["--cpu"],
            "grace_s": 2.0, "time_limit_s": None, "max_restarts": 0, "start_timeout_s": 60.0, "interface": None,
            "srun": ["srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "--export=ALL",
                     "--kill-on-bad-exit=1", "--unbuffered", "--open-mode=append",
                     f"--output={str(directory).replace('%', '%%')}/logs/node-%n.log"],
            "submitit": [sys.executable, "-u", "-m", "submitit.core._submit", pickles],
            **settings,
        }  # fmt: skip
        self.id = ""

    def submit(self, *sbatch: str, secret: dict[str, str] | None = None) -> ByHand:
        from submitit.core.utils import DelayedSubmission

        own = self.directory / "slurm"
        (own / "settings.json").write_text(json.dumps({**self.settings, "secrets": sorted(secret or ())}))
        (self.directory / PROGRAM).write_bytes(program())
        if secret:
            (own / "secrets.json").write_text(json.dumps(secret))
        batch = [sys.executable, "-I", str(self.directory / PROGRAM), str(self.directory)]
        script = f"#!/bin/bash\nexec {shlex.join(batch)}\n"
        (own / "script.sh").write_text(script)
        restarts = "--requeue" if self.settings["max_restarts"] else "--no-requeue"
        words = ["sbatch", "--parsable", f"--nodes={self.settings['nodes']}", "--ntasks-per-node=1", restarts,
                 "--signal=USR1@10", f"--comment=accel:{self.settings['job_id']}", "--open-mode=append",
                 f"--output={str(self.directory).replace('%', '%%')}/logs/slurm.log", "--hold",
                 *sbatch, str(own / "script.sh")]  # fmt: skip
        self.id = self.slurm.run(words, env={"PYTHONPATH": str(ROOT)}).stdout.strip()
        DelayedSubmission(NodeMain(str(self.directory))).dump(own / "pickles" / f"{self.id}_submitted.pkl")
        self.slurm.run(["scontrol", "release", self.id])
        return self

    @staticmethod
    def submit_array(jobs: Sequence[ByHand]) -> None:
        """As one array, whose tasks these are."""
        from submitit.core.utils import DelayedSubmission

        first = jobs[0]
        listed = {"schema": 1, "directories": [str(job.directory) for job in jobs]}
        (first.directory / "slurm/array.json").write_text(json.dumps(listed))
        (first.directory / PROGRAM).write_bytes(program())
        batch = [sys.executable, "-I", str(first.directory / PROGRAM), "--array", str(first.directory)]
        script = first.directory / "slurm/script.sh"
        script.write_text(f"#!/bin/bash\nexec {shlex.join(batch)}\n")
        words = ["sbatch", "--parsable", "--nodes=1", "--ntasks-per-node=1", "--requeue", "--open-mode=append",
                 "--hold", f"--array=0-{len(jobs) - 1}", f"--output={first.directory}/slurm/%a.log",
                 str(script)]  # fmt: skip
        number = first.slurm.run(words, env={"PYTHONPATH": str(ROOT)}).stdout.strip()
        for task, job in enumerate(jobs):
            job.id = f"{number}_{task}"
            job.settings["submitit"][-1] = str(first.directory / "slurm/pickles")
            (job.directory / "slurm/settings.json").write_text(json.dumps(job.settings))
            pickle = first.directory / "slurm/pickles" / f"{job.id}_submitted.pkl"
            DelayedSubmission(NodeMain(str(job.directory))).dump(pickle)
        first.slurm.run(["scontrol", "release", number])

    def exit(self, seconds: float = 120) -> dict[str, Any]:
        """How it ended; and Slurm has no job of it any more, and no node a process."""
        self.until("it has a result", (self.directory / "exit.json").exists, seconds)
        self.until("Slurm is done with it", lambda: self.state() not in ("RUNNING", "COMPLETING"))
        self.until("nothing of it is left", lambda: not self.processes())
        return dict(json.loads((self.directory / "exit.json").read_text()))

    def state(self) -> str:
        return self.slurm.run(["squeue", "-h", "-t", "all", "-j", self.id, "-o", "%T"], check=False).stdout.strip()

    def exit_status(self) -> str:
        """As Slurm has it: code and signal."""
        shown = self.slurm.run(["scontrol", "show", "job", "-o", self.id]).stdout
        return next(word.partition("=")[2] for word in shown.split() if word.startswith("ExitCode="))

    def await_running(self, text: str = "go", attempt: int = 0, ranks: Sequence[int] | None = None) -> None:
        """Until each of these ranks, by default one a node, has printed a line."""
        for rank in ranks if ranks is not None else range(self.settings["nodes"]):
            self.until(f"rank {rank} says {text}", lambda rank=rank: text in self.log(rank, attempt))  # type: ignore[misc]

    def log(self, rank: int, attempt: int = 0) -> str:
        return self.read(f"logs/rank-{rank}.a{attempt}.log")

    def read(self, name: str) -> str:
        try:
            return (self.directory / name).read_text(errors="replace")
        except FileNotFoundError:
            return ""

    def lines(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.read(name).splitlines()]

    def reports(self, attempt: int = 0) -> list[dict[str, Any]]:
        marks = self.directory / f"slurm/nodes/a{attempt}"
        return [json.loads(file.read_text()) for file in sorted(marks.glob("*.json"))]

    def processes(self) -> list[str]:
        """Command lines on any node of what carries the job's mark, or names its directory."""
        return [line for node in self.slurm.nodes if node.alive() for line in self.on(node.name)]

    def on(self, name: str) -> list[str]:
        found = []
        for process in self.slurm[name].processes():
            folder = Path(f"/proc/{process.pid}")
            try:
                command, environ = (folder / "cmdline").read_bytes(), (folder / "environ").read_bytes()
            except OSError:
                continue
            mark = f"ACCEL_JOB_ID={self.settings['job_id']}".encode()
            if (mark in environ.split(b"\0") or str(self.directory).encode() in command) and command:
                found.append(f"{name} {process.pid} {command.replace(bytes(1), b' ').decode(errors='replace')}")
        return found

    def until(self, what: str, so: Callable[[], object], seconds: float = 60) -> None:
        try:
            wait_until(what, lambda: bool(so()), seconds)
        except Exception as error:
            raise AssertionError(f"{error}\n{self.told()}") from None

    def told(self) -> str:
        """What there is to know after a test has failed."""
        parts = [f"state {self.state()}", *self.processes()]
        for path in sorted(self.directory.rglob("*")):
            if path.suffix in (".json", ".log", ".jsonl") and path.name not in ("settings.json", "sizes.jsonl"):
                parts.append(f"--- {path.relative_to(self.directory)}\n{path.read_text(errors='replace')[-2000:]}")
        return "\n".join(parts)
