"""Schema of a launch: a row for each setting, in groups, under Accelerate's names where it has them."""

from __future__ import annotations

from typing import Any

from .setting import Group, Setting, switch

# Several machines: who is who, how they meet, and what is done when a rank fails.

MACHINES = Group(
    "machines and GPUs",
    "Which GPUs here, and which machine this is. On a scheduler's node the scheduler says it: leave these out.",
    (
        Setting("gpu_ids", "the GPUs to use, e.g. 0,2 (default: all that are visible)", metavar="IDS",
                env="CUDA_VISIBLE_DEVICES"),
        switch("same_network", "accepted as Accelerate does; changes nothing", used_by=("gang",)),
        Setting("machine_rank", "which of the machines this is, from 0", "whole", metavar="R", used_by=("gang",)),
        Setting("main_process_ip", "a name or address of machine 0 that all can reach", metavar="HOST",
                env="MASTER_ADDR", used_by=("gang",)),
        Setting("main_process_port", "its port (default: any that is free on one machine, 29500 on several)", "whole",
                metavar="PORT", env="MASTER_PORT", used_by=("gang",)),
    ),
    example="--gpu_ids 0,2 train.py",
)  # fmt: skip

RENDEZVOUS = Group(
    "rendezvous",
    "How the machines find each other.",
    (
        Setting("rdzv_backend", "static: machine ranks as given; c10d: torch's elastic one", default="static",
                choices=("static", "c10d"), used_by=("gang",)),
        Setting("rdzv_conf", "k=v,… for the backend; timeout=SECONDS for both", default="", metavar="CONF", key="-",
                used_by=("gang",)),
        Setting("rdzv_id", "a name that all machines of this run give alike", metavar="ID", key="-",
                env="TORCHELASTIC_RUN_ID", used_by=("gang",)),
        Setting("role", "torchelastic's name for the workers", default="default", env="ROLE_NAME", key="-",
                used_by=("gang",)),
    ),
    example="--num_machines 1:4 --rdzv_backend c10d --main_process_ip node0 train.py",
)  # fmt: skip

FAILURES = Group(
    "failures and logs",
    "What happens when a rank fails, and where its output goes.",
    (
        Setting("max_restarts", "how often the whole gang is started again after a failure", "whole", 0, metavar="N",
                env="TORCHELASTIC_MAX_RESTARTS", key="-"),
        Setting("shutdown_timeout", "seconds between SIGTERM and SIGKILL when the gang ends", "seconds", 30.0,
                metavar="S", key="-"),
        Setting("log_dir", "write each rank's output to DIR/rank-R.aATTEMPT.log", metavar="DIR", key="-"),
        Setting("tee", "with --log_dir, print it too: 0 nothing, 1-3 all ranks, or LOCAL_RANK:3,…", default="0",
                short="-t", metavar="SPEC", key="-", when=("log_dir", True)),
        Setting("monitor_interval", "seconds between looks at the other machines", "seconds", 0.1, metavar="S",
                key="-", used_by=("gang",)),
        switch("debug", "Accelerator's debug mode: say which rank and shape disagrees instead of hanging",
               env="ACCELERATE_DEBUG_MODE", style="lower"),
        switch("quiet", "no report of a failure beyond the program's own", short="-q", key="-"),
    ),
    example="--max_restarts 3 --log_dir logs --tee 3 train.py",
)  # fmt: skip

PROGRAM = Group(
    "program and settings",
    "What is run, and where its settings come from.",
    (
        switch("module", "the program is a Python module, as `python -m`", short="-m", key="-"),
        switch("no_python", "the program is a command, not Python", key="-"),
        switch("compat", "`import accelerate` is answered by accel, in the program and in Python processes it starts",
               env="ACCEL_COMPAT", style="one", key="-"),
        Setting("config_file", "settings for what no flag says (default: the file that `accel config` writes)",
                metavar="FILE", key="-"),
        switch("explain", "print each setting, its value and where that comes from, and run nothing", key="-"),
    ),
    example="-m my.training --epochs 10",
)  # fmt: skip

MPI = Group(
    "MPI",
    "Ranks started by mpirun, for training on the CPUs of several machines.",
    (
        Setting("mpirun_hostfile", "start the ranks with mpirun on the hosts of this file", metavar="FILE",
                used_by=("mpi",)),
    ),
    section="mpirun_config",
    prefix="mpirun_",
    example="--cpu --mpirun_hostfile hosts --num_processes 8 train.py",
)  # fmt: skip


# Devices, and processes on them.

HARDWARE = Group(
    "hardware",
    "What to train on. Without any of these: the GPUs that are visible, else TPU chips by torch_tpu, else the CPU.",
    (
        switch(
            "cpu", "train on the CPU even where there is a GPU", env="ACCELERATE_USE_CPU", style="lower", key="use_cpu"
        ),
        switch("multi_gpu", "insist on GPUs: fail where there are none", key="-"),
        switch("tpu", "train on the chips of this TPU host", key="-", used_by=("tpu", "pod")),
    ),
    example="--cpu train.py",
)

RESOURCES = Group(
    "resources",
    "How the hardware is used.",
    (
        Setting("mixed_precision", "what Accelerator() computes in", choices=("no", "fp16", "bf16", "fp8"),
                env="ACCELERATE_MIXED_PRECISION"),
        Setting("num_processes", "ranks in all, over all machines (default: one per GPU, or 1)", "positive",
                metavar="N"),
        Setting("num_machines", "machines in all; MIN:MAX with --rdzv_backend c10d for an elastic world", metavar="M"),
        Setting("num_cpu_threads_per_process", "OMP_NUM_THREADS of each rank (default: an equal share)", "positive",
                metavar="N", env="OMP_NUM_THREADS", key="-"),
        switch("enable_cpu_affinity", "bind each rank to the processors near its GPU (NVIDIA)",
               env="ACCELERATE_CPU_AFFINITY", style="one"),
        Setting("gradient_accumulation_steps", "batches that make up one step of the optimizer", "positive",
                metavar="N", also=("auto",), env="ACCELERATE_GRADIENT_ACCUMULATION_STEPS", key="-"),
        Setting("start_method", "fork: ranks share one import of torch; spawn: each imports for itself",
                choices=("fork", "spawn"), key="-", used_by=("gang",)),
    ),
    example="--num_processes 4 --mixed_precision bf16 train.py",
)  # fmt: skip

WAYS = Group(
    "ways of training",
    "How the work is spread. At most one of DeepSpeed, FSDP and Megatron-LM.",
    (
        switch("use_deepspeed", "train with DeepSpeed", env="ACCELERATE_USE_DEEPSPEED", style="lower", key="-",
               used_by=("deepspeed",)),
        switch("use_fsdp", "train with fully sharded data parallelism", env="ACCELERATE_USE_FSDP", style="lower",
               key="-", used_by=("fsdp",)),
        switch("use_parallelism_config", "spread over several dimensions: replicas, shards, tensors, sequences",
               env="ACCELERATE_USE_PARALLELISM_CONFIG", style="lower", key="-", used_by=("parallelism",)),
        switch("use_megatron_lm", "train with Megatron-LM", env="ACCELERATE_USE_MEGATRON_LM", style="lower", key="-",
               used_by=("megatron",)),
    ),
    example="--use_fsdp train.py",
)  # fmt: skip

BACKENDS = ("no", "eager", "aot_eager", "inductor", "aot_ts_nvfuser", "nvprims_nvfuser", "cudagraphs", "ofi", "fx2trt",
            "onnxrt", "tensorrt", "aot_torchxla_trace_once", "torchxla_trace_once", "tvm", "hpu_backend",
            "neuron")  # fmt: skip
# One is misspelled in Accelerate's own list; the others are gone, and these are what came after them.
_OLD_BACKENDS = (("torhchxla_trace_once", "torchxla_trace_once"), ("nvfuser", "aot_ts_nvfuser"),
                 ("aot_nvfuser", "aot_ts_nvfuser"), ("aot_cudagraphs", "cudagraphs"),
                 ("ipex", "inductor"))  # fmt: skip

_D = ("dynamo",)
_ON = ("dynamo_backend", True)

DYNAMO = Group(
    "torch.compile",
    "Compile what Accelerator.prepare() is given.",
    (
        Setting("dynamo_backend", "compile prepared models with this torch.compile backend", choices=BACKENDS,
                aliases=_OLD_BACKENDS, env="ACCELERATE_DYNAMO_BACKEND", style="upper", used_by=_D),
        Setting("dynamo_mode", "torch.compile's mode", default="default",
                choices=("default", "reduce-overhead", "max-autotune"), env="ACCELERATE_DYNAMO_MODE", used_by=_D,
                when=_ON),
        switch("dynamo_use_fullgraph", "torch.compile(fullgraph=True)", env="ACCELERATE_DYNAMO_USE_FULLGRAPH",
               used_by=_D, when=_ON),
        switch("dynamo_use_dynamic", "torch.compile(dynamic=True)", env="ACCELERATE_DYNAMO_USE_DYNAMIC", used_by=_D,
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
        _fsdp("version", "2: fully_shard; 1: settings of FullyShardedDataParallel, mapped to it by accel's runtime",
              default="2", choices=("1", "2")),
        _fsdp("offload_params", "keep parameters and gradients on the CPU", "yesno", False),
        _fsdp("min_num_params", "parameters from which SIZE_BASED_WRAP makes a unit", "whole", 100_000_000,
              metavar="N"),
        _fsdp("sharding_strategy", "what is sharded (version 1)", default="FULL_SHARD", choices=FSDP_STRATEGIES,
              aliases=_numbered(FSDP_STRATEGIES)),
        _fsdp("reshard_after_forward", "true or false (version 2), or a sharding strategy (version 1)", default="true",
              choices=("true", "false", *FSDP_STRATEGIES, "NO_RESHARD"), aliases=(("yes", "true"), ("no", "false")),
              style="lower"),
        _fsdp("auto_wrap_policy", "how modules are made into units", choices=_WRAPS, aliases=_numbered(_WRAPS)),
        _fsdp("transformer_layer_cls_to_wrap", "class names of the layers that TRANSFORMER_BASED_WRAP makes units",
              metavar="NAMES", env="FSDP_TRANSFORMER_CLS_TO_WRAP"),
        _fsdp("backward_prefetch", "when the next unit's parameters are gathered (version 1)", choices=_PREFETCHES,
              aliases=_numbered(_PREFETCHES)),
        _fsdp("state_dict_type", "how the model is saved", choices=_STATES, aliases=_numbered(_STATES)),
        _fsdp("forward_prefetch", "gather the next unit's parameters during the forward pass (version 1)", "yesno",
              False),
        _fsdp("use_orig_params", "allow frozen and trained parameters in one unit (version 1)", "yesno", True),
        _fsdp("cpu_ram_efficient_loading", "only rank 0 reads the checkpoint of a transformers model", "yesno", True),
        _fsdp("sync_module_states", "send rank 0's parameters to all (version 1)", "yesno", True),
        _fsdp("activation_checkpointing", "compute activations again in the backward pass", "yesno", False),
        _fsdp("activation_checkpointing_offload", "keep the inputs of checkpointed layers on the CPU (version 2)",
              "yesno", False),
        _fsdp("ignored_modules", "a regular expression: names of modules that are not sharded", metavar="REGEX",
              flag=False),
    ),
    section="fsdp_config",
    prefix="fsdp_",
    on=("use_fsdp", True),
    example="--use_fsdp --fsdp_version 2 --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP train.py",
)  # fmt: skip


# Parallelism over several dimensions, as Accelerate's ParallelismConfig reads it.

_PARALLELISM = "parallelism_config_"


def _size(name: str, help: str, kind: str = "positive", default: Any = 1, **fields: Any) -> Setting:
    env = f"PARALLELISM_CONFIG_{name.upper()}"
    return Setting(_PARALLELISM + name, help, kind, default, env=env, used_by=("parallelism",), **fields)


PARALLELISM = Group(
    "several dimensions",
    "With --use_parallelism_config: the sizes' product is the number of processes.",
    (
        _size("dp_replicate_size", "replicas of the model", metavar="N"),
        _size("dp_shard_size", "processes among which one replica is sharded", metavar="N"),
        _size("tp_size", "processes among which each tensor is split", metavar="N"),
        _size("cp_size", "processes among which a sequence is split (context parallelism)", metavar="N"),
        _size("cp_backend", "what splits it", "text", "torch", choices=("torch",)),
        _size("cp_comm_strategy", "how keys and values travel", "text", "allgather", choices=("allgather", "alltoall"),
              when=(f"{_PARALLELISM}cp_size", 2)),
        _size("sp_size", "processes among which a sequence is split (DeepSpeed's Ulysses)", metavar="N"),
        _size("sp_backend", "what splits it", "text", "deepspeed", choices=("deepspeed",)),
        _size("sp_seq_length", "the sequences' length, where it is always the same", "whole", None, metavar="N",
              when=(f"{_PARALLELISM}sp_size", 2)),
        _size("sp_seq_length_is_variable", "whether the length changes between batches", "yesno", True,
              when=(f"{_PARALLELISM}sp_size", 2)),
        _size("sp_attn_implementation", "the attention to use: sdpa, flash_attention_2, flash_attention_3, or a kernel",
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
        _zero("deepspeed_config_file", "DeepSpeed's own configuration, in JSON", metavar="FILE",
              env="ACCELERATE_DEEPSPEED_CONFIG_FILE"),
        _zero("zero_stage", "0 nothing, 1 optimizer, 2 gradients, 3 parameters are sharded (default: 2)", "whole",
              choices=("0", "1", "2", "3"), env="ACCELERATE_DEEPSPEED_ZERO_STAGE"),
        _zero("offload_optimizer_device", "where the optimizer's state is kept", choices=_DEVICES,
              env="ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE"),
        _zero("offload_param_device", "where the parameters are kept", choices=_DEVICES,
              env="ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE"),
        _zero("offload_optimizer_nvme_path", "a directory of the drive for the optimizer's state", metavar="DIR",
              env="ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH"),
        _zero("offload_param_nvme_path", "a directory of the drive for the parameters", metavar="DIR",
              env="ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH"),
        _zero("gradient_clipping", "the largest norm of the gradients", "number", metavar="X",
              also=("auto",), env="ACCELERATE_GRADIENT_CLIPPING"),
        _zero("zero3_init_flag", "make the model's parameters sharded from the beginning (stage 3)", "yesno",
              env="ACCELERATE_DEEPSPEED_ZERO3_INIT", style="lower"),
        _zero("zero3_save_16bit_model", "gather the weights in 16 bits when saving (stage 3)", "yesno",
              env="ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL", style="lower"),
        _zero("deepspeed_hostfile", "the machines: `HOST slots=GPUS` a line", metavar="FILE"),
        _zero("deepspeed_exclusion_filter", "machines and GPUs of the hostfile to leave out", metavar="FILTER"),
        _zero("deepspeed_inclusion_filter", "machines and GPUs of the hostfile to use", metavar="FILTER"),
        _zero("deepspeed_multinode_launcher", "what starts the ranks of several machines (default: pdsh)",
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
        _lm("tp_degree", "processes among which each tensor is split", "positive", 1, metavar="N"),
        _lm("use_custom_fsdp", "Megatron's own fully sharded data parallelism", default=False),
        _lm("no_load_optim", "leave the optimizer's state out when loading", default=False),
        _lm("eod_mask_loss", "no loss for end-of-document tokens", default=False),
        _lm("overlap_cpu_optimizer_d2h_h2d", "copy gradients and parameters while the CPU's optimizer steps",
            default=False),
        _lm("no_save_optim", "leave the optimizer's state out when saving", default=False),
        _lm("optimizer_cpu_offload", "run the optimizer on the CPU", default=False),
        _lm("use_precision_aware_optimizer", "keep the optimizer's state in lower precision", default=False),
        _lm("decoder_last_pipeline_num_layers", "layers of the last pipeline stage (default: an equal share)", "whole",
            metavar="N"),
        _lm("pp_degree", "pipeline stages", "positive", 1, metavar="N"),
        _lm("num_micro_batches", "micro-batches in the pipeline", "whole", metavar="N"),
        _lm("sequence_parallelism", "split sequences too where tensors are split"),
        _lm("recompute_activations", "compute selected activations again in the backward pass"),
        _lm("use_distributed_optimizer", "shard the optimizer's state and gradients among replicas"),
        _lm("gradient_clipping", "the largest norm of the gradients; 0 is none", "number", 1.0, metavar="X"),
        _lm("recompute_granularity", "what is computed again", "text", choices=("full", "selective")),
        _lm("recompute_method", "which layers are", "text", choices=("uniform", "block")),
        _lm("recompute_num_layers", "how many are", "whole", metavar="N"),
        _lm("attention_backend", "Megatron's attention backend", "text", metavar="NAME"),
        _lm("expert_model_parallel_size", "processes among which experts are spread", "whole", metavar="N"),
        _lm("context_parallel_size", "processes among which a sequence is split", "whole", metavar="N"),
        _lm("attention_dropout", "dropout of the attention", "number", metavar="X"),
        _lm("hidden_dropout", "dropout of the hidden layers", "number", metavar="X"),
        _lm("attention_softmax_in_fp32", "compute the attention's softmax in 32 bits"),
        _lm("expert_tensor_parallel_size", "processes among which each expert's tensors are split", "whole",
            metavar="N"),
        _lm("calculate_per_token_loss", "weigh the loss by tokens"),
        _lm("use_rotary_position_embeddings", "rotary position embeddings"),
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
        _fp8("backend", "ao: torchao; te: TransformerEngine; msamp: MS-AMP", choices=("ao", "te", "msamp"),
             style="upper"),
        _fp8("use_autocast_during_eval", "FP8 in evaluation too (te)", "switch", False),
        _fp8("margin", "margin of the scaling of gradients (te)", "whole", 0, metavar="N"),
        _fp8("interval", "steps between computations of the scale (te)", "whole", 1, metavar="N"),
        _fp8("format", "the numbers' format (te)", default="HYBRID", choices=("HYBRID", "E4M3", "E5M2")),
        _fp8("amax_history_len", "steps from which the scale is computed (te)", "whole", 1024, metavar="N"),
        _fp8("amax_compute_algo", "how it is (te)", default="most_recent", choices=("max", "most_recent")),
        _fp8("override_linear_precision", "whether fprop, dgrad and wgrad are computed in higher precision (te)",
             "yesnos", (False, False, False), metavar="B,B,B"),
        _fp8("opt_level", "what is sent in 8 bits (msamp)", default="O2", choices=("O1", "O2")),
        _fp8("enable_fsdp_float8_all_gather", "gather FSDP's parameters in 8 bits (ao)", "yesno", True),
        _fp8("pad_inner_dim", "pad inner dimensions to what the GPU asks for (ao)", "yesno", True),
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
        switch("no_tpu_cluster", "run on this host, whatever the file says", key="-", used_by=("pod",)),
        switch("tpu_use_sudo", "run the script with sudo on the pod's hosts", used_by=("pod",)),
        _pod("vm", "a host of the pod", "words", metavar="NAME", key="tpu_vm"),
        _pod("env", "NAME=VALUE for the pod's hosts", "words", metavar="NAME=VALUE", key="tpu_env"),
        Setting("tpu_runtime", "torch_tpu: a rank a chip; torch_xla: it calls the script's function on every core "
                "(default: the one that is installed)", choices=("torch_tpu", "torch_xla"), key="-",
                used_by=("tpu", "pod")),
        _pod("main_training_function", "the script's function that torch_xla calls on every core (default: main)",
             metavar="NAME", used_by=("tpu", "pod")),
        switch("downcast_bf16", "with bf16, make doubles float32 and floats bfloat16", env="XLA_DOWNCAST_BF16",
               style="one", used_by=("tpu", "pod")),
        _pod("tpu_name", "the pod's name", flag=False),
        _pod("tpu_zone", "its zone", flag=False),
        _pod("command_file", "a script that `accel tpu-config` runs on every host", flag=False),
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
        _aws("aws_access_key_id", "the key's id, where the file names no profile", metavar="ID", key="-", flag=True,
             env="AWS_ACCESS_KEY_ID"),
        _aws("aws_secret_access_key", "the key; better in the environment than on a command line", metavar="KEY",
             key="-", flag=True, env="AWS_SECRET_ACCESS_KEY"),
        _aws("ec2_instance_type", "the machines' type, such as ml.p3.2xlarge"),
        _aws("iam_role_name", "the role that the job runs as"),
        _aws("image_uri", "a container image, instead of a published one"),
        _aws("profile", "the profile with the credentials", env="AWS_PROFILE"),
        _aws("region", "the region", default="us-east-1", env="AWS_DEFAULT_REGION"),
        _aws("base_job_name", "what the job's name begins with", default="accelerate-sagemaker-1"),
        _aws("pytorch_version", "of the published image", default="1.10.2"),
        _aws("transformers_version", "of the published image", default="4.17.0"),
        _aws("py_version", "of the published image", default="py38"),
        _aws("sagemaker_inputs_file", "input channels: name and location a line, with tabs"),
        _aws("sagemaker_metrics_file", "metrics: name and regular expression a line, with tabs"),
        _aws("additional_args", "further arguments of the SageMaker estimator", "table"),
    ),
    example="--config_file sagemaker.yaml train.py --epochs 3",
)  # fmt: skip

ENVIRONMENTS = ("LOCAL_MACHINE", "AMAZON_SAGEMAKER")
TYPES = ("NO", "MULTI_CPU", "MULTI_GPU", "MULTI_XPU", "MULTI_HPU", "MULTI_NPU", "MULTI_MLU", "MULTI_SDAA",
         "MULTI_MUSA", "MULTI_NEURON", "DEEPSPEED", "FSDP", "XLA", "MEGATRON_LM")  # fmt: skip
SAGEMAKER_TYPES = ("NO", "DATA_PARALLEL", "MODEL_PARALLEL")

FILE = Group(
    "the file",
    "What only the configuration file says.",
    (
        Setting("compute_environment", "where it runs", default="LOCAL_MACHINE", choices=ENVIRONMENTS, flag=False),
        Setting("distributed_type", "how the work is spread; flags for that go before it",
                choices=(*TYPES, "DATA_PARALLEL", "MODEL_PARALLEL"), aliases=(("TPU", "XLA"),), flag=False),
    ),
)  # fmt: skip
