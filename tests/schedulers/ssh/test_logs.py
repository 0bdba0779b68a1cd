"""Log lines from hosts: in pieces where they are long, so many bytes at a time, and the last ones alone.

The hosts' own program answers, in this process; the connections are those of other tests.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from schedulers import Cursor, LogLine
from schedulers.hosts.host_list import Host
from schedulers.hosts.jobs import logs
from schedulers.hosts.jobs.native_id import Native
from schedulers.hosts.jobs.status import Reply
from schedulers.hosts.transport import Outcome
from schedulers.node import jobs
from schedulers.slurm import target as slurm_target
from schedulers.slurm.login import job_ops
from schedulers.store import log_lines

_HOSTS = [Host(name="one"), Host(name="two")]
_NATIVE = Native(job_id="job", hosts=tuple(_HOSTS))


class Hosts:
    """Answers as hosts do whose root is a directory of that name below `root`. `most`: bytes of its longest answer."""

    def __init__(self, root: Path) -> None:
        self.root, self.most, self.asked, self.down = root, 0, 0, set[Host]()

    def query(self, asked: Mapping[Host, Sequence[Any]], *, skip_down: bool = False) -> dict[Host, Outcome[Reply]]:
        return {host: self._answer(host, steps) for host, steps in asked.items()}

    def _answer(self, host: Host, steps: Sequence[Any]) -> Outcome[Reply]:
        from schedulers.errors import Unreachable

        if host in self.down:
            return Outcome(host, error=Unreachable(f"{host}: no answer"))
        return Outcome(host, value=Reply(*self.answer(jobs, str(self.root / host.name), steps)))

    def answer(self, program: Any, root: str, steps: Sequence[Any]) -> tuple[list[Any], bytes]:
        contents: list[bytes] = []
        done = [program.OPERATIONS[step["op"]](root, step, contents) for step in json.loads(json.dumps(steps))]
        data = b"".join(contents)
        self.most, self.asked = max(self.most, len(data)), self.asked + 1
        return json.loads(json.dumps(done)), data


class Login(Hosts):
    """The same for a login node."""

    def query(self, steps: Sequence[Any]) -> tuple[list[Any], bytes]:  # type: ignore[override]
        return self.answer(job_ops, str(self.root / "one"), steps)


@pytest.fixture
def hosts(tmp_path: Path) -> Hosts:
    return Hosts(tmp_path)


def _log(root: Path, host: str, name: str) -> Path:
    path = root / host / "jobs/job/logs" / f"{name}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _target(login: Any, *, over: bool) -> slurm_target.SlurmTarget:
    target = slurm_target.SlurmTarget.__new__(slurm_target.SlurmTarget)
    poller: Any = SimpleNamespace(is_over=lambda native_id: over)
    target._open_cluster, target._open_poller = login, poller
    return target


def _read(hosts: Hosts, since: Cursor | None = None, *, over: bool = True) -> Iterator[LogLine]:
    if isinstance(hosts, Login):
        return _target(hosts, over=over).logs("1/job", since)
    here: Any = hosts
    return logs.read(here, _NATIVE, since)


@pytest.mark.parametrize("kind", [Hosts, Login])
def test_a_line_longer_than_anything_that_is_read_at_once(tmp_path: Path, kind: type[Hosts]) -> None:
    hosts, size = kind(tmp_path), 70 << 20
    with _log(tmp_path, "one", "rank-0.a0").open("wb") as file:
        file.truncate(size)  # no bytes on the disk
        file.seek(size)
        file.write(b"\nthe end\n")
    read, last = 0, ""
    for line in _read(hosts):
        assert len(line.text) <= log_lines.MAX_BYTES
        assert line.partial == ("\n" not in line.text)
        read, last = read + len(line.text), line.text
    assert (read, last) == (size + 9, "the end\n")
    assert hosts.most <= 4 << 20


@pytest.mark.parametrize("kind", [Hosts, Login])
def test_a_reader_that_is_cut_off_goes_on_with_the_next_byte(
    tmp_path: Path, kind: type[Hosts], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in the midst of a line; and logs that hold back what fits into no answer keep no other from being read."""
    monkeypatch.setattr(log_lines, "MAX_BYTES", 10)
    for module in (logs, slurm_target):
        monkeypatch.setattr(module, "_LIMIT", 10)
        monkeypatch.setattr(module, "_MAX_BYTES", 20)
    hosts = kind(tmp_path)
    texts = ["12345678", "a\nbb\nccc", "x" * 45 + "\ny", "", "é" * 9 + "\r\n", "12345678", "z\n" * 9, "12345678"]
    for number, text in enumerate(texts):
        _log(tmp_path, "one", f"rank-{number}.a0").write_bytes(text.encode())
    _log(tmp_path, "two", "rank-8.a0").write_bytes(b"q" * 33)
    (tmp_path / "one/jobs/job/logs/rank-99.a0.log").symlink_to("nowhere")
    for over in (False, True):
        if over:
            (tmp_path / "one/jobs/job/exit.json").write_text("{}")
        elif kind is Hosts:
            monkeypatch.setattr(jobs, "has_supervisor", lambda directory: "/one/" in directory)
        whole = list(_read(hosts, over=over))
        found = {rank: "".join(line.text for line in whole if line.rank == rank) for rank in range(9)}
        for number, text in enumerate(texts):
            finished = text[: text.rfind("\n") + 1]
            assert found[number] == (text if over else finished)
        assert found[8] == ("" if kind is Login else "q" * 33)
        for number in range(len(whole) + 1):
            cursor = Cursor()
            for line in whole[:number]:
                cursor.advance(line)
            rest = list(_read(hosts, Cursor.parse(str(cursor)), over=over))
            assert sorted(rest, key=str) == sorted(whole[number:], key=str)
    assert hosts.most <= 20


def test_the_last_lines_of_a_rank_that_moved_to_another_host(hosts: Hosts, tmp_path: Path) -> None:
    here: Any = hosts
    _log(tmp_path, "one", "rank-0.a0").write_text("a\nb\nc\n")
    _log(tmp_path, "two", "a1/rank-0.a0").write_text("d\ne\n")
    _log(tmp_path, "two", "rank-1.a0").write_text("f\ng\nh\ni\n")
    for count, expected in ((0, ""), (1, "ei"), (3, "cdeghi"), (9, "abcdefghi")):
        before = hosts.asked
        cursor = logs.tail_at(here, _NATIVE, Cursor(), count)
        assert hosts.asked - before == (4 if count == 1 or count == 3 else 2)
        assert sorted(line.text[0] for line in _read(hosts, cursor)) == list(expected)
    hosts.down = {_HOSTS[0]}
    cursor = logs.tail_at(here, _NATIVE, Cursor({"0/rank-0.a0": "2"}), 1)
    assert cursor == Cursor({"0/rank-0.a0": "2", "1/a1/rank-0.a0": "2", "1/rank-1.a0": "6"})


def test_the_last_lines_on_a_login_node(tmp_path: Path) -> None:
    login: Any = Login(tmp_path)
    _log(tmp_path, "one", "rank-0.a0").write_text("a\nb\n")
    _log(tmp_path, "one", "rank-0.a1").write_text("c\nd")
    for over, expected in ((True, ["c\n", "d"]), (False, ["b\n", "c\n"])):
        cursor = _target(login, over=over).tail_at("1/job", Cursor(), 2)
        assert [line.text for line in _read(login, cursor, over=over)] == expected
