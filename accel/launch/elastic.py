"""The rendezvous of torch (c10d), for worlds that may grow.

https://docs.pytorch.org/docs/stable/elastic/rendezvous.html
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

from torch._C._distributed_c10d import Store
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    registry,
)
from torch.distributed.elastic.rendezvous.utils import _matches_machine_hostname

from .peers import Peers


class ElasticRendezvous(Peers):
    """A c10d rendezvous whose nodes report failures to each other, and restart or end together.

    guessed: True if `is_host` was not configured but derived, perhaps by several launchers on one machine.

    Raises torch's RendezvousError if the nodes do not meet.
    """

    may_shrink = True

    def __init__(
        self,
        parameters: RendezvousParameters,
        *,
        guessed: bool,
        lost_after_s: float,
        stay_s: float,
        ending: Callable[[], bool],
    ) -> None:
        super().__init__(lost_after_s=lost_after_s, stay_s=stay_s, ending=ending)
        # A shared store would serve all attempts, and keep the addresses of an earlier attempt's dead ranks.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        self._hosts_store = bool(parameters.get_as_bool("is_host"))
        try:
            self._handler: RendezvousHandler = registry.get_rendezvous_handler(parameters)
        except RendezvousConnectionError:
            if not (guessed and self._hosts_store):
                raise
            self._hosts_store, parameters.config["is_host"] = False, "0"  # another launcher on this machine hosts it
            self._handler = registry.get_rendezvous_handler(parameters)
        self._attempt_store: Store | None = None

    def next_rendezvous(self) -> RendezvousInfo:
        self._attempt_store, self._nodes = None, 1  # this node is alone until the rendezvous
        info = self._handler.next_rendezvous()
        self._node_rank, self._nodes, self._attempt_store = info.rank, info.world_size, info.store
        info.store.set(f"node/{info.rank}", socket.gethostname())
        self._beats.clear()
        self._lost_nodes.clear()
        return info

    def num_nodes_waiting(self) -> int:
        """Return 0 after a failure: the node that waits then has reported it and is restarting."""
        waiting = self._handler.num_nodes_waiting()
        return 0 if waiting and self.failure_elsewhere() is not None else waiting

    def leave(self) -> bool:
        return self._attempt_store is not None and super().leave()

    def _store(self) -> Store:
        assert self._attempt_store is not None
        return self._attempt_store

    def get_backend(self) -> str:
        return self._handler.get_backend()

    @property
    def use_agent_store(self) -> bool:
        return self._handler.use_agent_store

    def is_closed(self) -> bool:
        return self._handler.is_closed()

    def set_closed(self) -> None:
        self._handler.set_closed()  # type: ignore[no-untyped-call]

    def get_run_id(self) -> str:
        return self._handler.get_run_id()

    def shutdown(self) -> bool:
        return self._handler.shutdown()


def is_this_machine(address: str, *, resolve: bool) -> bool:
    """Return True if `address` is this machine's.

    Pass `resolve=False` for a pod's name: name servers cache "no such name" for a while.
    """
    own_names = (address, address.partition(".")[0])
    return socket.gethostname() in own_names or (resolve and _matches_machine_hostname(address))
