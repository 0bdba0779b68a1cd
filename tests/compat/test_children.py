"""Processes that a program starts have accel for `accelerate`, too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from accel.launch.alias_env import STARTUP, variables
from tests.compat.children import environment, python, said

# The line's end goes out with the line: two ranks may write to one stream.
WHOSE = "import accelerate; print(str(accelerate.__spec__.origin.endswith('mirror.py')) + chr(10), end='')"
METHODS = """
import multiprocessing, sys

def whose(queue):
    import accelerate
    queue.put(accelerate.__spec__.origin.endswith("mirror.py"))

if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    queue = context.Queue()
    child = context.Process(target=whose, args=(queue,))
    child.start()
    print(queue.get(timeout=200))
    child.join()
"""


def test_a_python_started_by_the_program_has_it() -> None:
    code = f"""
import subprocess, sys
import accel.compat
print(subprocess.run([sys.executable, "-c", {WHOSE!r}], capture_output=True, text=True, check=True).stdout.strip())
"""
    assert said("-c", code) == "True"


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_of_every_start_method_have_it(method: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(METHODS)
    assert said("-m", "accel.compat", str(script), method) == "True"


def test_the_users_own_sitecustomize_still_runs(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.was_here = __file__\n")
    env = variables({"PYTHONPATH": str(tmp_path)})
    code = f"import sys, sitecustomize; print(sys.was_here, sitecustomize.__file__, {STARTUP!r} in sys.path)\n{WHOSE}"
    own = str(tmp_path / "sitecustomize.py")
    assert said("-c", code, env=env).splitlines() == [f"{own} {own} False", "True"]


def test_an_error_in_the_users_sitecustomize_is_told_as_python_tells_it(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("raise ValueError('mine')\n")
    done = python("-c", WHOSE, env=variables({"PYTHONPATH": str(tmp_path)}))
    assert "ValueError: mine" in done.stderr
    assert done.stdout.strip() == "True"


def test_one_that_is_told_not_to_has_accelerate_itself() -> None:
    assert said("-c", WHOSE, env={**variables({}), "ACCEL_COMPAT": "0"}) == "False"


def test_a_python_without_accel_passes_in_silence() -> None:
    base = getattr(sys, "_base_executable", sys.executable)
    env = environment(**variables({}))
    lacks = subprocess.run([base, "-c", "import accel"], env=environment(), capture_output=True, cwd="/")
    if lacks.returncode == 0:
        base = sys.executable  # accel is in the base interpreter too: a process that is kept from it stands for one
        env["PYTHONNOUSERSITE"] = "1"
    done = subprocess.run([base, "-c", "print('fine')"], env=env, capture_output=True, text=True, cwd="/")
    assert (done.returncode, done.stdout, done.stderr) == (0, "fine\n", "")


def test_the_variables_are_put_before_what_is_there_and_only_once() -> None:
    once = variables({"PYTHONPATH": "a"})
    assert once["PYTHONPATH"].split(":") == [STARTUP, "a"]
    assert variables(once) == once


def test_ranks_of_torchrun_have_it(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(WHOSE)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(script)]
    assert said(*torchrun, env=variables({})).split() == ["True", "True"]
