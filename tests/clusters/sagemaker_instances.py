"""Instances of a SageMaker training job: machines of namespaces, each with one container and its own /opt/ml.

A container is a process in a PID and mount namespace of its own on its machine. It sees this computer's programs and
this virtual environment, but not its /tmp, /root, /opt and /dev/shm, and not the checkout: that directory is covered,
and only the virtual environment in it is bound back. So `accel` and `schedulers` are listed there as a package, and
cannot be imported.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from .netns import Machine, Network, wait_until

ROOT = Path(__file__).parents[2]
LOG_GROUP = "/aws/sagemaker/TrainingJobs"
_PRIVATE = (ROOT, Path("/root"), Path("/opt"), Path("/tmp"))  # /tmp last: the disks are in it
_DIRECTORIES = ("input/config", "input/data", "model", "output/data", "code", "checkpoints")
_LONGEST_EVENT = 200_000  # CloudWatch's limit is 256 KB; the log driver splits what is longer
_FLUSH_S = 0.2

_BOOT = """\
set -e
exec 3>{own}/booted
hostname {hostname}
mount --bind {own}/hosts /etc/hosts
mount -t tmpfs tmpfs /dev/shm
{mounts}
echo booted >&3
exec sleep infinity
"""

# The first child of who called unshare is process 1; a shell that waits for it gives its exit code as Docker does.
_WAIT = 'sh -c "$0" sh "$@"; exit $?'
_EXEC = 'exec 2>&1; mount -t proc proc /proc; unset PWD; exec "$@"'


class DataError(Exception):
    """Data could not be copied from or to S3; the text is of the job's failure reason."""


class Instance:
    """One instance of a job. `number` is that of its host name, from 1."""

    def __init__(self, network: Network, index: int, number: int, group: str, instance_type: str) -> None:
        self.machine = Machine(network, index, f"i{index}", self._boot)
        self.host, self.group, self.instance_type = f"algo-{number}", group, instance_type
        self.ml = self.machine.own / "ml"
        self._process: subprocess.Popen[bytes] | None = None
        self._filesystems: dict[str, Path] = {}  # a channel -> a directory that all instances mount

    def prepare(self, hosts: Iterable[Instance], filesystems: Mapping[str, Path]) -> None:
        """Turn the machine on, with an empty disk."""
        shutil.rmtree(self.machine.own, ignore_errors=True)
        for directory in _DIRECTORIES:
            (self.ml / directory).mkdir(parents=True)
        lines = ["127.0.0.1 localhost", f"{self.machine.address} {self._hostname}"]
        lines += [f"{instance.machine.address} {instance.host}" for instance in hosts]
        (self.machine.own / "hosts").write_text("\n".join([*lines, ""]))
        self._filesystems = dict(filesystems)
        self.machine.start()
        booted = self.machine.own / "booted"
        wait_until(f"{self.host} boots ({self.machine.log})", lambda: booted.exists() and booted.read_text() != "")

    def configure(self, instances: Sequence[Instance], request: Mapping[str, Any]) -> None:
        """Write /opt/ml/input/config. The hosts stand there in no order."""
        groups: dict[str, dict[str, Any]] = {}
        for each in reversed(instances):
            group = {"instance_group_name": each.group, "instance_type": each.instance_type, "hosts": []}
            groups.setdefault(each.group, group)["hosts"].append(each.host)
        mode = request["AlgorithmSpecification"]["TrainingInputMode"]
        files: dict[str, Any] = {
            "resourceconfig": {
                "current_host": self.host,
                "current_instance_type": self.instance_type,
                "current_group_name": self.group,
                "hosts": [each.host for each in reversed(instances)],
                "instance_groups": list(groups.values()),
                "network_interface_name": "eth0",
            },
            "hyperparameters": request.get("HyperParameters", {}),
            "inputdataconfig": {
                channel["ChannelName"]: {
                    "TrainingInputMode": channel.get("InputMode", mode),
                    "S3DistributionType": channel["DataSource"]
                    .get("S3DataSource", {})
                    .get("S3DataDistributionType", "FullyReplicated"),
                    "RecordWrapperType": channel.get("RecordWrapperType", "None"),
                }
                for channel in request.get("InputDataConfig", [])
            },
        }
        for name, content in files.items():
            (self.ml / "input/config" / f"{name}.json").write_text(json.dumps(content))

    def run(self, command: Sequence[str], env: Mapping[str, str], events: Callable[[list[bytes]], None]) -> None:
        """Start the container. Its environment is `env` and PATH: nothing of this process's."""
        path = f"{sys.prefix}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        namespaces = ["unshare", "--pid", "--mount", "--wd", "/", "--", "sh", "-c", _WAIT, _EXEC]
        self._process = subprocess.Popen(
            self.machine.argv(*namespaces, *command),
            env={"PATH": path, "HOME": "/root", "HOSTNAME": self._hostname, **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # of the shell that waits
        )
        self._log = LogPump(self._process, events)

    def exit_code(self) -> int | None:
        """As Docker gives it; None while the container runs."""
        code = self._process.poll() if self._process is not None else None
        return 128 - code if code is not None and code < 0 else code

    def signal(self, number: signal.Signals) -> None:
        """To the container's process 1, as `docker stop` and `docker kill` do it."""
        while self.exit_code() is None:
            first = self._first()
            if first is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(first, number)
                return
            time.sleep(0.02)  # the container is just starting

    def tail(self) -> list[str]:
        """The last lines that the container printed."""
        return [line.decode(errors="replace") for line in self._log.last] if self._process is not None else []

    def finish(self) -> None:
        """Wait until the container's last line is in its log."""
        if self._process is not None:
            self._process.wait()
            self._log.join()

    def end(self) -> None:
        """Turn the machine off and remove its disk."""
        self.machine.end()
        if self._process is not None:
            self.finish()
        shutil.rmtree(self.machine.own, ignore_errors=True)

    @property
    def _hostname(self) -> str:
        return f"ip-{self.machine.address.replace('.', '-')}.ec2.internal"

    def _first(self) -> int | None:
        """Popen started nsenter, whose child is the shell that waits for process 1 of the container."""
        assert self._process is not None
        pid = self._process.pid
        for _ in range(2):
            try:
                pid = int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
            except (OSError, IndexError):
                return None
        return pid

    def _boot(self, machine: Machine) -> str:
        own = machine.own
        disks = {covered: own / "disk" / str(number) for number, covered in enumerate(_PRIVATE)}
        mounts = [(path, own / "ml/input/data" / channel) for channel, path in self._filesystems.items()]
        mounts.append((self.ml, disks[Path("/opt")] / "ml"))
        python = sorted({Path(sys.prefix), Path(sys.base_prefix)})
        for covered, disk in disks.items():
            mounts += [(path, disk / path.relative_to(covered)) for path in python if path.is_relative_to(covered)]
        mounts += [(disk, covered) for covered, disk in disks.items()]
        text = "mkdir -p {1}; [ -d {0} ] || mkdir -p {0}; mount --rbind {0} {1}"
        lines = [text.format(*(shlex.quote(str(path)) for path in pair)) for pair in mounts]
        return _BOOT.format(own=own, hostname=self._hostname, mounts="\n".join(lines))


class LogPump:
    """Reads what a container prints and hands its lines on, some at a time."""

    def __init__(self, process: subprocess.Popen[bytes], events: Callable[[list[bytes]], None]) -> None:
        self._process, self._events = process, events
        self._lines: list[bytes] = []
        self.last: deque[bytes] = deque(maxlen=30)
        self._lock, self._over = threading.Lock(), threading.Event()
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._read, self._flush)]
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as stream:
            for line in stream:
                text = line.rstrip(b"\n") or b" "  # an event may not be empty
                self.last.append(text)
                with self._lock:
                    self._lines += [text[at : at + _LONGEST_EVENT] for at in range(0, len(text), _LONGEST_EVENT)]
        self._over.set()

    def _flush(self) -> None:
        while True:
            over = self._over.wait(_FLUSH_S)
            with self._lock:
                lines, self._lines = self._lines, []
            if lines:
                self._events(lines)
            if over:
                return


class Checkpoints:
    """The copying of one instance's checkpoint directory to S3: file by file, in an order of its own.

    It only adds: what is removed on the instance stays in S3.
    """

    def __init__(self, s3: Any, directory: Path, url: str) -> None:
        self._s3, self._directory, self._url = s3, directory, url
        self._copied: dict[Path, tuple[int, int]] = {}  # modification time and size
        self._over = threading.Event()
        self.held = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def end(self, files: int | None) -> None:
        """Copy what is left, or so many files of it."""
        self._over.set()
        self._thread.join()
        self._copy(files)

    def _run(self) -> None:
        while not self._over.wait(_FLUSH_S):
            if not self.held:
                self._copy(None)

    def _copy(self, files: int | None) -> None:
        changed = [path for path in _files(self._directory) if self._copied.get(path) != _version(path)]
        changed.sort(key=lambda path: hashlib.sha256(str(path.relative_to(self._directory)).encode()).digest())
        for path in changed[:files]:
            if self.held and not self._over.is_set():
                return
            version = _version(path)
            # A file may be renamed or removed just now.
            with contextlib.suppress(FileNotFoundError):
                upload(self._s3, path, f"{self._url.rstrip('/')}/{path.relative_to(self._directory)}")
                if version is not None:
                    self._copied[path] = version


def _files(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file()]


def _version(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


def split(url: str) -> tuple[str, str]:
    parts = urlparse(url)
    return parts.netloc, parts.path.lstrip("/")


def upload(s3: Any, file: Path, url: str) -> None:
    bucket, key = split(url)
    s3.upload_file(str(file), bucket, key)


def download(s3: Any, url: str, directory: Path, share: tuple[int, int] = (0, 1)) -> int:
    """Copy the objects below a prefix: all, or every n-th from the m-th on. Returns how many there are."""
    bucket, prefix = split(url)
    pages = s3.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
    keys = [entry["Key"] for page in pages for entry in page.get("Contents", [])]
    for key in keys[share[0] :: share[1]]:
        name = key.removeprefix(prefix).lstrip("/") or os.path.basename(key)
        if not key.endswith("/"):
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            s3.download_file(bucket, key, str(directory / name))
    return len(keys)


def log_events(logs: Any, stream: str) -> Callable[[list[bytes], float], None]:
    """A new stream, in a group that is made with its first one; what writes lines of that time to it."""
    with contextlib.suppress(logs.exceptions.ResourceAlreadyExistsException):
        logs.create_log_group(logGroupName=LOG_GROUP)
    logs.create_log_stream(logGroupName=LOG_GROUP, logStreamName=stream)
    return partial(_put, logs, stream)


def _put(logs: Any, stream: str, lines: list[bytes], when: float) -> None:
    events = [{"timestamp": int(when * 1000), "message": line.decode(errors="replace")} for line in lines]
    for at in range(0, len(events), 1000):
        logs.put_log_events(logGroupName=LOG_GROUP, logStreamName=stream, logEvents=events[at : at + 1000])
