"""Deletes jobs of accel that ended long ago, and what is left of jobs that are gone. What Helm manages is Helm's."""

from __future__ import annotations

import contextlib
import datetime
import json
import sys
from collections.abc import Iterator
from typing import Any

from api import Api, ApiError, arguments

OURS = "accel.dev/job-id"
OVER = {"Succeeded", "Failed", "Complete", "Completed"}
NO_SUCH_KIND = 404
GONE_OR_CHANGED = (404, 409)


def ended(job: dict[str, Any]) -> datetime.datetime | None:
    """When the job ended; None while it runs, or when nobody says when it ended."""
    conditions = job.get("status", {}).get("conditions") or []
    times = [c.get("lastTransitionTime") for c in conditions if c["type"] in OVER and c["status"] == "True"]
    return max((moment(text) for text in times if text), default=None)


def moment(text: str) -> datetime.datetime:
    """A time as Kubernetes writes it."""
    return datetime.datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=datetime.timezone.utc)


def of_helm(thing: dict[str, Any]) -> bool:
    """Whether Helm will remove it. What its hooks have made it forgets."""
    meta = thing["metadata"]
    hook = "helm.sh/hook" in (meta.get("annotations") or {})
    return meta["labels"].get("app.kubernetes.io/managed-by") == "Helm" and not hook


class Cleanup:
    """One round through a namespace. `failures` counts what could not be asked or deleted; a line said why."""

    def __init__(self, api: Api, namespace: str, before: datetime.datetime, *, dry_run: bool) -> None:
        self._api = api
        self._namespace = namespace
        self._before = before
        self._dry_run = dry_run
        self.failures = 0

    def jobs(self, kind: dict[str, str]) -> set[str]:
        """Deletes the jobs of a kind that ended long ago; the ids of all there were. Raises ApiError."""
        path = self._path(kind)
        ids = set()
        for job in self._api.each(path, labelSelector=OURS):
            ids.add(job["metadata"]["labels"][OURS])
            end = ended(job)
            if end is not None and end < self._before and not of_helm(job):
                self._delete(path, kind["resource"], job)
        return ids

    def leftovers(self, kind: dict[str, str], ids: set[str]) -> None:
        """Deletes what no job owns and no job is there for. Raises ApiError."""
        path = self._path(kind)
        for thing in self._api.each(path, labelSelector=OURS):
            meta = thing["metadata"]
            orphan = not meta.get("ownerReferences") and meta["labels"][OURS] not in ids and not of_helm(thing)
            if orphan and moment(meta["creationTimestamp"]) < self._before:
                self._delete(path, kind["resource"], thing)

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """Says what could not be asked; a kind that the cluster does not know has no objects."""
        try:
            yield
        except ApiError as error:
            if error.status != NO_SUCH_KIND:
                self.failed(error)

    def _path(self, kind: dict[str, str]) -> str:
        top = f"/apis/{kind['group']}" if kind["group"] else "/api"
        return f"{top}/{kind['version']}/namespaces/{self._namespace}/{kind['resource']}"

    def _delete(self, path: str, resource: str, thing: dict[str, Any]) -> None:
        meta = thing["metadata"]
        print(f"{'would delete' if self._dry_run else 'delete'} {resource}/{meta['name']}", flush=True)
        if self._dry_run:
            return
        # Only what was judged: a job that was resumed, or made anew under its name, meanwhile stays.
        unchanged = {"uid": meta["uid"], "resourceVersion": meta["resourceVersion"]}
        options = {"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": "Background"}
        try:
            self._api.ask("DELETE", f"{path}/{meta['name']}", {**options, "preconditions": unchanged})
        except ApiError as error:
            if error.status not in GONE_OR_CHANGED:
                self.failed(error)

    def failed(self, error: ApiError) -> None:
        self.failures += 1
        print(f"accel cleanup: {error}", file=sys.stderr, flush=True)


def main() -> int:
    parser = arguments(__doc__ or "")
    each = "group, version and resource of each, as JSON"
    parser.add_argument("--kinds", type=json.loads, required=True, help=f"the kinds of job: {each}")
    parser.add_argument("--leftovers", type=json.loads, default=[], help=f"what may be left of a job: {each}")
    parser.add_argument("--after-hours", type=float, required=True)
    parser.add_argument("--dry-run", action="store_true")
    args = parser.parse_args()
    before = datetime.datetime.now(datetime.timezone.utc) - datetime.timedelta(hours=args.after_hours)
    cleanup = Cleanup(Api(args.server, args.account), args.namespace, before, dry_run=args.dry_run)
    ids: set[str] = set()
    for kind in args.kinds:
        with cleanup.telling():
            ids |= cleanup.jobs(kind)
    # Without every kind's jobs nobody knows what is left of none.
    for kind in args.leftovers if not cleanup.failures else []:
        with cleanup.telling():
            cleanup.leftovers(kind, ids)
    return 1 if cleanup.failures else 0


if __name__ == "__main__":
    sys.exit(main())
