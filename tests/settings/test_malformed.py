"""Malformed flags and files: each is one line that says what and where, and exit code 2. Nothing is started."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NoReturn

import pytest

import accel.launch.run
from accel.cli import exit_status, main

STEP = {
    "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_STEP_NODELIST": "n[1-2]", "SLURMD_NODENAME": "n2", "SLURM_NODEID": "1",
}  # fmt: skip

FLAGS = [
    ("", "nothing to run: give a script, -m MODULE, or --no_python COMMAND"),
    ("--num_proceses 2 @", "unknown option '--num_proceses'; did you mean '--num_processes'?"),
    ("-x @", "unknown option '-x'"),
    ("--num_processes", "--num_processes needs a value"),
    ("--num_processes two @", "--num_processes: expects a whole number of 1 or more, not 'two'"),
    ("--num_processes 0 @", "--num_processes: expects a whole number of 1 or more, not '0'"),
    ("--num_processes -2 @", "--num_processes: expects a whole number of 1 or more, not '-2'"),
    ("--num_processes 3 --num_machines 2 --machine_rank 0 --main_process_ip h @", "--num_processes 3 is not divisible"),
    ("--num_machines two @", "--num_machines 'two': it must be a number from 1 on, or MIN:MAX"),
    ("--num_machines 2 @", "2 machines need --machine_rank and --main_process_ip"),
    ("--num_machines 2:4 --main_process_ip h @", "--num_machines MIN:MAX needs --rdzv_backend c10d"),
    ("--machine_rank 1 @", "--machine_rank 1 needs --num_machines"),
    ("--num_machines 2 --machine_rank 2 --main_process_ip h @", "--machine_rank 2 is not one of 0 … 1"),
    ("--main_process_port 70000 @", "--main_process_port 70000: the highest port is 65535"),
    ("--main_process_port 1e3 @", "--main_process_port: expects a whole number of 0 or more, not '1e3'"),
    ("--gpu_ids 0,1 @", "--gpu_ids 0,1: this machine shows no GPU"),
    ("--multi_gpu @", "--multi_gpu: this machine shows no GPU"),
    ("--cpu --multi_gpu @", "--cpu and --multi_gpu contradict each other: keep one"),
    ("--use_fsdp --use_deepspeed @", "--use_deepspeed and --use_fsdp contradict each other: keep one"),
    ("-m --no_python @", "--module and --no_python contradict each other: keep one"),
    ("--mixed_precision bf61 @", "--mixed_precision: 'bf61' is not one of no, fp16, bf16, fp8; did you mean 'bf16'?"),
    ("--dynamo_backend induct @", "'induct' is not one of"),
    ("--zero_stage 4 --use_deepspeed @", "--zero_stage: 4 is not one of 0, 1, 2, 3"),
    ("--use_deepspeed --offload_param_device nvme @", "--offload_param_device nvme needs --offload_param_nvme_path"),
    ("--fsdp_version 3 --use_fsdp @", "--fsdp_version: '3' is not one of 1, 2"),
    ("--fsdp_offload_params perhaps @", "--fsdp_offload_params: expects true or false, not 'perhaps'"),
    ("--fp8_override_linear_precision true @", "--fp8_override_linear_precision: expects three of true or false"),
    ("--fp8_backend te --mixed_precision bf16 @", "--fp8_backend te and --mixed_precision bf16 contradict each other"),
    ("--fp8_backend msamp @", "--fp8_backend msamp: MS-AMP, which is no longer developed, is not supported: use ao"),
    ("--megatron_lm_gradient_clipping x @", "--megatron_lm_gradient_clipping: expects a number of 0 or more, not 'x'"),
    ("--num_cpu_threads_per_process 0 @", "--num_cpu_threads_per_process: expects a whole number of 1 or more"),
    (
        "--use_fsdp --fsdp_version 2 --use_parallelism_config --parallelism_config_tp_size 3 --num_processes 4 @",
        "--num_processes 4 and --parallelism_config_tp_size 3 contradict each other: the sizes' product is 3",
    ),
    ("--rdzv_conf timeout @", "--rdzv_conf takes key=value pairs with commas between them, not 'timeout'"),
    ("--rdzv_backend etcd @", "--rdzv_backend: 'etcd' is not one of static, c10d"),
    ("--tee 7 --log_dir l @", "--tee takes 0 to 3, or LOCAL_RANK:N pairs"),
    ("--monitor_interval soon @", "--monitor_interval: expects a number of seconds, not 'soon'"),
    ("--shutdown_timeout nan @", "--shutdown_timeout: expects a number of seconds, not 'nan'"),
    ("--tpu_cluster --no_tpu_cluster --tpu @", "--tpu_cluster and --no_tpu_cluster contradict each other"),
    ("--tpu_cluster --tpu --vm h --env A @", "--env A: expects NAME=VALUE"),
    ("--aws_access_key_id A @", "--aws_access_key_id needs --aws_secret_access_key"),
    ("--cpu=yes @", "--cpu takes no value"),
    ("trian.py", "no script at "),
    ("--config_file nowhere.yaml @", "--config_file: cannot read nowhere.yaml: it does not exist"),
    ("--config_file . @", "--config_file: cannot read .: it is not a file"),
]
FILES = [
    ("num_proceses: 2", "c.yaml:1: unknown setting 'num_proceses'; did you mean 'num_processes'?"),
    (
        "debug: true\nfsdp_config:\n  fsdp_versoin: 2",
        "c.yaml:3: unknown setting 'fsdp_versoin'; did you mean 'fsdp",
    ),
    ("deepspeed_config: {zero_stag: 2}", "c.yaml:1: unknown setting 'zero_stag'; did you mean 'zero_stage'?"),
    ("fsdp_confg: {}", "c.yaml:1: unknown setting 'fsdp_confg'; did you mean 'fsdp_config'?"),
    ("fsdp_config: on", "c.yaml:1: fsdp_config must hold settings, not true"),
    ("mixed_precision: half", "c.yaml:1: mixed_precision: 'half' is not one of no, fp16, bf16, fp8"),
    ("num_processes: many", "c.yaml:1: num_processes: expects a whole number of 1 or more, not 'many'"),
    ("num_processes: 1.5", "c.yaml:1: num_processes: expects a whole number of 1 or more, not 1.5"),
    ("num_processes: -1", "c.yaml:1: num_processes: -1 needs --num_processes on the command line"),
    ("num_machines: two", "--num_machines 'two' (c.yaml:1): it must be a number from 1 on, or MIN:MAX"),
    ("num_machines: 2", "--num_machines 2 (c.yaml:1): 2 machines need --machine_rank and --main_process_ip"),
    ("main_process_port: 99999", "--main_process_port 99999 (c.yaml:1): the highest port is 65535"),
    ("distributed_type: FSPD", "c.yaml:1: distributed_type: 'FSPD' is not one of"),
    ("compute_environment: HERE", "c.yaml:1: compute_environment: 'HERE' is not one of LOCAL_MACHINE"),
    ("distributed_type: MULTI_GPU", "--multi_gpu (c.yaml:1): this machine shows no GPU"),
    ("use_cpu: true\ndistributed_type: MULTI_GPU", "--cpu (c.yaml:1) and --multi_gpu (c.yaml:2) contradict"),
    ("gpu_ids: [0, 1]", "c.yaml:1: gpu_ids: expects text, not [0, 1]"),
    ("debug: maybe", "c.yaml:1: debug: expects true or false, not 'maybe'"),
    ("tpu_env: {A: 1}", "c.yaml:1: tpu_env: expects a list of words"),
    ("additional_args: 3", "c.yaml:1: additional_args: expects names and values, not 3"),
    ("- a", "c.yaml:1: must hold settings, one `name: value` per line"),
    ("just words", "c.yaml:1: must hold settings"),
    ("1: a", "c.yaml:1: must hold settings"),
    ("a: [", "c.yaml:1: "),
    ("a: \t@", "c.yaml:1: "),
    ("debug: true\ndebug: false", "c.yaml:2: key 'debug' is already on line 1"),
    ("a: &x [*x]", "c.yaml:1: "),
    ("a: !!python/object:os.system x", "c.yaml:1: "),
    ("a: \x00", "c.yaml:1: a character that YAML forbids"),
    ("debug: true\na: 2024-13-99", "c.yaml:2: a value cannot be read: month must be in 1..12"),
    ("debug: true\na: !!timestamp soon", "c.yaml:2: no such value"),
    (b"a: \xff", "c.yaml:1: not UTF-8"),
    ("debug: true\na: " + "{" * 3000, "c.yaml:2: nested too deeply"),
]
JSON: list[tuple[str | bytes, str]] = [
    ('{"num_processes": 1,', "c.json:1: not JSON"),
    ('{"num_processes": 1,\n "num_procs": 2}', "c.json:2: unknown setting 'num_procs'"),
    ('{"debug": true, "debug": false}', "c.json:1: duplicate key 'debug'"),
    (b'{"debug": true,\n "a": "\xff"}', "c.json:2: not UTF-8"),
    ("[" * 100_000, "c.json: nested too deeply"),
    ("[" + "9" * 5000 + "]", "c.json: a value cannot be read"),
    ("[]", "c.json:1: must hold settings"),
    ('{"mixed_precision": "half"}', "c.json:1: mixed_precision: 'half' is not one of"),
]
SCHEDULER = [
    ("--num_machines 1 @", "--num_machines 1 contradicts step 0 of Slurm job 7, which has 2 nodes"),
    ("--num_machines 3 --machine_rank 1 --main_process_ip n1 @", "--num_machines 3 contradicts step 0 of Slurm job 7"),
    ("--machine_rank 0 @", "--machine_rank 0 contradicts step 0 of Slurm job 7, where this is node 1"),
    ("--main_process_ip n2 @", "--main_process_ip n2 contradicts step 0 of Slurm job 7, where that is node 1"),
    ("--num_processes 3 @", "--num_processes 3 is not divisible by the number of machines (2)"),
]
CONFIG = [
    ("config defualt", "unknown action 'defualt': use default or update; did you mean 'default'?"),
    ("config --answers nowhere.yaml", "--answers: nowhere.yaml: cannot be read"),
    ("config default --mixed_precision half", "--mixed_precision: 'half' is not one of"),
    ("config update --config_file nowhere.yaml", "cannot read nowhere.yaml: it does not exist"),
    ("config update --answers x", "--answers and update contradict each other"),
    ("config --config-fil x", "unknown option '--config-fil'; did you mean '--config_file'?"),
]


@pytest.fixture(autouse=True)
def nothing_is_started(somewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def started(run: object) -> NoReturn:
        raise AssertionError(f"it was started: {run}")

    monkeypatch.setattr(accel.launch.run, "launch", started)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for name in list(os.environ):
        if name.startswith(("ACCEL_", "ACCELERATE_", "SLURM_", "FSDP_")):
            monkeypatch.delenv(name)


def is_refused(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == exit_status.USAGE
    shown = capsys.readouterr()
    assert shown.err.startswith(f"accel {words[0]}: "), shown.err
    assert said in shown.err
    assert (shown.err.count("\n"), shown.out) == (1, "")


def words_of(line: str) -> list[str]:
    return ["train.py" if word == "@" else word for word in line.split()]


@pytest.mark.parametrize(("line", "said"), FLAGS)
def test_a_flag(line: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    is_refused(["launch", *words_of(line)], said, capsys)


@pytest.mark.parametrize(("text", "said"), FILES)
def test_a_file(text: str | bytes, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("c.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    is_refused(["launch", "--config_file", "c.yaml", "train.py"], said, capsys)


@pytest.mark.parametrize(("text", "said"), JSON)
def test_a_file_in_json(text: str | bytes, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("c.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    is_refused(["launch", "--config_file", "c.json", "train.py"], said, capsys)


@pytest.mark.parametrize(("line", "said"), SCHEDULER)
def test_a_flag_against_the_scheduler(
    line: str, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in STEP.items():
        monkeypatch.setenv(name, value)
    is_refused(["launch", *words_of(line)], said, capsys)


@pytest.mark.parametrize(("line", "said"), CONFIG)
def test_a_line_of_config(line: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    is_refused(line.split(), said, capsys)


def test_a_directory_that_is_gone(
    somewhere: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file is named by its whole path, and read as ever."""
    (somewhere / "c.yaml").write_text("num_proceses: 2")
    (somewhere / "gone").mkdir()
    monkeypatch.chdir(somewhere / "gone")
    (somewhere / "gone").rmdir()
    is_refused(["launch", "--config_file", str(somewhere / "c.yaml"), "--explain"], "c.yaml:1: unknown setting", capsys)


def test_there_are_enough() -> None:
    assert len(FLAGS + FILES + JSON + SCHEDULER + CONFIG) >= 80
