"""A way to a server that can be cut: connections through it break off, and new ones are refused."""

from __future__ import annotations

import contextlib
import select
import socket
import threading

from tests.ports import free_port


class Relay:
    """On a port of 127.0.0.1. To be closed; a `with` does it. `carried` counts the bytes of both directions."""

    def __init__(self, host: str, port: int) -> None:
        self._to = (host, port)
        self._lock = threading.Lock()
        self._pairs: set[tuple[socket.socket, socket.socket]] = set()
        self._listener: socket.socket | None = None
        self.carried = 0
        self.port = free_port()  # nobody else's, also while it is cut
        self.mend()

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_: object) -> None:
        self.cut()

    @property
    def open(self) -> int:
        """Connections through it."""
        with self._lock:
            return len(self._pairs)

    def mend(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", self.port))
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def cut(self) -> None:
        """All of it, until `mend`."""
        listener, self._listener = self._listener, None
        if listener is not None:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        self.break_off()

    def break_off(self) -> None:
        """The connections that there are; new ones may be made."""
        with self._lock:
            pairs = list(self._pairs)
        for each in (end for pair in pairs for end in pair):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                near, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=self._carry, args=(near,), daemon=True).start()

    def _carry(self, near: socket.socket) -> None:
        with near, contextlib.suppress(OSError), socket.create_connection(self._to) as far:
            with self._lock:
                self._pairs.add((near, far))
            try:
                while True:
                    for ready in select.select([near, far], [], [])[0]:
                        data = ready.recv(1 << 16)
                        if not data:
                            return
                        (far if ready is near else near).sendall(data)
                        with self._lock:
                            self.carried += len(data)
            finally:
                with self._lock:
                    self._pairs.discard((near, far))
