"""Finding devices: NVML's order, CUDA's reading of its variable, and no torch."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel.launch.devices import visible
from tests.needs import missing

from .conftest import ROOT

A, B, C = "GPU-aaaa-1", "GPU-aabb-2", "GPU-cccc-3"
MIG = "MIG-aaaa-1/1/0"


@pytest.mark.parametrize(
    ("mask", "seen"),
    [
        (None, [A, B, C]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("0", [A]),
        ("2,0", [C, A]),
        (" 1 , 2 ", [B, C]),
        ("0,-1,1", [A]),
        ("0,3,1", [A]),
        ("0,x,1", [A]),
        ("0,0", [A]),
        ("1,GPU-aabb", [B]),
        ("GPU-cccc-3", [C]),
        ("GPU-cc,0", [C, A]),
        ("GPU-aa", []),
        ("gpu-cccc-3", []),
        (MIG, [MIG]),
        ("0,,1", [A]),
    ],
)
def test_visible(mask: str | None, seen: list[str]) -> None:
    assert visible(mask, [A, B, C]) == seen


@pytest.mark.parametrize("mask", [None, "", "0", A, MIG])
def test_nothing_is_visible_where_there_is_nothing(mask: str | None) -> None:
    assert visible(mask, []) == []


ENTRIES = st.one_of(
    st.integers(-1, 9).map(str), st.sampled_from([A, B, C, "GPU-", "GPU-a", "MIG-1", "", "x", "1.0", "²"])
)


@given(st.lists(ENTRIES, max_size=6), st.lists(st.sampled_from([A, B, C]), unique=True))
def test_visible_is_a_choice_that_grows_with_its_mask(entries: list[str], uuids: list[str]) -> None:
    seen = visible(",".join(entries), uuids)
    assert len(set(seen)) == len(seen)
    assert all(device in uuids or device.startswith("MIG-") for device in seen)
    fewer = visible(",".join(entries[:-1]), uuids) if entries else []
    assert seen[: len(fewer)] == fewer


FAST, SLOW = (f"GPU-{n * 8}-{n * 4}-{n * 4}-{n * 4}-{n * 12}" for n in "21")

NVML = """
#include <string.h>
#include <stdlib.h>
static int count(void) { const char *n = getenv("FAKE_GPUS"); return n ? atoi(n) : 0; }
int nvmlInit_v2(void) { return getenv("FAKE_NVML_BROKEN") ? 9 : 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *n) { *n = count(); return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **handle) { *handle = (void *)(size_t)(i + 1); return 0; }
int nvmlDeviceGetUUID(void *handle, char *text, unsigned size) {
    if ((size_t)handle == 3) return 3; /* the third one has no name */
    const char *uuids[] = {"GPU-11111111-aaaa", "GPU-22222222-bbbb", %s};
    strncpy(text, uuids[(size_t)handle - 1 + (getenv("FAKE_FAST") ? 2 : 0)], size);
    return 0;
}
int nvmlDeviceGetName(void *handle, char *text, unsigned size) {
    strncpy(text, (size_t)handle == 2 && getenv("FAKE_FAST") ? "Fast" : "Slow", size);
    return 0;
}
"""

# Two GPUs, of which NVML has the second first, and the library that says so.
CUDA = """
#include <stdlib.h>
#include <string.h>
int cuInit(unsigned flags) { return getenv("CUDA_VISIBLE_DEVICES") ? 100 : 0; }
int cuDeviceGetCount(int *count) { *count = 2; return 0; }
int cuDeviceGet(int *device, int index) { *device = index; return 0; }
int cuDeviceGetUuid(char *uuid, int device) { memset(uuid, device ? 0x11 : 0x22, 16); return 0; }
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stand-in for the NVIDIA driver's library, with as many GPUs as FAKE_GPUS says."""
    folder = tmp_path_factory.mktemp("driver")
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        missing("a C compiler", "apt-get install -y gcc libc6-dev")
    for name, source in (("libnvidia-ml.so.1", NVML % f'"{SLOW}", "{FAST}"'), ("libcuda.so.1", CUDA)):
        (folder / f"{name}.c").write_text(source)
        command = [str(compiler), "-shared", "-fPIC", "-o", str(folder / name), str(folder / f"{name}.c")]
        subprocess.run(command, check=True, timeout=60)
    return folder


def devices(folder: Path, **env: str) -> dict[str, object]:
    inherited = {
        name: value for name, value in os.environ.items() if name not in ("CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH")
    }
    done = subprocess.run(
        [sys.executable, "-m", "accel.launch.devices"],
        env={**inherited, "PYTHONPATH": str(ROOT), "LD_LIBRARY_PATH": str(folder), **env},
        stdout=subprocess.PIPE,
        check=True,
        timeout=60,
    )
    return dict(json.loads(done.stdout))


@pytest.mark.parametrize(
    ("env", "kind", "ids"),
    [
        ({}, "cuda", ["GPU-11111111-aaaa", "GPU-22222222-bbbb", "index-2"]),
        ({"CUDA_VISIBLE_DEVICES": "1"}, "cuda", ["GPU-22222222-bbbb"]),
        ({"CUDA_VISIBLE_DEVICES": "2,GPU-1111"}, "cuda", ["index-2", "GPU-11111111-aaaa"]),
        ({"CUDA_VISIBLE_DEVICES": ""}, "cpu", ["cpu"]),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, "cpu", ["cpu"]),
        ({"FAKE_GPUS": "0"}, "cpu", ["cpu"]),
        ({"FAKE_NVML_BROKEN": "1"}, "cpu", ["cpu"]),
    ],
)
def test_through_nvml(driver: Path, env: dict[str, str], kind: str, ids: list[str]) -> None:
    found = devices(driver, **{"FAKE_GPUS": "3", **env})
    assert (found["kind"], found["ids"]) == (kind, ids)
    assert found["cpus"] == len(os.sched_getaffinity(0))


def test_needs_no_torch() -> None:
    code = "import sys, accel.launch.run, accel.launch.plan as p; p.find(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.parametrize(
    ("env", "ids"),
    [
        ({"CUDA_VISIBLE_DEVICES": "0"}, [FAST]),
        ({"CUDA_VISIBLE_DEVICES": "1,0"}, [SLOW, FAST]),
        ({"CUDA_VISIBLE_DEVICES": "0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, [SLOW]),
        ({"CUDA_VISIBLE_DEVICES": SLOW}, [SLOW]),
        ({}, [SLOW, FAST]),
    ],
)
def test_indices_are_read_in_cudas_order(driver: Path, env: dict[str, str], ids: list[str]) -> None:
    assert devices(driver, FAKE_GPUS="2", FAKE_FAST="1", **env)["ids"] == ids
