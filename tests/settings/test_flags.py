"""Every flag of Accelerate's command line, with what it does: in the worker's environment, the plan or the command."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

import accel.launch.plan
from accel.launch import external
from accel.launch.devices import only_cpu
from accel.launch.worker import Program

from .lines import SCRIPT, options, planned

pytestmark = pytest.mark.usefixtures("somewhere", "gpus")

# The options of Accelerate 1.15, each with words that use it and the variable that they make. `test_table` sees that
# none is left out.
# fmt: off
ENVIRONMENT: dict[str, tuple[str, dict[str, str]]] = {
    "cpu": ("--cpu", {"ACCELERATE_USE_CPU": "true"}),
    "mixed_precision": ("--mixed_precision bf16", {"ACCELERATE_MIXED_PRECISION": "bf16"}),
    "num_cpu_threads_per_process": ("--num_cpu_threads_per_process 3", {"OMP_NUM_THREADS": "3"}),
    "enable_cpu_affinity": ("--enable_cpu_affinity", {"ACCELERATE_CPU_AFFINITY": "1"}),
    "dynamo_backend": ("--dynamo_backend inductor", {"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}),
    "dynamo_mode": ("--dynamo_backend eager --dynamo_mode max-autotune", {"ACCELERATE_DYNAMO_MODE": "max-autotune"}),
    "dynamo_use_fullgraph": ("--dynamo_backend eager --dynamo_use_fullgraph",
                             {"ACCELERATE_DYNAMO_USE_FULLGRAPH": "True", "ACCELERATE_DYNAMO_USE_DYNAMIC": "False"}),
    "dynamo_use_dynamic": ("--dynamo_backend eager --dynamo_use_dynamic", {"ACCELERATE_DYNAMO_USE_DYNAMIC": "True"}),
    "dynamo_use_regional_compilation": ("--dynamo_backend eager --dynamo_use_regional_compilation",
                                        {"ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": "True"}),
    "use_deepspeed": ("--use_deepspeed", {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_CONFIG_DS_FIELDS": ""}),
    "use_fsdp": ("--use_fsdp", {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2",
                                "FSDP_SHARDING_STRATEGY": "FULL_SHARD",
                                "FSDP_MIN_NUM_PARAMS": "100000000", "FSDP_USE_ORIG_PARAMS": "true",
                                "FSDP_RESHARD_AFTER_FORWARD": "true", "FSDP_SYNC_MODULE_STATES": "true",
                                "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "false"}),
    "use_parallelism_config": ("--use_fsdp --fsdp_version 2 --use_parallelism_config",
                               {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_TP_SIZE": "1"}),
    "use_megatron_lm": ("--use_megatron_lm", {"ACCELERATE_USE_MEGATRON_LM": "true", "MEGATRON_LM_TP_DEGREE": "1",
                                              "MEGATRON_LM_GRADIENT_CLIPPING": "1.0",
                                              "MEGATRON_LM_NO_LOAD_OPTIM": "False"}),
    "gpu_ids": ("--gpu_ids 2,3", {"CUDA_VISIBLE_DEVICES": "2,3"}),
    "debug": ("--debug", {"ACCELERATE_DEBUG_MODE": "true"}),
    "downcast_bf16": ("--tpu --mixed_precision bf16 --downcast_bf16", {"XLA_DOWNCAST_BF16": "1"}),
    "tpu": ("--tpu --mixed_precision bf16", {"XLA_USE_BF16": "1"}),
    "deepspeed_config_file": ("--use_deepspeed --deepspeed_config_file ds.json",
                              {"ACCELERATE_DEEPSPEED_CONFIG_FILE": "ds.json"}),
    "zero_stage": ("--use_deepspeed --zero_stage 3", {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}),
    "offload_optimizer_device": ("--use_deepspeed --offload_optimizer_device cpu",
                                 {"ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu"}),
    "offload_param_device": ("--use_deepspeed --offload_param_device cpu",
                             {"ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "cpu"}),
    "offload_optimizer_nvme_path": ("--use_deepspeed --offload_optimizer_device nvme --offload_optimizer_nvme_path /n",
                                    {"ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH": "/n"}),
    "offload_param_nvme_path": ("--use_deepspeed --offload_param_device nvme --offload_param_nvme_path /n",
                                {"ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH": "/n"}),
    "gradient_accumulation_steps": ("--gradient_accumulation_steps 4", {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}),
    "gradient_clipping": ("--use_deepspeed --gradient_clipping 0.5", {"ACCELERATE_GRADIENT_CLIPPING": "0.5"}),
    "zero3_init_flag": ("--use_deepspeed --zero3_init_flag yes", {"ACCELERATE_DEEPSPEED_ZERO3_INIT": "true"}),
    "zero3_save_16bit_model": ("--use_deepspeed --zero3_save_16bit_model False",
                               {"ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "false"}),
    "deepspeed_moe_layer_cls_names": ("--use_deepspeed --deepspeed_moe_layer_cls_names A,B",
                                      {"ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES": "A,B"}),
    "fsdp_version": ("--use_fsdp --fsdp_version 2", {"FSDP_VERSION": "2"}),
    "fsdp_offload_params": ("--use_fsdp --fsdp_offload_params true", {"FSDP_OFFLOAD_PARAMS": "true"}),
    "fsdp_min_num_params": ("--use_fsdp --fsdp_min_num_params 7", {"FSDP_MIN_NUM_PARAMS": "7"}),
    "fsdp_sharding_strategy": ("--use_fsdp --fsdp_sharding_strategy 2", {"FSDP_SHARDING_STRATEGY": "SHARD_GRAD_OP"}),
    "fsdp_reshard_after_forward": ("--use_fsdp --fsdp_reshard_after_forward NO_SHARD",
                                   {"FSDP_RESHARD_AFTER_FORWARD": "no_shard"}),
    "fsdp_auto_wrap_policy": ("--use_fsdp --fsdp_auto_wrap_policy size_based_wrap",
                              {"FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP"}),
    "fsdp_transformer_layer_cls_to_wrap": ("--use_fsdp --fsdp_transformer_layer_cls_to_wrap BertLayer",
                                           {"FSDP_TRANSFORMER_CLS_TO_WRAP": "BertLayer"}),
    "fsdp_backward_prefetch": ("--use_fsdp --fsdp_backward_prefetch BACKWARD_POST",
                               {"FSDP_BACKWARD_PREFETCH": "BACKWARD_POST"}),
    "fsdp_state_dict_type": ("--use_fsdp --fsdp_state_dict_type FULL_STATE_DICT",
                             {"FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT"}),
    "fsdp_forward_prefetch": ("--use_fsdp --fsdp_forward_prefetch true", {"FSDP_FORWARD_PREFETCH": "true"}),
    "fsdp_use_orig_params": ("--use_fsdp --fsdp_use_orig_params false", {"FSDP_USE_ORIG_PARAMS": "false"}),
    "fsdp_cpu_ram_efficient_loading": ("--use_fsdp --fsdp_cpu_ram_efficient_loading false",
                                       {"FSDP_CPU_RAM_EFFICIENT_LOADING": "false"}),
    "fsdp_sync_module_states": (
        "--use_fsdp --fsdp_cpu_ram_efficient_loading false --fsdp_sync_module_states false",
        {"FSDP_SYNC_MODULE_STATES": "false"}),
    "fsdp_activation_checkpointing": ("--use_fsdp --fsdp_activation_checkpointing true",
                                      {"FSDP_ACTIVATION_CHECKPOINTING": "true"}),
    "fsdp_activation_checkpointing_offload": (
        "--use_fsdp --fsdp_version 2 --fsdp_activation_checkpointing true --fsdp_activation_checkpointing_offload true",
        {"FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "true"}),
}

_LM = {
    "tp_degree": "2", "use_custom_fsdp": "True", "no_load_optim": "True", "eod_mask_loss": "True",
    "overlap_cpu_optimizer_d2h_h2d": "True", "no_save_optim": "True", "optimizer_cpu_offload": "True",
    "use_precision_aware_optimizer": "True", "decoder_last_pipeline_num_layers": "3", "pp_degree": "2",
    "num_micro_batches": "4", "sequence_parallelism": "True", "recompute_activations": "True",
    "use_distributed_optimizer": "False", "gradient_clipping": "0.5", "recompute_granularity": "full",
    "recompute_method": "block", "recompute_num_layers": "2", "attention_backend": "flash",
    "expert_model_parallel_size": "2", "context_parallel_size": "2", "attention_dropout": "0.1",
    "hidden_dropout": "0.2", "attention_softmax_in_fp32": "True", "expert_tensor_parallel_size": "2",
    "calculate_per_token_loss": "False", "use_rotary_position_embeddings": "True",
}
ENVIRONMENT |= {f"megatron_lm_{name}": (f"--use_megatron_lm --megatron_lm_{name} {value}",
                                        {f"MEGATRON_LM_{name.upper()}": value}) for name, value in _LM.items()}

_FP8 = {
    "backend": ("te", {"ACCELERATE_FP8_BACKEND": "TE"}), "margin": ("2", {"ACCELERATE_FP8_MARGIN": "2"}),
    "use_autocast_during_eval": ("", {"ACCELERATE_FP8_USE_AUTOCAST_DURING_EVAL": "True"}),
    "interval": ("3", {"ACCELERATE_FP8_INTERVAL": "3"}), "format": ("E4M3", {"ACCELERATE_FP8_FORMAT": "E4M3"}),
    "amax_history_len": ("16", {"ACCELERATE_FP8_AMAX_HISTORY_LEN": "16"}),
    "amax_compute_algo": ("max", {"ACCELERATE_FP8_AMAX_COMPUTE_ALGO": "max"}),
    "override_linear_precision": ("true,false,True", {"ACCELERATE_FP8_OVERRIDE_FPROP": "True",
                                                      "ACCELERATE_FP8_OVERRIDE_DGRAD": "False",
                                                      "ACCELERATE_FP8_OVERRIDE_WGRAD": "True"}),
    "opt_level": ("O1", {"ACCELERATE_FP8_OPT_LEVEL": "O1"}),
    "enable_fsdp_float8_all_gather": ("false", {"ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER": "False"}),
    "pad_inner_dim": ("false", {"ACCELERATE_FP8_PAD_INNER_DIM": "False"}),
}
ENVIRONMENT |= {f"fp8_{name}": (f"--mixed_precision fp8 --fp8_{name} {value}", env)
                for name, (value, env) in _FP8.items()}

_SIZES = {
    "dp_replicate_size": "2", "dp_shard_size": "2", "tp_size": "2", "cp_size": "2", "cp_backend": "torch",
    "cp_comm_strategy": "alltoall", "sp_size": "2", "sp_backend": "deepspeed", "sp_seq_length": "512",
    "sp_seq_length_is_variable": "False", "sp_attn_implementation": "flash_attention_2",
}
_FSDP2 = "--use_fsdp --fsdp_version 2 --use_parallelism_config"
_WITH = {"cp_comm_strategy": "--parallelism_config_cp_size 2", "sp_seq_length": "--parallelism_config_sp_size 2",
         "sp_seq_length_is_variable": "--parallelism_config_sp_size 2",
         "sp_attn_implementation": "--parallelism_config_sp_size 2"}
ENVIRONMENT |= {
    f"parallelism_config_{name}": (f"{_FSDP2} {_WITH.get(name, '')} --parallelism_config_{name} {value}",
                                   {f"PARALLELISM_CONFIG_{name.upper()}": value}) for name, value in _SIZES.items()
}

_TWO = "--num_machines 2 --machine_rank 1 --main_process_ip h"
PLAN: dict[str, tuple[str, dict[str, Any]]] = {
    "multi_gpu": ("--multi_gpu", {"processes": 4}),
    "num_processes": ("--num_processes 2", {"processes": 2}),
    "num_machines": (_TWO, {"nodes": 2}),
    "machine_rank": (_TWO, {"node_rank": 1}),
    "main_process_ip": (_TWO, {"address": "h"}),
    "main_process_port": ("--main_process_port 1234", {"port": 1234}),
    "tee": ("-t 3 --log_dir logs", {"tee": "3"}),
    "log_dir": ("--log_dir logs", {"log_dir": "logs"}),
    "role": ("--role trainer", {"role": "trainer"}),
    "rdzv_backend": ("--rdzv_backend c10d", {"rdzv_backend": "c10d"}),
    "rdzv_conf": ("--rdzv_conf timeout=3", {"rdzv_conf": {"timeout": "3"}}),
    "max_restarts": ("--max_restarts 2", {"max_restarts": 2}),
    "monitor_interval": ("--monitor_interval 0.5", {"monitor_interval_s": 0.5}),
    "quiet": ("-q", {"quiet": True}),
}
# fmt: on

_POD = ("--tpu", "--tpu_cluster")


def pod(*words: str) -> str:
    return " ".join(external.pod_command(options(*_POD, *words), SCRIPT))


def deepspeed(*words: str) -> str:
    line = [*_TWO.split(), "--use_deepspeed", "--deepspeed_hostfile", "hosts", *words]
    return " ".join(external.deepspeed_command(options(*line), SCRIPT, planned(*line)))


def command(*words: str) -> list[str]:
    """What is run of a program with these flags."""
    found = options(*words)
    return Program.parse(["train.py"], module=found["module"], command=found["no_python"]).command(unbuffered=False)


def in_a_file(text: str) -> Mapping[str, str]:
    Path("c.yaml").write_text(text)
    return planned("--config_file", "c.yaml").env


@pytest.mark.parametrize("name", ENVIRONMENT)
def test_what_the_worker_reads(name: str) -> None:
    words, wanted = ENVIRONMENT[name]
    env = planned(*words.split()).env
    assert {key: env.get(key) for key in wanted} == wanted
    assert f"--{name}" in words
    dashed = planned(*(word.replace("_", "-") if word.startswith("--") else word for word in words.split()))
    assert dashed.env == env


@pytest.mark.parametrize("name", PLAN)
def test_what_the_launcher_does(name: str) -> None:
    words, wanted = PLAN[name]
    run = planned(*words.split())
    assert {key: getattr(run, key) for key in wanted} == wanted


COMMANDS: dict[str, Callable[[], bool]] = {
    "tpu_use_cluster": lambda: pod().startswith("env ACCELERATE_IN_TPU_POD=1 accel-launch --tpu --no_tpu_cluster"),
    "env": lambda: "env A=1 ACCELERATE_IN_TPU_POD=1" in pod("--env", "A=1"),
    "tpu_use_sudo": lambda: pod("--tpu_use_sudo").startswith("sudo env ACCELERATE_IN_TPU_POD=1 accel-launch --tpu"),
    "tpu_runtime": lambda: "--tpu_runtime torch_xla" in pod("--tpu_runtime", "torch_xla"),
    "main_training_function": lambda: (
        "--main_training_function go train.py --lr 1" in pod("--main_training_function", "go")
    ),
    "no_tpu_cluster": lambda: planned("--tpu", "--no_tpu_cluster").program.argv[0] == "accel.launch.xla",
    "deepspeed_hostfile": lambda: deepspeed().startswith("deepspeed --hostfile hosts --no_local_rank --launcher pdsh"),
    "deepspeed_exclusion_filter": lambda: "--exclude a:0" in deepspeed("--deepspeed_exclusion_filter", "a:0"),
    "deepspeed_inclusion_filter": lambda: "--include a:0" in deepspeed("--deepspeed_inclusion_filter", "a:0"),
    "deepspeed_multinode_launcher": lambda: (
        "--node_rank 1 --no_ssh" in deepspeed("--deepspeed_multinode_launcher", "nossh")
    ),
    "module": lambda: command("-m") == command("--module") == [sys.executable, "-m", "train.py"],
    "no_python": lambda: command("--no_python") == ["train.py"],
    "same_network": lambda: planned("--same_network") == planned(),  # accepted, as Accelerate does
    "config_file": lambda: in_a_file("mixed_precision: bf16")["ACCELERATE_MIXED_PRECISION"] == "bf16",
}
# The tests at the end, and of `test_engines`.
ELSEWHERE = {"aws_access_key_id", "aws_secret_access_key", "mpirun_hostfile", "vm"}


@pytest.mark.parametrize("name", COMMANDS)
def test_what_another_launcher_is_told(name: str) -> None:
    assert COMMANDS[name]()


def test_pdsh_is_started_once_and_finds_its_machines_itself() -> None:
    line = "--num_machines 2 --num_processes 4 --use_deepspeed --deepspeed_hostfile hosts".split()
    told = " ".join(external.deepspeed_command(options(*line), SCRIPT, planned(*line)))
    assert "--num_gpus 2 --master_port 29500 train.py" in told


def test_a_tpu_host_runs_the_function_of_the_script() -> None:
    run = planned("--tpu", "--main_training_function", "go")
    assert run.program == Program(argv=["accel.launch.xla", "script", "go", *SCRIPT.argv], entry="module")
    assert run.processes == 1
    assert run.is_single_process


def test_a_switch_of_megatron_can_be_said_no() -> None:
    """Accelerate takes any word for yes."""
    env = planned("--use_megatron_lm", "--megatron_lm_no_load_optim", "False").env
    assert env["MEGATRON_LM_NO_LOAD_OPTIM"] == "False"


def test_accelerates_launcher_makes_no_cpu_of_fsdp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accel.launch.plan, "find", lambda env: only_cpu())
    assert "ACCELERATE_USE_CPU" not in planned("--use_fsdp").env
    assert planned("--use_fsdp").env["FSDP_VERSION"] == "2"
