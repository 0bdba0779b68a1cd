"""What the agents of a gang's nodes tell each other in one attempt, through the store in which they met."""

from __future__ import annotations

import abc
import json
import time
from collections.abc import Callable
from typing import Any, TypeVar

from torch._C._distributed_c10d import Store
from torch.distributed.elastic.rendezvous import RendezvousHandler

from .store_client import Patience

T = TypeVar("T")

LOST_AFTER_S = 30.0
STAY_S = 10.0
_BEAT_S = 1.0


class Peers(RendezvousHandler):
    """A rendezvous whose nodes fail and end as one.

    lost_after_s: how long another node may be silent.
    stay_s:       how long the node that keeps the store, told to end, stays for the others to learn of it.
    ending:       whether this node has been told to end.
    """

    may_shrink = False  # the gang goes on without a node that has gone, if restarts are left
    _node_rank, _nodes = 0, 1
    _keeps_store = True

    def __init__(self, *, lost_after_s: float, stay_s: float, ending: Callable[[], bool]) -> None:
        self._lost_after_s, self._stay_s, self._ending = lost_after_s, stay_s, ending
        self._patience = Patience(lost_after_s, ending)
        self._next_beat = 0.0
        self._heard: dict[int, tuple[int, float]] = {}  # node -> its beats, and when they last became more
        self._lost: set[int] = set()

    @abc.abstractmethod
    def _store(self) -> Store:
        """The attempt's, where each node has `node/RANK`, which begins with its host's name."""

    def announce_failure(self, failure: dict[str, Any]) -> dict[str, Any]:
        """Makes `failure` the gang's, unless another node was first. Returns the gang's."""
        if self._nodes == 1:
            return failure
        store = self._store()
        return dict(json.loads(self._ask(lambda: store.compare_set("failure", "", json.dumps(failure)))))

    def announce_success(self) -> None:
        if self._nodes > 1:
            store = self._store()
            self._ask(lambda: store.add("succeeded", 1))

    def failure_elsewhere(self) -> dict[str, Any] | None:
        """The gang's failure in this attempt, if any node has told of one."""
        if self._nodes == 1:
            return None
        store = self._store()
        told = self._ask(lambda: store.get("failure") if store.check(["failure"]) else None)
        return dict(json.loads(told)) if told is not None else None

    def all_succeeded(self) -> bool:
        store = self._store()
        return self._nodes == 1 or self._ask(lambda: store.add("succeeded", 0)) >= self._nodes

    def beat(self) -> None:
        """Tells the node that keeps the store that this one lives. To be called often; it knows when to speak."""
        now = time.monotonic()
        if self._nodes == 1 or self._keeps_store or now < self._next_beat:
            return
        self._next_beat = now + _BEAT_S
        store = self._store()
        self._ask(lambda: store.add(f"beat/{self._node_rank}", 1))

    def silent(self) -> tuple[int, str, float] | None:
        """Where the store is kept: a node that has not been heard of for too long, with its host and the seconds."""
        if not self._keeps_store or self._nodes == 1 or (now := time.monotonic()) < self._next_beat:
            return None
        self._next_beat = now + _BEAT_S
        store = self._store()
        for node in set(range(self._nodes)) - {self._node_rank}:
            beats = store.add(f"beat/{node}", 0)
            before, since = self._heard.get(node, (-1, now))
            if beats != before:
                self._heard[node] = (beats, now)
            elif now - since > self._lost_after_s:
                self._lost.add(node)
                return node, store.get(f"node/{node}").decode().split()[0], now - since
        return None

    def leave(self) -> bool:
        """Leave the gang. Return True if the node that keeps the store knows how it ended. Raises RuntimeError where
        that one is gone.

        It goes last: from its store the others learn how the gang ended.
        """
        store = self._store()
        self._ask(lambda: store.set(f"gone/{self._node_rank}", ""))
        began = time.monotonic()
        while self._keeps_store and not store.check([f"gone/{rank}" for rank in self._present()]):
            if time.monotonic() - began >= (self._stay_s if self._ending() else STAY_S):
                break
            time.sleep(0.02)
        return True

    def _present(self) -> list[int]:
        """The nodes that came to this attempt: those that will want to know how it ended."""
        return [rank for rank in set(range(self._nodes)) - self._lost if self._store().check([f"node/{rank}"])]

    def _ask(self, question: Callable[[], T]) -> T:
        """Puts a question to a store that may be silent. Raises StoreSilent, and what the question raises."""
        return question() if self._keeps_store else self._patience.ask(question)
