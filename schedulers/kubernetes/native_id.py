"""The id of a job of a kubernetes target: `pytorchjob/NAMESPACE/OBJECT/JOB`, its object and its id in the store."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import SpecError
from . import names
from .manifests.build import BUILDERS


@dataclass(frozen=True)
class Native:
    workload: str
    namespace: str
    name: str
    job_id: str

    def __str__(self) -> str:
        return f"{self.workload}/{self.namespace}/{self.name}/{self.job_id}"

    @property
    def api_version(self) -> str:
        return BUILDERS[self.workload].API_VERSION

    @property
    def kind(self) -> str:
        return BUILDERS[self.workload].KIND

    @property
    def plural(self) -> str:
        return BUILDERS[self.workload].PLURAL

    @property
    def selector(self) -> str:
        """Finds everything that belongs to the job."""
        return names.selector(self.job_id)

    @classmethod
    def parse(cls, text: str) -> Native:
        """What `str` gave. Raises SpecError."""
        words = text.split("/")
        if len(words) != 4 or not all(words) or words[0] not in BUILDERS or not names.is_label(words[1]):
            raise SpecError(f"{text!r} is not the id of a job of a kubernetes target (workload/namespace/name/job)")
        return cls(*words)
