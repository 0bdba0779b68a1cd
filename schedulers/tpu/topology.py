"""A TPU host's place in its slice, from libtpu's variables, and the number of hosts of a slice type."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from ..errors import SpecError
from ..topology import Topology, number

# https://cloud.google.com/tpu/docs/supported-tpu-configurations: gcloud's names, and the API's.
GENERATIONS = {"v2": "V2", "v3": "V3", "v4": "V4", "v5litepod": "V5LITE_POD", "v5p": "V5P", "v6e": "V6E"}
_OF_8_CHIPS = ("v5litepod", "v6e")  # one host may have 8 of them; their types count chips, others TensorCores
_CHIPS_PER_HOST = 4


def hosts_of(accelerator_type: str | None, generation: str | None, topology: str | None) -> int | None:
    """Return the number of hosts of a slice, or None for an unknown type."""
    if topology is not None:
        chips = math.prod(map(int, re.findall(r"\d+", topology)))
    else:
        generation, _, count = (accelerator_type or "").partition("-")
        chips = int(count if count.isdecimal() else 0) // (1 if generation in _OF_8_CHIPS else 2)
    if generation not in GENERATIONS or not chips:
        return None
    return 1 if generation in _OF_8_CHIPS and chips == 8 else math.ceil(chips / _CHIPS_PER_HOST)


def from_worker(env: Mapping[str, str]) -> Topology:
    """Return the topology of a host of a TPU slice, or of all slices if there are several.

    Its variables are set by GKE in pods and by TPU VMs in containers
    (https://cloud.google.com/kubernetes-engine/docs/how-to/tpus,
    https://cloud.google.com/kubernetes-engine/docs/how-to/tpu-multislice). Raises SpecError, which names the
    variable, for invalid values.
    """
    names = [name.strip() for name in env.get("TPU_WORKER_HOSTNAMES", "").split(",") if name.strip()]
    slices = number(env, "MEGASCALE_NUM_SLICES", default=1)
    if len(names) * slices <= 1:
        return Topology(node_rank=0, nodes=1, master="127.0.0.1")
    name = "CLOUD_TPU_TASK_ID" if "TPU_WORKER_ID" not in env and "CLOUD_TPU_TASK_ID" in env else "TPU_WORKER_ID"
    worker = number(env, name) if len(names) > 1 else 0
    if not 0 <= worker < len(names):
        raise SpecError(f"environment: {name}={worker}, and TPU_WORKER_HOSTNAMES has {len(names)} names")
    kind = env.get("TPU_ACCELERATOR_TYPE", "")
    source = f"TPU_WORKER_HOSTNAMES{f' of the {kind}' if kind else ''}"
    if slices == 1:
        return Topology(node_rank=worker, nodes=len(names), master=names[0], names=tuple(names), source=source)
    coordinator = env.get("MEGASCALE_COORDINATOR_ADDRESS", "")
    if not coordinator:
        raise SpecError(f"environment: MEGASCALE_NUM_SLICES={slices}, but MEGASCALE_COORDINATOR_ADDRESS is not set")
    return Topology(
        node_rank=number(env, "MEGASCALE_SLICE_ID") * len(names) + worker,
        nodes=slices * len(names),
        master=re.sub(r":\d+$", "", coordinator),  # host 0 of slice 0, without the port, which is libtpu's own
        source=f"MEGASCALE_NUM_SLICES and {source}",
    )
