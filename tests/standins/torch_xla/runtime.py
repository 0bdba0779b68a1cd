"""Which device this process has, among those of all processes."""

from __future__ import annotations

import os


def device_type() -> str | None:
    return os.environ.get("PJRT_DEVICE", "CPU").split("_")[0]


def world_size() -> int:
    return int(os.environ.get("PJRT_LOCAL_PROCESS_COUNT", "1"))


def global_ordinal() -> int:
    return int(os.environ.get("PJRT_LOCAL_PROCESS_RANK", "0"))


def local_ordinal() -> int:
    return global_ordinal()


def local_device_count() -> int:
    return world_size() * addressable_device_count()


def addressable_device_count() -> int:
    return int(os.environ.get("STANDIN_CORES", "1"))
