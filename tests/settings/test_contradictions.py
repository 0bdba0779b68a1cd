"""Flags that contradict one another: one line that names both, and exit code 2. Engines that are not installed."""

from __future__ import annotations

import sys

import pytest

from accel.cli import exit_status, main
from accel.launch.errors import LaunchError
from accel.launch.external import refuse_missing
from accel.settings.contradictions import without_effect

from .lines import given, options

pytestmark = pytest.mark.usefixtures("somewhere")

CONTRADICTIONS = [
    "--cpu --multi_gpu", "--cpu --tpu", "--multi_gpu --use_fsdp",
    "--use_deepspeed --use_fsdp", "--use_fsdp --use_megatron_lm", "--tpu --use_fsdp", "--module --no_python",
    "--tpu --gpu_ids=0", "--tpu --mpirun_hostfile=h", "--multi_gpu --mpirun_hostfile=h",
    "--tpu_cluster --no_tpu_cluster", "--deepspeed_inclusion_filter=a --deepspeed_exclusion_filter=b",
    "--deepspeed_config_file=x --zero_stage=2", "--deepspeed_config_file=x --offload_param_device=cpu",
    "--use_fsdp --fsdp_cpu_ram_efficient_loading=true --fsdp_sync_module_states=false",
    "--use_fsdp --use_parallelism_config --fsdp_version=1", "--fp8_backend=te --mixed_precision=bf16",
]  # fmt: skip


@pytest.mark.parametrize("line", CONTRADICTIONS)
def test_both_are_named(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", *line.split(), "train.py"]) == exit_status.USAGE
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "contradict each other" in said
    named = [word for word in line.split() if word.partition("=")[0] in said]
    assert len(named) >= 2


@pytest.mark.parametrize(
    ("line", "needed"),
    [
        ("--use_fsdp --fsdp_activation_checkpointing_offload true", "--fsdp_activation_checkpointing true"),
        ("--use_fsdp --fsdp_version 1 --fsdp_activation_checkpointing true "
         "--fsdp_activation_checkpointing_offload true", "--fsdp_version 2"),
        ("--use_deepspeed --offload_param_device nvme", "--offload_param_nvme_path"),
        ("--aws_access_key_id A", "--aws_secret_access_key"),
    ],
)  # fmt: skip
def test_what_is_needed_too_is_named(line: str, needed: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", *line.split(), "train.py"]) == exit_status.USAGE
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"needs {needed}" in said


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--mixed_precision bf61", "'bf61' is not one of no, fp16, bf16, fp8; did you mean 'bf16'?"),
        ("--num_proceses 2", "unknown option '--num_proceses'; did you mean '--num_processes'?"),
        ("--fsdp_version 3", "--fsdp_version: '3' is not one of 1, 2"),
        ("--zero_stage 5", "--zero_stage: 5 is not one of 0, 1, 2, 3"),
        ("--zero_stage x", "--zero_stage: 'x' is not one of 0, 1, 2, 3"),
        ("--gradient_clipping much", "--gradient_clipping: expects a number of 0 or more, or auto, not 'much'"),
        ("--fsdp_offload_params maybe", "--fsdp_offload_params: expects true or false, not 'maybe'"),
        ("--megatron_lm_no_load_optim", "--megatron_lm_no_load_optim needs a value"),
        ("--use_fsdp=yes", "--use_fsdp takes no value"),
        ("--fp8_override_linear_precision true", "three of true or false"),
        ("--dynamo_backend inducto", "did you mean 'inductor'?"),
        ("--rdzv_backend etcd", "'etcd' is not one of static, c10d"),
        ("--monitor_interval -1", "--monitor_interval: expects a number of seconds, not '-1'"),
        ("--max_restarts -1", "--max_restarts: expects a whole number of 0 or more, not '-1'"),
        ("--num_cpu_threads_per_process 1.5", "expects a whole number of 1 or more, not '1.5'"),
        ("--parallelism_config_sp_backend torch", "'torch' is not one of deepspeed"),
        ("--deepspeed_multinode_launcher ssh", "'ssh' is not one of pdsh, standard"),
    ],
)
def test_a_bad_value_is_one_line(line: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    script = [] if line.endswith("optim") else ["train.py"]
    assert main(["launch", *line.split(), *script]) == exit_status.USAGE
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    assert said in shown


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--fsdp_version 2", "--fsdp_version: no effect without --use_fsdp"),
        (
            "--zero_stage 2 --gradient_clipping 1",
            "--zero_stage, --gradient_clipping: no effect without --use_deepspeed",
        ),
        ("--fp8_margin 2", "--fp8_margin: no effect without --mixed_precision fp8"),
        ("--main_training_function go", "--main_training_function: no effect without --tpu"),
        (
            "--dynamo_mode max-autotune --dynamo_use_dynamic",
            "--dynamo_mode, --dynamo_use_dynamic: no effect without --dynamo_backend",
        ),
        ("--dynamo_backend no --dynamo_use_fullgraph", "--dynamo_use_fullgraph: no effect without --dynamo_backend"),
        ("--tee 3", "--tee: no effect without --log_dir"),
        (
            "--use_fsdp --fsdp_version 2 --use_parallelism_config --parallelism_config_cp_comm_strategy alltoall",
            "--parallelism_config_cp_comm_strategy: no effect without --parallelism_config_cp_size 2",
        ),
    ],
)
def test_a_flag_that_changes_nothing_is_said(line: str, said: str) -> None:
    assert without_effect(given(*line.split()), options(*line.split())) == [said]


@pytest.mark.parametrize(
    "line", ["--tee 0", "--tee 3 --log_dir l", "--dynamo_mode default", "--dynamo_backend eager --dynamo_use_dynamic"]
)
def test_a_flag_that_does_something_or_asks_for_nothing_is_not(line: str) -> None:
    assert without_effect(given(*line.split()), options(*line.split())) == []


@pytest.mark.parametrize(
    ("line", "package", "extra"),
    [
        ("--use_deepspeed", "DeepSpeed", "deepspeed"),
        ("--tpu_runtime torch_tpu", "torch_tpu", "torch-tpu"),
        ("--tpu_runtime torch_xla", "torch_xla", "torch-xla"),
    ],
)
def test_a_package_that_is_missing_is_named_with_its_extra(
    line: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)  # as if it were not installed
    with pytest.raises(LaunchError, match=rf"{line}: {package} is not installed in .*accel-launch\[{extra}\]'"):
        refuse_missing(options(*line.split(), *(["--tpu"] if "tpu" in line else [])))
