"""`accel launch` by its other names."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import ROOT, Accel

SCRIPT = "import sys, os; print(sys.argv[1:], os.environ['WORLD_SIZE'], __name__)\n"


@pytest.mark.parametrize("way", ["module", "script"])
def test_it_is_accel_launch(accel: Accel, way: str) -> None:
    accel.script(SCRIPT)
    entry = accel.here / "accel-launch"
    entry.write_text("import sys\nfrom accel.commands.launch import main\nsys.exit(main())\n")
    start = ["-m", "accel.commands.launch"] if way == "module" else [str(entry)]
    done = subprocess.run(
        [sys.executable, *start, "--cpu", "train.py", "--cpu", "-x"],
        cwd=accel.here,
        env=accel.env(HF_HOME=str(accel.home)),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (0, "['--cpu', '-x'] 1 __main__\n"), done.stderr


def test_a_mistake_is_one_line_and_exit_2(accel: Accel) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "accel.commands.launch", "--num_proceses", "2", "train.py"],
        cwd=accel.here,
        env=accel.env(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("accel launch: unknown option '--num_proceses'")
    assert done.stderr.count("\n") == 1


def test_the_package_installs_it() -> None:
    scripts = re.search(r"^\[project.scripts\]\n(.*?)^\[", Path(ROOT, "pyproject.toml").read_text(), re.M | re.S)
    assert scripts is not None
    assert 'accel-launch = "accel.commands.launch:main"' in scripts[1]
