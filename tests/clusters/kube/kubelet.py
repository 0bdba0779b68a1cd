"""The kubelet's API on a node of the tests: logs and exec, as an API server asks for them, and what tests command."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import struct
import termios
from collections.abc import Awaitable, Callable, Sequence

from aiohttp import WSMsgType, web

from .client import Object
from .logs import Wanted
from .pod import Instance, Pod

_STDIN, _STDOUT, _STDERR, _ERROR, _RESIZE = range(5)
_PROTOCOLS = ("v4.channel.k8s.io",)
Find = Callable[[str, str], Pod | None]
Command = Callable[[Object], Awaitable[None]]


def application(find: Find, command: Command) -> web.Application:
    """`find` has a namespace and a pod's name; `command` does what a test says."""
    made = web.Application()

    async def logs(request: web.Request) -> web.StreamResponse:
        return await _logs(request, _instance(request, find)[1])

    async def execute(request: web.Request) -> web.StreamResponse:
        pod, instance = _instance(request, find)
        if instance.running is None:
            raise web.HTTPBadRequest(text=f'container "{instance.name}" in pod "{pod}" is not running')
        return await _Exec(request, instance).run()

    async def told(request: web.Request) -> web.StreamResponse:
        try:
            await command(await request.json())
        except LookupError as error:
            raise web.HTTPNotFound(text=str(error)) from None
        return web.json_response({})

    made.router.add_get("/containerLogs/{namespace}/{pod}/{container}", logs)
    made.router.add_route("*", "/exec/{namespace}/{pod}/{container}", execute)
    made.router.add_post("/command", told)
    return made


def _instance(request: web.Request, find: Find) -> tuple[str, Instance]:
    place, name, container = (request.match_info[key] for key in ("namespace", "pod", "container"))
    pod = find(place, name)
    if pod is None:
        raise web.HTTPNotFound(text=f'pod "{name}" does not exist')
    found = pod.instance(container)
    if found is None:
        raise web.HTTPNotFound(text=f'container "{container}" not found in pod "{name}"')
    return name, found


async def _logs(request: web.Request, instance: Instance) -> web.StreamResponse:
    pod, wanted = request.match_info["pod"], Wanted.parse(request.query)
    state = instance.state or {}
    if request.query.get("previous") == "true":
        log = instance.log if instance.last and "waiting" in state else instance.previous
        if log is None:
            raise web.HTTPBadRequest(text=f'previous terminated container "{instance.name}" in pod "{pod}" not found')
    else:
        log = instance.log
    if log is None:
        waiting = state.get("waiting") or {}
        why = {"ErrImagePull": "image can't be pulled", "ImagePullBackOff": "trying and failing to pull image"}
        word = str(waiting.get("reason") or ("ContainerCreating" if instance.init else "PodInitializing"))
        text = f'container "{instance.name}" in pod "{pod}" is waiting to start: {why.get(word, word)}'
        raise web.HTTPBadRequest(text=text)
    answer = web.StreamResponse(headers={"Content-Type": "text/plain"})
    answer.enable_chunked_encoding()
    await answer.prepare(request)
    with contextlib.suppress(ConnectionError):
        async for data in log.read(wanted):
            await answer.write(data)
        await answer.write_eof()
    return answer


class _Exec:
    """A command in a container, its streams over one WebSocket: the first byte of a message says which.

    https://github.com/kubernetes/apiserver/blob/master/pkg/util/wsstream/doc.go
    """

    def __init__(self, request: web.Request, instance: Instance) -> None:
        self._request = request
        self._instance = instance
        self._socket = web.WebSocketResponse(protocols=_PROTOCOLS)
        self._asked = {key for key in ("input", "output", "error", "tty") if request.query.get(key) in ("1", "true")}

    async def run(self) -> web.StreamResponse:
        await self._socket.prepare(self._request)
        if self._socket.ws_protocol not in _PROTOCOLS:
            await self._socket.close(code=1002, message=b"v4.channel.k8s.io is spoken here")
            return self._socket
        argv = self._request.query.getall("command", [])
        with contextlib.suppress(ConnectionError):
            # A client learns from the first message that its streams are there.
            for channel in [_STDOUT] * ("output" in self._asked) + [_STDERR] * ("error" in self._asked):
                await self._socket.send_bytes(bytes([channel]))
            code = await (self._terminal(argv) if "tty" in self._asked else self._pipes(argv))
            await self._socket.send_bytes(bytes([_ERROR]) + json.dumps(_verdict(code)).encode())
            await self._socket.close()
        return self._socket

    async def _pipes(self, argv: Sequence[str]) -> int:
        running = self._instance.running
        assert running is not None
        pipe, nothing = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
        process = await running.execute(
            argv, tty=None, stdin=pipe if "input" in self._asked else nothing, stdout=pipe, stderr=pipe
        )
        assert process.stdout is not None
        assert process.stderr is not None
        taking = asyncio.create_task(self._take(_into(process), None))
        taking.add_done_callback(lambda _: _hang_up(process))
        await asyncio.gather(self._send(_STDOUT, process.stdout), self._send(_STDERR, process.stderr))
        code = await process.wait()
        taking.cancel()
        return code

    async def _terminal(self, argv: Sequence[str]) -> int:
        running = self._instance.running
        assert running is not None
        ours, theirs = os.openpty()
        process = await running.execute(argv, tty=theirs, stdin=theirs, stdout=theirs, stderr=theirs)
        os.close(theirs)
        loop, reader = asyncio.get_running_loop(), asyncio.StreamReader()
        transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(os.dup(ours), "rb", buffering=0)
        )

        async def put(data: bytes) -> None:
            await loop.run_in_executor(None, os.write, ours, data)

        taking = asyncio.create_task(self._take(put, ours))
        taking.add_done_callback(lambda _: _hang_up(process))
        with contextlib.suppress(OSError):  # how a terminal says that nobody has it open any more
            await self._send(_STDOUT, reader)
        code = await process.wait()
        taking.cancel()
        transport.close()
        os.close(ours)
        return code

    async def _send(self, channel: int, source: asyncio.StreamReader) -> None:
        while data := await source.read(32768):
            if not self._socket.closed:
                await self._socket.send_bytes(bytes([channel]) + data)

    async def _take(self, put: Callable[[bytes], Awaitable[None]], terminal: int | None) -> None:
        """What the client sends, until it hangs up."""
        async for message in self._socket:
            if message.type is not WSMsgType.BINARY and message.type is not WSMsgType.TEXT:
                continue
            data = message.data if isinstance(message.data, bytes) else message.data.encode()
            channel, rest = data[:1], data[1:]
            if channel == bytes([_RESIZE]) and terminal is not None:
                size = json.loads(rest)
                packed = struct.pack("HHHH", size["Height"], size["Width"], 0, 0)
                fcntl.ioctl(terminal, termios.TIOCSWINSZ, packed)
            elif channel in (bytes([_STDIN]), b"") and rest:
                with contextlib.suppress(ConnectionError, OSError):
                    await put(rest)


def _into(process: asyncio.subprocess.Process) -> Callable[[bytes], Awaitable[None]]:
    async def put(data: bytes) -> None:
        if process.stdin is not None:
            process.stdin.write(data)
            await process.stdin.drain()

    return put


def _hang_up(process: asyncio.subprocess.Process) -> None:
    """A command without anybody to talk to has no more input, and ends."""
    if process.stdin is not None:
        process.stdin.close()
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()


def _verdict(code: int) -> Object:
    if code == 0:
        return {"metadata": {}, "status": "Success"}
    code = code if code > 0 else 128 - code
    said = f"command terminated with non-zero exit code: exit status {code}"
    causes = [{"reason": "ExitCode", "message": str(code)}]
    return {
        "metadata": {}, "status": "Failure", "reason": "NonZeroExitCode", "message": said,
        "details": {"causes": causes},
    }  # fmt: skip
