"""Settings for the devices to use and the number of processes on them."""

from __future__ import annotations

from .setting import Group, Setting, switch

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
