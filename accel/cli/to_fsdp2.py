"""`accel to-fsdp2`: a configuration file for the first FSDP, rewritten for the second.

stdout has the path of the file that was written; each setting that the second has no use for is a line on stderr.

--json  {"file", "settings", "dropped": [{"name", "why"}]}: "settings" are those of FSDP as they are now.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from . import config_file, exits
from .output import note, print_json
from .words import UsageError

if TYPE_CHECKING:
    from argparse import Namespace

    from .parser import Parser

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
}
# As numbers the order is torch's: FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD, _HYBRID_SHARD_ZERO2.
_BY_NUMBER = {1: "FULL_SHARD", 2: "SHARD_GRAD_OP", 3: "NO_SHARD", 4: "HYBRID_SHARD", 5: "HYBRID_SHARD_ZERO2"}
_DROPPED = {
    "fsdp_backward_prefetch": "weights are always fetched ahead in the backward",
    "fsdp_backward_prefetch_policy": "weights are always fetched ahead in the backward",
    "fsdp_forward_prefetch": "FSDP2 has no such setting yet",
    "fsdp_sync_module_states": "weights are always those of the first process",
    "fsdp_use_orig_params": "parameters are always the model's own",
}
_STRATEGY, _RESHARD = "fsdp_sharding_strategy", "fsdp_reshard_after_forward"


def add_arguments(parser: Parser) -> None:
    parser.add_argument("--config_file", metavar="FILE", required=True, help="the file to rewrite, YAML or JSON")
    parser.add_argument("--output_file", metavar="FILE", help="where to write (--overwrite alone: the same file)")
    parser.add_argument("--overwrite", action="store_true", help="replace the output file if it is there")
    parser.add_argument("--json", action="store_true", help="answer in JSON")


def run(args: Namespace) -> int:
    output = args.output_file or (args.config_file if args.overwrite else None)
    if output is None:
        raise UsageError("accel to-fsdp2", "say where to write: --output_file FILE, or --overwrite for the same file")
    settings = config_file.read("accel to-fsdp2", args.config_file)
    if not args.overwrite and os.path.exists(output):
        raise UsageError("accel to-fsdp2", f"--output_file: {output} is there already; --overwrite replaces it")
    written, dropped = converted(args.config_file, settings)
    _write(output, written)
    if args.json:
        why = [{"name": name, "why": reason} for name, reason in dropped.items()]
        print_json({"file": output, "settings": written["fsdp_config"], "dropped": why})
    else:
        for name, reason in dropped.items():
            note(f"to-fsdp2: {name} is left out: {reason}")
        print(output)
    return exits.OK


def converted(path: str, settings: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The settings for FSDP2, in their order, and why each of the others was left out. Raises UsageError."""
    fsdp = settings.get("fsdp_config")
    if not isinstance(fsdp, dict) or not fsdp:
        raise UsageError("accel to-fsdp2", f"{path} has no fsdp_config: there is nothing to rewrite")
    version = fsdp.get("fsdp_version", 1)
    if str(version) == "2":
        raise UsageError("accel to-fsdp2", f"{path} is for FSDP2 already (fsdp_version: 2)")
    if str(version) != "1":
        raise UsageError("accel to-fsdp2", f"{path}: fsdp_version: {version!r} is neither 1 nor 2")
    kept: dict[str, Any] = {}
    dropped: dict[str, str] = {}
    for name, value in fsdp.items():
        if name in _DROPPED:
            dropped[name] = _DROPPED[name]
        elif name in (_STRATEGY, _RESHARD):
            kept[_RESHARD] = _reshard(path, name, fsdp)
        else:
            kept[name] = value
    if fsdp.get(_STRATEGY) is not None and _name_of(fsdp[_STRATEGY]).startswith(("HYBRID", "NO_SHARD")):
        dropped[_STRATEGY] = f"{_name_of(fsdp[_STRATEGY])} is a mesh of devices now: set parallelism_config too"
    return {**settings, "fsdp_config": {**kept, "fsdp_version": 2}}, dropped


def _reshard(path: str, name: str, fsdp: dict[str, Any]) -> Any:
    """The strategy says it in the first FSDP; where it is not given, so may a setting that is the second's already."""
    value = fsdp[_STRATEGY] if fsdp.get(_STRATEGY) is not None else fsdp.get(_RESHARD)
    if value is None or isinstance(value, bool):
        return value
    text = _name_of(value)
    if text in _RESHARDS:
        return _RESHARDS[text]
    if text in ("TRUE", "FALSE"):
        return text == "TRUE"
    raise UsageError("accel to-fsdp2", f"{path}: {name}: {value!r} is none of {', '.join(_RESHARDS)}")


def _name_of(value: object) -> str:
    text = str(value)
    return _BY_NUMBER[int(text)] if text.isdigit() and int(text) in _BY_NUMBER else text.upper().lstrip("_")


def _write(path: str, settings: dict[str, Any]) -> None:
    """The file appears whole, so that a full disk does not cost the one that is replaced."""
    import json

    import yaml

    if path.endswith(".json"):
        text = json.dumps(settings, indent=2) + "\n"
    else:
        text = yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)
    path = os.path.realpath(path)
    draft = f"{path}.draft-{os.getpid()}"
    try:
        with open(draft, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(draft, path)
    except OSError as error:
        if os.path.exists(draft):
            os.unlink(draft)
        raise UsageError("accel to-fsdp2", f"cannot write {path}: {error.strerror}") from None
