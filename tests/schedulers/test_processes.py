"""A recorded process on another boot and in another PID namespace."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from schedulers.processes import Identity, boot_id, has_ended, pid_namespace, pid_space, signal_name, space_of

NODE = os.uname().nodename


def test_only_a_process_of_this_space_can_be_missed() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    here = pid_space()
    assert not has_ended(os.getpid(), here)
    assert has_ended(process.pid, here)
    for space in (space_of("another-boot", NODE, pid_namespace()), space_of(boot_id(), NODE, "1"), ""):
        assert not has_ended(process.pid, space)


def test_a_process_that_cannot_be_seen_takes_no_signal() -> None:
    own = Identity.of(os.getpid())
    assert own is not None
    assert Identity(own.pid, own.started, pid_namespace()).alive()
    assert own.same_boot()
    hidden = Identity(own.pid, own.started, "1")
    assert (hidden.alive(), hidden.send(signal.SIGKILL), hidden.wait(60)) == (False, False, True)
    assert not Identity(own.pid, "another-boot.1").same_boot()


def test_signal_names() -> None:
    assert signal_name(signal.SIGKILL) == "SIGKILL"
    assert signal_name(40) == "signal 40"
