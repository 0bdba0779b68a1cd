"""Log lines come out byte for byte."""

from __future__ import annotations

import json

import pytest

from accel.cli.logs import LogPrinter
from schedulers.job import Cursor, LogLine


def line(text: str, rank: int | None = 0, position: str = "1", *, partial: bool = False) -> LogLine:
    return LogLine(rank=rank, text=text, source=f"rank{rank}", position=position, partial=partial)


def test_one_ranks_bytes_are_exact(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    data = b"a\r\n10%\r20%\r\xff\xfe\x00\xc3\xa9 half"
    texts = data.decode("utf-8", "surrogateescape").splitlines(keepends=True)
    LogPrinter(prefix=False, json=False, since=None, flush=True).print(line(text) for text in texts)
    assert capfdbinary.readouterr().out == data


def test_several_ranks_are_told_apart_and_never_share_a_line(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    lines = [line("a\n"), line("10%\r", 1), line("no end", 2), line("a report\n", None), line("last", 1)]
    LogPrinter(prefix=True, json=False, since=None, flush=True).print(lines)
    shown = capfdbinary.readouterr()
    assert shown.out == b"[rank 0] a\n[rank 1] 10%\r[rank 2] no end\n[rank 1] last\n"
    assert shown.err == b"a report\n"


def test_a_report_of_the_launcher_stays_out_of_the_ranks_bytes(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    lines = [line("no end"), line("a report\n", None), line(" after all\n")]
    LogPrinter(prefix=False, json=False, since=None, flush=False).print(lines)
    shown = capfdbinary.readouterr()
    assert (shown.out, shown.err) == (b"no end after all\n", b"a report\n")


def test_a_line_about_missing_lines_is_no_ranks(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    gap = LogLine(rank=1, stream="missing", text="accel: some is missing\n", source="rank1", position="2")
    LogPrinter(prefix=True, json=False, since=None, flush=False).print([line("a\n"), gap, line("b\n", 1)])
    shown = capfdbinary.readouterr()
    assert (shown.out, shown.err) == (b"[rank 0] a\n[rank 1] b\n", b"accel: some is missing\n")


def test_json_lines_hold_exact_bytes_and_a_cursor_to_go_on_from(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    lines = [line("é\n", 0, "3"), line("\udcff\n", 1, "9")]
    LogPrinter(prefix=True, json=True, since=Cursor.parse("rank1=7"), flush=True).print(lines)
    first, second = (json.loads(text) for text in capfdbinary.readouterr().out.splitlines())
    assert first == {"rank": 0, "attempt": 0, "stream": "output", "text": "é\n", "cursor": "rank0=3,rank1=7"}
    assert second["base64"] == "/wo="
    assert second["text"] == "\ufffd\n"
    assert Cursor.parse(second["cursor"]) == Cursor({"rank0": "3", "rank1": "9"})


def test_pieces_of_a_line_are_put_together_again(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    lines = [line("ab", partial=True), line("cd", partial=True), line("e\n"), line("f\n")]
    LogPrinter(prefix=True, json=False, since=None, flush=False).print(lines)
    LogPrinter(prefix=False, json=False, since=None, flush=False).print(lines)
    assert capfdbinary.readouterr().out == b"[rank 0] abcde\n[rank 0] f\n" + b"abcde\nf\n"


def test_pieces_with_another_ranks_line_between_them(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    lines = [line("ab", partial=True), line("other\n", 1), line("cd", partial=True), line("said\n", None), line("e")]
    LogPrinter(prefix=True, json=False, since=None, flush=False).print(lines)
    assert capfdbinary.readouterr().out == b"[rank 0] ab\n[rank 1] other\n[rank 0] cd\n[rank 0] e\n"


def test_json_marks_pieces(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    lines = [line("ab", 0, "2", partial=True), line("c\n", 0, "4")]
    LogPrinter(prefix=True, json=True, since=None, flush=False).print(lines)
    first, second = (json.loads(text) for text in capfdbinary.readouterr().out.splitlines())
    assert (first["text"], first["partial"], first["cursor"]) == ("ab", True, "rank0=2")
    assert (second["text"], "partial" in second) == ("c\n", False)


def test_ranks_that_nobody_announced_are_told_apart_once_there_are_two(
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    lines = [line("alone\n"), line("hello\n", 1), line("again\n")]
    LogPrinter(prefix=None, json=False, since=None, flush=False).print(lines)
    assert capfdbinary.readouterr().out == b"alone\n[rank 1] hello\n[rank 0] again\n"
