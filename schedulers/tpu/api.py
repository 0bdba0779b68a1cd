"""The Cloud TPU API, of one project and zone, through Google's client.

https://cloud.google.com/tpu/docs/reference/rest. `CLOUDSDK_CORE_PROJECT` and `CLOUDSDK_API_ENDPOINT_OVERRIDES_TPU` mean
what they mean to gcloud.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..errors import ConfigError, SchedulerError, Unreachable
from ..printable import one_line
from .options import TpuOptions

_INSTALL = "needs Google's client for TPUs: pip install 'accel-launch[tpu]'"
_LOGIN = "gcloud auth application-default login"
_ANSWER_S = 30.0
_CHANGE_S = 120.0


class Refused(SchedulerError):
    """Google Cloud does not do what it was asked. One line."""


class Api:
    """Asks about the nodes of a target. Safe to use from several threads."""

    def __init__(self, options: TpuOptions, target: str) -> None:
        self._options, self.where = options, f"target {target}"

    def node(self, name: str) -> Any:
        """The node of that name; None where there is none. Raises Refused, Unreachable, ConfigError."""
        from google.api_core import exceptions

        try:
            with self._asking("tpu.nodes.get"):
                return self._client.get_node(name=self._path(name), timeout=_ANSWER_S)
        except exceptions.NotFound:
            return None

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

            override = os.environ.get("CLOUDSDK_API_ENDPOINT_OVERRIDES_TPU", "").rstrip("/")
            options = ClientOptions(api_endpoint=override or None)
            return tpu_v2.TpuClient(transport="rest", credentials=self._credentials[0], client_options=options)

    def _path(self, name: str) -> str:
        return f"projects/{self.project}/locations/{self._options.zone}/nodes/{name}"

    @contextlib.contextmanager
    def _asking(self, what: str) -> Iterator[None]:
        """Turns what Google's client raises, but for NotFound, into our errors. `what` is the permission it needs."""
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
        except exceptions.NotFound:
            raise
        except (login.TransportError, exceptions.RetryError, requests.RequestException) as error:
            raise Unreachable(f"{self.where}: Google Cloud cannot be reached: {one_line(str(error))}") from None
        except (exceptions.ServerError, exceptions.TooManyRequests) as error:
            raise Unreachable(f"{self.where}: {what}: {one_line(error.message)}") from None
        except (login.GoogleAuthError, exceptions.Unauthenticated) as error:
            said = one_line(str(error))
            raise ConfigError(f"{self.where}: no credentials of Google Cloud: {said}; {_LOGIN}") from None
        except exceptions.Forbidden as error:
            raise Refused(f"{self.where}: Google Cloud does not allow {what}: {one_line(error.message)}") from None
        except exceptions.GoogleAPICallError as error:
            raise Refused(f"{self.where}: {what}: {one_line(str(error.message or error))}") from None
