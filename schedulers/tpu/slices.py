"""A slice as the API describes it, and the SSH configuration of its workers."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import shlex
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, SchedulerError, SubmitError
from ..hosts.errors import LoginRefused, one_line
from ..hosts.host_list import Host
from ..job import Reason, State, Status
from ..store import atomic_files
from .api import state_name
from .options import TpuOptions

if TYPE_CHECKING:
    from ..hosts.transport import Pool
    from .api import Api

_GCLOUD_S = 120.0
_READY = "READY"
_KEYS = "ssh-keys"
_KEY_ACCEPTED_S = 60.0  # for the guest agent to install it
_KEY_RETRY_S = 1.0
# State of a node -> the stage of a created slice, and reason and phrase for a job whose hosts do not respond. In other
# states the job may still run.
_ENDS: Mapping[str, tuple[str, Reason, str]] = {
    "PREEMPTED": ("preempted", Reason.PREEMPTED, "was preempted"),
    "TERMINATED": ("preempted", Reason.PREEMPTED, "was terminated"),
    "STOPPING": ("failed", Reason.NODE_FAILURE, "was stopped"),
    "STOPPED": ("failed", Reason.NODE_FAILURE, "was stopped"),
    "DELETING": ("waits", Reason.NODE_FAILURE, "was deleted"),
}

progress = logging.getLogger("schedulers.progress")


@dataclass(frozen=True, kw_only=True)
class Slice:
    """A node of the API. `addresses`: of its workers, in their order."""

    name: str
    node_id: int
    state: str
    problem: str
    addresses: tuple[str, ...]

    @classmethod
    def of(cls, node: Any, options: TpuOptions) -> Slice:
        """Return the slice that a node of the API describes."""
        external = not options.internal_ips
        addresses = ((external and end.access_config.external_ip) or end.ip_address for end in node.network_endpoints)
        return cls(
            name=str(options.name), node_id=int(node.id), state=state_name(node),
            problem=str(node.health_description or ""), addresses=tuple(map(str, addresses)),
        )  # fmt: skip

    @property
    def hosts(self) -> list[Host]:
        """The workers, under their names in the SSH configuration."""
        return [Host(name=f"{self.name}-w{i}", source="the TPU's workers") for i in range(len(self.addresses))]


def ready_slice(tpu: Slice | None, options: TpuOptions, subject: str) -> Slice:
    """Return the slice. Raises SubmitError if no job can run on it."""
    label = f"{options.name} in {options.zone}"
    if tpu is None:
        raise SubmitError(f"{subject}: TPU VM not found: {label}")
    if tpu.state != _READY:
        detail = f" ({tpu.problem})" if tpu.problem else ""
        raise SubmitError(f"{subject}: {label} is {tpu.state}{detail}, not {_READY}")
    if not tpu.addresses:
        raise SubmitError(f"{subject}: {label} has no network endpoints")
    return tpu


def status_if_over(tpu: Slice | None, options: TpuOptions) -> Status | None:
    """Return how a job on unreachable hosts has ended, or None if the slice may still run it."""
    state = "" if tpu is None else tpu.state
    _, reason, phrase = ("gone", Reason.NODE_FAILURE, "is gone") if tpu is None else _ENDS.get(state, ("", None, ""))
    if reason is None:
        return None
    return Status(state=State.FAILED, reason=reason, message=f"the slice {options.name} {phrase}", native_state=state)


def stage(name: str, node: Any, queued: Any) -> tuple[str, str]:
    """Return the stage of a created slice (ready, waits, preempted, failed or gone), and a message.

    `node` and its queued resource are None if they do not exist.
    """
    state = None if queued is None else state_name(queued.state)
    if state == "FAILED":
        return "failed", one_line(f"{name} was not granted: {queued.state.failed_data.error.message}")
    if state in ("SUSPENDING", "SUSPENDED"):
        return "preempted", f"{name} was preempted"
    if node is None:
        return ("gone", f"{name} is gone") if state is None else ("waits", f"{name} is {state}")
    state = state_name(node)
    stage_name, _, phrase = _ENDS.get(state, ("ready" if state == _READY else "waits", None, f"is {state}"))
    return stage_name, f"{name} {phrase}"


def write_config(folder: Path, tpu: Slice, keys: Sequence[Sequence[str]], options: TpuOptions, subject: str) -> None:
    """Write the SSH configuration of a slice's workers, and their host keys.

    Raises ConfigError if the API lacks the key of one of them: nothing is sent to an unverified host.
    """
    blocks, known_hosts = [], []
    login = [f"{name} {value}" for name, value in (("User", options.user), ("Port", options.port)) if value is not None]
    for number, address in enumerate(tpu.addresses):
        worker_keys = keys[number] if number < len(keys) else ()
        if not worker_keys:
            raise ConfigError(
                f"{subject}: Google's API has no host key of worker {number} of {tpu.name} (guest attributes are off, "
                "or it is still starting): set transport: gcloud in accel.yaml"
            )
        alias = f"tpu.{tpu.node_id}-{number}"
        known_hosts += [f"{alias} {key}" for key in worker_keys]
        known_hosts_file = f'UserKnownHostsFile "{folder}/known_hosts"'
        blocks.append([f"HostName {address}", *login, f"HostKeyAlias {alias}", known_hosts_file])
    _write(folder, tpu, blocks, known_hosts, options)


def write_gcloud_config(folder: Path, tpu: Slice, options: TpuOptions, project: str, subject: str) -> None:
    """Write gcloud's SSH configuration of a slice's workers. Raises ConfigError, SchedulerError."""
    blocks, lines = [], _gcloud(tpu, options, project, subject)
    if len(lines) != len(tpu.hosts):
        raise SchedulerError(f"{subject}: gcloud names {len(lines)} of {len(tpu.hosts)} workers of {tpu.name}")
    for argv in lines:
        user, _, address = argv[argv.index("--") - 1].rpartition("@")
        arguments = list(itertools.pairwise(argv))
        blocks.append([
            f"HostName {address}", *([f"User {user}"] if user else []),
            *(f'IdentityFile "{value}"' for flag, value in arguments if flag == "-i"),
            *(value.replace("=", " ", 1) for flag, value in arguments if flag == "-o"),
        ])  # fmt: skip
    _write(folder, tpu, blocks, [], options)


def _gcloud(tpu: Slice, options: TpuOptions, project: str, subject: str) -> list[list[str]]:
    """Return the `ssh` command that gcloud would run for each worker.

    The first call makes gcloud install its key on the workers, and record their host keys. It accepts unknown ones if
    the API has none.
    """
    name = f"{options.user}@{tpu.name}" if options.user else tpu.name
    argv = ["gcloud", "compute", "tpus", "tpu-vm", "ssh", name, "--zone", str(options.zone), "--project", project]
    argv += ["--command", "true", "--worker", "all", *(["--internal-ip"] if options.internal_ips else [])]
    try:
        for more in ([], ["--dry-run"]):
            completed = subprocess.run(
                [*argv, *more], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_GCLOUD_S
            )
            if completed.returncode != 0:
                raise SchedulerError(f"{subject}: gcloud cannot reach {tpu.name}: {one_line(completed.stderr)}")
    except FileNotFoundError:
        raise ConfigError(f"{subject}: transport: gcloud needs the CLI (https://cloud.google.com/sdk)") from None
    except subprocess.TimeoutExpired:
        raise SchedulerError(f"{subject}: gcloud did not reach {tpu.name} within {_GCLOUD_S:g} s") from None
    return [shlex.split(line) for line in completed.stdout.splitlines() if line.split(" ", 1)[0].endswith("ssh")]


def _write(
    folder: Path, tpu: Slice, blocks: Sequence[Sequence[str]], known_hosts: Sequence[str], options: TpuOptions
) -> None:
    """Write the workers first, since the first match counts, and then the user's configuration for all hosts."""
    hosts = zip(tpu.hosts, blocks, strict=True)
    text = "\n".join("\n    ".join([f"Host {host.name}", *block]) for host, block in hosts)
    includes = [options.ssh_config] if options.ssh_config else ["~/.ssh/config", "/etc/ssh/ssh_config"]
    text += "\nMatch all\n" + "".join(f'    Include "{os.path.expanduser(path)}"\n' for path in includes)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        atomic_files.replace_file(str(folder / "known_hosts"), "".join(f"{line}\n" for line in known_hosts).encode())
        atomic_files.replace_file(str(folder / "ssh_config"), text.encode())
    except OSError as error:
        raise atomic_files.store_error(error, str(folder), "write") from error


# The user's public key in a slice's metadata, from which the workers' guest agent installs it.


def install_key(api: Api, name: str, pool: Pool, hosts: Sequence[Host]) -> None:
    """Connect to a slice's workers. If one refuses the user's key, add it to the node's metadata and wait for all.

    Raises LoginRefused without a public key in a file, if the metadata has the key already, or if a worker still
    refuses it after 60 s. Ignores unreachable workers: the next login reports them.
    """
    refusals = _rejecting_hosts(pool, hosts)
    if not refusals:
        return
    node = api.get(name)
    host, error = next(iter(refusals.items()))
    line = _public_key_line(pool, host)
    ssh_keys = str(node.metadata.get(_KEYS, ""))
    if line is None or line in ssh_keys.splitlines():
        raise error
    progress.info("adding your public key to %s", api.label.replace("target", "the slice of target"))
    api.set_metadata(node, {**node.metadata, _KEYS: "\n".join(filter(None, (ssh_keys.rstrip("\n"), line)))})
    deadline = time.monotonic() + _KEY_ACCEPTED_S
    while refusals := _rejecting_hosts(pool, refusals):
        if time.monotonic() > deadline:
            raise error
        time.sleep(_KEY_RETRY_S)


def _rejecting_hosts(pool: Pool, hosts: Iterable[Host]) -> dict[Host, LoginRefused]:
    outcomes = pool.map(lambda remote: remote.connection(), hosts)
    return {outcome.host: outcome.error for outcome in outcomes if isinstance(outcome.error, LoginRefused)}


def _public_key_line(pool: Pool, host: Host) -> str | None:
    """Return `user:key` for the first key that SSH would try and whose public half is in a file, or None."""
    settings = pool.settings(host)
    for path in settings.identities:
        with contextlib.suppress(OSError, UnicodeDecodeError):
            return f"{settings.user}:{Path(f'{path}.pub').read_text(encoding='utf-8').strip()}"
    return None
