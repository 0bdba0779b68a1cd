"""Native ids of Kubernetes jobs, `pytorchjob/NAMESPACE/OBJECT/JOB/UID`: the object, and accel's job id."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import SpecError
from . import names
from .manifests.workloads import BUILDERS


@dataclass(frozen=True)
class Native:
    """A job's native id. `uid`: the object's; empty if unknown, as in records of earlier versions."""

    workload: str
    namespace: str
    name: str
    job_id: str
    uid: str = ""

    def __str__(self) -> str:
        return "/".join((self.workload, self.namespace, self.name, self.job_id, *((self.uid,) if self.uid else ())))

    @classmethod
    def of(cls, workload: str, metadata: Mapping[str, Any], job_id: str) -> Native:
        """Return the native id of a job whose object has this metadata."""
        return cls(workload, str(metadata["namespace"]), str(metadata["name"]), job_id, str(metadata.get("uid") or ""))

    def owns(self, live: Mapping[str, Any]) -> bool:
        """Return True if the object is the job's, and not a later one of the same name."""
        return self.uid in ("", live["metadata"].get("uid"))

    @property
    def api_version(self) -> str:
        return BUILDERS[self.workload].api_version

    @property
    def kind(self) -> str:
        return BUILDERS[self.workload].kind

    @property
    def plural(self) -> str:
        return BUILDERS[self.workload].plural

    @property
    def selector(self) -> str:
        """The label selector of the job's objects."""
        return names.selector(self.job_id)

    @classmethod
    def parse(cls, text: str) -> Native:
        """Parse the output of `str`. Raises SpecError."""
        parts = text.split("/")
        if len(parts) not in (4, 5) or not all(parts) or parts[0] not in BUILDERS or not names.is_label(parts[1]):
            raise SpecError(f"{text!r} is not the id of a job of a kubernetes target (workload/namespace/name/job/uid)")
        return cls(*parts)
