"""Commands over connections to real servers: what arrives, what comes back, how many at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from schedulers.errors import SpecError
from schedulers.hosts import session as sessions
from schedulers.hosts import transport
from schedulers.hosts.connection import Timeouts
from schedulers.hosts.errors import HostUnreachable, RemoteError, RemoteTimeout
from schedulers.hosts.host_list import Host, parse_hosts
from schedulers.hosts.transport import Pool, Remote
from tests.clusters.ssh import SshHosts
from tests.waiting import until

HOSTILE = [
    "",
    " ",
    "a b",
    "'",
    '"',
    "a'b\"c",
    "$(touch ~/hit)",
    "`id`",
    "a;b",
    "a\nb",
    "\\",
    "*",
    "~",
    "é中",
    "\udcff",
    "-n",
]
SHOW = r"for word in sys.argv[1:]: sys.stdout.buffer.write(os.fsencode(word) + b'\0')"


def test_hostile_arguments_arrive_bit_for_bit(pool: Pool, ssh_hosts: SshHosts) -> None:
    for user in ("root", "worker"):  # bash, and dash
        remote = pool.remote(Host(name="node1", user=user))
        done = remote.run(["python3", "-c", f"import os, sys\n{SHOW}", *HOSTILE])
        assert done.stdout.split(b"\0")[:-1] == [os.fsencode(word) for word in HOSTILE]
        assert not list(ssh_hosts.home("node1", user).iterdir())


def test_the_input_arrives(pool: Pool) -> None:
    assert pool.remote("node1").run(["cat"], stdin=b"\0\xff\n").stdout == b"\0\xff\n"


def test_nothing_of_a_command_stands_in_a_command_line_but_the_program_itself(pool: Pool) -> None:
    with pool.remote("node1").open(["cat"]) as session:
        session.write(b"there\n")
        assert session.read_line(10) == b"there\n"
        lines = pool.remote("node1").run(["ps", "axww", "-o", "args="]).stdout.decode()
    assert "cat" in lines.splitlines()
    assert "eval" in lines


def test_both_outputs_come_back_whole_and_apart(pool: Pool) -> None:
    size = 5_000_000
    code = f"import os, sys; sys.stdout.buffer.write(bytes(range(256)) * ({size} // 256)); os.write(2, b'e' * {size})"
    done = pool.remote("node1").run(["python3", "-c", code])
    assert done.stdout == bytes(range(256)) * (size // 256)
    assert done.stderr == b"e" * size


def test_a_large_input_and_a_large_output_do_not_block_each_other(pool: Pool) -> None:
    data = os.urandom(1 << 20) * 12
    assert pool.remote("node2").run(["cat"], stdin=data).stdout == data


def test_a_command_that_does_not_read_its_input_is_no_error(pool: Pool) -> None:
    assert pool.remote("node1").run(["echo", "done"], stdin=b"x" * 8_000_000).stdout == b"done\n"


def test_an_input_that_cannot_be_made_is_the_callers_error(pool: Pool) -> None:
    def chunks() -> object:
        yield b"x"
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        pool.remote("node1").run(["cat"], stdin=chunks())  # type: ignore[arg-type]


def test_a_status_is_kept_or_raised(pool: Pool) -> None:
    remote = pool.remote("node1")
    assert remote.run(["sh", "-c", "exit 7"], check=False).status == 7
    assert remote.run(["sh", "-c", "kill -9 $$"], check=False).status == 137
    with pytest.raises(RemoteError, match=r"^node1: sh failed \(status 3\): it broke$") as error:
        remote.run(["sh", "-c", "echo fine; echo it broke >&2; exit 3"])
    assert error.value.status == 3
    with pytest.raises(RemoteError, match=r"nowhere failed \(status 127\)"):
        remote.run(["nowhere"])
    with pytest.raises(SpecError):
        remote.run(["a\0b"])


def test_a_command_that_takes_too_long(pool: Pool) -> None:
    with pool.remote("node1").open(["sh", "-c", "echo waiting >&2; exec sleep 60"]) as session:

        def problem() -> str:
            with pytest.raises(RemoteTimeout) as error:
                session.finish(0.05)
            return str(error.value)

        until(lambda: problem() == "node1: sh takes too long; last output: waiting", "its last words are shown")
    with pytest.raises(RemoteTimeout, match=r"^node1: "):
        pool.remote("node1").run(["sleep", "60"], timeout_s=0.1)
    assert pool.remote("node1").run(["echo", "next"]).stdout == b"next\n"


@pytest.mark.parametrize("words", [("yes",), ("sh", "-c", "yes >&2"), ("cat", "/dev/zero")])
def test_a_command_that_prints_without_end_is_ended_by_its_deadline(pool: Pool, words: tuple[str, ...]) -> None:
    """Also where more has always come by the time that the last of it was taken."""
    with pool.remote("node1").open(words) as session:
        channel, take = session._channel, session._drain
        ready = channel.recv_stderr_ready if "sh" in words else channel.recv_ready

        def drain() -> bool:
            until(ready, "more has come")
            assert len(session._out.data) + len(session._err.data) < 8 << 20, "it reads on after the deadline"
            return take()

        session._drain = drain  # type: ignore[method-assign]
        with pytest.raises(RemoteTimeout, match=r"^node1: "):
            session.finish(0) if words[0] != "cat" else session.read_line(0)


def test_a_command_that_prints_without_end_is_not_held_for_ever(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "_MAX_OUTPUT", 1 << 20)
    monkeypatch.setattr(sessions, "_LONGEST_LINE", 1 << 20)
    held = []

    class Counted(sessions._MarkedOutput):
        def add(self, data: bytes) -> None:
            super().add(data)
            held.append(len(self.data))

    monkeypatch.setattr(sessions, "_MarkedOutput", Counted)
    for words in ("yes", "yes >&2"):
        with pytest.raises(RemoteError, match=r"^node1: sh prints more than 1 MiB; it begins: y"):
            pool.remote("node1").run(["sh", "-c", words], timeout_s=None)
    with (
        pool.remote("node1").open(["cat", "/dev/zero"]) as session,
        pytest.raises(RemoteError, match="more than 1 MiB"),
    ):
        session.read_line(600)
    assert max(held) <= (1 << 20) + sessions._CHUNK


def test_a_start_up_file_that_prints_without_end(
    pool: Pool, ssh_hosts: SshHosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "_MAX_OUTPUT", 1 << 20)
    ssh_hosts.home("node1").joinpath(".bashrc").write_text("yes careful\n")
    with pytest.raises(RemoteError, match=r"^node1: true prints more than 1 MiB; it begins: (careful|y|c|l)"):
        pool.remote("node1").run(["true"], timeout_s=None)


def test_start_up_files_may_print(pool: Pool, ssh_hosts: SshHosts) -> None:
    ssh_hosts.home("node1").joinpath(".bashrc").write_text("printf 'Welcome!'; echo careful >&2\n")
    assert subprocess.run(
        ["ssh", "-F", ssh_hosts.config, "node1", "true"], capture_output=True, stdin=subprocess.DEVNULL
    ).stdout.startswith(b"Welcome!")
    done = pool.remote("node1").run(["sh", "-c", "echo out; echo err >&2"])
    assert (done.stdout, done.stderr) == (b"out\n", b"err\n")


def test_what_start_up_files_print_is_no_line_of_a_conversation(pool: Pool, ssh_hosts: SshHosts) -> None:
    ssh_hosts.home("node1").joinpath(".bashrc").write_text("echo Welcome; seq 100000; echo careful >&2\n")
    with pool.remote("node1").open(["cat"]) as session:
        session.write(b"one\n")
        assert session.read_line(60) == b"one\n"
        session.close_stdin()
        assert session.finish(60).stderr == b""


def test_start_up_files_that_let_no_command_begin_are_shown(pool: Pool, ssh_hosts: SshHosts) -> None:
    ssh_hosts.home("node1").joinpath(".bashrc").write_text("echo Welcome; exec cat > /dev/null\n")
    with pool.remote("node1").open(["true"]) as session:

        def problem() -> str:
            with pytest.raises(RemoteTimeout) as error:
                session.read_line(0.05)
            return str(error.value)

        said = "node1: its login shell does not start true; its start-up files printed: Welcome"
        until(lambda: problem() == said, "it is shown")


def test_a_shell_that_ends_before_the_command_is_said(pool: Pool, ssh_hosts: SshHosts) -> None:
    ssh_hosts.home("node1").joinpath(".bashrc").write_text("echo this account is closed; exit 1\n")
    with pytest.raises(RemoteError, match=r"^node1: its shell runs no command \(status 1\): this account is closed$"):
        pool.remote("node1").run(["true"])


def test_twenty_commands_at_once_on_one_host_share_a_connection(pool: Pool) -> None:
    done = pool.map(lambda remote: remote.run(["sh", "-c", "sleep 0.1; echo $PPID"]), [Host(name="node1")] * 20)
    assert [outcome.get().status for outcome in done] == [0] * 20
    # What is left of an earlier test's may go at last.
    until(lambda: int(pool.remote("node1").run(["pgrep", "-fc", "sshd: root"]).stdout) <= 2, "there is one connection")


def test_a_server_with_few_sessions_is_used_as_it_can_be(pool: Pool, ssh_hosts: SshHosts) -> None:
    ssh_hosts.end_sshd("node2")
    ssh_hosts.start_sshd("node2", "MaxSessions 2")
    try:
        done = pool.map(lambda remote: remote.run(["sh", "-c", "sleep 0.1; echo x"]), [Host(name="node2")] * 8)
        assert [outcome.get().stdout for outcome in done] == [b"x\n"] * 8
    finally:
        ssh_hosts.end_sshd("node2")


def test_a_conversation_line_by_line(pool: Pool) -> None:
    with pool.remote("node3").open(["cat"]) as session:
        for word in (b"one\n", b"two\n"):
            session.write(word)
            assert session.read_line(10) == word
        session.write(b"abc")
        with pytest.raises(RemoteTimeout):
            session.read_line(0.2)
        session.close_stdin()
        assert session.read_line(10) == b"abc"
        assert session.read_line(10) == b""
        assert session.finish(10).status == 0


def test_hosts_answer_in_their_order_and_each_for_itself(pool: Pool, ssh_hosts: SshHosts) -> None:
    ssh_hosts["node2"].crash()
    hosts = parse_hosts("node[4,2,1],nowhere.invalid")
    done = pool.map(lambda remote: remote.run(["hostname"]).stdout.decode().strip(), hosts)
    assert [outcome.host for outcome in done] == hosts
    assert [outcome.value for outcome in done] == ["node4", None, "node1", None]
    assert isinstance(done[1].error, HostUnreachable)
    assert "no address for the name 'nowhere.invalid'" in str(done[3].error)
    with pytest.raises(HostUnreachable):
        done[3].get()


def test_no_more_than_so_many_hosts_at_once(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "MAX_CONCURRENT", 3)
    lock, now, most = threading.Lock(), [0], [0]

    def work(remote: Remote) -> None:
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        remote.run(["sleep", "0.05"])
        with lock:
            now[0] -= 1

    pool.map(work, parse_hosts("node[1-4]") * 3)
    assert most == [3]


def test_what_is_wrong_with_a_program_is_raised_and_not_made_an_outcome(pool: Pool) -> None:
    with pytest.raises(ZeroDivisionError):
        pool.map(lambda remote: 1 // 0, parse_hosts("node[1-4]"))


def test_ctrl_c_ends_promptly(ssh_hosts: SshHosts) -> None:
    code = f"""
from schedulers.hosts.transport import Pool
from schedulers.hosts.host_list import parse_hosts
with Pool(config={str(ssh_hosts.config)!r}) as pool:
    pool.map(lambda remote: print(remote.run(["hostname"]).stdout, flush=True), parse_hosts("node1"))
    pool.map(lambda remote: remote.run(["sleep", "60"]), parse_hosts("node[1-4]"))
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=20)  # of the minute that it would take
    assert process.returncode == -signal.SIGINT
    assert said.endswith(b"KeyboardInterrupt\n")


def test_a_pool_that_is_closed_opens_no_more(ssh_hosts: SshHosts) -> None:
    pool = Pool(config=str(ssh_hosts.config), timeouts=Timeouts())
    remote = pool.remote("node1")
    remote.run(["true"])
    pool.close()
    with pytest.raises(HostUnreachable, match=r"node1: the connections were closed"):
        remote.run(["true"])


def test_without_the_library_one_line_says_what_to_install(tmp_path: Path) -> None:
    code = """
import sys
sys.modules["fabric"] = None
from schedulers.hosts.transport import Pool
from schedulers.errors import SchedulerError
try:
    Pool()
except SchedulerError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "SSH needs fabric, which is not installed: pip install 'accel-launch[ssh]'\n"
