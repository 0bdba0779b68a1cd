"""Conversion of a model's 16-bit outputs to fp32."""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from typing import Any

import torch

from accel.pytree import map_nested

_SHORT = (torch.float16, torch.bfloat16)


def _widen(leaf: Any) -> Any:
    return leaf.float() if isinstance(leaf, torch.Tensor) and leaf.dtype in _SHORT else leaf


def convert_to_fp32(tensor: Any) -> Any:
    """Return nested ``tensor`` with every fp16 and bf16 tensor in fp32; everything else stays."""
    return map_nested(_widen, tensor)


class ConvertOutputsToFp32:
    """A function that returns 16-bit outputs of ``model_forward`` in fp32; picklable, unlike a closure."""

    def __init__(self, model_forward: Callable[..., Any]) -> None:
        self.model_forward = model_forward
        update_wrapper(self, model_forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward pass; return its outputs in fp32."""
        return convert_to_fp32(self.model_forward(*args, **kwargs))

    def __getstate__(self) -> dict[str, Any]:
        return {"model_forward": self.model_forward}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["model_forward"])  # type: ignore[misc]


convert_outputs_to_fp32 = ConvertOutputsToFp32
