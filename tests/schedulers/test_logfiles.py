"""Log lines from files that grow: byte-exact, none lost, doubled or cut, whenever and however often they are read."""

from __future__ import annotations

import time
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from schedulers import Cursor, LogLine
from schedulers.logfiles import Clock, cursor_at, read

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
    assert list(read(directory, cursor, complete=True)) == []


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


def test_a_line_longer_than_any_buffer_is_one_line(tmp_path: Path) -> None:
    long = b"x" * (5 << 20)
    (tmp_path / "rank-0.a0.log").write_bytes(long + b"\nshort\n")
    assert [len(line.text) for line in read(tmp_path, None, complete=False)] == [len(long) + 1, 6]


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
    clock = Clock(tmp_path)
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
