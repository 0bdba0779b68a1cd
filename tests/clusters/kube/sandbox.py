"""Pods as processes: namespaces for each pod, and for each container a root of its own over this computer's files.

To be used in a process that has mount and PID namespaces of its own: whatever stands here ends with that.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..netns import ClusterError

TOOLS = {"setpriv": "util-linux", "mount": "mount", "chroot": "coreutils", "setsid": "util-linux"}
_ENV = {**os.environ, "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
_PAUSE = 'hostname "$0"; sleep infinity & while :; do wait; done'
# What a container has of this computer beside its file system.
_OWN_MOUNTS = ("/proc", "/sys", "/dev", "/run", "/etc")
_DEFAULT_SIGNALS = "--default-signal=HUP,INT,QUIT"  # what a program in the background ignores
_DEVICES = "null zero full random urandom tty"

_ROOT = """\
set -e
T={scratch}; R=$T/root
mount -t tmpfs tmpfs $T
mkdir $T/upper $T/work $R
mount -t overlay overlay -o lowerdir=/,upperdir=$T/upper,workdir=$T/work $R
{others}
for directory in {open_directories}; do chmod o+x $R$directory; done
mount -t proc proc $R/proc
mount -t sysfs sysfs $R/sys
mount -t tmpfs tmpfs $R/dev
for each in {devices}; do : >$R/dev/$each; mount --bind /dev/$each $R/dev/$each; done
mkdir $R/dev/shm $R/dev/pts
mount -t tmpfs -o size=64m,mode=1777 tmpfs $R/dev/shm
mount -t devpts -o newinstance,ptmxmode=0666,mode=0620 devpts $R/dev/pts
ln -s pts/ptmx $R/dev/ptmx
ln -s /proc/self/fd $R/dev/fd
for each in stdin:0 stdout:1 stderr:2; do ln -s /proc/self/fd/${{each#*:}} $R/dev/${{each%:*}}; done
: >$R/dev/termination-log; mount --bind {message} $R/dev/termination-log
mkdir -p $R/.pod; mount --bind {names} $R/.pod
for each in hosts resolv.conf; do rm -f $R/etc/$each; ln -s /.pod/$each $R/etc/$each; done
"""
_START = """\
mkdir -p $R{made}
{read_only}\
exec chroot $R {privileges} env {default_signals} -i -C {workdir} {env} "$@"
"""


@dataclass(frozen=True)
class Mount:
    source: Path
    target: str
    read_only: bool = False


@dataclass(frozen=True, kw_only=True)
class Program:
    """What a container runs. `privileges` are the words of setpriv; `shared`: in its pod's table of processes."""

    argv: Sequence[str]
    env: Mapping[str, str]
    workdir: str = "/"
    mounts: Sequence[Mount] = ()
    privileges: Sequence[str] = ()
    read_only: bool = False
    shared: bool = False


@dataclass
class Container:
    """One that was started. `process` is a stand-in that ends as the program does."""

    process: asyncio.subprocess.Process
    pid: int
    program: Program
    output: asyncio.StreamReader
    # Held open until the container has ended, so that its number means no other namespace; None: it ended at once.
    namespace: int | None

    def signal(self, signum: int) -> None:
        """The first process of the container."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signum)

    def kill(self) -> None:
        """Every process of the container; nothing once it has ended."""
        if self.namespace is None:
            return
        number = os.fstat(self.namespace).st_ino
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if os.stat(entry / "ns/mnt").st_ino == number:
                    os.kill(int(entry.name), signal.SIGKILL)

    async def wait(self) -> int:
        """The exit code as a shell says it; the whole container has ended when this returns."""
        code = await self.process.wait()
        self.kill()
        if self.namespace is not None:
            os.close(self.namespace)
            self.namespace = None
        return code if code >= 0 else 128 - code

    async def execute(
        self, argv: Sequence[str], *, tty: int | None, stdin: int, stdout: int, stderr: int
    ) -> asyncio.subprocess.Process:
        """Another program in the container; with `tty`, the descriptor of its terminal."""
        await self._has_its_root()
        inside = f"nsenter -t {self.pid} --mount --root --net --uts --ipc --pid --"
        words = [*inside.split(), *_privileges(self.program), "env", _DEFAULT_SIGNALS, "-i", "-C", self.program.workdir]
        words += [*_pairs(self.program.env), *(["TERM=xterm"] if tty is not None else []), *argv]
        if tty is not None:
            words = ["setsid", "--ctty", "--wait", *words]
        return await asyncio.create_subprocess_exec(
            *words, stdin=stdin, stdout=stdout, stderr=stderr, env=_ENV, start_new_session=tty is None
        )

    async def _has_its_root(self) -> None:
        """Its mounts are made, one after the other, before it leaves this computer's root."""
        ours = os.stat("/")
        with contextlib.suppress(OSError):  # it has ended
            while os.path.samestat(ours, os.stat(f"/proc/{self.pid}/root")):
                await asyncio.sleep(0.005)


@dataclass
class Sandbox:
    """What the containers of one pod share. `directory` is the pod's own."""

    directory: Path
    hostname: str
    cable: str  # this computer's end
    bridge: str
    address: str | None  # None: the network is the node's
    gateway: str
    _pause: asyncio.subprocess.Process | None = None
    _first: int = 0
    _tmpfs: list[Path] = field(default_factory=list)

    async def start(self) -> None:
        (self.directory / "names").mkdir(parents=True, exist_ok=True)
        # No name server: what stands in no file is not known, at once.
        (self.directory / "names/resolv.conf").write_text("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n")
        self.write_hosts("127.0.0.1 localhost\n")
        spaces = [] if self.address is None else ["--net"]
        argv = ["unshare", *spaces, *"--uts --ipc --pid --fork --kill-child sh -c".split(), _PAUSE, self.hostname]
        nothing = asyncio.subprocess.DEVNULL  # unshare complains when what it waits for is killed
        self._pause = await asyncio.create_subprocess_exec(*argv, stdin=nothing, stderr=nothing, env=_ENV)
        self._first = await _only_child(self._pause.pid)
        if self.address is not None:
            await self._wire(self.address)

    async def run(self, program: Program, message: Path, scratch: Path) -> Container:
        """Starts it. `message` is where it may leave a last word."""
        assert self._pause is not None
        scratch.mkdir(parents=True, exist_ok=True)
        script = _script(program, message, scratch, self.directory / "names")
        joined = "--net --uts --ipc" + (" --pid" if program.shared else "")
        own = "--mount" if program.shared else "--mount --pid --fork --kill-child"
        words = f"nsenter -t {self._first} {joined} -- unshare {own} --propagation private sh -c".split()
        # Not asyncio's own pipe: it takes a process for running while anybody has that open.
        output, theirs = await _pipe()
        process = await asyncio.create_subprocess_exec(
            *words, script, "sh", *program.argv, stdin=asyncio.subprocess.DEVNULL, stdout=theirs,
            stderr=asyncio.subprocess.STDOUT, env=_ENV, start_new_session=True,
        )  # fmt: skip
        os.close(theirs)
        pid = await _only_child(process.pid)
        return Container(process, pid, program, output, await _mounts_of(process, pid))

    def write_hosts(self, text: str) -> None:
        """Seen at once, and never half of it."""
        fresh = self.directory / "names/.hosts"
        fresh.write_text(text)
        fresh.replace(self.directory / "names/hosts")

    async def add_tmpfs(self, directory: Path, size: str | None) -> None:
        """Makes the directory one that is in memory."""
        os.makedirs(directory)
        options = ["-o", f"size={size},mode=1777"] if size else ["-o", "mode=1777"]
        await _call("mount", "-t", "tmpfs", *options, "tmpfs", str(directory))
        self._tmpfs.append(directory)

    async def end(self) -> None:
        """All processes of the pod, and what is mounted for it. May be called twice."""
        if self._pause is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._first, signal.SIGKILL)
            await self._pause.wait()
            self._pause = None
        while self._tmpfs:
            await _call("umount", "--lazy", str(self._tmpfs.pop()))

    async def _wire(self, address: str) -> None:
        add = f"link add {self.cable} type veth peer name eth0 netns {self._first}"
        await _call("ip", "-batch", "-", text=f"{add}\nlink set {self.cable} master {self.bridge} up\n")
        inside = [f"addr add {address}/24 dev eth0", "link set eth0 up", "link set lo up"]
        inside.append(f"route add default via {self.gateway}")
        await _call("nsenter", "-t", str(self._first), "--net", "ip", "-batch", "-", text="\n".join(inside))


async def _pipe() -> tuple[asyncio.StreamReader, int]:
    """An end to read from, and one to give to a process."""
    ours, theirs = os.pipe()
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, os.fdopen(ours, "rb", buffering=0))
    return reader, theirs


async def _mounts_of(process: asyncio.subprocess.Process, pid: int) -> int | None:
    """The mount namespace of the container; until it has made one, it has this process' own."""
    ours = os.stat("/proc/self/ns/mnt").st_ino
    while process.returncode is None:
        with contextlib.suppress(OSError):
            found = os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
            if os.fstat(found).st_ino != ours:
                return found
            os.close(found)
        await asyncio.sleep(0.005)
    return None


def _script(program: Program, message: Path, scratch: Path, names: Path) -> str:
    workdir = shlex.quote(program.workdir)
    lines = _ROOT.format(
        scratch=shlex.quote(str(scratch)),
        others="\n".join(f"mount --rbind {shlex.quote(each)} $R{shlex.quote(each)}" for each in _other_mounts()),
        open_directories=" ".join(shlex.quote(each) for each in _closed_directories()),
        devices=_DEVICES,
        message=shlex.quote(str(message)),
        names=shlex.quote(str(names)),
    )
    mounts = [*program.mounts]
    for mount in sorted(mounts, key=lambda each: each.target):
        # Symbolic links, as /var/run is one, are the same in there; followed from here they would lead out.
        source, target = shlex.quote(str(mount.source)), f"$R{shlex.quote(os.path.realpath(mount.target))}"
        made = f"mkdir -p {target}" if mount.source.is_dir() else f'mkdir -p "$(dirname {target})"; : >>{target}'
        lines += f"{made}; mount --bind {source} {target}\n"
        if mount.read_only:
            lines += f"mount -o remount,bind,ro {target}\n"
    return lines + _START.format(
        read_only="mount -o remount,ro $R\n" if program.read_only else "",
        made=shlex.quote(os.path.realpath(program.workdir)),
        workdir=workdir,
        default_signals=_DEFAULT_SIGNALS,
        privileges=shlex.join(_privileges(program)),
        env=shlex.join(_pairs(program.env)),
    )


def _privileges(program: Program) -> list[str]:
    return ["setpriv", *program.privileges] if program.privileges else []


def _pairs(env: Mapping[str, str]) -> list[str]:
    return [f"{key}={value}" for key, value in env.items()]


def _other_mounts() -> Iterator[str]:
    """File systems of this computer beside the root's, as those of a checkout or a home may be."""
    found: list[str] = []
    for line in Path("/proc/self/mounts").read_text().splitlines():
        point = line.split()[1].replace("\\040", " ")
        if point == "/" or not os.path.isdir(point) or point.startswith((*_OWN_MOUNTS, "/tmp/accel-")):
            continue
        if not any(point.startswith(f"{known}/") for known in found):
            found.append(point)
    yield from dict.fromkeys(found)


def _closed_directories() -> list[str]:
    """On the way to Python and to this project, closed to all but their owner: a pod's user is another."""
    found = set()
    for start in (sys.prefix, sys.base_prefix, Path(__file__).parents[3]):
        for directory in (Path(start).resolve(), *Path(start).resolve().parents):
            if not directory.stat().st_mode & 0o001:
                found.add(str(directory))
    return sorted(found)


async def _only_child(pid: int) -> int:
    """The number of the process that it starts."""
    children = Path(f"/proc/{pid}/task/{pid}/children")
    while True:
        try:
            told = children.read_text().split()
        except OSError:
            return pid  # it has ended
        if told:
            return int(told[0])
        await asyncio.sleep(0.005)


async def _call(*argv: str, text: str = "") -> None:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *argv, stdin=pipe, stdout=pipe, stderr=asyncio.subprocess.STDOUT, env=_ENV
    )
    said, _ = await process.communicate(text.encode())
    if process.returncode != 0:
        raise ClusterError(f"{' '.join(argv)}: {said.decode(errors='replace').strip()}")
