"""The Kubernetes target: each job is one object of the cluster, and every pod of it runs `accel launch`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from ..errors import ConfigError, SchedulerError, SubmitError, Unreachable
from ..job import Cursor, JobSpec, LogLine, Status
from ..target import CheckReport, DiscoveredJob, JobSummary, Plan, TargetContext, parse_ids, require_answers
from . import cluster_ref, tpu_slices
from . import options as kubernetes_options
from .manifests import plan as plans
from .native_id import Native
from .options import KubernetesOptions

if TYPE_CHECKING:
    from .client.api import Api
    from .cluster_ref import ClusterRef
    from .follower import Follower


class KubernetesTarget:
    """A target that runs each job as a PyTorchJob, JobSet, Job or TrainJob. Native ids: see `native_id.py`."""

    Options: ClassVar[type] = KubernetesOptions
    grows: ClassVar[bool] = True

    def __init__(self, context: TargetContext) -> None:
        self.name = context.name
        self._options: KubernetesOptions = context.options
        self._jobs = context.jobs
        self._clusters: dict[tuple[str | None, ...], Follower] = {}
        kubernetes_options.check(self._options, self.name)

    def sized(self, spec: JobSpec) -> JobSpec:
        """Return the spec with the number of nodes that its TPU slices have."""
        return tpu_slices.with_slice_nodes(spec, self._options)

    def plan(self, spec: JobSpec, job_id: str) -> Plan:
        """Return the objects as YAML. Values known only after packing the code are left open. Raises SpecError."""
        return plans.plan(spec, self._options, job_id, self.name)

    def submit(self, plan: Plan) -> str:
        """Create the job's object and everything that belongs to it, exactly once.

        Raises SubmitError if the cluster refuses it, after removing what was created; SpecError, ConfigError;
        Unreachable if the outcome is unknown or incomplete: a repeated call completes it.
        """
        from . import cluster_ref, code_upload, submit

        spec = JobSpec.from_json(plan.settings["spec"])
        previous = cluster_ref.read(self._jobs, plan.job_id)
        api = self._cluster(previous).api
        self._check_kind(api, spec, sent=previous is not None)
        digest, data = code_upload.pack(spec, self._options, self._jobs.parent, previous.snapshot if previous else None)
        ref = cluster_ref.ClusterRef.of(api.access, digest)
        if ref != previous:
            cluster_ref.write(self._jobs, plan.job_id, ref)
        code, configmap_data = code_upload.upload(api, spec, self._options, plan.job_id, data)
        workload = submit.submit(api, spec, self._options, plan.job_id, code, configmap_data)
        return str(Native.of(self._options.workload, {"namespace": api.namespace, **workload["metadata"]}, plan.job_id))

    def _check_kind(self, api: Api, spec: JobSpec, *, sent: bool) -> None:
        """Check the workload against the cluster, in the first request to it.

        Before the first submit (`sent` is False) an unreachable cluster raises SubmitError: no object can exist yet.
        Later one may exist, and ConfigError also becomes Unreachable.
        """
        from .client.errors import Forbidden
        from .manifests import build

        try:
            build.check_kind(self._options, api.versions(), self.name)
            build.check_restarts(spec, self._options, api.version, self.name)
        except Forbidden:
            pass  # creating the objects reports it
        except (Unreachable, ConfigError) as error:
            if sent:
                raise Unreachable(str(error)) from None
            if isinstance(error, Unreachable):
                raise SubmitError(f"{error}; nothing was submitted") from None
            raise

    def backends(self, jobs: Mapping[str, str | None]) -> Mapping[str, str]:
        """Return the uid of each job's namespace, if we may read it, and a digest of the API server's URL and CA.

        Raises Unreachable, ApiError, ConfigError.
        """
        identities: dict[tuple[int, str], str] = {}
        result = {}
        for job_id, native_id in jobs.items():
            api = self._cluster(cluster_ref.read(self._jobs, job_id)).api
            namespace = api.namespace if native_id is None else Native.parse(native_id).namespace
            key = id(api), namespace
            if key not in identities:
                identities[key] = cluster_ref.identity(api, namespace)
            result[job_id] = identities[key]
        return result

    def poll(self, native_ids: Sequence[str]) -> Mapping[str, Status]:
        """Query jobs with one list for each kind of object and one of the pods, or from a running watch.

        Raises Unreachable, with the statuses of the others, if some jobs could not be queried; ConfigError or ApiError
        if all jobs are in one cluster and it refuses the query.
        """
        statuses: dict[str, Status] = {}
        placements, unreachable = parse_ids(self._native_and_cluster, native_ids)
        groups: dict[int, tuple[Follower, list[Native]]] = {}
        for native, cluster in placements.values():
            groups.setdefault(id(cluster), (cluster, []))[1].append(native)
        for cluster, natives in groups.values():
            try:
                cluster_statuses, problems = cluster.statuses(natives)
            except SchedulerError as error:
                if len(groups) == 1:
                    raise
                cluster_statuses, problems = {}, dict.fromkeys(map(str, natives), str(error))
            statuses |= cluster_statuses
            unreachable |= problems
        return require_answers(statuses, unreachable)

    def wait(self, native_id: str, timeout_s: float) -> bool | None:
        """Wait until the job may be over (True) or the timeout (False). Return None if it cannot be watched."""
        native, cluster = self._native_and_cluster(native_id)
        return cluster.wait(native, timeout_s)

    def logs(self, native_id: str, since: Cursor | None = None) -> Iterator[LogLine]:
        native, cluster = self._native_and_cluster(native_id)
        yield from cluster.logs(native, since, self._jobs / native.job_id)

    def cursor_at(self, native_id: str, when: float) -> Cursor:
        native, cluster = self._native_and_cluster(native_id)
        return cluster.cursor_at(native, when, self._jobs / native.job_id)

    def cancel(self, native_id: str) -> None:
        """Archive the logs and delete the job's object, which terminates its pods gracefully. Raises Unreachable."""
        from . import cleanup

        native, cluster = self._native_and_cluster(native_id)
        cleanup.cancel(cluster.api, native, self._jobs / native.job_id)

    def cancel_rest(self, native_id: str) -> bool:
        """Delete the object of a finished job if one of its pods still runs. Raises Unreachable."""
        from . import cleanup

        native, cluster = self._native_and_cluster(native_id)
        return cleanup.cancel_rest(cluster.api, native, self._jobs / native.job_id)

    def shell(self, native_id: str, node: int, argv: Sequence[str], *, terminal: bool) -> int:
        """Run `argv` in the pod of that node. Raises SubmitError, ApiError, Unreachable."""
        from . import shell

        native, cluster = self._native_and_cluster(native_id)
        return shell.run(cluster.api, native, self._options, node, argv, terminal=terminal)

    def review(self, plan: Plan) -> list[str]:
        """Return the problems that a dry run on the API server reports. Raises Unreachable, ConfigError."""
        from . import dry_run

        spec = JobSpec.from_json(plan.settings["spec"])
        return dry_run.review(self._cluster(None).api, spec, self._options, plan.job_id)

    def find(self, job_id: str) -> DiscoveredJob | None:
        """Find a job of this machine in any cluster, or of another machine in the target's namespace."""
        from . import cluster_ref, find

        return find.find(self._cluster(cluster_ref.read(self._jobs, job_id)).api, self._options, job_id)

    def listed(self) -> list[JobSummary]:
        """List the jobs in the target's namespace. Raises Unreachable, ApiError."""
        from . import find

        return find.jobs(self._cluster(None).api, self._options)

    def check(self, gpus: int = 0) -> CheckReport:
        """Query the API server's features and our permissions. Raises Unreachable, SchedulerError."""
        from . import preflight

        return preflight.check(self._cluster(None).api, self._options, gpus)

    def clear(self, jobs: Mapping[str, str | None]) -> list[str]:
        """Delete the jobs' objects that still exist. Return a line for each job that could not be cleared."""
        from . import cleanup

        lines: list[str] = []
        for cluster, natives in self._sent(jobs):
            lines += cleanup.clear(cluster.api, self._options, natives)
        return lines

    def running(self, jobs: Mapping[str, str | None]) -> Mapping[str, str | SchedulerError]:
        from . import cleanup

        result: dict[str, str | SchedulerError] = {}
        for cluster, natives in self._sent(jobs):
            try:
                result |= cleanup.running(cluster.api, natives)
            except SchedulerError as error:
                result |= {native.job_id: error for native in natives}
        return result

    def _sent(self, jobs: Mapping[str, str | None]) -> list[tuple[Follower, list[Native]]]:
        """Return the clusters that these jobs were sent to, and the native ids of each."""
        groups: dict[int, tuple[Follower, list[Native]]] = {}
        for job_id, native_id in jobs.items():
            native = self._native(job_id, native_id)
            if native is not None:
                cluster = self._cluster_of(native)
                groups.setdefault(id(cluster), (cluster, []))[1].append(native)
        return list(groups.values())

    def close(self) -> None:
        """Close the connections and the watch. They are reopened when needed."""
        for cluster in self._clusters.values():
            cluster.close()
            cluster.api.close()

    def _native(self, job_id: str, native_id: str | None) -> Native | None:
        """Return the native id of a job that was sent, even if its submit was never confirmed; else None."""
        from .. import object_names
        from ..store.record import read_record

        if native_id is not None:
            return Native.parse(native_id)
        ref = cluster_ref.read(self._jobs, job_id)
        if ref is None:
            return None
        name = read_record(job_id, str(self._jobs / job_id)).name
        return Native(self._options.workload, ref.namespace, object_names.object_name(name, job_id), job_id)

    def _native_and_cluster(self, native_id: str) -> tuple[Native, Follower]:
        native = Native.parse(native_id)
        return native, self._cluster_of(native)

    def _cluster_of(self, native: Native) -> Follower:
        return self._cluster(cluster_ref.read(self._jobs, native.job_id))

    def _cluster(self, ref: ClusterRef | None) -> Follower:
        """Return the cluster that a job was sent to, or for None the one that the options select."""
        from .client.api import Api
        from .follower import Follower

        key = () if ref is None else (ref.kubeconfig, ref.context, ref.namespace)
        if key not in self._clusters:
            options = self._options if ref is None else ref.options(self._options)
            self._clusters[key] = Follower(Api(options, self.name), ttl=self._options.ttl_s is not None)
        return self._clusters[key]
