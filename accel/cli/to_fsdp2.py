"""`accel to-fsdp2`: convert a configuration file to FSDP2.

stdout has the path of the written file; stderr has a line for each setting that FSDP2 does not have.

--json  {"file", "settings", "dropped": [{"name", "why"}]}: "settings" are the new ones of FSDP.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from . import atomic_write, exit_status
from .argv import UsageError
from .launch_file import Configuration, read_file
from .output import note, print_json

if TYPE_CHECKING:
    from argparse import Namespace

    from .arguments import Parser

EXAMPLES = """\
  accel to-fsdp2 --config_file fsdp.yaml --output_file fsdp2.yaml
  accel to-fsdp2 --config_file fsdp.yaml --overwrite"""

# FSDP 1's strategies -> True if parameters are resharded after the forward pass.
_RESHARDS = {
    "FULL_SHARD": True,
    "SHARD_GRAD_OP": False,
    "HYBRID_SHARD": True,
    "HYBRID_SHARD_ZERO2": False,
    "NO_SHARD": False,
    "NO_RESHARD": False,
    "true": True,
    "false": False,
}
_REMOVED_KEYS = {
    "fsdp_backward_prefetch": "FSDP2 always prefetches in the backward pass",
    "fsdp_forward_prefetch": "FSDP2 has no such setting yet",
    "fsdp_sync_module_states": "FSDP2 always uses the weights of rank 0",
    "fsdp_use_orig_params": "FSDP2 always keeps the original parameters",
}
_COMMAND = "accel to-fsdp2"
_SECTION = "fsdp_config"
_STRATEGY, _RESHARD = "fsdp_sharding_strategy", "fsdp_reshard_after_forward"


def add_arguments(parser: Parser) -> None:
    parser.add_argument("--config_file", metavar="FILE", required=True, help="file to convert, YAML or JSON")
    parser.add_argument("--output_file", metavar="FILE", help="file to write (--overwrite alone: the same file)")
    parser.add_argument("--overwrite", action="store_true", help="replace the output file if it exists")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: Namespace) -> int:
    output = args.output_file or (args.config_file if args.overwrite else None)
    if output is None:
        raise UsageError(_COMMAND, "no output file: give --output_file FILE, or --overwrite to replace the input")
    file = read_file(_COMMAND, args.config_file)
    if not args.overwrite and os.path.exists(output):
        raise UsageError(_COMMAND, f"--output_file: {output} already exists: --overwrite replaces it")
    document, dropped = converted(file)
    atomic_write.write(_COMMAND, [(output, _text(output, document))])
    if args.json:
        reasons = [{"name": name, "why": reason} for name, reason in dropped.items()]
        print_json({"file": output, "settings": document[_SECTION], "dropped": reasons})
    else:
        for name, reason in dropped.items():
            note(f"to-fsdp2: {name} is dropped: {reason}")
        print(output)
    return exit_status.OK


def converted(file: Configuration) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the settings for FSDP2, in order, and the reason for each dropped one. Raises UsageError."""
    from accel.settings.config_file import setting_of

    fsdp = file.document.get(_SECTION)
    if not fsdp:
        raise UsageError(_COMMAND, f"{file.path} has no {_SECTION}: nothing to convert")
    values = {name: entry.value for name, entry in file.entries.items()}
    if values.get("fsdp_version") == "2":
        raise UsageError(_COMMAND, f"{file.path} is for FSDP2 already (fsdp_version: 2)")
    fsdp2: dict[str, Any] = {}
    dropped: dict[str, str] = {}
    for key, value in fsdp.items():
        setting = setting_of(_SECTION, key)
        name = key if setting is None else setting.file_key
        if setting is None:
            dropped[name] = "no version of Accelerate reads it"
        elif name in _REMOVED_KEYS:
            dropped[name] = _REMOVED_KEYS[name]
        elif name in (_STRATEGY, _RESHARD):
            # FSDP 1 has a strategy here; without one, the key may already hold FSDP2's value.
            fsdp2[_RESHARD] = _RESHARDS.get(str(values.get(_STRATEGY) or values.get(_RESHARD)))
        else:
            fsdp2[name] = value
    strategy = values.get(_STRATEGY, "")
    if strategy.startswith(("HYBRID", "NO_SHARD")):
        dropped[_STRATEGY] = f"{strategy} is a device mesh in FSDP2: set parallelism_config too"
    return {**file.document, _SECTION: {**fsdp2, "fsdp_version": 2}}, dropped


def _text(path: str, settings: dict[str, Any]) -> str:
    import json

    import yaml

    if path.endswith(".json"):
        return json.dumps(settings, indent=2, default=str) + "\n"
    return str(yaml.safe_dump(settings, sort_keys=False, allow_unicode=True))
