"""What stands between training and a tracker: outages, long waits, and everything else."""

from __future__ import annotations

import logging
import socket
import threading

import pytest

from accel.errors import TrackerError
from accel.tracking import isolation as guards
from accel.tracking.isolation import IsolatedTracker, check_reachable, is_outage
from accel.tracking.wandb import WandBTracker

from ..worlds import free_port
from .listing import Failing, Listing


class HTTPError(OSError):
    """Shaped as that of `requests`."""

    def __init__(self, status: int) -> None:
        super().__init__("refused")
        self.response = type("Response", (), {"status_code": status})()


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "outage"),
    [
        (ConnectionResetError(104, "reset"), True),
        (TimeoutError("timed out"), True),
        (socket.gaierror(-2, "Name or service not known"), True),
        (OSError(28, "No space left on device"), True),
        (OSError("a server said so"), True),
        (caused(RuntimeError("API request failed"), ConnectionError("refused")), True),
        (HTTPError(503), True),
        (HTTPError(429), True),
        (HTTPError(401), False),
        (PermissionError(13, "denied"), False),
        (FileNotFoundError(2, "no such file"), False),
        (ValueError("no number"), False),
        (TypeError("no argument"), False),
    ],
)
def test_what_is_an_outage(error: Exception, outage: bool) -> None:
    assert is_outage(Listing(), error) is outage


def test_a_tracker_that_failed_is_tried_again_ever_more_rarely(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [1000.0]
    monkeypatch.setattr("accel.tracking.isolation.time.monotonic", lambda: now[0])
    tracker = Failing("log", ConnectionError("refused"))
    guard = IsolatedTracker(tracker)
    tried = []
    for _ in range(300):
        before = guard._pause
        guard.log({"loss": 1.0}, 0, {})
        if guard._pause != before:
            tried.append(now[0] - 1000)
        now[0] += 1
    assert tried == [0, 15, 45, 105, 225]
    tracker.where = "nothing"
    now[0] += 600
    guard.log({"loss": 1.0}, 1, {})
    guard.log({"loss": 1.0}, 2, {})
    guard.finish()
    assert [call[2] for call in tracker.calls if call[0] == "log"] == [1, 2]
    assert caplog.messages == [
        "tracker 'listing' failed, training continues; records are lost until it works again: ConnectionError: refused",
        "tracker 'listing' works again; records lost so far: 300",
        "tracker 'listing' lost 300 records",
    ]


def test_a_long_wait_is_said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(guards, "SLOW_S", 0.02)
    said = threading.Event()

    class Slow(Listing):
        def start(self) -> None:
            said.wait(20)

    class Told(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "still waiting for tracker 'listing' to start after" in record.getMessage():
                said.set()

    handler = Told()
    logging.getLogger("accel.tracking").addHandler(handler)
    try:
        assert IsolatedTracker(Slow()).start() is True
    finally:
        logging.getLogger("accel.tracking").removeHandler(handler)
    assert said.is_set()
    assert not [thread for thread in threading.enumerate() if thread.name == "accel tracker watch"]


class OfThePackage(WandBTracker):
    """As one of accel's own, with a package that does not start."""

    def start(self) -> None:
        raise RuntimeError("no key\nmore lines")

    def server(self) -> None:
        return None


def test_a_tracker_that_is_set_up_wrong_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OfThePackage, "__module__", "accel.tracking.wandb")
    with pytest.raises(TrackerError) as caught:
        IsolatedTracker(OfThePackage("digits")).start()
    assert str(caught.value) == (
        "tracker 'wandb' did not start: RuntimeError: no key; "
        "WANDB_MODE=offline logs to files that `wandb sync` sends later"
    )


def test_reaching_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        check_reachable(f"http://127.0.0.1:{server.getsockname()[1]}/api")
    nobody = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(ConnectionError, match="cannot be reached: Connection refused"):
        check_reachable(nobody)
    for left_to_the_package in ("sqlite:///x.db", "databricks", "", "file:/tmp/x"):
        check_reachable(left_to_the_package)
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    check_reachable(nobody)
