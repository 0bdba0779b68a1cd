"""Static rendezvous that honours the node rank it is given, and through which a gang of nodes fails and restarts as one.

torch's own (`StaticTCPRendezvous`) reuses one store for every attempt, blocks where no signal can be handled, and
knows nothing of the other nodes' failures. Here every attempt has a store and a port of its own; the stores live in
the agent of node 0; waiting is done in short slices.
"""

from __future__ import annotations

import errno
import json
import socket
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed import DistNetworkError, DistStoreError, PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from .errors import LaunchError, RendezvousFailed

DEFAULT_TIMEOUT_S = 300.0
_SLICE_S = 0.25
_STORE_TIMEOUT = timedelta(seconds=60)


class GangRendezvous(RendezvousHandler):
    """The meeting of `nodes` agents at node 0's `address:port`; `port` 0 (one node only) takes any that is free.

    interrupted: called between slices of waiting; raises to give up.
    """

    def __init__(
        self,
        *,
        address: str,
        port: int,
        node_rank: int,
        nodes: int,
        run_id: str,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        interrupted: Callable[[], None] = lambda: None,
    ) -> None:
        self._address, self._port = address, port
        self._node_rank, self._nodes, self._run_id = node_rank, nodes, run_id
        self._timeout_s = timeout_s
        self._interrupted = interrupted
        self._token = f"{socket.gethostname()} {uuid.uuid4().hex}"
        self._control: Store | None = None  # outlives the attempts
        self._served: list[TCPStore] = []  # held: a store lives as long as its object
        self.attempt = -1

    # What the elastic agent asks for.

    def get_backend(self) -> str:
        return "static"

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Meets all nodes for the next attempt. Raises RendezvousFailed with the nodes that did not come."""
        self.attempt += 1
        deadline = time.monotonic() + self._timeout_s
        if self.attempt == 0:
            first = self._serve(self._port) if self._node_rank == 0 else self._connect(deadline)
            self._port = first.port
            self._control = PrefixStore(f"accel/{self._run_id}", first)
        port = self._port_of_attempt(deadline)
        if self._nodes > 1:
            self._meet(deadline)
        return RendezvousInfo(self._store(), self._node_rank, self._nodes, RendezvousStoreInfo(self._address, port))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Nothing to close: the world is fixed."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        self._served.clear()
        return True

    # What the gang's agents tell each other.

    def announce_failure(self, failure: dict[str, Any]) -> dict[str, Any]:
        """Makes `failure` the gang's, unless another node was first. Returns the gang's."""
        if self._nodes == 1:
            return failure
        won = self._store().compare_set("failure", "", json.dumps(failure))
        return dict(json.loads(won))

    def announce_success(self) -> None:
        if self._nodes > 1:
            self._store().add("succeeded", 1)

    def failure_elsewhere(self) -> dict[str, Any] | None:
        """The gang's failure in this attempt, if any node has told of one."""
        if self._nodes == 1 or not self._store().check(["failure"]):
            return None
        return dict(json.loads(self._store().get("failure")))

    def all_succeeded(self) -> bool:
        return self._nodes == 1 or self._store().add("succeeded", 0) >= self._nodes

    def leave(self) -> None:
        """Node 0 goes last: its agent serves the store from which the others learn how it ended."""
        if self._nodes == 1 or self._control is None:
            return
        gone = self._control.add("gone", 1)
        deadline = time.monotonic() + 10
        while self._node_rank == 0 and gone < self._nodes and time.monotonic() < deadline:
            time.sleep(0.02)
            gone = self._control.add("gone", 0)

    # Meeting.

    def _store(self) -> PrefixStore:
        assert self._control is not None
        return PrefixStore(f"attempt-{self.attempt}", self._control)

    def _serve(self, port: int) -> TCPStore:
        try:
            store = TCPStore(self._address, port, None, True, _STORE_TIMEOUT, wait_for_workers=False)
        except (DistNetworkError, RuntimeError) as error:
            raise LaunchError(self._cannot_serve(port, error)) from None
        self._served.append(store)
        return store

    def _cannot_serve(self, port: int, error: Exception) -> str:
        if "EADDRINUSE" in str(error) or "address already in use" in str(error).lower():
            return (
                f"port {port} (--main_process_port) is in use on this machine, by another job perhaps: "
                "name a free one, or 0 on a single machine for any"
            )
        return f"node 0 cannot serve the rendezvous at {self._address}:{port}: {error}"

    def _connect(self, deadline: float) -> TCPStore:
        self._reach_node_0(deadline)
        return TCPStore(self._address, self._port, None, False, _STORE_TIMEOUT, wait_for_workers=False)

    def _reach_node_0(self, deadline: float) -> None:
        """Knocks until node 0 answers: it may start later than this node, and its name may resolve later still."""
        problem = ""
        while time.monotonic() < deadline:
            self._interrupted()
            try:
                socket.create_connection((self._address, self._port), timeout=2).close()
                return
            except OSError as error:
                problem = error.strerror or str(error)
                time.sleep(_SLICE_S)
        raise RendezvousFailed(
            f"node {self._node_rank} could not reach node 0 at {self._address}:{self._port} "
            f"({_resolved(self._address)}) within {self._timeout_s:g} s: {problem}. "
            "Is the launch running there, and the port open between the machines?"
        )

    def _port_of_attempt(self, deadline: float) -> int:
        if self.attempt == 0:
            return self._port
        if self._node_rank == 0:
            port = self._serve(0).port
            self._store().set("port", str(port))
            return port
        self._wait(["port"], deadline)
        return int(self._store().get("port"))

    def _meet(self, deadline: float) -> None:
        holder = self._store().compare_set(f"node/{self._node_rank}", "", self._token).decode()
        if holder != self._token:
            raise LaunchError(
                f"machine rank {self._node_rank} is taken by {holder.split()[0]}: "
                "give every machine a --machine_rank of its own"
            )
        self._wait([f"node/{rank}" for rank in range(self._nodes)], deadline)

    def _wait(self, keys: list[str], deadline: float) -> None:
        store = self._store()
        while True:
            self._interrupted()
            try:
                if store.check(keys):
                    return
            except (DistStoreError, DistNetworkError) as error:
                raise RendezvousFailed(f"node {self._node_rank} lost node 0 at {self._address}: {error}") from None
            if time.monotonic() >= deadline:
                missing = [key.rpartition("/")[2] for key in keys if not store.check([key])]
                raise RendezvousFailed(
                    f"of {self._nodes} nodes, node {', '.join(missing)} did not come to "
                    f"{self._address}:{self._port} within {self._timeout_s:g} s"
                )
            time.sleep(0.02)


def _resolved(name: str) -> str:
    try:
        found = sorted({info[4][0] for info in socket.getaddrinfo(name, None)}, key=str)
    except OSError as error:
        return f"the name does not resolve: {error.strerror or errno.errorcode.get(error.errno or 0, error)}"
    return "resolves to " + ", ".join(map(str, found))
