"""Converting in threads, in a process of its own: what is guarded against ends the whole interpreter."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import importlib.util, sys, threading
from concurrent.futures import ThreadPoolExecutor
from schedulers.convert import convert
from schedulers.slurm import options

sys.setswitchinterval(1e-6)
with ThreadPoolExecutor(16) as pool:
    for number in range(100):
        spec = importlib.util.spec_from_file_location(f"schedulers.slurm.options{number}", options.__file__)
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        together = threading.Barrier(16)

        def one(_):
            together.wait()
            return convert({"cpu": True, "array_throttle": 3}, module.SlurmOptions).array_throttle

        assert list(pool.map(one, range(16))) == [3] * 16
"""


def test_threads_convert_to_a_class_that_nobody_has_converted_to_before() -> None:
    """With msgspec alone most runs of this end by SIGSEGV: it happened to two hundred submits at once."""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=root, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
