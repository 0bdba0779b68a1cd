"""The processes that tests fork (tests/warm.py) are what new interpreters would be, as far as tests ask."""

from __future__ import annotations

import subprocess
import sys
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from . import warm
from .waiting import until

PROGRAM = """
import os, sys
print(sys.argv[1:], os.getcwd(), os.environ["ONLY"], "PATH" in os.environ, os.getsid(0) == os.getpid())
sys.stderr.write(open("/proc/self/environ").read())
sys.exit(int(sys.argv[1]))
"""


def test_threads_share_a_server_and_each_process_is_its_own(tmp_path: Path) -> None:
    mark = uuid.uuid4().hex
    # Not those of os.environ, which tests before this one may have changed in this process.
    env = {**warm._SERVER_ENV, "PYTHONPATH": str(warm.ROOT), "ONLY": "this", warm.MARK: mark}
    assert warm.fits(env) is (sys.platform == "linux")

    def run(number: int) -> tuple[int, bytes, bytes]:
        argv = [sys.executable, "-c", PROGRAM, str(number), "a b"]
        done = warm.finish(argv, cwd=tmp_path, env=env, timeout=120, loaded=("json", mark))
        return done.returncode, done.stdout, done.stderr

    with ThreadPoolExecutor(4) as pool:
        for number, (code, out, err) in enumerate(pool.map(run, range(4))):
            assert code == number
            assert out.decode() == f"['{number}', 'a b'] {tmp_path} this False True\n"
            assert sys.platform != "linux" or mark.encode() in err


def test_a_tests_process_that_is_killed_leaves_none(tmp_path: Path) -> None:
    program = (
        "import os, sys, tempfile; from pathlib import Path; from tests import warm\n"
        "argv, env = [sys.executable, '-c', 'import signal; signal.pause()'], dict(warm._SERVER_ENV)\n"
        "with tempfile.TemporaryFile() as file:\n"
        "    process = warm.start(argv, cwd=None, env=env, stdout=file, stderr=file, loaded=('json',))\n"
        "print(process.pid, flush=True); os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=warm.ROOT, stdout=subprocess.PIPE, timeout=60)
    pid = int(done.stdout)
    until(lambda: not Path(f"/proc/{pid}").exists(), "the process that it has started is gone")


@pytest.mark.parametrize("name", warm._SET_BY_LIBRARIES)
def test_what_a_library_sets_in_this_process_does_not_keep_others_from_the_server(name: str) -> None:
    env = {**warm._SERVER_ENV, name: "set"}
    assert warm.fits(env) is warm.fits(dict(warm._SERVER_ENV))
    assert not warm.fits({**env, "PYTHONSAFEPATH": "1"})
