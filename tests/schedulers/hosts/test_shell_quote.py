from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedulers.errors import SpecError
from schedulers.hosts import session

SHOW = "import os, sys; sys.stdout.buffer.write(b'\\0'.join(map(os.fsencode, ['', *sys.argv[1:]])))"
MARK = "mark"
SHELLS = "bash dash ksh zsh tcsh fish".split()

words = st.text(st.characters(exclude_characters="\0"), max_size=20)


def _run(argv: list[str], stdin: bytes = b"") -> tuple[int, bytes]:
    script = session.script(argv, MARK)
    done = subprocess.run(
        ["/bin/sh", "-c", session.loader(len(script))], input=script + stdin, capture_output=True, timeout=60
    )
    before, found, after = done.stdout.partition(f"\n{MARK}\n".encode())
    assert (before, bool(found)) == (b"", True)
    return done.returncode, after


@settings(deadline=None)
@given(st.lists(words, max_size=5))
def test_every_argument_arrives_bit_for_bit(arguments: list[str]) -> None:
    raw = [os.fsencode(word.encode("utf-8", "surrogatepass").decode("utf-8", "surrogateescape")) for word in arguments]
    given_words = [os.fsdecode(word) for word in raw]
    status, out = _run([sys.executable, "-c", SHOW, *given_words])
    assert (status, out.split(b"\0")) == (0, [b"", *raw])


def test_what_follows_the_script_is_the_commands_input() -> None:
    assert _run(["cat"], stdin=b"\0\xffrest\n") == (0, b"\0\xffrest\n")


def test_a_program_is_run_and_not_a_builtin_of_the_shell() -> None:
    assert _run(["echo", "a\\nb"]) == (0, b"a\\nb\n")  # dash's own echo would print two lines


@pytest.mark.parametrize(
    ("argv", "status"), [(["sh", "-c", "exit 7"], 7), (["sh", "-c", "kill -9 $$"], 137), (["nowhere-to-be-found"], 127)]
)
def test_the_status_is_the_programs(argv: list[str], status: int) -> None:
    assert _run(argv)[0] == status


@pytest.mark.parametrize("login_shell", [name for name in SHELLS if shutil.which(name)])
def test_the_users_shell_may_be_any(login_shell: str) -> None:
    script = session.script([sys.executable, "-c", SHOW, "a'b", "$(x)", "!!", "é\n", "\\"], MARK)
    done = subprocess.run(
        [login_shell, "-c", session.loader(len(script))], input=script, capture_output=True, timeout=60
    )
    assert done.stdout == f"\n{MARK}\n\0a'b\0$(x)\0!!\0é\n\0\\".encode()


def test_the_command_line_holds_a_number_and_nothing_else() -> None:
    assert session.loader(17) == "exec /bin/sh -c 'eval \"$(head -c 17)\"'"


@pytest.mark.parametrize("argv", [[], [""], ["-x"], ["a\0b"], ["a", "\0"]])
def test_what_no_process_can_be_given_is_refused(argv: list[str]) -> None:
    with pytest.raises(SpecError):
        session.script(argv, MARK)
