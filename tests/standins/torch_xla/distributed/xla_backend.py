"""The backend `xla` of torch.distributed and its rendezvous `xla://`; gloo does the work."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import FileStore, Store  # type: ignore[attr-defined]

from torch_xla import runtime


def _group(store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    return dist.ProcessGroupGloo(store, rank, size, timeout)


def _rendezvous(url: str, **rest: Any) -> Iterator[tuple[Store, int, int]]:
    size = runtime.world_size()
    yield FileStore(os.path.join(os.environ["STANDIN_FOLDER"], "store"), size), runtime.global_ordinal(), size


dist.Backend.register_backend("xla", _group, devices="cpu")
dist.register_rendezvous_handler("xla", _rendezvous)  # type: ignore[attr-defined,no-untyped-call]
