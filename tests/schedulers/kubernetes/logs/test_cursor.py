"""Where a reader is in a container's log: whatever the portions and wherever it is cut, every byte comes once."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedulers.errors import SpecError
from schedulers.kubernetes.logs import cursor
from schedulers.kubernetes.logs.cursor import LogChunk, Position, TimestampParser, format_stamp, parse_stamp
from schedulers.store import log_lines
from schedulers.store.log_lines import MAX_BYTES

_LINES = st.lists(st.binary(max_size=12).map(lambda data: data.replace(b"\n", b"")), max_size=12)


def _log(lines: list[bytes], steps: list[int], *, ended: bool) -> bytes:
    """As a kubelet sends it. Times grow by `steps`, in nanoseconds; 0 is the same time once more."""
    at, found = 0, []
    for number, line in enumerate(lines):
        at += steps[number % len(steps)] if steps else 1
        stamp = f"2026-11-21T16:33:{at // 10**9 % 60:02}.{at % 10**9:09}Z"
        found.append(stamp.encode() + b" " + line + b"\n")
    text = b"".join(found)
    return text if ended else text.removesuffix(b"\n")


def _read(log: bytes, cuts: list[int], after: Position | None = None, *, complete: bool = True) -> list[LogChunk]:
    stamped = TimestampParser(after)
    pieces: list[LogChunk] = []
    places = sorted({0, len(log), *(cut % (len(log) + 1) for cut in cuts)})
    for begin, end in itertools.pairwise(places):
        pieces += stamped.feed(log[begin:end])
    return pieces + stamped.end(complete=complete)


def _text(pieces: list[LogChunk]) -> bytes:
    return b"".join(piece.data for piece in pieces)


@given(
    lines=_LINES,
    steps=st.lists(st.sampled_from([0, 0, 1, 10**6, 3 * 10**9]), max_size=4),
    cuts=st.lists(st.integers(0, 400), max_size=6),
    again=st.lists(st.integers(0, 400), max_size=6),
    stop=st.integers(0, 40),
    ended=st.booleans(),
)
def test_a_reader_that_is_cut_off_anywhere_goes_on_with_the_next_byte(
    lines: list[bytes], steps: list[int], cuts: list[int], again: list[int], stop: int, ended: bool
) -> None:
    log = _log(lines, steps, ended=ended)
    plain = b"".join(line + b"\n" for line in lines)
    whole = plain if ended else plain.removesuffix(b"\n")
    first = _read(log, cuts)
    assert _text(first) == whole
    kept = first[: stop % (len(first) + 1)]
    after = Position.parse(str(kept[-1].after)) if kept else None
    assert _text(kept) + _text(_read(log, again, after)) == whole


@given(lines=_LINES, cut=st.integers(0, 400))
def test_a_line_that_may_go_on_is_held_back(lines: list[bytes], cut: int) -> None:
    """What a stream gives before it is cut, and what the next gives from there on, is the log."""
    log = _log(lines, [1], ended=True)
    cut %= len(log) + 1
    first = _read(log[:cut], [], complete=False)
    after = first[-1].after if first else None
    assert _text(first) + _text(_read(log, [], after)) == b"".join(line + b"\n" for line in lines)


def test_steps_of_a_progress_bar_come_one_by_one() -> None:
    stamped = TimestampParser(None)
    assert stamped.feed(b"2026-11-21T16:33:00.5Z [rank 1]  10%\r 2") == [
        LogChunk(b"[rank 1]  10%\r", b"[rank 1]  10%\r 2", True, Position("20261121T163300.500000000Z", 0, 14))
    ]
    (piece,) = stamped.feed(b"0%\r\n")
    assert (piece.data, piece.head, piece.first) == (b" 20%\r\n", b"[rank 1]  10%\r 20%\r\n", False)
    assert piece.after == Position("20261121T163300.500000000Z", 1)


def test_lines_out_of_order_by_a_little_are_found_in_the_log_s_own_order() -> None:
    log = b"2026-11-21T16:33:01.2Z a\n2026-11-21T16:33:01.1Z b\n2026-11-21T16:33:01.15Z c\n2026-11-21T16:33:01.3Z d\n"
    pieces = _read(log, [])
    for number, piece in enumerate(pieces):
        assert _text(_read(log, [], piece.after)) == _text(pieces[number + 1 :])


def test_a_place_after_a_step_whose_end_a_portion_has_is_no_reason_to_give_it_twice() -> None:
    log = b"2026-11-21T16:33:00Z  10%\r 20%"
    first, second = _read(log, [])
    for cut in range(len(log)):
        assert _read(log, [cut], first.after) == [second]


@pytest.mark.parametrize("greeting", [b"", b"2026-11-21T16:33:00.4Z accel launch: started on p-0\n"])
@pytest.mark.parametrize("before", [1, 900])
def test_a_place_knows_whether_its_log_has_its_beginning(greeting: bytes, before: int) -> None:
    """Each reader that goes on from there finds the same gap, whoever read before it."""
    line = b"2026-11-21T16:33:00.%09dZ %s\n"
    lines = [line % (number, b"x" * 99) for number in range(before)]
    log = b"".join([*lines, greeting, line % (500_000_000, b"last")])
    stamped = TimestampParser(None, greets=True)
    pieces = stamped.feed(log)
    lost = before == 900
    assert [piece.gap for piece in pieces].count(True) == lost
    assert pieces[-1].after.before_launch_line == (not greeting and not lost)
    first = pieces[0].after
    assert first.before_launch_line
    assert Position.parse(str(first)).before_launch_line
    rest = TimestampParser(Position.parse(str(first))).feed(log)
    assert [piece.gap for piece in rest].count(True) == lost
    assert rest[-1].after.before_launch_line == pieces[-1].after.before_launch_line
    assert not any(piece.after.before_launch_line for piece in TimestampParser(None).feed(log))


@pytest.mark.parametrize("report", [b"rank 1 on node 1 (p-1) failed first: exited with code 1", b"preempted: SIGTERM"])
def test_a_report_without_a_greeting_before_it_comes_after_a_gap(report: bytes) -> None:
    """The launcher that writes it has greeted, however short the log is since it was rotated."""
    log = b"2026-11-21T16:33:00Z a\n2026-11-21T16:33:01Z accel launch: %s\n" % report
    assert [piece.gap for piece in TimestampParser(None, greets=True).feed(log)] == [False, True]
    greeted = b"2026-11-21T16:32:59Z accel launch: started on p-0\n" + log
    assert not any(piece.gap for piece in TimestampParser(None, greets=True).feed(greeted))


def test_the_log_of_another_run_is_read_from_its_beginning() -> None:
    log = b"2026-11-21T16:33:00Z a\n2026-11-21T16:33:01Z b\n"
    other = TimestampParser(Position("20261121T163259.000000000Z", 1), own=False, greets=True)
    assert [piece.after.before_launch_line for piece in other.feed(log)] == [True, True]
    same = TimestampParser(Position("20261121T163300.000000000Z", 1), own=False, greets=True)
    assert [piece.after.before_launch_line for piece in same.feed(log)] == [False]


def test_a_place_that_was_rotated_away_is_said_and_what_is_there_is_given() -> None:
    log = b"2026-11-21T16:40:00Z later\n"
    stamped = TimestampParser(Position("20261121T163300.000000000Z", 1))
    assert _text(stamped.feed(log)) == b"later\n"
    assert stamped.lost


def test_lines_of_a_run_that_were_taken_for_the_last_one_s_do_not_come_twice() -> None:
    log = b"2026-11-21T16:33:00Z a\n2026-11-21T16:33:01Z b\n2026-11-21T16:33:02Z c\n"
    second = TimestampParser(Position("20261121T163301.000000000Z", 1), own=False)
    assert _text(second.feed(log)) == b"c\n"
    for stamp in ("20261121T163259.000000000Z", "20261121T163301.500000000Z"):  # of the last one's own
        other = TimestampParser(Position(stamp, 1), own=False)
        assert _text(other.feed(log) + other.end(complete=True)) == b"a\nb\nc\n"
        assert not other.lost


def test_a_time_is_a_place_too() -> None:
    at = Position.at(1795278780.9)
    assert str(at) == "20261121T163300.000000000Z/0/0"
    assert at.since == "2026-11-21T16:32:59Z"
    log = b"2026-11-21T16:32:59.9Z a\n2026-11-21T16:33:00.1Z b\n"
    assert _text(_read(log, [], at)) == b"b\n"


def test_what_a_kubelet_says_instead_of_a_log_is_no_line_of_it() -> None:
    stamped = TimestampParser(None)
    said = b"unable to retrieve container logs for containerd://0123"
    assert stamped.feed(said) + stamped.end(complete=True) == []
    assert stamped.kubelet_lines == [said.decode()]


@pytest.mark.parametrize(
    ("word", "stamp"),
    [
        (b"2026-11-21T16:33:00Z", "20261121T163300.000000000Z"),
        (b"2026-11-21T16:33:00.123456789Z", "20261121T163300.123456789Z"),
        (b"2026-11-21T17:33:00.5+01:00", "20261121T163300.500000000Z"),
        (b"2026-11-21T16:33:00", None),
        (b"unable", None),
    ],
)
def test_times_of_any_zone_are_one_kind_of_stamp(word: bytes, stamp: str | None) -> None:
    assert parse_stamp(word) == stamp
    if stamp is not None:
        assert parse_stamp(format_stamp(stamp)) == stamp


@pytest.mark.parametrize("text", ["", "lost", "5", "20261121T163300Z/1/0", "20261121T163300.123456789Z/1"])
def test_a_position_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(SpecError, match="not a position in a log"):
        Position.parse(text)


@given(
    lines=st.lists(st.text("aé€🏖\r", max_size=70).map(str.encode), max_size=6),
    steps=st.lists(st.sampled_from([0, 0, 1, 10**6]), max_size=4),
    cuts=st.lists(st.integers(0, 400), max_size=9),
    again=st.lists(st.integers(0, 400), max_size=9),
    stop=st.integers(0, 40),
    ended=st.booleans(),
)
def test_a_long_line_comes_in_pieces_wherever_a_reader_is_cut_off(
    lines: list[bytes], steps: list[int], cuts: list[int], again: list[int], stop: int, ended: bool
) -> None:
    with pytest.MonkeyPatch.context() as patched:
        for module in (log_lines, cursor):
            patched.setattr(module, "MAX_BYTES", 40)
        log = _log(lines, steps, ended=ended)
        first = _read(log, cuts)
        plain = b"".join(line + b"\n" for line in lines)
        assert _text(first) == (plain if ended else plain.removesuffix(b"\n"))
        for piece in first:
            assert len(piece.data) <= 40
            piece.data.decode()  # whole characters
            assert piece.partial == (piece is not first[-1] and not piece.data.endswith((b"\r", b"\n")))
        kept = first[: stop % (len(first) + 1)]
        after = Position.parse(str(kept[-1].after)) if kept else None
        whole = [(piece.data, piece.after, piece.partial) for piece in first]
        assert [(piece.data, piece.after, piece.partial) for piece in kept + _read(log, again, after)] == whole


def test_what_is_held_of_a_line_without_an_end() -> None:
    for after in (None, Position("20261121T163300.000000000Z", 0, 5 * (MAX_BYTES - 2))):
        stamped = TimestampParser(after)
        chunk = b"x" * (1 << 16)
        fed, given = len(stamped.feed(b"2026-11-21T16:33:00Z ")), after.bytes if after else 0
        while fed < 8 << 20:
            given += len(_text(stamped.feed(chunk)))
            fed += len(chunk)
            assert max(0, fed - given) <= MAX_BYTES + len(chunk)
            assert len(stamped._rest) <= MAX_BYTES + len(chunk)
        given += len(_text(stamped.feed(b"\n")))
        assert given == fed + 1


def test_what_comes_instead_of_a_log_is_not_held_for_ever() -> None:
    stamped = TimestampParser(None)
    for _ in range(99):
        assert stamped.feed(b"no such log" + b"!" * (1 << 16)) == []
        assert len(stamped._rest) <= MAX_BYTES
    assert stamped.feed(b"\n" + b"and so on\n" * 99) == []
    assert sum(map(len, stamped.kubelet_lines)) < 10_000


_LONG = b"x" * 16384 + b"y" * 16384 + b"z" * 8192


def test_an_answer_that_begins_inside_a_line_has_no_words_of_the_kubelet() -> None:
    """The kubelet splits a line after 16 KiB, gives each part a time, and prints that of the first part only."""
    whole = b"2026-11-21T16:33:00Z " + _LONG + b"\n2026-11-21T16:33:02.5Z next\n2026-11-21T16:33:03Z last\n"
    pieces = _read(whole, [])
    assert _text(pieces) == _LONG + b"\nnext\nlast\n"
    rest = whole[whole.index(b"z") :]  # since 16:33:01, when the last part was written
    for cuts in ([], [100], [8192, 8193, 8200], list(range(0, 9000, 7))):
        stamped, found = TimestampParser(pieces[-2].after), b""
        places = sorted({0, len(rest), *cuts})
        for begin, end in itertools.pairwise(places):
            found += _text(stamped.feed(rest[begin:end]))
        assert found + _text(stamped.end(complete=True)) == b"last\n"
        assert (stamped.kubelet_lines, stamped.lost, stamped.absent) == ([], False, False)


def test_the_rest_of_a_line_before_a_time_is_not_after_it() -> None:
    rest = b"z" * 8192 + b"\n2026-11-21T16:33:02.5Z next\n"
    assert _text(_read(rest, [5], Position.at(1795278781.0))) == b"next\n"


@pytest.mark.parametrize("place", [None, Position("20261121T163300.000000000Z", 1)])
@pytest.mark.parametrize(
    "words",
    [
        b"unable to retrieve container logs for containerd://0123",
        b'failed to try resolving symlinks in path "/var/log/pods/0.log": lstat /var/log/pods/0.log: no such file\n',
    ],
)
def test_a_log_that_is_absent_is_neither_empty_nor_lost(place: Position | None, words: bytes) -> None:
    for complete in (True, False):
        stamped = TimestampParser(place)
        assert stamped.feed(words[:30]) + stamped.feed(words[30:]) + stamped.end(complete=complete) == []
        assert (stamped.absent, stamped.lost, stamped.kubelet_lines) == (True, False, [words.decode().strip()])


def test_why_a_kubelet_ends_a_stream_is_no_line_of_the_log() -> None:
    log = b"2026-11-21T16:33:00Z last\n"
    for words in (
        b'rpc error: code = NotFound desc = an error occurred when try to find container "0": not found',
        b"20",
    ):
        stamped = TimestampParser(None)
        assert _text(stamped.feed(log + words) + stamped.end(complete=True)) == b"last\n"
