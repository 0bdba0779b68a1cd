"""A job under its supervisors on the tests' hosts, put there by hand: what the ssh target will do, without it."""

from __future__ import annotations

import json
import secrets
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from schedulers.hosts.bundle import PROGRAM, program
from schedulers.hosts.remote_files import Files
from schedulers.hosts.transport import Pool
from tests.clusters.netns import wait_until
from tests.clusters.ssh import SshHosts

ROOT = Path(__file__).parents[3]
ACCEL = [sys.executable, "-m", "accel", "launch"]
HEARTBEAT_S = 5.0


def start_command(python: str, directory: str, node: int) -> list[str]:
    """Starts a supervisor by hand; `directory` may begin with `~/`."""
    code = (
        "import os,sys,runpy;"
        f"runpy.run_path(os.path.join(os.path.expanduser(sys.argv[1]),{PROGRAM!r}),run_name='__main__')"
    )
    return [python, "-I", "-c", code, directory, str(node)]


def shell(script: str) -> list[str]:
    """A command in the place of `accel launch`: the flags that it is given are `$@`, its machine rank is `$rank`."""
    told = """echo "{\\"event\\": \\"attempt\\", \\"attempt\\": $ACCEL_ATTEMPT}" >>"${10}/launch.jsonl" """
    return ["/bin/sh", "-c", f"rank=$4\n{told}\n{script}", "launch"]


def queue(**job: Any) -> dict[str, Any]:
    """What a job takes of each host, as the ssh target says it: a place of so many, and what else is given."""
    devices = {"kind": "cpu", "ids": ["cpu"], "cpus": 2}
    return {"gpus": 0, "cpus": None, "procs_per_node": None, "cpu_only": True, "devices": devices, **job}


class Job:
    """A job on the first `nodes` hosts, with `spares` more."""

    def __init__(
        self, hosts: SshHosts, pool: Pool, command: Sequence[str], *, nodes: int = 2, spares: int = 0, **settings: Any
    ) -> None:
        self.hosts, self.pool = hosts, pool
        self.id = f"t-{secrets.token_hex(4)}"
        self.names = hosts.names[: nodes + spares]
        self.secret: dict[str, str] = {}
        port = 20000 + secrets.randbelow(10000)
        everyone = [
            {"name": name, "address": hosts[name].address, "control_port": port, "interface": "eth0"}
            for name in self.names
        ]
        self.settings = {
            "schema": 1, "job_id": self.id, "token": secrets.token_hex(32), "nodes": everyone[:nodes],
            "spares": everyone[nodes:], "procs_per_node": None, "command": list(command), "workdir": ".",
            "env": {"PYTHONPATH": str(ROOT)}, "setup": [], "grace_s": 2.0, "time_limit_s": None,
            "heartbeat_s": HEARTBEAT_S, "start_timeout_s": 30.0, "max_restarts": 0, "master_port": port + 1,
            "ports": [port + 1, port + 9], "queue": queue(concurrency=99), **settings,
        }  # fmt: skip

    def start(self, *names: str, secret: dict[str, str] | None = None) -> Job:
        """On these hosts, or on all of its."""
        self.secret = secret or {}
        for name in names or self.names:
            settings = {**self.settings, "node": self.names.index(name), "secrets": list(self.secret)}
            text = {"settings.json": json.dumps(settings).encode()}
            text[PROGRAM] = program()
            Files(self.pool.remote(name)).put({f"jobs/{self.id}/{path}": data for path, data in text.items()})
        for name in names or self.names:
            self.start_supervisor(name)
        return self

    def start_supervisor(self, name: str) -> None:
        command = start_command("python3", f"~/.accel/jobs/{self.id}", self.names.index(name))
        self.pool.remote(name).run(command, stdin=json.dumps(self.secret).encode())

    def directory(self, name: str) -> Path:
        return self.hosts.home(name) / ".accel" / "jobs" / self.id

    def read(self, name: str, file: str) -> Any:
        try:
            return json.loads((self.directory(name) / file).read_text())
        except FileNotFoundError:
            return None

    def state(self, name: str) -> dict[str, Any]:
        return dict(self.read(name, "state.json") or {})

    def log(self, name: str, file: str) -> str:
        try:
            return (self.directory(name) / "logs" / file).read_text()
        except FileNotFoundError:
            return ""

    def await_phase(self, phase: str, *names: str, attempt: int = 0) -> None:
        def so(name: str) -> bool:
            state = self.state(name)
            return (state.get("phase"), state.get("attempt")) == (phase, attempt)

        for name in names or self.names:
            self.until(f"{name} is {phase} in attempt {attempt}", partial(so, name))

    def exits(self, *names: str, seconds: float = 60) -> list[dict[str, Any]]:
        """How it ended on these hosts, or on all; and nothing of it runs there any more."""
        found = []
        for name in names or self.names:
            self.until(f"{name} has a result", (self.directory(name) / "exit.json").exists, seconds)
            found.append(self.read(name, "exit.json"))
            if self.hosts[name].alive():
                self.until(f"nothing is left on {name}", partial(self._is_empty, name))
        return found

    def _is_empty(self, name: str) -> bool:
        return not self.processes(name)

    def processes(self, name: str) -> list[str]:
        """Command lines of what carries the job's mark on a host, or is its supervisor."""
        marked = f"grep -al 'ACCEL_JOB_ID={self.id}' /proc/[0-9]*/environ"
        script = f"{marked}; grep -al 'jobs/{self.id}' /proc/[0-9]*/cmdline; :"
        pids = {line.split("/")[2] for line in self.hosts[name].run("sh", "-c", script).split() if "/" in line}
        commands = []
        for pid in pids:
            said = self.hosts[name].run("sh", "-c", f"tr '\\0' ' ' </proc/{pid}/cmdline 2>/dev/null; :").strip()
            if said and "grep" not in said:
                commands.append(f"{pid} {said}")
        return commands

    def until(self, what: str, so: Callable[[], object], seconds: float = 40) -> None:
        try:
            wait_until(what, lambda: bool(so()), seconds)
        except Exception as error:
            raise AssertionError(f"{error}\n{self.told()}") from None

    def told(self) -> str:
        """What there is to know after a test has failed."""
        parts = []
        for name in self.names:
            for path in sorted(self.directory(name).rglob("*")):
                if path.suffix in (".json", ".log", ".jsonl") and path.name != "settings.json":
                    parts.append(f"--- {name} {path.name}\n{path.read_text(errors='replace')[-1500:]}")
        return "\n".join(parts)
