"""Probes that may crash or hang (torch, drivers), each in a process of its own.

`python -m accel.diagnostics.subprocess_probe torch` and `… nvml` print one JSON object on their last line.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

Probe = dict[str, Any]


class SubprocessProbe:
    """A probe that runs in the background; `result` waits for it."""

    def __init__(self, name: str) -> None:
        import tempfile

        self._output = tempfile.TemporaryFile()  # noqa: SIM115  # a pipe could fill up unread
        command = [sys.executable, "-m", "accel.diagnostics.subprocess_probe", name]
        self._running = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=self._output, env=_environment()
        )

    def result(self, seconds: float) -> Probe:
        """Return the probe's result, or `{"error": …}` if it failed or timed out; a slow probe is killed."""
        try:
            output, _ = self._running.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            self._running.kill()
            self._running.wait()
            return {"error": f"no answer in {seconds:g} s"}
        except BaseException:
            self._running.kill()
            raise
        probe = _read(output)
        return {"error": self._failure()} if probe is None else probe

    def _failure(self) -> str:
        code = self._running.returncode
        self._output.seek(0)
        lines = self._output.read().decode(errors="replace").strip().splitlines()
        outcome = f"ended by signal {-code}" if code < 0 else f"ended with code {code}"
        return f"{lines[-1].strip()} ({outcome})" if lines else outcome


def _environment() -> dict[str, str]:
    """Return this process's environment, extended so that the probe imports the same `accel`."""
    import accel

    package_root = os.path.dirname(os.path.dirname(os.path.abspath(accel.__file__)))
    paths = [package_root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def _read(output: bytes) -> Probe | None:
    lines = output.decode(errors="replace").strip().splitlines()
    try:
        probe = json.loads(lines[-1]) if lines else None
    except ValueError:
        return None
    return probe if isinstance(probe, dict) else None


def probe_torch() -> Probe:
    """Return torch's version and build, its collective backends and its visible devices."""
    import torch
    import torch.distributed as dist

    probe: Probe = {
        "version": torch.__version__,
        "built for": f"CUDA {torch.version.cuda}" if torch.version.cuda else _non_cuda_build(torch),
        "cudnn": _or_none(lambda: torch.backends.cudnn.version()),  # type: ignore[no-untyped-call]
        "nccl": _or_none(lambda: ".".join(str(part) for part in torch.cuda.nccl.version())),  # type: ignore[no-untyped-call]
        "backends": [name for name in ("gloo", "mpi", "nccl", "ucc", "xccl") if _has_backend(dist, name)],
    }
    return probe | {"devices": _or_none(lambda: _devices(torch)) or []}


def _non_cuda_build(torch: Any) -> str:
    return f"ROCm {torch.version.hip}" if torch.version.hip else "the CPU or a plug-in"


def _has_backend(dist: Any, name: str) -> bool:
    return bool(_or_none(lambda: getattr(dist, f"is_{name}_available")()))


def _devices(torch: Any) -> list[dict[str, Any]]:
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or not torch.accelerator.is_available():
        return []
    module: Any = getattr(torch, accelerator.type, None)
    devices = []
    for index in range(torch.accelerator.device_count()):
        properties = _or_none(lambda index=index: module.get_device_properties(index))  # type: ignore[misc]
        devices.append(
            {
                "kind": accelerator.type,
                "name": _or_none(lambda index=index: str(module.get_device_name(index))),  # type: ignore[misc]
                "memory": getattr(properties, "total_memory", None),
            }
        )
    return devices


def probe_nvml() -> Probe:
    """Return the NVIDIA driver's versions and devices; `{}` without a driver."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return {}
    if (code := nvml.nvmlInit_v2()) != 0:
        return {"error": f"nvmlInit failed with code {code}"}
    count = ctypes.c_uint()
    nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
    cuda = ctypes.c_int()
    has_cuda = _or_none(lambda: nvml.nvmlSystemGetCudaDriverVersion_v2(ctypes.byref(cuda))) == 0
    return {
        "driver": _text(lambda text, size: nvml.nvmlSystemGetDriverVersion(text, size)),
        "cuda": f"{cuda.value // 1000}.{cuda.value % 1000 // 10}" if has_cuda else None,
        "devices": [_nvml_device(nvml, index) for index in range(count.value)],
    }


class _Memory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


def _nvml_device(nvml: ctypes.CDLL, index: int) -> dict[str, Any]:
    handle, memory = ctypes.c_void_p(), _Memory()
    nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle))
    has_memory = _or_none(lambda: nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))) == 0
    return {
        "name": _text(lambda text, size: nvml.nvmlDeviceGetName(handle, text, size)),
        "memory": memory.total if has_memory else None,
        "used": memory.used if has_memory else None,
    }


def _text(query: Callable[[Any, ctypes.c_uint], int]) -> str | None:
    buffer = ctypes.create_string_buffer(96)
    return buffer.value.decode(errors="replace") if _or_none(lambda: query(buffer, ctypes.c_uint(96))) == 0 else None


def _or_none(query: Callable[[], Any]) -> Any:
    """Return the result, or None if this build, driver or plug-in raises."""
    try:
        return query()
    except Exception:
        return None


def main(name: str) -> int:
    """Run a probe (torch or nvml) and print its result as JSON."""
    try:
        probe = {"torch": probe_torch, "nvml": probe_nvml}[name]()
    except ModuleNotFoundError as error:
        probe = {"error": "not installed"} if error.name == "torch" else {"error": f"cannot be imported: {error}"}
    except Exception as error:
        probe = {"error": " ".join(f"cannot be imported: {type(error).__name__}: {error}".split())}
    print(f"\n{json.dumps(probe)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
