"""`accel config` without a terminal: answers from a file, the default file, an older one in today's form."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import yaml

from accel.cli import exit_status, main
from accel.settings.config_file import read_document, to_document
from accel.settings.wizard import QUESTIONS, Machine, answers_of, open_question, valid_answers, values_of

GPUS = Machine("cuda", 4)


@pytest.fixture(autouse=True)
def somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("ACCEL_CONFIG_HOME", str(tmp_path / "conf"))
    return tmp_path


def written(*words: str, answers: str | None = None) -> dict[str, object]:
    """What `accel config` writes to x.yaml."""
    if answers is not None:
        Path("answers.yaml").write_text(answers)
        words = (*words, "--answers", "answers.yaml")
    assert main(["config", *words, "--config_file", "x.yaml"]) == exit_status.OK
    found: dict[str, object] = yaml.safe_load(Path("x.yaml").read_text())
    read_document(found)
    return found


FSDP = {
    "fsdp_version": 2, "fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": 1000,
    "fsdp_reshard_after_forward": True, "fsdp_offload_params": False, "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    "fsdp_cpu_ram_efficient_loading": True, "fsdp_activation_checkpointing": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("answers", "wanted"),
    [
        ("{device: cpu, num_processes: 2}",
         {"distributed_type": "MULTI_CPU", "use_cpu": True, "num_processes": 2, "mixed_precision": "no"}),
        ("{device: cpu}", {"distributed_type": "NO", "use_cpu": True, "num_processes": 1}),
        ("{device: gpu, num_processes: 4, gpu_ids: '0,1,2,3', mixed_precision: bf16, enable_cpu_affinity: yes}",
         {"distributed_type": "MULTI_GPU", "gpu_ids": "0,1,2,3", "mixed_precision": "bf16",
          "enable_cpu_affinity": True}),
        ("{device: gpu, way: fsdp, fsdp_auto_wrap_policy: SIZE_BASED_WRAP, fsdp_min_num_params: 1000}",
         {"distributed_type": "FSDP", "fsdp_config": FSDP}),
        ("{device: gpu, way: fsdp, use_parallelism_config: true, parallelism_config_tp_size: 2}",
         {"parallelism_config": {"parallelism_config_dp_replicate_size": 1, "parallelism_config_dp_shard_size": 1,
                                 "parallelism_config_tp_size": 2, "parallelism_config_cp_size": 1}}),
        ("{device: gpu, way: deepspeed, zero_stage: 3, num_processes: 8}",
         {"distributed_type": "DEEPSPEED", "deepspeed_config": {
             "zero_stage": 3, "offload_optimizer_device": "none", "offload_param_device": "none",
             "gradient_accumulation_steps": 1, "zero3_save_16bit_model": False, "zero3_init_flag": False}}),
        ("{device: gpu, way: deepspeed, deepspeed_config_file: ds.json}",
         {"deepspeed_config": {"deepspeed_config_file": "ds.json"}}),
        ("{device: gpu, way: megatron, megatron_lm_tp_degree: 2}",
         {"distributed_type": "MEGATRON_LM", "megatron_lm_config": {
             "megatron_lm_tp_degree": 2, "megatron_lm_sequence_parallelism": True, "megatron_lm_pp_degree": 1,
             "megatron_lm_recompute_activations": True, "megatron_lm_use_distributed_optimizer": True,
             "megatron_lm_gradient_clipping": 1.0}}),
        ("{place: several, device: cpu, num_machines: 2, machine_rank: 1, main_process_ip: node0, num_processes: 4}",
         {"num_machines": 2, "machine_rank": 1, "main_process_ip": "node0", "main_process_port": 29500,
          "distributed_type": "MULTI_CPU"}),
        ("{place: slurm, device: gpu, num_processes: 4}", {"num_machines": 1, "distributed_type": "MULTI_GPU"}),
        ("{place: tpu, num_processes: 8, tpu_use_cluster: true, tpu_name: pod, tpu_zone: z}",
         {"distributed_type": "XLA", "tpu_use_cluster": True, "tpu_name": "pod", "num_processes": 8}),
        ("{place: sagemaker, iam_role_name: role, distributed_type: DATA_PARALLEL, num_machines: 2}",
         {"compute_environment": "AMAZON_SAGEMAKER", "distributed_type": "DATA_PARALLEL", "iam_role_name": "role",
          "ec2_instance_type": "ml.p3.2xlarge", "num_machines": 2, "profile": "default"}),
        ("{device: cpu, dynamo_backend: inductor}",
         {"dynamo_config": {"dynamo_backend": "INDUCTOR", "dynamo_mode": "default", "dynamo_use_fullgraph": False,
                            "dynamo_use_dynamic": False, "dynamo_use_regional_compilation": False}}),
        ("{device: gpu, mixed_precision: fp8, fp8_backend: ao}",
         {"fp8_config": {"fp8_backend": "AO", "fp8_enable_fsdp_float8_all_gather": True, "fp8_pad_inner_dim": True}}),
    ],
)  # fmt: skip
def test_answers_make_the_file(answers: str, wanted: dict[str, object]) -> None:
    found = written(answers=answers)
    assert {name: found.get(name) for name in wanted} == wanted


SEVERAL = "place: several\ndevice: cpu\nnum_machines: 2"


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ("device: tpu", "answers.yaml:1: device: 'tpu' is not one of gpu, cpu"),
        ("device: cpu\nnum_proceses: 2", "answers.yaml:2: no question 'num_proceses'; did you mean 'num_processes'?"),
        ("device: cpu\n\nfsdp_version: 2", "answers.yaml:3: fsdp_version does not apply to the other answers"),
        ("place: several\ndevice: cpu", "answers.yaml: no answer to main_process_ip"),
        ("[1]", "answers.yaml:1: must hold answers"),
        ("device: [", "--answers: answers.yaml:1"),
        ("device: cpu\nnum_processes: 2024-13-99", "--answers: answers.yaml:2: a value cannot be read: month must be"),
        ("num_processes: many\ndevice: cpu", "answers.yaml:1: num_processes: expects a whole number of 1 or more"),
        ("num_processes: 2024-01-01\ndevice: cpu", "answers.yaml:1: num_processes: expects a whole number of 1"),
        ("mixed_precision:\ndevice: cpu", "answers.yaml:1: mixed_precision: null is not one of no, bf16, fp16, fp8"),
        (
            "device: cpu\nmixed_precision: fp16",
            "answers.yaml:2: mixed_precision: fp16 needs a GPU and --cpu uses none: use bf16 or no",
        ),
        ("2024-01-01: 1", "answers.yaml:1: no question 2024-01-01"),
        (f"{SEVERAL}\nmain_process_ip: null", "answers.yaml:4: main_process_ip: expects text, not null"),
        # what `accel launch` would refuse
        ("device: cpu\nnum_processes: 0", "answers.yaml:2: num_processes: expects a whole number of 1 or more, not 0"),
        ("place: several\nnum_machines: 0", "answers.yaml:2: num_machines: '0': it must be a number from 1 on, or"),
        (
            f"{SEVERAL}\nmain_process_ip: h\nnum_processes: 3",
            "answers.yaml:5: num_processes: 3 is not divisible by the number",
        ),
        (f"{SEVERAL}\nmachine_rank: 5", "answers.yaml:4: machine_rank: 5 is not one of 0 … 1"),
        (
            f"{SEVERAL}\nmain_process_ip: h\nmain_process_port: 99999999",
            "answers.yaml:5: main_process_port: 99999999: the highest port is 65535",
        ),
        (
            "place: sagemaker\niam_role_name: r\ndistributed_type: DATA_PARALLEL\nnum_machines: 0",
            "answers.yaml:4: num_machines: '0': it must be a number from 1 on",
        ),
        (
            "device: gpu\nway: none\ngpu_ids: a;b",
            "answers.yaml:3: gpu_ids: a;b: expects numbers or UUIDs such as GPU-",
        ),
        (
            "device: gpu\nway: deepspeed\ngradient_accumulation_steps: 0",
            "answers.yaml:3: gradient_accumulation_steps: expects a whole number of 1 or more, or auto, not 0",
        ),
        (
            "device: gpu\nway: megatron\nmegatron_lm_tp_degree: 0",
            "answers.yaml:3: megatron_lm_tp_degree: expects a whole number of 1 or more, not 0",
        ),
        (
            "place: tpu\nnum_processes: 8\ntpu_use_cluster: true\ntpu_name: n\ntpu_zone: z\nenv: [x]",
            "answers.yaml:6: env: x: expects NAME=VALUE",
        ),
        (
            "device: gpu\nway: fsdp\nuse_parallelism_config: true\nparallelism_config_tp_size: 2\nnum_processes: 3",
            "answers.yaml:5: num_processes: 3 and --parallelism_config_tp_size 2 contradict each other",
        ),
    ],
)
def test_answers_that_cannot_be(answers: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("answers.yaml").write_text(answers)
    assert main(["config", "--answers", "answers.yaml"]) == exit_status.USAGE
    shown = capsys.readouterr().err
    assert shown.startswith(f"accel config: {said}")
    assert shown.count("\n") == 1


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("", "not a terminal: use --answers FILE"),
        ("defualt", "unknown action 'defualt': use default or update; did you mean 'default'?"),
        ("--mixed_precision bf16", "--mixed_precision needs default"),
        ("default --mixed_precision bf61", "--mixed_precision: 'bf61' is not one of no, fp16, bf16, fp8"),
        ("update --answers x", "--answers and update contradict each other"),
        ("update", "cannot read"),
        ("update --config_file nowhere.yaml", "cannot read nowhere.yaml: it does not exist"),
    ],
)
def test_a_wrong_line(line: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", *line.split()]) == exit_status.USAGE
    shown = capsys.readouterr().err
    assert said in shown
    assert shown.count("\n") == 1


def test_answers_from_stdin() -> None:
    Path("said").write_text("{device: cpu, num_processes: 2}")
    before = os.dup(0)
    with open("said") as said:
        os.dup2(said.fileno(), 0)
    try:
        assert written("--answers", "-")["num_processes"] == 2
    finally:
        os.dup2(before, 0)
        os.close(before)


def test_the_default_file_is_at_its_place(somewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "default", "--mixed-precision", "bf16"]) == exit_status.OK
    path = somewhere / "hf/accelerate/default_config.yaml"
    assert capsys.readouterr().out == f"{path}\n"
    assert yaml.safe_load(path.read_text())["mixed_precision"] == "bf16"
    assert main(["config", "default"]) == exit_status.USAGE
    assert "already exists" in capsys.readouterr().err


def test_an_older_file_is_rewritten(capsys: pytest.CaptureFixture[str]) -> None:
    Path("old.yaml").write_text(
        "distributed_type: FSDP\nfp16: true\ndynamo_backend: 'NO'\n"
        "fsdp_config: {sharding_strategy: 1, fsdp_backward_prefetch_policy: BACKWARD_PRE}\n"
    )
    assert main(["config", "update", "--config_file", "old.yaml"]) == exit_status.OK
    found = yaml.safe_load(Path("old.yaml").read_text())
    assert found["mixed_precision"] == "fp16"
    assert found["fsdp_config"] == {
        "fsdp_sharding_strategy": "FULL_SHARD",
        "fsdp_backward_prefetch": "BACKWARD_PRE",
    }
    assert not {"fp16", "dynamo_backend", "dynamo_config"} & found.keys()
    assert "num_processes" not in found  # one per GPU, as before
    assert list(found) == sorted(found)
    again = Path("old.yaml").read_text()
    assert main(["config", "update", "--config_file", "old.yaml", "--json"]) == exit_status.OK
    assert Path("old.yaml").read_text() == again
    assert '"path": "old.yaml"' in capsys.readouterr().out


def test_a_file_in_json_stays_one() -> None:
    Path("old.json").write_text('{"distributed_type": "NO", "num_processes": 1}')
    assert main(["config", "update", "--config_file", "old.json"]) == exit_status.OK
    assert json.loads(Path("old.json").read_text())["machine_rank"] == 0


def test_a_file_that_leaves_the_processes_open_goes_on_to() -> None:
    Path("x.yaml").write_text("num_processes: -1\n")
    assert main(["config", "update", "--config_file", "x.yaml"]) == exit_status.OK
    assert yaml.safe_load(Path("x.yaml").read_text())["num_processes"] == -1


@pytest.mark.parametrize(
    "given",
    [
        {"place": "this", "device": "gpu", "way": "fsdp", "fsdp_version": "2", "use_parallelism_config": True},
        {"place": "several", "device": "cpu", "num_machines": "3", "machine_rank": 1, "main_process_ip": "h"},
        {"place": "this", "device": "gpu", "way": "deepspeed", "zero_stage": 3, "mixed_precision": "bf16"},
        {"place": "tpu", "num_processes": 8},
        {"place": "sagemaker", "iam_role_name": "r", "distributed_type": "DATA_PARALLEL"},
    ],
)
def test_the_answers_of_a_file_are_found_again(given: dict[str, object]) -> None:
    answers: dict[str, object] = {}
    while (question := open_question(answers)) is not None:
        answers[question.name] = question.parse(given.get(question.name, question.offered(answers, GPUS)))
    document = to_document(values_of(answers, GPUS))
    again = answers_of({name: entry.value for name, entry in read_document(document).items()})
    assert {name: again.get(name) for name in given} == given


def test_going_back_forgets_what_is_moot() -> None:
    answers = {"place": "this", "device": "gpu", "way": "fsdp", "fsdp_version": "2", "num_processes": 4}
    assert valid_answers({**answers, "way": "none"}) == {
        "place": "this",
        "device": "gpu",
        "way": "none",
        "num_processes": 4,
    }


@pytest.mark.parametrize("place", ["this", "several", "ssh", "slurm", "tpu", "sagemaker"])
@pytest.mark.parametrize("way", ["none", "fsdp", "deepspeed", "megatron"])
def test_every_way_through_ends(place: str, way: str) -> None:
    """Each default is an answer, and no way asks for ever."""
    answers: dict[str, object] = {}
    said = {"place": place, "way": way, "device": "gpu"}
    for _ in QUESTIONS:
        question = open_question(answers)
        if question is None:
            break
        offered = said.get(question.name, question.offered(answers, GPUS))
        needed = offered is None and not question.may_be_empty
        answers[question.name] = "x" if needed else question.parse(offered)
    assert open_question(answers) is None
