"""This machine's system, Python, processors and memory, and the versions of installed packages."""

from __future__ import annotations

import os
import platform
import shutil
import sys


def describe() -> dict[str, str]:
    """Return the machine's properties for a bug report, by name; unknown ones are left out."""
    from accel.launch.devices import available_cpus

    fields = {
        "platform": platform.platform(),
        "python": f"{platform.python_version()} ({platform.python_implementation()}, {sys.executable})",
        "accel command": shutil.which("accel") or "not on PATH",
        "processors": f"{available_cpus()} of {os.cpu_count() or 1} usable {_processor()}".strip(),
        "memory": _memory(),
        "/dev/shm": _shared_memory(),
    }
    return {name: value for name, value in fields.items() if value}


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            name = next((line for line in file if line.lower().startswith("model name")), "")
    except OSError:
        name = ""
    processor_name = name.partition(":")[2].strip() or platform.processor() or platform.machine()
    return f"({processor_name})" if processor_name else ""


def _memory() -> str:
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError, AttributeError):
        return ""
    limit = _memory_limit()
    text = f"{total / 2**30:.1f} GiB"
    return f"{text}, of which the control group allows {limit / 2**30:.1f} GiB" if limit and limit < total else text


def _memory_limit() -> int | None:
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            with open(path) as file:
                text = file.read().strip()
        except OSError:
            continue
        if text.isdigit():
            return int(text)
    return None


def _shared_memory() -> str:
    try:
        stats = os.statvfs("/dev/shm")
    except OSError:
        return ""
    return f"{stats.f_bavail * stats.f_frsize / 2**30:.1f} GiB free"


# Versions of packages, from their metadata: a package that cannot be imported has one too.

PACKAGES = (
    *("torch", "numpy", "safetensors", "torchdata", "torchvision", "torch_xla", "torchao", "triton"),
    *("accelerate", "transformers", "huggingface_hub", "tokenizers", "datasets", "peft", "trl", "timm"),
    *("deepspeed", "bitsandbytes", "transformer_engine", "megatron-core", "flash_attn"),
    *("fabric", "paramiko", "submitit", "kubernetes", "boto3", "sagemaker", "google-cloud-tpu"),
    *("tensorboard", "wandb", "mlflow", "trackio", "comet_ml", "aim", "clearml", "dvclive", "swanlab"),
    *("msgspec", "pathspec", "platformdirs", "PyYAML", "rich"),
)


def package_versions() -> dict[str, str | None]:
    """Return the version of each of `PACKAGES`; ``None`` if it is not installed."""
    return {name: version_of(name) for name in PACKAGES}


def version_of(name: str) -> str | None:
    """Return the installed version, ``None`` if not installed, or a note that the version cannot be read."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return str(version(name) or "installed, version unknown")
    except PackageNotFoundError:
        return None
    except Exception as error:
        return f"installed, but its metadata cannot be read ({type(error).__name__})"
