"""Memory of the host through which tensors go from and to a device."""

from __future__ import annotations

import mmap
import weakref
from typing import Any

import torch


class HostMemory:
    """``size`` bytes of the host's memory; for a CUDA ``device`` pinned, so that copies run at the speed of the bus.

    torch's own pinned memory has sizes of powers of two, and its allocator never returns it to the system.

    bytes: the memory, as a tensor of type uint8. Tensors that are made of it keep it, unpinned, after `free`.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        memory: Any = mmap.mmap(-1, max(size, 1))
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        self.bytes = torch.frombuffer(memory, dtype=torch.uint8, count=size) if size else torch.empty(0).byte()
        self._unpin = weakref.finalize(self, _unpin, _pin(self.bytes)) if device.type == "cuda" and size else None

    def free(self) -> None:
        """Unpin the memory, and return it to the system once no tensor refers to it."""
        if self._unpin is not None:
            self._unpin()
        self.bytes = torch.empty(0, dtype=torch.uint8)


def _pin(memory: torch.Tensor) -> int:
    cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    torch.cuda.check_error(int(cudart.cudaHostRegister(memory.data_ptr(), memory.numel(), 0)))
    return memory.data_ptr()


def _unpin(address: int) -> None:
    cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    cudart.cudaHostUnregister(address)
