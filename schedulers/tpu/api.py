"""The Cloud TPU API, of one project and zone, through Google's client.

https://cloud.google.com/tpu/docs/reference/rest. `CLOUDSDK_CORE_PROJECT` and `CLOUDSDK_API_ENDPOINT_OVERRIDES_TPU` mean
what they mean to gcloud.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..errors import ConfigError, SubmitError, Unreachable
from ..job import Reason
from ..printable import one_line
from .node_request import JOB_LABEL
from .options import TpuOptions

_INSTALL = "needs Google's client for TPUs: pip install 'accel-launch[tpu]'"
_LOGIN = "gcloud auth application-default login"
_ANSWER_S = 30.0
_CHANGE_S = 120.0
ENDPOINT = "https://tpu.googleapis.com"
_EXHAUSTED = 8  # RESOURCE_EXHAUSTED, of a stockout as of a quota


class Refused(SubmitError):
    """Google Cloud does not do what it was asked. One line."""

    reason = Reason.SETUP


class NoQuota(Refused):
    """The project's quota does not allow so many chips."""

    reason = Reason.NO_CAPACITY


class Stockout(SubmitError):
    """There is no capacity now; later there may be."""

    reason = Reason.NO_CAPACITY


def endpoint() -> str:
    """Where the API is."""
    return os.environ.get("CLOUDSDK_API_ENDPOINT_OVERRIDES_TPU", "").rstrip("/") or ENDPOINT


def _words(message: str) -> str:
    """The message of an error, without the request that Google's client puts before it."""
    return one_line(re.sub(r"\A[A-Z]+ https?://\S+: ", "", message))


def _kind(queued: bool) -> str:
    return "queuedResources" if queued else "nodes"


class Api:
    """Asks about the nodes of a target. Safe to use from several threads."""

    def __init__(self, options: TpuOptions, target: str) -> None:
        self._options, self.where = options, f"target {target}"

    def node(self, name: str) -> Any:
        """The node of that name; None where there is none. Raises Refused, Unreachable, ConfigError."""
        return self._get(name, queued=False)

    def queued(self, name: str) -> Any:
        """The queued resource of that name; None where there is none. Raises what `node` raises."""
        return self._get(name, queued=True)

    def _get(self, name: str, *, queued: bool) -> Any:
        from google.api_core import exceptions

        with contextlib.suppress(exceptions.NotFound), self._asking(f"tpu.{_kind(queued)}.get", exceptions.NotFound):
            get = self._client.get_queued_resource if queued else self._client.get_node
            return get(name=self._path(name, queued=queued), timeout=_ANSWER_S)

    def host_keys(self, name: str) -> list[list[str]]:
        """The host keys of each worker, in their order, each as `ssh-ed25519 AAAA…`; those that the API does not have
        are lacking. Raises what `node` raises."""
        from google.cloud import tpu_v2

        asked = tpu_v2.GetGuestAttributesRequest(name=self._path(name), query_path="hostkeys/")
        with self._asking("tpu.nodes.getGuestAttributes"):
            answer = self._client.get_guest_attributes(request=asked, timeout=_ANSWER_S)
        return [[f"{each.key} {each.value}" for each in worker.query_value.items] for worker in answer.guest_attributes]

    def set_metadata(self, node: Any, metadata: Mapping[str, str]) -> None:
        """Gives the node this metadata in place of what it has; returns when it has it. Raises what `node` raises."""
        from google.cloud import tpu_v2
        from google.protobuf import field_mask_pb2

        changed = tpu_v2.Node(name=node.name, metadata=dict(metadata))
        with self._asking("tpu.nodes.update"):
            operation = self._client.update_node(
                node=changed, update_mask=field_mask_pb2.FieldMask(paths=["metadata"]), timeout=_ANSWER_S
            )
            operation.result(timeout=_CHANGE_S)

    def created(self) -> list[Any]:
        """The nodes of the zone that accel has created, on any machine. Raises what `node` raises."""
        with self._asking("tpu.nodes.list"):
            nodes = self._client.list_nodes(parent=self.parent, timeout=_ANSWER_S)
            return [node for node in nodes if JOB_LABEL in node.labels]

    def read(self, url: str) -> bytes | None:
        """An object of a bucket; None where there is none. Raises what `node` raises."""
        with self._asking("read the bucket"):
            from google.auth.transport.requests import AuthorizedSession

            reply = AuthorizedSession(self._credentials[0]).get(url, timeout=_ANSWER_S)
            return bytes(reply.content) if reply.ok else None

    def create(self, name: str, body: Mapping[str, Any], *, queued: bool) -> str:
        """Asks for a node, or for a queued resource, and returns the operation's name: "" where there is such already.

        Raises NoQuota, Stockout, and what `node` raises.
        """
        from google.api_core import exceptions
        from google.cloud import tpu_v2

        text, more, request = json.dumps(body), {"timeout": _ANSWER_S}, {"parent": self.parent}
        with self._asking(f"tpu.{_kind(queued)}.create", exceptions.Conflict, exceptions.TooManyRequests):
            try:
                if queued:
                    made = {"queued_resource_id": name, "queued_resource": tpu_v2.QueuedResource.from_json(text)}
                    operation = self._client.create_queued_resource(request={**request, **made}, **more)
                else:
                    made = {"node_id": name, "node": tpu_v2.Node.from_json(text)}
                    operation = self._client.create_node(request={**request, **made}, **more)
            except exceptions.Conflict:
                return ""
            except exceptions.TooManyRequests as error:
                raise self._exhausted(error.message) from None
        return str(operation.operation.name)

    def failure(self, operation: str) -> SubmitError | None:
        """Why a creation failed; None where it did not, or not yet. Raises what `node` raises."""
        from google.api_core import exceptions

        with contextlib.suppress(exceptions.NotFound), self._asking("tpu.operations.get", exceptions.NotFound):
            error = self._client.get_operation(request={"name": operation}, timeout=_ANSWER_S).error
            if error.code == _EXHAUSTED:
                return self._exhausted(error.message)
            return Refused(f"{self.where}: {_words(error.message)}") if error.code else None
        return None

    def _exhausted(self, message: str) -> SubmitError:
        line = f"{self.where}: {_words(message)}"
        if "per minute" in message:
            raise Unreachable(line)  # so many calls
        return NoQuota(line) if "quota" in message.lower() else Stockout(line)

    def delete(self, name: str, *, queued: bool) -> None:
        """Has the node deleted, or the queued resource with its node. Raises what `node` raises."""
        from google.api_core import exceptions

        kinds = exceptions.NotFound, exceptions.BadRequest, exceptions.Conflict
        try:
            with self._asking(f"tpu.{_kind(queued)}.delete", *kinds):
                request = {"name": self._path(name, queued=queued), **({"force": True} if queued else {})}
                delete = self._client.delete_queued_resource if queued else self._client.delete_node
                delete(request=request, timeout=_ANSWER_S)
        except exceptions.NotFound:
            return
        except (exceptions.BadRequest, exceptions.Conflict) as error:  # it is deleted already, or in no state for it
            found = self._get(name, queued=queued)
            state = found and (found.state.state if queued else found.state).name
            if state not in (None, "DELETING"):
                raise Unreachable(f"{self.where}: {name} cannot be deleted yet: {_words(error.message)}") from None

    @functools.cached_property
    def project(self) -> str:
        found = self._options.project or os.environ.get("CLOUDSDK_CORE_PROJECT") or self._credentials[1]
        if not found:
            raise ConfigError(f"{self.where}: no project: say project: in accel.yaml, or set CLOUDSDK_CORE_PROJECT")
        return str(found)

    @functools.cached_property
    def _credentials(self) -> Sequence[Any]:
        """Credentials by Google's default chain, and the project that they know."""
        with self._asking("find credentials"):
            import google.auth

            return tuple(google.auth.default(scopes=["https://www.googleapis.com/auth/cloud-platform"]))

    @functools.cached_property
    def _client(self) -> Any:
        with self._asking("make a client"):
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
    def _asking(self, what: str, *passing: type[Exception]) -> Iterator[None]:
        """Turns what Google's client raises, but for `passing`, into our errors. `what` is the permission it needs."""
        try:
            import requests
            from google.api_core import exceptions
            from google.auth import exceptions as login
        except ImportError:
            raise ConfigError(f"{self.where}: {_INSTALL}") from None
        try:
            yield
        except ImportError:
            raise ConfigError(f"{self.where}: {_INSTALL}") from None
        except passing:
            raise
        except (login.TransportError, exceptions.RetryError, requests.RequestException) as error:
            raise Unreachable(f"{self.where}: Google Cloud cannot be reached: {one_line(str(error))}") from None
        except (exceptions.ServerError, exceptions.TooManyRequests) as error:
            raise Unreachable(f"{self.where}: {what}: {_words(error.message)}") from None
        except (login.GoogleAuthError, exceptions.Unauthenticated) as error:
            said = one_line(str(error))
            raise ConfigError(f"{self.where}: no credentials of Google Cloud: {said}; {_LOGIN}") from None
        except exceptions.Forbidden as error:
            raise Refused(f"{self.where}: Google Cloud does not allow {what}: {_words(error.message)}") from None
        except exceptions.GoogleAPICallError as error:
            raise Refused(f"{self.where}: {what}: {_words(str(error.message or error))}") from None
