"""The daemons of a Slurm cluster of the tests: how each is started, waited for and killed."""

from __future__ import annotations

import contextlib
import re
import signal
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

from schedulers.processes import Identity

from .netns import ClusterError, Machine, answers, call, wait_until
from .slurm_files import ACCOUNTING_PORT, CONTROLLER_PORT, NODE_PORT, Files

START_S = 60.0

_SQL = """\
CREATE DATABASE slurm;
CREATE USER 'slurm'@'127.0.0.1' IDENTIFIED BY 'slurm';
CREATE USER 'slurm'@'localhost' IDENTIFIED BY 'slurm';
GRANT ALL ON slurm.* TO 'slurm'@'127.0.0.1';
GRANT ALL ON slurm.* TO 'slurm'@'localhost';
"""


class HeadDaemons:
    """munged, MariaDB, slurmdbd and slurmctld; all on one machine, which must be on. `run` runs a client."""

    def __init__(self, files: Files, head: Machine, run: Callable[..., CompletedProcess[str]]) -> None:
        self._files = files
        self._head = head
        self._run = run

    def start(self, *, accounting: bool) -> None:
        """Starts what does not run, in the order in which each needs the one before."""
        if not self._head.processes("munged"):
            self._start_munged()
        if accounting:
            if not self._head.processes("mariadbd"):
                self._start_sql()
            self.start_accounting()
            if not self._head.processes("slurmctld"):
                self._add_to_accounting()
        self.start_controller()

    def start_controller(self) -> None:
        if not self._head.processes("slurmctld"):
            start(self._head, "slurmctld")
        wait_for_port(self._head, CONTROLLER_PORT)
        wait_until("slurmctld answers", lambda: self._succeeds("scontrol", "ping"), START_S)

    def start_accounting(self) -> None:
        if self._head.processes("slurmdbd"):
            return
        start(self._head, "slurmdbd")
        wait_for_port(self._head, ACCOUNTING_PORT)
        wait_until("slurmdbd answers", lambda: self._succeeds("sacctmgr", "-n", "list", "cluster"), START_S)

    def next_job_id(self) -> str:
        """As the controller has it; empty when it does not answer."""
        told = self._run("scontrol show config".split(), check=False).stdout
        found = re.search(r"NEXT_JOB_ID\s*=\s*(\d+)", told)
        return found[1] if found else ""

    def _start_munged(self) -> None:
        box = self._files.box
        places = [f"--key-file={box}/munge/key", f"--socket={self._files.munge_socket}"]
        places += [f"--{name}-file={box}/munge/{name}" for name in ("pid", "seed")]
        start(self._head, "munged", "--force", *places, f"--log-file={box}/log/munged.txt")

    def _add_to_accounting(self) -> None:
        """slurmctld registers there."""
        if "accel" not in self._run("sacctmgr -n list cluster format=cluster".split()).stdout.split():
            self._run("sacctmgr -i add cluster accel".split())

    def _start_sql(self) -> None:
        data = self._files.sql / "data"
        fresh = not data.exists()
        sizes = "--innodb-log-file-size=8M --innodb-buffer-pool-size=32M --performance-schema=OFF".split()
        if fresh:
            words = "--no-defaults --user=root --auth-root-authentication-method=socket --skip-test-db".split()
            call("mariadb-install-db", *words, *sizes, f"--datadir={data}")
        socket, log = self._files.sql / "socket", self._files.box / "log/mariadbd.txt"
        words = "--no-defaults --user=root --bind-address=127.0.0.1 --port=3306 --skip-log-bin".split()
        words += "--innodb-flush-log-at-trx-commit=0 --innodb-lock-wait-timeout=900".split()
        words += [f"--datadir={data}", f"--socket={socket}", f"--pid-file={self._files.sql}/pid", *sizes]
        self._head.run("sh", "-c", 'setsid mariadbd "$@" </dev/null >>"$0" 2>&1 &', str(log), *words)
        client = ["mariadb", "--no-defaults", f"--socket={socket}", "-e"]
        wait_until(f"mariadbd answers ({log})", lambda: self._succeeds(*client, "SELECT 1"), START_S)
        if fresh:
            call(*client, _SQL)

    def _succeeds(self, *argv: str) -> bool:
        return self._run(argv, check=False).returncode == 0


def start(machine: Machine, *argv: str) -> None:
    """A daemon that goes into the background by itself. Raises ClusterError with what it says against that."""
    machine.run("env", "-u", "SLURM_CONF", *argv)


def start_slurmd(machine: Machine) -> None:
    start(machine, "slurmd")
    wait_for_port(machine, NODE_PORT)


def wait_for_port(machine: Machine, port: int) -> None:
    wait_until(f"{machine.name}:{port} ({machine.log})", lambda: answers(machine.address, port), START_S)


def power_on(machine: Machine) -> None:
    """Nothing when it is on; else it has booted when this returns, but its servers may still be starting."""
    if not machine.alive():
        (machine.own / "ready").unlink(missing_ok=True)
        machine.start()
    wait_until(f"{machine.name} boots ({machine.log})", (machine.own / "ready").exists)


def power_off(machine: Machine) -> None:
    """Power loss: nobody is told; every process has ended when this returns."""
    inside = processes(machine)
    machine.kill()
    for process in inside:
        process.wait(10)


def processes(machine: Machine) -> list[Identity]:
    """Those of a machine that may just be starting, or ending."""
    with contextlib.suppress(ClusterError):
        return machine.processes()
    return []


def kill(machine: Machine, command: str) -> None:
    """SIGKILL to all processes of this name; they have ended when this returns."""
    for process in machine.processes(command):
        process.send(signal.SIGKILL)
        process.wait(10)


def end_strangers(machine: Machine) -> None:
    """Kills what runs on an idle node and does not belong there: Slurm does not find all that jobs leave behind."""
    for process in machine.processes():
        words = _command_line(process)
        if words[:1] != [b"slurmd"] and words != [b"sleep", b"infinity"] and b"boot.sh" not in words[-1]:
            process.send(signal.SIGKILL)


def _command_line(process: Identity) -> list[bytes]:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process.pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    return [b""]
