"""What a recorded process id means on another node, after a restart, and in another PID namespace."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from schedulers.errors import Unreachable
from schedulers.processes import Identity, Place, signal_name

HERE = Place("gpu01", "boot-1", "4026531836")
OTHER_NODE = "node gpu02"
OTHER_NAMESPACE = "node gpu01 in another PID namespace (a container?)"


@pytest.mark.parametrize(
    ("noted", "here", "hidden", "restarted"),
    [
        (HERE, HERE, "", False),
        (Place("gpu01", "boot-0", "4026531836"), HERE, "", True),
        (Place("gpu01", "boot-0", "4026532000"), HERE, "", True),
        (Place("gpu01", "boot-1", "4026532000"), HERE, OTHER_NAMESPACE, False),
        (Place("gpu02", "boot-1", "4026531836"), HERE, OTHER_NODE, False),
        (Place("gpu02", "boot-0", "4026531836"), HERE, OTHER_NODE, False),
        # older versions, and macOS
        (Place("gpu01"), HERE, "", False),
        (Place("gpu02"), HERE, OTHER_NODE, False),
        (Place("gpu01"), Place("gpu01"), "", False),
        (Place("gpu02"), Place("gpu01"), OTHER_NODE, False),
        (HERE, Place("gpu01"), "", False),
        (HERE, Place("gpu02"), "node gpu01", False),
    ],
)
def test_where_a_process_can_be_seen(noted: Place, here: Place, hidden: str, restarted: bool) -> None:
    assert (noted.hidden_from(here), noted.restarted(here)) == (hidden, restarted)


def test_only_a_process_of_this_place_can_be_missed() -> None:
    here = Place.here()
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert not here.lacks(os.getpid())
    assert here.lacks(ended.pid)
    assert Place(here.node).lacks(ended.pid)
    assert Place(here.node, "another-boot", here.pid_namespace).lacks(os.getpid())
    assert not Place(f"not-{here.node}", here.boot, here.pid_namespace).lacks(ended.pid)
    if here.boot:
        assert not Place(here.node, here.boot, "1").lacks(ended.pid)


def test_a_hidden_process_is_neither_alive_nor_ended() -> None:
    own = Identity.of(os.getpid())
    assert own is not None
    hidden = Identity(own.pid, own.started, Place("another-node"))
    for ask in (hidden.alive, lambda: hidden.send(0), lambda: hidden.wait(0)):
        with pytest.raises(Unreachable, match=f"process {own.pid} of node another-node cannot be seen from here"):
            ask()
    assert Identity(own.pid, own.started, Place.here()).alive()


def test_signal_names() -> None:
    assert signal_name(signal.SIGKILL) == "SIGKILL"
    assert signal_name(40) == "signal 40"
