"""A stand-in for CUDA: megatron-core, which computes on CUDA only, gets the CPU whenever it names "cuda"."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")


def _is_cuda(value: Any) -> bool:
    return isinstance(value, (str, torch.device)) and str(value).startswith("cuda")


class _CpuForCuda(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = {name: _CPU if _is_cuda(value) else value for name, value in (kwargs or {}).items()}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.")
        return func(*(_CPU if _is_cuda(value) else value for value in args), **kwargs)


@cache
def install() -> None:
    """Answer "cuda" by the CPU in this process from now on."""
    warnings.simplefilter("ignore")  # of megatron-core, that it falls back to torch's optimizers
    mode: Any = _CpuForCuda()
    mode.__enter__()
    cuda: Any = torch.cuda
    cuda.current_device = lambda: _CPU
    cuda.synchronize = cuda.empty_cache = lambda *_: None
    cuda.stream = lambda *_: nullcontext()
    cuda.manual_seed = torch.manual_seed
    cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils

    from accel.parallel import megatron_core

    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    moe_utils.te_general_gemm = None  # 0.16.1 does not define it without Transformer Engine, and reads it
    megatron_core.DEVICE_TYPES.add("cpu")
