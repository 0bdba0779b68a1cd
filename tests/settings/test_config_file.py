"""The configuration file: every version since 0.11 loads, and what is wrong in one is said with its line."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
import yaml

from accel.cli import main
from accel.cli.argv import UsageError
from accel.cli.launch_file import default_path, read_file
from accel.settings.config_file import read_document, to_document

from .lines import found, options, planned

OF_0_11 = """
compute_environment: LOCAL_MACHINE
deepspeed_config: {}
distributed_type: 'NO'
fsdp_config: {}
machine_rank: 0
main_process_ip: null
main_process_port: null
main_training_function: main
mixed_precision: 'no'
num_machines: 1
num_processes: 1
use_cpu: true
"""
OF_0_10 = "{compute_environment: LOCAL_MACHINE, distributed_type: MULTI_GPU, fp16: true, num_processes: 2}"
OF_0_15 = """
command_file: null
commands: null
compute_environment: LOCAL_MACHINE
deepspeed_config: {}
distributed_type: FSDP
downcast_bf16: 'no'
dynamo_backend: 'NO'
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch_policy: BACKWARD_PRE
  fsdp_offload_params: true
  fsdp_sharding_strategy: 1
  fsdp_state_dict_type: FULL_STATE_DICT
  fsdp_transformer_layer_cls_to_wrap: T5Block
gpu_ids: null
megatron_lm_config: {}
mixed_precision: 'no'
num_machines: 1
num_processes: 2
rdzv_backend: static
same_network: true
tpu_name: null
tpu_zone: null
use_cpu: false
"""
OF_0_28 = """
distributed_type: MULTI_CPU
ipex_config: {ipex: true}
mixed_precision: 'no'
mpirun_config: {mpirun_ccl: '1', mpirun_hostfile: /home/user/hostfile}
num_machines: 4
num_processes: 16
machine_rank: 0
main_process_ip: 127.0.0.1
use_cpu: true
"""
OF_0_34 = """
distributed_type: MULTI_GPU
fp8_config:
  amax_compute_algo: max
  amax_history_len: 1024
  backend: TE
  fp8_format: E4M3
  interval: 1
  margin: 0
  override_linear_precision: (false, false, true)
  use_autocast_during_eval: false
mixed_precision: fp8
num_processes: 2
"""
OF_1_15 = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
downcast_bf16: 'no'
dynamo_config: {dynamo_backend: INDUCTOR, dynamo_mode: default}
fsdp_config:
  fsdp_version: 2
  fsdp_reshard_after_forward: true
  fsdp_auto_wrap_policy: SIZE_BASED_WRAP
parallelism_config: {parallelism_config_tp_size: 2, dp_shard_size: 2}
mixed_precision: bf16
num_processes: 4
tpu_env: []
"""
SAGEMAKER = """
compute_environment: AMAZON_SAGEMAKER
distributed_type: DATA_PARALLEL
ec2_instance_type: ml.p4d.24xlarge
iam_role_name: role
mixed_precision: fp16
"""


def written(folder: Path, text: str, name: str = "accelerate.yaml") -> str:
    (folder / name).write_text(text)
    return name


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (OF_0_11, {"cpu": True, "num_processes": 1, "mixed_precision": "no", "main_training_function": "main"}),
        (OF_0_10, {"multi_gpu": True, "mixed_precision": "fp16"}),
        (OF_0_15, {"use_fsdp": True, "fsdp_sharding_strategy": "FULL_SHARD", "fsdp_backward_prefetch": "BACKWARD_PRE",
                   "fsdp_offload_params": True, "dynamo_backend": "no"}),
        (OF_0_28, {"cpu": True, "mpirun_hostfile": "/home/user/hostfile", "num_machines": "4", "num_processes": 16}),
        (OF_0_34, {"fp8_backend": "te", "fp8_amax_compute_algo": "max", "fp8_format": "E4M3",
                   "fp8_override_linear_precision": (False, False, True)}),
        (OF_1_15, {"fsdp_version": "2", "dynamo_backend": "inductor", "parallelism_config_tp_size": 2,
                   "parallelism_config_dp_shard_size": 2, "use_parallelism_config": True, "downcast_bf16": False}),
        ("{distributed_type: NO, mixed_precision: no}", {"mixed_precision": "no", "multi_gpu": False}),
        ("{distributed_type: TPU, downcast_bf16: 'yes', tpu_env: [A=1]}",
         {"tpu": True, "downcast_bf16": True, "env": ["A=1"]}),
        ("{distributed_type: DEEPSPEED, deepspeed_config: {zero_stage: 3, zero3_init_flag: true}}",
         {"use_deepspeed": True, "zero_stage": 3, "zero3_init_flag": True}),
        ("{distributed_type: MEGATRON_LM, megatron_lm_config: {megatron_lm_tp_degree: 2, pp_degree: 2}}",
         {"use_megatron_lm": True, "megatron_lm_tp_degree": 2, "megatron_lm_pp_degree": 2}),
        ("{fp8_config: {amax_history_length: 3, optimization_level: O1}}",
         {"fp8_amax_history_len": 3, "fp8_opt_level": "O1"}),
        ("{distributed_type: MPS, num_processes: 1}", {"multi_gpu": False}),
        (SAGEMAKER, {"ec2_instance_type": "ml.p4d.24xlarge", "distributed_type": "DATA_PARALLEL",
                     "region": "us-east-1"}),
        ("", {"num_processes": None}),
        ("debug: false\nmixed_precision: fp16\ndebug: false", {"debug": False}),  # twice, and the same
        ("fsdp_config: {version: 2, fsdp_version: 2}", {"fsdp_version": "2"}),
        ("deepspeed_config: {gradient_accumulation_steps: auto, gradient_clipping: Auto}",
         {"gradient_accumulation_steps": "auto", "gradient_clipping": "auto"}),
        ("{distributed_type: DEEPSPEED, deepspeed_config: {deepspeed_config_file: none, zero_stage: 2}}",
         {"deepspeed_config_file": None, "zero_stage": 2}),
    ],
)  # fmt: skip
def test_every_version_loads(text: str, wanted: dict[str, object], somewhere: Path) -> None:
    values = options("--config_file", written(somewhere, text))
    assert {name: values[name] for name in wanted} == wanted


@pytest.mark.parametrize("text", [OF_0_11, OF_0_15, OF_0_28, OF_0_34, OF_1_15, SAGEMAKER])
def test_written_again_it_says_the_same(text: str) -> None:
    first = {name: entry.value for name, entry in read_document(yaml.safe_load(text)).items()}
    if first.get("dynamo_backend") == "no":
        del first["dynamo_backend"]  # not compiling is said by saying nothing
    again = {name: entry.value for name, entry in read_document(to_document(first)).items()}
    assert {name: again[name] for name in first} == first


def test_json_is_read_too(somewhere: Path) -> None:
    name = written(somewhere, '{"mixed_precision": "bf16",\n "num_processes": 2, "use_cpu": true}', "accelerate.json")
    assert options("--config_file", name)["num_processes"] == 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("debug: 1\nnum_proceses: 2", "@:2: unknown setting 'num_proceses'; did you mean 'num_processes'?"),
        ("fsdp_config:\n  fsdp_versoin: 2", "@:2: unknown setting 'fsdp_versoin'; did you mean 'fsdp_version'?"),
        ("fsdp_config: 3", "@:1: fsdp_config must hold settings, not 3"),
        ("mixed_precision: bf61", "@:1: mixed_precision: 'bf61' is not one of no, fp16, bf16, fp8; did you mean"),
        ("\nnum_processes: two", "@:2: num_processes: expects a whole number of 1 or more, not 'two'"),
        ("num_processes: true", "@:1: num_processes: expects a whole number of 1 or more, not true"),
        ("num_processes: 2024-01-01", "@:1: num_processes: expects a whole number of 1 or more, not 2024-01-01"),
        ("fp8_config: {a: 1, 2024-01-01: 2}", "@:1: unknown setting 'a'"),
        ("deepspeed_config:\n  offload_optimizer: {device: cpu}", "@:2: unknown setting 'offload_optimizer'; did you"),
        ("deepspeed_config: {num_machines: 2}", "@:1: unknown setting 'num_machines'"),
        ("dynamo_config: {use_dynamics: true}", "@:1: unknown setting 'use_dynamics'; did you mean 'dynamo_use_dyn"),
        ("gpu_ids: a;b", "--gpu_ids a;b (@:1): expects numbers or UUIDs such as GPU-"),
        ("fsdp_config:\n  fsdp_version: 1\n  version: 2",
         "@:3: fsdp_config.version and fsdp_config.fsdp_version are one setting: keep one"),
        ("fp16: true\nmixed_precision: bf16", "@:2: mixed_precision and fp16 are one setting: keep one"),
        ("distributed_type: FSPD", "@:1: distributed_type: 'FSPD' is not one of NO"),
        ("debug: maybe", "@:1: debug: expects true or false, not 'maybe'"),
        ("gpu_ids: [0, 1]", "@:1: gpu_ids: expects text, not [0, 1]"),
        ("tpu_env: {A: 1}", "@:1: tpu_env: expects a list of words"),
        ("fp8_config: {override_linear_precision: '(true)'}", "@:1: override_linear_precision: expects three"),
        ("additional_args: 3", "@:1: additional_args: expects names and values, not 3"),
        ("deepspeed_config:\n\n  zero_stage: 4", "@:3: zero_stage: 4 is not one of 0, 1, 2, 3"),
        ("- a\n- b", "@:1: must hold settings, one `name: value` per line"),
        ("1: a", "@:1: must hold settings"),
        ("a: [", "@:1"),
        ("num_processes: 1\nnum_processes: 2", "@:2: key 'num_processes' is already on line 1"),
        ("num_processes: -1", "@:1: num_processes: -1 needs --num_processes on the command line"),
        ("use_cpu: true\ndistributed_type: MULTI_GPU", "--cpu (@:1) and --multi_gpu (@:2)"),
        ("distributed_type: FSDP\nparallelism_config: {tp_size: 2}\nfsdp_config: {version: 1}",
         "--use_parallelism_config (@:2) and"),
        ("distributed_type: FSDP\nfsdp_config:\n  sync_module_states: no", "--fsdp_sync_module_states false (@:3)"),
        ("a: \t@", "@:1"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_with_its_line(text: str, said: str, somewhere: Path) -> None:
    name = written(somewhere, text)
    with pytest.raises(UsageError) as caught:
        found("--config_file", name)
    assert said.replace("@", name) in str(caught.value)
    assert "\n" not in str(caught.value)


UNREAD = [
    ("deepspeed_config", "seq_parallel_communication_data_type"),
    ("deepspeed_config", "train_micro_batch_size_per_gpu"),
    ("fsdp_config", "fsdp_limit_all_gathers"),
    ("fsdp_config", "mixed_precision"),
    ("megatron_lm_config", "megatron_lm_learning_rate_decay_iters"),
    ("dynamo_config", "dynamo_options"),
]


@pytest.mark.parametrize(("section", "key"), UNREAD)
@pytest.mark.parametrize("form", ["yaml", "json"])
def test_a_key_that_nothing_reads_is_a_warning(
    section: str, key: str, form: str, somewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known = {"dynamo_config": {"dynamo_backend": "INDUCTOR"}}.get(section, {})
    document = {"num_processes": 2, section: {**known, key: {"a": 1}}}
    dump = yaml.safe_dump if form == "yaml" else functools.partial(json.dumps, indent=0)
    lines = dump(document).splitlines()
    name = written(somewhere, "\n".join(lines), f"c.{form}")
    assert options("--config_file", name)["num_processes"] == 2
    line = next(number for number, text in enumerate(lines, start=1) if key in text)
    warning = f"accel: warning: {name}:{line}: {section}.{key} is ignored: no version of Accelerate reads it\n"
    assert capsys.readouterr().err == warning
    assert main(["config", "update", "--config_file", name]) == 0
    assert capsys.readouterr().err == warning
    assert key not in yaml.safe_load(Path(name).read_text()).get(section, {})
    assert options("--config_file", name)["num_processes"] == 2
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"num_processes": 1,\n "mixed_precison": "no"}', "x.json:2: unknown setting 'mixed_precison'"),
        ('{"num_processes": 1,\n', "x.json:2: not JSON"),
        ('{"fsdp_config":\n {"fsdp_version": 3}}', "x.json:2: fsdp_version: 3 is not one of 1, 2"),
        (
            '{"fsdp_config": {"version": 1,\n "fsdp_version": 2}}',
            "x.json:2: fsdp_config.fsdp_version and fsdp_config.v",
        ),
        ('{"debug": true,\n "debug": false}', "duplicate key 'debug'"),
        ("[1]", "x.json:1: must hold settings"),
    ],
)
def test_and_in_json(text: str, said: str, somewhere: Path) -> None:
    with pytest.raises(UsageError) as caught:
        read_file("accel launch", written(somewhere, text, "x.json"))
    assert said in str(caught.value)


@pytest.mark.usefixtures("somewhere")
def test_a_file_that_is_not_there() -> None:
    with pytest.raises(UsageError, match=r"--config_file: cannot read nowhere\.yaml: it does not exist"):
        found("--config_file", "nowhere.yaml")


def test_where_the_file_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert default_path() == f"{tmp_path}/.cache/huggingface/accelerate/default_config.yaml"
    monkeypatch.setenv("XDG_CACHE_HOME", f"{tmp_path}/x")
    assert default_path() == f"{tmp_path}/x/huggingface/accelerate/default_config.yaml"
    monkeypatch.setenv("HF_HOME", f"{tmp_path}/hf")
    assert default_path() == f"{tmp_path}/hf/accelerate/default_config.yaml"
    (tmp_path / "hf/accelerate").mkdir(parents=True)
    (tmp_path / "hf/accelerate/default_config.json").touch()
    assert default_path().endswith("default_config.json")


@pytest.mark.parametrize(
    ("text", "flags", "processes"),
    [
        ("distributed_type: 'NO'", "", 1),
        ("distributed_type: MPS", "", 1),
        ("distributed_type: 'NO'\nnum_machines: 1", "", 1),
        ("distributed_type: 'NO'\nnum_processes: 2", "", 2),
        ("distributed_type: 'NO'", "--num_processes 3", 3),
        ("distributed_type: 'NO'", "--multi_gpu", 4),
        ("distributed_type: MULTI_GPU", "", 4),
        ("mixed_precision: bf16", "", 4),
    ],
)
@pytest.mark.usefixtures("gpus")
def test_a_file_that_distributes_nothing_is_for_one_process(
    text: str, flags: str, processes: int, somewhere: Path
) -> None:
    name = written(somewhere, text)
    for _ in range(2):
        assert planned("--config_file", name, *flags.split()).processes == processes
        assert main(["config", "update", "--config_file", name]) == 0  # and it still says so


def test_numbers_are_read_as_accelerate_reads_them(somewhere: Path) -> None:
    """By YAML 1.1, in which 010 is octal; accel.yaml is YAML 1.2."""
    name = written(somewhere, "use_cpu: true\nnum_processes: 010")
    assert planned("--config_file", name).processes == 8


def test_a_tpus_file_has_the_processes_of_a_host(somewhere: Path) -> None:
    machines = "num_machines: 2\nmachine_rank: 1\nmain_process_ip: h\n"
    name = written(somewhere, f"distributed_type: XLA\n{machines}num_processes: 4")
    assert options("--config_file", name)["num_processes"] == 8
    env = {"TORCH_TPU_DEVICES_PER_HOST": "4", "TPU_TOPOLOGY": "2x2x2"}
    for hosts in ("t0,t1", "t0,t1,t2,t3"):
        places = {"TPU_WORKER_HOSTNAMES": hosts, "TPU_WORKER_ID": "1"}
        run = planned("--config_file", name, "--tpu_runtime", "torch_tpu", **env, **places)
        assert (run.nodes, run.processes) == (hosts.count(",") + 1, 4)


@pytest.mark.usefixtures("gpus")
class TestWhoWins:
    """Flags, the environment, the scheduler, the file, the defaults."""

    def test_each_goes_before_the_next(self, somewhere: Path) -> None:
        name = written(somewhere, "mixed_precision: bf16\nnum_processes: 2\ndebug: true")
        values = found("--config_file", name, "--num_processes", "4", ACCELERATE_MIXED_PRECISION="fp16")
        assert values["num_processes"][:2] == (4, "--num_processes")
        assert values["mixed_precision"][:2] == ("fp16", "environment variable ACCELERATE_MIXED_PRECISION")
        assert values["debug"][:2] == (True, "accelerate.yaml:3")
        assert values["rdzv_backend"][:2] == ("static", "default")

    def test_the_default_file_is_read_but_not_with_cpu(self, somewhere: Path) -> None:
        (somewhere / "home/accelerate").mkdir(parents=True)
        written(somewhere, "distributed_type: MULTI_GPU\nnum_processes: 2", "home/accelerate/default_config.yaml")
        assert planned().processes == 2
        assert planned("--cpu").processes == 1

    def test_a_way_that_a_flag_names_is_the_only_one(self, somewhere: Path) -> None:
        name = written(somewhere, "distributed_type: FSDP\nuse_cpu: false\nnum_processes: 2")
        values = options("--config_file", name, "--multi_gpu")
        assert (values["multi_gpu"], values["use_fsdp"]) == (True, False)

    def test_sharding_is_on_the_cpu_too(self, somewhere: Path) -> None:
        name = written(somewhere, "distributed_type: FSDP\nuse_cpu: true\nnum_processes: 2")
        for line in (["--config_file", name], ["--cpu", "--use_fsdp"]):
            assert planned(*line).env["ACCELERATE_USE_CPU"] == planned(*line).env["ACCELERATE_USE_FSDP"] == "true"

    @pytest.mark.parametrize(
        ("text", "flags", "wanted"),
        [
            ("deepspeed_config: {deepspeed_inclusion_filter: a}", "--use_deepspeed --deepspeed_exclusion_filter b",
             {"deepspeed_inclusion_filter": None, "deepspeed_exclusion_filter": "b"}),
            ("distributed_type: XLA\ntpu_use_cluster: true", "--tpu --no_tpu_cluster", {"tpu_use_cluster": False}),
            ("mixed_precision: fp8\nfp8_config: {backend: TE}", "--mixed_precision bf16", {"fp8_backend": None}),
            ("gpu_ids: '0,1'", "--tpu", {"gpu_ids": None}),
        ],
    )  # fmt: skip
    def test_a_flag_replaces_what_contradicts_it_in_the_file(
        self, text: str, flags: str, wanted: dict[str, object], somewhere: Path
    ) -> None:
        values = options("--config_file", written(somewhere, text), *flags.split())
        assert {name: values[name] for name in wanted} == wanted

    def test_what_a_flag_has_overruled_is_not_inherited(self) -> None:
        from accel.settings.precedence import overridden

        env = {"ACCELERATE_USE_CPU": "true"}
        assert overridden(found("--multi_gpu", **env), env) == {"ACCELERATE_USE_CPU": "false"}
        assert overridden(found(**env), env) == {}

    @pytest.mark.usefixtures("somewhere")
    def test_deepspeed_may_be_left_to_find_a_number(self) -> None:
        names = ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "ACCELERATE_GRADIENT_CLIPPING")
        run = planned("--use_deepspeed", **dict.fromkeys(names, "auto"))
        assert [run.env[name] for name in names] == ["auto", "auto"]

    def test_a_bad_variable_is_named(self) -> None:
        with pytest.raises(UsageError, match="ACCELERATE_MIXED_PRECISION: 'bf61' is not one of"):
            found(ACCELERATE_MIXED_PRECISION="bf61")

    def test_a_variable_of_something_that_is_off_is_somebody_elses(self) -> None:
        assert found(FSDP_VERSION="torch")["fsdp_version"].layer == "default"
        with pytest.raises(UsageError, match="environment variable FSDP_VERSION: 'torch' is not one of 1, 2"):
            found("--use_fsdp", FSDP_VERSION="torch")
        assert found("--use_fsdp", "--fsdp_version", "2", FSDP_VERSION="torch")["fsdp_version"].value == "2"

    def test_the_scheduler_goes_before_the_file(self, somewhere: Path) -> None:
        name = written(somewhere, "num_machines: 1\nmachine_rank: 0\nnum_processes: 2\nmain_process_ip: other")
        node = {"ACCEL_NODE_RANK": "1", "ACCEL_NODES": "2", "ACCEL_MASTER": "head"}
        values = found("--config_file", name, **node)
        assert (values["num_machines"].value, values["machine_rank"].value) == ("2", 1)
        assert values["main_process_ip"].value == "head"
        assert values["num_processes"][:2] == (4, "accelerate.yaml:3, 2 on each of 2 nodes")


def test_explain_says_where_each_comes_from(somewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = written(somewhere, "mixed_precision: bf16")
    assert main(["launch", "--config_file", name, "--explain", "--num_processes", "2", "train.py"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "num_processes\t2\t--num_processes" in lines
    assert "mixed_precision\tbf16\taccelerate.yaml:1" in lines
    assert "fsdp_version\t2\tdefault" in lines
    assert lines.index("mixed_precision\tbf16\taccelerate.yaml:1") < lines.index("fsdp_version\t2\tdefault")


@pytest.mark.parametrize("without", ["flag", "environment", "scheduler", "file"])
def test_explain_names_the_next_where_one_says_nothing(
    without: str, somewhere: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Flags, the environment, the scheduler, the file, the defaults: who has the word where all of them speak."""
    name = written(somewhere, "fsdp_config: {fsdp_version: 2}\nmain_process_port: 1\nnum_processes: 2\ndebug: true")
    flags = {
        "flag": ["--use_fsdp", "--fsdp_version", "1", "--main_process_port", "3", "--num_processes", "4"],
        "file": ["--config_file", name],
    }
    env = {
        "environment": {"FSDP_VERSION": "2", "ACCELERATE_MIXED_PRECISION": "fp16"},
        "scheduler": {"ACCEL_NODE_RANK": "0", "ACCEL_NODES": "2", "ACCEL_MASTER": "h", "ACCEL_PORT": "2"},
    }
    for layer in env.keys() - {without}:
        for variable, value in env[layer].items():
            monkeypatch.setenv(variable, value)
    words = [word for layer in flags.keys() - {without} for word in flags[layer]]
    assert main(["launch", "--explain", *words]) == 0
    found = {line.split("\t")[0]: tuple(line.split("\t")[1:]) for line in capsys.readouterr().out.splitlines()}
    scheduler = "the job's environment (ACCEL_NODES)"
    assert found["fsdp_version"] == {"flag": ("2", "environment variable FSDP_VERSION")}.get(
        without, ("1", "--fsdp_version")
    )
    assert found["main_process_port"] == {"flag": ("2", scheduler)}.get(without, ("3", "--main_process_port"))
    assert found["mixed_precision"] == {"environment": ("", "default")}.get(
        without, ("fp16", "environment variable ACCELERATE_MIXED_PRECISION")
    )
    assert found["num_machines"] == {"scheduler": ("", "default")}.get(without, ("2", scheduler))
    assert found["num_processes"] == {"flag": ("4", "accelerate.yaml:3, 2 on each of 2 nodes")}.get(
        without, ("4", "--num_processes")
    )
    assert found["debug"] == {"file": ("false", "default")}.get(without, ("true", "accelerate.yaml:4"))


def test_explain_shows_no_key(somewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = ["--aws_access_key_id", "A1", "--aws_secret_access_key", "S2", "--env", "HF_TOKEN=T3", "--env", "SEED=4"]
    main(["launch", "--explain", *keys])
    shown = capsys.readouterr().out
    assert [secret for secret in ("A1", "S2", "T3") if secret in shown] == []
    assert "SEED=4" in shown
