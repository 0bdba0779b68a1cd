"""The Slurm target: one batch job for each job, with one `accel launch` on each of its nodes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ..config import secrets
from ..errors import ConfigError, SchedulerError, SpecError, StoreError, SubmitError, UnknownJob, Unreachable
from ..job import Cursor, JobSpec, LogLine, Reason, Status
from ..store import atomic_files, log_lines
from ..target import CheckReport, DiscoveredJob, Plan, TargetContext, parse_ids, require_answers
from . import options as slurm_options
from . import script
from .native_id import Native
from .options import SlurmOptions

if TYPE_CHECKING:
    from .cluster import Cluster
    from .status import StatusPoller

KIND = "slurm"
_SCRIPT, _SETTINGS = "slurm/script.sh", "slurm/settings.json"
# The bytes of one log, and of all logs, in one reply.
_LIMIT, _MAX_BYTES = 4 << 20, 16 << 20


class SlurmTarget:
    """A target that runs each job as a Slurm batch job. A job's native id is `number/job id`."""

    Options: ClassVar[type] = SlurmOptions

    def __init__(self, context: TargetContext) -> None:
        self.name = context.name
        self._options: SlurmOptions = context.options
        self._jobs = context.jobs
        self._open_cluster: Cluster | None = None
        self._open_poller: StatusPoller | None = None
        self._max_array_size: int | None = None
        slurm_options.check(self._options, self.name)
        if self._options.login is not None:
            from .cluster import login_host

            login_host(self._options, self.name)

    @property
    def _cluster(self) -> Cluster:
        if self._open_cluster is None:
            from .cluster import LocalCluster, RemoteCluster

            is_remote = self._options.login is not None
            self._open_cluster = (
                RemoteCluster(self._options, self.name) if is_remote else LocalCluster(self._jobs, self._options)
            )
        return self._open_cluster

    @property
    def _poller(self) -> StatusPoller:
        if self._open_poller is None:
            from .status import StatusPoller

            self._open_poller = StatusPoller(self._cluster, self._options.clusters)
        return self._open_poller

    @staticmethod
    def poll_key(options: Mapping[str, Any]) -> list[object]:
        """Return the login node and the clusters: Slurm reports on all jobs at once, regardless of their options."""
        login_values = [options.get(key) for key in ("login", "user", "port", "ssh_config", "root", "python")]
        sbatch = options.get("sbatch")  # from a stored record, which may be damaged
        return [
            *(login_values if options.get("login") else ()),
            sbatch.get("clusters") if isinstance(sbatch, dict) else None,
        ]

    def plan(self, spec: JobSpec, job_id: str) -> Plan:
        """Return the batch script and the nodes' settings, without Slurm's numbers. Raises SpecError."""
        return self._plan(spec, job_id, None)

    def plan_many(self, specs: Sequence[JobSpec], job_ids: Sequence[str]) -> list[Plan]:
        """Plan one array, whose script is in the first plan. Raises SpecError."""
        (spec, first), *others = zip(specs, job_ids, strict=True)
        plans = [self._plan(spec, first, {"first": first, "ids": list(job_ids)})]
        return plans + [self._plan(spec, job_id, {"first": first}) for spec, job_id in others]

    def _plan(self, spec: JobSpec, job_id: str, sweep: Mapping[str, Any] | None) -> Plan:
        """`sweep`: the id of its first job as `first` and, for that one, all `ids`."""
        script.check(spec, self._options, self.name)
        root, python = self._shown_place()
        job_script = self._script(spec, job_id, root, python)
        directory = job_script.directory
        settings = job_script.settings(None if sweep is None else f"{root}/jobs/{sweep['first']}/slurm/pickles")
        files = {_SETTINGS: json.dumps(settings, indent=2) + "\n"}
        actions: list[tuple[str, ...]] = []
        login = self._options.login
        if job_script.code is None:
            actions.append(("send", spec.code, "to", f"{login}:{directory}/code" if login else f"{directory}/code"))
        if sweep is None or "ids" in sweep:
            numbers = [f"{{number of {dependency}}}" for dependency in spec.after]
            files = {_SCRIPT: job_script.render(numbers, None if sweep is None else len(sweep["ids"])), **files}
            over_ssh = () if login is None else ("ssh", login)
            actions.append((*over_ssh, "sbatch", f"{directory}/{_SCRIPT}"))
        return Plan(
            target=self.name,
            kind=KIND,
            job_id=job_id,
            files=files,
            actions=(*actions, (*settings["srun"], *settings["submitit"])),
            settings={"spec": spec.to_json(), **({} if sweep is None else {"sweep": dict(sweep)})},
            warnings=script.warnings(spec, self._options),
        )

    def _shown_place(self) -> tuple[str, str]:
        """Return what `_place` does, but without a query: a login node's paths may begin with `~`."""
        if self._options.login is None:
            return self._cluster.place()
        return self._options.root.rstrip("/"), self._options.python or "python3"

    def _script(self, spec: JobSpec, job_id: str, root: str, python: str) -> script.JobScript:
        # None: the job runs a copy.
        code = None if self._options.snapshot or self._options.login is not None else spec.code
        return script.JobScript(spec, self._options, job_id, f"{root}/jobs/{job_id}", python=python, code=code)

    def admit(self, spec: JobSpec) -> None:
        """Raise SpecError if a secret is not set on this machine, where secrets are read."""
        secrets.values(spec.secrets)

    def submit(self, plan: Plan) -> str:
        """Submit the job exactly once. Raises SubmitError, SpecError, and Unreachable if the outcome is unknown."""
        sweep = plan.settings.get("sweep")
        if sweep is None:
            return self._submit([plan], array=False)[0]
        # A sweep whose submit was interrupted is submitted as a whole.
        ids: list[str] = sweep.get("ids") or self._plan_of(sweep["first"]).settings["sweep"]["ids"]
        return self.submit_many([self._plan_of(job_id) for job_id in ids])[ids.index(plan.job_id)]

    def submit_many(self, plans: Sequence[Plan]) -> list[str]:
        """Submit all with one sbatch. Raises what `submit` raises."""
        return self._submit(plans, array=True)

    def _plan_of(self, job_id: str) -> Plan:
        from ..store.record import read_record

        return read_record(job_id, str(self._jobs / job_id)).plan()

    def _submit(self, plans: Sequence[Plan], *, array: bool) -> list[str]:
        specs = [JobSpec.from_json(plan.settings["spec"]) for plan in plans]
        values = secrets.values(specs[0].secrets)
        after = self._numbers(specs[0].after)
        root, python = self._place(plans[0].job_id)
        scripts = [self._script(spec, plan.job_id, root, python) for spec, plan in zip(specs, plans, strict=True)]
        pickles = f"{scripts[0].directory}/slurm/pickles" if array else None
        if scripts[0].code is None:
            from ..store import snapshot

            packed = snapshot.pack(Path(specs[0].code), self._jobs.parent)
            for plan in plans:
                self._cluster.unpack(packed.path, plan.job_id)
        request = {
            "schema": 1,
            "root": root,
            "jobs": [
                {"id": job.job_id, "settings": job.settings(pickles), "spec": job.spec.to_json()} for job in scripts
            ],
            "array": array,
            "script": scripts[0].render(after, len(plans) if array else None),
            "nodes": specs[0].nodes,  # an older accel on the login node reads it
            "secrets": values,
            "unset": sorted(secrets.variables(specs[0].secrets)),
            "clusters": self._options.clusters,
        }
        number = self._cluster.submit(request)
        return [str(Native(f"{number}_{index}" if array else number, plan.job_id)) for index, plan in enumerate(plans)]

    def _place(self, job_id: str) -> tuple[str, str]:
        """Return accel's directory on the cluster, and the interpreter.

        An unreachable login node raises SubmitError if nothing was sent to it: Unreachable would leave the outcome
        open.
        """
        if self._options.login is None:
            return self._cluster.place()
        sent_path = f"{self._jobs / job_id}/sent.json"
        try:
            location = self._cluster.place()
        except Unreachable as error:
            if atomic_files.read_document(sent_path) is None:
                raise SubmitError(f"{error}; nothing was submitted") from None
            raise
        atomic_files.write_document(sent_path, {"login": self._options.login})
        return location

    def _numbers(self, after: Sequence[str]) -> list[str]:
        """Return the Slurm numbers of the jobs of --after, without those that have succeeded."""
        from ..job import State
        from ..store.record import read_record

        numbers = []
        for job_id in after:
            record = read_record(job_id, str(self._jobs / job_id))
            if record.status.state is State.SUCCEEDED:
                continue
            if record.kind != KIND or (record.options() or {}).get("login") != self._options.login:
                raise SpecError(
                    f"--after {job_id}: Slurm does not know jobs of target {record.target}; wait for it first"
                )
            if record.status.state.final or record.native_id is None:
                raise _AfterFailed(f"--after {job_id}: that job is {record.status.state.value}")
            numbers.append(Native.parse(record.native_id).slurm)
        return numbers

    def backends(self, jobs: Mapping[str, str | None]) -> Mapping[str, str]:
        """Return the name of the cluster, from the options or its controller. Raises Unreachable, ConfigError."""
        try:
            name = (self._options.clusters or "").replace(" ", "")
            if not name:
                name, self._max_array_size = self._cluster.about()
        except Unreachable:
            raise
        except SchedulerError as error:
            raise ConfigError(f"target {self.name}: {error}") from None
        return dict.fromkeys(jobs, f"cluster={name}")

    def admit_many(self, count: int) -> None:
        """Raise SpecError for a sweep that is larger than an array of the cluster that `backends` has found."""
        if self._max_array_size is not None and count > self._max_array_size:
            raise SpecError(
                f"target {self.name}: the sweep has {count:,} jobs, and the cluster's MaxArraySize is "
                f"{self._max_array_size:,}: split it into several sweeps"
            )

    def poll(self, native_ids: Sequence[str]) -> Mapping[str, Status]:
        """Query all jobs with at most one squeue and one sacct. A job's own result takes precedence.

        Raises Unreachable, with the answers so far, when Slurm cannot be queried about the others.
        """
        natives, invalid = parse_ids(Native.parse, native_ids)
        statuses, unreachable = self._poller.statuses(list(natives)) if natives else ({}, {})
        unreachable |= invalid
        return require_answers(statuses, unreachable)

    def logs(self, native_id: str, since: Cursor | None = None) -> Iterator[LogLine]:
        """Yield the lines that exist now. Their sources are named as in the job's own log directory."""
        positions = log_lines.offsets(since)
        step = {"op": "logs", **self._log_step(native_id), "limit": _LIMIT, "most": _MAX_BYTES}
        more = True
        while more:
            (reply,), data = self._cluster.query([{**step, "from": positions}])
            chunks = log_lines.chunks(reply, data)
            for chunk in chunks:
                for line in chunk.lines():
                    positions[line.source] = int(line.position)
                    yield line
            step["only"] = [chunk.source for chunk in chunks if chunk.has_more]
            more = bool(step["only"])

    def cursor_at(self, native_id: str, when: float) -> Cursor:
        step = {"op": "at", "job": Native.parse(native_id).job_id, "when": when}
        offsets: dict[str, int] = self._cluster.query([step])[0][0]
        return Cursor({name: str(offset) for name, offset in offsets.items()})

    def tail_at(self, native_id: str, since: Cursor, count: int) -> Cursor:
        step = {"op": "tail", **self._log_step(native_id), "from": log_lines.offsets(since), "count": count}

        def log_ends(counts: Mapping[str, int]) -> list[dict[str, Any]]:
            return list(self._cluster.query([{**step, "counts": counts}])[0][0])

        return since.moved(log_lines.last_lines(log_ends, count))

    def _log_step(self, native_id: str) -> dict[str, Any]:
        return {"job": Native.parse(native_id).job_id, "over": self._poller.is_over(native_id)}

    def cancel(self, native_id: str) -> None:
        """Cancel a running job gracefully, or remove a waiting one from the queue. Raises Unreachable."""
        native = Native.parse(native_id)
        self._cluster.query([{"op": "cancel", **native.to_json(), "clusters": self._options.clusters}])
        self._open_poller = None  # its statuses are out of date

    def wait(self, native_id: str, timeout_s: float) -> bool:
        """Sleep until the job has left its result, or Slurm has ended it."""
        return self._cluster.wait(Native.parse(native_id), timeout_s)

    def find(self, job_id: str) -> DiscoveredJob | None:
        """Find a job that any machine submitted to the same root through the same login node.

        Raises UnknownJob if it was sent there and Slurm has no number for it, and what `query` raises.
        """
        reply = self._cluster.query([{"op": "find", "job": job_id, **self._in_sweep(job_id)}])[0][0]
        if reply is None:
            return None
        if reply["slurm"] is None:
            problem = f"job {job_id} is still being submitted to target {self.name}, or Slurm never received it"
            raise UnknownJob(problem)
        native_id = str(Native(reply["slurm"], job_id))
        return DiscoveredJob.of(native_id, lambda: reply["spec"], target=self.name, kind=KIND, job_id=job_id)

    def _in_sweep(self, job_id: str) -> dict[str, Any]:
        """Return the first job of this job's sweep and its index there; empty for any other job."""
        try:
            sweep = self._plan_of(job_id).settings.get("sweep")
        except StoreError:  # another machine submitted it
            return {}
        if sweep is None:
            return {}
        ids: list[str] = sweep.get("ids") or self._plan_of(sweep["first"]).settings["sweep"]["ids"]
        return {"first": sweep["first"], "at": ids.index(job_id)}

    def check(self, gpus: int = 0) -> CheckReport:
        """Query Slurm's version and partitions, and check the login node's packages.

        Raises Unreachable, SchedulerError if there is no Slurm.
        """
        from .preflight import check

        return check(self._cluster, self._options, gpus)

    def running(self, jobs: Mapping[str, str | None]) -> Mapping[str, str]:
        states = self._query_jobs("running", jobs)
        return {job_id: f"{state.lower()} in Slurm" for job_id, state in states.items()}

    def _query_jobs(self, op: str, jobs: Mapping[str, str | None]) -> dict[str, str]:
        job_steps = [
            {"job": job_id, "slurm": None if native is None else Native.parse(native).slurm}
            for job_id, native in jobs.items()
        ]
        step = {"op": op, "jobs": job_steps, "clusters": self._options.clusters}
        result: dict[str, str] = self._cluster.query([step])[0][0]
        return result

    def clear(self, jobs: Mapping[str, str | None]) -> list[str]:
        """Remove the jobs' directories on the cluster, unless they are the store's own."""
        if self._options.login is None:
            return []
        remaining = self._query_jobs("clear", jobs)
        return [
            f"job {job_id} not deleted on {self._options.login}: {problem}" for job_id, problem in remaining.items()
        ]

    def close(self) -> None:
        """Close the connection to the login node. It is reopened when needed."""
        if self._open_cluster is not None:
            self._open_cluster.close()


class _AfterFailed(SubmitError):
    reason = Reason.DEPENDENCY
