"""TPU slices on GKE. Each slice is a node pool, and one Job uses all of its hosts.

https://cloud.google.com/kubernetes-engine/docs/concepts/tpus and …/docs/how-to/tpu-multislice
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ..errors import SpecError, nearest
from . import names
from .options import TPU_LABEL, TPU_RESOURCE, TPU_TOPOLOGY, KubernetesOptions

if TYPE_CHECKING:
    from ..job import JobSpec

# Each Job of a JobSet has a node pool to itself: https://jobset.sigs.k8s.io/docs/tasks/tpu_multislice/
_EXCLUSIVE = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}
# Value of TPU_LABEL -> the dimensions of its topologies, and the possible chips of a single-host slice. The hosts of
# larger slices have four chips.
_MACHINES: Mapping[str, tuple[int, tuple[int, ...]]] = {
    "tpu-v4-podslice": (3, (4,)),
    "tpu-v5p-slice": (3, (4,)),
    "tpu7x": (3, (4,)),
    "tpu-v5-lite-podslice": (2, (1, 4, 8)),
    "tpu-v6e-slice": (2, (1, 4, 8)),
}
_CHIPS = 4
# Variables with which libtpu finds the other slices. GKE sets those for the pod's place in its own slice.
MEGASCALE = ("MEGASCALE_NUM_SLICES", "MEGASCALE_SLICE_ID", "MEGASCALE_COORDINATOR_ADDRESS")


def with_slice_nodes(spec: JobSpec, options: KubernetesOptions) -> JobSpec:
    """Return the job with as many nodes as its slices have hosts, unless it sets its own number."""
    return dataclasses.replace(spec, nodes=_hosts(spec, options) * options.slices) if spec.nodes == 1 else spec


def check(spec: JobSpec, options: KubernetesOptions, labels: Mapping[str, str], subject: str) -> None:
    """Raise SpecError for a job that the slices cannot run. `labels`: its node selector."""
    if options.tpu_topology is not None:
        for problem in _problems(spec, options, options.tpu_topology, labels.get(TPU_LABEL)):
            raise SpecError(f"{subject}: {problem}")


def _problems(spec: JobSpec, options: KubernetesOptions, topology: str, kind: str | None) -> Iterator[str]:
    chips, total = spec.resources.gpus, math.prod(map(int, topology.split("x")))
    if not chips:
        yield f"tpu_topology {topology} needs --gpus, the chips of one host ({TPU_RESOURCE})"
    if kind is None:
        yield f"tpu_topology {topology} needs --accelerator, the nodes' label {TPU_LABEL} (as {next(iter(_MACHINES))})"
    elif kind in _MACHINES:
        dimensions, single_host_sizes = _MACHINES[kind]
        if topology.count("x") + 1 != dimensions:
            yield f"tpu_topology {topology}: a {kind} has {dimensions} dimensions"
        chip_counts = [*([_CHIPS] if total > _CHIPS else []), *(size for size in single_host_sizes if size == total)]
        if not chip_counts:
            yield f"tpu_topology {topology}: {kind} has no such topology"
        if chips not in chip_counts:
            choices = " or ".join(map(str, chip_counts))
            yield f"--gpus {chips}: each host of a {kind} of {topology} has {choices} chips"
    if total % chips:
        yield f"--gpus {chips}: not a divisor of the {total} chips of tpu_topology {topology}"
    hosts = _hosts(spec, options)
    if options.slices > 1 and hosts == 1:
        yield f"slices: {options.slices}: several slices need several hosts each, and {topology} is one host"
    if spec.nodes != hosts * options.slices:
        subject = f"{options.slices} slices of {topology} have" if options.slices > 1 else f"a slice of {topology} has"
        yield f"--nodes {spec.nodes}: {subject} {hosts * options.slices} hosts of {chips} chips; leave it out"


def warnings(options: KubernetesOptions, labels: Mapping[str, str]) -> list[str]:
    """Return a warning if the job selects an unknown kind of nodes. `labels`: its node selector."""
    kind = labels.get(TPU_LABEL)
    if options.tpu_topology is None or kind is None or kind in _MACHINES:
        return []
    return [f"--accelerator {kind} is not one of {', '.join(_MACHINES)}{nearest(kind, _MACHINES)}"]


def selector(options: KubernetesOptions) -> dict[str, str]:
    return {} if options.tpu_topology is None else {TPU_TOPOLOGY: options.tpu_topology}


def placement_annotations(spec: JobSpec, options: KubernetesOptions) -> dict[str, str]:
    """Return a JobSet's annotations that place each Job on a node pool of its own."""
    exclusive = options.workload == "jobset" and options.tpu_topology is not None and spec.nodes > 1
    return dict(_EXCLUSIVE) if exclusive else {}


def pod_labels(spec: JobSpec, options: KubernetesOptions) -> dict[str, str]:
    """Return the label from which `names.node_of` computes the node, if there are several slices."""
    return {names.SLICE_HOSTS: str(spec.nodes // options.slices)} if options.slices > 1 else {}


def variables(options: KubernetesOptions, coordinator: str) -> list[dict[str, Any]]:
    """Return libtpu's environment variables for pods of several slices."""
    if options.slices == 1:
        return []
    count, slice_id, address = MEGASCALE
    return [
        {"name": count, "value": str(options.slices)},
        {"name": slice_id, "valueFrom": {"fieldRef": {"fieldPath": f"metadata.labels['{names.JOB_INDEX}']"}}},
        {"name": address, "value": coordinator},
    ]


def _hosts(spec: JobSpec, options: KubernetesOptions) -> int:
    """Return the number of hosts of one slice, or 1 if unknown."""
    if options.tpu_topology is None or not spec.resources.gpus:
        return 1
    return max(1, math.prod(map(int, options.tpu_topology.split("x"))) // spec.resources.gpus)
