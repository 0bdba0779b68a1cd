"""The kubernetes target: an object of the cluster for each job, every pod of which runs `accel launch`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ..errors import ConfigError, SchedulerError, SubmitError, Unreachable
from ..job import Cursor, JobSpec, LogLine, Status
from ..target import Checked, Found, Listed, Plan, TargetContext, parse_ids
from . import options as meaning
from . import tpu_slices
from .manifests import plan as plans
from .options import KubernetesOptions

if TYPE_CHECKING:
    from .client.api import Api
    from .cluster_ref import Placed
    from .follower import Follower
    from .native_id import Native


@dataclass
class _Cluster:
    """A cluster that jobs of this target were sent to, and what follows them there."""

    api: Api
    follower: Follower | None = None


class KubernetesTarget:
    """Runs each job as a PyTorchJob, JobSet, Job or TrainJob. A job's native id is
    `workload/namespace/object/job id/uid`."""

    Options: ClassVar[type] = KubernetesOptions
    grows: ClassVar[bool] = True

    def __init__(self, context: TargetContext) -> None:
        self.name = context.name
        self._options: KubernetesOptions = context.options
        self._jobs = context.jobs
        self._clusters: dict[tuple[str | None, ...], _Cluster] = {}
        meaning.check(self._options, self.name)

    def sized(self, spec: JobSpec) -> JobSpec:
        """With the nodes that its slices of TPUs have."""
        return tpu_slices.sized(spec, self._options)

    def plan(self, spec: JobSpec, job_id: str) -> Plan:
        """The objects as YAML; what only packing the code can tell is left open. Raises SpecError."""
        return plans.plan(spec, self._options, job_id, self.name)

    def submit(self, plan: Plan) -> str:
        """Has the job's object in the cluster, once, with all that belongs to it.

        Raises SubmitError when the cluster refuses it, and nothing of it is left there; SpecError, ConfigError;
        Unreachable when it cannot be told whether the cluster has the job, or all of it: the same call finds out.
        """
        from . import cluster_ref, submit
        from .code import upload
        from .native_id import Native

        spec = JobSpec.from_json(plan.settings["spec"])
        earlier = cluster_ref.read(self._jobs, plan.job_id)
        api = self._cluster(earlier).api
        self._check_kind(api, spec, sent=earlier is not None)
        digest, data = upload.pack(spec, self._options, self._jobs.parent, earlier.snapshot if earlier else None)
        placed = cluster_ref.placed(api.access, digest)
        if placed != earlier:
            cluster_ref.write(self._jobs, plan.job_id, placed)
        code, carried = upload.bring(api, spec, self._options, plan.job_id, data)
        made = submit.submit(api, spec, self._options, plan.job_id, code, carried)
        return str(Native.of(self._options.workload, {"namespace": api.namespace, **made["metadata"]}, plan.job_id))

    def _check_kind(self, api: Api, spec: JobSpec, *, sent: bool) -> None:
        """The first question to the cluster. While nothing of the job was sent, no answer means that nothing is
        there: SubmitError, where Unreachable would leave that open. What was sent may be there, whoever asks now."""
        from .client.errors import Forbidden, Unauthorized
        from .manifests import kinds

        try:
            kinds.check_kind(self._options, api.versions(), self.name)
            kinds.check_restarts(spec, self._options, api.version, self.name)
        except Forbidden:
            pass  # then the answer to what is made will say it
        except (Unreachable, Unauthorized, ConfigError) as error:
            if sent:
                raise Unreachable(str(error)) from None
            if isinstance(error, Unreachable):
                raise SubmitError(f"{error}; nothing was submitted") from None
            raise

    def poll(self, native_ids: Sequence[str]) -> Mapping[str, Status]:
        """A list for each kind of object and one of the pods, or what a watch that runs has seen.

        Raises Unreachable, which has the answers that there were, when a cluster cannot be asked about the others;
        ConfigError or ApiError when that is so of the only cluster.
        """
        found: dict[str, Status] = {}
        placed, silent = parse_ids(self._placed, native_ids)
        groups: dict[int, tuple[_Cluster, list[Native]]] = {}
        for native, cluster in placed.values():
            groups.setdefault(id(cluster), (cluster, []))[1].append(native)
        for cluster, natives in groups.values():
            try:
                answers, why = self._follower(cluster).statuses(natives)
            except SchedulerError as error:
                if len(groups) == 1:
                    raise
                answers, why = {}, dict.fromkeys(map(str, natives), str(error))
            found |= answers
            silent |= why
        if silent:
            raise Unreachable("; ".join(dict.fromkeys(silent.values())), answers=found, silent=silent)
        return found

    def wait(self, native_id: str, timeout_s: float) -> bool | None:
        """Sleeps until something happens to the job."""
        native, cluster = self._placed(native_id)
        return self._follower(cluster).wait(native, timeout_s)

    def logs(self, native_id: str, since: Cursor | None = None) -> Iterator[LogLine]:
        native, cluster = self._placed(native_id)
        yield from self._follower(cluster).logs(native, since, self._jobs / native.job_id)

    def cursor_at(self, native_id: str, when: float) -> Cursor:
        native, cluster = self._placed(native_id)
        return self._follower(cluster).cursor_at(native, when, self._jobs / native.job_id)

    def cancel(self, native_id: str) -> None:
        """Keeps the logs there are, and deletes the job's object, which ends its pods in order. Raises Unreachable."""
        from . import cancel

        native, cluster = self._placed(native_id)
        cancel.cancel(cluster.api, native, self._jobs / native.job_id)

    def cancel_rest(self, native_id: str) -> bool:
        """Deletes the object of a job that is over where one of its pods still runs. Raises Unreachable."""
        from . import cancel

        native, cluster = self._placed(native_id)
        return cancel.cancel_rest(cluster.api, native, self._jobs / native.job_id)

    def shell(self, native_id: str, node: int, argv: Sequence[str], *, terminal: bool) -> int:
        """In the pod of that node. Raises SubmitError, ApiError, Unreachable."""
        from . import shell

        native, cluster = self._placed(native_id)
        return shell.run(cluster.api, native, self._options, node, argv, terminal=terminal)

    def review(self, plan: Plan) -> list[str]:
        """Shows every object to the API server, which makes none of them. Raises Unreachable, ConfigError."""
        from . import dry_run

        spec = JobSpec.from_json(plan.settings["spec"])
        return dry_run.review(self._cluster(None).api, spec, self._options, plan.job_id)

    def find(self, job_id: str) -> Found | None:
        """A job that another machine sent to the same namespace, or this one, wherever it did."""
        from . import cluster_ref, find

        return find.find(self._cluster(cluster_ref.read(self._jobs, job_id)).api, self._options, job_id)

    def listed(self) -> list[Listed]:
        """The jobs in the target's namespace. Raises Unreachable, ApiError."""
        from . import find

        return find.jobs(self._cluster(None).api, self._options)

    def check(self, gpus: int = 0) -> Checked:
        """Asks the API server what it has, and what we may do there. Raises Unreachable, SchedulerError."""
        from . import preflight

        return preflight.check(self._cluster(None).api, self._options, gpus)

    def clear(self, jobs: Mapping[str, str | None]) -> list[str]:
        """Removes the jobs' objects, where the cluster's own time limit (`ttl_s`) has not."""
        from . import cleanup

        groups: dict[int, tuple[_Cluster, list[Native]]] = {}
        for job_id, native_id in jobs.items():
            native = self._native(job_id, native_id)
            if native is not None:
                cluster = self._of(native)
                groups.setdefault(id(cluster), (cluster, []))[1].append(native)
        lines: list[str] = []
        for cluster, natives in groups.values():
            lines += cleanup.clear(cluster.api, self._options, natives)
        return lines

    def close(self) -> None:
        """Ends the connections and the watch; they are made anew when they are needed."""
        for cluster in self._clusters.values():
            if cluster.follower is not None:
                cluster.follower.close()
            cluster.api.close()

    def _native(self, job_id: str, native_id: str | None) -> Native | None:
        """Of a job that was sent; also of one that was never confirmed."""
        from .. import object_names
        from ..store.record import read_record
        from . import cluster_ref
        from .native_id import Native

        if native_id is not None:
            return Native.parse(native_id)
        placed = cluster_ref.read(self._jobs, job_id)
        if placed is None:
            return None
        name = read_record(job_id, str(self._jobs / job_id)).name
        return Native(self._options.workload, placed.namespace, object_names.object_name(name, job_id), job_id)

    def _placed(self, native_id: str) -> tuple[Native, _Cluster]:
        from .native_id import Native

        native = Native.parse(native_id)
        return native, self._of(native)

    def _of(self, native: Native) -> _Cluster:
        from . import cluster_ref

        return self._cluster(cluster_ref.read(self._jobs, native.job_id))

    def _cluster(self, placed: Placed | None) -> _Cluster:
        """The one that a job was sent to; for what was sent nowhere yet, the one that the options mean."""
        from .client.api import Api

        key = () if placed is None else (placed.kubeconfig, placed.context, placed.namespace)
        if key not in self._clusters:
            options = self._options if placed is None else placed.options(self._options)
            self._clusters[key] = _Cluster(Api(options, self.name))
        return self._clusters[key]

    def _follower(self, cluster: _Cluster) -> Follower:
        if cluster.follower is None:
            from .follower import Follower

            cluster.follower = Follower(cluster.api, ttl=self._options.ttl_s is not None)
        return cluster.follower
