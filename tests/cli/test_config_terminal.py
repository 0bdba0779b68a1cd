"""`accel config` in a real pseudo-terminal: arrow keys, lines with a check, back and forward, Ctrl-C."""

from __future__ import annotations

import fcntl
import os
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

pytest.importorskip("prompt_toolkit.shortcuts.choice_input")

ROOT = Path(__file__).parents[2]
UP, DOWN, RIGHT, LEFT = "\x1b[A", "\x1b[B", "\x1b[C", "\x1b[D"
ENTER, BACK, ERASE, CTRL_C = "\r", "\x1b[Z", "\x15", "\x03"
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\x1b[=>]|\r")


class Terminal:
    """`accel config` as a person sees it: what it shows is read until it shows a text, then keys are typed."""

    def __init__(self, here: Path, *words: str) -> None:
        self.fd, there = os.openpty()
        fcntl.ioctl(there, termios.TIOCSWINSZ, struct.pack("4H", 40, 160, 0, 0))

        def own_the_terminal() -> None:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        self.process = subprocess.Popen(
            [sys.executable, "-m", "accel", "config", *words],
            cwd=here,
            env={
                "PATH": os.environ["PATH"],
                "PYTHONPATH": str(ROOT),
                "HF_HOME": str(here / "hf"),
                "TERM": "xterm",
                "PROMPT_TOOLKIT_NO_CPR": "1",
                "CUDA_VISIBLE_DEVICES": "",
                "LANG": "C.UTF-8",
            },
            stdin=there,
            stdout=there,
            stderr=there,
            start_new_session=True,
            preexec_fn=own_the_terminal,
        )
        os.close(there)
        self.shown = ""

    def until(self, text: str) -> None:
        """Reads until `text` has been shown since the last keys."""
        deadline = time.monotonic() + 60
        while text not in _CONTROL.sub("", self.shown):
            assert time.monotonic() < deadline, self.shown
            assert self._read(), self.shown

    def types(self, *keys: str) -> None:
        self.shown = ""
        os.write(self.fd, "".join(keys).encode())

    def asks(self, text: str, *keys: str) -> None:
        self.until(text)
        self.types(*keys)

    def ends(self) -> int:
        while self._read():
            pass
        return self.process.wait(60)

    def _read(self) -> bool:
        if not select.select([self.fd], [], [], 60)[0]:
            return False
        try:
            data = os.read(self.fd, 65536)
        except OSError:  # the other end is closed
            return False
        self.shown += data.decode(errors="replace")
        return bool(data)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    opened = Terminal(tmp_path, "--config_file", "x.yaml")
    yield opened
    opened.process.kill()
    opened.process.wait()
    os.close(opened.fd)


def test_a_whole_questionnaire(terminal: Terminal, tmp_path: Path) -> None:
    terminal.asks("Where will it run?", ENTER)
    terminal.asks("What will it train on?", ENTER)  # a machine without a GPU offers the CPU
    terminal.asks("How many processes", ERASE, "two", ENTER)
    terminal.asks("not a whole number from 0 on: 'two'", ERASE, "2", ENTER)
    terminal.asks("Compile the model", ENTER)
    terminal.asks("Which numbers", DOWN, DOWN, ENTER)
    terminal.asks("Check every exchange", ENTER)
    terminal.until("mixed_precision: bf16")
    terminal.asks("Write this to x.yaml?", ENTER)
    assert terminal.ends() == 0
    found = yaml.safe_load((tmp_path / "x.yaml").read_text())
    assert (found["distributed_type"], found["num_processes"], found["mixed_precision"]) == ("MULTI_CPU", 2, "bf16")


def test_what_the_file_says_is_offered(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text(
        "use_cpu: true\nnum_processes: 3\nmixed_precision: bf16\ndistributed_type: MULTI_CPU"
    )
    terminal = Terminal(tmp_path, "--config_file", "x.yaml")
    try:
        for question in ("Where will", "What will", "How many processes", "Compile", "Which numbers", "Check every"):
            terminal.asks(question, ENTER)
        terminal.asks("Write this to x.yaml?", ENTER)
        assert terminal.ends() == 0
    finally:
        terminal.process.kill()
        os.close(terminal.fd)
    found = yaml.safe_load((tmp_path / "x.yaml").read_text())
    assert (found["num_processes"], found["mixed_precision"]) == (3, "bf16")


def test_back_and_forward(terminal: Terminal, tmp_path: Path) -> None:
    terminal.asks("Where will it run?", ENTER)
    terminal.asks("What will it train on?", UP, ENTER)  # GPUs
    terminal.asks("How is the work spread", DOWN, RIGHT)
    terminal.asks("Which version of FSDP?", LEFT)
    terminal.asks("How is the work spread", LEFT)
    terminal.asks("What will it train on?", DOWN, ENTER)
    terminal.asks("How many processes", BACK)
    terminal.asks("What will it train on?", RIGHT)
    terminal.asks("How many processes", ENTER)
    terminal.asks("Compile the model", ENTER)
    terminal.asks("Which numbers", ENTER)
    terminal.asks("Check every exchange", ENTER)
    terminal.asks("Write this to x.yaml?", ENTER)
    assert terminal.ends() == 0
    found = yaml.safe_load((tmp_path / "x.yaml").read_text())
    assert (found["use_cpu"], "fsdp_config" in found) == (True, False)


@pytest.mark.parametrize("keys", [(CTRL_C,), (ENTER, CTRL_C)])
def test_leaving_writes_nothing(terminal: Terminal, tmp_path: Path, keys: tuple[str, ...]) -> None:
    terminal.asks("Where will it run?", keys[0])
    if len(keys) > 1:
        terminal.asks("What will it train on?", keys[1])
    assert terminal.ends() == 130
    assert "nothing was written" in terminal.shown
    assert not (tmp_path / "x.yaml").exists()
