"""A watch of a server that refuses each version, which a real API server does only for a moment."""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler

import pytest

from schedulers.kubernetes.client.informer import Informer
from tests.waiting import until

from ..conftest import MakeApi
from ..servers import Answer, refused, reply, said, serving

_LIST = {"items": [], "metadata": {"resourceVersion": "7"}}
_EXPIRED = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}


class Pauses:
    """The event that an informer waits for, without the time."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.stopped = False

    def wait(self, seconds: float) -> bool:
        self.seconds.append(seconds)
        self.stopped = self.stopped or len(self.seconds) == 6
        return self.stopped

    def is_set(self) -> bool:
        return self.stopped

    def set(self) -> None:
        self.stopped = True


def _refuses(in_stream: bool) -> Answer:
    event = json.dumps({"type": "ERROR", "object": _EXPIRED}).encode() + b"\n"
    answer = said(200, event) if in_stream else refused(410, "Expired", "too old resource version")

    def watch(handler: BaseHTTPRequestHandler) -> None:
        if "watch=true" not in handler.path:
            reply(handler, _LIST)
            return
        assert isinstance(answer, tuple)
        handler.send_response(answer[0])
        handler.send_header("Content-Length", str(len(answer[2])))
        handler.end_headers()
        handler.wfile.write(answer[2])

    return watch


@pytest.fixture(name="pauses")
def _pauses(monkeypatch: pytest.MonkeyPatch) -> Pauses:
    monkeypatch.setattr("random.uniform", lambda low, high: (low + high) / 2)
    return Pauses()


@pytest.mark.parametrize("in_stream", [False, True])
def test_a_server_that_answers_each_watch_with_410_is_asked_less_and_less(
    make: MakeApi, pauses: Pauses, in_stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(_refuses(in_stream)) as server:
        watched = Informer(
            make(server.url), "/x", "a=b", transform=dict, on_change=lambda: None, keep_alive=lambda: True
        )
        monkeypatch.setattr(watched, "_stop", pauses)
        watched.start()
        until(lambda: len(pauses.seconds) == 6, "it has paused six times")
        assert not watched.live
        assert pauses.seconds == pytest.approx([0.2, 0.4, 0.8, 1.6, 3.2, 6.4])
        assert len(server.asked) == 12, server.asked
