"""`accel submit --config_file`: a job is launched on its nodes with the settings of the file."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from accel.cli import exit_status, main
from accel.cli.arguments import Parser
from accel.cli.submit import add_arguments
from accel.cli.submit_config import from_config_file
from accel.cli.submit_spec import build_spec
from accel.settings import BY_NAME
from accel.settings.config_file import Entry, read_document
from accel.settings.precedence import resolve

from .conftest import Accel

FILES = [
    "{distributed_type: 'NO', use_cpu: true, num_processes: 1, mixed_precision: bf16, debug: true}",
    "{distributed_type: MULTI_GPU, num_processes: 8, num_machines: 2, dynamo_config: {dynamo_backend: INDUCTOR, "
    "dynamo_mode: max-autotune, dynamo_use_dynamic: true}, enable_cpu_affinity: true}",
    "{distributed_type: FSDP, num_processes: 2, fsdp_config: {fsdp_version: 2, fsdp_offload_params: true, "
    "fsdp_auto_wrap_policy: SIZE_BASED_WRAP, fsdp_min_num_params: 7}, "
    "parallelism_config: {parallelism_config_tp_size: 2}, mixed_precision: bf16}",
    "{distributed_type: DEEPSPEED, num_processes: 8, deepspeed_config: {zero_stage: 3, gradient_clipping: 1.0, "
    "gradient_accumulation_steps: 4, zero3_init_flag: true, offload_param_device: cpu}}",
    "{distributed_type: MEGATRON_LM, num_processes: 8, megatron_lm_config: {megatron_lm_tp_degree: 2, "
    "megatron_lm_pp_degree: 2, megatron_lm_num_micro_batches: 4, megatron_lm_recompute_activations: true}}",
    "{distributed_type: MULTI_GPU, num_processes: 2, mixed_precision: fp8, fp8_config: {backend: TE, margin: 2, "
    "override_linear_precision: [true, false, true]}}",
]
NOT_CARRIED = {"num_processes", "num_machines", "distributed_type", "multi_gpu", "compute_environment"}


@pytest.mark.parametrize("text", FILES)
def test_a_launch_reads_back_what_the_file_says(text: str, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(text)
    carried = from_config_file(str(tmp_path / "c.yaml"))
    entries: dict[str, Entry] = read_document(yaml.safe_load(text))
    there = resolve({}, carried.env, {}, str)
    here = resolve({}, {}, entries, str)
    assert {name: value.value for name, value in there.items() if name not in NOT_CARRIED} == {
        name: value.value for name, value in here.items() if name not in NOT_CARRIED
    }
    assert carried.procs_per_node == entries["num_processes"].value // int(here["num_machines"].value or 1)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("num_proceses: 1", "c.yaml:1: unknown setting 'num_proceses'; did you mean 'num_processes'?"),
        ("use_cpu: true\ndistributed_type: MULTI_GPU", "--cpu (c.yaml:1) and --multi_gpu (c.yaml:2) contradict"),
        ("{num_machines: two}", "c.yaml: --num_machines 'two': it must be a number from 1 on, or MIN:MAX"),
        (
            "{use_cpu: true, num_processes: 3, num_machines: 2}",
            "c.yaml: --num_processes 3 is not divisible by the number of machines (2)",
        ),
    ],
)
def test_a_file_of_which_a_job_can_make_nothing(
    text: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text(text)
    Path("train.py").touch()
    assert main(["submit", "--config_file", "c.yaml", "--dry-run", "train.py"]) == exit_status.USAGE
    shown = capsys.readouterr().err
    assert shown.startswith(f"accel submit: {said}")
    assert shown.count("\n") == 1


XLA = (
    "distributed_type: XLA\nnum_processes: 4\nmixed_precision: bf16\ntpu_use_cluster: true\ntpu_name: pod1\n"
    "tpu_zone: us-east1-d\ntpu_use_sudo: true\ntpu_env: [A=1=2]\nmain_training_function: go\n"
)


def test_a_file_for_a_tpu_is_for_a_tpu_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text(XLA)
    Path("train.py").touch()
    carried = from_config_file("c.yaml")
    assert (carried.kind, carried.procs_per_node, carried.gpus) == ("tpu", 4, None)
    Path("machines.yaml").write_text(f"{XLA}num_machines: 2\n")
    assert from_config_file("machines.yaml").procs_per_node == 4  # each host's
    assert carried.options == {"name": "pod1", "zone": "us-east1-d", "main_training_function": "go"}
    assert (carried.env["A"], carried.env["ACCELERATE_MIXED_PRECISION"]) == ("1=2", "bf16")
    assert carried.notes == ("c.yaml:7: tpu_use_sudo is ignored: only accel launch uses it",)
    assert main(["submit", "--config_file", "c.yaml", "--dry-run", "train.py"]) == exit_status.OK
    assert "pod1" in capsys.readouterr().out
    words = ["submit", "--target", "kubernetes", "--config_file", "c.yaml", "--dry-run", "train.py"]
    assert main(words) == exit_status.USAGE
    assert capsys.readouterr().err.endswith(
        "--config_file c.yaml is for a tpu target, and kubernetes is of kind kubernetes\n"
    )


GPUS = "distributed_type: MULTI_GPU\nnum_processes: 4\nnum_machines: 2\ngpu_ids: '0,1'\nrdzv_backend: c10d\n"


@pytest.mark.parametrize(
    ("text", "words", "wanted"),
    [
        (GPUS, "", (2, None, 2, 2)),
        (GPUS, "--nodes 3:5 --gpus 8", (3, 5, 8, 2)),
        (GPUS, "--nodes 1 --gpus 0 --procs-per-node 1", (1, None, 0, 1)),
        (GPUS, "--target ssh --hosts a,b,c", (3, None, 2, 2)),
        ("use_cpu: true\nnum_processes: 4\nnum_machines: 1", "", (1, None, 0, 4)),
        ("num_machines: '2:4'\nnum_processes: 2\nrdzv_backend: static", "", (2, 4, 0, 1)),
        ("distributed_type: FSDP", "", (1, None, 0, None)),
        ("distributed_type: MULTI_GPU", "", (1, None, 0, None)),
    ],
)
def test_nodes_and_gpus_are_those_of_the_file(
    text: str, words: str, wanted: tuple[int, int | None, int, int | None],
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text(text)
    Path("train.py").touch()
    parser = Parser("submit", "")
    add_arguments(parser)
    args, program = parser.read_before_script(["--config_file", "c.yaml", *words.split(), "train.py"])
    spec = build_spec(args, program)
    assert (spec.nodes, spec.max_nodes, spec.resources.gpus, spec.procs_per_node) == wanted
    said = capsys.readouterr().err
    left_out = "is ignored: the target determines a job's machines and GPUs\n"
    if text == GPUS:
        assert said == f"accel: c.yaml:4: gpu_ids 0,1 {left_out}accel: c.yaml:5: rdzv_backend c10d {left_out}"
    elif text == "distributed_type: MULTI_GPU":
        assert said.startswith("accel: c.yaml:1: num_processes is missing")
    else:
        assert said == ""


def test_every_variable_is_one_that_a_launch_reads() -> None:
    prefixes = ("ACCELERATE_", "FSDP_", "MEGATRON_LM_", "PARALLELISM_CONFIG_")
    unread = {s.name for s in BY_NAME.values() if s.env and not s.env.startswith(prefixes)}
    assert unread == {
        "num_cpu_threads_per_process", "gpu_ids", "main_process_ip", "main_process_port", "rdzv_id", "role",
        "max_restarts", "compat", "downcast_bf16", "aws_access_key_id", "aws_secret_access_key", "profile", "region",
    }  # fmt: skip


def test_a_job_has_them(accel: Accel) -> None:
    accel.script("import os; print(*(os.environ.get(f'ACCELERATE_{n}') for n in ('MIXED_PRECISION', 'DEBUG_MODE')), "
                 "os.environ['WORLD_SIZE'])")  # fmt: skip
    (accel.here / "c.yaml").write_text("{use_cpu: true, num_processes: 2, mixed_precision: bf16, debug: true}")
    shown = accel("submit", "--config_file", "c.yaml", "--follow", "train.py")
    assert shown.count("bf16 true 2") == 2
    words = "--config_file c.yaml --env ACCELERATE_MIXED_PRECISION=no --procs-per-node 1 --follow train.py"
    shown = accel("submit", *words.split())
    assert shown.count("no true 1") == 1
