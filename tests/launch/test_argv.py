"""A program's arguments arrive bit for bit."""

from __future__ import annotations

import json
import os
import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from .conftest import Launcher

RECORD = """\
import json, os, sys
with open(os.environ["RECORD"] + os.environ["RANK"], "w") as file:
    json.dump([os.fsencode(word).hex() for word in sys.argv[1:]], file)
"""

WORDS = [
    "",
    " ",
    "  a b ",
    "'",
    '"',
    "'\"'",
    "\n",
    "a\nb\n",
    "\t",
    "$(touch owned)",
    "`touch owned`",
    "$HOME",
    "${HOME}",
    "\\",
    "\\\\n",
    "a\\",
    "*",
    "?",
    "[a-z]",
    "~",
    "!",
    "!!",
    "#",
    ";",
    "a;touch owned",
    "&&",
    "|",
    ">",
    "<",
    "%s",
    "%%",
    "{}",
    "{0}",
    "-",
    "--",
    "---",
    "-m",
    "-x",
    "--help",
    "-h",
    "--num_processes",
    "--num_processes=7",
    "--lr",
    "-1",
    "-1e-3",
    "--cpu",
    "--log_dir=x",
    "--no_python",
    "@file",
    "=",
    "a=b",
    "--a=b=c",
    "007",
    "1.10",
    "1e3",
    "True",
    "null",
    "é",
    "日本語",
    "\U0001f600",
    "e\u0301",
    "\u202e",
    "\x01\x7f",
    "\r\n",
    "[1, 2]",
    '{"a": [1, "b"]}',
    "http://x/?a=1&b=2#c",
]
RAW = [os.fsdecode(raw) for raw in (b"\xff", b"a\xfe\x80b", b"\xc3", b"\xed\xa0\x80")]


def hostile_lists(count: int, seed: int) -> list[list[str]]:
    """Lists of words that something between a shell and a program might take for something else."""
    rng = random.Random(seed)

    def word() -> str:
        kind = rng.random()
        if kind < 0.55:
            return rng.choice(WORDS)
        if kind < 0.65:
            return rng.choice(RAW)
        if kind < 0.8:
            return "".join(rng.choice(WORDS) for _ in range(rng.randint(2, 5)))
        return os.fsdecode(bytes(rng.randint(1, 255) for _ in range(rng.randint(1, 20))))

    return [[word() for _ in range(rng.randint(0, 12))] for _ in range(count)]


COUNT = 192 if os.environ.get("ACCEL_TEST_EXAMPLES") == "many" else 32  # see tests/examples.py
LISTS = [
    *([word] for word in ("--", "-m", "-h", "")), ["x" * 100_000], RAW, WORDS, [""] * 50, *hostile_lists(COUNT, seed=1)
]  # fmt: skip


def recorded(launcher: Launcher, name: str, rank: int = 0) -> list[str]:
    with open(launcher.here / f"{name}{rank}") as file:
        return [os.fsdecode(bytes.fromhex(word)) for word in json.load(file)]


def test_with_one_process(launcher: Launcher) -> None:
    script = launcher.script(RECORD)

    def arrived(number: int) -> list[str]:
        launcher(script, *LISTS[number], RECORD=f"r{number}.")
        return recorded(launcher, f"r{number}.")

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(arrived, range(len(LISTS)))) == LISTS
    assert not (launcher.here / "owned").exists()


@pytest.mark.parametrize(
    ("flags", "program"),
    [
        ([], ["train.py"]),
        (["--start_method", "spawn"], ["train.py"]),
        (["-m"], ["train"]),
        (["--no_python"], ["/bin/sh", "exec.sh"]),
    ],
    ids=["forked", "spawned", "module", "command"],
)
def test_with_two(launcher: Launcher, flags: list[str], program: list[str]) -> None:
    launcher.script(RECORD)
    launcher.script('exec python3 -S train.py "$@"\n', "exec.sh")
    words = ["x" * 100_000, *WORDS, *RAW, *(word for words in hostile_lists(20, seed=2) for word in words)]
    launcher("--num_processes", "2", *flags, *program, *words, RECORD="r.", PYTHONUTF8="1")
    assert recorded(launcher, "r.", 0) == words
    assert recorded(launcher, "r.", 1) == words


def test_with_a_log_of_its_own(launcher: Launcher) -> None:
    launcher("--log_dir", "logs", launcher.script(RECORD), *WORDS, *RAW, RECORD="r.")
    assert recorded(launcher, "r.") == [*WORDS, *RAW]
    assert launcher.log(0) == ""
