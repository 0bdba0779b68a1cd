"""The command lines of Accelerate's launch tutorial, with `accel` in its place, and its library through `--compat`."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.ports import free_port

from .lines import planned
from .test_external import ROOT, Machine

SHOW = "import os, sys; print(os.environ['WORLD_SIZE'], os.environ.get('ACCELERATE_MIXED_PRECISION'), sys.argv[1:])\n"
FILE = """
compute_environment: LOCAL_MACHINE
deepspeed_config: {}
distributed_type: MULTI_GPU
fsdp_config: {}
machine_rank: 0
main_process_ip: null
main_process_port: null
main_training_function: main
mixed_precision: fp16
num_machines: 1
num_processes: 2
use_cpu: false
"""


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    made = Machine(tmp_path)
    (tmp_path / "train.py").write_text(SHOW)
    return made


@pytest.mark.parametrize(
    ("line", "env", "shown"),
    [
        ("train.py --arg1 --arg2", {}, "1 None ['--arg1', '--arg2']\n"),
        ("train.py --arg1", {"CUDA_VISIBLE_DEVICES": "0"}, "1 None ['--arg1']\n"),
        ("--cpu train.py", {}, "1 None []\n"),
        ("--num_processes=2 train.py -x", {}, "2 None ['-x']\n" * 2),
        ("--mixed_precision=bf16 train.py", {}, "1 bf16 []\n"),
    ],
)
def test_lines_for_any_machine(machine: Machine, line: str, env: dict[str, str], shown: str) -> None:
    done = machine.launch(*line.split(), **env)
    assert (done.returncode, done.stdout) == (0, shown), done.stderr


@pytest.mark.parametrize("python", ["", "-u"])
def test_the_launcher_as_a_module(machine: Machine, python: str) -> None:
    command = [sys.executable, *python.split(), "-m", "accel.commands.launch", "--num_processes=2", "train.py", "-x"]
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "HF_HOME": str(machine.here / "hf")}
    done = subprocess.run(command, cwd=machine.here, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "2 None ['-x']\n" * 2), done.stderr


def test_a_list_of_all_parameters(machine: Machine) -> None:
    done = machine.launch("-h")
    assert done.returncode == 0
    assert done.stdout.startswith("usage: accel launch [OPTIONS] SCRIPT [ARGUMENTS]\n")


def test_nodes_with_the_file_of_the_main_one(machine: Machine) -> None:
    """The file is copied to the others, and only `machine_rank` is changed there."""
    port = free_port()
    done: list[subprocess.CompletedProcess[str]] = []

    def launch(rank: int) -> None:
        done.append(machine.launch("--config_file", f"{rank}.yaml", "train.py"))

    running = [threading.Thread(target=launch, args=(rank,)) for rank in range(2)]
    for rank in range(2):
        (machine.here / f"{rank}.yaml").write_text(
            f"distributed_type: MULTI_CPU\nuse_cpu: true\nnum_machines: 2\nnum_processes: 2\nmachine_rank: {rank}\n"
            f"main_process_ip: 127.0.0.1\nmain_process_port: {port}\nmixed_precision: bf16\n"
        )
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    assert [(one.returncode, one.stdout) for one in done] == [(0, "2 bf16 []\n")] * 2, done


@pytest.mark.parametrize(
    ("line", "processes", "precision"),
    [
        ("--multi_gpu", 4, None),
        ("--num_processes=2", 2, None),
        ("--multi_gpu --mixed_precision=fp16 --num_processes=2", 2, "fp16"),
        ("--config_file my_config_file.yaml", 2, "fp16"),
    ],
)
@pytest.mark.usefixtures("gpus")
def test_lines_for_gpus(somewhere: Path, line: str, processes: int, precision: str | None) -> None:
    (somewhere / "my_config_file.yaml").write_text(FILE)
    run = planned(*line.split())
    assert (run.processes, run.env.get("ACCELERATE_MIXED_PRECISION")) == (processes, precision)


def test_after_accel_config_nothing_needs_saying(machine: Machine) -> None:
    (machine.here / "hf/accelerate").mkdir(parents=True)
    (machine.here / "hf/accelerate/default_config.yaml").write_text(
        "distributed_type: MULTI_CPU\nuse_cpu: true\nnum_processes: 2\nmixed_precision: bf16\n"
    )
    done = machine.launch("train.py")
    assert (done.returncode, done.stdout) == (0, "2 bf16 []\n" * 2), done.stderr


def test_the_launcher_as_a_function_reads_the_file_too(machine: Machine) -> None:
    (machine.here / "c.yaml").write_text("use_cpu: true\nnum_processes: 1\nmixed_precision: bf16\n")
    (machine.here / "call.py").write_text(
        "from accel.compat.commands import launch_command, launch_command_parser\n"
        "words = ['--config_file', 'c.yaml', '--num-processes', '1', 'train.py', '--lr', '1']\n"
        "launch_command(launch_command_parser().parse_args(words))\n"
    )
    done = machine.launch("--cpu", "call.py")
    assert (done.returncode, done.stdout) == (0, "1 bf16 ['--lr', '1']\n"), done.stderr
