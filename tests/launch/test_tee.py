"""`--tee` of lines that are longer than it holds: every byte once, and never two ranks in one line."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from accel.launch import tee

Followed = tee._Followed


def _followed(path: Path, ranks: int) -> list[Followed]:
    output = tee._Output()
    files = [path / f"rank-{rank}.log" for rank in range(ranks)]
    for file in files:
        file.touch()
    return [Followed(str(file), b"[rank %d] " % rank, output) for rank, file in enumerate(files)]


def _written(path: Path, data: bytes, rank: int = 0) -> None:
    with (path / f"rank-{rank}.log").open("ab") as file:
        file.write(data)


def test_a_long_line_without_an_end_is_one_line(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    (file,) = _followed(tmp_path, 1)
    for _ in range(40):
        _written(tmp_path, b"x" * 100_000)
        file.print_new()
        assert len(file._rest) <= tee._MAX_LINE
    _written(tmp_path, b"\nshort\n")
    file.print_new()
    file.print_rest()
    assert capfdbinary.readouterr().out == b"[rank 0] " + b"x" * 4_000_000 + b"\n[rank 0] short\n"


def test_a_long_line_that_nobody_ends(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    (file,) = _followed(tmp_path, 1)
    _written(tmp_path, b"x" * (2 * tee._MAX_LINE))
    file.print_new()
    file.print_rest()
    assert capfdbinary.readouterr().out == b"[rank 0] " + b"x" * (2 * tee._MAX_LINE) + b"\n"


def test_a_piece_ends_between_characters(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tee, "_MAX_LINE", 10)
    for text in ("🏖" * 9, "ab" + "€" * 9, "é" * 20):
        (file,) = _followed(tmp_path, 1)
        _written(tmp_path, text.encode())
        file.print_new()
        assert capfdbinary.readouterr().out.decode().startswith("[rank 0] ")
        os.truncate(tmp_path / "rank-0.log", 0)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    writes=st.lists(
        st.tuples(
            st.integers(0, 1),
            st.lists(st.sampled_from([b"a", b"bb", b"\n", b"\r", "é".encode(), b"\xff"]), max_size=30).map(b"".join),
        ),
        max_size=12,
    )
)
def test_every_byte_of_every_rank_comes_once(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes], writes: list[tuple[int, bytes]]
) -> None:
    """Also where another rank's lines come in the midst of a line: its parts are marked, and can be put together."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("ACCEL_POD_UID", "a")
        patched.setattr(tee, "_MAX_LINE", 8)
        patched.setattr(tee, "_CHUNK", 16)
        files = _followed(tmp_path, 2)
        expected = [b"", b""]
        for rank, data in writes:
            _written(tmp_path, data, rank)
            expected[rank] += data
            for file in files:
                file.print_new()
        for file in files:
            file.print_rest()
    for name in os.listdir(tmp_path):
        os.unlink(tmp_path / name)
    found = [b"", b""]
    for line in capfdbinary.readouterr().out.split(b"\n")[:-1]:
        match = re.match(rb"\[rank (\d)\] (.*?)(\x1f?)\Z", line, re.DOTALL)
        assert match is not None, line
        found[int(match[1])] += match[2] + (b"" if match[3] else b"\n")
    assert found == [data if data.endswith(b"\n") or not data else data + b"\n" for data in expected]


def test_outside_of_a_pod_nothing_is_marked(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tee, "_MAX_LINE", 4)
    first, second = _followed(tmp_path, 2)
    _written(tmp_path, b"abcdefgh")
    first.print_new()
    _written(tmp_path, b"x\n", rank=1)
    second.print_new()
    first.print_rest()
    assert capfdbinary.readouterr().out == b"[rank 0] abcd\n[rank 1] x\n[rank 0] efgh\n"
