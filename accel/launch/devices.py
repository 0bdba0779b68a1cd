"""Device detection without torch. `python -m accel.launch.devices` prints the devices as JSON."""

from __future__ import annotations

import ctypes
import glob
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Kind = Literal["cuda", "xpu", "mps", "tpu", "cpu"]

# Variables that restrict the devices that a process sees.
VISIBLE: Mapping[Kind, str] = {"cuda": "CUDA_VISIBLE_DEVICES", "xpu": "ZE_AFFINITY_MASK"}


@dataclass(frozen=True, kw_only=True)
class Devices:
    """The devices that a process started here may use.

    ids:  their names for the variable in `VISIBLE`. `cpu` has one, so that a machine without accelerators runs one
          process by default.
    cpus: processors that this process may run on (its affinity, not the machine's total).
    """

    kind: Kind
    ids: tuple[str, ...]
    cpus: int

    @property
    def count(self) -> int:
        return len(self.ids)


def find(env: Mapping[str, str] = os.environ) -> Devices:
    """Return the visible devices of the best kind here, in torch's order of preference."""
    cpus = available_cpus()
    kinds: tuple[tuple[Kind, list[str]], ...] = (("cuda", _cuda(env)), ("xpu", _xpu(env)), ("mps", _mps()))
    for kind, ids in kinds:
        if ids:
            return Devices(kind=kind, ids=tuple(ids), cpus=cpus)
    return only_cpu()


def only_cpu() -> Devices:
    return Devices(kind="cpu", ids=("cpu",), cpus=available_cpus())


def available_cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cuda(env: Mapping[str, str]) -> list[str]:
    mask, gpus = env.get(VISIBLE["cuda"]), _nvml_gpus()
    uuids = [uuid for uuid, _ in gpus]
    # By default CUDA numbers the fastest first. Among equal ones it keeps NVML's order.
    by_speed = env.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID" and len({name for _, name in gpus}) > 1
    if by_speed and mask is not None and any(part.strip().isdigit() for part in mask.split(",")):
        uuids = _cuda_uuids(env) or uuids
    return visible(mask, uuids)


def _cuda_uuids(env: Mapping[str, str]) -> list[str]:
    """Return the UUIDs of all GPUs in CUDA's order, by another process: one that is forked later cannot use CUDA."""
    import subprocess

    command = [sys.executable, "-c", _PRINT_CUDA_UUIDS]
    unmasked = {name: value for name, value in env.items() if name != VISIBLE["cuda"]}
    return subprocess.run(command, env=unmasked, capture_output=True, text=True).stdout.split()


_PRINT_CUDA_UUIDS = """
import ctypes, uuid
cuda, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
assert cuda.cuInit(0) == 0 and cuda.cuDeviceGetCount(ctypes.byref(count)) == 0
for index in range(count.value):
    device, identity = ctypes.c_int(), ctypes.create_string_buffer(16)
    assert cuda.cuDeviceGet(ctypes.byref(device), index) == 0 and cuda.cuDeviceGetUuid(identity, device) == 0
    print(f"GPU-{uuid.UUID(bytes=identity.raw)}")
"""


def visible(mask: str | None, uuids: list[str]) -> list[str]:
    """Return the GPUs that CUDA shows for this value of CUDA_VISIBLE_DEVICES, in its order.

    CUDA reads the list up to the first entry that is invalid or repeated
    (https://docs.nvidia.com/cuda/cuda-c-programming-guide/#env-vars). Entries are indices, `GPU-` UUIDs (any
    unique prefix) or `MIG-` UUIDs. NVML's device query does not list MIG slices, so they are not checked.
    """
    if mask is None:
        return uuids
    seen: list[str] = []
    for entry in (part.strip() for part in mask.split(",")):
        device = _match_entry(entry, uuids)
        if device is None or device in seen:
            break
        seen.append(device)
    return seen if uuids else []


def _match_entry(entry: str, uuids: list[str]) -> str | None:
    if entry.startswith("MIG-"):
        return entry
    if entry.startswith("GPU-"):
        matching = [uuid for uuid in uuids if uuid.startswith(entry)]
        return matching[0] if len(matching) == 1 else None
    if entry.isascii() and entry.isdigit() and int(entry) < len(uuids):
        return uuids[int(entry)]
    return None


def _nvml_gpus() -> list[tuple[str, str]]:
    """Return UUID and name of every NVIDIA GPU in NVML's (PCI bus) order; empty without a driver."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return []
    if nvml.nvmlInit_v2() != 0:
        return []
    try:
        count = ctypes.c_uint()
        if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return []
        return [_nvml_gpu(nvml, index) for index in range(count.value)]
    finally:
        nvml.nvmlShutdown()


def _nvml_gpu(nvml: ctypes.CDLL, index: int) -> tuple[str, str]:
    handle, text, name = ctypes.c_void_p(), ctypes.create_string_buffer(96), ctypes.create_string_buffer(96)
    nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle))
    nvml.nvmlDeviceGetName(handle, name, ctypes.c_uint(len(name)))
    if nvml.nvmlDeviceGetUUID(handle, text, ctypes.c_uint(len(text))) != 0:
        text.value = f"index-{index}".encode()  # counted, but a UUID in CUDA_VISIBLE_DEVICES cannot select it
    return text.value.decode(), name.value.decode(errors="replace")


def _xpu(env: Mapping[str, str]) -> list[str]:
    """Return the Intel GPUs (render nodes of vendor 0x8086) if a Level Zero loader can be loaded."""
    if not _can_load("libze_loader.so.1"):
        return []
    vendors = glob.glob("/sys/class/drm/renderD*/device/vendor")
    cards = [str(index) for index in range(sum(_read(path) == "0x8086" for path in vendors))]
    mask = env.get(VISIBLE["xpu"])
    if mask is None:
        return cards
    allowed = {part.split(".")[0].strip() for part in mask.split(",")}
    return [card for card in cards if card in allowed]


def _mps() -> list[str]:
    return ["mps"] if sys.platform == "darwin" and platform.machine() == "arm64" else []


def _can_load(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError:
        return ""


if __name__ == "__main__":
    import dataclasses
    import json

    print(json.dumps(dataclasses.asdict(find())))
