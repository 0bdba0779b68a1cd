"""`accel to-fsdp2`: rewrite a configuration file for FSDP2.

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

# Whether weights are let go of again after the forward, by the names that the first FSDP has for it.
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
    "fsdp_backward_prefetch": "weights are always fetched ahead in the backward",
    "fsdp_forward_prefetch": "FSDP2 has no such setting yet",
    "fsdp_sync_module_states": "weights are always those of the first process",
    "fsdp_use_orig_params": "parameters are always the model's own",
}
_COMMAND = "accel to-fsdp2"
_SECTION = "fsdp_config"
_STRATEGY, _RESHARD = "fsdp_sharding_strategy", "fsdp_reshard_after_forward"


def add_arguments(parser: Parser) -> None:
    parser.add_argument("--config_file", metavar="FILE", required=True, help="the file to rewrite, YAML or JSON")
    parser.add_argument("--output_file", metavar="FILE", help="where to write (--overwrite alone: the same file)")
    parser.add_argument("--overwrite", action="store_true", help="replace the output file if it is there")
    parser.add_argument("--json", action="store_true", help="answer in JSON")


def run(args: Namespace) -> int:
    output = args.output_file or (args.config_file if args.overwrite else None)
    if output is None:
        raise UsageError(_COMMAND, "say where to write: --output_file FILE, or --overwrite for the same file")
    file = read_file(_COMMAND, args.config_file)
    if not args.overwrite and os.path.exists(output):
        raise UsageError(_COMMAND, f"--output_file: {output} is there already; --overwrite replaces it")
    document, dropped = converted(file)
    atomic_write.write(_COMMAND, [(output, _text(output, document))])
    if args.json:
        reasons = [{"name": name, "why": reason} for name, reason in dropped.items()]
        print_json({"file": output, "settings": document[_SECTION], "dropped": reasons})
    else:
        for name, reason in dropped.items():
            note(f"to-fsdp2: {name} is left out: {reason}")
        print(output)
    return exit_status.OK


def converted(file: Configuration) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the settings for FSDP2, in order, and the reason for each dropped one. Raises UsageError."""
    from accel.settings.config_file import setting_of

    fsdp = file.document.get(_SECTION)
    if not fsdp:
        raise UsageError(_COMMAND, f"{file.path} has no {_SECTION}: there is nothing to rewrite")
    values = {name: entry.value for name, entry in file.entries.items()}
    if values.get("fsdp_version") == "2":
        raise UsageError(_COMMAND, f"{file.path} is for FSDP2 already (fsdp_version: 2)")
    fsdp2: dict[str, Any] = {}
    dropped: dict[str, str] = {}
    for key, value in fsdp.items():
        setting = setting_of(_SECTION, key)
        name = key if setting is None else setting.file_key
        if name in _REMOVED_KEYS:
            dropped[name] = _REMOVED_KEYS[name]
        elif name in (_STRATEGY, _RESHARD):
            # The strategy says it in the first FSDP; where it is not given, so may what is the second's already.
            fsdp2[_RESHARD] = _RESHARDS.get(str(values.get(_STRATEGY) or values.get(_RESHARD)))
        else:
            fsdp2[name] = value
    strategy = values.get(_STRATEGY, "")
    if strategy.startswith(("HYBRID", "NO_SHARD")):
        dropped[_STRATEGY] = f"{strategy} is a mesh of devices now: set parallelism_config too"
    return {**file.document, _SECTION: {**fsdp2, "fsdp_version": 2}}, dropped


def _text(path: str, settings: dict[str, Any]) -> str:
    import json

    import yaml

    if path.endswith(".json"):
        return json.dumps(settings, indent=2, default=str) + "\n"
    return str(yaml.safe_dump(settings, sort_keys=False, allow_unicode=True))
