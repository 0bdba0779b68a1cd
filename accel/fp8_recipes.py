"""Settings of 8-bit training: a dataclass for each library. MS-AMP's can be read and checked, but not used."""

from __future__ import annotations

import dataclasses
import logging
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from accel.errors import one_of
from accel.kwargs import KwargsHandler
from accel.world.available import is_msamp_available, is_torchao_available, is_transformer_engine_available
from accel.world.environment import read_flag, read_int

_PREFIX = "ACCELERATE_FP8_"
_TE_DEFAULTS: dict[str, Any] = {
    "use_autocast_during_eval": False,
    "margin": 0,
    "interval": 1,
    "fp8_format": "HYBRID",
    "amax_history_len": 1024,
    "amax_compute_algo": "most_recent",
    "override_linear_precision": (False, False, False),
    "use_mxfp8_block_scaling": False,
}


@dataclass
class AORecipeKwargs(KwargsHandler):
    """Settings of 8-bit training with torchao.

    ``config``: a `torchao.float8.Float8LinearConfig`. Default: one with ``pad_inner_dim`` and
        ``enable_fsdp_float8_all_gather``, which default to ``ACCELERATE_FP8_PAD_INNER_DIM`` and
        ``ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER`` (both on).
    ``module_filter_func``: called with module and name; returns True for a module to convert.

    Raises `ImportError` without torchao.
    """

    config: Any = None
    module_filter_func: Callable[..., bool] | None = None
    pad_inner_dim: bool | None = None
    enable_fsdp_float8_all_gather: bool | None = None

    def __post_init__(self) -> None:
        if not is_torchao_available():
            raise ImportError("AORecipeKwargs needs torchao 0.6.1 or newer: pip install torchao")
        if self.config is not None:
            return
        self.pad_inner_dim = _flag("PAD_INNER_DIM", self.pad_inner_dim, True)
        self.enable_fsdp_float8_all_gather = _flag(
            "ENABLE_FSDP_FLOAT8_ALL_GATHER", self.enable_fsdp_float8_all_gather, True
        )
        self.config = import_float8().Float8LinearConfig(
            pad_inner_dim=self.pad_inner_dim, enable_fsdp_float8_all_gather=self.enable_fsdp_float8_all_gather
        )

    def to_dict(self) -> dict[str, Any]:
        """Return every field by its name; ``config`` is not copied."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


@dataclass
class TERecipeKwargs(KwargsHandler):
    """Settings of 8-bit training with transformer-engine; the fields are those of its ``DelayedScaling`` recipe.

    Missing fields come from ``ACCELERATE_FP8_<FIELD>``. Raises `ImportError` without transformer-engine, and
    `ArgumentError` for an unknown format or algorithm.
    """

    use_autocast_during_eval: bool | None = None
    margin: int | None = None
    interval: int | None = None
    fp8_format: str | None = None
    amax_history_len: int | None = None
    amax_compute_algo: str | None = None
    override_linear_precision: tuple[bool, bool, bool] | None = None
    use_mxfp8_block_scaling: bool | None = None

    def __post_init__(self) -> None:
        if not is_transformer_engine_available():
            raise ImportError(f"{type(self).__name__} needs transformer-engine: pip install transformer-engine")
        self.use_autocast_during_eval = _flag("USE_AUTOCAST_DURING_EVAL", self.use_autocast_during_eval, False)
        self.margin = _number("MARGIN", self.margin, 0)
        self.interval = _number("INTERVAL", self.interval, 1)
        self.fp8_format = _choice("FORMAT", self.fp8_format, "HYBRID", ("HYBRID", "E4M3", "E5M2"), upper=True)
        self.amax_history_len = _number("AMAX_HISTORY_LEN", self.amax_history_len, 1024)
        self.amax_compute_algo = _choice(
            "AMAX_COMPUTE_ALGO", self.amax_compute_algo, "most_recent", ("max", "most_recent"), upper=False
        )
        if self.override_linear_precision is None:
            fprop, dgrad, wgrad = (_flag(f"OVERRIDE_{gemm}", None, False) for gemm in ("FPROP", "DGRAD", "WGRAD"))
            self.override_linear_precision = (fprop, dgrad, wgrad)
        self.use_mxfp8_block_scaling = _flag("USE_MXFP8_BLOCK_SCALING", self.use_mxfp8_block_scaling, False)

    def default_values(self) -> dict[str, Any]:
        """Return every field's default, in the form of `to_dict`."""
        return dict(_TE_DEFAULTS)


@dataclass
class MSAMPRecipeKwargs(KwargsHandler):
    """8-bit training with MS-AMP: ``opt_level`` is O1 or O2 (default: ``ACCELERATE_FP8_OPT_LEVEL``, then O2)."""

    opt_level: str | None = None

    def __post_init__(self) -> None:
        self.opt_level = _choice("OPT_LEVEL", self.opt_level, "O2", ("O1", "O2"), upper=True)

    def default_values(self) -> dict[str, Any]:
        """Return every field's default, in the form of `to_dict`."""
        return {"opt_level": "O2"}


@dataclass
class FP8RecipeKwargs(TERecipeKwargs, MSAMPRecipeKwargs):
    """Both recipes in one class, for older scripts. ``backend`` is TE or MSAMP; use that library's class instead."""

    backend: str | None = None

    def default_values(self) -> dict[str, Any]:
        """Return every field's default, in the form of `to_dict`."""
        return {**_TE_DEFAULTS, "opt_level": "O2", "backend": _fp8_backend()}

    def __post_init__(self) -> None:
        warnings.warn(
            "FP8RecipeKwargs is deprecated: use TERecipeKwargs or MSAMPRecipeKwargs", FutureWarning, stacklevel=3
        )
        self.backend = _choice("BACKEND", self.backend, _fp8_backend(), ("MSAMP", "TE"), upper=True)
        MSAMPRecipeKwargs.__post_init__(self)
        TERecipeKwargs.__post_init__(self)


def import_float8() -> Any:
    """Return the module ``torchao.float8``, without its warnings about libraries for other devices and versions."""
    loggers = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        return import_module("torchao.float8")
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _fp8_backend() -> str:
    return "MSAMP" if is_msamp_available() else "TE"


def _flag(name: str, explicit: bool | None, default: bool) -> bool:
    return read_flag(os.environ, _PREFIX + name, default) if explicit is None else explicit


def _number(name: str, explicit: int | None, default: int) -> int:
    if explicit is not None:
        return explicit
    from_env = read_int(os.environ, _PREFIX + name, minimum=0)
    return default if from_env is None else from_env


def _choice(name: str, explicit: str | None, default: str, known: tuple[str, ...], *, upper: bool) -> str:
    source = name.lower() if explicit is not None else f"environment variable {_PREFIX}{name}"
    word = os.environ.get(_PREFIX + name, default) if explicit is None else explicit
    return one_of(word.upper() if upper else word.lower(), known, source=source)
