"""Access to a Slurm target's commands: on this machine, a login node, or over SSH."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import SchedulerError, SpecError, SubmitError, Unreachable
from .native_id import Native

if TYPE_CHECKING:
    from ..hosts.host_list import Host
    from ..hosts.session import Session
    from ..hosts.transport import Pool, Remote
    from .options import SlurmOptions
    from .watch import Watch

Step = Mapping[str, Any]

_REPLY_TIMEOUT_S = 90.0
_SUBMIT_S = 300.0
# Without the home directory in sys.path: `schedulers` must be the installed package.
_SUBMIT = "import sys; sys.path[:] = [p for p in sys.path if p]; from schedulers.slurm.submitting import main; main()"


class LocalCluster:
    """A cluster whose login node is this machine. Job directories are those of the store."""

    def __init__(self, jobs: Path, options: SlurmOptions) -> None:
        self._jobs = str(jobs)
        self._python = options.python
        self._clusters = options.clusters

    def place(self) -> tuple[str, str]:
        """Return the absolute directory that holds `jobs/`, and the nodes' interpreter. Raises Unreachable."""
        import sys

        return os.path.dirname(self._jobs), os.path.expanduser(self._python or sys.executable)

    def about(self) -> tuple[str, int | None]:
        """Return ClusterName and MaxArraySize of the commands' controller. Raises Unreachable, SchedulerError."""
        reply = self.query([{"op": "cluster"}])[0][0]
        return reply["name"], reply["max_array_size"]

    def query(self, steps: Sequence[Step]) -> tuple[list[Any], bytes]:
        """Return the result of each step (`login/job_ops.py`) and log bytes. Raises Unreachable, SchedulerError."""
        from .login import job_ops, slurm_commands

        contents: list[bytes] = []
        root = os.path.dirname(self._jobs)
        try:
            replies = [job_ops.OPERATIONS[step["op"]](root, dict(step), contents) for step in steps]
        except slurm_commands.Unanswered as error:
            raise Unreachable(str(error)) from None
        except job_ops.REFUSALS as error:
            raise SchedulerError(str(error)) from None
        return replies, b"".join(contents)

    def unpack(self, archive: Path, job_id: str) -> None:
        """Unpack the snapshot there as the job's `code`."""
        from ..store import snapshot

        snapshot.unpack(archive, Path(self._jobs) / job_id / "code")

    def submit(self, request: Mapping[str, Any]) -> str:
        """Submit and return Slurm's job number. Raises SubmitError, Unreachable."""
        from . import submit

        return submit.submit(request)

    def missing_package(self) -> str | None:
        """Return one line if the interpreter that submits lacks a package."""
        try:
            import submitit  # noqa: F401
        except ImportError as error:
            return f"submitit is missing ({error.name} cannot be imported): pip install 'accel-launch[slurm]'"
        return None

    def wait(self, native: Native, timeout_s: float) -> bool:
        """Wait until the job has left its result or Slurm has ended it. Return False on a timeout."""
        from .login import job_ops

        jobs = {native.job_id: native.to_json()}
        polls = job_ops.ends(os.path.dirname(self._jobs), jobs, {"clusters": self._clusters})
        deadline = time.monotonic() + timeout_s
        while not next(polls):
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return False
            time.sleep(min(job_ops.LOOK_S, remaining))
        return True

    def close(self) -> None:
        """Close connections."""


class RemoteCluster:
    """A cluster whose login node is another machine, with job directories below `root` there."""

    def __init__(self, options: SlurmOptions, name: str) -> None:
        self._options = options
        self._host = login_host(options, name)
        self._pool: Pool | None = None
        self._location: tuple[str, str] | None = None
        self._watch: Watch | None = None

    @property
    def remote(self) -> Remote:
        if self._pool is None:
            from ..hosts.transport import Pool

            self._pool = Pool(config=self._options.ssh_config)
        return self._pool.remote(self._host)

    @property
    def python(self) -> str:
        """The login node's interpreter, with `./` for `~/`: commands start in the home directory."""
        python = self._options.python or "python3"
        return f"./{python[2:]}" if python.startswith("~/") else python

    def place(self) -> tuple[str, str]:
        return self._location or self._located(self.query([{"op": "about"}])[0][0])

    def _located(self, directories: Mapping[str, str]) -> tuple[str, str]:
        python = self._options.python or "python3"
        if python.startswith("~/"):
            python = directories["home"] + python[1:]
        self._location = (directories["root"], python)
        return self._location

    def about(self) -> tuple[str, int | None]:
        # With the directories, which the submit of a job needs next.
        directories, reply = self.query([{"op": "about"}, {"op": "cluster"}])[0]
        self._located(directories)
        return reply["name"], reply["max_array_size"]

    def query(self, steps: Sequence[Step]) -> tuple[list[Any], bytes]:
        from ..hosts import replies
        from ..hosts.errors import RemoteTimeout

        argv, stdin = self._program({"root": self._options.root, "do": list(steps)})
        try:
            completed = self.remote.run(argv, stdin=stdin, timeout_s=_REPLY_TIMEOUT_S)
        except RemoteTimeout as error:
            raise Unreachable(str(error)) from None
        line, _, data = completed.stdout.partition(b"\n")
        return replies.decode_done(line, steps, replies.SLURM, self._host.name, completed.stderr), data

    @contextlib.contextmanager
    def _open_watch(self, seconds: float) -> Iterator[Session]:
        """Open a session with the login node's program that reports ended jobs, for at most `seconds`."""
        argv, stdin = self._program(
            {"root": self._options.root, "watch_s": seconds, "clusters": self._options.clusters}
        )
        with self.remote.open(argv) as session:
            session.write(stdin)
            yield session

    def _program(self, request: Mapping[str, Any]) -> tuple[list[str], bytes]:
        """Return the argv and the input of the login node's program that handles the request."""
        from ..hosts.remote_files import program_call

        return program_call(self.python, host_programs(), request)

    def unpack(self, archive: Path, job_id: str) -> None:
        from ..hosts.remote_files import Blob, Files

        files = Files(self.remote, root=self._options.root, python=self.python)
        files.unpack(Blob.of(archive), f"jobs/{job_id}/code")

    def submit(self, request: Mapping[str, Any]) -> str:
        from ..hosts import replies
        from ..hosts.errors import RemoteError, one_line

        try:
            completed = self.remote.run(
                [self.python, "-c", _SUBMIT],
                stdin=json.dumps(request).encode() + b"\n",
                timeout_s=_SUBMIT_S,
                check=False,
            )
        except RemoteError as error:  # it timed out or was killed, maybe after sbatch
            raise Unreachable(str(error)) from None
        if (
            completed.status in (126, 127)
            or b"ImportError" in completed.stderr
            or b"ModuleNotFoundError" in completed.stderr
        ):
            raise SubmitError(self._install_hint(completed.stderr))
        if completed.status != 0:
            raise Unreachable(f"{self._host.name}: the submit failed there: {one_line(completed.stderr)}")
        *_, line = completed.stdout.splitlines() or [b""]
        try:
            return replies.decode(line, replies.SlurmSubmitted, self._host.name, completed.stderr)["slurm"]
        except RemoteError as error:
            raise SubmitError(str(error)) from None

    def missing_package(self) -> str | None:
        code = "import sys; sys.path[:] = [p for p in sys.path if p]; import schedulers.slurm.submitting, submitit"
        completed = self.remote.run([self.python, "-c", code], timeout_s=_REPLY_TIMEOUT_S, check=False)
        return self._install_hint(completed.stderr) if completed.status != 0 else None

    def _install_hint(self, stderr: bytes) -> str:
        from ..hosts.errors import one_line

        python = self._options.python or "python3"
        remedy = f"{python} -m pip install 'accel-launch[slurm]' there, or set `python:` in the target"
        return f"{self._host.name}: {one_line(stderr)}: {remedy}"

    def wait(self, native: Native, timeout_s: float) -> bool:
        if self._watch is None:
            from .watch import Watch

            self._watch = Watch(self._open_watch)
        return self._watch.wait(native, timeout_s)

    def close(self) -> None:
        pool, self._pool = self._pool, None
        self._watch = None
        if pool is not None:
            pool.close()


# A machine that has Slurm's commands and sees the shared file system.
Cluster = LocalCluster | RemoteCluster


def login_host(options: SlurmOptions, name: str) -> Host:
    """Return the target's login node. Raises SpecError."""
    import dataclasses

    from ..hosts.host_list import parse_hosts

    hosts = parse_hosts(str(options.login), source=f"target {name}: login")
    if len(hosts) != 1:
        raise SpecError(f"target {name}: login must be one host, not {options.login!r}")
    return dataclasses.replace(hosts[0], user=hosts[0].user or options.user, port=hosts[0].port or options.port)


def host_programs() -> bytes:
    """Return `login/main.py` and its imports as one program for the login node's Python."""
    from ..hosts import remote_files as files

    batch = ("slurm.batch.shared_files", "slurm.batch.unanswered")
    login = ("slurm.login.slurm_commands", "slurm.login.squeue_cache", "slurm.login.job_ops", "slurm.login.main")
    return files.host_programs(*batch, *files.JOBS, *login)
