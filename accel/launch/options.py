"""The flags of `accel launch`, said once: the parser and the help are made from this table.

Names, defaults and meanings are Hugging Face Accelerate's where it has them
(https://huggingface.co/docs/accelerate/package_reference/cli), so that a command line moves over as it is.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Option:
    """One flag. `kind` bool is a switch; others take a value. Spelled with `_` or `-` alike."""

    name: str
    help: str
    kind: type = str
    default: Any = None
    choices: tuple[str, ...] | None = None
    short: str | None = None
    metavar: str | None = None

    def spellings(self) -> list[str]:
        long = dict.fromkeys([f"--{self.name}", f"--{self.name.replace('_', '-')}"])
        return [*([self.short] if self.short else []), *long]


def whole(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"not a whole number from 0 on: {text!r}")
    return int(text)


def seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"not a number of seconds: {text!r}")
    return value


def _option(name: str, help: str, kind: type = str, default: Any = None, **rest: Any) -> Option:
    return Option(name=name, help=help, kind=kind, default=False if kind is bool else default, **rest)


BACKENDS = ("no", "eager", "aot_eager", "inductor", "aot_ts_nvfuser", "nvprims_nvfuser", "cudagraphs", "ofi", "fx2trt",
            "onnxrt", "tensorrt", "aot_torchxla_trace_once", "torhchxla_trace_once", "tvm")  # fmt: skip

GROUPS: dict[str, tuple[Option, ...]] = {
    "processes": (
        _option("num_processes", "ranks in all, over all machines (default: one per GPU, or 1)", int, metavar="N"),
        _option("num_machines", "machines in all; MIN:MAX with --rdzv_backend c10d for an elastic world", metavar="M"),
        _option("machine_rank", "which of them this is, from 0", int, metavar="R"),
        _option("main_process_ip", "a name or address of machine 0 that all can reach", metavar="HOST"),
        _option("main_process_port", "its port (default: any that is free on one machine, 29500 on several)", int,
                metavar="PORT"),
        _option("num_cpu_threads_per_process", "OMP_NUM_THREADS of each rank (default: an equal share)", int,
                metavar="N"),
        _option("start_method", "fork: ranks share one import of torch; spawn: each imports for itself", default=None,
                choices=("fork", "spawn")),
    ),
    "devices and precision": (
        _option("cpu", "train on the CPU even where there is a GPU", bool),
        _option("multi_gpu", "insist on GPUs: fail where there are none", bool),
        _option("gpu_ids", "the GPUs to use, e.g. 0,2 (default: all that are visible)", metavar="IDS"),
        _option("mixed_precision", "what Accelerator() computes in", choices=("no", "fp16", "bf16", "fp8")),
        _option("gradient_accumulation_steps", "for Accelerator()", int, metavar="N"),
        _option("dynamo_backend", "compile prepared models with this torch.compile backend", choices=BACKENDS),
        _option("dynamo_mode", "torch.compile's mode", default="default",
                choices=("default", "reduce-overhead", "max-autotune")),
        _option("dynamo_use_fullgraph", "torch.compile(fullgraph=True)", bool),
        _option("dynamo_use_dynamic", "torch.compile(dynamic=True)", bool),
        _option("dynamo_use_regional_compilation", "compile repeated blocks once", bool),
    ),
    "failures and logs": (
        _option("max_restarts", "how often the whole gang is started again after a failure", int, 0, metavar="N"),
        _option("shutdown_timeout", "seconds between SIGTERM and SIGKILL when the gang ends", float, 30.0, metavar="S"),
        _option("log_dir", "write each rank's output to DIR/rank-R.aATTEMPT.log", metavar="DIR"),
        _option("tee", "with --log_dir, print it too: 0 nothing, 1-3 all ranks, or LOCAL_RANK:3,…", default="0",
                short="-t", metavar="SPEC"),
        _option("monitor_interval", "seconds between looks at the other machines", float, 0.1, metavar="S"),
        _option("debug", "Accelerator's debug mode: say which rank and shape disagrees instead of hanging", bool),
        _option("quiet", "no report of a failure beyond the program's own", bool, short="-q"),
    ),
    "rendezvous": (
        _option("rdzv_backend", "static: machine ranks as given; c10d: torch's elastic one", default="static",
                choices=("static", "c10d")),
        _option("rdzv_conf", "k=v,… for the backend; timeout=SECONDS for both", default="", metavar="CONF"),
        _option("rdzv_id", "a name that all machines of this run give alike", default=None, metavar="ID"),
        _option("role", "torchelastic's name for the workers", default="default"),
        _option("same_network", "accepted as Accelerate does; changes nothing", bool),
    ),
    "program": (
        _option("module", "the program is a Python module, as `python -m`", bool, short="-m"),
        _option("no_python", "the program is a command, not Python", bool),
        _option("compat", "`import accelerate` is answered by accel, in the program and in Python processes it starts",
                bool),
    ),
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds every flag of the table to `parser`, in its groups."""
    for title, options in GROUPS.items():
        group = parser.add_argument_group(title)
        for option in options:
            _add(group, option)


def _add(group: argparse._ArgumentGroup, option: Option) -> None:
    common: dict[str, Any] = {"dest": option.name, "help": option.help, "default": option.default}
    if option.kind is bool:
        group.add_argument(*option.spellings(), action="store_true", **common)
        return
    kind = {int: whole, float: seconds}.get(option.kind, option.kind)
    group.add_argument(*option.spellings(), type=kind, choices=option.choices, metavar=option.metavar, **common)
