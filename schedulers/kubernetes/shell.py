"""A command in the pod of one of a job's nodes, connected to this process's streams (`accel shell`).

The protocol of exec: https://github.com/kubernetes/kubernetes/blob/master/staging/src/k8s.io/apimachinery/pkg/util/remotecommand/constants.go
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import ssl
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ..errors import SubmitError, Unreachable
from . import names
from .client.api import Api, hang_up
from .manifests import pods
from .native_id import Native
from .options import KubernetesOptions
from .status import query

_STDIN, _STDOUT, _STDERR, _STATUS, _RESIZE = 0, 1, 2, 3, 4
# This fits whenever the socket is writable: a send never blocks, which could deadlock with the peer's sends.
_CHUNK = 4096
_SHELL = ("sh", "-c", "command -v bash >/dev/null && exec bash || exec sh")

# Runs in the pod if the input is not a terminal, and then executes the program. Older servers cannot close the input
# alone. So it arrives in frames after their length, and an empty frame is its end. A child forwards the frames; if they
# stop, the caller is gone, and the child ends the program. containerd also closes the input when the program has closed
# one output: the child keeps both outputs open until the program has ended.
FEEDER = """\
import os, select, signal, sys, time
def forward(program, writing):
    try:
        ended = os.pidfd_open(program)
    except (AttributeError, OSError):
        ended = None
    frames = data = b""
    while os.getppid() == program:
        poll = select.poll()
        poll.register(0, 0 if data else select.POLLIN)
        if data:
            poll.register(writing, select.POLLOUT)
        if ended is not None:
            poll.register(ended, select.POLLIN)
        ready = dict(poll.poll(100 if ended is None else None))
        if data and writing in ready:
            try:
                data = data[os.write(writing, data):]
            except OSError:
                data = b""
        elif 0 in ready:
            chunk = b"" if data else os.read(0, 65536)
            if not chunk:
                return end(program)
            frames += chunk
        while not data and len(frames) >= 4 and len(frames) >= 4 + int.from_bytes(frames[:4], "big"):
            size = int.from_bytes(frames[:4], "big")
            data, frames = frames[4 : 4 + size], frames[4 + size :]
            if not size and writing is not None:
                os.close(writing)
                writing = None
def end(program):
    for signum in (signal.SIGTERM, signal.SIGKILL):
        os.kill(program, signum)
        for _ in range(50):
            if os.getppid() != program:
                return
            time.sleep(0.1)
program = os.getpid()
reading, writing = os.pipe()
if os.fork() == 0:
    os.close(reading)
    os.set_blocking(writing, False)
    forward(program, writing)
    os._exit(0)
os.close(writing)
os.dup2(reading, 0)
os.close(reading)
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
try:
    os.execvp(sys.argv[1], sys.argv[1:])
except OSError as error:
    print("accel shell: %s: %s" % (sys.argv[1], error.strerror), file=sys.stderr, flush=True)
    os._exit(126 if isinstance(error, PermissionError) else 127)
"""


def run(api: Api, native: Native, options: KubernetesOptions, node: int, argv: Sequence[str], *, terminal: bool) -> int:
    """Run the command, by default a shell, and return its exit code. Raises SubmitError, ApiError, Unreachable."""
    container = pods.container_name(options)
    pod = _pod(api, native, node, container)
    command = list(argv) or list(_SHELL)
    if terminal:
        command = ["env", f"TERM={os.environ.get('TERM') or 'xterm'}", *command]
    elif sys.stdin is not None:
        command = [options.python or "python3", "-c", FEEDER, *command]
    client = api.connect(
        pod, command, container=container, tty=terminal, stdin=sys.stdin is not None, namespace=native.namespace
    )
    from websocket import WebSocketException  # installed, since there is a connection

    session = _Session(client, framed=not terminal)
    try:
        with _raw_terminal(session.resize) if terminal else contextlib.nullcontext():
            status = session.run()
    except (OSError, WebSocketException) as error:
        if isinstance(error, BrokenPipeError) and session.printing:
            raise  # the reader of our output is gone
        raise api.unreachable(error) from None
    finally:
        hang_up(client)
    return _code(api, pod, status)


def _pod(api: Api, native: Native, node: int, container: str) -> str:
    """Return the name of the node's running pod. Raises SubmitError."""
    node_pods = [pod for pod in query.pods_of(api, native) if names.node_of(pod) == node]
    node_pods = [pod for pod in node_pods if not pod["metadata"].get("deletionTimestamp")]
    if not node_pods:
        raise SubmitError(f"{api.label}: node {node} of job {native.job_id} has no pod now")
    newest = max(node_pods, key=lambda pod: str(pod["metadata"].get("creationTimestamp")))
    name, status = str(newest["metadata"]["name"]), newest.get("status") or {}
    states = {entry["name"]: entry.get("state") or {} for entry in status.get("containerStatuses") or []}
    state = states.get(container, {})
    if status.get("phase") != "Running" or "running" not in state:
        reason = next((detail["reason"] for detail in state.values() if detail.get("reason")), None)
        raise SubmitError(
            f"{api.label}: node {node} of job {native.job_id} is not running: its pod {name} is "
            f"{status.get('phase') or 'Pending'}" + (f" ({reason})" if reason else "")
        )
    return name


class _Session:
    """The streams of an exec connection, until the program has ended."""

    def __init__(self, client: Any, *, framed: bool) -> None:
        self.printing = False
        self._client = client
        self._framed = framed
        self._waiting = b""
        self._reading = sys.stdin is not None
        self._status = b""
        self._wake, self._waker = os.pipe()
        os.set_blocking(self._wake, False)

    def run(self) -> bytes:
        """Forward the streams until the end. Return the server's exit status, empty if it sent none."""
        try:
            while self._client.is_open():
                self._poll_once()
            self._print()
        finally:
            os.close(self._wake)
            os.close(self._waker)
        return self._status

    def resize(self) -> None:
        """Forward the terminal's new size. Safe to call from a signal handler."""
        with contextlib.suppress(OSError):
            os.write(self._waker, b"x")

    def _poll_once(self) -> None:
        socket = self._client.sock.sock
        poller = select.poll()
        poller.register(socket, select.POLLIN | (select.POLLOUT if self._waiting else 0))
        poller.register(self._wake, select.POLLIN)
        if self._reading and not self._waiting:
            poller.register(sys.stdin.fileno(), select.POLLIN)
        buffered = isinstance(socket, ssl.SSLSocket) and socket.pending()
        ready = dict(poller.poll(0 if buffered else None))
        if buffered or ready.get(socket.fileno(), 0) & ~select.POLLOUT:
            self._client.update(timeout=0)
            self._print()
        if not self._client.is_open():
            return
        if self._wake in ready:
            os.read(self._wake, 4096)
            columns, lines = os.get_terminal_size(sys.stdout.fileno())
            self._client.write_channel(_RESIZE, json.dumps({"Width": columns, "Height": lines}))
        if self._waiting and ready.get(socket.fileno(), 0) & select.POLLOUT:
            chunk, self._waiting = self._waiting[:_CHUNK], self._waiting[_CHUNK:]
            self._client.write_channel(_STDIN, chunk)
        if sys.stdin is not None and sys.stdin.fileno() in ready:
            self._read()

    def _read(self) -> None:
        data = os.read(sys.stdin.fileno(), 1 << 16)
        self._reading = bool(data)
        self._waiting = (len(data).to_bytes(4, "big") if self._framed else b"") + data

    def _print(self) -> None:
        self.printing = True
        for channel, stream in ((_STDOUT, sys.stdout), (_STDERR, sys.stderr)):
            data = self._client.read_channel(channel) if channel in self._client._channels else b""
            while data:
                data = data[os.write(stream.fileno(), data) :]
        self.printing = False
        if _STATUS in self._client._channels:
            self._status += self._client.read_channel(_STATUS)


@contextlib.contextmanager
def _raw_terminal(resized: Callable[[], None]) -> Iterator[None]:
    """Pass all keys to the program, including those for signals. Restore the terminal at the end."""
    import termios
    import tty

    descriptor = sys.stdin.fileno()
    attributes = termios.tcgetattr(descriptor)
    handler = signal.signal(signal.SIGWINCH, lambda *_: resized())
    try:
        tty.setraw(descriptor, termios.TCSADRAIN)  # keeps input that was typed before
        resized()
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, attributes)
        signal.signal(signal.SIGWINCH, handler)


def _code(api: Api, pod: str, status: bytes) -> int:
    if not status:
        raise Unreachable(f"{api.label}: the connection to pod {pod} was lost; the command may have been terminated")
    reply: Mapping[str, Any] = json.loads(status)
    if reply.get("status") == "Success":
        return 0
    causes = (reply.get("details") or {}).get("causes") or []
    code = next((cause.get("message") for cause in causes if cause.get("reason") == "ExitCode"), None)
    if code is None:
        raise SubmitError(f"{api.label}: pod {pod}: the command cannot be run: {reply.get('message')}")
    return int(code)
