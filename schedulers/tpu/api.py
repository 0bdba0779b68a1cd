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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError, CredentialsExpired, SubmitError, Unreachable
from ..job import Reason
from ..printable import one_line
from .options import OWN_METADATA, TpuOptions, seconds
from .topology import GENERATIONS

_INSTALL = "needs Google's client for TPUs: pip install 'accel-launch[tpu]'"
_LOGIN = "gcloud auth application-default login"
_REPLY_TIMEOUT_S = 30.0
_CHANGE_S = 120.0
ENDPOINT = "https://tpu.googleapis.com"
# Codes of an operation's error (google.rpc.Code).
_EXHAUSTED = 8  # a stockout or a quota
_REFUSALS = frozenset((3, 5, 6, 7, 9, 11, 12, 16))  # with any other, the same request may succeed later


class TpuApiError(SubmitError):
    """Google Cloud refused a request. The message has one line."""

    reason = Reason.SETUP


class NoQuota(TpuApiError):
    """The project's quota is too low for the requested chips."""

    reason = Reason.NO_CAPACITY


class Retryable(SubmitError):
    """A creation failed; the same request may succeed later."""

    reason = Reason.NONE


class Stockout(Retryable):
    """There is no capacity now; later there may be."""

    reason = Reason.NO_CAPACITY


def endpoint() -> str:
    """Return the API's URL."""
    return os.environ.get("CLOUDSDK_API_ENDPOINT_OVERRIDES_TPU", "").rstrip("/") or ENDPOINT


def _message_of(message: str) -> str:
    """Return an error's message without the request that Google's client puts before it."""
    return one_line(re.sub(r"\A[A-Z]+ https?://\S+: ", "", message))


def _kind(queued: bool) -> str:
    return "queuedResources" if queued else "nodes"


@dataclass(frozen=True, kw_only=True)
class CreatedSlice:
    """A slice that accel created, from the API's lists. `node` or `queued`, its queued resource, may be None."""

    job_id: str
    name: str
    node: Any
    queued: Any

    @property
    def state(self) -> str:
        return state_name(self.queued.state) if self.node is None else state_name(self.node)

    @property
    def is_queued(self) -> bool:
        """Return True if a queued resource has the node, or will."""
        return self.queued is not None or bool(self.node.queued_resource)

    @property
    def accelerator_type(self) -> str:
        """Return the type, as `v4-16`; "" if it was requested by its topology and has no node yet."""
        return str(_requested_node(self.queued).accelerator_type if self.node is None else self.node.accelerator_type)

    @property
    def created_at(self) -> float:
        return float((self.queued or self.node).create_time.timestamp())


def state_name(resource: Any) -> str:
    """Return the name of the state of a node, or of a queued resource's `state`."""
    return str(type(resource).State(resource.state).name)


def _requested_node(queued: Any) -> Any:
    return queued.tpu.node_spec[0].node


def _created_slices(nodes: Iterable[Any], queued: Iterable[Any]) -> list[CreatedSlice]:
    """Return the slices that have the label of a job."""
    nodes_by_name = {node.name.rpartition("/")[2]: node for node in nodes}
    queued_by_name = {resource.name.rpartition("/")[2]: resource for resource in queued if resource.tpu.node_spec}
    labels = {name: _requested_node(resource).labels for name, resource in queued_by_name.items()}
    labels |= {name: node.labels for name, node in nodes_by_name.items()}
    return [
        CreatedSlice(job_id=label[JOB_LABEL], name=name, node=nodes_by_name.get(name), queued=queued_by_name.get(name))
        for name, label in labels.items()
        if JOB_LABEL in label
    ]


class Api:
    """A client for the nodes of a target. Thread-safe."""

    def __init__(self, options: TpuOptions, target: str) -> None:
        self._options, self.label = options, f"target {target}"

    def node(self, name: str) -> Any:
        """Return the node of that name, or None. Raises TpuApiError, Unreachable, ConfigError."""
        return self._get(name, queued=False)

    def queued(self, name: str) -> Any:
        """Return the queued resource of that name, or None. Raises what `node` raises."""
        return self._get(name, queued=True)

    def _get(self, name: str, *, queued: bool) -> Any:
        from google.api_core import exceptions

        with contextlib.suppress(exceptions.NotFound):
            return self._call("get", queued, exceptions.NotFound, name=self._path(name, queued=queued))

    def _call(self, verb: str, queued: bool, *passthrough: type[Exception], **parameters: Any) -> Any:
        """Call `VERB_node`, or `VERB_queued_resource`."""
        with self._translated_errors(f"tpu.{_kind(queued)}.{verb}", *passthrough):
            method = getattr(self._client, f"{verb}_{'queued_resource' if queued else 'node'}")
            return method(**parameters, timeout=_REPLY_TIMEOUT_S)

    def host_keys(self, name: str) -> list[list[str]]:
        """Return each worker's host keys that the API has, as `ssh-ed25519 AAAA…`. Raises what `node` raises."""
        from google.cloud import tpu_v2

        request = tpu_v2.GetGuestAttributesRequest(name=self._path(name), query_path="hostkeys/")
        with self._translated_errors("tpu.nodes.getGuestAttributes"):
            reply = self._client.get_guest_attributes(request=request, timeout=_REPLY_TIMEOUT_S)
        return [
            [f"{attribute.key} {attribute.value}" for attribute in worker.query_value.items]
            for worker in reply.guest_attributes
        ]

    def set_metadata(self, node: Any, metadata: Mapping[str, str]) -> None:
        """Replace the node's metadata, and wait until that is done. Raises what `node` raises."""
        from google.cloud import tpu_v2
        from google.protobuf import field_mask_pb2

        updated_node = tpu_v2.Node(name=node.name, metadata=dict(metadata))
        with self._translated_errors("tpu.nodes.update"):
            operation = self._client.update_node(
                node=updated_node, update_mask=field_mask_pb2.FieldMask(paths=["metadata"]), timeout=_REPLY_TIMEOUT_S
            )
            operation.result(timeout=_CHANGE_S)

    def created_slices(self) -> list[CreatedSlice]:
        """Return the zone's slices that accel has created, on any machine. Raises what `node` raises.

        Where queued resources may not be listed and the target requests none, this returns the nodes only.
        """
        with self._translated_errors("tpu.nodes.list"):
            nodes = list(self._client.list_nodes(parent=self.parent, timeout=_REPLY_TIMEOUT_S))
        try:
            with self._translated_errors("tpu.queuedResources.list"):
                queued = list(self._client.list_queued_resources(parent=self.parent, timeout=_REPLY_TIMEOUT_S))
        except TpuApiError:
            if self._options.queued:
                raise
            queued = []
        return _created_slices(nodes, queued)

    def read(self, url: str) -> bytes | None:
        """Return an object of a bucket, or None. Raises what `node` raises."""
        with self._translated_errors("read the bucket"):
            from google.auth.transport.requests import AuthorizedSession

            reply = AuthorizedSession(self._credentials[0]).get(url, timeout=_REPLY_TIMEOUT_S)
            return bytes(reply.content) if reply.ok else None

    def create(self, name: str, body: Mapping[str, Any], *, queued: bool) -> str:
        """Create a node or a queued resource. Return the operation's name, or "" if it exists already.

        Raises NoQuota, Stockout, and what `node` raises.
        """
        from google.api_core import exceptions
        from google.cloud import tpu_v2

        request: dict[str, Any] = {"parent": self.parent}
        if queued:
            resource = tpu_v2.QueuedResource.from_json(json.dumps(body))
            request |= {"queued_resource_id": name, "queued_resource": resource}
        else:
            request |= {"node_id": name, "node": tpu_v2.Node.from_json(json.dumps(body))}
        try:
            operation = self._call("create", queued, exceptions.Conflict, exceptions.TooManyRequests, request=request)
        except exceptions.Conflict:
            return ""
        except exceptions.TooManyRequests as error:
            raise self._exhausted(error.message) from None
        return str(operation.operation.name)

    def failure(self, operation: str) -> SubmitError | None:
        """Return why a creation failed, or None if it has not, or not yet. Raises what `node` raises."""
        from google.api_core import exceptions

        with (
            contextlib.suppress(exceptions.NotFound),
            self._translated_errors("tpu.operations.get", exceptions.NotFound),
        ):
            error = self._client.get_operation(request={"name": operation}, timeout=_REPLY_TIMEOUT_S).error
            if not error.code:
                return None
            if error.code == _EXHAUSTED:
                return self._exhausted(error.message)
            kind = TpuApiError if error.code in _REFUSALS else Retryable
            return kind(f"{self.label}: {_message_of(error.message)}")
        return None

    def _exhausted(self, message: str) -> SubmitError:
        line = f"{self.label}: {_message_of(message)}"
        if "per minute" in message:
            raise Unreachable(line)  # too many calls, for a while
        return NoQuota(line) if "quota" in message.lower() else Stockout(line)

    def delete(self, name: str, *, queued: bool) -> None:
        """Delete the node, or the queued resource with its node. Raises what `node` raises."""
        from google.api_core import exceptions

        kinds = exceptions.NotFound, exceptions.BadRequest, exceptions.Conflict
        request = {"name": self._path(name, queued=queued), **({"force": True} if queued else {})}
        try:
            self._call("delete", queued, *kinds, request=request)
        except exceptions.NotFound:
            return
        except (exceptions.BadRequest, exceptions.Conflict) as error:  # being deleted, or not deletable now
            existing = self._get(name, queued=queued)
            state = existing and (existing.state.state if queued else existing.state).name
            if state not in (None, "DELETING"):
                raise Unreachable(f"{self.label}: {name} cannot be deleted yet: {_message_of(error.message)}") from None

    @functools.cached_property
    def project(self) -> str:
        project = self._options.project or os.environ.get("CLOUDSDK_CORE_PROJECT") or self._credentials[1]
        if not project:
            raise ConfigError(f"{self.label}: no project: set `project:` in accel.yaml or CLOUDSDK_CORE_PROJECT")
        return str(project)

    @functools.cached_property
    def _credentials(self) -> Sequence[Any]:
        """The credentials of Google's default chain, and their project."""
        with self._translated_errors("find credentials"):
            import google.auth

            return tuple(google.auth.default(scopes=["https://www.googleapis.com/auth/cloud-platform"]))

    @functools.cached_property
    def _client(self) -> Any:
        with self._translated_errors("create a client"):
            from google.api_core.client_options import ClientOptions
            from google.cloud import tpu_v2

            options = ClientOptions(api_endpoint=None if endpoint() == ENDPOINT else endpoint())
            return tpu_v2.TpuClient(transport="rest", credentials=self._credentials[0], client_options=options)

    @property
    def parent(self) -> str:
        return f"projects/{self.project}/locations/{self._options.zone}"

    def _path(self, name: str, *, queued: bool = False) -> str:
        return f"{self.parent}/{_kind(queued)}/{name}"

    @contextlib.contextmanager
    def _translated_errors(self, permission: str, *passthrough: type[Exception]) -> Iterator[None]:
        """Convert the client's exceptions, except `passthrough`, to ours. `permission`: what the call needs."""
        try:
            import requests
            from google.api_core import exceptions
            from google.auth import exceptions as login
        except ImportError:
            raise ConfigError(f"{self.label}: {_INSTALL}") from None
        try:
            yield
        except ImportError:
            raise ConfigError(f"{self.label}: {_INSTALL}") from None
        except passthrough:
            raise
        except (login.TransportError, exceptions.RetryError, requests.RequestException) as error:
            raise Unreachable(f"{self.label}: Google Cloud cannot be reached: {one_line(str(error))}") from None
        except (exceptions.ServerError, exceptions.TooManyRequests) as error:
            raise Unreachable(f"{self.label}: {permission}: {_message_of(error.message)}") from None
        except (login.RefreshError, exceptions.Unauthenticated) as error:
            raise CredentialsExpired(f"{self.label}: the login has expired: {one_line(str(error))}; {_LOGIN}") from None
        except login.GoogleAuthError as error:
            detail = one_line(str(error))
            raise ConfigError(f"{self.label}: no Google Cloud credentials: {detail}; {_LOGIN}") from None
        except exceptions.Forbidden as error:
            raise TpuApiError(
                f"{self.label}: Google Cloud does not allow {permission}: {_message_of(error.message)}"
            ) from None
        except exceptions.GoogleAPICallError as error:
            raise TpuApiError(f"{self.label}: {permission}: {_message_of(str(error.message or error))}") from None


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


def request_body(options: TpuOptions, job_id: str, attempt: int, *, parent: str, script: str) -> dict[str, Any]:
    """Return the request's body. `parent`: the zone's path in the API; `script`: the startup script's text."""
    name = node_id(job_id, attempt)
    settings = {
        "job": job_id,
        "root": options.root,
        "url": f"{endpoint()}/v2/{parent}/{_kind(options.queued)}/{name}{'?force=true' if options.queued else ''}",
        "arrive_s": ARRIVE_S + options.start_timeout_s,
        "silent_s": SILENT_S,
        "ended_s": ENDED_S,
        "others_s": OTHERS_S,
        "result": result_url(options, name, job_id, upload=True),
    }
    guard_metadata = {} if options.keep else dict(zip(OWN_METADATA, (script, json.dumps(settings)), strict=True))
    node = _node(options, job_id, guard_metadata)
    if not options.queued:
        return node | _without_empty(
            {"schedulingConfig": _without_empty({"spot": options.spot, "reserved": options.reserved})}
        )
    return {
        "tpu": {"nodeSpec": [{"parent": parent, "nodeId": name, "node": node}]},
        **({"spot": {}} if options.spot else {"guaranteed": {"reserved": True}} if options.reserved else {}),
        "queueingPolicy": {"validUntilDuration": f"{seconds(options.valid_until_duration)}s"},
    }


def result_url(options: TpuOptions, name: str, job_id: str, *, upload: bool = False) -> str:
    """Return the URL of the job's result on the slice, in the bucket of `checkpoint_uri`; "" without one."""
    if options.checkpoint_uri is None:
        return ""
    bucket, _, prefix = options.checkpoint_uri.removeprefix("gs://").replace("{id}", job_id).partition("/")
    file = urllib.parse.quote(f"{prefix.strip('/')}/{name}.json", safe="")
    storage = os.environ.get("STORAGE_EMULATOR_HOST") or "https://storage.googleapis.com"
    if upload:
        return f"{storage}/upload/storage/v1/b/{bucket}/o?uploadType=media&name={file}"
    return f"{storage}/storage/v1/b/{bucket}/o/{file}?alt=media"


def _node(options: TpuOptions, job_id: str, guard_metadata: dict[str, str]) -> dict[str, Any]:
    shape = {"type": GENERATIONS[options.type], "topology": options.topology} if options.type else None
    scopes = [scope if "/" in scope else _SCOPES + scope for scope in options.scopes or ("cloud-platform",)]
    return _without_empty({
        "acceleratorType": options.accelerator_type,
        "acceleratorConfig": shape,
        "runtimeVersion": options.version,
        "networkConfig": _without_empty({"network": options.network, "subnetwork": options.subnetwork})
        | {"enableExternalIps": not options.internal_ips},
        "serviceAccount": _without_empty({"email": options.service_account, "scope": scopes}),
        "labels": {**options.labels, JOB_LABEL: job_id},
        "tags": list(options.tags),
        "metadata": {"enable-guest-attributes": "TRUE", **options.metadata, **guard_metadata},  # where host keys are
        "dataDisks": [_disk(disk) for disk in options.data_disk],
    })  # fmt: skip


def _disk(text: str) -> dict[str, str]:
    fields = dict(pair.split("=", 1) for pair in text.split(","))
    return {"sourceDisk": fields["source"], "mode": fields.get("mode", "read-write").upper().replace("-", "_")}


def _without_empty(fields: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if value}
