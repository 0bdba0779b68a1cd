"""What a Slurm cluster of the tests reads: its configuration, its users, the scripts that its machines boot with."""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

from . import ssh
from .netns import Machine, call, hosts_file, wait_until

CONTROLLER_PORT = 6817
NODE_PORT = 6818
ACCOUNTING_PORT = 6819
WORKER_UID = 4242

# The directory of the configuration is where Slurm looks for it, so that nobody on these machines needs SLURM_CONF.
_BOOT = """\
unset SLURM_CONF
hostname {name}
for file in hosts passwd shadow group; do mount --bind {box}/etc/$file /etc/$file; done
mkdir -p /etc/slurm && mount --bind {box}/slurm /etc/slurm
mount -t tmpfs tmpfs /dev/shm
{more}
: > {own}/ready
{server}
sleep infinity &
while :; do wait; done
"""

# The machine sees a directory of its own as each hierarchy's root: nodes of two clusters have the same names.
_CGROUPS = """\
for c in {names}; do
    mkdir -p /sys/fs/cgroup/$c/{own} && mount --bind /sys/fs/cgroup/$c/{own} /sys/fs/cgroup/$c
done
"""
CGROUPS = ("freezer", "memory", "cpuset", "devices", "cpuacct")

# Not as by default, so that what takes minutes there takes seconds here; the default of some stands beside.
_SLURM = {
    "ClusterName": "accel",
    "SlurmUser": "root",
    "AuthType": "auth/munge",
    "CredType": "cred/munge",
    "SlurmctldDebug": "info",
    "SlurmdDebug": "info",
    "ProctrackType": "proctrack/linuxproc",
    "TaskPlugin": "task/none",
    "SelectType": "select/cons_tres",
    "SelectTypeParameters": "CR_Core_Memory",
    "DefMemPerCPU": "256",
    "SlurmdParameters": "config_overrides",  # a node may offer more than this computer has
    "MpiDefault": "none",
    "ReturnToService": "2",  # a node that comes back is of use at once
    "SlurmdTimeout": "10",  # 300: NODE_FAIL
    "SlurmctldTimeout": "10",
    "MessageTimeout": "5",
    "TCPTimeout": "2",
    "KillWait": "3",  # 30: between SIGTERM and SIGKILL
    "InactiveLimit": "0",
    "BatchStartTimeout": "10",
    "MinJobAge": "600",  # how long `scontrol show job` knows a job that has ended
    "JobRequeue": "1",
    "SchedulerType": "sched/backfill",
    "SchedulerParameters": "batch_sched_delay=0,sched_interval=2,bf_interval=1,sched_min_interval=0",
    "PreemptType": "preempt/partition_prio",
    "PreemptMode": "REQUEUE",
    "SlurmctldParameters": "preempt_send_user_signal",  # tasks get their --signal before SIGTERM
    "GresTypes": "gpu",
    "JobAcctGatherType": "jobacct_gather/linux",
    "JobAcctGatherFrequency": "5",
}

_PARTITIONS = """\
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE DefaultTime=60 PriorityTier=1 GraceTime=5 State=UP
PartitionName=high Nodes=ALL MaxTime=INFINITE DefaultTime=60 PriorityTier=10 PreemptMode=OFF State=UP
PartitionName=small Nodes=n1 MaxTime=5 DefaultTime=1 PriorityTier=1 State=UP
"""

_LOGIN = "Host login\n  HostName {address}\n"


@dataclass(frozen=True)
class Shape:
    """What was asked for. Kept in the cluster's directory, so that another process finds it."""

    nodes: int
    accounting: bool = False
    gpus: int = 0
    login: bool = False
    cgroups: bool = False
    settings: Mapping[str, str] = field(default_factory=dict)

    def save(self, file: Path) -> None:
        file.write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, file: Path) -> Shape | None:
        return cls(**json.loads(file.read_text())) if file.exists() else None


@dataclass(frozen=True)
class Files:
    """The paths of a cluster, all of them below `box`."""

    box: Path

    @property
    def conf(self) -> Path:
        return self.box / "slurm/slurm.conf"

    @property
    def munge_socket(self) -> Path:
        return self.box / "munge/socket"

    @property
    def sql(self) -> Path:
        return self.box / "sql"

    def make_directories(self) -> None:
        for name in ("", "etc", "home", "log", "munge", "nodes", "slurm", "small", "sql", "state"):
            (self.box / name).mkdir(exist_ok=True, mode=0o755)
        for user, uid in (("root", 0), ("worker", WORKER_UID)):
            home = self.box / "home" / user
            home.mkdir(exist_ok=True, mode=0o755)
            os.chown(home, uid, uid)

    def write(self, shape: Shape, head: Machine, nodes: list[Machine], others: Mapping[str, str]) -> None:
        """All but the keys and what belongs to the login machine."""
        key = self.box / "munge/key"
        if not key.exists():
            key.touch(mode=0o600)
            key.write_bytes(os.urandom(128))
        self.write_conf(shape, head, nodes)
        self._write_accounting(head)
        etc = self.box / "etc"
        etc.joinpath("hosts").write_text(hosts_file([head, *nodes], others))
        strangers = [line for line in Path("/etc/passwd").read_text().splitlines() if not line.startswith("root:")]
        root = f"root:x:0:0:root:{self.box}/home/root:/bin/bash"
        worker = f"worker:x:{WORKER_UID}:{WORKER_UID}::{self.box}/home/worker:/bin/sh"
        etc.joinpath("passwd").write_text("\n".join([root, *strangers, worker, ""]))
        etc.joinpath("shadow").touch(mode=0o600)
        etc.joinpath("shadow").write_text("root:*:19000:0:99999:7:::\nworker:*:19000:0:99999:7:::\n")
        etc.joinpath("group").write_text(Path("/etc/group").read_text() + f"worker:x:{WORKER_UID}:\n")

    def write_conf(self, shape: Shape, head: Machine, nodes: list[Machine]) -> None:
        """slurm.conf and what belongs to it. An empty setting takes a line away: Slurm refuses an empty value."""
        settings = {
            **_SLURM,
            # A requeued job waits until the credential of its last run has ended, and a second: 120 s by default.
            "AuthInfo": f"socket={self.munge_socket},cred_expire=5",
            "SlurmctldHost": f"{head.name}({head.address})",
            "SlurmctldPort": str(CONTROLLER_PORT),
            "SlurmdPort": str(NODE_PORT),
            "StateSaveLocation": f"{self.box}/state",
            "SlurmdSpoolDir": f"{self.box}/nodes/%n/spool",
            "SlurmctldPidFile": f"{self.box}/nodes/{head.name}/slurmctld.pid",
            "SlurmdPidFile": f"{self.box}/nodes/%n/slurmd.pid",
            "SlurmctldLogFile": f"{self.box}/log/slurmctld.txt",
            "SlurmdLogFile": f"{self.box}/log/slurmd-%n.txt",
            "AccountingStorageType": "accounting_storage/none",
        }
        if shape.accounting:
            settings |= {
                "AccountingStorageType": "accounting_storage/slurmdbd",
                "AccountingStorageHost": head.address,
                "AccountingStoragePort": str(ACCOUNTING_PORT),
                "AccountingStoragePass": str(self.munge_socket),  # sacct and sacctmgr do not read AuthInfo
                "AccountingStoreFlags": "job_comment",
            }
        if shape.cgroups:
            settings |= {"ProctrackType": "proctrack/cgroup", "TaskPlugin": "task/cgroup"}
        settings |= shape.settings
        gres = f"Gres=gpu:a100:{shape.gpus}" if shape.gpus else ""
        lines = [f"{key}={value}" for key, value in settings.items() if value]
        lines += [
            f"NodeName={node.name} NodeAddr={node.address} CPUs=4 RealMemory=4000 {gres} State=UNKNOWN"
            for node in nodes
        ]
        conf = "\n".join(lines) + "\n" + _PARTITIONS
        _replace(self.conf, conf)
        _replace(self.conf.with_name("gres.conf"), self._gres(shape, nodes))
        limits = "ConstrainRAMSpace=yes\n" if shape.cgroups else ""
        _replace(self.conf.with_name("cgroup.conf"), f"CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n{limits}")

    def _gres(self, shape: Shape, nodes: list[Machine]) -> str:
        lines = ["AutoDetect=off"]
        for index in range(shape.gpus):
            device = self.box / f"nodes/gpu{index}"
            if not device.exists():  # Slurm wants a device and never opens it
                os.mknod(device, stat.S_IFCHR | 0o666, os.makedev(4, 40 + index))
            lines += [f"NodeName={node.name} Name=gpu Type=a100 File={device}" for node in nodes]
        return "\n".join(lines) + "\n"

    def _write_accounting(self, head: Machine) -> None:
        lines = [
            "AuthType=auth/munge",
            f"AuthInfo=socket={self.munge_socket}",
            f"DbdHost={head.name}",
            f"DbdAddr={head.address}",
            f"DbdPort={ACCOUNTING_PORT}",
            "SlurmUser=root",
            "DebugLevel=info",
            f"LogFile={self.box}/log/slurmdbd.txt",
            f"PidFile={self.box}/nodes/{head.name}/slurmdbd.pid",
            "StorageType=accounting_storage/mysql",
            "StorageHost=127.0.0.1",
            "StoragePort=3306",
            "StorageUser=slurm",
            "StoragePass=slurm",
            "StorageLoc=slurm",
        ]
        file = self.conf.with_name("slurmdbd.conf")
        file.touch(mode=0o600)
        file.write_text("\n".join(lines) + "\n")

    def write_login(self, login: Machine) -> None:
        """The keys and the configurations of the login machine's server and of its clients."""
        for directory in (login.own, Path("/run/sshd")):  # sshd does not start without the second
            directory.mkdir(exist_ok=True, mode=0o755)
        for key, owner in ((self.box / "id_ed25519", "accel-test"), (login.own / "host_key", login.name)):
            if not key.exists():
                call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key, "-C", owner)
        shutil.copy(self.box / "id_ed25519.pub", self.box / "etc/authorized_keys")
        (login.own / "sshd_config").write_text(ssh.SSHD.format(own=login.own, box=self.box))
        public = " ".join((login.own / "host_key.pub").read_text().split()[:2])
        (self.box / "known_hosts").write_text(f"{login.name},{login.address} {public}\n")
        (self.box / "ssh_config").write_text((_LOGIN + ssh.CLIENT).format(address=login.address, box=self.box))

    def boot(self, machine: Machine, server: str, *, cgroups: bool = False) -> str:
        """The script that `machine` boots with, up to the start of its `server`."""
        more = _CGROUPS.format(names=" ".join(CGROUPS), own=_cgroup(machine)) if cgroups else ""
        return _BOOT.format(name=machine.name, box=self.box, own=machine.own, server=server, more=more)

    @staticmethod
    def remove_cgroups(machine: Machine) -> None:
        """Those of a machine that is off."""
        for name in CGROUPS:
            top = Path("/sys/fs/cgroup", name, _cgroup(machine))
            for directory, _, _ in os.walk(top, topdown=False):
                wait_until(f"{directory} is empty", partial(_removed, directory))


def lacks_cgroups() -> str | None:
    """Why a cluster with `cgroups` cannot be made on this computer; None when it can."""
    absent = [name for name in CGROUPS if not Path("/sys/fs/cgroup", name, "tasks").exists()]
    if not absent:
        return None
    return (
        f"no cgroup version 1 hierarchy for {', '.join(absent)}, which no package brings: boot Linux with "
        "systemd.unified_cgroup_hierarchy=0, or mount them"
    )


def _removed(directory: str) -> bool:
    try:
        os.rmdir(directory)
    except OSError:  # what was killed in it has not left it yet
        return False
    return True


def _cgroup(machine: Machine) -> str:
    return f"accel-{machine.network.slot.tag}-{machine.name}"


def _replace(file: Path, text: str) -> None:
    """At once: a daemon may be reading it."""
    fresh = file.with_name(f".{file.name}")
    fresh.write_text(text)
    fresh.replace(file)
