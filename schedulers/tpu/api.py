"""A client of the Cloud TPU API for one project and zone, over Google's client.

https://cloud.google.com/tpu/docs/reference/rest. `CLOUDSDK_CORE_PROJECT` and
`CLOUDSDK_API_ENDPOINT_OVERRIDES_TPU` work as in gcloud.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError, CredentialsExpired, SubmitError, Unreachable
from ..job import Reason
from ..printable import one_line
from .options import OWN_METADATA, TpuOptions, seconds
from .topology import GENERATIONS

_LOGIN = "gcloud auth application-default login"
_REPLY_TIMEOUT_S = 30.0
_CHANGE_S = 120.0
_BAD_REQUEST, _NOT_FOUND, _CONFLICT = 400, 404, 409
# Queued or not -> the resource, as the client's methods name it -> as paths and permissions do.
_RESOURCES = {False: "node", True: "queued_resource"}
_PLURALS = {"node": "nodes", "queued_resource": "queuedResources", "operation": "operations"}
# Codes of an operation's error (google.rpc.Code).
_EXHAUSTED = 8  # a stockout or a quota
_REFUSALS = frozenset((3, 5, 6, 7, 9, 11, 12, 16))  # with any other, the same request may succeed later


class TpuApiError(SubmitError):
    """Google Cloud refused a request. The message has one line.

    reason: of a job that fails by it.
    code:   of the HTTP reply; 0 without one.
    """

    def __init__(self, message: str, reason: Reason = Reason.SETUP, code: int = 0) -> None:
        super().__init__(message)
        self.reason, self.code = reason, code


class Retryable(TpuApiError):
    """A creation failed, and the same request may succeed later. `reason`: NO_CAPACITY, or NONE."""


def _endpoint() -> str | None:
    """Return the API's URL if the user has set one."""
    return os.environ.get("CLOUDSDK_API_ENDPOINT_OVERRIDES_TPU", "").rstrip("/") or None


def _message_of(message: str) -> str:
    """Return an error's message without the request that Google's client puts before it."""
    return one_line(re.sub(r"\A[A-Z]+ https?://\S+: ", "", message))


def state_name(resource: Any) -> str:
    """Return the name of the state of a node, or of a queued resource's `state`."""
    return str(type(resource).State(resource.state).name)


@dataclass(frozen=True, kw_only=True)
class CreatedSlice:
    """A slice that accel created, from the API's lists. `node` or `queued`, its queued resource, may be None.

    job_id:    the job of its label; "" without one.
    is_queued: a queued resource has the node, or will.
    """

    name: str
    node: Any
    queued: Any
    job_id: str
    state: str
    is_queued: bool
    accelerator_type: str
    created_at: float

    @classmethod
    def of(cls, name: str, node: Any, queued: Any) -> CreatedSlice:
        requested = queued.tpu.node_spec[0].node if node is None else node  # has no type if it has a topology
        return cls(
            name=name, node=node, queued=queued, job_id=str(requested.labels.get(JOB_LABEL, "")),
            state=state_name(queued.state if node is None else node),
            is_queued=queued is not None or bool(node.queued_resource),
            accelerator_type=str(requested.accelerator_type),
            created_at=float((queued or node).create_time.timestamp()),
        )  # fmt: skip


class Api:
    """A client for the nodes of a target. Thread-safe."""

    def __init__(self, options: TpuOptions, target: str) -> None:
        self._options, self.label = options, f"target {target}"

    def get(self, name: str, *, queued: bool = False) -> Any:
        """Return the node of that name, or its queued resource; None without one.

        Raises TpuApiError, Unreachable, ConfigError.
        """
        return self._call(f"get_{_RESOURCES[queued]}", _NOT_FOUND, name=self._path(name, queued=queued))

    def _call(self, method: str, expected: int, **parameters: Any) -> Any:
        """Call a method of Google's client, such as `get_node`. Returns None for a reply with the code `expected`."""
        verb, _, resource = method.partition("_")
        try:
            with self._translated_errors(f"tpu.{_PLURALS[resource]}.{verb}"):
                return getattr(self._client, method)(**parameters, timeout=_REPLY_TIMEOUT_S)
        except TpuApiError as error:
            if error.code != expected:
                raise
            return None

    def host_keys(self, name: str) -> list[list[str]]:
        """Return each worker's host keys that the API has, as `ssh-ed25519 AAAA…`. Raises what `get` raises."""
        request = {"name": self._path(name), "query_path": "hostkeys/"}
        with self._translated_errors("tpu.nodes.getGuestAttributes"):
            reply = self._client.get_guest_attributes(request=request, timeout=_REPLY_TIMEOUT_S)
        return [
            [f"{attribute.key} {attribute.value}" for attribute in worker.query_value.items]
            for worker in reply.guest_attributes
        ]

    def set_metadata(self, node: Any, metadata: Mapping[str, str]) -> None:
        """Replace the node's metadata, and wait until that is done. Raises what `get` raises."""
        update = {"node": {"name": node.name, "metadata": dict(metadata)}, "update_mask": {"paths": ["metadata"]}}
        with self._translated_errors("tpu.nodes.update"):
            self._client.update_node(request=update, timeout=_REPLY_TIMEOUT_S).result(timeout=_CHANGE_S)

    def created_slices(self) -> list[CreatedSlice]:
        """Return the zone's slices that accel has created, on any machine, the oldest first. Raises what `get` raises.

        Where queued resources may not be listed and the target requests none, this returns the nodes only.
        """
        nodes, queued = self._list(queued=False), {}
        try:
            queued = {name: resource for name, resource in self._list(queued=True).items() if resource.tpu.node_spec}
        except TpuApiError:
            if self._options.queued:
                raise
        slices = [CreatedSlice.of(name, nodes.get(name), queued.get(name)) for name in queued | nodes]
        return sorted((created for created in slices if created.job_id), key=lambda created: created.created_at)

    def _list(self, *, queued: bool) -> dict[str, Any]:
        with self._translated_errors(f"tpu.{_PLURALS[_RESOURCES[queued]]}.list"):
            list_all = self._client.list_queued_resources if queued else self._client.list_nodes
            resources = list_all(parent=self.parent, timeout=_REPLY_TIMEOUT_S)
            return {resource.name.rpartition("/")[2]: resource for resource in resources}

    def read(self, url: str) -> Any:
        """Return an object of a bucket, which is JSON, or None. Raises what `get` raises."""
        with self._translated_errors("read the bucket"):
            from google.auth.transport.requests import AuthorizedSession

            reply = AuthorizedSession(self._credentials[0]).get(url, timeout=_REPLY_TIMEOUT_S)
            return reply.json() if reply.ok else None

    def create(self, name: str, body: Mapping[str, Any], *, queued: bool) -> str:
        """Create a node or a queued resource. Return the operation's name, or "" if it exists already.

        Raises Retryable, and what `get` raises.
        """
        kind, resource = self._library.QueuedResource if queued else self._library.Node, _RESOURCES[queued]
        request = {"parent": self.parent, f"{resource}_id": name, resource: kind.from_json(json.dumps(body))}
        created = self._call(f"create_{resource}", _CONFLICT, request=request)
        return "" if created is None else str(created.operation.name)

    def check_creation(self, operation: str) -> None:
        """Raise Retryable or TpuApiError for a creation that has failed. Raises what `get` raises."""
        reply = self._call("get_operation", _NOT_FOUND, request={"name": operation})
        if reply is None:
            return
        error = reply.error
        if error.code == _EXHAUSTED:
            raise self._exhausted(error.message)
        if error.code:
            kind, reason = (TpuApiError, Reason.SETUP) if error.code in _REFUSALS else (Retryable, Reason.NONE)
            raise kind(f"{self.label}: {_message_of(error.message)}", reason)

    def _exhausted(self, message: str) -> SubmitError:
        line = f"{self.label}: {_message_of(message)}"
        if "per minute" in message:
            raise Unreachable(line)  # too many calls, for a while
        return (TpuApiError if "quota" in message.lower() else Retryable)(line, Reason.NO_CAPACITY)

    def delete(self, name: str, *, queued: bool) -> None:
        """Delete the node, or the queued resource with its node. Raises what `get` raises."""
        request = {"name": self._path(name, queued=queued), **({"force": True} if queued else {})}
        try:
            self._call(f"delete_{_RESOURCES[queued]}", _NOT_FOUND, request=request)
        except TpuApiError as error:
            if error.code not in (_CONFLICT, _BAD_REQUEST):
                raise
            existing = self.get(name, queued=queued)  # gone, being deleted, or not deletable now
            if existing and state_name(existing.state if queued else existing) != "DELETING":
                raise Unreachable(f"{error}; {name} cannot be deleted yet") from None

    @functools.cached_property
    def project(self) -> str:
        project = self._options.project or os.environ.get("CLOUDSDK_CORE_PROJECT") or self._credentials[1]
        if not project:
            raise ConfigError(f"{self.label}: no project: set `project:` in accel.yaml or CLOUDSDK_CORE_PROJECT")
        return str(project)

    @functools.cached_property
    def _library(self) -> Any:
        try:
            from google.cloud import tpu_v2
        except ImportError:
            raise ConfigError(f"{self.label}: needs Google's client: pip install 'accel-launch[tpu]'") from None
        return tpu_v2

    @functools.cached_property
    def _credentials(self) -> Sequence[Any]:
        """The credentials of Google's default chain, and their project."""
        with self._translated_errors("find credentials"):
            import google.auth

            return tuple(google.auth.default(scopes=["https://www.googleapis.com/auth/cloud-platform"]))

    @functools.cached_property
    def _client(self) -> Any:
        options = {"api_endpoint": _endpoint()}
        with self._translated_errors("create a client"):
            return self._library.TpuClient(transport="rest", credentials=self._credentials[0], client_options=options)

    @property
    def parent(self) -> str:
        return f"projects/{self.project}/locations/{self._options.zone}"

    def _path(self, name: str, *, queued: bool = False) -> str:
        return f"{self.parent}/{_PLURALS[_RESOURCES[queued]]}/{name}"

    @contextlib.contextmanager
    def _translated_errors(self, permission: str) -> Iterator[None]:
        """Convert the exceptions of Google's client to accel's. `permission`: what the call needs."""
        self._library  # noqa: B018 - without it, the packages below may be missing
        import requests
        from google.api_core import exceptions
        from google.auth import exceptions as login

        try:
            yield
        except (login.TransportError, exceptions.RetryError, requests.RequestException) as error:
            raise Unreachable(f"{self.label}: Google Cloud cannot be reached: {one_line(str(error))}") from None
        except (login.RefreshError, exceptions.Unauthenticated) as error:
            raise CredentialsExpired(f"{self.label}: the login has expired: {one_line(str(error))}; {_LOGIN}") from None
        except login.GoogleAuthError as error:
            raise ConfigError(f"{self.label}: no Google Cloud credentials: {one_line(str(error))}; {_LOGIN}") from None
        except exceptions.GoogleAPICallError as error:
            line = f"{self.label}: {permission}: {_message_of(str(error.message or error))}"
            if isinstance(error, exceptions.TooManyRequests) and permission.endswith(".create"):
                raise self._exhausted(error.message) from None
            if isinstance(error, (exceptions.ServerError, exceptions.TooManyRequests)):
                raise Unreachable(line) from None
            if isinstance(error, exceptions.Forbidden):
                line = f"{self.label}: Google Cloud does not allow {permission}: {_message_of(error.message)}"
            raise TpuApiError(line, code=int(error.code or 0)) from None


# The request that creates a job's slice, as JSON: a node, or a queued resource of one. Pure functions.

JOB_LABEL = "accel-job"
# How long the slice's startup script (schedulers/node/tpu_slice.py) waits, in seconds.
ARRIVE_S = 1800.0  # from its start until the job is there, in addition to start_timeout_s
SILENT_S = 600.0
ENDED_S = 120.0  # for a client to read how the job ended, and its logs
OTHERS_S = 60.0  # on the other workers, for the first to act
_SCOPES = "https://www.googleapis.com/auth/"


def node_id(job_id: str, attempt: int) -> str:
    """Return the name of a job's slice, and of its queued resource, the same for all clients."""
    return f"accel-{job_id}-{attempt}"


def request_body(options: TpuOptions, job_id: str, attempt: int, *, project: str, script: str) -> dict[str, Any]:
    """Return the request's body. `script`: the startup script's text."""
    name, parent = node_id(job_id, attempt), f"projects/{project}/locations/{options.zone}"
    path = f"{parent}/{_PLURALS[_RESOURCES[options.queued]]}/{name}{'?force=true' if options.queued else ''}"
    settings = {
        "job": job_id,
        "root": options.root,
        "url": f"{_endpoint() or 'https://tpu.googleapis.com'}/v2/{path}",
        "arrive_s": ARRIVE_S + options.start_timeout_s,
        "silent_s": SILENT_S,
        "ended_s": ENDED_S,
        "others_s": OTHERS_S,
        "result": result_url(options, name, job_id),
    }
    guard_metadata = {} if options.keep else dict(zip(OWN_METADATA, (script, json.dumps(settings)), strict=True))
    node = _node(options, job_id, guard_metadata)
    if not options.queued:
        return node
    return {
        "tpu": {"nodeSpec": [{"parent": parent, "nodeId": name, "node": node}]},
        **({"spot": {}} if options.spot else {"guaranteed": {"reserved": True}} if options.reserved else {}),
        "queueingPolicy": {"validUntilDuration": f"{seconds(options.valid_until_duration)}s"},
    }


def result_url(options: TpuOptions, name: str, job_id: str) -> str:
    """Return the URL, to read and to write, of the job's result in the bucket of `checkpoint_uri`; "" without one."""
    if options.checkpoint_uri is None:
        return ""
    folder = options.checkpoint_uri.removeprefix("gs://").replace("{id}", job_id).rstrip("/")
    storage = os.environ.get("STORAGE_EMULATOR_HOST") or "https://storage.googleapis.com"
    return f"{storage}/{urllib.parse.quote(folder)}/{name}.json"


def _node(options: TpuOptions, job_id: str, guard_metadata: dict[str, str]) -> dict[str, Any]:
    scheduling = {} if options.queued else {"spot": options.spot, "reserved": options.reserved}
    scopes = [scope if "/" in scope else _SCOPES + scope for scope in options.scopes or ("cloud-platform",)]
    return _without_empty({
        "acceleratorType": options.accelerator_type,
        "acceleratorConfig": options.type and {"type": GENERATIONS[options.type], "topology": options.topology},
        "runtimeVersion": options.version,
        "networkConfig": _without_empty({"network": options.network, "subnetwork": options.subnetwork})
        | {"enableExternalIps": not options.internal_ips},
        "serviceAccount": _without_empty({"email": options.service_account, "scope": scopes}),
        "labels": {**options.labels, JOB_LABEL: job_id},
        "tags": list(options.tags),
        "metadata": {"enable-guest-attributes": "TRUE", **options.metadata, **guard_metadata},  # where host keys are
        "dataDisks": [_disk(disk) for disk in options.data_disk],
        "schedulingConfig": _without_empty(scheduling),
    })  # fmt: skip


def _disk(text: str) -> dict[str, str]:
    fields = dict(pair.split("=", 1) for pair in text.split(","))
    return {"sourceDisk": fields["source"], "mode": fields.get("mode", "read-write").upper().replace("-", "_")}


def _without_empty(fields: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if value}
