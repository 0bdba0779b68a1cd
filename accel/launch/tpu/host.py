"""This TPU host: its chips, its place in the slice, and the variables that torch_tpu needs before ranks start."""

from __future__ import annotations

import glob
import hashlib
import os
import re
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from ..errors import LaunchConfigError

PCI = "/sys/bus/pci/devices"
VFIO = "/dev/vfio"
_METADATA = "169.254.169.254"
_TIMEOUT_S = 2.0
_PORT = 8070
_GOOGLE = "0x1ae0"
_V7 = "0x0076"
# PCI device -> number of a host's devices -> their topology (X, Y, Z; for TPU7x also the cores of a chip).
_CUBE = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,2,2"}
_FLAT = {1: "1,1,1", 4: "2,2,1", 8: "2,4,1"}
_SHAPES: Mapping[str, Mapping[int, str]] = {
    "0x005e": _CUBE,  # v4
    "0x0062": _CUBE,  # v5p
    "0x0063": _FLAT,  # v5e
    "0x006f": _FLAT,  # v6e
    _V7: {2: "1,1,1,2", 4: "1,2,1,2", 8: "2,2,1,2"},
}


def chips(env: Mapping[str, str], pci: str = PCI, vfio: str = VFIO) -> list[str]:
    """Return the PCI device id of each TPU device usable here. `TORCH_TPU_DEVICES_PER_HOST` limits their number."""
    device_ids = []
    for path in sorted(glob.glob(f"{pci}/*")):
        kind = _read(f"{path}/device")
        group = os.path.basename(os.path.realpath(f"{path}/iommu_group"))
        if _read(f"{path}/vendor") == _GOOGLE and kind in _SHAPES and os.path.exists(f"{vfio}/{group}"):
            device_ids.append(kind)
    count = _number(env, "TORCH_TPU_DEVICES_PER_HOST", len(device_ids))
    return (device_ids or [""] * count)[:count]


def slice_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return, from the metadata server, the variables of this host's place in its slice that `env` lacks.

    Empty if the variables are set (GKE sets them), if TPU_SKIP_MDS_QUERY is, and if no server responds.
    """
    if "TPU_WORKER_HOSTNAMES" in env or env.get("TPU_SKIP_MDS_QUERY", "").lower() in ("1", "true"):
        return {}
    server = env.get("GCE_METADATA_HOST") or _METADATA
    endpoints = _attribute(server, "worker-network-endpoints")
    if not endpoints:
        return {}
    # name:id:address of each worker, in order.
    hosts = [end.split(":")[-1].strip() for end in endpoints.split(",")]
    attributes = dict(re.findall(r"^(\w+): *'([^']*)'", _attribute(server, "tpu-env"), re.MULTILINE))
    values = {
        "TPU_WORKER_HOSTNAMES": ",".join(hosts),
        "TPU_WORKER_ID": _attribute(server, "agent-worker-number") or attributes.get("WORKER_ID", ""),
        "TPU_ACCELERATOR_TYPE": _attribute(server, "accelerator-type"),
        "TPU_TOPOLOGY": attributes.get("TOPOLOGY", ""),
    }
    return {name: value for name, value in values.items() if value and name not in env}


def torch_tpu_variables(
    env: Mapping[str, str], devices: Sequence[str], *, nodes: int, processes: int, run_id: str
) -> dict[str, str]:
    """Return torch_tpu's variables for all ranks, the same on every host. Variables that are set stay.

    `devices` is the result of `chips`. Raises LaunchConfigError for a value that cannot be determined.
    """
    values = dict.fromkeys(("TORCH_TPU_SLICEBUILDER_ADDRESSES", "TORCH_TPU_TOPOLOGY", "TORCH_TPU_XPROF_SESSION_ID"), "")
    values |= {name: env[name] for name in values if env.get(name)}
    addresses, topology, session = values
    if int(env.get("MEGASCALE_NUM_SLICES") or 1) > 1 and not (values[addresses] and values[topology]):
        raise LaunchConfigError(
            "--tpu: torch_tpu on several slices (MEGASCALE_NUM_SLICES) is not supported: use one slice"
        )
    if not values[addresses]:
        values[addresses] = ",".join(_addresses(env, nodes, processes))
    if not values[topology]:
        values[topology] = _topology(env, devices, nodes, processes)
    if not values[session]:
        number = int(hashlib.sha256(f"{run_id} {values[addresses]}".encode()).hexdigest()[:15], 16)
        values[session] = str(number if nodes > 1 else time.time_ns())
    return values


def _addresses(env: Mapping[str, str], nodes: int, processes: int) -> list[str]:
    """Return an address per rank, in order, at which the ranks form the slice."""
    if nodes == 1:
        return [f"localhost:{port}" for port in _free_ports(processes)]
    hosts = [name.strip() for name in env.get("TPU_WORKER_HOSTNAMES", "").split(",") if name.strip()]
    if len(hosts) != nodes:
        problem = f"TPU_WORKER_HOSTNAMES names {len(hosts)}" if hosts else "TPU_WORKER_HOSTNAMES is not set"
        raise LaunchConfigError(f"--tpu on {nodes} machines: {problem}: export the names of all, in rank order")
    base = _number(env, "TORCH_TPU_BASE_PORT", _PORT)
    return [f"{host}:{base + index}" for host in hosts for index in range(processes)]


def _topology(env: Mapping[str, str], devices: Sequence[str], nodes: int, processes: int) -> str:
    kind = next(iter(devices), "")
    shapes = _SHAPES.get(kind, {})
    if nodes == 1 and processes in shapes:
        return shapes[processes]
    if nodes == 1 and shapes:
        counts = ", ".join(map(str, shapes))
        raise LaunchConfigError(f"--num_processes {processes}: one TPU host of this kind allows {counts}")
    text = env.get("TPU_TOPOLOGY", "")
    dimensions = re.split("[x,]", text)
    if not all(dimension.isdecimal() for dimension in dimensions):
        problem = f"TPU_TOPOLOGY={text!r} is not a topology" if text else "the slice's topology is unknown"
        raise LaunchConfigError(f"--tpu: {problem}: export TORCH_TPU_TOPOLOGY, such as 2,2,2")
    return ",".join(
        [*dimensions, "1", "1"][: max(3, len(dimensions))] + (["2"] if kind == _V7 and len(dimensions) < 4 else [])
    )


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in sockets:
            sock.bind(("localhost", 0))
        return [int(sock.getsockname()[1]) for sock in sockets]


def _attribute(server: str, name: str) -> str:
    url = f"http://{server}/computeMetadata/v1/instance/attributes/{name}"
    # Without a proxy: the server is link-local.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(
            urllib.request.Request(url, headers={"Metadata-Flavor": "Google"}), timeout=_TIMEOUT_S
        ) as response:
            return str(response.read().decode())
    except (OSError, urllib.error.URLError, ValueError):
        return ""


def _number(env: Mapping[str, str], name: str, default: int) -> int:
    text = env.get(name) or str(default)
    if not text.isdecimal():
        raise LaunchConfigError(f"environment: {name} must be a whole number, not {text!r}")
    return int(text)


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError:
        return ""
