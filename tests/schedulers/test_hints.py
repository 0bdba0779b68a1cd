"""Words of other launchers, and files that are no Python programs."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import pytest

from schedulers.errors import SpecError
from schedulers.hints import _REMEDIES, check_program, hint

BASH = "is a script for /bin/bash (its first line), not a Python program: run it with --no-python /bin/bash job.sbatch"
SHELL = "is a shell script (its name ends in .sh), not a Python program: run it with --no-python bash run.sh"
SETTINGS = "is a configuration file (its name ends in .yaml), not a Python program: write --config_file two.yaml SCRIPT"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("job.sbatch", "#!/bin/bash\n#SBATCH --nodes=2\n", BASH),
        ("run", "#!/usr/bin/env -S bash -e\n", "--no-python /usr/bin/env -S bash -e run"),
        ("run.sh", "echo\n", SHELL),
        ("work.ipynb", "{}", "is a notebook (its name ends in .ipynb)"),
        ("two.yaml", "gpu_ids: 0,1\n", SETTINGS),
        ("two.JSON", "{}", "(its name ends in .json)"),
        ("job.yaml", "apiVersion: v1\nkind: Pod\n", "is a Kubernetes manifest"),
        ("two", "# comment\nnum_processes: 2\nuse_cpu: true\n", "is a configuration file, not"),
        ("two.conf", '{\n\t"num_processes": 2}', "is a configuration file, not"),
        ("pod", "kind: Pod\napiVersion: v1\n---\nkind: Pod\n", "is a Kubernetes manifest"),
        ("program", "\x7fELF\x00", "is a compiled program, not a Python program: run it with --no-python program"),
    ],
)
def test_a_file_that_is_no_python_program(name: str, text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(SpecError) as caught:
        check_program("script", name, str(tmp_path))
    assert str(caught.value).startswith(f"{name} is ")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("train.py", "num_processes: 2"),
        ("train.PY", "#!/bin/sh"),
        ("a.pyc", "{}"),
        ("train", "#!/usr/bin/env python3\n"),
        ("train", "#!/opt/pypy3.10/bin/pypy\n"),
        ("train", "import os\nprint('a: b')\n"),
        ("train", "print('a: b')"),
        ("train", "try:\n  main()\nfinally:\n  stop()\n"),
        ("train", ""),
        ("train.v2", "x = {'a': 1}"),
        ("train", "\x00\x01"),
    ],
)
def test_a_python_program(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    check_program("script", name, str(tmp_path))


def test_a_directory_an_archive_and_a_pipe_are_programs(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package/__main__.py").touch()
    with zipfile.ZipFile(tmp_path / "app.pyz", "w") as archive:
        archive.writestr("__main__.py", "")
    os.mkfifo(tmp_path / "pipe")
    for name in ("package", "app.pyz", "pipe"):
        check_program("script", name, str(tmp_path))


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("python3.12", "'python3.12' is not a script: leave out python, and give the script (or -m MODULE)"),
        ("torchrun", "leave out torchrun and its options"),
        ("accelerate", "leave out accelerate launch"),
        ("ls", "it does not exist (to run the command: --no-python ls)"),
        ("trian.py", "/trian.py: it does not exist; did you mean 'train.py'? (a module: -m; a command"),
        ("folder", "/folder: it is a directory without __main__.py"),
    ],
)  # fmt: skip
def test_a_script_that_is_not_there(script: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    (tmp_path / "folder").mkdir()
    with pytest.raises(SpecError) as caught:
        check_program("script", script, str(tmp_path))
    assert message in str(caught.value)


def test_words_of_other_launchers() -> None:
    assert hint("--nproc_per_node", [], "accel submit") == "; use --procs-per-node"
    assert hint("--nproc-per-node", [], "accel launch") == "; use --num_processes, the total of all machines"
    assert hint("-C", ["-c"], "accel submit") == "; use --option constraint=FEATURES"
    assert hint("nodez", ["nodes"], "ssh", "target") == "; did you mean 'nodes'?"
    for place, remedies in _REMEDIES.items():
        words = [word for group in remedies.values() for word in group.split()]
        assert len(set(words)) == len(words), place


@pytest.mark.parametrize(
    ("entry", "word", "message"),
    [
        ("module", "train.py", "-m train.py is a file, not a module: leave out -m, or write -m train"),
        ("module", "tools/run.py", "-m tools/run.py is a file, not a module: leave out -m, or write -m tools.run"),
        (
            "command",
            "run.sh",
            "--no-python run.sh is a file, and commands are looked up on PATH: write --no-python ./run.sh",
        ),
    ],
)
def test_a_file_in_the_place_of_a_module_or_a_command(entry: str, word: str, message: str, tmp_path: Path) -> None:
    check_program(entry, word, str(tmp_path))
    (tmp_path / word).parent.mkdir(exist_ok=True)
    (tmp_path / word).touch()
    with pytest.raises(SpecError) as caught:
        check_program(entry, word, str(tmp_path))
    assert str(caught.value) == message
    check_program("command", f"./{word}", str(tmp_path))
    check_program("command", "sh", str(tmp_path))
