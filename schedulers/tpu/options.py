"""What may be said of a tpu target, and what it means before anybody is asked."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ..errors import SpecError
from ..hosts.jobs import options as common
from ..hosts.jobs.options import HostOptions
from ..job import JobSpec

_NAME = re.compile(r"[a-z](?:[-a-z0-9]{0,61}[a-z0-9])?")
_ZONE = re.compile(r"[a-z]+-[a-z]+\d+-[a-z]")
_PROJECT = re.compile(r"(?:[a-z0-9.-]+:)?[a-z][-a-z0-9]*[a-z0-9]")


@dataclass(frozen=True, kw_only=True)
class TpuOptions(HostOptions):
    """What `accel.yaml` may say of a tpu target, beside `HostOptions`. The names are gcloud's flags.

    project:      the Google Cloud project; without it, CLOUDSDK_CORE_PROJECT, or that of the credentials.
    zone:         where the slice is, as us-central2-b.
    name:         the slice: a TPU VM that is there and READY.
    internal_ips: reach its workers by their internal addresses.
    transport:    `ssh`: with the keys of ~/.ssh, and the host keys that Google's API tells. `gcloud`: as
                  `gcloud compute tpus tpu-vm ssh` does it, with OS Login and its own keys.
    concurrency:  how many jobs may run at once on the slice, whose chips belong to one job at a time.
    """

    project: str | None = None
    zone: str | None = None
    name: str | None = None
    internal_ips: bool = False
    transport: Literal["ssh", "gcloud"] = "ssh"
    concurrency: int | None = 1


def check(options: TpuOptions, name: str) -> None:
    """Raises SpecError, naming the key, for what cannot be meant."""
    where = f"target {name}"
    for key, form in (("zone", _ZONE), ("name", _NAME), ("project", _PROJECT)):
        value = getattr(options, key)
        if value is not None and not form.fullmatch(value):
            raise SpecError(f"{where}: {key}: {value!r} is no {key} that Google Cloud gives")
    if options.spares:
        raise SpecError(f"{where}: spares: a job runs on all hosts of its slice: leave it out")
    common.check(options, name)


def check_job(spec: JobSpec, options: TpuOptions, name: str) -> None:
    """Raises SpecError for a job that a slice cannot run as it is described."""
    for problem in _problems(spec, options):
        raise SpecError(f"target {name}: {problem}")


def _problems(spec: JobSpec, options: TpuOptions) -> Iterator[str]:
    for key in ("zone", "name"):
        if getattr(options, key) is None:
            yield f"which slice? say {key}: in accel.yaml, or --option {key}=…"
    if spec.resources.gpus:
        yield f"--gpus {spec.resources.gpus}: a TPU has none; its accelerator_type says which chips there are"
    if spec.resources.accelerator is not None:
        yield f"--accelerator {spec.resources.accelerator}: the slice's accelerator_type says which chips there are"
