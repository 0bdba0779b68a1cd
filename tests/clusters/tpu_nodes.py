"""Nodes of the tests' Cloud TPU API (v2): their states, their checks, and the hosts that they are made of.

https://docs.cloud.google.com/tpu/docs/reference/rest/v2/projects.locations.nodes. Messages about capacity and quota are
those that the service sends: a stockout is the error of the operation, an exceeded quota that of the call.
"""

from __future__ import annotations

import itertools
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from google.cloud import tpu_v2
from google.protobuf import empty_pb2

from .tpu import PROJECT, SERVICE_ACCOUNT, ZONES
from .tpu_operations import Operations, Refused
from .tpu_slices import SliceHosts, UnknownAccelerator, accelerator, hosts_of

State = tpu_v2.Node.State
_NO_CAPACITY = (
    'There is no more capacity in the zone "{zone}"; you can try in another zone where Cloud TPU Nodes are offered '
    "(see https://cloud.google.com/tpu/docs/regions) [EID: 0x1]"
)
_QUOTA = "Quota limit 'TPU{generation}PerProjectPerZoneForTPUAPI' has been exceeded. Limit: 0 in zone {zone}."
_BAD = "Cloud TPU received a bad request. {} [EID: 0x1]"
_NO_ACCELERATOR = "the accelerator {} was not found in zone {}"
_ID = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
_LABEL = re.compile(r"[a-z][a-z0-9_-]{0,62}"), re.compile(r"[a-z0-9_-]{0,63}")
_RUNTIMES = re.compile(r"tpu-(ubuntu2204-base|vm-(base|v4-base|tf-.+|pt-.+))|v2-alpha-tpu(v5|v5-lite|v6e|v5p)?")
_UPDATABLE = {"description", "labels", "metadata", "tags", "data_disks", "network_config.enable_external_ips"}
_PAGE = 100


@dataclass
class Slice:
    """A node and its hosts, in the order of its network endpoints. `busy` is held by what powers them on or off."""

    node: Any
    hosts: list[str] = field(default_factory=list)
    preempted: bool = False
    maintenance: str = "NONE"
    updating: bool = False
    busy: threading.RLock = field(default_factory=threading.RLock)  # type: ignore[type-arg, unused-ignore]


class Nodes(Operations):
    """All nodes of the project."""

    def __init__(self, hosts: SliceHosts) -> None:
        super().__init__()
        self.hosts = hosts
        self.slices: dict[str, Slice] = {}
        self.has_capacity = self.has_quota = self.publishes_host_keys = True
        self._ids = itertools.count(1001)
        self._history: dict[str, list[str]] = {}

    def handle(self, method: str, request: Any) -> Any:
        return self.handlers()[method](request)

    def handlers(self) -> Mapping[str, Callable[[Any], Any]]:
        return {
            "ListNodes": self._list,
            "GetNode": lambda request: self.find(request.name).node,
            "CreateNode": self._create,
            "DeleteNode": lambda request: self._delete(self.find(request.name)),
            "StopNode": lambda request: self._stop(self.find(request.name)),
            "StartNode": lambda request: self._start(self.find(request.name)),
            "UpdateNode": self._update,
            "GetGuestAttributes": self._guest_attributes,
            "GetOperation": self.get_operation,
        }

    def find(self, name: str) -> Slice:
        place(name, "nodes")
        if name not in self.slices:
            raise Refused("NOT_FOUND", f"Resource '{name}' was not found")
        return self.slices[name]

    def enter(self, slice_: Slice, state: Any) -> None:
        with self.changed:
            slice_.node.state = state
            self.note(slice_.node.name, State(state).name)

    def note(self, name: str, state: str) -> None:
        self._history.setdefault(name, []).append(state)
        self.changed.notify_all()

    # Calls.

    def _list(self, request: Any) -> Any:
        nodes = [slice_.node for slice_ in self.slices.values() if in_place(slice_.node.name, request.parent)]
        page, token = paged(nodes, request)
        return tpu_v2.ListNodesResponse(nodes=page, next_page_token=token)

    def _create(self, request: Any) -> Any:
        zone = place(request.parent)
        slice_ = self.add(request.parent, request.node_id, request.node)
        generation = slice_.node.accelerator_type.partition("-")[0]
        if not self.has_quota:
            del self.slices[slice_.node.name]
            raise Refused("RESOURCE_EXHAUSTED", _QUOTA.format(generation=generation.upper(), zone=zone))
        return self.operate("create", slice_.node.name, lambda: self.provision(slice_))

    def add(self, parent: str, node_id: str, given: Any) -> Slice:
        """A new node, CREATING. Raises Refused."""
        name = f"{parent}/nodes/{node_id}"
        node = tpu_v2.Node(given)
        node.accelerator_type = self.check(parent, node_id, node)
        if name in self.slices:
            raise Refused("ALREADY_EXISTS", f"Resource '{name}' already exists")
        node.name, node.id, node.create_time = name, next(self._ids), datetime.now(timezone.utc)
        node.health, node.api_version = tpu_v2.Node.Health.HEALTHY, tpu_v2.Node.ApiVersion.V2
        node.service_account.email = node.service_account.email or SERVICE_ACCOUNT
        node.network_config.network = node.network_config.network or "default"
        slice_ = self.slices[name] = Slice(node)
        self.enter(slice_, State.CREATING)
        return slice_

    def check(self, parent: str, node_id: str, node: Any) -> str:
        """The accelerator type of a node that may be. Raises Refused."""
        zone = place(parent)
        if not _ID.fullmatch(node_id):
            raise Refused("INVALID_ARGUMENT", _BAD.format(f'the node id "{node_id}" does not match {_ID.pattern}'))
        config = node.accelerator_config
        shaped = config.type_ != tpu_v2.AcceleratorConfig.Type.TYPE_UNSPECIFIED or bool(config.topology)
        if shaped == bool(node.accelerator_type):
            raise Refused("INVALID_ARGUMENT", _BAD.format("exactly one of accelerator type and config must be set"))
        try:
            generation, kind = accelerator(node.accelerator_type, config.type_.name, config.topology)
            hosts = hosts_of(kind)
        except UnknownAccelerator as error:
            raise Refused("INVALID_ARGUMENT", _BAD.format(_NO_ACCELERATOR.format(error, zone))) from None
        if generation not in ZONES[zone]:
            raise Refused("INVALID_ARGUMENT", _BAD.format(_NO_ACCELERATOR.format(kind, zone)))
        if not _RUNTIMES.fullmatch(node.runtime_version):
            reason = f'the runtime version "{node.runtime_version}" was not found in zone {zone}'
            raise Refused("INVALID_ARGUMENT", _BAD.format(reason))
        scheduling = node.scheduling_config
        if scheduling.reserved and (scheduling.spot or scheduling.preemptible):
            raise Refused("INVALID_ARGUMENT", _BAD.format("a reserved node cannot be spot or preemptible"))
        if hosts > 1 and any(disk.mode == tpu_v2.AttachedDisk.DiskMode.READ_WRITE for disk in node.data_disks):
            raise Refused("INVALID_ARGUMENT", _BAD.format("several hosts attach disks in read-only mode"))
        _check_labels(node.labels)
        return kind

    def _delete(self, slice_: Slice) -> Any:
        if slice_.node.state == State.DELETING:
            raise Refused("FAILED_PRECONDITION", f"Resource '{slice_.node.name}' is being deleted")
        self.enter(slice_, State.DELETING)
        return self.operate("delete", slice_.node.name, lambda: self.remove(slice_))

    def _stop(self, slice_: Slice) -> Any:
        _in_state(slice_, State.READY)
        self.enter(slice_, State.STOPPING)

        def stop() -> Any:
            with slice_.busy:
                self.hosts.stop(slice_.hosts)
            self.enter(slice_, State.STOPPED)
            return slice_.node

        return self.operate("stop", slice_.node.name, stop)

    def _start(self, slice_: Slice) -> Any:
        _in_state(slice_, State.STOPPED)
        self.enter(slice_, State.STARTING)

        def start() -> Any:
            with slice_.busy:
                self.hosts.start(slice_.hosts)
            self.enter(slice_, State.READY)
            return slice_.node

        return self.operate("start", slice_.node.name, start)

    def _update(self, request: Any) -> Any:
        slice_, paths = self.find(request.node.name), set(request.update_mask.paths)
        if not paths or paths - _UPDATABLE:
            raise Refused("INVALID_ARGUMENT", _BAD.format(f"update mask: {', '.join(sorted(paths - _UPDATABLE))}"))
        _in_state(slice_, State.READY)
        if slice_.updating:
            raise Refused("ABORTED", "There is another operation in progress on the node")
        if "labels" in paths:
            _check_labels(request.node.labels)
        slice_.updating = True

        def update() -> Any:
            self.reach("UpdateNode", lambda: False)
            with slice_.busy, self.changed:
                slice_.updating = False
                for path in paths:
                    holder, _, last = path.rpartition(".")
                    source, target = request.node, slice_.node
                    if holder:
                        source, target = getattr(source, holder), getattr(target, holder)
                    setattr(target, last, getattr(source, last))
                if slice_.hosts:
                    self.hosts.authorize(slice_.hosts, slice_.node.metadata.get("ssh-keys", ""))
            return slice_.node

        return self.operate("update", slice_.node.name, update)

    def _guest_attributes(self, request: Any) -> Any:
        slice_ = self.find(request.name)
        workers = [int(worker) for worker in request.worker_ids if worker] or list(range(len(slice_.hosts)))
        if not set(workers) <= set(range(len(slice_.hosts) or 1)):
            raise Refused("INVALID_ARGUMENT", _BAD.format(f"workers {', '.join(map(str, workers))}"))
        namespace = request.query_path.strip("/").partition("/")[0]
        attributes = []
        for worker in workers if slice_.hosts else ():
            published = self.hosts.guest_attributes(slice_.hosts[worker])
            items = [
                tpu_v2.GuestAttributesEntry(namespace=place_, key=key, value=value)
                for key, value in published.items()
                for place_ in ["hostkeys" if key.startswith("ssh-") else "guestInventory"]
                if namespace in ("", place_) and (self.publishes_host_keys or place_ != "hostkeys")
            ]
            value = tpu_v2.GuestAttributesValue(items=items)
            attributes.append(tpu_v2.GuestAttributes(query_path=request.query_path, query_value=value))
        return tpu_v2.GetGuestAttributesResponse(guest_attributes=attributes)

    # What operations do.

    def provision(self, slice_: Slice, *, granted: bool = False) -> Any:
        """Power on the hosts of a node, which is READY then. Raises Refused."""
        node = slice_.node
        self.reach("CreateNode", lambda: node.state != State.CREATING)
        with self.changed:
            self._faults.check("provision", node.name, "")  # leaves the node, CREATING
        with slice_.busy:
            if node.state == State.CREATING:
                count = hosts_of(node.accelerator_type)
                hosts = self.hosts.take(count) if self.has_capacity or granted else None
                if hosts is None:
                    with self.changed:
                        self.slices.pop(node.name, None)
                        self.note(node.name, "")
                    raise Refused("RESOURCE_EXHAUSTED", _NO_CAPACITY.format(zone=place(node.name, "nodes")))
                slice_.hosts = hosts
                self.hosts.boot(hosts, dict(node.metadata))
            with self.changed:
                if node.state != State.CREATING:
                    raise Refused("ABORTED", f"Resource '{node.name}' was deleted")
                node.network_endpoints = [self._endpoint(node, host) for host in slice_.hosts]
                self.enter(slice_, State.READY)
        return node

    def _endpoint(self, node: Any, host: str) -> Any:
        address = self.hosts.address(host)
        access = tpu_v2.AccessConfig(external_ip=address) if node.network_config.enable_external_ips else None
        return tpu_v2.NetworkEndpoint(ip_address=address, port=8470, access_config=access)

    def remove(self, slice_: Slice) -> Any:
        """Power off the hosts of a node that is DELETING; the node is gone then."""
        self.reach("DeleteNode", lambda: False)
        self.power_off(slice_)
        with self.changed:
            self.slices.pop(slice_.node.name, None)
            self.note(slice_.node.name, "")
        return empty_pb2.Empty()

    def power_off(self, slice_: Slice) -> None:
        """Power off for good; the hosts may be another slice's then."""
        with slice_.busy:
            hosts, slice_.hosts = slice_.hosts, []
            self.hosts.free(hosts)


def place(name: str, kind: str = "") -> str:
    """The zone of a location's name, or of the name of something there. Raises Refused."""
    match = re.fullmatch(rf"projects/([^/]+)/locations/([^/]+){f'/{kind}/[^/]+' if kind else ''}", name)
    if not match:
        raise Refused("INVALID_ARGUMENT", _BAD.format(f'the resource name "{name}" is malformed'))
    if match[1] != PROJECT:
        raise Refused("PERMISSION_DENIED", f"Permission denied on resource project {match[1]}.")
    if match[2] not in ZONES:
        raise Refused("INVALID_ARGUMENT", _BAD.format(f"the location {match[2]} was not found"))
    return match[2]


def in_place(name: str, parent: str) -> bool:
    """Whether a resource belongs to a location, or to all of the project's (`-`)."""
    if parent.endswith("/locations/-"):
        return name.startswith(parent.removesuffix("-"))
    place(parent)
    return name.startswith(f"{parent}/")


def paged(items: list[Any], request: Any) -> tuple[list[Any], str]:
    """A page of a list, and the token of the next one."""
    first = int(request.page_token or 0)
    last = first + (request.page_size or _PAGE)
    return items[first:last], str(last) if last < len(items) else ""


def _in_state(slice_: Slice, state: Any) -> None:
    if slice_.node.state != state:
        raise Refused("FAILED_PRECONDITION", f"Resource '{slice_.node.name}' is {slice_.node.state.name}")


def _check_labels(labels: Mapping[str, str]) -> None:
    for key, value in labels.items():
        if not (_LABEL[0].fullmatch(key) and _LABEL[1].fullmatch(value)):
            raise Refused("INVALID_ARGUMENT", _BAD.format(f'the label "{key}={value}" is invalid'))
