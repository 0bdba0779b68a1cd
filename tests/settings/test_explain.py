"""`accel launch --explain` shows what the launch would have, and refuses what the launch would refuse."""

from __future__ import annotations

from pathlib import Path

import pytest

from accel.cli import exit_status, main

pytestmark = pytest.mark.usefixtures("somewhere")

STEP = {
    "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_STEP_NODELIST": "n[1-2]", "SLURMD_NODENAME": "n2", "SLURM_NODEID": "1",
}  # fmt: skip
SAGEMAKER = "{compute_environment: AMAZON_SAGEMAKER, ec2_instance_type: t, iam_role_name: r, num_machines: 2}"


@pytest.mark.parametrize(
    ("env", "words", "wanted"),
    [
        ({"OMP_NUM_THREADS": "3"}, "", {"num_cpu_threads_per_process": ("3", "environment variable OMP_NUM_THREADS")}),
        (
            {"OMP_NUM_THREADS": "3"},
            "--num_cpu_threads_per_process 2",
            {"num_cpu_threads_per_process": ("2", "--num_cpu_threads_per_process")},
        ),
        (
            {"OMP_NUM_THREADS": "4,2"},
            "",
            {"num_cpu_threads_per_process": ("4,2", "environment variable OMP_NUM_THREADS")},
        ),
        ({}, "--cpu --num_processes 1000", {"num_cpu_threads_per_process": ("1", "default")}),
        ({}, "--cpu", {"num_processes": ("1", "default"), "num_cpu_threads_per_process": ("", "default")}),
        ({"ACCEL_COMPAT": "1"}, "", {"compat": ("true", "environment variable ACCEL_COMPAT")}),
        ({"CUDA_VISIBLE_DEVICES": "2"}, "", {"gpu_ids": ("2", "environment variable CUDA_VISIBLE_DEVICES")}),
        (
            STEP,
            "--machine_rank 1",
            {
                "num_machines": ("2", "step 0 of Slurm job 7"),
                "machine_rank": ("1", "--machine_rank"),
                "main_process_ip": ("n1", "step 0 of Slurm job 7"),
                "main_process_port": ("20007", "step 0 of Slurm job 7"),
            },
        ),
        (
            {"AWS_PROFILE": "me"},
            "--config_file c.yaml",
            {"profile": ("me", "environment variable AWS_PROFILE"), "num_machines": ("2", "c.yaml:1")},
        ),
    ],
)
def test_it_is_what_holds(
    env: dict[str, str], words: str, wanted: dict[str, tuple[str, str]],
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    Path("c.yaml").write_text(SAGEMAKER)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert main(["launch", "--explain", *words.split()]) == exit_status.OK
    found = {name: (value, source) for name, value, source in map(columns, capsys.readouterr().out.splitlines())}
    assert {name: found[name] for name in wanted} == wanted


def columns(line: str) -> list[str]:
    return line.split("\t")


@pytest.mark.parametrize(
    ("env", "words", "said"),
    [
        (STEP, "--num_processes 3", "--num_processes 3 is not divisible by the number of machines (2)"),
        ({}, "--multi_gpu", "--multi_gpu: this machine shows no GPU"),
        ({}, "--main_process_port 99999", "--main_process_port 99999: the highest port is 65535"),
        ({}, "--num_processes 1000000000", "--num_processes 1000000000: this machine can run at most "),
        (
            STEP,
            "--num_processes 2000000000",
            "--num_processes 2000000000, 1000000000 of them here: this machine can run at most ",
        ),
        ({}, "--tee 7 --log_dir l", "--tee takes 0 to 3"),
        ({}, "--config_file c.yaml", "--num_processes 3 (c.yaml:1) is not divisible by the number of machines (2)"),
    ],
)
def test_what_a_launch_refuses_is_not_explained(
    env: dict[str, str], words: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("c.yaml").write_text("num_processes: 3\nnum_machines: 2\nmachine_rank: 0\nmain_process_ip: h\n")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    shown = []
    for rest in (["--explain"], ["train.py"]):
        assert main(["launch", *words.split(), *rest]) == exit_status.USAGE
        shown.append(capsys.readouterr())
    assert shown[0] == shown[1]
    assert shown[0].err.startswith(f"accel launch: {said}")
    assert (shown[0].out, shown[0].err.count("\n")) == ("", 1)
