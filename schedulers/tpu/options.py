"""Options of a TPU target and their offline validation."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from ..errors import SpecError, nearest
from ..hosts.jobs.options import HostOptions
from ..job import JobSpec
from .topology import GENERATIONS, hosts_of

_NAME = re.compile(r"[a-z](?:[-a-z0-9]{0,61}[a-z0-9])?")
_ZONE = re.compile(r"[a-z]+-[a-z]+\d+-[a-z]")
_URI = re.compile(r"gs://[a-z0-9][a-z0-9._-]{1,61}[a-z0-9](?:/[^\s]*)?")
_DISK = re.compile(r"(?:mode=[^,]*,)?source=[^,]+(?:,mode=[^,]*)?")
_DURATION = re.compile(r"(?=\d)(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", re.ASCII)
# Options of created slices only.
_CREATED_ONLY = (
    "version", "spot", "reserved", "queued", "network", "subnetwork", "service_account", "scopes", "labels", "tags",
    "metadata", "data_disk", "keep",
)  # fmt: skip
_DELETE_SCOPE = "cloud-platform"  # the scope that a slice needs to delete itself
OWN_METADATA = ("startup-script", "accel-slice")
_PROJECT = re.compile(r"(?:[a-z0-9.-]+:)?[a-z][-a-z0-9]*[a-z0-9]")


@dataclass(frozen=True, kw_only=True)
class TpuOptions(HostOptions):
    """The options of a TPU target in `accel.yaml`, in addition to `HostOptions`. The names are gcloud's flags.

    project:      the Google Cloud project; default: CLOUDSDK_CORE_PROJECT, or that of the credentials.
    zone:         of the slice, such as us-central2-b.
    name:         the slice, an existing TPU VM that is READY. Without it, a slice is created for each job, and
                  deleted when the job is over.
    accelerator_type, or type and topology: of the slice to create, such as `v4-32`, or `v4` and `2x2x4`.
    version:      its runtime version.
    spot, reserved: preemptible or reserved capacity.
    queued:       request it by a queued resource.
    valid_until_duration: how long to wait for capacity.
    node_count:   slices of a job: 1.
    network, subnetwork, service_account, scopes, labels, tags, metadata: of the slice.
    data_disk:    `source=DISK,mode=read-write`, for slices of one host.
    keep:         only `accel prune` deletes the slice.
    internal_ips: connect to its workers by their internal addresses; a created slice then has no others.
    transport:    `ssh`: with the keys of ~/.ssh, and host keys from Google's API. `gcloud`: as
                  `gcloud compute tpus tpu-vm ssh` does, with OS Login and its own keys.
    concurrency:  the number of jobs that may run at once on the slice, whose chips belong to one job at a time.
    runtime:      the driver of the chips. `torch_tpu`: one rank per chip. `torch_xla`: one process per host, in
                  which torch_xla calls a function of the script on every core. With `cpu: true`, neither.
    main_training_function:  that function, for torch_xla.
    checkpoint_uri: `gs://bucket/prefix`, to which each host uploads the checkpoints under ACCEL_PROJECT_ROOT, and
                  from which they are restored before the start; `{id}` is the job's id.
    """

    project: str | None = None
    zone: str | None = None
    name: str | None = None
    accelerator_type: str | None = None
    type: str | None = None
    topology: str | None = None
    version: str | None = None
    spot: bool = False
    reserved: bool = False
    queued: bool = False
    valid_until_duration: str = "24h"
    node_count: int = 1
    network: str | None = None
    subnetwork: str | None = None
    service_account: str | None = None
    scopes: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    tags: tuple[str, ...] = ()
    metadata: Mapping[str, str] = field(default_factory=dict)
    data_disk: tuple[str, ...] = ()
    keep: bool = False
    internal_ips: bool = False
    transport: Literal["ssh", "gcloud"] = "ssh"
    concurrency: int | None = 1
    runtime: Literal["torch_tpu", "torch_xla"] = "torch_tpu"
    main_training_function: str = "main"
    checkpoint_uri: str | None = None


def check(options: TpuOptions, name: str, spec: JobSpec | None = None) -> None:
    """Raise SpecError, which names the key, if an option is invalid, or if a slice cannot run the job."""
    for problem in _problems(options) if spec is None else _job_problems(spec, options):
        raise SpecError(f"target {name}: {problem}")


def creates(options: TpuOptions) -> bool:
    """Return True if the target creates a slice for each job."""
    return options.name is None and bool(options.accelerator_type or options.type)


def seconds(duration: str) -> int:
    """Return the seconds of a duration of gcloud's, such as `1d12h30m`; 0 if it is invalid."""
    match = _DURATION.fullmatch(duration)
    counts = match.groups("0") if match is not None else "0000"
    return sum(int(count) * unit for count, unit in zip(counts, (86400, 3600, 60, 1), strict=True))


def _problems(options: TpuOptions) -> Iterator[str]:
    for key, pattern in (("zone", _ZONE), ("name", _NAME), ("project", _PROJECT)):
        value = getattr(options, key)
        if value is not None and not pattern.fullmatch(value):
            yield f"{key}: {value!r} is not a valid {key} in Google Cloud"
    if options.checkpoint_uri is not None and not _URI.fullmatch(options.checkpoint_uri):
        yield f"checkpoint_uri must be like gs://bucket/prefix/{{id}}, not {options.checkpoint_uri!r}"
    if options.spares:
        yield "spares: a job runs on all hosts of its slice: leave it out"
    chosen = [key for key in ("name", "accelerator_type", "type") if getattr(options, key) is not None]
    if len(chosen) > 1:
        yield f"{' and '.join(chosen)} are given: keep one of name, accelerator_type, type with topology"
    if (options.type is None) != (options.topology is None):
        yield "set both type and topology, as in type: v4, topology: 2x2x4"
    extra = [key for key in _CREATED_ONLY if getattr(options, key)]
    if options.name is not None and extra:
        yield f"{extra[0]}: only for slices that accel creates; {options.name} exists already"
    if options.type is not None and options.type not in GENERATIONS:
        yield f"type: {options.type!r} is not one of {', '.join(GENERATIONS)}{nearest(options.type, GENERATIONS)}"
    if options.spot and options.reserved:
        yield "spot and reserved are both given: keep one"
    if not seconds(options.valid_until_duration):
        yield f"valid_until_duration: {options.valid_until_duration!r} is not a duration (24h, 1d12h, 30m)"
    if options.node_count != 1:
        yield f"node_count: {options.node_count}: a job runs on one slice; for several, use a kubernetes target (GKE)"
    reserved = [key for key in OWN_METADATA if key in options.metadata]
    if reserved and not options.keep:
        yield f"metadata: {reserved[0]} is set by accel, so that the slice deletes itself; use setup, or keep: true"
    if options.scopes and not options.keep and not any(scope.endswith(_DELETE_SCOPE) for scope in options.scopes):
        yield f"scopes: without {_DELETE_SCOPE} the slice cannot delete itself; add it, or set keep: true"
    count = hosts_of(options.accelerator_type, options.type, options.topology) or 1
    if options.data_disk and count > 1:
        yield f"data_disk: only slices of one host support disks, and this one has {count}"
    for disk in options.data_disk:
        if not _DISK.fullmatch(disk):
            yield f"data_disk: {disk!r} is not like source=projects/P/zones/Z/disks/D,mode=read-write"


def _job_problems(spec: JobSpec, options: TpuOptions) -> Iterator[str]:
    for key in ("zone",) if creates(options) else ("zone", "name"):
        if getattr(options, key) is None:
            alternative = " (or accelerator_type, for one that is created)" if key == "name" else ""
            yield f"no {key} of a slice: set it in accel.yaml, or --option {key}=…{alternative}"
    if creates(options) and options.version is None:
        yield "no runtime version: set version: in accel.yaml (gcloud compute tpus tpu-vm versions list --zone ZONE)"
    count = hosts_of(options.accelerator_type, options.type, options.topology)
    if count is not None and spec.nodes not in (1, count):
        yield f"--nodes {spec.nodes}: {options.accelerator_type or options.topology} has {count} hosts; leave it out"
    if spec.resources.gpus:
        yield f"--gpus {spec.resources.gpus}: a TPU has none; accelerator_type sets its chips"
    if options.runtime == "torch_xla" and not options.cpu and spec.entry == "command":
        yield "--no-python: torch_xla calls a function of a Python script; set runtime: torch_tpu, or cpu: true"
    python = (options.requirements_python or "").split(".")[:2]
    if options.runtime == "torch_tpu" and not options.cpu and python == ["3", "10"]:
        yield f"requirements_python: {options.requirements_python}: torch_tpu needs Python 3.11 or newer"
    if spec.resources.accelerator is not None:
        yield f"--accelerator {spec.resources.accelerator}: accelerator_type sets the slice's chips"
