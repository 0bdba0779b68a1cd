"""Following a job's output: every byte once, up to the end, whatever happens to the backend meanwhile."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
from collections.abc import Iterator

import pytest

from schedulers.job import Cursor, LogLine, State
from schedulers.jobs.follow import _last
from schedulers.jobs.handle import submit

from .test_handle import KINDS, Place, place, release, released, texts

__all__ = ["place"]


@KINDS
def test_follow_gives_every_byte_once(place: Place, kind: str) -> None:
    """A process that writes pieces of lines, bytes that are not UTF-8, and no newline at the end."""
    code = (
        "import os\n"
        "for n in range(300):\n"
        "    os.write(1, b'%d \\xff half' % (n % 3)); os.write(1, b' line\\n')\n"
        "os.write(1, b'2 the end')\n"
    )
    job = submit(sys.executable, ["-c", code], target=kind, entry="command")
    lines = list(job.logs(follow=True))
    expected = b"".join(b"%d \xff half line\n" % (n % 3) for n in range(300)) + b"2 the end"
    assert texts(lines).encode("utf-8", "surrogateescape") == expected
    assert job.record.status.state is State.SUCCEEDED


def test_follow_waits_for_lines_and_ends_with_the_job(place: Place) -> None:
    gates = [place.here / "one", place.here / "two"]
    job = place.sh(f"echo 0 a; {released(gates[0])}; echo 0 b; {released(gates[1])}; printf '0 c'")
    lines = job.logs(follow=True)
    first = next(lines)
    assert first.text == "0 a\n"
    release(gates[0])
    assert next(lines).text == "0 b\n"
    release(gates[1])
    assert [line.text for line in lines] == ["0 c"]
    cursor = Cursor()
    cursor.advance(first)
    assert texts(list(job.logs(since=cursor))) == texts(list(job.logs(since=str(cursor)))) == "0 b\n0 c"


def test_follow_outlasts_an_unreachable_target(place: Place) -> None:
    gate = place.here / "gate"
    job = place.sh(f"echo 0 a; {released(gate)}; echo 0 b")
    lines = job.logs(follow=True)
    assert next(lines).text == "0 a\n"
    (place.home / "unreachable").touch()
    seen = len(place.calls())
    helper = (
        "import sys, pathlib\n"
        "calls, seen = pathlib.Path(sys.argv[1]), int(sys.argv[2])\n"
        "down, gate = pathlib.Path(sys.argv[3]), sys.argv[4]\n"
        "while sum(line.startswith('logs') for line in calls.read_text().splitlines()[seen:]) < 2: pass\n"
        "down.unlink()\n"
        "open(gate, 'w').write('go\\n')\n"
    )
    arguments = [str(place.home / "calls"), str(seen), str(place.home / "unreachable"), str(gate)]
    with subprocess.Popen([sys.executable, "-c", helper, *arguments]):
        assert [line.text for line in lines] == ["0 b\n"]


def test_ranks_and_tail(place: Place) -> None:
    job = place.sh("for i in 1 2 3 4; do for r in 0 1; do echo $r $i; done; done; echo launcher")
    job.wait(120)
    assert texts(list(job.logs(ranks=[1]))) == "1 1\n1 2\n1 3\n1 4\n"
    assert texts(list(job.logs(tail=1))) == "0 4\n1 4\nlauncher\n"
    assert texts(list(job.logs(tail=2, ranks=[0, 1], follow=True))) == "0 3\n1 3\n0 4\n1 4\n"
    assert texts(list(job.logs(tail=0))) == texts(list(job.logs(tail=0, follow=True))) == ""


def test_tail_then_follow_misses_nothing(place: Place) -> None:
    gate = place.here / "gate"
    job = place.sh(f"echo 0 a; echo 0 b; {released(gate)}; echo 0 c")
    earlier = job.logs(follow=True)
    assert [next(earlier).text, next(earlier).text] == ["0 a\n", "0 b\n"]
    lines = job.logs(follow=True, tail=1)
    assert next(lines).text == "0 b\n"
    release(gate)
    assert [line.text for line in lines] == ["0 c\n"]


def test_tail_counts_lines_and_not_their_pieces() -> None:
    """Of targets that cannot say where the last lines begin."""

    def line(text: str, rank: int = 0) -> LogLine:
        return LogLine(rank=rank, text=text, source="s", position="1", partial=not text.endswith("\n"))

    words = ["a\n", "b1", "b2", "b3\n", "c\n", "d1", "d2"]
    lines = [line(text, rank) for text in words for rank in (0, 1)]
    for count, expected in ((0, "d1d2"), (1, "c\nd1d2"), (2, "b1b2b3\nc\nd1d2"), (9, "".join(words))):
        for ranks in ([0], [1]):
            assert texts(list(_last(lambda _: iter(lines), Cursor(), ranks, count))) == expected


@pytest.mark.parametrize("before", [0, 3])
def test_the_tail_of_a_very_long_line_takes_little_memory(before: int) -> None:
    """400 MB; a reader of such a line does not hold it either."""

    def read(since: Cursor) -> Iterator[LogLine]:
        for number in range(int(since.position("s") or 0), before + 401):
            text = f"{number}\n" if number < before else "\n" if number == before + 400 else f"{number:01000000}"
            position, partial = str(number + 1), not text.endswith("\n")
            yield LogLine(rank=0, text=text, source="s", position=position, partial=partial)
        if since.position("t") is None:
            yield LogLine(rank=1, text="other\n", source="t", position="1")

    cursor, numbers, size = Cursor(), [], 0
    tracemalloc.start()
    for line in _last(read, cursor, None, 1):
        size += len(line.text)
        numbers.append(line.text.strip())
        del line
        numbers[-1] = numbers[-1][-4:]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert numbers == [*(f"{number:04}" for number in range(before, before + 400)), "", "other"[-4:]]
    assert size == 400_000_000 + len("\n" + "other\n")
    assert peak < 64_000_000
    assert str(cursor) == f"s={before + 401},t=1"
