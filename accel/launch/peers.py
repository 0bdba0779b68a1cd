"""Messages between a gang's nodes in one attempt (failure, success, heartbeat), through the rendezvous store."""

from __future__ import annotations

import abc
import json
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from torch._C._distributed_c10d import Store
from torch.distributed.elastic.rendezvous import RendezvousHandler

# The store client. torch's own blocks for 15 minutes if the store's machine vanishes, and handles no signals meanwhile.

T = TypeVar("T")

_SLICE_S = 0.1
_FINAL_CALL_S = 1.0


class StoreSilent(RuntimeError):
    """The store did not respond in time. It is not queried again: its connection is in an unknown state."""


class StoreWithTimeout:
    """A store client that queries in a separate thread, so that the caller can give up.

    limit_s: the longest wait for a response; at most a second once `ending()`.
    """

    def __init__(self, limit_s: float, ending: Callable[[], bool]) -> None:
        self._limit_s = limit_s
        self._ending = ending
        self._requests: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._silent_s: float | None = None

    def call(self, query: Callable[[], T]) -> T:
        """Return the result of `query`, or raise its error. Raises StoreSilent."""
        if self._silent_s is not None:
            raise self._timeout_error()
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="store", daemon=True)
            self._thread.start()
        results: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

        def request() -> None:
            try:
                results.put((query(), None))
            except BaseException as error:
                results.put((None, error))

        self._requests.put(request)
        started_at = time.monotonic()
        while True:
            try:
                value, error = results.get(timeout=_SLICE_S)
            except queue.Empty:
                waited_s = time.monotonic() - started_at
                if waited_s > (min(_FINAL_CALL_S, self._limit_s) if self._ending() else self._limit_s):
                    self._silent_s = waited_s
                    raise self._timeout_error() from None
                continue
            if error is not None:
                raise error
            return value  # type: ignore[return-value]  # None only with an error

    def _serve(self) -> None:
        while True:
            self._requests.get()()

    def _timeout_error(self) -> StoreSilent:
        return StoreSilent(f"its store has not responded for {self._silent_s:.0f} s")


# The nodes of a gang.

LOST_AFTER_S = 30.0
LINGER_S = 10.0
_BEAT_S = 1.0


class Peers(RendezvousHandler):
    """A rendezvous whose nodes fail and end as one.

    lost_after_s: the longest time without a heartbeat before a node counts as lost.
    stay_s:       the longest time that the store's node waits for the others to leave after a termination signal.
    ending:       returns True after a termination signal to this node.
    """

    may_shrink = False  # a lost node does not end the gang if restarts are left
    _node_rank, _nodes = 0, 1
    _hosts_store = True

    def __init__(self, *, lost_after_s: float, stay_s: float, ending: Callable[[], bool]) -> None:
        self._lost_after_s, self._stay_s, self._ending = lost_after_s, stay_s, ending
        self._client = StoreWithTimeout(lost_after_s, ending)
        self._next_beat = 0.0
        self._beats: dict[int, tuple[int, float]] = {}  # node -> number of its beats, and when it last grew
        self._lost_nodes: set[int] = set()

    @abc.abstractmethod
    def _store(self) -> Store:
        """Return the attempt's store. Each node has a key `node/RANK` there; its value begins with the host name."""

    def announce_failure(self, failure: dict[str, Any]) -> dict[str, Any]:
        """Set the gang's failure unless another node has. Return the one that is set."""
        if self._nodes == 1:
            return failure
        store = self._store()
        return dict(json.loads(self._query(lambda: store.compare_set("failure", "", json.dumps(failure)))))

    def announce_success(self) -> None:
        if self._nodes > 1:
            store = self._store()
            self._query(lambda: store.add("succeeded", 1))

    def failure_elsewhere(self) -> dict[str, Any] | None:
        """Return the gang's failure in this attempt, or None."""
        if self._nodes == 1:
            return None
        store = self._store()
        announcement = self._query(lambda: store.get("failure") if store.check(["failure"]) else None)
        return dict(json.loads(announcement)) if announcement is not None else None

    def all_succeeded(self) -> bool:
        store = self._store()
        return self._nodes == 1 or self._query(lambda: store.add("succeeded", 0)) >= self._nodes

    def beat(self) -> None:
        """Send a heartbeat to the store, at most once a second however often this is called."""
        now = time.monotonic()
        if self._nodes == 1 or self._hosts_store or now < self._next_beat:
            return
        self._next_beat = now + _BEAT_S
        store = self._store()
        self._query(lambda: store.add(f"beat/{self._node_rank}", 1))

    def silent_node(self) -> tuple[int, str, float] | None:
        """Return a lost node, its host and its seconds without a heartbeat, or None. Only the store's node checks."""
        if not self._hosts_store or self._nodes == 1 or (now := time.monotonic()) < self._next_beat:
            return None
        self._next_beat = now + _BEAT_S
        store = self._store()
        for node in set(range(self._nodes)) - {self._node_rank}:
            count = store.add(f"beat/{node}", 0)
            last_count, changed_at = self._beats.get(node, (-1, now))
            if count != last_count:
                self._beats[node] = (count, now)
            elif now - changed_at > self._lost_after_s:
                self._lost_nodes.add(node)
                return node, store.get(f"node/{node}").decode().split()[0], now - changed_at
        return None

    def leave(self) -> bool:
        """Leave the gang. Return True: the store's node knows the outcome. Raises RuntimeError if that node is gone.

        It leaves last, because the others read the outcome from its store.
        """
        store = self._store()
        self._query(lambda: store.set(f"gone/{self._node_rank}", ""))
        started_at = time.monotonic()
        while self._hosts_store and not store.check([f"gone/{rank}" for rank in self._present()]):
            if time.monotonic() - started_at >= (self._stay_s if self._ending() else LINGER_S):
                break
            time.sleep(0.02)
        return True

    def _present(self) -> list[int]:
        """Return the nodes that joined this attempt and are not lost."""
        return [rank for rank in set(range(self._nodes)) - self._lost_nodes if self._store().check([f"node/{rank}"])]

    def _query(self, query: Callable[[], T]) -> T:
        """Query a store that may not respond. Raises StoreSilent and the errors of `query`."""
        return query() if self._hosts_store else self._client.call(query)
