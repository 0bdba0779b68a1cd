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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError, CredentialsExpired, SubmitError, Unreachable
from ..job import Reason
from ..printable import one_line
from .node_request import JOB_LABEL
from .options import TpuOptions
from .topology import hosts_of

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
        """Return the state of the node, or of the queued resource if there is no node."""
        if self.node is None:
            return str(type(self.queued.state).State(self.queued.state.state).name)
        return str(type(self.node).State(self.node.state).name)

    @property
    def is_queued(self) -> bool:
        """Return True if a queued resource has the node, or will."""
        return self.queued is not None or bool(self.node.queued_resource)

    @property
    def accelerator_type(self) -> str:
        """Return the type, as `v4-16`; "" if it was requested by its topology and has no node yet."""
        return str(_requested_node(self.queued).accelerator_type if self.node is None else self.node.accelerator_type)

    @property
    def hosts(self) -> int:
        """Return the number of its machines, or 1 if that is unknown."""
        return hosts_of(self.accelerator_type or None, None, None) or 1

    @property
    def created_at(self) -> float:
        """Return when it was requested, in seconds since the epoch."""
        return float((self.queued or self.node).create_time.timestamp())


def _requested_node(queued: Any) -> Any:
    return queued.tpu.node_spec[0].node


def _created_slices(nodes: Iterable[Any], queued: Iterable[Any]) -> list[CreatedSlice]:
    """Return the slices that have the label of a job."""
    nodes_by_name = {node.name.rpartition("/")[2]: node for node in nodes if JOB_LABEL in node.labels}
    queued_by_name = {
        resource.name.rpartition("/")[2]: resource
        for resource in queued
        if resource.tpu.node_spec and JOB_LABEL in _requested_node(resource).labels
    }
    labels = {name: _requested_node(resource).labels for name, resource in queued_by_name.items()}
    labels |= {name: node.labels for name, node in nodes_by_name.items()}
    return [
        CreatedSlice(job_id=label[JOB_LABEL], name=name, node=nodes_by_name.get(name), queued=queued_by_name.get(name))
        for name, label in labels.items()
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

        with (
            contextlib.suppress(exceptions.NotFound),
            self._translated_errors(f"tpu.{_kind(queued)}.get", exceptions.NotFound),
        ):
            get = self._client.get_queued_resource if queued else self._client.get_node
            return get(name=self._path(name, queued=queued), timeout=_REPLY_TIMEOUT_S)

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

        text, call_options, request = json.dumps(body), {"timeout": _REPLY_TIMEOUT_S}, {"parent": self.parent}
        with self._translated_errors(f"tpu.{_kind(queued)}.create", exceptions.Conflict, exceptions.TooManyRequests):
            try:
                if queued:
                    parameters = {"queued_resource_id": name, "queued_resource": tpu_v2.QueuedResource.from_json(text)}
                    operation = self._client.create_queued_resource(request={**request, **parameters}, **call_options)
                else:
                    parameters = {"node_id": name, "node": tpu_v2.Node.from_json(text)}
                    operation = self._client.create_node(request={**request, **parameters}, **call_options)
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
        try:
            with self._translated_errors(f"tpu.{_kind(queued)}.delete", *kinds):
                request = {"name": self._path(name, queued=queued), **({"force": True} if queued else {})}
                delete = self._client.delete_queued_resource if queued else self._client.delete_node
                delete(request=request, timeout=_REPLY_TIMEOUT_S)
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
