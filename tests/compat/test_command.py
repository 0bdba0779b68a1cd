"""`python -m accel.compat` and `accel launch --compat`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.compat.children import python, said
from tests.marks import long

PROGRAM = """
import os, sys
import accelerate
mirrored, file = accelerate.__spec__.origin.endswith("mirror.py"), os.path.basename(__file__)
os.write(1, f"{mirrored} {__name__} {sys.argv[1:]} {file} {os.environ.get('RANK')}\\n".encode())
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(PROGRAM)
    return path


def test_a_script_runs_as_main_with_its_arguments(script: Path) -> None:
    assert said("-m", "accel.compat", str(script), "--flag", "-m") == "True __main__ ['--flag', '-m'] script.py None"


def test_a_module_runs_as_main(script: Path) -> None:
    assert said("-m", "accel.compat", "-m", "script", "x", cwd=script.parent) == "True __main__ ['x'] script.py None"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ((), "nothing to run"),
        (("gone.py",), "script 'gone.py' not found in "),
        (("--quick", "x"), "unknown option --quick"),
    ],
)
def test_what_cannot_be_run_is_said_in_one_line(words: tuple[str, ...], text: str) -> None:
    done = python("-m", "accel.compat", *words)
    assert done.returncode == 2
    assert done.stderr.startswith(f"accel.compat: {text}")


def test_the_scripts_exit_code_is_kept(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("raise SystemExit(7)")
    assert python("-m", "accel.compat", str(tmp_path / "script.py")).returncode == 7


@pytest.mark.parametrize("flags", [
    ["--num_processes", "2"], *long(["--num_processes", "1"], ["--num_processes", "2", "--start_method", "spawn"]),
])  # fmt: skip
def test_ranks_of_accel_launch_have_it(script: Path, flags: list[str]) -> None:
    ranks = int(flags[1])
    lines = said("-m", "accel", "launch", "--compat", "--cpu", *flags, str(script)).splitlines()
    assert sorted(lines) == [f"True __main__ [] script.py {rank}" for rank in range(ranks)]


def test_without_the_flag_ranks_have_what_is_installed(script: Path) -> None:
    assert said("-m", "accel", "launch", "--cpu", "--num_processes", "1", str(script)).startswith("False")


def test_the_variable_says_the_same_as_the_flag(script: Path) -> None:
    lines = said(
        "-m", "accel", "launch", "--cpu", "--num_processes", "2", str(script), env={"ACCEL_COMPAT": "1"}
    ).splitlines()
    assert [line.split()[0] for line in lines] == ["True", "True"]


def test_their_launcher_as_a_function_starts_ours(script: Path) -> None:
    code = """
import sys
import accel.compat
from accelerate.commands.launch import launch_command, launch_command_parser
args = launch_command_parser().parse_args(["--cpu", "--num_processes", "2", *sys.argv[1:], "--lr", "1"])
assert args.training_script == sys.argv[1] and args.training_script_args == ["--lr", "1"]
launch_command(args)
"""
    lines = said("-c", code, str(script)).splitlines()
    assert sorted(lines) == [f"True __main__ ['--lr', '1'] script.py {rank}" for rank in range(2)]


def test_their_configuration_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("compute_environment: LOCAL_MACHINE\nnum_processes: 3\n")
    code = f"""
import accel.compat
from accelerate.commands.config import default_config_file, load_config_from_file
config = load_config_from_file({str(path)!r})
print(config.num_processes, config.to_dict()["compute_environment"], default_config_file)
"""
    assert (
        said("-c", code, env={"HF_HOME": str(tmp_path)}) == f"3 LOCAL_MACHINE {tmp_path}/accelerate/default_config.yaml"
    )
