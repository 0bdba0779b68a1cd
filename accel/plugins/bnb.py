"""The configuration of quantised loading by bitsandbytes."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch

from accel.enums import CustomDtype
from accel.errors import ArgumentError, one_of

_TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_THRESHOLD = 6.0


@dataclass
class BnbQuantizationConfig:
    """Options of `load_and_quantize_model`; one of ``load_in_8bit`` and ``load_in_4bit`` must be True.

    - ``llm_int8_threshold``: columns of inputs with a larger value are multiplied in 16 bits (8-bit layers).
    - ``bnb_4bit_quant_type``: ``"fp4"`` or ``"nf4"``.
    - ``bnb_4bit_use_double_quant``: quantise the scales of the weights too.
    - ``bnb_4bit_compute_dtype``: the type of the products in 4-bit layers: ``"fp32"``, ``"fp16"``, ``"bf16"``, or
      torch's.
    - ``torch_dtype``: the type of the other weights; default: ``bnb_4bit_compute_dtype``, or float16 in 8 bits.
    - ``skip_modules``: names of modules that are not quantised; default: see `get_keys_to_not_convert`.
    - ``keep_in_fp32_modules``: names of modules that are not quantised and stay in float32.

    Raises `ArgumentError` for invalid values.
    """

    load_in_8bit: bool = False
    llm_int8_threshold: float = _THRESHOLD
    load_in_4bit: bool = False
    bnb_4bit_quant_type: str = "fp4"
    bnb_4bit_use_double_quant: bool = False
    bnb_4bit_compute_dtype: Any = "fp16"
    torch_dtype: Any = None
    skip_modules: list[str] | None = None
    keep_in_fp32_modules: list[str] | None = None

    def __post_init__(self) -> None:
        for name in ("load_in_8bit", "load_in_4bit", "bnb_4bit_use_double_quant"):
            self._check(name, bool, "True or False")
        self._check("llm_int8_threshold", (int, float), "a number")
        self._check("skip_modules", (list, type(None)), "a list of names of modules")
        self._check("keep_in_fp32_modules", (list, type(None)), "a list of names of modules")
        if self.load_in_8bit == self.load_in_4bit:
            both = "both" if self.load_in_8bit else "neither"
            raise ArgumentError(f"BnbQuantizationConfig: {both} of load_in_8bit and load_in_4bit: set one to True")
        one_of(self.bnb_4bit_quant_type, ("fp4", "nf4"), source="bnb_4bit_quant_type")
        self.bnb_4bit_compute_dtype = _type_of(self.bnb_4bit_compute_dtype, "bnb_4bit_compute_dtype")
        if self.torch_dtype is None:
            self.torch_dtype = torch.float16 if self.load_in_8bit else self.bnb_4bit_compute_dtype
        self.torch_dtype = _type_of(self.torch_dtype, "torch_dtype")
        self.target_dtype: CustomDtype | torch.dtype = CustomDtype.INT4 if self.load_in_4bit else torch.int8
        if self.load_in_4bit and self.llm_int8_threshold != _THRESHOLD:
            warnings.warn("llm_int8_threshold has no effect on a model in 4 bits", stacklevel=2)

    def _check(self, name: str, kinds: type | tuple[type, ...], valid: str) -> None:
        value = getattr(self, name)
        if not isinstance(value, kinds):
            raise ArgumentError(f"BnbQuantizationConfig: {name}={value!r} is not {valid}")


def _type_of(value: Any, name: str) -> torch.dtype:
    return value if isinstance(value, torch.dtype) else _TYPES[one_of(value, _TYPES, source=name)]
