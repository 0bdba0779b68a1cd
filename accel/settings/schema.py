"""Schema of a launch: a row for each setting, in groups, under Accelerate's names where it has them."""

from __future__ import annotations

from typing import Any

from .setting import Group, Setting, switch

# Several machines: ranks, rendezvous, failures and logs.

MACHINES = Group(
    "machines and GPUs",
    "The GPUs to use, and this machine's place among several. A scheduler sets the latter on its nodes: omit it there.",
    (
        Setting("gpu_ids", "GPUs to use, e.g. 0,2 (default: all visible GPUs)", metavar="IDS",
                env="CUDA_VISIBLE_DEVICES"),
        switch("same_network", "ignored; accepted for compatibility", used_by=("gang",)),
        Setting("machine_rank", "rank of this machine, from 0", "whole", metavar="R", used_by=("gang",)),
        Setting("main_process_ip", "name or address of machine 0, reachable by all", metavar="HOST",
                env="MASTER_ADDR", used_by=("gang",)),
        Setting("main_process_port", "port of machine 0 (default: 29500; on a single machine, any free one)", "whole",
                metavar="PORT", env="MASTER_PORT", used_by=("gang",)),
    ),
    example="--gpu_ids 0,2 train.py",
)  # fmt: skip

RENDEZVOUS = Group(
    "rendezvous",
    "Rendezvous of several machines.",
    (
        Setting("rdzv_backend", "static: fixed machine ranks; c10d: torch's elastic rendezvous", default="static",
                choices=("static", "c10d"), used_by=("gang",)),
        Setting("rdzv_conf", "backend options, k=v,…; timeout=SECONDS for both", default="", metavar="CONF", key="-",
                used_by=("gang",)),
        Setting("rdzv_id", "id of the run, the same on all machines", metavar="ID", key="-",
                env="TORCHELASTIC_RUN_ID", used_by=("gang",)),
        Setting("role", "torchelastic's role of the workers", default="default", env="ROLE_NAME", key="-",
                used_by=("gang",)),
    ),
    example="--num_machines 1:4 --rdzv_backend c10d --main_process_ip node0 train.py",
)  # fmt: skip

FAILURES = Group(
    "failures and logs",
    "Restarts after a failure, and the output of the ranks.",
    (
        Setting("max_restarts", "restarts of all ranks after a failure", "whole", 0, metavar="N",
                env="TORCHELASTIC_MAX_RESTARTS", key="-"),
        Setting("shutdown_timeout", "grace period between SIGTERM and SIGKILL, in seconds", "seconds", 30.0,
                metavar="S", key="-"),
        Setting("log_dir", "write each rank's output to DIR/rank-R.aATTEMPT.log", metavar="DIR", key="-"),
        Setting("tee", "with --log_dir, print the output too: 0 of none, 1-3 of all ranks, or LOCAL_RANK:3,…",
                default="0", short="-t", metavar="SPEC", key="-", when=("log_dir", True)),
        Setting("monitor_interval", "seconds between polls of the other machines", "seconds", 0.1, metavar="S",
                key="-", used_by=("gang",)),
        switch("debug", "debug mode of Accelerator: report mismatched shapes by rank instead of hanging",
               env="ACCELERATE_DEBUG_MODE", style="lower"),
        switch("quiet", "print no failure report beyond the program's own", short="-q", key="-"),
    ),
    example="--max_restarts 3 --log_dir logs --tee 3 train.py",
)  # fmt: skip

PROGRAM = Group(
    "program and settings",
    "The program to run, and the source of its settings.",
    (
        switch("module", "run a Python module, as `python -m`", short="-m", key="-"),
        switch("no_python", "run a command that is not Python", key="-"),
        switch("compat", "make `import accelerate` import accel, in the program and its Python child processes",
               env="ACCEL_COMPAT", style="one", key="-"),
        Setting("config_file", "configuration file (default: the one that `accel config` writes)",
                metavar="FILE", key="-"),
        switch("explain", "print each setting with its value and source, run nothing", key="-"),
    ),
    example="-m my.training --epochs 10",
)  # fmt: skip

MPI = Group(
    "MPI",
    "Launch with mpirun, to train on the CPUs of several machines.",
    (
        Setting("mpirun_hostfile", "launch the ranks with mpirun on the hosts in this file", metavar="FILE",
                used_by=("mpi",)),
    ),
    section="mpirun_config",
    prefix="mpirun_",
    example="--cpu --mpirun_hostfile hosts --num_processes 8 train.py",
)  # fmt: skip


# Devices, and processes on them.

HARDWARE = Group(
    "hardware",
    "Device to train on. Default: visible GPUs, else TPU chips (with torch_tpu), else the CPU.",
    (
        switch(
            "cpu", "train on the CPU even if there are GPUs", env="ACCELERATE_USE_CPU", style="lower", key="use_cpu"
        ),
        switch("multi_gpu", "train on GPUs: fail if there are none", key="-"),
        switch("tpu", "train on the TPU chips of this host", key="-", used_by=("tpu", "pod")),
    ),
    example="--cpu train.py",
)

RESOURCES = Group(
    "resources",
    "Processes, precision and threads.",
    (
        Setting("mixed_precision", "numeric precision of training", choices=("no", "fp16", "bf16", "fp8"),
                env="ACCELERATE_MIXED_PRECISION"),
        Setting("num_processes", "total number of ranks on all machines (default: one per GPU, or 1)", "positive",
                metavar="N"),
        Setting("num_machines", "number of machines; MIN:MAX with --rdzv_backend c10d for elastic ones", metavar="M"),
        Setting("num_cpu_threads_per_process", "OMP_NUM_THREADS of each rank (default: an equal share)", "positive",
                metavar="N", env="OMP_NUM_THREADS", key="-"),
        switch("enable_cpu_affinity", "bind each rank to the CPU cores near its GPU (NVIDIA)",
               env="ACCELERATE_CPU_AFFINITY", style="one"),
        Setting("gradient_accumulation_steps", "batches per optimizer step", "positive",
                metavar="N", also=("auto",), env="ACCELERATE_GRADIENT_ACCUMULATION_STEPS", key="-"),
        Setting("start_method", "fork: ranks share one import of torch; spawn: each rank imports it",
                choices=("fork", "spawn"), key="-", used_by=("gang",)),
    ),
    example="--num_processes 4 --mixed_precision bf16 train.py",
)  # fmt: skip

WAYS = Group(
    "training strategy",
    "Strategy of distributed training: at most one of DeepSpeed, FSDP and Megatron-LM.",
    (
        switch("use_deepspeed", "train with DeepSpeed", env="ACCELERATE_USE_DEEPSPEED", style="lower", key="-",
               used_by=("deepspeed",)),
        switch("use_fsdp", "train with FSDP (fully sharded data parallelism)", env="ACCELERATE_USE_FSDP", style="lower",
               key="-", used_by=("fsdp",)),
        switch("use_parallelism_config", "combine parallelism: replicas, shards, tensors, sequences",
               env="ACCELERATE_USE_PARALLELISM_CONFIG", style="lower", key="-", used_by=("parallelism",)),
        switch("use_megatron_lm", "train with Megatron-LM", env="ACCELERATE_USE_MEGATRON_LM", style="lower", key="-",
               used_by=("megatron",)),
    ),
    example="--use_fsdp train.py",
)  # fmt: skip

BACKENDS = ("no", "eager", "aot_eager", "inductor", "aot_ts_nvfuser", "nvprims_nvfuser", "cudagraphs", "ofi", "fx2trt",
            "onnxrt", "tensorrt", "aot_torchxla_trace_once", "torchxla_trace_once", "tvm", "hpu_backend",
            "neuron")  # fmt: skip
# One is misspelled in Accelerate's list; torch has replaced the others by these.
_OLD_BACKENDS = (("torhchxla_trace_once", "torchxla_trace_once"), ("nvfuser", "aot_ts_nvfuser"),
                 ("aot_nvfuser", "aot_ts_nvfuser"), ("aot_cudagraphs", "cudagraphs"),
                 ("ipex", "inductor"))  # fmt: skip

_D = ("dynamo",)
_ON = ("dynamo_backend", True)

DYNAMO = Group(
    "torch.compile",
    "Compile the models that Accelerator.prepare() gets.",
    (
        Setting("dynamo_backend", "backend of torch.compile for prepared models", choices=BACKENDS,
                aliases=_OLD_BACKENDS, env="ACCELERATE_DYNAMO_BACKEND", style="upper", used_by=_D),
        Setting("dynamo_mode", "mode of torch.compile", default="default",
                choices=("default", "reduce-overhead", "max-autotune"), env="ACCELERATE_DYNAMO_MODE", used_by=_D,
                when=_ON),
        switch("dynamo_use_fullgraph", "use torch.compile(fullgraph=True)", env="ACCELERATE_DYNAMO_USE_FULLGRAPH",
               used_by=_D, when=_ON),
        switch("dynamo_use_dynamic", "use torch.compile(dynamic=True)", env="ACCELERATE_DYNAMO_USE_DYNAMIC", used_by=_D,
               when=_ON),
        switch("dynamo_use_regional_compilation", "compile repeated blocks once",
               env="ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", used_by=_D, when=_ON),
    ),
    section="dynamo_config",
    prefix="dynamo_",
    example="--dynamo_backend inductor --dynamo_mode max-autotune train.py",
)  # fmt: skip


# Fully sharded data parallelism, as Accelerate's FullyShardedDataParallelPlugin reads it.

FSDP_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
_WRAPS = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
_PREFETCHES = ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH")
_STATES = ("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT")


def _fsdp(name: str, help: str, kind: str = "text", default: Any = None, **fields: Any) -> Setting:
    env = fields.pop("env", f"FSDP_{name.upper()}")
    style = fields.pop("style", "lower" if kind == "yesno" else "str")
    return Setting(f"fsdp_{name}", help, kind, default, env=env, style=style, used_by=("fsdp",), **fields)


def _numbered(names: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    return tuple((str(number), name) for number, name in enumerate(names, start=1))


FSDP = Group(
    "FSDP",
    "With --use_fsdp.",
    (
        _fsdp("version", "2: fully_shard; 1: settings of FullyShardedDataParallel, which accel maps to version 2",
              default="2", choices=("1", "2")),
        _fsdp("offload_params", "offload parameters and gradients to the CPU", "yesno", False),
        _fsdp("min_num_params", "minimum parameters of a unit with SIZE_BASED_WRAP", "whole", 100_000_000,
              metavar="N"),
        _fsdp("sharding_strategy", "sharding strategy (version 1)", default="FULL_SHARD", choices=FSDP_STRATEGIES,
              aliases=_numbered(FSDP_STRATEGIES)),
        _fsdp("reshard_after_forward", "reshard after the forward pass (version 2), or a sharding strategy (version 1)",
              default="true", choices=("true", "false", *FSDP_STRATEGIES, "NO_RESHARD"),
              aliases=(("yes", "true"), ("no", "false")), style="lower"),
        _fsdp("auto_wrap_policy", "policy for wrapping modules into units", choices=_WRAPS, aliases=_numbered(_WRAPS)),
        _fsdp("transformer_layer_cls_to_wrap", "class names of layers to wrap with TRANSFORMER_BASED_WRAP",
              metavar="NAMES", env="FSDP_TRANSFORMER_CLS_TO_WRAP"),
        _fsdp("backward_prefetch", "prefetch of the next unit's parameters in the backward pass (version 1)",
              choices=_PREFETCHES, aliases=_numbered(_PREFETCHES)),
        _fsdp("state_dict_type", "type of the saved state dict", choices=_STATES, aliases=_numbered(_STATES)),
        _fsdp("forward_prefetch", "prefetch the next unit's parameters in the forward pass (version 1)", "yesno",
              False),
        _fsdp("use_orig_params", "allow frozen and trained parameters in one unit (version 1)", "yesno", True),
        _fsdp("cpu_ram_efficient_loading", "load checkpoints of transformers models on rank 0 only", "yesno", True),
        _fsdp("sync_module_states", "broadcast rank 0's parameters (version 1)", "yesno", True),
        _fsdp("activation_checkpointing", "recompute activations in the backward pass", "yesno", False),
        _fsdp("activation_checkpointing_offload", "offload inputs of checkpointed layers to the CPU (version 2)",
              "yesno", False),
        _fsdp("ignored_modules", "regular expression for names of modules to leave unsharded", metavar="REGEX",
              flag=False),
    ),
    section="fsdp_config",
    prefix="fsdp_",
    on=("use_fsdp", True),
    example="--use_fsdp --fsdp_version 2 --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP train.py",
)  # fmt: skip


# Combined dimensions of parallelism, as Accelerate's ParallelismConfig reads it.

_PARALLELISM = "parallelism_config_"


def _size(name: str, help: str, kind: str = "positive", default: Any = 1, **fields: Any) -> Setting:
    env = f"PARALLELISM_CONFIG_{name.upper()}"
    return Setting(_PARALLELISM + name, help, kind, default, env=env, used_by=("parallelism",), **fields)


PARALLELISM = Group(
    "combined parallelism",
    "With --use_parallelism_config. The product of the sizes is the number of processes.",
    (
        _size("dp_replicate_size", "number of replicas of the model", metavar="N"),
        _size("dp_shard_size", "number of processes that shard a replica", metavar="N"),
        _size("tp_size", "number of processes that split each tensor", metavar="N"),
        _size("cp_size", "number of processes that split a sequence (context parallelism)", metavar="N"),
        _size("cp_backend", "backend of context parallelism", "text", "torch", choices=("torch",)),
        _size("cp_comm_strategy", "exchange of keys and values", "text", "allgather", choices=("allgather", "alltoall"),
              when=(f"{_PARALLELISM}cp_size", 2)),
        _size("sp_size", "number of processes that split a sequence (DeepSpeed's Ulysses)", metavar="N"),
        _size("sp_backend", "backend of sequence parallelism", "text", "deepspeed", choices=("deepspeed",)),
        _size("sp_seq_length", "length of the sequences, if fixed", "whole", None, metavar="N",
              when=(f"{_PARALLELISM}sp_size", 2)),
        _size("sp_seq_length_is_variable", "allow the length to change between batches", "yesno", True,
              when=(f"{_PARALLELISM}sp_size", 2)),
        _size("sp_attn_implementation", "attention: sdpa, flash_attention_2, flash_attention_3, or a kernel",
              "text", "sdpa", metavar="NAME", when=(f"{_PARALLELISM}sp_size", 2)),
    ),
    section="parallelism_config",
    prefix=_PARALLELISM,
    on=("use_parallelism_config", True),
    example="--use_fsdp --fsdp_version 2 --use_parallelism_config --parallelism_config_tp_size 2 train.py",
)  # fmt: skip


# DeepSpeed, as Accelerate's DeepSpeedPlugin and the `deepspeed` command read it.

DEEPSPEED_LAUNCHERS = ("pdsh", "standard", "openmpi", "mvapich", "mpich", "nossh", "slurm")
_DEVICES = ("none", "cpu", "nvme")


def _zero(name: str, help: str, kind: str = "text", **fields: Any) -> Setting:
    return Setting(name, help, kind, used_by=("deepspeed",), **fields)


DEEPSPEED = Group(
    "DeepSpeed",
    "With --use_deepspeed.",
    (
        _zero("deepspeed_config_file", "DeepSpeed's own configuration file, in JSON", metavar="FILE",
              env="ACCELERATE_DEEPSPEED_CONFIG_FILE"),
        _zero("zero_stage", "ZeRO stage: shard 0 nothing, 1 optimizer, 2 gradients, 3 parameters (default: 2)", "whole",
              choices=("0", "1", "2", "3"), env="ACCELERATE_DEEPSPEED_ZERO_STAGE"),
        _zero("offload_optimizer_device", "device that holds the optimizer's state", choices=_DEVICES,
              env="ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE"),
        _zero("offload_param_device", "device that holds the parameters", choices=_DEVICES,
              env="ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE"),
        _zero("offload_optimizer_nvme_path", "NVMe directory for the optimizer's state", metavar="DIR",
              env="ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH"),
        _zero("offload_param_nvme_path", "NVMe directory for the parameters", metavar="DIR",
              env="ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH"),
        _zero("gradient_clipping", "maximum norm of the gradients", "number", metavar="X",
              also=("auto",), env="ACCELERATE_GRADIENT_CLIPPING"),
        _zero("zero3_init_flag", "shard the parameters when the model is created (stage 3)", "yesno",
              env="ACCELERATE_DEEPSPEED_ZERO3_INIT", style="lower"),
        _zero("zero3_save_16bit_model", "gather 16-bit weights when saving (stage 3)", "yesno",
              env="ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL", style="lower"),
        _zero("deepspeed_hostfile", "hostfile, with `HOST slots=GPUS` per line", metavar="FILE"),
        _zero("deepspeed_exclusion_filter", "machines and GPUs of the hostfile to exclude", metavar="FILTER"),
        _zero("deepspeed_inclusion_filter", "machines and GPUs of the hostfile to include", metavar="FILTER"),
        _zero("deepspeed_multinode_launcher", "launcher for several machines (default: pdsh)",
              choices=DEEPSPEED_LAUNCHERS),
        _zero("deepspeed_moe_layer_cls_names", "class names of mixture-of-experts layers", metavar="NAMES",
              env="ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES"),
    ),
    section="deepspeed_config",
    on=("use_deepspeed", True),
    example="--use_deepspeed --zero_stage 3 --offload_optimizer_device cpu train.py",
)  # fmt: skip


# Megatron-LM, as Accelerate's MegatronLMPlugin reads it.


def _lm(name: str, help: str, kind: str = "yesno", default: Any = None, **fields: Any) -> Setting:
    name = f"megatron_lm_{name}"
    return Setting(name, help, kind, default, env=name.upper(), used_by=("megatron",), **fields)


MEGATRON = Group(
    "Megatron-LM",
    "With --use_megatron_lm.",
    (
        _lm("tp_degree", "number of processes that split each tensor", "positive", 1, metavar="N"),
        _lm("use_custom_fsdp", "use Megatron's own FSDP", default=False),
        _lm("no_load_optim", "do not load the optimizer's state", default=False),
        _lm("eod_mask_loss", "mask the loss of end-of-document tokens", default=False),
        _lm("overlap_cpu_optimizer_d2h_h2d", "overlap copies with the steps of the CPU optimizer",
            default=False),
        _lm("no_save_optim", "do not save the optimizer's state", default=False),
        _lm("optimizer_cpu_offload", "run the optimizer on the CPU", default=False),
        _lm("use_precision_aware_optimizer", "keep the optimizer's state in lower precision", default=False),
        _lm("decoder_last_pipeline_num_layers", "number of layers in the last pipeline stage (default: an equal share)",
            "whole", metavar="N"),
        _lm("pp_degree", "number of pipeline stages", "positive", 1, metavar="N"),
        _lm("num_micro_batches", "number of micro-batches in the pipeline", "whole", metavar="N"),
        _lm("sequence_parallelism", "split sequences across the processes that split tensors"),
        _lm("recompute_activations", "recompute selected activations in the backward pass"),
        _lm("use_distributed_optimizer", "shard the optimizer's state and gradients across replicas"),
        _lm("gradient_clipping", "maximum norm of the gradients; 0 for none", "number", 1.0, metavar="X"),
        _lm("recompute_granularity", "activations to recompute", "text", choices=("full", "selective")),
        _lm("recompute_method", "layers to recompute", "text", choices=("uniform", "block")),
        _lm("recompute_num_layers", "number of layers to recompute", "whole", metavar="N"),
        _lm("attention_backend", "Megatron's attention backend", "text", metavar="NAME"),
        _lm("expert_model_parallel_size", "number of processes that share the experts", "whole", metavar="N"),
        _lm("context_parallel_size", "number of processes that split a sequence", "whole", metavar="N"),
        _lm("attention_dropout", "dropout of the attention", "number", metavar="X"),
        _lm("hidden_dropout", "dropout of the hidden layers", "number", metavar="X"),
        _lm("attention_softmax_in_fp32", "compute the attention's softmax in 32 bits"),
        _lm("expert_tensor_parallel_size", "number of processes that split each expert's tensors", "whole",
            metavar="N"),
        _lm("calculate_per_token_loss", "weight the loss by tokens"),
        _lm("use_rotary_position_embeddings", "use rotary position embeddings"),
    ),
    section="megatron_lm_config",
    prefix="megatron_lm_",
    on=("use_megatron_lm", True),
    example="--use_megatron_lm --megatron_lm_tp_degree 2 --megatron_lm_pp_degree 2 train.py",
)  # fmt: skip


# FP8, as Accelerate's recipes for TransformerEngine, torchao and MS-AMP read it.


def _fp8(name: str, help: str, kind: str = "text", default: Any = None, **fields: Any) -> Setting:
    name = f"fp8_{name}"
    return Setting(name, help, kind, default, env=f"ACCELERATE_{name.upper()}", used_by=("fp8",), **fields)


FP8 = Group(
    "FP8",
    "With --mixed_precision fp8.",
    (
        _fp8("backend", "library: ao (torchao) or te (TransformerEngine); msamp (MS-AMP) is not supported",
             choices=("ao", "msamp", "te"), style="upper"),
        _fp8("use_autocast_during_eval", "use FP8 in evaluation too (te)", "switch", False),
        _fp8("margin", "margin of the gradient scaling (te)", "whole", 0, metavar="N"),
        _fp8("interval", "steps between updates of the scale (te)", "whole", 1, metavar="N"),
        _fp8("format", "FP8 format (te)", default="HYBRID", choices=("HYBRID", "E4M3", "E5M2")),
        _fp8("amax_history_len", "length of the amax history, in steps (te)", "whole", 1024, metavar="N"),
        _fp8("amax_compute_algo", "amax algorithm (te)", default="most_recent", choices=("max", "most_recent")),
        _fp8("override_linear_precision", "use higher precision for fprop, dgrad and wgrad (te)",
             "yesnos", (False, False, False), metavar="B,B,B"),
        _fp8("opt_level", "optimization level of MS-AMP: no effect", default="O2", choices=("O1", "O2")),
        _fp8("enable_fsdp_float8_all_gather", "gather FSDP's parameters in FP8 (ao)", "yesno", True),
        _fp8("pad_inner_dim", "pad inner dimensions as the GPU requires (ao)", "yesno", True),
    ),
    section="fp8_config",
    prefix="fp8_",
    on=("mixed_precision", "fp8"),
    example="--mixed_precision fp8 --fp8_backend te --fp8_format E4M3 train.py",
)  # fmt: skip


# TPU hosts and pods, and Amazon SageMaker.


def _pod(name: str, help: str, kind: str = "text", default: Any = None, **fields: Any) -> Setting:
    return Setting(name, help, kind, default, used_by=fields.pop("used_by", ("pod",)), **fields)


TPU = Group(
    "TPU",
    "With --tpu.",
    (
        switch("tpu_use_cluster", "run on every host of a TPU pod", spelling="tpu_cluster", used_by=("pod",)),
        switch("no_tpu_cluster", "run on this host only, despite the file", key="-", used_by=("pod",)),
        switch("tpu_use_sudo", "run the script with sudo on the pod's hosts", used_by=("pod",)),
        _pod("vm", "host of the pod", "words", metavar="NAME", key="tpu_vm"),
        _pod("env", "environment variable for the pod's hosts", "words", metavar="NAME=VALUE", key="tpu_env"),
        Setting("tpu_runtime", "torch_tpu: one rank per chip; torch_xla: calls the script's function on every core "
                "(default: the installed one)", choices=("torch_tpu", "torch_xla"), key="-",
                used_by=("tpu", "pod")),
        _pod("main_training_function", "function of the script that torch_xla calls on every core (default: main)",
             metavar="NAME", used_by=("tpu", "pod")),
        switch("downcast_bf16", "with bf16, convert doubles to float32 and floats to bfloat16", env="XLA_DOWNCAST_BF16",
               style="one", used_by=("tpu", "pod")),
        _pod("tpu_name", "name of the pod", flag=False),
        _pod("tpu_zone", "zone of the pod", flag=False),
        _pod("command_file", "file of commands that `accel tpu-config` runs on every host", flag=False),
        _pod("commands", "commands that `accel tpu-config` runs on every host", "words", flag=False),
    ),
    on=("tpu", True),
    example="--tpu --main_training_function main --mixed_precision bf16 train.py",
)  # fmt: skip


def _aws(name: str, help: str, kind: str = "text", default: Any = None, **fields: Any) -> Setting:
    return Setting(name, help, kind, default, used_by=("sagemaker",), **{"flag": False} | fields)


SAGEMAKER = Group(
    "Amazon SageMaker",
    "With a configuration file of compute_environment: AMAZON_SAGEMAKER.",
    (
        _aws("aws_access_key_id", "AWS access key id, if the file has no profile", metavar="ID", key="-", flag=True,
             env="AWS_ACCESS_KEY_ID"),
        _aws("aws_secret_access_key", "AWS secret access key; safer in the environment than on a command line",
             metavar="KEY", key="-", flag=True, env="AWS_SECRET_ACCESS_KEY"),
        _aws("ec2_instance_type", "machine type, such as ml.p3.2xlarge"),
        _aws("iam_role_name", "IAM role of the job"),
        _aws("image_uri", "container image, instead of a published one"),
        _aws("profile", "AWS profile with the credentials", env="AWS_PROFILE"),
        _aws("region", "AWS region", default="us-east-1", env="AWS_DEFAULT_REGION"),
        _aws("base_job_name", "prefix of the job's name", default="accelerate-sagemaker-1"),
        _aws("pytorch_version", "PyTorch version of the published image", default="1.10.2"),
        _aws("transformers_version", "Transformers version of the published image", default="4.17.0"),
        _aws("py_version", "Python version of the published image", default="py38"),
        _aws("sagemaker_inputs_file", "file of input channels, a name and a location per line, tab-separated"),
        _aws("sagemaker_metrics_file", "file of metrics, a name and a regular expression per line, tab-separated"),
        _aws("additional_args", "additional arguments of the SageMaker estimator", "table"),
    ),
    example="--config_file sagemaker.yaml train.py --epochs 3",
)  # fmt: skip

ENVIRONMENTS = ("LOCAL_MACHINE", "AMAZON_SAGEMAKER")
TYPES = ("NO", "MULTI_CPU", "MULTI_GPU", "MULTI_XPU", "MULTI_HPU", "MULTI_NPU", "MULTI_MLU", "MULTI_SDAA",
         "MULTI_MUSA", "MULTI_NEURON", "DEEPSPEED", "FSDP", "XLA", "MEGATRON_LM")  # fmt: skip
SAGEMAKER_TYPES = ("NO", "DATA_PARALLEL", "MODEL_PARALLEL")

FILE = Group(
    "file only",
    "Settings that only the configuration file has.",
    (
        Setting("compute_environment", "where it runs", default="LOCAL_MACHINE", choices=ENVIRONMENTS, flag=False),
        Setting("distributed_type", "training strategy; flags for one override it",
                choices=(*TYPES, "DATA_PARALLEL", "MODEL_PARALLEL"), aliases=(("TPU", "XLA"),), flag=False),
    ),
)  # fmt: skip
