"""Log lines from files that grow: byte-exact, none lost, doubled or cut, whenever and however often they are read."""

from __future__ import annotations

import errno
import io
import itertools
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedulers import Cursor, LogLine
from schedulers.node import logs as files
from schedulers.node.logs import Clock
from schedulers.store import log_lines
from schedulers.store.log_lines import MAX_BYTES, cursor_at, read, split, tail_at

BYTES = st.lists(
    st.sampled_from([b"a", b"\n", b"\r", b"\r\n", b"\xc3", b"\xa9", b"\xff", b"word ", "é".encode(), "🏖".encode()]),
    max_size=60,
).map(b"".join)


def text_of(lines: list[LogLine]) -> bytes:
    return "".join(line.text for line in lines).encode("utf-8", "surrogateescape")


def lines_of(data: bytes) -> list[str]:
    """What the lines are, said another way: `bytes.splitlines` knows exactly these three endings."""
    return [line.decode("utf-8", "surrogateescape") for line in data.splitlines(keepends=True)]


@settings(deadline=None)
@given(chunks=st.lists(BYTES, max_size=6))
def test_following_a_growing_file_gives_every_line_once(tmp_path_factory: object, chunks: list[bytes]) -> None:
    directory = _fresh(tmp_path_factory)
    path = directory / "rank-0.a0.log"
    path.touch()
    cursor, seen = Cursor(), []
    for chunk in chunks:
        with path.open("ab") as file:
            file.write(chunk)
        for line in read(directory, cursor, complete=False):
            seen.append(line)
            cursor.advance(line)
            cursor = Cursor.parse(str(cursor))
    for line in read(directory, cursor, complete=True):
        seen.append(line)
        cursor.advance(line)
    whole = b"".join(chunks)
    assert text_of(seen) == whole
    assert [line.text for line in seen] == lines_of(whole)
    assert not any(line.partial for line in seen)
    assert list(read(directory, cursor, complete=True)) == []


@settings(deadline=None)
@given(chunks=st.lists(BYTES, max_size=6), cuts=st.lists(st.integers(0, 9), max_size=6))
def test_a_long_line_comes_in_pieces_whenever_it_is_read(
    tmp_path_factory: object, chunks: list[bytes], cuts: list[int]
) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(log_lines, "MAX_BYTES", 10)
        patched.setattr(log_lines, "_CHUNK", 7)
        directory = _fresh(tmp_path_factory)
        path = directory / "rank-0.a0.log"
        path.touch()
        seen: list[LogLine] = []
        cursor = Cursor()
        for chunk, most in zip(chunks, [*cuts, *[99] * 6], strict=False):
            with path.open("ab") as file:
                file.write(chunk)
            for line in itertools.islice(read(directory, cursor, complete=False), most):  # the reader goes away
                seen.append(line)
                cursor.advance(line)
                cursor = Cursor.parse(str(cursor))
        seen += read(directory, cursor, complete=True)
        assert seen == list(read(directory, None, complete=True))  # the same pieces, and so the same cursors
    assert "".join(line.text for line in seen).encode("utf-8", "surrogateescape") == b"".join(chunks)
    whole, going_on = [], ""
    for line in seen:
        assert len(line.text.encode("utf-8", "surrogateescape")) <= 10
        assert not (line.partial and line.text.endswith(("\n", "\r")))
        going_on += line.text
        if not line.partial:
            whole.append(going_on)
            going_on = ""
    assert [line.encode("utf-8", "surrogateescape") for line in whole] == b"".join(chunks).splitlines(keepends=True)


@pytest.mark.parametrize("before", range(4))
@pytest.mark.parametrize("sign", ["é", "€", "🏖"])
def test_a_piece_ends_between_characters(tmp_path: Path, sign: str, before: int) -> None:
    text = "x" * (MAX_BYTES - 2 - before) + sign * 3
    (tmp_path / "rank-0.a0.log").write_text(text, encoding="utf-8")
    first, last = read(tmp_path, None, complete=True)
    assert (first.partial, last.partial) == (True, False)
    assert first.text + last.text == text  # neither has an escaped byte


def test_what_is_asked_of_a_stream_without_line_ends(tmp_path: Path) -> None:
    """No more is held than was asked for at once, and a piece: the memory and the time follow from that."""
    size, asked, given = 64 << 20, 0, 0

    def stream(count: int) -> bytes:
        nonlocal asked
        count = min(count, size - asked)
        asked += count
        return bytes(count)

    for piece, partial in split(stream, complete=True):
        given += len(piece)
        assert len(piece) <= MAX_BYTES
        assert partial == (given < size)
        assert asked - given <= 2 * MAX_BYTES
    assert given == size


@settings(deadline=None)
@given(data=BYTES, start=st.integers(0, 20), count=st.integers(0, 6), complete=st.booleans(), block=st.integers(1, 9))
def test_the_last_lines_are_found_from_the_end(
    tmp_path_factory: object, data: bytes, start: int, count: int, complete: bool, block: int
) -> None:
    path = _fresh(tmp_path_factory) / "rank-0.a0.log"
    path.write_bytes(data)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(files, "BLOCK", block)
        number, begin = files.tail(str(path), start, count, complete)
    lines = data[start:].splitlines(keepends=True)
    rest = b"" if complete or not lines or lines[-1].endswith(b"\n") else lines.pop()
    last = lines[max(0, len(lines) - count) :]
    assert (number, data[begin:]) == (len(last), b"".join(last) + rest)


def test_the_last_lines_of_a_rank_are_those_of_its_last_attempts(tmp_path: Path) -> None:
    (tmp_path / "rank-0.a0.log").write_text("a\nb\nc\n")
    (tmp_path / "rank-0.a1.log").write_text("d\ne")
    (tmp_path / "rank-1.a0.log").write_text("f\n" + "x" * (3 * MAX_BYTES) + "\n")
    (tmp_path / "node-0.log").write_text("1\n2\n")

    def tail(count: int, *, complete: bool = True) -> list[tuple[str, int, bool]]:
        cursor = tail_at(tmp_path, Cursor(), count, complete=complete)
        return [(line.text[:1], len(line.text), line.partial) for line in read(tmp_path, cursor, complete=complete)]

    most = MAX_BYTES - 2
    long = [("x", most, True), ("x", most, True), ("x", most, True), ("x", 7, False)]
    assert tail(1) == [*long, ("e", 1, False), ("2", 2, False)]
    assert tail(0) == []
    ends = [("d", 2, False), ("e", 1, False), ("1", 2, False), ("2", 2, False)]
    assert tail(3) == [("c", 2, False), ("f", 2, False), *long, *ends]
    assert tail(1, complete=False) == [*long, ("d", 2, False), ("2", 2, False)]


def test_a_log_is_read_from_its_end_for_its_last_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rank-0.a0.log"
    with path.open("wb") as file:
        file.truncate(1 << 30)
        file.seek(0, os.SEEK_END)
        file.write(b"\n1\n2\n3\n")
    asked: list[int] = []

    class Counted(io.FileIO):
        def read(self, size: int | None = -1) -> bytes:
            asked.append(size or 0)
            return super().read(size)

    monkeypatch.setattr(files, "opened", Counted)
    cursor = tail_at(tmp_path, Cursor(), 2, complete=False)
    assert [line.text for line in read(tmp_path, cursor, complete=False)] == ["2\n", "3\n"]
    assert sum(asked) < 4 << 20


def test_what_is_no_file_is_no_log(tmp_path: Path) -> None:
    for name in ("rank-0.a0", "rank-1.a0", "rank-5.a0"):
        (tmp_path / f"{name}.log").write_text(f"{name}\n")
    (tmp_path / "rank-2.a0.log").symlink_to(tmp_path / "nowhere")
    (tmp_path / "rank-3.a0.log").symlink_to("rank-3.a0.log")
    (tmp_path / "rank-4.a0.log").mkdir()
    os.mkfifo(tmp_path / "rank-6.a0.log")
    Clock(str(tmp_path)).note()
    assert set(log_lines.offsets(cursor_at(tmp_path, time.time() + 1))) >= {"rank-0.a0", "rank-1.a0", "rank-5.a0"}
    lines = read(tmp_path, None, complete=True)
    assert next(lines).source == "rank-0.a0"
    (tmp_path / "rank-1.a0.log").unlink()  # in the midst
    assert [line.source for line in lines] == ["rank-5.a0"]
    assert [line.source for line in read(tmp_path, tail_at(tmp_path, Cursor(), 1, complete=True), complete=True)] == [
        "rank-0.a0",
        "rank-5.a0",
    ]


@settings(deadline=None)
@given(data=BYTES, stop=st.integers(0, 100))
def test_resuming_from_any_line_s_cursor_gives_exactly_the_rest(
    tmp_path_factory: object, data: bytes, stop: int
) -> None:
    directory = _fresh(tmp_path_factory)
    (directory / "rank-0.a0.log").write_bytes(data)
    (directory / "rank-1.a0.log").write_bytes(data[::-1])
    whole = list(read(directory, None, complete=True))
    cursor = Cursor()
    for line in whole[:stop]:
        cursor.advance(line)
    assert list(read(directory, cursor, complete=True)) == whole[stop:]


def test_ranks_and_attempts_in_order_and_the_launcher_last(tmp_path: Path) -> None:
    for name in ("node-0", "rank-10.a0", "rank-2.a0", "rank-2.a1", "setup"):
        (tmp_path / f"{name}.log").write_text(f"{name}\n")
    for other in ("launch.jsonl", "supervisor.txt", "notes.log", "rank-x.a0.log"):
        (tmp_path / other).write_text("not a log\n")
    lines = list(read(tmp_path, None, complete=True))
    assert [line.source for line in lines] == ["setup", "rank-2.a0", "rank-10.a0", "rank-2.a1", "node-0"]
    assert [(line.rank, line.attempt) for line in lines] == [(None, 0), (2, 0), (10, 0), (2, 1), (None, 0)]


def _fresh(factory: object) -> Path:
    directory: Path = factory.mktemp("logs")  # type: ignore[attr-defined]
    return directory


def test_lines_are_found_by_the_time_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.a0.log"
    clock = Clock(str(tmp_path))
    times = [time.time()]
    for chunk in (b"one\ntw", b"o\n", b"three\nfour"):
        with path.open("ab") as file:
            file.write(chunk)
        clock.note()
        times.append(time.time())

    def since(when: float) -> list[str]:
        return [line.text for line in read(tmp_path, cursor_at(tmp_path, when), complete=True)]

    assert since(times[0]) == ["one\n", "two\n", "three\n", "four"]
    assert since(times[1]) == ["two\n", "three\n", "four"]
    assert since(times[2]) == ["three\n", "four"]
    assert since(times[3]) == ["four"]


def test_the_time_of_a_job_that_never_wrote(tmp_path: Path) -> None:
    assert cursor_at(tmp_path, time.time()) == Cursor()


def test_notes_of_weeks_take_little_room_and_stay_exact_in_proportion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, most = 1_000_000, 1 << 14
    now = began
    monkeypatch.setattr(files, "MAX_NOTES_BYTES", most)
    monkeypatch.setattr(time, "time", lambda: float(now))
    path = tmp_path / "rank-0.a0.log"
    path.touch()
    clock = Clock(str(tmp_path))
    for now in range(began, began + 3000):
        os.truncate(path, 2 * (now - began))
        if now % 700 == 0:
            clock = Clock(str(tmp_path))  # another writer: the job was started again
        clock.note()
        assert (tmp_path / "sizes.jsonl").stat().st_size <= most
    path.write_bytes(b"x\n" * 3000)
    for age in range(0, 2990, 31):
        stood = log_lines.offsets(cursor_at(tmp_path, now - age)).get("rank-0.a0", 0) // 2
        assert 0 <= now - began - age - stood <= age / 4, age
    assert sorted(os.listdir(tmp_path)) == ["rank-0.a0.log", "sizes.jsonl"]


def test_notes_that_cannot_be_thinned_out_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_NOTES_BYTES", 200)
    path = tmp_path / "rank-0.a0.log"
    clock = Clock(str(tmp_path))
    for number in range(3):
        path.write_bytes(b"x" * number)
        clock.note()
    before = (tmp_path / "sizes.jsonl").read_bytes()
    replaced = []

    def full(*paths: str) -> None:
        replaced.append(paths)
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "replace", full)
    path.write_bytes(b"x" * 9)
    assert not clock.full
    clock.note()
    assert clock.full
    assert replaced
    assert (tmp_path / "sizes.jsonl").read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == ["rank-0.a0.log", "sizes.jsonl"]


def test_notes_that_make_no_sense_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "rank-0.a0.log").write_text("one\ntwo\n")
    good = '{"schema": 1, "time": 5.0, "sizes": {"rank-0.a0": 4}}'
    odd = [
        "null",
        "[[]]",
        '{"time": "x"}',
        '{"time": 5, "sizes": []}',
        '{"time": 5, "sizes": {"rank-0.a0": 1e999}}',
        "{",
    ]
    (tmp_path / "sizes.jsonl").write_text("\n".join([*odd, good, *odd, '{"time": NaN, "sizes": {"rank-0.a0": 1}']))
    assert cursor_at(tmp_path, 9.0) == Cursor({"rank-0.a0": "4"})


def test_a_note_may_be_beyond_the_end_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "rank-0.a0.log").write_text("one\n")
    (tmp_path / "sizes.jsonl").write_text('{"time": 5, "sizes": {"rank-0.a0": 1000000000000000}}\n')
    assert cursor_at(tmp_path, 9.0) == Cursor({"rank-0.a0": "4"})


@pytest.mark.parametrize(
    ("text", "last"),
    [
        ("", ""),
        ("\n \n", ""),
        ("a\nb\n\n", "b"),
        ("x" * 200_000, "x" * 9),
        ("a\n" + "\n" * 99_999, ""),
        ("ä\xff", "ä\xff"),
    ],
)
def test_last_line(tmp_path: Path, text: str, last: str) -> None:
    (tmp_path / "node-0.log").write_text(text, encoding="utf-8")
    assert files.last_line(str(tmp_path / "node-0.log"), 9) == last
    assert files.last_line(str(tmp_path), 9) == files.last_line(str(tmp_path / "none"), 9) == ""


def test_the_newest_event_is_found_from_the_end_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path / "launch.jsonl")
    assert files.newest_event(path, "attempt") is None
    assert files.newest_attempt(path) is None
    written: list[dict[str, Any]] = [{"event": "refused", "reason": "setup"}]
    written += [{"event": "attempt", "attempt": number} for number in range(5000)]
    written += [{"event": "failure", "failure": {"message": "é\n\r" * 9000}}]
    Path(path).write_text("".join(json.dumps(event) + "\n" for event in written) + '[1]\n{"event": "attempt", "att')
    asked: list[int] = []

    class Counted(io.FileIO):
        def read(self, size: int | None = -1) -> bytes:
            asked.append(size or 0)
            return super().read(size)

    monkeypatch.setattr(files, "opened", Counted)
    assert files.newest_attempt(path) == 4999
    assert files.newest_event(path, "failure", "attempt") == written[-1]
    assert sum(asked) < 1 << 20
    assert files.newest_event(path, "refused") == written[0]
    assert files.newest_event(path, "other") is None
