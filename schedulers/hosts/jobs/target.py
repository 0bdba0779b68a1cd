"""A target whose jobs run on hosts that share nothing: `accel launch` on each, under supervisors without a client."""

from __future__ import annotations

import abc
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ...clean_env import installed_main
from ...config import secrets
from ...convert import as_integer, as_text
from ...errors import SchedulerError, SpecError, StoreError, Unreachable
from ...job import Cursor, JobSpec, LogLine, Status, check_cpu
from ...store import atomic_files
from ...target import CheckReport, DiscoveredJob, Plan, TargetContext, parse_ids, require_answers
from ..bundle import PROGRAM
from . import options as host_options
from .native_id import Native
from .options import HostOptions

if TYPE_CHECKING:
    from ..facts import HostRequirements
    from ..host_list import Host
    from ..preflight import Report
    from .status import Hosts
    from .venvs import Environments
    from .watch import Watch

SCHEMA = 1
_SETTINGS = "settings.json"
_NODE_PYTHON = (3, 8)  # runs schedulers/node
_UNKNOWN = "{known after the preflight}"


class HostsTarget(abc.ABC):
    """A target whose jobs run on hosts that share nothing. A job's native id is `host,host,…/job id`."""

    kind: ClassVar[str]
    a_target: ClassVar[str]  # how messages name the kind
    Options: ClassVar[type] = HostOptions
    in_order: ClassVar[bool] = False  # ranks follow the order of the hosts, whatever the preflight finds

    def __init__(self, context: TargetContext) -> None:
        self.name = context.name
        self._options: HostOptions = context.options
        self._jobs = context.jobs
        self._connections: Hosts | None = None
        self._watch: Watch | None = None
        host_options.check(self._options, self.name)

    @abc.abstractmethod
    def _candidate_hosts(self, code: str) -> list[Host]:
        """Return the hosts that a job from this code directory may use, in order. Raises SpecError, ConfigError."""

    @abc.abstractmethod
    def _candidates(self) -> str:
        """Return the same as text, without reading a file or contacting a host. Raises SpecError."""

    def _supervisor_settings(self) -> dict[str, Any]:
        """Return additional supervisor settings of this kind of target."""
        return {}

    def _snapshot_path(self, plan: Plan) -> Path:
        """Pack the job's code and return the archive. Raises SnapshotError."""
        from ...store import snapshot

        return snapshot.pack(Path(plan.settings["code"]), self._jobs.parent).path

    def _host_count(self, requested: int, hosts: Sequence[Host]) -> int:
        """Return `requested`, the node count. Raises SpecError if the hosts are too few."""
        from .placement import check_host_count

        check_host_count(hosts, requested, self._options.spares, self.name)
        return requested

    @property
    def python(self) -> str:
        """The interpreter on the hosts, as commands there name it."""
        return self._hosts.python

    @property
    def _hosts(self) -> Hosts:
        if self._connections is None:
            from .status import Hosts

            self._connections = Hosts(self._options)
        return self._connections

    def plan(self, spec: JobSpec, job_id: str) -> Plan:
        """Return each host's files and the actions; values that only the hosts know stay open. Raises SpecError."""
        options = self._options
        self._check(spec)
        command = self._command(spec)
        ports = options.port_range
        settings = {
            "schema": SCHEMA,
            "job_id": job_id,
            "token": "{32 random bytes}",
            "node": "{0 … nodes - 1, then spares}",
            "nodes": _UNKNOWN,
            "spares": _UNKNOWN,
            "procs_per_node": spec.procs_per_node or spec.resources.gpus or None,
            "command": command,
            "workdir": _join(options.root, "jobs", job_id, "code", spec.workdir),
            "env": dict(spec.env),
            "secrets": list(spec.secrets),
            "prologue": [*host_options.module_lines(options.modules), *options.prologue],
            "setup": [list(argv) for argv in (*options.setup, *spec.setup)],
            "grace_s": spec.grace_s,
            "time_limit_s": spec.time_limit_s,
            "heartbeat_s": options.heartbeat_s,
            "start_timeout_s": options.start_timeout_s,
            "max_restarts": spec.retry.max_restarts,
            "master_port": _UNKNOWN,
            "ports": [ports[0], ports[-1]],
            "queue": {
                "gpus": spec.resources.gpus,
                "cpus": spec.resources.cpus,
                "procs_per_node": spec.procs_per_node,
                "cpu_only": options.cpu,
                "concurrency": options.concurrency,
            },
            **self._supervisor_settings(),
            "spec": spec.to_json(),  # for other machines that follow the job
        }
        return Plan(
            target=self.name,
            kind=self.kind,
            job_id=job_id,
            files={_SETTINGS: json.dumps(settings, indent=2) + "\n"},
            actions=self._actions(spec, job_id, command),
            settings={
                "nodes": spec.nodes,
                "gpus": spec.resources.gpus,
                "code": spec.code,
                "secrets": dict(spec.secrets),
            },
            warnings=self._warnings(spec),
        )

    def admit(self, spec: JobSpec) -> None:
        """Reject secrets that are not set on this machine."""
        secrets.values(spec.secrets)

    def plan_many(self, specs: Sequence[JobSpec], job_ids: Sequence[str]) -> list[Plan]:
        """Return a plan for each job. Raises SpecError."""
        return [self.plan(spec, job_id) for spec, job_id in zip(specs, job_ids, strict=True)]

    def submit(self, plan: Plan) -> str:
        """Submit one job. Raises what `submit_many` raises or returns."""
        outcome = self.submit_many([plan])[0]
        if isinstance(outcome, SchedulerError):
            raise outcome
        return outcome

    def submit_many(self, plans: Sequence[Plan]) -> list[str | SchedulerError]:
        """Examine the hosts, send everything to those that run the jobs, and start their supervisors.

        The choice of hosts is on this disk before any supervisor starts: a repeated submit queries those first. A host
        that fails after its examination fails its own jobs. Raises SubmitError with a line for each host that fails
        before, SpecError, ConfigError, and Unreachable if hosts that may run a job of an earlier submit cannot be
        reached.
        """
        earlier = {plan.job_id: self._earlier_native_id(plan.job_id) for plan in plans}
        outcomes: dict[str, str | SchedulerError] = {
            key: native_id for key, native_id in earlier.items() if native_id is not None
        }
        new_plans = [plan for plan in plans if plan.job_id not in outcomes]
        if new_plans:
            outcomes |= self._submit(new_plans)
        return [outcomes[plan.job_id] for plan in plans]

    def _submit(self, plans: Sequence[Plan]) -> dict[str, str | SchedulerError]:
        """Submit jobs that differ in arguments and names only. Returns their native ids, or errors."""
        from ..remote_files import Blob
        from . import submit
        from .placement import common_slots, place

        common = plans[0].settings
        values = secrets.values(common["secrets"])
        environments = self._environments(common["code"])
        templates = {plan.job_id: json.loads(plan.files[_SETTINGS]) for plan in plans}
        hosts = self._candidate_hosts(common["code"])
        nodes = self._host_count(common["nodes"], hosts)
        code = Blob.of(self._snapshot_path(plans[0]))
        placements, unplaced = place(
            self._hosts, list(templates), hosts, nodes,
            templates[plans[0].job_id]["queue"], requirements=self._requirements_of_host(),
            python=environments.ensure if environments is not None else None,
            same_slots=any(template["procs_per_node"] is None for template in templates.values()),
            in_order=self.in_order,
        )  # fmt: skip
        for placement in placements:
            template = templates[placement.job_id]
            if template["procs_per_node"] is None:
                template["procs_per_node"] = common_slots([node.host for node in placement.nodes])
        failed = unplaced | submit.ship(self._hosts, templates, placements, code=code)
        placements = [placement for placement in placements if placement.job_id not in failed]
        native_ids = {placement.job_id: submit.native_id(placement) for placement in placements}
        for job_id, native_id in native_ids.items():
            backend = self._identity(Native.parse(native_id), self._hosts.new_ids)
            placement_record = {"native_id": native_id, "nodes": nodes, "backend": backend}
            atomic_files.write_document(self._placement_path(job_id), placement_record)
        return native_ids | failed | submit.start(self._hosts, placements, secrets=values)

    def backends(self, jobs: Mapping[str, str | None]) -> Mapping[str, str]:
        """Return a digest of the ids that the hosts of each job have in their roots.

        A job without a native id is missing, as its hosts are not chosen, and so is one with an unreachable host.
        """
        from .status import query_all

        natives = {job_id: Native.parse(native_id) for job_id, native_id in jobs.items() if native_id}
        ids, self._hosts.new_ids = self._hosts.new_ids, {}
        unknown = dict.fromkeys(host for native in natives.values() for host in native.hosts if str(host) not in ids)
        replies = query_all(self._hosts, list(unknown), {"op": "id", "make": False}) if unknown else []
        ids |= {str(host): reply for host, reply, error in replies if error is None}
        return {
            job_id: self._identity(native, ids)
            for job_id, native in natives.items()
            if all(str(host) in ids for host in native.hosts)
        }

    @staticmethod
    def _identity(native: Native, ids: Mapping[str, str]) -> str:
        import hashlib

        text = "\n".join(ids[str(host)] for host in native.hosts)
        return f"hosts={hashlib.sha256(text.encode()).hexdigest()[:16]}"

    def poll(self, native_ids: Sequence[str]) -> Mapping[str, Status]:
        """Query each job's hosts until one knows its status. A job that none of its hosts knows is missing.

        Raises Unreachable, with the other statuses, if the hosts of a job could not tell.
        """
        from .status import statuses

        natives, invalid = parse_ids(Native.parse, native_ids)
        job_statuses, unreachable = statuses(self._hosts, natives)
        unreachable |= invalid
        return require_answers(job_statuses, unreachable)

    def logs(self, native_id: str, since: Cursor | None = None) -> Iterator[LogLine]:
        from . import logs

        yield from logs.read(self._hosts, Native.parse(native_id), since)

    def cursor_at(self, native_id: str, when: float) -> Cursor:
        from . import logs

        return logs.cursor_at(self._hosts, Native.parse(native_id), when)

    def tail_at(self, native_id: str, since: Cursor, count: int) -> Cursor | None:
        from . import logs

        return logs.tail_at(self._hosts, Native.parse(native_id), since, count)

    def cancel(self, native_id: str) -> None:
        """Request a graceful end on all hosts at once; any of them passes the request on to the leader.

        Raises Unreachable if no host that has the job could be reached.
        """
        from . import submit

        submit.cancel(self._hosts, Native.parse(native_id))

    def wait(self, native_id: str, timeout_s: float) -> bool | None:
        """Long-poll two of the job's hosts, and others after these have closed."""
        from .watch import Watch

        if self._watch is None:
            self._watch = Watch(self._hosts)
        return self._watch.wait(Native.parse(native_id), timeout_s)

    def find(self, job_id: str) -> DiscoveredJob | None:
        """Find a job on the hosts where this machine placed it or, if another machine did, on all of the target's.

        Raises Unreachable if only hosts that cannot be reached may have it, SpecError if the target has no hosts.
        """
        from . import find

        native_id = self._placed_native_id(job_id)
        if native_id is not None:
            return find.find(self._hosts, Native.parse(native_id).hosts, job_id, self.name)
        if os.path.isdir(os.path.dirname(self._placement_path(job_id))):
            return None  # this machine submits it, and has started nothing
        hosts = self._candidate_hosts(".")
        return find.find(self._hosts, hosts, job_id, self.name)

    def running(self, jobs: Mapping[str, str | None]) -> Mapping[str, str | SchedulerError]:
        """Return the hosts where supervisors of these jobs run, from one conversation with each host."""
        from .status import running

        return running(self._hosts, self._sent(jobs))

    def clear(self, jobs: Mapping[str, str | None]) -> list[str]:
        """Remove the jobs' directories from their hosts, and blobs and environments unused for `unused_days`."""
        from . import cleanup

        return cleanup.clear_jobs(self._hosts, self._sent(jobs))

    def _sent(self, jobs: Mapping[str, str | None]) -> list[Native]:
        """Return the native ids of those jobs that were sent to hosts, even if that was never confirmed."""
        native_ids = [native_id or self._placed_native_id(job_id) for job_id, native_id in jobs.items()]
        return [Native.parse(native_id) for native_id in native_ids if native_id is not None]

    def check(self, gpus: int = 0) -> CheckReport:
        """Check all hosts as for a job with `gpus` GPUs per node.

        Raises SchedulerError if the target has no hosts.
        """
        from dataclasses import replace

        from .placement import examine_hosts

        hosts = self._candidate_hosts(".")
        environments = self._environments(".")
        missing = environments.missing_on(self._hosts.pool, hosts) if environments is not None else []
        requirements = replace(self._requirements_of_host(), gpus=gpus)
        if missing:  # examine the interpreter that will create it
            minimum = _NODE_PYTHON if self._options.requirements_python else requirements.python
            requirements = replace(requirements, packages={}, python=minimum)
        report: Report = examine_hosts(
            self._hosts, hosts, requirements,
            python=environments.ensure if environments is not None and not missing else None,
        )  # fmt: skip
        lines = {kind: [str(f) for f in report.findings if f.severity == kind] for kind in ("fails", "warns")}
        note = f"the environment for {self._options.requirements} does not exist yet; the first submit creates it"
        warnings = (*lines["warns"], *(f"{host}: {note}" for host in missing))
        return CheckReport(table=report.table(), failures=tuple(lines["fails"]), warnings=warnings)

    def close(self) -> None:
        """Close the connections; they are reopened when needed."""
        if self._connections is not None:
            self._connections.close()

    def _environments(self, code: str) -> Environments | None:
        """Return the virtual environments on the hosts; None without `requirements`. Raises ConfigError."""
        options = self._options
        if options.requirements is None:
            return None
        from .venvs import Environments, read

        requirements_file = read(options.requirements, code)
        return Environments(
            requirements_file, root=options.root, python=self._hosts.python, version=options.requirements_python,
            unused_s=options.unused_s,
        )  # fmt: skip

    def _placement_path(self, job_id: str) -> str:
        return str(Path(self._jobs) / job_id / "placed.json")

    def _placed_native_id(self, job_id: str) -> str | None:
        record = self._read_placement(job_id)
        return None if record is None else record[0]

    def _read_placement(self, job_id: str) -> tuple[str, int, str] | None:
        """Return the native id under which the job was started, its number of nodes, and its hosts' identity.

        Raises StoreError.
        """
        path = self._placement_path(job_id)
        document = atomic_files.read_document(path)
        if document is None:
            return None
        try:
            return (
                as_text(document.get("native_id"), "native_id"),
                as_integer(document.get("nodes"), "nodes", least=1),
                as_text(document.get("backend", ""), "backend"),
            )
        except ValueError as error:
            raise StoreError(f"{path} is damaged: {error}") from None

    def _earlier_native_id(self, job_id: str) -> str | None:
        """Return the job's native id if an earlier submit started it on at least one host."""
        record = self._read_placement(job_id)
        if record is None:
            return None
        from .status import query_all

        native = Native.parse(record[0])
        replies = query_all(self._hosts, native.hosts, {"op": "status", "job": job_id})
        if any(reply is not None and (reply["state"] or reply["exit"]) for _, reply, _ in replies):
            return str(native)
        problems = [str(error) for _, _, error in replies if error is not None]
        # A job runs on all of its nodes or not at all.
        if len(problems) >= record[1]:
            raise Unreachable("; ".join(problems))
        backend = self.backends({job_id: str(native)}).get(job_id, "")
        if record[2] and backend and backend != record[2]:
            raise Unreachable(f"job {job_id} was sent to hosts of these names ({record[2]}), but they are others now")
        return None

    def _command(self, spec: JobSpec) -> list[str]:
        """Return the launch command; the supervisors add processes, grace and the options of each attempt."""
        command = [self._python(), "-c", installed_main("accel.cli"), "launch", *self._launch_flags()]
        command += {"script": [], "module": ["-m"], "command": ["--no_python"]}[spec.entry]
        return [*command, "--", *spec.argv]

    def _launch_flags(self) -> list[str]:
        return ["--cpu"] if self._options.cpu else []

    def _requirements_of_host(self) -> HostRequirements:
        """Return the requirements that any job has of a host."""
        from ..facts import HostRequirements

        return HostRequirements()

    def _python(self) -> str:
        if self._options.requirements is None:
            return host_options.python_of(self._options)
        return _join(self._options.root, "envs", f"{{digest of {self._options.requirements}}}", "bin/python")

    def _check(self, spec: JobSpec) -> None:
        options = self._options
        if spec.image is not None:
            raise SpecError(f"target {self.name}: hosts run the job as they are; --image needs another kind of target")
        if spec.after:
            raise SpecError(f"target {self.name}: --after is not supported; submit the job once those have ended")
        if spec.resources.accelerator is not None:
            raise SpecError(f"target {self.name}: --accelerator needs a kind of target that can choose machines")
        check_cpu(spec, options.cpu, self.name)
        secrets.check(spec.secrets, self.a_target)

    def _describe_choice(self, spec: JobSpec) -> str:
        """Describe which of the hosts a job takes."""
        count = spec.nodes + self._options.spares
        return f"the {'one' if count == 1 else count} of them with the most free slots"

    def _actions(self, spec: JobSpec, job_id: str, command: Sequence[str]) -> tuple[tuple[str, ...], ...]:
        options = self._options
        job = _join(options.root, "jobs", job_id)
        python_note = ["with Python", options.requirements_python] if options.requirements_python else []
        file = options.requirements
        environment = ("make", _join(options.root, "envs"), "from", file or "", *python_note, "where it is lacking")
        return (
            *([environment] if file else []),
            ("examine", self._candidates()),
            ("take", self._describe_choice(spec)),
            ("send", spec.code, "to", f"{job}/code", "where it is lacking"),
            ("put", f"{job}/settings.json", f"{job}/{PROGRAM}"),
            (
                "start",
                host_options.python_of(options),
                f"{job}/{PROGRAM}",
                "on each, in its queue",
                *(["with the secrets on its standard input"] if spec.secrets else []),
            ),
            tuple(command),
        )

    def _warnings(self, spec: JobSpec) -> tuple[str, ...]:
        unenforced = [name for name in ("memory_gb", "shm_gb") if getattr(spec.resources, name) is not None]
        return tuple(f"{name} is not enforced on {self.a_target}" for name in unenforced)


def _join(root: str, *parts: str) -> str:
    return "/".join([root.rstrip("/"), *(part for part in parts if part != ".")])
