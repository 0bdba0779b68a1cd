"""A real Slurm cluster on this computer: controller, nodes, accounting; nodes have own addresses and host names.

    python -m tests.clusters.slurm up [N] [--accounting] [--login] [--gpus=N] [--cgroups]
                                                     n1 … nN; one that is up is left alone; prints what a client needs
    python -m tests.clusters.slurm status            name, address, and whether it is on
    python -m tests.clusters.slurm exec NAME -- CMD  runs a command on n1 …, head or login
    python -m tests.clusters.slurm link NAME up|down plugs the cable in, or pulls it
    python -m tests.clusters.slurm kill-node NAME    power loss; `start-node NAME` turns it on again
    python -m tests.clusters.slurm kill-slurmd NAME  its jobs go on; `start-slurmd NAME`
    python -m tests.clusters.slurm kill-controller   SIGKILL; `start-controller`
    python -m tests.clusters.slurm heal              everything is on and idle again, jobs are gone
    python -m tests.clusters.slurm diagnose          states and the ends of all logs
    python -m tests.clusters.slurm down              ends everything and removes it

It needs root and the packages that PROGRAMS names. The file system is this computer's, shared as over NFS, but for
/dev/shm. munged, slurmctld, slurmdbd and MariaDB run on a machine of their own, `head`. Users are root and `worker`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from .netns import ClusterError, Machine, Network, Slot, call, lacking, wait_until
from .slurm_daemons import (
    START_S,
    HeadDaemons,
    end_strangers,
    kill,
    power_off,
    power_on,
    processes,
    start_slurmd,
    wait_for_port,
)
from .slurm_files import NODE_PORT, Files, Shape, lacks_cgroups

PROGRAMS = {
    "munged": "munge",
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "sbatch": "slurm-client",
}
ACCOUNTING_PROGRAMS = {
    "slurmdbd": "slurmdbd",
    "mariadbd": "mariadb-server-core",
    "mariadb": "mariadb-client-core",
}
LOGIN_PROGRAMS = {"sshd": "openssh-server", "ssh": "openssh-client", "ssh-keygen": "openssh-client"}

_KIND = "aw"
_COMMAND_SLOT = Slot(_KIND, 250)
_HEAD, _LOGIN = 201, 202
_MOST = 180
_SMALL_MB = 16


class Slurm:
    """One cluster in one slot. Holds no state of its own: what is up is read from the files of the slot."""

    def __init__(self, slot: Slot) -> None:
        self.slot = slot
        self.box = slot.box
        self.files = Files(slot.box)
        self.network = Network(slot)
        self.ssh_config = self.box / "ssh_config"
        self.known_hosts = self.box / "known_hosts"
        self.identity = self.box / "id_ed25519"

    def __enter__(self) -> Slurm:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()
        self.slot.release()

    @property
    def shape(self) -> Shape:
        """What was started. Raises ClusterError when nothing was."""
        shape = Shape.load(self.box / "shape.json")
        if shape is None:
            raise ClusterError("no cluster is up")
        return shape

    @property
    def names(self) -> list[str]:
        return [f"n{index + 1}" for index in range(self.shape.nodes)]

    @property
    def nodes(self) -> list[Machine]:
        return [self[name] for name in self.names]

    @property
    def head(self) -> Machine:
        """Where munged, slurmctld, slurmdbd and MariaDB run."""
        return Machine(self.network, _HEAD, "head", lambda machine: self.files.boot(machine, ""))

    @property
    def login(self) -> Machine:
        """Where an OpenSSH server runs, if the cluster has `login`: `ssh -F {ssh_config} login`."""
        server = "/usr/sbin/sshd -D -e -f {}/sshd_config &"
        return Machine(self.network, _LOGIN, "login", lambda it: self.files.boot(it, server.format(it.own)))

    def __getitem__(self, name: str) -> Machine:
        if name == "head" or (name == "login" and self.shape.login):
            return self.head if name == "head" else self.login
        if name not in self.names:
            raise ClusterError(f"no machine {name!r}: there are head, {', '.join(self.names)}")
        index = int(name.removeprefix("n"))
        cgroups = self.shape.cgroups
        return Machine(self.network, index, name, lambda machine: self.files.boot(machine, "slurmd", cgroups=cgroups))

    @property
    def env(self) -> dict[str, str]:
        """What a client on this computer needs in its environment."""
        return {"SLURM_CONF": str(self.files.conf)}

    @property
    def small_disk(self) -> Path:
        """A file system of its own, 16 MiB, that all machines share: it can be full."""
        return self.box / "small"

    def home(self, user: str = "root") -> Path:
        """A user's home on every machine of the cluster, root's too; jobs sent from this computer keep theirs."""
        return self.box / "home" / user

    def run(
        self,
        argv: Sequence[str],
        *,
        check: bool = True,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        text: str = "",
        timeout_s: float = 120,
    ) -> subprocess.CompletedProcess[str]:
        """A client's command on this computer, with `text` as its input. Raises ClusterError when `check` and it fails.

        It sees none of the SLURM_ variables of this process.
        """
        whole = {key: value for key, value in os.environ.items() if not key.startswith("SLURM_")}
        whole |= {**self.env, **(env or {})}
        done = subprocess.run(
            list(argv), env=whole, cwd=cwd, input=text, capture_output=True, text=True, timeout=timeout_s
        )
        if check and done.returncode != 0:
            raise ClusterError(f"{' '.join(argv)}: rc {done.returncode}: {done.stderr.strip() or done.stdout.strip()}")
        return done

    def start(
        self,
        nodes: int = 4,
        *,
        accounting: bool = False,
        gpus: int = 0,
        login: bool = False,
        cgroups: bool = False,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        """`nodes` nodes with 4 CPUs and `gpus` seeming GPUs each, all idle. Raises ClusterError.

        With `cgroups` memory is limited to what was asked for, and all processes of a job are found; without, neither.
        `settings` are lines of slurm.conf; an empty value takes a line away.
        """
        if not 1 <= nodes <= _MOST:
            raise ClusterError(f"between 1 and {_MOST} nodes, not {nodes}")
        self.stop()
        lack = lacks_cgroups() if cgroups else None
        if lack is not None:
            raise ClusterError(lack)
        shape = Shape(nodes, accounting, gpus, login, cgroups, dict(settings or {}))
        self.files.make_directories()
        shape.save(self.box / "shape.json")
        call("mount", "-t", "tmpfs", "-o", f"size={_SMALL_MB}m,mode=1777", "tmpfs", self.small_disk)
        self.files.write(shape, self.head, self.nodes, self._others(shape))
        self.network.up()
        if login:
            self.files.write_login(self.login)
            self.login.start()
        power_on(self.head)
        self._daemons.start(accounting=self.shape.accounting)
        for node in self.nodes:  # after their controller: a slurmd that does not find it tries again a second later
            node.start()
        self._wait_idle(START_S)
        if login:
            wait_for_port(self.login, 22)
        if accounting:
            # The first job of a cluster takes seconds to be seen by sacct: let it be this one.
            self.run(["srun", "--job-name=first", "true"])
            seen = ["sacct", "-X", "-n", "--name=first", "-o", "State"]
            wait_until("sacct sees a job", lambda: "COMPLETED" in self.run(seen).stdout, START_S)

    def stop(self) -> None:
        """Ends every process of the cluster and removes all that there was, with the killed owner's, if any."""
        shape = Shape.load(self.box / "shape.json")
        if shape is not None:
            machines = [*self.nodes, self.login, self.head]
            inside = [process for machine in machines for process in processes(machine)]
            for machine in machines:
                machine.end()
            for process in inside:
                process.wait(10)
            for node in self.nodes if shape.cgroups else ():
                self.files.remove_cgroups(node)
        self.network.down()
        while os.path.ismount(self.small_disk):
            call("umount", self.small_disk)
        shutil.rmtree(self.box, ignore_errors=True)

    def heal(self) -> None:
        """Whatever a test broke: cables, power, daemons, settings, states of nodes; and ends all jobs.

        A cluster that cannot be mended is started anew: then job ids begin at 1 again.
        """
        try:
            self._heal()
        except (ClusterError, subprocess.TimeoutExpired) as error:
            print(f"cluster {self.slot.tag} is started anew: {error}", file=sys.stderr)
            shape = self.shape
            self.start(
                shape.nodes,
                accounting=shape.accounting,
                gpus=shape.gpus,
                login=shape.login,
                cgroups=shape.cgroups,
                settings=shape.settings,
            )

    def kill_node(self, name: str) -> None:
        """Power loss: nobody is told, and every process is gone when this returns."""
        power_off(self[name])

    def start_node(self, name: str) -> None:
        """Turns it on, its cable plugged in; its slurmd answers when this returns."""
        machine = self[name]
        if machine.alive():
            machine.link(True)
        power_on(machine)
        if not machine.processes("slurmd"):
            start_slurmd(self[name])
        wait_for_port(machine, NODE_PORT)

    def link(self, name: str, up: bool) -> None:
        """The cable of a node, of `head` or of `login`: packets vanish, nobody is told."""
        self[name].link(up)

    def kill_slurmd(self, name: str) -> None:
        """SIGKILL: the steps of its jobs go on."""
        kill(self[name], "slurmd")

    def start_slurmd(self, name: str) -> None:
        start_slurmd(self[name])

    def kill_controller(self) -> None:
        """SIGKILL: what it had not saved yet, for about five seconds, is lost."""
        used = self._daemons.next_job_id()
        if used:
            self._used_ids.write_text(used)
        kill(self.head, "slurmctld")

    def start_controller(self) -> None:
        """Nothing when it runs; it answers when this returns."""
        self._daemons.start_controller()

    def kill_accounting(self) -> None:
        """SIGKILL to slurmdbd: sacct fails, slurmctld keeps what it has to tell."""
        kill(self.head, "slurmdbd")

    def start_accounting(self) -> None:
        """Nothing when it runs; else it answers when this returns."""
        self._daemons.start_accounting()

    def configure(self, **settings: str) -> None:
        """Puts lines into slurm.conf of a running cluster, until `heal`; an empty value takes a line away."""
        self.files.write_conf(self._changed(settings), self.head, self.nodes)
        self.run(["scontrol", "reconfigure"])

    def diagnose(self, lines: int = 25) -> str:
        """States, and the last lines of every log; works on a broken cluster too."""
        parts: list[str] = []
        if self.head.alive() and self.head.processes("slurmctld"):
            for command in ("sinfo -N -l", "squeue -a", "scontrol show job"):
                done = self.run(command.split(), check=False)
                parts.append(f"$ {command}\n{done.stdout[-4000:]}{done.stderr}")
        for log in sorted((self.box / "log").glob("*.txt")):
            text = [line for line in log.read_text(errors="replace").splitlines() if "pmix" not in line.lower()]
            if text:
                parts.append("\n".join([f"== {log.name}", *text[-lines:], ""]))
        return "\n".join(parts)

    @property
    def _daemons(self) -> HeadDaemons:
        return HeadDaemons(self.files, self.head, self.run)

    def _changed(self, settings: Mapping[str, str]) -> Shape:
        return replace(self.shape, settings={**self.shape.settings, **settings})

    def _others(self, shape: Shape) -> dict[str, str]:
        others = {self.network.address(0): "laptop"}
        return others | ({self.login.address: "login"} if shape.login else {})

    @property
    def _used_ids(self) -> Path:
        return self.box / "next_job_id"

    def _heal(self) -> None:
        # A controller that was killed hands ids out again, and nodes refuse a job whose namesake they have ended.
        first = self._used_ids.read_text() if self._used_ids.exists() else ""
        self.files.write_conf(self._changed({"FirstJobId": first}), self.head, self.nodes)
        for machine in [self.head, *self.nodes, *([self.login] if self.shape.login else [])]:
            machine.link(True)
            power_on(machine)
            for process in machine.processes():
                process.send(signal.SIGCONT)
        self._daemons.start(accounting=self.shape.accounting)
        self.run(["scontrol", "reconfigure"])
        self._end_jobs()
        for name in self.names:
            if not self[name].processes("slurmd"):
                start_slurmd(self[name])
        with contextlib.suppress(ClusterError):
            self._wait_idle(8)
        # A node that did not come back by itself: off and on.
        states = self._states()
        for name, state in states.items():
            if state != "idle":
                power_off(self[name])
                self.start_node(name)
                self.run(["scontrol", "update", f"NodeName={name}", "State=RESUME"], check=False)
        if states:
            self._end_jobs()
        self._wait_idle(30)
        self._tidy()
        if self.shape.login:
            if not self.login.processes("sshd"):
                power_off(self.login)
                power_on(self.login)
            wait_for_port(self.login, 22)

    def _tidy(self) -> None:
        """Ends what jobs left behind, which Slurm does not always find, and empties homes and the small disk."""
        for machine in self.nodes:
            end_strangers(machine)
        for directory in (self.small_disk, self.home(), self.home("worker")):
            call("find", directory, "-mindepth", "1", "-delete")

    def _end_jobs(self) -> None:
        ids = self.run("squeue -h -a -o %A".split()).stdout.split()
        if ids:
            self.run(["scancel", *sorted(set(ids))], check=False)

    def _wait_idle(self, seconds: float) -> None:
        def idle() -> bool:
            states = self._states()
            jobs = self.run("squeue -h -a".split(), check=False)
            return set(states) == set(self.names) and set(states.values()) == {"idle"} and jobs.stdout == ""

        try:
            wait_until("all nodes are idle", idle, seconds)
        except ClusterError as error:
            raise ClusterError(f"{error}\n{self.diagnose()}") from None

    def _states(self) -> dict[str, str]:
        """Of every node, as sinfo has it: `idle`, `down*` …"""
        done = self.run(["sinfo", "-h", "-N", "-p", "main", "-o", "%n %t"], check=False)
        return dict(line.split(maxsplit=1) for line in done.stdout.splitlines())


def claim() -> Slurm:
    """A cluster that belongs to this process. What killed owners left is removed, in whichever slot."""
    slot = Slot.claim(_KIND)
    for abandoned in Slot.abandoned(_KIND):
        with Slurm(abandoned):
            pass
    slurm = Slurm(slot)
    slurm.stop()
    return slurm


def main(words: Sequence[str]) -> int:
    absent = lacking(**PROGRAMS, **ACCOUNTING_PROGRAMS, **LOGIN_PROGRAMS)
    if absent:
        print(f"{absent[0]} is missing: {absent[1]}", file=sys.stderr)
        return 1
    slurm = Slurm(_COMMAND_SLOT)
    try:
        return _command(slurm, *words)
    except ClusterError as error:
        print(error, file=sys.stderr)
        return 1
    except (TypeError, ValueError, LookupError):
        print(__doc__, file=sys.stderr)
        return 2


def _command(slurm: Slurm, verb: str, *words: str) -> int:
    if verb == "up":
        _up(slurm, *words)
    elif verb == "status" and not words:
        for machine in [slurm.head, *slurm.nodes, *([slurm.login] if slurm.shape.login else [])]:
            print(machine.name, machine.address, "up" if machine.alive() else "down")
    elif verb == "exec" and words[1] == "--" and words[2:]:
        return subprocess.run(slurm[words[0]].argv(*words[2:])).returncode
    elif verb == "link":
        name, state = words
        slurm.link(name, {"up": True, "down": False}[state])
    elif verb in ("kill-node", "start-node", "kill-slurmd", "start-slurmd"):
        (name,) = words
        getattr(slurm, verb.replace("-", "_"))(name)
    elif verb in ("kill-controller", "start-controller", "heal") and not words:
        getattr(slurm, verb.replace("-", "_"))()
    elif verb == "diagnose" and not words:
        print(slurm.diagnose())
    elif verb == "down" and not words:
        slurm.stop()
    else:
        raise ValueError(verb)
    return 0


def _up(slurm: Slurm, *words: str) -> None:
    options = dict(word.removeprefix("--").partition("=")[::2] for word in words if word.startswith("--"))
    (count,) = [int(word) for word in words if not word.startswith("--")] or [4]
    gpus = int(options.pop("gpus", "0"))
    accounting, login, cgroups = (options.pop(name, None) == "" for name in ("accounting", "login", "cgroups"))
    if options:
        raise ValueError(options)
    if not slurm.head.alive():
        slurm.start(count, accounting=accounting, gpus=gpus, login=login, cgroups=cgroups)
    elif slurm.shape != Shape(count, accounting, gpus, login, cgroups):
        raise ClusterError("another cluster is up: end it first, with `down`")
    for key, value in slurm.env.items():
        print(f"export {key}={value}")
    if login:
        print(f"# ssh -F {slurm.ssh_config} login")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
