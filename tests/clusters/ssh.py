"""Hosts with real OpenSSH servers on this computer: own addresses, host names, host keys, homes and /dev/shm.

    python -m tests.clusters.ssh up 4            node1 … node4; those that are up already are left alone
    python -m tests.clusters.ssh config          the path of a configuration for clients: ssh -F "$(…)" node1
    python -m tests.clusters.ssh status          name, address, and whether it is on
    python -m tests.clusters.ssh exec NODE -- CMD   runs a command there, without ssh
    python -m tests.clusters.ssh link NODE up|down  plugs the cable in, or pulls it
    python -m tests.clusters.ssh delay NODE MS   every frame takes this long, each way; 0 ends that
    python -m tests.clusters.ssh kill NODE       power loss; `start NODE` turns it on again
    python -m tests.clusters.ssh down            ends everything and removes it

It needs root and the packages iproute2, openssh-server and openssh-client. The file system is this computer's, shared
as over NFS, but for the home directories and /dev/shm. Users are root and `worker`, who has no rights.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from .netns import ClusterError, Machine, Network, Slot, answers, call, hosts_file, lacking, wait_until

PROGRAMS = {"sshd": "openssh-server", "ssh": "openssh-client", "ssh-keygen": "openssh-client"}
PORTS = (22, 2222)
WORKER_UID = 4242
_COMMAND_SLOT = Slot("as", 250)
_MOST = 200

_BOOT = """\
hostname {name}
for file in hosts passwd shadow group; do mount --bind {box}/etc/$file /etc/$file; done
mount -t tmpfs tmpfs /dev/shm
cat /proc/sys/kernel/random/uuid >{own}/boot_id
mount --bind {own}/boot_id /proc/sys/kernel/random/boot_id
mount --bind {own}/home {box}/home
/usr/sbin/sshd -D -e -f {own}/sshd_config &
sleep infinity &
while :; do wait; done
"""

SSHD = """\
HostKey {own}/host_key
PidFile {own}/sshd.pid
AuthorizedKeysFile {box}/etc/authorized_keys {own}/keys/%u
StrictModes no
UsePAM no
UseDNS no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
MaxStartups 200:30:400
PrintMotd no
Subsystem sftp internal-sftp
"""

CLIENT = """\
Host *
  User root
  IdentityFile {box}/id_ed25519
  IdentitiesOnly yes
  UserKnownHostsFile {box}/known_hosts
  GlobalKnownHostsFile /dev/null
  StrictHostKeyChecking yes
  BatchMode yes
  ConnectTimeout 10
"""

# What of any job runs on a host: processes with a job's mark, supervisors, and ports of theirs that are not the SSH
# servers'. A port that no process of the host holds is served from outside (tests/clusters/tpu_server.py).
_LEFT = """
import glob, os
held = set()
for path in glob.glob("/proc/[0-9]*/fd/*"):
    try:
        held.add(os.readlink(path))
    except OSError:
        pass
for path in glob.glob("/proc/[0-9]*"):
    try:
        environ = open(path + "/environ", "rb").read()
        command = open(path + "/cmdline", "rb").read().replace(b"\\0", b" ")
    except OSError:
        continue
    if path == "/proc/%d" % os.getpid():
        continue
    if b"ACCEL_JOB_ID=" in environ or b"supervisor.pyz" in command:
        print(path, command)
for path in ("/proc/net/tcp", "/proc/net/tcp6"):
    for line in open(path).readlines()[1:]:
        fields = line.split()
        port = int(fields[1].rpartition(":")[2], 16)
        if fields[3] == "0A" and port not in (22, 2222) and "socket:[%s]" % fields[9] in held:
            print("port", port)
"""


class SshHosts:
    """N hosts in one slot. Holds no state of its own: what is up is read from the files of the slot."""

    def __init__(self, slot: Slot) -> None:
        self.box = slot.box
        self.network = Network(slot)
        self.config = self.box / "ssh_config"
        self.known_hosts = self.box / "known_hosts"
        self.identity = self.box / "id_ed25519"

    def __getitem__(self, name: str) -> Machine:
        if name not in self.names:
            raise ClusterError(f"no host {name!r}: there are {', '.join(self.names) or 'none'}")
        return Machine(self.network, int(name.removeprefix("node")), name, self._boot)

    @property
    def names(self) -> list[str]:
        with contextlib.suppress(FileNotFoundError):
            return [f"node{index + 1}" for index in range(int((self.box / "count").read_text()))]
        return []

    @property
    def machines(self) -> list[Machine]:
        return [self[name] for name in self.names]

    def home(self, name: str, user: str = "root") -> Path:
        """A user's home on that host, as it can be reached from here."""
        return self[name].own / "home" / user

    def up(self, count: int) -> None:
        """`count` hosts that answer. Raises ClusterError."""
        if not 1 <= count <= _MOST:
            raise ClusterError(f"between 1 and {_MOST} hosts, not {count}")
        count = max(count, len(self.names))
        for directory in (self.box, self.box / "etc", self.box / "home", self.box / "nodes", Path("/run/sshd")):
            directory.mkdir(exist_ok=True, mode=0o755)
        (self.box / "count").write_text(str(count))
        self._write_shared_files()
        self.network.up()
        for machine in self.machines:
            self._prepare(machine)
        self._write_client_files()
        for machine in self.machines:
            machine.start()
        self._wait()

    def down(self) -> None:
        """Ends every process of every host by its identity and removes all that there was."""
        for machine in self.machines:
            machine.end()
        self.network.down()
        shutil.rmtree(self.box, ignore_errors=True)

    def heal(self) -> None:
        """Whatever a test broke: cables, power, servers, delays, the clients' files. Homes are empty again."""
        for machine in self.machines:
            if (machine.own / "relay.pid").exists():
                machine.delay(0)
            for home in (machine.own / "home").iterdir():
                for path in home.iterdir():
                    shutil.rmtree(
                        path, ignore_errors=True
                    ) if path.is_dir() and not path.is_symlink() else path.unlink()
            machine.link(True)
            if not machine.alive():
                machine.start()  # and with it its server
            elif not answers(machine.address, PORTS[0]):  # one that a test has killed may still have its number
                self.start_sshd(machine.name)
        self._write_client_files()
        self._wait()

    def reboot(self, name: str) -> None:
        """Off and on again: its disk is as it was, its processes are gone, and it has another boot id."""
        self[name].kill()
        self[name].start()
        self._wait_for(self[name])

    def renew(self, *names: str) -> None:
        """Other hosts of these names: powered on, with empty disks and other host keys."""
        for machine in map(self.__getitem__, names):
            if (machine.own / "relay.pid").exists():
                machine.delay(0)
            machine.end()
            shutil.rmtree(machine.own, ignore_errors=True)
            self._prepare(machine)
        self._write_client_files()
        for machine in map(self.__getitem__, names):
            machine.start()
        for machine in map(self.__getitem__, names):
            self._wait_for(machine)

    def authorize(self, name: str, keys: Mapping[str, str]) -> None:
        """Lets these users in with these keys too, lines of an `authorized_keys` each, and with no other of before."""
        directory = self[name].own / "keys"
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(mode=0o755)
        for user, text in keys.items():
            (directory / user).write_text(text)

    def small_disk(self, name: str, directory: str, megabytes: float) -> None:
        """A disk of this size, empty, for a directory on that host, until it is off."""
        size = f"size={int(megabytes * 1024)}k"
        self[name].run("mkdir", "-p", directory)
        self[name].run("mount", "-t", "tmpfs", "-o", f"{size},mode=700", "tmpfs", directory)

    def end_sshd(self, name: str) -> None:
        """Kills the server that listens, and waits until it is gone; its sessions go on."""
        machine = self[name]
        machine.run("sh", "-c", f"kill -9 $(cat {machine.own}/sshd.pid)")
        wait_until(f"the server of {name} is gone", lambda: not answers(machine.address, PORTS[0]))

    def end_sessions(self, name: str) -> None:
        """Kills the servers' processes that hold sessions, as a crash of theirs would."""
        listener = f"$(cat {self[name].own}/sshd.pid)"
        script = f"for p in $(pgrep -x sshd); do [ $p = {listener} ] || kill -9 $p; done"
        self[name].run("sh", "-c", script)

    def start_sshd(self, name: str, extra: str = "") -> None:
        """Starts a server; `extra` goes before the other lines of its configuration, for this time."""
        machine = self[name]
        config = machine.own / "sshd_config"
        if extra:
            config = machine.own / "sshd_config.extra"
            config.write_text(extra + "\n" + (machine.own / "sshd_config").read_text())
        # The one that was killed may hold its port for a moment, and one that was slow to answer may do so yet.
        wait_until(
            f"{name} starts a server",
            lambda: (
                _succeeds(machine.run, "/usr/sbin/sshd", "-f", str(config))
                or (not extra and answers(machine.address, PORTS[0]))
            ),
        )
        self._wait_for(machine)

    def left(self, name: str) -> str:
        """A line for everything of any job that is on that host now."""
        return self[name].run("python3", "-I", "-S", "-c", _LEFT)

    def new_host_key(self, name: str) -> None:
        """The host comes back with another key, as after an installation."""
        key = self[name].own / "host_key"
        for file in (key, key.with_suffix(".pub")):
            file.unlink()
        call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key, "-C", name)
        self.end_sshd(name)
        self.start_sshd(name)

    def _wait(self) -> None:
        for machine in self.machines:
            self._wait_for(machine)

    def _wait_for(self, machine: Machine) -> None:
        wait_until(f"the server of {machine.name} ({machine.log})", partial(answers, machine.address, PORTS[0]))

    def _boot(self, machine: Machine) -> str:
        return _BOOT.format(name=machine.name, box=self.box, own=machine.own)

    def _prepare(self, machine: Machine) -> None:
        own = machine.own
        for user, uid in (("root", 0), ("worker", WORKER_UID)):
            home = own / "home" / user
            home.mkdir(parents=True, exist_ok=True, mode=0o755)
            os.chown(home, uid, uid)
        if not (own / "host_key").exists():
            call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", own / "host_key", "-C", machine.name)
        ports = "".join(f"Port {port}\n" for port in PORTS)
        (own / "sshd_config").write_text(ports + SSHD.format(own=own, box=self.box))

    def _write_shared_files(self) -> None:
        etc = self.box / "etc"
        if not self.identity.exists():
            call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.identity, "-C", "accel-test")
        shutil.copy(f"{self.identity}.pub", etc / "authorized_keys")
        etc.joinpath("hosts").write_text(hosts_file(self.machines, {self.network.address(0): "launcher"}))
        others = [line for line in Path("/etc/passwd").read_text().splitlines() if not line.startswith("root:")]
        root = f"root:x:0:0:root:{self.box}/home/root:/bin/bash"
        worker = f"worker:x:{WORKER_UID}:{WORKER_UID}::{self.box}/home/worker:/bin/sh"
        etc.joinpath("passwd").write_text("\n".join([root, *others, worker, ""]))
        etc.joinpath("shadow").touch(mode=0o600)
        etc.joinpath("shadow").write_text("root:*:19000:0:99999:7:::\nworker:*:19000:0:99999:7:::\n")
        etc.joinpath("group").write_text(Path("/etc/group").read_text() + f"worker:x:{WORKER_UID}:\n")

    def _write_client_files(self) -> None:
        known, config = [], []
        for machine in self.machines:
            key = " ".join((machine.own / "host_key.pub").read_text().split()[:2])
            names = [machine.name, machine.address, machine.address6]
            names += [f"[{name}]:{PORTS[1]}" for name in names]
            known.append(f"{','.join(names)} {key}\n")
            config.append(f"Host {machine.name}\n  HostName {machine.address}\n")
        self.known_hosts.write_text("".join(known))
        self.config.write_text("".join(config) + CLIENT.format(box=self.box))


def _succeeds(run: Callable[..., object], *argv: str) -> bool:
    try:
        run(*argv)
    except ClusterError:
        return False
    return True


def claim() -> SshHosts:
    """Hosts that belong to this process: in a slot of their own, with what a killed owner left there removed."""
    hosts = SshHosts(Slot.claim("as"))
    hosts.down()
    return hosts


def main(words: Sequence[str]) -> int:
    absent = lacking(**PROGRAMS)
    if absent:
        print(f"{absent[0]} is missing: {absent[1]}", file=sys.stderr)
        return 1
    hosts = SshHosts(_COMMAND_SLOT)
    try:
        return _command(hosts, *words)
    except ClusterError as error:
        print(error, file=sys.stderr)
        return 1
    except (TypeError, ValueError, LookupError):
        print(__doc__, file=sys.stderr)
        return 2


def _command(hosts: SshHosts, verb: str, *words: str) -> int:
    if verb == "up":
        hosts.up(int(*words or ("4",)))
        print(f"ssh -F {hosts.config} node1")
    elif verb == "down" and not words:
        hosts.down()
    elif verb == "status" and not words:
        for machine in hosts.machines:
            print(machine.name, machine.address, "up" if machine.alive() else "down")
    elif verb == "config" and not words:
        print(hosts.config)
    elif verb == "exec" and words[1] == "--" and words[2:]:
        return subprocess.run(hosts[words[0]].argv(*words[2:])).returncode
    elif verb == "link":
        name, state = words
        hosts[name].link({"up": True, "down": False}[state])
    elif verb == "delay":
        name, milliseconds = words
        hosts[name].delay(float(milliseconds))
    elif verb in ("kill", "start"):
        (name,) = words
        getattr(hosts[name], verb)()
    else:
        raise ValueError(verb)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
