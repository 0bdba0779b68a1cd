"""The questionnaire of `accel config`: its questions, in order, and the conditions on which each is asked.

It does not use the terminal. A question's setting defines and checks the values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from . import BY_NAME
from .prompts import KINDS, TARGET_QUESTIONS, Answers, Machine, Question, answer_is, ask, at_least, both

__all__ = ["QUESTIONS", "Answers", "Machine", "Question", "answers_of", "open_question", "valid_answers", "values_of"]

_PLACES = (
    ("this", "this machine"),
    ("several", "several machines, with `accel launch` started on each by hand"),
    ("ssh", "machines reached by SSH"),
    ("slurm", "a Slurm cluster"),
    ("kubernetes", "a Kubernetes cluster"),
    ("tpu", "a TPU host or pod"),
    ("sagemaker", "Amazon SageMaker"),
)
# SageMaker's file has neither processes nor devices, and a TPU's has no other devices.
_LAUNCHED = tuple(kind for kind in KINDS if kind not in ("sagemaker", "tpu"))
_DEVICES = (("gpu", "GPUs"), ("cpu", "the CPU"))
_PRECISIONS = (("no", "no (float32)"), ("bf16", "bf16"), ("fp16", "fp16"), ("fp8", "fp8"))
_WAYS = (
    ("none", "each GPU has the whole model (DDP)"),
    ("fsdp", "FSDP: the model is sharded"),
    ("deepspeed", "DeepSpeed"),
    ("megatron", "Megatron-LM"),
)


def open_question(answers: Answers) -> Question | None:
    """Return the first question that these answers leave open, or None."""
    return next((q for q in QUESTIONS if q.name not in answers and q.when(answers)), None)


def valid_answers(answers: Answers) -> dict[str, Any]:
    """Return the answers without those that an earlier answer has made irrelevant."""
    valid = dict(answers)
    while extra := valid.keys() - {question.name for question in QUESTIONS if question.when(valid)}:
        for name in extra:
            del valid[name]
    return valid


def values_of(answers: Answers, machine: Machine) -> dict[str, Any]:
    """Return the settings that the answers represent, for `accel.settings.config_file.to_document`."""
    values = {name: value for name, value in answers.items() if name in BY_NAME and value is not None}
    values["compute_environment"] = "AMAZON_SAGEMAKER" if answers["place"] == "sagemaker" else "LOCAL_MACHINE"
    values.setdefault("distributed_type", _type(answers, machine))
    values["cpu"] = answers.get("device") == "cpu"
    if answers["place"] in ("this", "several", *_LAUNCHED):
        values.setdefault("num_processes", 1)
    return values


def answers_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answers that a file's settings represent, as defaults."""
    kind = str(values.get("distributed_type", "NO"))
    by_type = {"FSDP": "fsdp", "DEEPSPEED": "deepspeed", "MEGATRON_LM": "megatron"}
    multi_node = str(values.get("num_machines", "1")) != "1"
    answers = dict(values)
    answers["place"] = "tpu" if kind == "XLA" else "several" if multi_node else "this"
    if values.get("compute_environment") == "AMAZON_SAGEMAKER":
        answers["place"] = "sagemaker"
    else:
        answers.pop("distributed_type", None)
    answers["device"] = "cpu" if values.get("cpu") else "gpu"
    answers["way"] = by_type.get(kind, "none")
    answers["use_parallelism_config"] = any(name.startswith("parallelism_config_") for name in values)
    return answers


def _type(answers: Answers, machine: Machine) -> str:
    if answers["place"] == "tpu":
        return "XLA"
    kind = {"fsdp": "FSDP", "deepspeed": "DEEPSPEED", "megatron": "MEGATRON_LM"}.get(answers.get("way", "none"))
    if kind:
        return kind
    if answers["place"] == "this" and answers.get("num_processes", 1) == 1:
        return "NO"
    if answers.get("device") == "cpu":
        return "MULTI_CPU"
    return "MULTI_XPU" if machine.kind == "xpu" else "MULTI_GPU"


def _count(answers: Answers, machine: Machine) -> int:
    if answers.get("use_parallelism_config"):
        return math.prod(
            answers[f"parallelism_config_{name}_size"] for name in ("dp_replicate", "dp_shard", "tp", "cp")
        )
    per_node = machine.devices if answers.get("device") == "gpu" and machine.kind in ("cuda", "xpu") else 1
    return per_node * int(answers.get("num_machines") or 1)


_GANG = answer_is("place", "this", "several", *_LAUNCHED)
_SEVERAL = answer_is("place", "several")
_GPU = answer_is("device", "gpu")
_FSDP = answer_is("way", "fsdp")
_FSDP_1 = both(_FSDP, answer_is("fsdp_version", "1"))
_FSDP_2 = both(_FSDP, answer_is("fsdp_version", "2"))
_DEEPSPEED = answer_is("way", "deepspeed")
_ZERO = both(_DEEPSPEED, answer_is("deepspeed_config_file", None))
_SHARDED = both(_ZERO, answer_is("zero_stage", 2, 3))
_STAGE_3 = both(_ZERO, answer_is("zero_stage", 3))
_PDSH = both(_DEEPSPEED, lambda answers: answers.get("deepspeed_multinode_launcher", "standard") != "standard")
_MEGATRON = answer_is("way", "megatron")
_TE = answer_is("fp8_backend", "te")
_TPU = answer_is("place", "tpu")
_POD = both(_TPU, answer_is("tpu_use_cluster", True))
_AWS = answer_is("place", "sagemaker")
_DATA_PARALLEL = both(_AWS, answer_is("distributed_type", "DATA_PARALLEL"))
_COMPILED = both(lambda answers: not _TPU(answers), lambda answers: answers.get("dynamo_backend", "no") != "no")
_FP8 = answer_is("mixed_precision", "fp8")

QUESTIONS: tuple[Question, ...] = (
    ask("place", "Where will it run?", lambda answers: True, options=_PLACES, offer="this"),
    ask("device", "What will it train on?", _GANG, options=_DEVICES,
        default=lambda answers, machine: "cpu" if machine.kind == "cpu" else "gpu"),
    ask("num_machines", "How many machines?",
        lambda answers: _SEVERAL(answers) or _DATA_PARALLEL(answers),
        offer=2),
    ask("machine_rank", "The rank of this machine, from 0?", _SEVERAL, offer=0),
    ask("main_process_ip", "A name or address of machine 0 that all can reach?", _SEVERAL),
    ask("main_process_port", "A free port of machine 0?", _SEVERAL, offer=29500),
    ask("rdzv_backend", "How do the machines find each other?", _SEVERAL),
    ask("mpirun_hostfile", "A hostfile for mpirun, if mpirun is to start the ranks (empty: no)?",
        both(_SEVERAL, answer_is("device", "cpu")), may_be_empty=True),
    ask("way", "How is the work spread over the GPUs?", both(_GANG, _GPU), options=_WAYS, offer="none"),
    # FSDP
    ask("fsdp_version", "Which version of FSDP?", _FSDP, offer="2"),
    ask("fsdp_sharding_strategy", "What is sharded?", _FSDP_1),
    ask("fsdp_reshard_after_forward", "Shard the parameters again after the forward pass?", _FSDP_2,
        options=(("true", "yes"), ("false", "no")), offer="true"),
    ask("fsdp_offload_params", "Keep parameters and gradients on the CPU?", _FSDP),
    ask("fsdp_auto_wrap_policy", "How are modules grouped into units?", _FSDP, offer="TRANSFORMER_BASED_WRAP"),
    ask("fsdp_transformer_layer_cls_to_wrap", "Class names of the layers (empty: those that the model names)?",
        both(_FSDP, answer_is("fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP")), may_be_empty=True),
    ask("fsdp_min_num_params", "How many parameters make a unit?",
        both(_FSDP, answer_is("fsdp_auto_wrap_policy", "SIZE_BASED_WRAP"))),
    ask("fsdp_backward_prefetch", "When are the next unit's parameters gathered?", _FSDP_1, offer="BACKWARD_PRE"),
    ask("fsdp_state_dict_type", "How is the model saved?", _FSDP, offer="SHARDED_STATE_DICT"),
    ask("fsdp_forward_prefetch", "Gather parameters ahead in the forward pass too?", _FSDP_1),
    ask("fsdp_use_orig_params", "Allow frozen and trained parameters in one unit?", _FSDP_1),
    ask("fsdp_cpu_ram_efficient_loading", "Let only rank 0 read the checkpoint of a transformers model?", _FSDP),
    ask("fsdp_sync_module_states", "Send rank 0's parameters to all?",
        both(_FSDP_1, answer_is("fsdp_cpu_ram_efficient_loading", False))),
    ask("fsdp_activation_checkpointing", "Recompute activations in the backward pass?", _FSDP),
    ask("use_parallelism_config", "Combine it with other parallelism (tensors, sequences)?", _FSDP_2),
    *(
        ask(f"parallelism_config_{name}", text, answer_is("use_parallelism_config", True))
        for name, text in (
            ("dp_replicate_size", "How many replicas of the model?"),
            ("dp_shard_size", "Among how many processes is a replica sharded?"),
            ("tp_size", "Among how many is each tensor split?"),
            ("cp_size", "Among how many is a sequence split?"),
        )
    ),
    ask("parallelism_config_cp_comm_strategy", "How are keys and values exchanged?",
        at_least("parallelism_config_cp_size", 2)),
    # DeepSpeed
    ask("deepspeed_config_file", "DeepSpeed's own configuration file (empty: answer the questions)?", _DEEPSPEED,
        may_be_empty=True),
    ask("zero_stage", "What is sharded: 0 nothing, 1 optimizer, 2 gradients, 3 parameters?", _ZERO, offer=2),
    ask("offload_optimizer_device", "Which device holds the optimizer's state?", _SHARDED, offer="none"),
    ask("offload_optimizer_nvme_path", "In which directory of the drive?",
        answer_is("offload_optimizer_device", "nvme")),
    ask("offload_param_device", "Which device holds the parameters?", _STAGE_3, offer="none"),
    ask("offload_param_nvme_path", "In which directory of the drive?", answer_is("offload_param_device", "nvme")),
    ask("gradient_accumulation_steps", "How many batches make up one step?", _ZERO, offer=1),
    ask("gradient_clipping", "The largest norm of the gradients (empty: any)?", _ZERO, may_be_empty=True),
    ask("zero3_save_16bit_model", "Gather the weights in 16 bits when saving?", _STAGE_3, offer=False),
    ask("zero3_init_flag", "Shard the model's parameters from the beginning?", _STAGE_3, offer=False),
    ask("deepspeed_moe_layer_cls_names", "Class names of mixture-of-experts layers (empty: none)?", _DEEPSPEED,
        may_be_empty=True),
    ask("deepspeed_multinode_launcher", "What starts the ranks of the other machines?", both(_DEEPSPEED, _SEVERAL),
        offer="pdsh"),
    ask("deepspeed_hostfile", "The hostfile, with `HOST slots=GPUS` per line?", _PDSH),
    ask("deepspeed_exclusion_filter", "Machines or GPUs of it to leave out (empty: none)?", _PDSH, may_be_empty=True),
    ask("deepspeed_inclusion_filter", "Machines or GPUs of it to use (empty: all)?",
        both(_PDSH, answer_is("deepspeed_exclusion_filter", None)), may_be_empty=True),
    # Megatron-LM
    ask("megatron_lm_tp_degree", "Among how many processes is each tensor split?", _MEGATRON),
    ask("megatron_lm_sequence_parallelism", "Split sequences there too?", at_least("megatron_lm_tp_degree", 2),
        offer=True),
    ask("megatron_lm_pp_degree", "How many pipeline stages?", _MEGATRON),
    ask("megatron_lm_num_micro_batches", "How many micro-batches are in the pipeline?",
        at_least("megatron_lm_pp_degree", 2), offer=1),
    ask("megatron_lm_recompute_activations", "Recompute activations in the backward pass?", _MEGATRON, offer=True),
    ask("megatron_lm_use_distributed_optimizer", "Shard the optimizer's state?", _MEGATRON, offer=True),
    ask("megatron_lm_gradient_clipping", "The largest norm of the gradients (0: any)?", _MEGATRON),
    # processes
    ask("num_processes", "How many processes?", answer_is("place", "this", "tpu"), default=_count),
    ask("num_processes", "How many processes, over all machines?", _SEVERAL, default=_count),
    ask("num_processes", "How many processes on each machine?", answer_is("place", *_LAUNCHED), default=_count),
    ask("gpu_ids", "Which GPUs of this machine, such as 0,2?",
        both(answer_is("place", "this", "several"), both(_GPU, answer_is("way", "none"))), offer="all"),
    ask("enable_cpu_affinity", "Bind each process to the processors near its GPU (NUMA)?",
        both(_GPU, answer_is("way", "none"))),
    *TARGET_QUESTIONS,
    # TPU
    ask("main_training_function", "Which function of the script does every core run?",
        both(_TPU, lambda answers: answers.get("slice_runtime") != "torch_tpu"), offer="main"),
    ask("tpu_use_cluster", "Is it a pod of several hosts?", both(_TPU, answer_is("tpu_submit", False))),
    ask("tpu_name", "The pod's name?", _POD),
    ask("tpu_zone", "Its zone?", _POD),
    ask("tpu_use_sudo", "Run the script with sudo there?", _POD),
    ask("command_file", "A script that `accel tpu-config` runs on every host (empty: none)?", _POD, may_be_empty=True),
    ask("commands", "A command that it runs there (empty: none)?", both(_POD, answer_is("command_file", None)),
        may_be_empty=True),
    ask("vm", "The name of a host, if there is no instance group (empty: there is one)?", _POD, may_be_empty=True),
    ask("env", "A variable for the hosts, NAME=VALUE (empty: none)?", _POD, may_be_empty=True),
    # SageMaker
    ask("distributed_type", "How is the work spread?", _AWS,
        options=(("NO", "not at all"), ("DATA_PARALLEL", "SageMaker's data parallelism")), offer="NO"),
    ask("sagemaker_inputs_file", "A file with the input channels (empty: none)?", _AWS, may_be_empty=True),
    ask("sagemaker_metrics_file", "A file with the metrics (empty: none)?", _AWS, may_be_empty=True),
    # how to compute
    ask("dynamo_backend", "Compile the model with torch.compile, and with which backend?",
        lambda answers: not _TPU(answers), offer="no", common=("no", "inductor")),
    ask("dynamo_mode", "The mode of torch.compile?", _COMPILED),
    ask("dynamo_use_fullgraph", "Require whole graphs (fullgraph)?", _COMPILED),
    ask("dynamo_use_dynamic", "Allow dynamic shapes?", _COMPILED),
    ask("dynamo_use_regional_compilation", "Compile repeated blocks once?", _COMPILED),
    ask("mixed_precision", "Mixed precision?",
        lambda answers: not (_DEEPSPEED(answers) and answers.get("deepspeed_config_file") is not None), offer="no",
        options=_PRECISIONS),
    ask("downcast_bf16", "Make doubles float32 and floats bfloat16?", both(_TPU, answer_is("mixed_precision", "bf16"))),
    ask("fp8_backend", "Which library for FP8?", _FP8, offer="ao",
        options=(("ao", "torchao"), ("te", "Transformer Engine"))),
    *(
        ask(f"fp8_{name}", text, both(_FP8, _TE))
        for name, text in (
            ("use_autocast_during_eval", "Use FP8 in evaluation too?"),
            ("margin", "The margin of the scaling of gradients?"),
            ("interval", "Steps between computations of the scale?"),
            ("format", "The numbers' format?"),
            ("amax_history_len", "How many steps of history for the scale?"),
            ("amax_compute_algo", "The algorithm for it?"),
            ("override_linear_precision", "Higher precision for fprop, dgrad, wgrad?"),
        )
    ),
    ask("fp8_enable_fsdp_float8_all_gather", "Gather FSDP's parameters in 8 bits?", answer_is("fp8_backend", "ao")),
    ask("fp8_pad_inner_dim", "Pad inner dimensions as the GPU requires?", answer_is("fp8_backend", "ao")),
    ask("debug", "Check every collective between processes (slower)?", lambda answers: not _TPU(answers)),
)  # fmt: skip
