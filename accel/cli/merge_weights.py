"""`accel merge-weights CHECKPOINT OUTPUT`: merge the shards that FSDP wrote into one file for any loader.

stdout has the file's path. The file is written atomically; its weights must fit into memory.

--json  {"file", "bytes"}
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import exit_status
from .output import note, print_json
from .require_torch import has_torch

if TYPE_CHECKING:
    from argparse import Namespace

    from .arguments import Parser

EXAMPLES = """\
  accel merge-weights checkpoint/pytorch_model_fsdp_0 merged
  accel merge-weights checkpoint/pytorch_model_fsdp_0 merged --unsafe_serialization
  accel merge-weights checkpoint/pytorch_model_fsdp_0 merged --remove_checkpoint_dir"""


def add_arguments(parser: Parser) -> None:
    parser.add_argument("checkpoint_directory", metavar="CHECKPOINT", help="checkpoint directory, with .metadata")
    parser.add_argument("output_path", metavar="OUTPUT", help="directory for the file, created if missing")
    unsafe = "write pytorch_model.bin, a pickle, instead of model.safetensors"
    parser.add_argument("--unsafe_serialization", action="store_true", help=unsafe)
    remove = "remove CHECKPOINT after the merge"
    parser.add_argument("--remove_checkpoint_dir", action="store_true", help=remove)
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: Namespace) -> int:
    if not has_torch("accel merge-weights"):
        return exit_status.ERROR
    from accel.checkpoint.merge import merge_fsdp_weights
    from accel.errors import CheckpointError

    try:
        path = merge_fsdp_weights(
            args.checkpoint_directory,
            args.output_path,
            safe_serialization=not args.unsafe_serialization,
            remove_checkpoint_dir=args.remove_checkpoint_dir,
        )
    except CheckpointError as error:
        note(f"merge-weights: {error}")
        return exit_status.ERROR
    if args.json:
        print_json({"file": str(path), "bytes": path.stat().st_size})
    else:
        print(path)
    return exit_status.OK
