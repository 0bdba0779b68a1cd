"""The questionnaire: which settings are asked for, in which order, and what earlier answers leave open.

It knows no terminal. A question's values, their check and their meaning are those of the setting that it asks for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from . import BY_NAME
from .base import Setting
from .values import read

Answers = Mapping[str, Any]

_PLACES = (
    ("this", "this machine"),
    ("several", "several machines, with `accel launch` started on each by hand"),
    ("ssh", "machines reached by SSH (accel submit --target ssh)"),
    ("slurm", "a Slurm cluster (accel submit --target slurm)"),
    ("tpu", "a TPU host or pod"),
    ("sagemaker", "Amazon SageMaker"),
)
_DEVICES = (("gpu", "GPUs"), ("cpu", "the CPU"))
_WAYS = (
    ("none", "each GPU has the whole model (DDP)"),
    ("fsdp", "FSDP: the model is sharded"),
    ("deepspeed", "DeepSpeed"),
    ("megatron", "Megatron-LM"),
)


class Machine(NamedTuple):
    """What this machine has: the kind of its devices (cuda, xpu, mps, cpu) and how many."""

    kind: str
    devices: int


class Question(NamedTuple):
    """One question.

    name:    of the answer; of the setting that it asks for, if there is one.
    options: (value, what people see) of a choice; empty if it is the setting that knows its values.
    when:    whether it is open after these answers.
    default: the answer that is offered; None where there is no sensible one.
    """

    name: str
    text: str
    when: Callable[[Answers], bool]
    options: tuple[tuple[str, str], ...] = ()
    default: Callable[[Answers, Machine], Any] | None = None
    may_be_empty: bool = False

    @property
    def setting(self) -> Setting:
        """Raises KeyError for a question that asks for no single setting."""
        return BY_NAME[self.name]

    def choices(self) -> tuple[tuple[str, str], ...]:
        """(value, what people see), where there are few answers; else nothing."""
        if self.options:
            return self.options
        if self.setting.kind in ("switch", "yesno"):
            return (("yes", "yes"), ("no", "no"))
        return tuple((choice, choice) for choice in self.setting.choices)

    def offered(self, answers: Answers, machine: Machine) -> Any:
        """The default after these answers; None where there is none."""
        if self.default is not None:
            return self.default(answers, machine)
        return None if self.options else self.setting.default

    def understood(self, raw: object) -> Any:
        """The answer that `raw` is. Raises BadValue."""
        if self.may_be_empty and raw in ("", None):
            return None
        if not self.options:
            return read(self.setting, raw)
        return read(Setting(self.name, self.text, choices=tuple(value for value, _ in self.options)), raw)


def open_question(answers: Answers) -> Question | None:
    """The first question that these answers leave open; None when all is said."""
    return next((q for q in QUESTIONS if q.name not in answers and q.when(answers)), None)


def still_asked(answers: Answers) -> dict[str, Any]:
    """The answers to questions that are asked, without those which an earlier answer has made moot."""
    kept = dict(answers)
    while moot := kept.keys() - {question.name for question in QUESTIONS if question.when(kept)}:
        for name in moot:
            del kept[name]
    return kept


def values_of(answers: Answers, machine: Machine) -> dict[str, Any]:
    """The settings that the answers amount to, for `accel.settings.file.to_document`."""
    values = {name: value for name, value in answers.items() if name in BY_NAME and value is not None}
    values["compute_environment"] = "AMAZON_SAGEMAKER" if answers["place"] == "sagemaker" else "LOCAL_MACHINE"
    values.setdefault("distributed_type", _type(answers, machine))
    values["cpu"] = answers.get("device") == "cpu"
    if answers["place"] in ("this", "several", "ssh", "slurm"):
        values.setdefault("num_processes", 1)
    return values


def answers_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """The answers that settings of a file amount to, to be offered again."""
    kind = str(values.get("distributed_type", "NO"))
    ways = {"FSDP": "fsdp", "DEEPSPEED": "deepspeed", "MEGATRON_LM": "megatron"}
    several = str(values.get("num_machines", "1")) != "1"
    answers = dict(values)
    answers["place"] = "tpu" if kind == "XLA" else "several" if several else "this"
    if values.get("compute_environment") == "AMAZON_SAGEMAKER":
        answers["place"] = "sagemaker"
    else:
        answers.pop("distributed_type", None)
    answers["device"] = "cpu" if values.get("cpu") else "gpu"
    answers["way"] = ways.get(kind, "none")
    answers["use_parallelism_config"] = any(name.startswith("parallelism_config_") for name in values)
    return answers


def _type(answers: Answers, machine: Machine) -> str:
    if answers["place"] == "tpu":
        return "XLA"
    way = {"fsdp": "FSDP", "deepspeed": "DEEPSPEED", "megatron": "MEGATRON_LM"}.get(answers.get("way", "none"))
    if way:
        return way
    if answers["place"] == "this" and answers.get("num_processes", 1) == 1:
        return "NO"
    if answers.get("device") == "cpu":
        return "MULTI_CPU"
    return "MULTI_XPU" if machine.kind == "xpu" else "MULTI_GPU"


def _is(name: str, *values: Any) -> Callable[[Answers], bool]:
    return lambda answers: answers.get(name) in values


def _both(one: Callable[[Answers], bool], other: Callable[[Answers], bool]) -> Callable[[Answers], bool]:
    return lambda answers: one(answers) and other(answers)


def _at_least(name: str, least: int) -> Callable[[Answers], bool]:
    return lambda answers: int(answers.get(name) or 0) >= least


def _offer(value: Any) -> Callable[[Answers, Machine], Any]:
    return lambda answers, machine: value


def _count(answers: Answers, machine: Machine) -> int:
    each = machine.devices if answers.get("device") == "gpu" and machine.kind in ("cuda", "xpu") else 1
    return each * int(answers.get("num_machines") or 1)


def _ask(name: str, text: str, when: Callable[[Answers], bool], **rest: Any) -> Question:
    if "offer" in rest:
        rest["default"] = _offer(rest.pop("offer"))
    return Question(name, text, when, **rest)


_GANG = _is("place", "this", "several", "ssh", "slurm")
_SEVERAL = _is("place", "several")
_GPU = _is("device", "gpu")
_FSDP = _is("way", "fsdp")
_FSDP_1 = _both(_FSDP, _is("fsdp_version", "1"))
_FSDP_2 = _both(_FSDP, _is("fsdp_version", "2"))
_DEEPSPEED = _is("way", "deepspeed")
_ZERO = _both(_DEEPSPEED, _is("deepspeed_config_file", None))
_SHARDED = _both(_ZERO, _is("zero_stage", 2, 3))
_STAGE_3 = _both(_ZERO, _is("zero_stage", 3))
_PDSH = _both(_DEEPSPEED, lambda answers: answers.get("deepspeed_multinode_launcher", "standard") != "standard")
_MEGATRON = _is("way", "megatron")
_TE = _is("fp8_backend", "te")
_TPU = _is("place", "tpu")
_POD = _both(_TPU, _is("tpu_use_cluster", True))
_AWS = _is("place", "sagemaker")
_COMPILED = _both(lambda answers: not _TPU(answers), lambda answers: answers.get("dynamo_backend", "no") != "no")
_FP8 = _is("mixed_precision", "fp8")

QUESTIONS: tuple[Question, ...] = (
    _ask("place", "Where will it run?", lambda answers: True, options=_PLACES, offer="this"),
    _ask("device", "What will it train on?", _GANG, options=_DEVICES,
         default=lambda answers, machine: "cpu" if machine.kind == "cpu" else "gpu"),
    _ask("num_machines", "How many machines?",
         lambda answers: _SEVERAL(answers) or (_AWS(answers) and _is("distributed_type", "DATA_PARALLEL")(answers)),
         offer=2),
    _ask("machine_rank", "Which of them is this one, from 0?", _SEVERAL, offer=0),
    _ask("main_process_ip", "A name or address of machine 0 that all can reach?", _SEVERAL),
    _ask("main_process_port", "A port of machine 0 that is free?", _SEVERAL, offer=29500),
    _ask("rdzv_backend", "How do the machines find each other?", _SEVERAL),
    _ask("mpirun_hostfile", "A hostfile for mpirun, if mpirun is to start the ranks (empty: no)?",
         _both(_SEVERAL, _is("device", "cpu")), may_be_empty=True),
    _ask("way", "How is the work spread over the GPUs?", _both(_GANG, _GPU), options=_WAYS, offer="none"),
    # FSDP
    _ask("fsdp_version", "Which version of FSDP?", _FSDP, offer="2"),
    _ask("fsdp_sharding_strategy", "What is sharded?", _FSDP_1),
    _ask("fsdp_reshard_after_forward", "Shard the parameters again after the forward pass?", _FSDP_2,
         options=(("true", "yes"), ("false", "no")), offer="true"),
    _ask("fsdp_offload_params", "Keep parameters and gradients on the CPU?", _FSDP),
    _ask("fsdp_auto_wrap_policy", "How are modules made into units?", _FSDP, offer="TRANSFORMER_BASED_WRAP"),
    _ask("fsdp_transformer_layer_cls_to_wrap", "Class names of the layers (empty: what the model says)?",
         _both(_FSDP, _is("fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP")), may_be_empty=True),
    _ask("fsdp_min_num_params", "How many parameters make a unit?",
         _both(_FSDP, _is("fsdp_auto_wrap_policy", "SIZE_BASED_WRAP"))),
    _ask("fsdp_backward_prefetch", "When are the next unit's parameters gathered?", _FSDP_1, offer="BACKWARD_PRE"),
    _ask("fsdp_state_dict_type", "How is the model saved?", _FSDP, offer="SHARDED_STATE_DICT"),
    _ask("fsdp_forward_prefetch", "Gather parameters ahead in the forward pass too?", _FSDP_1),
    _ask("fsdp_use_orig_params", "Allow frozen and trained parameters in one unit?", _FSDP_1),
    _ask("fsdp_cpu_ram_efficient_loading", "Let only rank 0 read the checkpoint of a transformers model?", _FSDP),
    _ask("fsdp_sync_module_states", "Send rank 0's parameters to all?",
         _both(_FSDP_1, _is("fsdp_cpu_ram_efficient_loading", False))),
    _ask("fsdp_activation_checkpointing", "Compute activations again in the backward pass?", _FSDP),
    _ask("use_parallelism_config", "Spread over several dimensions (tensors, sequences) too?", _FSDP_2),
    *(
        _ask(f"parallelism_config_{name}", text, _is("use_parallelism_config", True))
        for name, text in (
            ("dp_replicate_size", "How many replicas of the model?"),
            ("dp_shard_size", "Among how many processes is a replica sharded?"),
            ("tp_size", "Among how many is each tensor split?"),
            ("cp_size", "Among how many is a sequence split?"),
        )
    ),
    _ask("parallelism_config_cp_comm_strategy", "How do keys and values travel?",
         _at_least("parallelism_config_cp_size", 2)),
    # DeepSpeed
    _ask("deepspeed_config_file", "DeepSpeed's own configuration file (empty: answer the questions)?", _DEEPSPEED,
         may_be_empty=True),
    _ask("zero_stage", "What is sharded: 0 nothing, 1 optimizer, 2 gradients, 3 parameters?", _ZERO, offer=2),
    _ask("offload_optimizer_device", "Where is the optimizer's state kept?", _SHARDED, offer="none"),
    _ask("offload_optimizer_nvme_path", "In which directory of the drive?", _is("offload_optimizer_device", "nvme")),
    _ask("offload_param_device", "Where are the parameters kept?", _STAGE_3, offer="none"),
    _ask("offload_param_nvme_path", "In which directory of the drive?", _is("offload_param_device", "nvme")),
    _ask("gradient_accumulation_steps", "How many batches make up one step?", _ZERO, offer=1),
    _ask("gradient_clipping", "The largest norm of the gradients (empty: any)?", _ZERO, may_be_empty=True),
    _ask("zero3_save_16bit_model", "Gather the weights in 16 bits when saving?", _STAGE_3, offer=False),
    _ask("zero3_init_flag", "Shard the model's parameters from the beginning?", _STAGE_3, offer=False),
    _ask("deepspeed_moe_layer_cls_names", "Class names of mixture-of-experts layers (empty: none)?", _DEEPSPEED,
         may_be_empty=True),
    _ask("deepspeed_multinode_launcher", "What starts the ranks of the other machines?", _both(_DEEPSPEED, _SEVERAL),
         offer="pdsh"),
    _ask("deepspeed_hostfile", "The file with the machines, `HOST slots=GPUS` a line?", _PDSH),
    _ask("deepspeed_exclusion_filter", "Machines or GPUs of it to leave out (empty: none)?", _PDSH, may_be_empty=True),
    _ask("deepspeed_inclusion_filter", "Machines or GPUs of it to use (empty: all)?",
         _both(_PDSH, _is("deepspeed_exclusion_filter", None)), may_be_empty=True),
    # Megatron-LM
    _ask("megatron_lm_tp_degree", "Among how many processes is each tensor split?", _MEGATRON),
    _ask("megatron_lm_sequence_parallelism", "Split sequences there too?", _at_least("megatron_lm_tp_degree", 2),
         offer=True),
    _ask("megatron_lm_pp_degree", "How many pipeline stages?", _MEGATRON),
    _ask("megatron_lm_num_micro_batches", "How many micro-batches are in the pipeline?",
         _at_least("megatron_lm_pp_degree", 2), offer=1),
    _ask("megatron_lm_recompute_activations", "Compute activations again in the backward pass?", _MEGATRON, offer=True),
    _ask("megatron_lm_use_distributed_optimizer", "Shard the optimizer's state?", _MEGATRON, offer=True),
    _ask("megatron_lm_gradient_clipping", "The largest norm of the gradients (0: any)?", _MEGATRON),
    # processes
    _ask("num_processes", "How many processes, over all machines?", _is("place", "this", "several", "tpu"),
         default=_count),
    _ask("num_processes", "How many processes on each machine?", _is("place", "ssh", "slurm"), default=_count),
    _ask("gpu_ids", "Which GPUs of this machine, such as 0,2?",
         _both(_is("place", "this", "several"), _both(_GPU, _is("way", "none"))), offer="all"),
    _ask("enable_cpu_affinity", "Bind each process to the processors near its GPU (NUMA)?",
         _both(_GPU, _is("way", "none"))),
    # TPU
    _ask("main_training_function", "Which function of the script does every core run?", _TPU, offer="main"),
    _ask("tpu_use_cluster", "Is it a pod of several hosts?", _TPU),
    _ask("tpu_name", "The pod's name?", _POD),
    _ask("tpu_zone", "Its zone?", _POD),
    _ask("tpu_use_sudo", "Run the script with sudo there?", _POD),
    _ask("command_file", "A script to run on every host first (empty: none)?", _POD, may_be_empty=True),
    _ask("vm", "Hosts by name, if they are no instance group (empty: they are)?", _POD, may_be_empty=True),
    _ask("env", "A variable for the hosts, NAME=VALUE (empty: none)?", _POD, may_be_empty=True),
    # SageMaker
    _ask("profile", "The AWS profile with the credentials (empty: those of the environment)?", _AWS, offer="default",
         may_be_empty=True),
    _ask("region", "The AWS region?", _AWS),
    _ask("iam_role_name", "The IAM role that the job runs as?", _AWS),
    _ask("ec2_instance_type", "The machines' type?", _AWS, offer="ml.p3.2xlarge"),
    _ask("distributed_type", "How is the work spread?", _AWS,
         options=(("NO", "not at all"), ("DATA_PARALLEL", "SageMaker's data parallelism")), offer="NO"),
    _ask("image_uri", "A container image (empty: a published one)?", _AWS, may_be_empty=True),
    _ask("sagemaker_inputs_file", "A file with the input channels (empty: none)?", _AWS, may_be_empty=True),
    _ask("sagemaker_metrics_file", "A file with the metrics (empty: none)?", _AWS, may_be_empty=True),
    # how to compute
    _ask("dynamo_backend", "Compile the model with torch.compile, and with which backend?",
         lambda answers: not _TPU(answers), offer="no"),
    _ask("dynamo_mode", "Its mode?", _COMPILED),
    _ask("dynamo_use_fullgraph", "Only whole graphs?", _COMPILED),
    _ask("dynamo_use_dynamic", "Dynamic shapes?", _COMPILED),
    _ask("dynamo_use_regional_compilation", "Compile repeated blocks once?", _COMPILED),
    _ask("mixed_precision", "Which numbers does it compute in?",
         lambda answers: not (_DEEPSPEED(answers) and answers.get("deepspeed_config_file") is not None), offer="no"),
    _ask("downcast_bf16", "Make doubles float32 and floats bfloat16?", _both(_TPU, _is("mixed_precision", "bf16"))),
    _ask("fp8_backend", "Which library does FP8?", _FP8, offer="te"),
    *(
        _ask(f"fp8_{name}", text, _both(_FP8, _TE))
        for name, text in (
            ("use_autocast_during_eval", "FP8 in evaluation too?"),
            ("margin", "The margin of the scaling of gradients?"),
            ("interval", "Steps between computations of the scale?"),
            ("format", "The numbers' format?"),
            ("amax_history_len", "From how many steps is the scale computed?"),
            ("amax_compute_algo", "How?"),
            ("override_linear_precision", "Higher precision for fprop, dgrad, wgrad?"),
        )
    ),
    _ask("fp8_opt_level", "What is sent in 8 bits?", _is("fp8_backend", "msamp")),
    _ask("fp8_enable_fsdp_float8_all_gather", "Gather FSDP's parameters in 8 bits?", _is("fp8_backend", "ao")),
    _ask("fp8_pad_inner_dim", "Pad inner dimensions to what the GPU asks for?", _is("fp8_backend", "ao")),
    _ask("debug", "Check every exchange between processes (slower)?", lambda answers: not _TPU(answers)),
)  # fmt: skip
