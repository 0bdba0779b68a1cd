"""`accel submit --target ssh` beside torchrun, OpenSSH and pdsh, on hosts with real OpenSSH servers in network
namespaces of this computer (`tests/clusters/ssh.py`): they share its processors, and their network has no latency.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from .measure import WAIT_S, Bar, interleaved, report, until, wall

if TYPE_CHECKING:
    from tests.clusters.ssh import SshHosts

BIN = Path(sys.executable).parent
ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "benchmarks/scripts"
NODES = 4
MANY = 64
HEARTBEAT_S = 5
LIMIT_S = HEARTBEAT_S + 2
ORPHANS_S = 10.0  # what of a job is still there then was left behind

# OpenSSH's default exchange of keys is safe from quantum computers and takes 60 ms of a processor for each connection;
# paramiko has none that is. Both programs are therefore measured with this one, too, which paramiko takes.
CURVE = "KexAlgorithms curve25519-sha256"

TARGETS = """\
targets:
  lab: &lab
    kind: ssh
    hosts: node[1-4]
    ssh_config: {config}
    python: {python}
    cpu: true
    heartbeat_s: {heartbeat}
    disk_gb: 0.001
  lab16: {{<<: *lab, hosts: "node[1-16]"}}
  lab64: {{<<: *lab, hosts: "node[1-64]"}}
"""


class _Lab:
    """Hosts, and a project with a target `lab` of the first four of them."""

    def __init__(self, hosts: SshHosts, folder: Path) -> None:
        self.hosts = hosts
        self.config = str(hosts.config)
        self.project = folder / "project"
        self.project.mkdir()
        self.env = {**os.environ, "ACCEL_HOME": str(folder / "home"), "OMP_NUM_THREADS": "1"}
        text = TARGETS.format(config=self.config, python=sys.executable, heartbeat=HEARTBEAT_S)
        (self.project / "accel.yaml").write_text(text)
        for name, line in {"nothing.sh": "true", "hold.sh": "echo here; sleep 600"}.items():
            (self.project / name).write_text(f"#!/bin/sh\n{line}\n")
            (self.project / name).chmod(0o755)
        shutil.copy(SCRIPTS / "all_reduce.py", self.project)
        self.stamps = folder / "stamps"
        self.orphans: list[float] = []  # after each job
        self._roots = itertools.count()

    def accel(self, *words: str) -> str:
        """What `accel` prints. Ends the program when it fails."""
        done = subprocess.run([BIN / "accel", *words], env=self.env, cwd=self.project, capture_output=True, text=True)
        if done.returncode != 0:
            raise SystemExit(f"accel {' '.join(words)} failed:\n{done.stderr[-2000:]}")
        return done.stdout.strip()

    def submit(self, *words: str) -> str:
        """A job on the first four hosts, with the accel of this checkout. Returns its id."""
        return self.accel("submit", "--target", "lab", "--nodes", str(NODES), "--env", f"PYTHONPATH={ROOT}", *words)

    def new_root(self) -> str:
        """A directory for accel on the hosts that none of them has: nothing was sent there yet."""
        return f"root=~/.accel-{next(self._roots)}"

    def count_orphans(self) -> None:
        """Of a job that is over: what of it is on the hosts, and is not going."""
        deadline = time.monotonic() + ORPHANS_S
        while left := [f"{name}: {line}" for name in self.hosts.names for line in self.hosts.left(name).splitlines()]:
            if time.monotonic() > deadline:
                print("\n".join(left), file=sys.stderr)
                break
            time.sleep(0.1)
        self.orphans.append(float(len(left)))

    def report(self, name: str, seconds: dict[str, list[float]], bars: list[Bar]) -> bool:
        """The figures, and the orphans, of which there may be none."""
        met = report(name, {**seconds, "orphans": self.orphans}, bars)
        print(f"  orphans, of {len(self.orphans)} jobs = {sum(self.orphans):g} (at most 0)")
        return met and not any(self.orphans)

    def fresh_stamps(self) -> None:
        shutil.rmtree(self.stamps, ignore_errors=True)
        self.stamps.mkdir()

    def last_stamp(self) -> float:
        """When the last rank was done with its all-reduce."""
        times: list[float] = []

        def all_there() -> bool:
            texts = [path.read_text() for path in self.stamps.iterdir()]
            times[:] = map(float, filter(None, texts))
            return len(times) == NODES

        until(all_there, f"the first all-reduce of {NODES} ranks")
        return max(times)


def ssh_launch(rounds: int) -> bool:
    """From the command to the first all-reduce of four hosts: `accel submit` to hosts that have nothing of the job,
    and torchrun started by hand, in four sessions at once, on a script that is there."""
    with _lab(NODES) as lab:
        if lab is None:
            return False
        ours, base = "accel submit", "torchrun in 4 ssh sessions"
        measures = {
            ours: _submitted(lab),
            f"{ours}, code there": _submitted(lab, "root=~/.accel"),
            base: _by_hand(lab),
        }
        return lab.report("ssh_launch", interleaved(measures, rounds), [Bar(ours=ours, base=base, limit=2.5)])


def ssh_fan_out(rounds: int) -> bool:
    """A program that does nothing, on all hosts at once: the whole of a command, from its start to its end."""
    with _lab(MANY) as lab:
        if lab is None:
            return False
        measures = {f"accel, {count} hosts": wall(_fan_out(lab, count), lab.env) for count in (4, 16, MANY)}
        ours, few = f"accel, {MANY} hosts", "accel, 4 hosts"
        measures[f"{ours}, connections kept"] = _again(lab)
        peers = _peers(lab)
        bars = [Bar(ours=ours, base=name, limit=1.5) for name in peers]
        bars.append(Bar(ours=ours, base=few, limit=MANY / 4))
        return report("ssh_fan_out", interleaved({**measures, **peers}, rounds), bars)


def ssh_cut(rounds: int) -> bool:
    """From the pulled cable of one host to the result of the job on all others, and to the end of `job.wait()` here."""
    with _lab(NODES) as lab:
        if lab is None:
            return False
        waited: dict[str, list[float]] = {}
        cuts = {f"{name} cut": _cut(lab, node, waited) for name, node in (("a host", 2), ("the first host", 0))}
        limit = f"heartbeat of {HEARTBEAT_S} s + 2 s"
        seconds = interleaved({limit: lambda: float(LIMIT_S), **cuts}, rounds, warm_up=0)
        bars = [Bar(ours=name, base=limit, limit=1) for name in cuts]
        return lab.report("ssh_cut", {**seconds, **waited}, bars)


def ssh_client(rounds: int) -> bool:
    """What a person waits for: submitting, asking for a job, and examining hosts. No bars."""
    with _lab(MANY) as lab:
        if lab is None:
            return False
        import schedulers

        os.environ["ACCEL_HOME"] = lab.env["ACCEL_HOME"]
        job = schedulers.find(lab.submit("--no-python", "./hold.sh"))
        measures = {
            "accel submit, first time": _whole_submit(lab, first=True),
            "accel submit, again": _whole_submit(lab, first=False),
            "accel status": wall([str(BIN / "accel"), "status", job.id], lab.env),
            "job.status(), connection kept": _timed(job.status),
        }
        for target, count in (("lab", 4), ("lab16", 16), ("lab64", MANY)):
            command = [str(BIN / "accel"), "targets", "check", target]
            measures[f"accel targets check, {count} hosts"] = wall(command, lab.env, str(lab.project))
        met = report("ssh_client", interleaved(measures, rounds), [])
        job.cancel()
        return met


def ssh_fabric(rounds: int) -> bool:
    """What is not done through Fabric's `run` and `gateway`, beside these; the connection is Fabric's for both."""
    with _lab(1) as lab:
        if lab is None:
            return False
        import fabric
        import paramiko

        from schedulers.errors import SchedulerError
        from schedulers.hosts.transport import Pool

        config = lab.project.parent / "config"
        config.write_text(f"Host nowhere\n ProxyCommand sleep 0.2; exit 1\n{Path(lab.config).read_text()}")
        with Pool(config=str(config)) as pool:
            remote = pool.remote("node1")
            ssh = remote.connection().ssh
            sent, printed = "x" * 100, ["head", "-c", "5000000", "/dev/zero"]

            def through_fabric() -> None:
                settings = fabric.Config(lazy=True, ssh_config=paramiko.SSHConfig())
                made = fabric.Connection("nowhere", config=settings, gateway="sh -c 'sleep 0.2; exit 1'")
                with contextlib.suppress(paramiko.SSHException):
                    made.open()
                made.client.close()  # else a thread of it reads the end of the program again and again

            def through_accel() -> None:
                with contextlib.suppress(SchedulerError):
                    pool.remote("nowhere").run(["true"])

            measures = {
                "accel, 100 bytes sent": lambda: remote.run(["cat"], stdin=sent.encode()),
                "Fabric, 100 bytes sent": lambda: ssh.run("cat", hide=True, in_stream=io.StringIO(sent)),
                "accel, 5 MB printed": lambda: remote.run(printed),
                "Fabric, 5 MB printed": lambda: ssh.run(shlex.join(printed), hide=True, in_stream=False),
                "accel, a ProxyCommand that ends": through_accel,
                "Fabric, a ProxyCommand that ends": through_fabric,
            }
            names = list(measures)
            bars = [Bar(ours=ours, base=base, limit=1) for ours, base in zip(names[::2], names[1::2], strict=True)]
            timed = {name: _timed(measure) for name, measure in measures.items()}
            # Apart: what is measured after Fabric's 15 s of waiting finds a machine that has gone to sleep.
            proxies = {name: timed.pop(name) for name in names[-2:]}
            return report("ssh_fabric", interleaved(timed, rounds) | interleaved(proxies, rounds), bars)


@contextlib.contextmanager
def _lab(count: int) -> Iterator[_Lab | None]:
    """So many hosts, for as long as this lasts; None, and a line that says why, where there can be none."""
    from tests.clusters.netns import lacking
    from tests.clusters.ssh import PROGRAMS, claim

    absent = lacking(**PROGRAMS)
    if absent is not None:
        print(f"ssh: not measured, for {absent[0]} is missing: {absent[1]}", file=sys.stderr)
        yield None
        return
    # A benchmark that is told to end takes its hosts with it.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    hosts = claim()
    try:
        hosts.up(count)
        with tempfile.TemporaryDirectory() as folder:
            yield _Lab(hosts, Path(folder))
    finally:
        hosts.down()
        signal.signal(signal.SIGTERM, before)


def _submitted(lab: _Lab, root: str | None = None) -> Callable[[], float]:
    def measure() -> float:
        lab.fresh_stamps()
        started = time.time()
        job = lab.submit("--option", root or lab.new_root(), "all_reduce.py", str(lab.stamps))
        done = lab.last_stamp()
        lab.accel("wait", job)
        lab.count_orphans()
        return done - started

    return measure


def _by_hand(lab: _Lab) -> Callable[[], float]:
    def measure() -> float:
        lab.fresh_stamps()
        port = str(random.randrange(20000, 32768))
        started = time.time()
        sessions = [_session(lab, node, port) for node in range(NODES)]
        said = [session.communicate(timeout=WAIT_S)[1] for session in sessions]
        if any(session.returncode for session in sessions):
            raise SystemExit(f"torchrun failed:\n{''.join(said)[-2000:]}")
        return lab.last_stamp() - started

    return measure


def _session(lab: _Lab, node: int, port: str) -> subprocess.Popen[str]:
    torchrun = ["env", "OMP_NUM_THREADS=1", str(BIN / "torchrun"), "--nnodes", str(NODES), "--node_rank", str(node)]
    torchrun += ["--nproc_per_node", "1", "--master_addr", lab.hosts["node1"].address, "--master_port", port]
    command = shlex.join([*torchrun, str(lab.project / "all_reduce.py"), str(lab.stamps)])
    return subprocess.Popen(
        ["ssh", "-n", "-F", lab.config, f"node{node + 1}", command],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def _fan_out(lab: _Lab, count: int) -> list[str]:
    return [sys.executable, str(SCRIPTS / "fan_out.py"), lab.config, f"node[1-{count}]"]


def _again(lab: _Lab) -> Callable[[], float]:
    return lambda: float(subprocess.check_output([*_fan_out(lab, MANY), "again"], env=lab.env))


def _peers(lab: _Lab) -> dict[str, Callable[[], float]]:
    """pdsh, where there is one, and OpenSSH in parallel: with the configuration as it is, and with a quick exchange."""
    quick = lab.project.parent / "quick_config"
    quick.write_text(f"{CURVE}\n{Path(lab.config).read_text()}")
    names = lab.project.parent / "names"
    names.write_text("".join(f"{name}\n" for name in lab.hosts.names))
    pdsh = shutil.which("pdsh")
    if pdsh is None:
        print("ssh: not measured, for pdsh is missing: apt-get install --no-install-recommends pdsh", file=sys.stderr)
    peers = {}
    for config, note in ((lab.config, ""), (str(quick), ", curve25519")):
        each = ["ssh", "-n", "-F", config, "{}", "true"]
        peers[f"OpenSSH, {MANY} hosts{note}"] = wall(
            ["xargs", "-a", str(names), "-P", str(MANY), "-I{}", *each], lab.env
        )
        if pdsh is not None:
            command = [pdsh, "-S", "-R", "ssh", "-f", str(MANY), "-w", f"node[1-{MANY}]", "true"]
            env = {**lab.env, "PDSH_SSH_ARGS_APPEND": f"-F {config}"}
            peers[f"pdsh, {MANY} hosts{note}"] = wall(command, env)
    return peers


def _cut(lab: _Lab, node: int, waited: dict[str, list[float]]) -> Callable[[], float]:
    import schedulers

    machine = lab.hosts[f"node{node + 1}"]
    row = f"job.wait(), node{node + 1} cut"

    def measure() -> float:
        os.environ["ACCEL_HOME"] = lab.env["ACCEL_HOME"]
        job = schedulers.find(lab.submit("--no-python", "./hold.sh"))
        until(lambda: sum(line.text == "here\n" for line in job.logs()) == NODES, "all ranks run")
        started = time.time()
        machine.link(False)
        try:
            job.wait(WAIT_S)
            waited.setdefault(row, []).append(time.time() - started)
            results = [lab.hosts.home(other.name) / ".accel/jobs" / job.id / "exit.json"
                       for other in lab.hosts.machines if other.name != machine.name]  # fmt: skip
            until(lambda: all(path.exists() for path in results), "the result is on all other hosts")
            taken = max(path.stat().st_mtime for path in results) - started
        finally:
            machine.link(True)
        lab.count_orphans()
        return taken

    return measure


def _whole_submit(lab: _Lab, *, first: bool) -> Callable[[], float]:
    def measure() -> float:
        root = "root=~/.accel"
        if first:
            root = lab.new_root()
            (lab.project / "changed").write_text(repr(time.time()))
        started = time.perf_counter()
        job = lab.submit("--option", root, "--no-python", "./nothing.sh")
        taken = time.perf_counter() - started
        lab.accel("wait", job)
        return taken

    return measure


def _timed(function: Callable[[], object]) -> Callable[[], float]:
    def measure() -> float:
        started = time.perf_counter()
        function()
        return time.perf_counter() - started

    return measure
