"""Settings of FP8, for Accelerate's recipes of TransformerEngine, torchao and MS-AMP."""

from __future__ import annotations

from typing import Any

from .setting import Group, Setting


def _fp8(name: str, help: str, kind: str = "text", default: Any = None, **rest: Any) -> Setting:
    name = f"fp8_{name}"
    return Setting(name, help, kind, default, env=f"ACCELERATE_{name.upper()}", used_by=("fp8",), **rest)


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
