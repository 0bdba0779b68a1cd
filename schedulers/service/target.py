"""The service target: jobs that a server of `accel serve` submits to one of its own targets."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from ..config import secrets, servers
from ..errors import SchedulerError, SpecError, SubmitError, UnknownJob, Unreachable
from ..job import Cursor, JobSpec, LogLine, State, Status
from ..printable import one_line
from ..store import atomic_files, snapshot
from ..store.store import Store
from ..target import DiscoveredJob, JobSummary, Plan, TargetContext
from .client import PREFIX, Answer, Client, RequestRefused, send_code

progress = logging.getLogger("schedulers.progress")

KIND = "service"
_REQUEST, _DIGEST = "service/request.json", "service/digest"
_MAX_IDS, _PAGE = 500, 1000  # jobs in a request
_MISTAKE = 422  # the status for a request that no server would take
_MAX_WAIT_S, _ANSWER_S = 30.0, 30.0  # the longest wait for a job, and how long the answer may take after it
_SOURCE, _RANK = "log", "rank-"  # in a cursor: the offset in the log, and where the first line of a rank begins
_READ_HERE = ("env", "file")  # kinds of references to secrets


@dataclass(frozen=True, kw_only=True)
class ServiceOptions:
    """Options of a service target in `accel.yaml`. All further keys are options of the server's target.

    url:     the server's address, for which `accel login` stores a token.
    target:  a target of the server.
    project: the project that the jobs count for.
    options: options of the server's target whose names are also keys here.
    """

    url: str
    target: str
    project: str = "default"
    options: Mapping[str, Any] = field(default_factory=dict, metadata={"rest": True})


class ServiceTarget:
    """A target of a server. A job has the same id here and on the server, which is also its native id."""

    Options: ClassVar[type] = ServiceOptions
    grows: ClassVar[bool] = True  # the server refuses what its target cannot do

    def __init__(self, context: TargetContext) -> None:
        self.name = context.name
        self._options: ServiceOptions = context.options
        self._url = servers.checked_url(self._options.url, f"target {self.name}: url")
        self._jobs = context.jobs

    @functools.cached_property
    def _client(self) -> Client:
        return Client(servers.read_servers().of_url(self._url, self.name.partition("/")[0]))

    @functools.cached_property
    def _info(self) -> Mapping[str, Any]:
        # Once: the submit or poll that follows repeats its requests.
        info: Mapping[str, Any] = self._client.get("/info", attempts=1)
        return info

    @staticmethod
    def poll_key(options: Mapping[str, Any]) -> object:
        """Return the server's address."""
        return options.get("url")

    def plan(self, spec: JobSpec, job_id: str) -> Plan:
        """Return the request, without values of secrets. The server validates it."""
        options = self._options
        sent = dataclasses.replace(spec, code=".", options=options.options).to_json()
        changes = _changes(sent, JobSpec(argv=("x",)).to_json())
        body = {"spec": {"argv": sent["argv"], **changes}, "target": options.target}
        if options.project != ServiceOptions.project:
            body["project"] = options.project
        return Plan(
            target=self.name,
            kind=KIND,
            job_id=job_id,
            files={_REQUEST: json.dumps(body, indent=2) + "\n"},
            actions=(
                ("send", spec.code, "to", f"{self._url}{PREFIX}/code"),
                ("PUT", f"{self._url}{PREFIX}/jobs/{job_id}"),
            ),
            settings={"code": spec.code},
        )

    def plan_many(self, specs: Sequence[JobSpec], job_ids: Sequence[str]) -> list[Plan]:
        """Return a plan for each job: each is a request of its own."""
        return [self.plan(spec, job_id) for spec, job_id in zip(specs, job_ids, strict=True)]

    def admit(self, spec: JobSpec) -> None:
        """Raise SpecError if a secret is not set on this machine, where `env:` and `file:` are read."""
        _secret_values(spec.secrets)

    def submit(self, plan: Plan) -> str:
        """Send the code and the request. Raises SubmitError, SpecError, SnapshotError, StoreError, and Unreachable."""
        return self._submit(plan, {})

    def submit_many(self, plans: Sequence[Plan]) -> list[str | SchedulerError]:
        """Submit the jobs one by one, and their code once. No further one is sent once the server is silent."""
        outcomes: list[str | SchedulerError] = []
        uploaded: dict[str, str] = {}
        for plan in plans:
            if outcomes and isinstance(outcomes[-1], Unreachable):
                outcomes.append(outcomes[-1])
                continue
            try:
                outcomes.append(self._submit(plan, uploaded))
            except SchedulerError as error:
                outcomes.append(error)
        return outcomes

    def _submit(self, plan: Plan, uploaded: dict[str, str]) -> str:
        """Submit a job. `uploaded`: code directory -> digest, of what was sent for other jobs just now."""
        body, path = json.loads(plan.files[_REQUEST]), str(self._jobs / plan.job_id / _DIGEST)
        try:
            digest = (atomic_files.read_bytes(path) or b"").decode("ascii", "replace")
            if digest and self._find(plan.job_id) is not None:
                return plan.job_id  # the answer to an earlier request was lost
            digest = self._upload(plan, path, digest, uploaded)
            document = body | {"digest": digest, "secrets": _secret_values(body["spec"].get("secrets", {}))}
            answer = self._client.request("PUT", f"/jobs/{plan.job_id}", document=document).json()
        except (RequestRefused, UnknownJob) as error:
            is_mistake = isinstance(error, RequestRefused) and error.status == _MISTAKE
            raise (SpecError if is_mistake else SubmitError)(self._explained(error)) from None
        self._log_warnings(answer)
        return plan.job_id

    def _upload(self, plan: Plan, path: str, digest: str, uploaded: dict[str, str]) -> str:
        """Send the code, unless the server has it, and keep its digest in the file `path`.

        A submit that is completed later has a digest: it sends the code of that time.
        """
        code, home = plan.settings["code"], self._jobs.parent
        if digest := digest or uploaded.get(code, ""):
            packed = snapshot.Snapshot(digest=digest, path=home / "snapshots" / f"{digest}.tar")
        else:
            packed = snapshot.pack(Path(code), home)
        try:
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            atomic_files.replace_file(path, packed.digest.encode(), durably=True)
        except OSError as error:
            raise atomic_files.store_error(error, path, "write") from error
        if uploaded.get(code) != packed.digest:
            try:
                send_code(self._client, packed)
            except OSError as error:
                raise SubmitError(f"the packed code of job {plan.job_id} cannot be read: {error}") from None
            uploaded[code] = packed.digest
        return packed.digest

    def _explained(self, error: SchedulerError) -> str:
        """Return the server's words for a refusal; of a key that it does not know, which version it has."""
        if isinstance(error, RequestRefused) and error.where.startswith("body.") and ": unknown key " in str(error):
            name, version = self._client.server.name, self._info.get("version")
            key = error.where.removeprefix("body.")
            return f"{name} is accel {version} and does not know {key}: upgrade it, or leave that out"
        return str(error)

    def _log_warnings(self, answer: Mapping[str, Any]) -> None:
        for warning in answer.get("warnings", ()):
            progress.warning("warning: %s: %s", self._client.server.name, one_line(warning))

    def review(self, plan: Plan) -> list[str]:
        """Have the server plan the job. Return what it and its target would refuse. Raises Unreachable."""
        body, path = json.loads(plan.files[_REQUEST]), f"/jobs/{Store(self._jobs.parent).new_id()}"
        try:
            answer = self._client.request("PUT", path, query={"dry_run": "true"}, document=body).json()
        except RequestRefused as error:
            return [self._explained(error)]
        self._log_warnings(answer)
        return list(answer["refusals"])

    def backends(self, jobs: Mapping[str, str | None]) -> Mapping[str, str]:
        """Return the server's own id. Raises Unreachable, also for an expired token before a submit."""
        is_submit = None in jobs.values()
        server = self._client.get("/me", attempts=1)["server"] if is_submit else self._info["id"]
        return dict.fromkeys(jobs, f"server={server}")

    def poll(self, native_ids: Sequence[str]) -> Mapping[str, Status]:
        """Return the server's statuses of the jobs, from one request for up to 500. Raises Unreachable."""
        statuses: dict[str, Status] = {}
        for start in range(0, len(native_ids), _MAX_IDS):
            ids = native_ids[start : start + _MAX_IDS]
            views = self._client.get("/jobs", {"ids": ",".join(ids)})["jobs"]
            statuses |= {view["id"]: _status(view) for view in views}
        return statuses

    def wait(self, native_id: str, timeout_s: float) -> bool | None:
        """Return True once the job is over; None if the server does not answer."""
        seconds = min(timeout_s, _MAX_WAIT_S)
        try:
            view = self._client.get(f"/jobs/{native_id}", {"wait": f"{seconds:.3f}"}, timeout_s=seconds + _ANSWER_S)
        except SchedulerError:
            return None
        return _status(view).state.final

    def cancel(self, native_id: str) -> None:
        """Have the server cancel the job. Raises RequestRefused for a job of another user, Unreachable."""
        with contextlib.suppress(UnknownJob):
            self._client.request("POST", f"/jobs/{native_id}/cancel")

    def find(self, job_id: str) -> DiscoveredJob | None:
        """Return the job. Raises UnknownJob for one on another target of the server."""
        description = self._find(job_id)
        if description is None:
            return None
        view = description["job"]
        if view["target"] != self._options.target:
            name = self._client.server.name
            raise UnknownJob(
                f"job {job_id} of {name} is on its target {view['target']}: --target {name}/{view['target']}"
            )
        return DiscoveredJob.of(
            job_id, lambda: description["spec"],
            target=self.name, kind=KIND, job_id=job_id, created_at=view["created_at"],
        )  # fmt: skip

    def _find(self, job_id: str) -> Mapping[str, Any] | None:
        try:
            description: Mapping[str, Any] = self._client.get(f"/jobs/{job_id}/describe")
        except UnknownJob:
            return None
        return description

    def listed(self) -> list[JobSummary]:
        """Return the jobs of all users on this target."""
        jobs: list[JobSummary] = []
        page: Mapping[str, Any] = {"more": True}
        while page["more"]:
            query = {"target": self._options.target, "limit": _PAGE, "before": jobs[-1].job_id if jobs else None}
            page = self._client.get("/jobs", query)
            jobs += [
                JobSummary(
                    job_id=view["id"], native_id=view["id"], name=view["name"], nodes=view["nodes"],
                    created_at=view["created_at"], owner=view["owner"],
                )
                for view in page["jobs"]
            ]  # fmt: skip
        return jobs

    def logs(self, native_id: str, since: Cursor | None = None) -> Iterator[LogLine]:
        """Yield the lines that the job has written until now."""
        since = since or Cursor()
        offset, first, more = _offset(since), since.below(_RANK), True
        while more:
            answer = self._read_log(native_id, since=offset)
            for raw in answer.body.splitlines(keepends=True):
                start, offset = offset, offset + len(raw)
                document = json.loads(raw)
                # A line without text marks the end of a batch.
                if "text" in document and start >= int(first.position(json.dumps(document["rank"])) or 0):
                    yield LogLine.from_json(document, source=_SOURCE, position=str(offset))
            more = answer.headers["Accel-More"] == "true"

    def cursor_at(self, native_id: str, when: float) -> Cursor:
        """Return where the log was at that time, by the server's clock."""
        return Cursor({_SOURCE: self._read_log(native_id, at=when, limit_bytes=0).headers["Accel-Offset"]})

    def tail_at(self, native_id: str, since: Cursor, count: int) -> Cursor:
        """Return where the last lines of each rank begin."""
        answer = self._read_log(native_id, since=_offset(since), tail=count, limit_bytes=0)
        earlier = since.below(_RANK)
        starts = {rank: str(max(start, int(earlier.position(rank) or 0))) for rank, start in answer.json().items()}
        return Cursor(starts).under(_RANK).moved({_SOURCE: answer.headers["Accel-Offset"]})

    def _read_log(self, job_id: str, **query: float) -> Answer:
        return self._client.request("GET", f"/jobs/{job_id}/logs", query=query)


def _offset(cursor: Cursor) -> int:
    try:
        return int(cursor.position(_SOURCE) or 0)
    except ValueError:
        raise SpecError(f"not a cursor of this log: {cursor}") from None


def _changes(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that differ, so that a server which lacks the newest fields takes other jobs."""
    return {
        key: _changes(value, defaults[key]) if isinstance(value, dict) and defaults[key] else value
        for key, value in values.items()
        if value != defaults[key]
    }


def _secret_values(references: Mapping[str, str]) -> dict[str, str]:
    """Return the values of references that only this machine can read; the server's target has the others."""
    return secrets.values({name: text for name, text in references.items() if text.partition(":")[0] in _READ_HERE})


def _status(view: Mapping[str, Any]) -> Status:
    """Return a job's status, as of now. To this client, a job is queued once the server has it."""
    status = Status.from_json(view["status"])
    state = State.QUEUED if status.state is State.SUBMITTING else status.state
    return dataclasses.replace(status, state=state, message=status.message or view["warning"], observed_at=0.0)
