"""A static rendezvous with fixed node ranks, through which the nodes of a gang fail and restart as one.

torch's own (`StaticTCPRendezvous`) reuses one store for every attempt, blocks where no signal can be handled,
and does not know of other nodes' failures. Here every attempt has its own store and port; the stores live in
node 0's agent; waits are short slices.
"""

from __future__ import annotations

import errno
import json
import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import DistNetworkError, DistStoreError
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo

from schedulers.node.listen import listen

from .errors import LaunchError, RendezvousFailed
from .incarnation import Incarnation, latest_attempt
from .peers import LINGER_S, LOST_AFTER_S, Peers, StoreSilent, StoreWithTimeout

LOOPBACK = "127.0.0.1"
DEFAULT_TIMEOUT_S = 300.0
_SLICE_S = 0.25
_BACKLOG = 2048  # of connections that a store of one machine has not accepted yet
_SERVICE_S = 30.0
_REMEDY = "Is the launch running there, and the port open between the machines?"
_STORE_TIMEOUT = timedelta(seconds=60)
# Raised by queries to a store that is gone or does not respond.
_STORE_ERRORS = (DistStoreError, DistNetworkError, StoreSilent)


class GangRendezvous(Peers):
    """The rendezvous of `nodes` agents at node 0's `address:port`; `port` 0 (one node only) means any free one.

    A single node uses its loopback address: every process that can connect to a store can write to it.

    interrupted: called between slices of waiting; raises to give up.
    names:       the nodes' names by rank, if known, for messages.
    incarnation: this start of the launcher. A later one of the same node inherits its rank.
    notify:      prints a message.
    service:     a name of node 0 that exists before node 0 does; `address` is tried only if it does not respond.
    own_address: an address of this node that the others reach. The ranks use node 0's instead of `address`.
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
        lost_after_s: float = LOST_AFTER_S,
        stay_s: float = LINGER_S,
        interrupted: Callable[[], None] = lambda: None,
        names: Sequence[str] = (),
        ending: Callable[[], bool] = lambda: False,
        incarnation: Incarnation | None = None,
        notify: Callable[[str], None] = lambda _: None,
        service: str = "",
        own_address: str = "",
    ) -> None:
        super().__init__(lost_after_s=lost_after_s, stay_s=stay_s, ending=ending)
        self._address, self._port = address if nodes > 1 else LOOPBACK, port
        self._node_rank, self._nodes, self._run_id = node_rank, nodes, run_id
        self._hosts_store = node_rank == 0
        self._timeout_s = timeout_s
        self._interrupted = interrupted
        self._names = names
        self._rejected = False  # another node has this one's rank: this one cannot end the gang
        self._notify = notify
        self._service, self._own_address = service, own_address
        self._incarnation = incarnation or Incarnation()
        self.first_attempt = self._incarnation.attempt  # of the job; all nodes agree on it in the rendezvous
        self._control: Store | None = None  # outlives the attempts
        self._served: list[TCPStore] = []  # referenced, because a store lives as long as its object
        self._joined = False  # in this attempt
        self._address_for_ranks = self._address
        self.attempt = -1

    # Methods that the elastic agent calls.

    def get_backend(self) -> str:
        return "static"

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet all nodes for the next attempt. Raises RendezvousFailed, naming the missing nodes."""
        self.attempt += 1
        self._joined = False
        deadline = time.monotonic() + self._timeout_s
        if self.attempt == 0:
            self._open(deadline)
        port = self._port_of_attempt(deadline)
        if self._nodes > 1:
            while not self._join(deadline):
                self._open(deadline)  # the previous attempt's store is gone
            self._wait([f"node/{rank}" for rank in range(self._nodes)], deadline)
            self._agree_on_attempt()
        self._joined = True
        self._beats.clear()
        master = RendezvousStoreInfo(self._address_for_ranks, port)
        return RendezvousInfo(self._store(), self._node_rank, self._nodes, master)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Do nothing: the world is fixed."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        self._served.clear()
        return True

    # The gang's state, see `Peers`.

    def beat(self) -> None:
        if self._control is not None:
            super().beat()

    def leave(self) -> bool:
        if self._nodes == 1 or self._control is None or self._rejected:
            return self._node_rank == 0
        if not self._joined:
            self._abort(f"node {self._node_rank} was terminated before all nodes had joined")
        return super().leave()

    def _abort(self, reason: str) -> None:
        store = self._store()
        self._query(lambda: store.compare_set("gave up", "", reason))

    # Meeting.

    def _store(self, attempt: int | None = None) -> PrefixStore:
        assert self._control is not None
        return PrefixStore(f"attempt-{self.attempt if attempt is None else attempt}", self._control)

    def _open(self, deadline: float) -> None:
        first = self._serve(self._port, deadline) if self._node_rank == 0 else self._connect(deadline)
        self._port = first.port
        self._control = PrefixStore(f"accel/{self._run_id}", first)
        self._client = StoreWithTimeout(self._lost_after_s, self._ending)
        if self._node_rank == 0 and self._nodes > 1 and self._own_address:
            self._control.set("address", self._own_address)

    def _serve(self, port: int, deadline: float) -> TCPStore:
        listener = self._listen(port)
        port = listener.getsockname()[1]
        # Node 0 connects by its public address, as its ranks will: a wrong one fails here instead of hanging there.
        address = self._reach_node_0(port, deadline)
        store = TCPStore(
            address, port, None, True, _STORE_TIMEOUT, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        self._served.append(store)
        return store

    def _listen(self, port: int) -> socket.socket:
        try:
            return listen(port) if self._nodes > 1 else socket.create_server((LOOPBACK, port), backlog=_BACKLOG)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise LaunchError(
                    f"node 0 cannot listen on port {port} (--main_process_port): {error.strerror}"
                ) from None
            raise LaunchError(
                f"port {port} (--main_process_port) is in use on this machine, by another job perhaps: "
                "choose a free one, or 0 on a single machine for any"
            ) from None

    def _connect(self, deadline: float) -> TCPStore:
        address = self._reach_node_0(self._port, deadline)
        return TCPStore(address, self._port, None, False, _STORE_TIMEOUT, wait_for_workers=False)

    def _reach_node_0(self, port: int, deadline: float) -> str:
        subject = f"node {self._node_rank}" if self._node_rank else "this machine, which is node 0,"
        remedy = _REMEDY if self._node_rank else "--main_process_ip must be a name or address of this machine"
        return reach_node_0(
            self._addresses, self._address, port, self._timeout_s, deadline, self._interrupted, subject, remedy
        )

    def _addresses(self, waited_s: float) -> Sequence[str]:
        """Return the addresses of node 0 to try. A pod's name is tried late: name servers cache "no such name"."""
        if self._nodes == 1:
            return [self._address]
        if self._node_rank == 0:
            return [self._own_address or self._address]
        if not self._service:
            return [self._address]
        return [self._service] if waited_s < _SERVICE_S else [self._service, self._address]

    def _port_of_attempt(self, deadline: float) -> int:
        if self.attempt == 0:
            return self._port
        if self._node_rank == 0:
            port = self._serve(0, deadline).port
            self._store().set("port", str(port))
            return port
        self._wait(["port"], deadline)
        store = self._store()
        return int(self._query(lambda: store.get("port")))

    def _join(self, deadline: float) -> bool:
        """Claim this node's rank. Return False if this launcher's predecessor joined the store's attempt.

        Node 0 then ends with that attempt, restarts, and opens another store.
        """
        store, claim = self._store(), self._incarnation.encode()
        key, keys = f"node/{self._node_rank}", [f"node/{rank}" for rank in range(self._nodes)]
        try:
            holder = self._query(lambda: store.compare_set(key, "", claim)).decode()
            if holder == claim:
                return True
            predecessor = Incarnation.decode(holder)
            if not self._incarnation.replaces(predecessor):
                self._rejected = True
                raise LaunchError(
                    f"machine rank {self._node_rank} is taken by {predecessor.host}: "
                    "give every machine a --machine_rank of its own"
                )
            if not self._query(lambda: store.check(keys) or store.check(["gave up"])):
                # No rank has started.
                return self._query(lambda: store.compare_set(key, holder, claim)).decode() == claim
            self._end_predecessor(predecessor.host, deadline)
        except _STORE_ERRORS:
            self._interrupted()
            if self.attempt:
                raise
        return False

    def _agree_on_attempt(self) -> None:
        """Agree with the other nodes on the job's attempt and on node 0's address."""
        control = self._control
        if self.attempt == 0 and control is not None:
            store, keys = self._store(), [f"node/{rank}" for rank in range(self._nodes)]
            try:
                nodes = self._query(lambda: store.multi_get(keys))
                if self._query(lambda: control.check(["address"])):
                    self._address_for_ranks = self._query(lambda: control.get("address")).decode()
            except _STORE_ERRORS as error:
                raise self._node_0_lost(error) from None
            self.first_attempt = latest_attempt([Incarnation.decode(node.decode()) for node in nodes])

    def _node_0_lost(self, error: Exception) -> RendezvousFailed:
        return RendezvousFailed(f"node {self._node_rank} lost node 0 at {self._address}: {error}")

    def _end_predecessor(self, host: str, deadline: float) -> None:
        """End the attempt that this launcher's predecessor joined, and wait until its store is gone."""
        failure = {
            "rank": None, "node": self._node_rank, "host": host, "attempt": None, "exit_code": 1,
            "reason": "node_failure", "how": "was started again", "message": "", "time": time.time(), "final": True,
        }  # fmt: skip
        store = self._query(self._running_store)
        self._query(lambda: store.compare_set("failure", "", json.dumps(failure)))
        self._query(lambda: store.set(f"gone/{self._node_rank}", ""))
        self._notify(f"node {self._node_rank} restarted and is waiting for node 0 to end the previous attempt")
        while time.monotonic() < deadline:
            self._interrupted()
            self._query(lambda: store.check(["gone/0"]))
            time.sleep(_SLICE_S)
        raise RendezvousFailed(
            f"node {self._node_rank} restarted, but node 0 at {self._address}:{self._port} did not "
            f"end the previous attempt within {self._timeout_s:g} s"
        )

    def _running_store(self) -> PrefixStore:
        """Return the running attempt's store, perhaps a later attempt's: the launchers may have restarted ranks."""
        attempt = self.attempt
        while self._store(attempt + 1).check(["node/0"]):
            attempt += 1
        return self._store(attempt)

    def _wait(self, keys: list[str], deadline: float) -> None:
        store = self._store()
        while True:
            self._interrupted()
            try:
                if self._query(lambda: store.check(keys)):
                    return
                if self._query(lambda: store.check(["gave up"])):
                    raise RendezvousFailed(self._query(lambda: store.get("gave up")).decode())
                failure = self.failure_elsewhere()
                if failure is not None:
                    raise RendezvousFailed(f"node {failure['node']} ({failure['host']}) {failure['how']}")
            except _STORE_ERRORS as error:
                self._interrupted()
                raise self._node_0_lost(error) from None
            if time.monotonic() >= deadline:
                missing = [self._node_label(int(key.rpartition("/")[2])) for key in keys if not store.check([key])]
                reason = (
                    f"node {', '.join(missing)} of {self._nodes} nodes did not join at "
                    f"{self._address}:{self._port} within {self._timeout_s:g} s"
                )
                self._abort(reason)
                raise RendezvousFailed(reason)
            time.sleep(0.02)

    def _node_label(self, rank: int) -> str:
        return f"{rank} ({self._names[rank]})" if rank < len(self._names) else str(rank)


def reach_node_0(
    addresses: Callable[[float], Sequence[str]],
    name: str,
    port: int,
    timeout_s: float,
    deadline: float,
    interrupted: Callable[[], None],
    subject: str = "this machine",
    remedy: str = _REMEDY,
) -> str:
    """Connect until node 0 responds, since it may start later than this node. Return the address that responded.

    `addresses` returns the candidates after a number of seconds. Raises RendezvousFailed.
    """
    started_at = time.monotonic()
    while True:
        for address in addresses(time.monotonic() - started_at):
            interrupted()
            try:
                socket.create_connection((address, port), timeout=2).close()
                return address
            except OSError as error:
                problem = error.strerror or str(error)
        if time.monotonic() >= deadline:
            break
        time.sleep(_SLICE_S)
    raise RendezvousFailed(
        f"{subject} could not reach node 0 at {name}:{port} ({_describe_resolution(name)}) within {timeout_s:g} s: "
        f"{problem}. {remedy}"
    )


def _describe_resolution(name: str) -> str:
    try:
        addresses = sorted({info[4][0] for info in socket.getaddrinfo(name, None)}, key=str)
    except OSError as error:
        return f"the name does not resolve: {error.strerror or errno.errorcode.get(error.errno or 0, error)}"
    return "resolves to " + ", ".join(map(str, addresses))
