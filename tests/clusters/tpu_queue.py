"""Queued resources of the tests' Cloud TPU API (v2), and what a test may do to nodes and queue.

https://docs.cloud.google.com/tpu/docs/queued-resources
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import Any

from google.cloud import tpu_v2
from google.protobuf import empty_pb2

from .tpu_nodes import Nodes, Slice, State, in_place, paged, place
from .tpu_operations import Refused, to_dict
from .tpu_slices import SliceHosts, hosts_of

__all__ = ["Service"]

Queued = tpu_v2.QueuedResourceState.State
_WITHOUT_NODES = (Queued.ACCEPTED, Queued.WAITING_FOR_RESOURCES, Queued.SUSPENDED, Queued.FAILED)
_QUOTA = "Quota 'TPU{generation}PerProjectPerZoneForTPUAPI' exhausted. Limit 0 in zone {zone}"


@dataclass
class _Request:
    """A queued resource. `busy` is held while its nodes are made or removed."""

    resource: Any
    granted: bool = False
    busy: threading.RLock = field(default_factory=threading.RLock)  # type: ignore[type-arg, unused-ignore]

    @property
    def state(self) -> Any:
        return self.resource.state.state


class Service(Nodes):
    """The whole API."""

    def __init__(self, hosts: SliceHosts) -> None:
        super().__init__(hosts)
        self._requests: dict[str, _Request] = {}

    def handlers(self) -> Mapping[str, Callable[[Any], Any]]:
        return {
            **super().handlers(),
            "ListQueuedResources": self._list_requests,
            "GetQueuedResource": lambda request: self._request(request.name).resource,
            "CreateQueuedResource": self._create_request,
            "DeleteQueuedResource": self._delete_request,
        }

    def _request(self, name: str) -> _Request:
        place(name, "queuedResources")
        if name not in self._requests:
            raise Refused("NOT_FOUND", f"Resource '{name}' was not found")
        return self._requests[name]

    def _move(self, request: _Request, state: Any, **data: Any) -> None:
        with self.changed:
            request.resource.state = tpu_v2.QueuedResourceState(state=state, **data)
            self.note(request.resource.name, Queued(state).name)

    def _slices_of(self, request: _Request) -> list[Slice]:
        return [slice_ for slice_ in self.slices.values() if slice_.node.queued_resource == request.resource.name]

    def _list_requests(self, request: Any) -> Any:
        resources = [known.resource for name, known in self._requests.items() if in_place(name, request.parent)]
        page, token = paged(resources, request)
        return tpu_v2.ListQueuedResourcesResponse(queued_resources=page, next_page_token=token)

    def _create_request(self, request: Any) -> Any:
        name = f"{request.parent}/queuedResources/{request.queued_resource_id}"
        place(name, "queuedResources")
        resource = tpu_v2.QueuedResource(request.queued_resource)
        resource.name, resource.create_time = name, datetime.now(timezone.utc)
        nodes = _nodes(resource, request.queued_resource_id)
        if name in self._requests:
            raise Refused("ALREADY_EXISTS", f"Resource '{name}' already exists")
        if not nodes:
            raise Refused("INVALID_ARGUMENT", "A queued resource needs a node spec")
        for node_id, node in nodes.items():
            self.check(request.parent, node_id, node)
            if f"{request.parent}/nodes/{node_id}" in self.slices:
                raise Refused("ALREADY_EXISTS", f"Resource '{request.parent}/nodes/{node_id}' already exists")
        queued = self._requests[name] = _Request(resource)
        self._move(queued, Queued.ACCEPTED)
        self.spawn(lambda: self._serve(queued, request.parent, nodes))
        return self.operate("create", name, lambda: resource)

    def _serve(self, request: _Request, parent: str, nodes: Mapping[str, Any]) -> None:
        """Take a request through the queue."""
        self.reach("CreateQueuedResource", lambda: request.state != Queued.ACCEPTED)
        count = sum(hosts_of(self.check(parent, node_id, node)) for node_id, node in nodes.items())
        with self.changed:
            if request.state != Queued.ACCEPTED:
                return
            if not self.has_quota:
                generation = next(iter(nodes.values())).accelerator_type.partition("-")[0].upper()
                self._fail(request, 8, _QUOTA.format(generation=generation, zone=place(parent)))
                return
            self._move(request, Queued.WAITING_FOR_RESOURCES)
            in_time = self.changed.wait_for(
                lambda: (
                    request.state != Queued.WAITING_FOR_RESOURCES
                    or ((self.has_capacity or request.granted) and self.hosts.available >= count)
                ),
                _seconds_left(request.resource),
            )
            if not in_time:
                self._fail(request, 4, "The queued resource could not be fulfilled until its valid_until constraint")
            if request.state != Queued.WAITING_FOR_RESOURCES:
                return
            self._move(request, Queued.PROVISIONING)
        with request.busy:
            try:
                for slice_ in [self._add_node(request, parent, node_id, node) for node_id, node in nodes.items()]:
                    self.provision(slice_, granted=True)
                with self.changed:
                    if request.state == Queued.PROVISIONING:
                        self._move(request, Queued.ACTIVE)
            except Refused as error:
                if request.state == Queued.PROVISIONING:
                    self._fail(request, error.code.value[0], error.message)

    def _add_node(self, request: _Request, parent: str, node_id: str, node: Any) -> Slice:
        with self.changed:
            if request.state != Queued.PROVISIONING:
                raise Refused("ABORTED", f"Resource '{request.resource.name}' was deleted")
            slice_ = self.add(parent, node_id, node)
            slice_.node.queued_resource = request.resource.name
            return slice_

    def _fail(self, request: _Request, code: int, message: str) -> None:
        data = tpu_v2.QueuedResourceState.FailedData(error={"code": code, "message": message})
        self._move(request, Queued.FAILED, failed_data=data)

    def _delete_request(self, request: Any) -> Any:
        queued = self._request(request.name)
        if queued.state == Queued.DELETING:
            raise Refused("FAILED_PRECONDITION", f"Resource '{request.name}' is being deleted")
        if not request.force and (queued.state not in _WITHOUT_NODES or self._slices_of(queued)):
            reason = f"Resource '{request.name}' is {queued.state.name} and can be deleted only with force"
            raise Refused("FAILED_PRECONDITION", reason)
        self._move(queued, Queued.DELETING)
        for slice_ in self._slices_of(queued):
            self.enter(slice_, State.DELETING)

        def delete() -> Any:
            self.reach("DeleteQueuedResource", lambda: False)
            with queued.busy:
                for slice_ in self._slices_of(queued):
                    Nodes.remove(self, slice_)
            with self.changed:
                self._requests.pop(request.name, None)
                self.note(request.name, "")
            return empty_pb2.Empty()

        return self.operate("delete", request.name, delete)

    def remove(self, slice_: Slice) -> Any:
        """A queued resource is suspended with its node."""
        request = self._requests.get(slice_.node.queued_resource)
        if request is not None and request.state in (Queued.ACTIVE, Queued.PROVISIONING):
            self._move(request, Queued.SUSPENDING)
        reply = super().remove(slice_)
        if request is not None and request.state == Queued.SUSPENDING and not self._slices_of(request):
            self._move(request, Queued.SUSPENDED)
        return reply

    # What a test asks.

    def reset(self) -> None:
        """No nodes, no queue, no calls, no failures; there are capacity and quota."""
        self.has_quota = self.publishes_host_keys = True
        with self.changed:
            for request in self._requests.values():
                request.resource.state.state = Queued.DELETING
            for slice_ in self.slices.values():
                slice_.node.state = State.DELETING
        self.join()
        for slice_ in self.slices.values():
            self.power_off(slice_)
        self.has_capacity = True
        self.slices, self._requests, self._history = {}, {}, {}
        self.forget()

    def configure(self, capacity: bool | None, quota: bool | None, host_keys: bool | None) -> None:
        with self.changed:
            self.has_capacity = self.has_capacity if capacity is None else capacity
            self.has_quota = self.has_quota if quota is None else quota
            self.publishes_host_keys = self.publishes_host_keys if host_keys is None else host_keys
            self.changed.notify_all()

    def grant(self, name: str) -> None:
        """Fulfil a queued resource that waits."""
        with self.changed:
            self._named(self._requests, name).granted = True
            self.changed.notify_all()

    def preempt(self, name: str) -> None:
        """Take a spot node away: its hosts lose their power, and its queued resource, if any, is suspended."""
        slice_ = self._named(self.slices, name)
        if not (slice_.node.scheduling_config.spot or slice_.node.scheduling_config.preemptible):
            raise ValueError(f"{name} is not a spot node")
        slice_.preempted = True
        with slice_.busy:
            self.enter(slice_, State.PREEMPTED)
            self.power_off(slice_)
        if slice_.node.queued_resource:
            self.spawn(lambda: (self.remove(slice_), None)[1])

    def set_state(self, name: str, state: str) -> None:
        self.enter(self._named(self.slices, name), State[state])

    def maintenance(self, name: str, event: str) -> None:
        with self.changed:
            self._named(self.slices, name).maintenance = event
            self.changed.notify_all()

    def workers(self, name: str) -> list[str]:
        return list(self._named(self.slices, name).hosts)

    def nodes(self) -> list[dict[str, Any]]:
        with self.changed:
            return [to_dict(slice_.node) for slice_ in self.slices.values()]

    def queued(self) -> list[dict[str, Any]]:
        with self.changed:
            return [to_dict(request.resource) for request in self._requests.values()]

    def history(self, name: str) -> list[str]:
        """The states of a node or queued resource so far, its end ("") included."""
        return next((states for known, states in self._history.items() if known.endswith(f"/{name}")), [])

    def of_host(self, host: str) -> tuple[Slice, int] | None:
        """The slice that a host belongs to, and its place among the workers."""
        for slice_ in list(self.slices.values()):
            if host in slice_.hosts:
                return slice_, slice_.hosts.index(host)
        return None

    @staticmethod
    def _named(items: Mapping[str, Any], name: str) -> Any:
        return next(item for known, item in items.items() if name in (known, known.rpartition("/")[2]))


def _nodes(resource: Any, request_id: str) -> dict[str, Any]:
    """The nodes that are asked for, by id. Raises Refused."""
    nodes: dict[str, Any] = {}
    for spec in resource.tpu.node_spec:
        many = spec.multislice_params
        if bool(spec.node_id) == bool(many.node_count) or many.node_count == 1:
            reason = "A node spec has either a node id, or multislice params with a node count above 1"
            raise Refused("INVALID_ARGUMENT", reason)
        prefix = many.node_id_prefix or request_id
        ids = [spec.node_id] if spec.node_id else [f"{prefix}-{index}" for index in range(many.node_count)]
        for node_id in ids:
            nodes[node_id] = tpu_v2.Node(spec.node)
            if "spot" in resource:
                nodes[node_id].scheduling_config.spot = True
    return nodes


def _seconds_left(resource: Any) -> float | None:
    policy = resource.queueing_policy
    until: datetime | None = None
    if "valid_until_duration" in policy:
        until = datetime.now(timezone.utc) + policy.valid_until_duration
    elif "valid_until_time" in policy:
        until = policy.valid_until_time
    if until is None:
        return None
    return min(max((until - datetime.now(timezone.utc)) / timedelta(seconds=1), 0.0), threading.TIMEOUT_MAX)
