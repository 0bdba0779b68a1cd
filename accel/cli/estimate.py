"""`accel estimate-memory MODEL`: estimate a model's memory for inference and training without its weights.

Piped: a line per type (type, largest layer, total, training with Adam), an empty line, and a line per training
strategy (type, strategy, weights, gradients, optimizer, gathered, activations, total), tab-separated.

--json  {"model", "library", "parameters", "trained", "largest_layers", "sizes": [{"dtype", "largest_layer",
        "total", "training": {"model", "gradients", "optimizer", "step"} or null}], "processes", "batch_size",
        "sequence_length", "needs": [{"strategy", "dtype", "weights", "gradients", "optimizer", "gathered",
        "activations", "step", "total"}], "activations_unknown"}, in bytes, per device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import arguments, exit_status
from .argv import UsageError
from .output import note, print_json, print_rows
from .require_torch import has_torch

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterator

    from accel.estimate.report import Report

    from .arguments import Parser

EXAMPLES = """\
  accel estimate-memory bert-base-cased
  accel estimate-memory meta-llama/Llama-3.1-8B --dtypes bfloat16 --num_processes 8 --sequence_length 4096
  accel estimate-memory ./my_model --json
  accel estimate-memory model.safetensors
  accel estimate-memory my_code.models:make_model --batch_size 32

For a name on the Hub only config.json is downloaded, never weights."""

DTYPES = ("float32", "float16", "bfloat16", "int8", "int4")
_COLUMNS = ("DTYPE", "LARGEST LAYER", "TOTAL SIZE", "TRAINING WITH ADAM")
_SHARED = ("DTYPE", "STRATEGY", "WEIGHTS", "GRADIENTS", "OPTIMIZER", "GATHERED", "ACTIVATIONS", "PER DEVICE")


def add_arguments(parser: Parser) -> None:
    model_help = "name on the Hub, directory, safetensors file, or module:factory"
    parser.add_argument("model_name", metavar="MODEL", help=model_help)
    group = parser.add_argument_group("model")
    group.add_argument("--library_name", choices=("timm", "transformers"), help="library of the model")
    code = "run the model's own code (review it first)"
    group.add_argument("--trust_remote_code", action="store_true", help=code)
    types = f"data types: {', '.join(DTYPES)} (default: all)"
    group.add_argument("--dtypes", metavar="TYPE", nargs="+", action="extend", choices=DTYPES, help=types)
    group = parser.add_argument_group("training")
    count = "number of processes, one per device (default: this machine's accelerators)"
    group.add_argument("--num_processes", metavar="N", type=arguments.count, help=count)
    batch = "batch size per device (default: 1)"
    group.add_argument("--batch_size", metavar="N", type=arguments.count, default=1, help=batch)
    length = "tokens per sample (default: 512, or the model's maximum if lower)"
    group.add_argument("--sequence_length", metavar="N", type=arguments.count, help=length)
    checkpoint = "recompute activations in the backward pass"
    group.add_argument("--activation_checkpointing", action="store_true", help=checkpoint)
    group = parser.add_argument_group("output")
    group.add_argument("--verbose", action="store_true", help="explain what is counted, and how")
    group.add_argument("--json", action="store_true", help="print JSON, with sizes in bytes")


def run(args: Namespace) -> int:
    for name in ("num_processes", "batch_size", "sequence_length"):
        if (value := getattr(args, name)) is not None and value < 1:
            raise UsageError("accel estimate-memory", f"--{name} {value}: expects a whole number of 1 or more")
    if not has_torch("accel estimate-memory"):
        return exit_status.ERROR
    from accel.errors import AccelError

    try:
        report = _report(args)
    except AccelError as error:
        note(f"estimate-memory: {error}")
        return exit_status.ERROR
    longest = report.subject.longest
    if longest is not None and report.sequence_length > longest and report.unmeasured is None:
        note(f"estimate-memory: the model supports sequences of at most {longest} tokens, not {report.sequence_length}")
    if args.json:
        from accel.estimate.report import as_json

        print_json(as_json(report))
    else:
        _print(report, verbose=args.verbose)
    return exit_status.OK


def _report(args: Namespace) -> Report:
    from accel.estimate.find import find
    from accel.estimate.report import report
    from accel.launch.devices import find as find_devices

    return report(
        find(args.model_name, args.library_name, trust_remote_code=args.trust_remote_code),
        list(dict.fromkeys(args.dtypes or DTYPES)),
        processes=args.num_processes or find_devices().count,
        batch_size=args.batch_size,
        sequence_length=args.sequence_length,
        checkpointing=args.activation_checkpointing,
    )


def _print(report: Report, *, verbose: bool) -> None:
    from accel.memory import convert_bytes

    rows = [
        (
            size.dtype,
            convert_bytes(size.largest_layer),
            convert_bytes(size.total),
            convert_bytes(max(size.training.values())) if size.training else "N/A",
        )
        for size in report.sizes
    ]
    print_rows(_COLUMNS, rows, on_terminal=rows)
    shared = list(_shared(report))
    if shared:
        print()
        print_rows(_SHARED, shared, on_terminal=shared)
    plural = "es" * (report.processes > 1)
    note(
        f"estimate-memory: {report.processes} process{plural}, batch {report.batch_size} on each, "
        f"sequences of {report.sequence_length}"
    )
    if report.unmeasured:
        note(f"estimate-memory: activations are not counted: {report.unmeasured}")
    if verbose:
        _explain(report)


def _shared(report: Report) -> Iterator[tuple[str, ...]]:
    from accel.estimate.report import TITLES
    from accel.memory import convert_bytes

    for need in report.needs:
        activations = "?" if need.activations is None else convert_bytes(need.activations)
        parts = (need.weights, need.gradients, need.optimizer, need.gathered)
        total = f"{'> ' * (need.activations is None)}{convert_bytes(need.total)}"
        yield need.dtype, TITLES[need.strategy], *map(convert_bytes, parts), activations, total


def _explain(report: Report) -> None:
    layers = ", ".join(report.layers[:3]) + (f" and {len(report.layers) - 3} more" if len(report.layers) > 3 else "")
    note(f"model: {report.subject.library}, {report.parameters:,} parameters, {report.trained:,} of them trained")
    note(f"largest layer: {layers}")
    note(f"gathered: FSDP gathers by {report.unit}, two at a time with the gradients of one; DDP uses its buckets")
    note("weights and gradients: DDP and FSDP keep float32 in every precision; ZeRO keeps the half type")
    note("optimizer: Adam keeps two averages in float32; ZeRO adds float32 weights")
    note("activations: autograd keeps them after a forward pass with fused attention; DDP adds casts of weights")
    note("each device: this is the peak, without torch's own context and the memory that its allocator reserves")
