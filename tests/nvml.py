"""A stand-in for NVIDIA's management library with as many GPUs as a test wants, compiled on the spot."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.needs import missing

SOURCE = """
#include <string.h>
static const char *uuids[] = {%s};
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = sizeof uuids / sizeof *uuids; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, const void **device) { *device = uuids[index]; return 0; }
int nvmlSystemGetDriverVersion(char *text, unsigned length) { strncpy(text, "570.1", length); return 0; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = 12080; return 0; }
int nvmlDeviceGetName(const void *device, char *name, unsigned length) { strncpy(name, "Stand-in", length); return 0; }
int nvmlDeviceGetUUID(const void *device, char *uuid, unsigned length) { strncpy(uuid, device, length); return 0; }
"""


def fake_gpus(folder: Path, monkeypatch: pytest.MonkeyPatch, uuids: list[str]) -> None:
    """Processes started from now on find these GPUs through NVML."""
    compiler = shutil.which("cc")
    if compiler is None:
        missing("a C compiler", "apt-get install gcc libc6-dev")
    source = folder / "nvml.c"
    source.write_text(SOURCE % ", ".join(f'"{uuid}"' for uuid in uuids))
    library = folder / "lib"
    library.mkdir(exist_ok=True)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library / "libnvidia-ml.so.1", source], check=True)
    monkeypatch.setenv("LD_LIBRARY_PATH", os.pathsep.join([str(library), os.environ.get("LD_LIBRARY_PATH", "")]))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
