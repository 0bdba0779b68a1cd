"""Native ids of SageMaker jobs: `REGION/TRAINING JOB/JOB/CREATED`, the last in seconds since the epoch."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import SpecError


@dataclass(frozen=True, kw_only=True)
class Native:
    region: str
    name: str
    job_id: str
    created_at: int

    def __str__(self) -> str:
        return f"{self.region}/{self.name}/{self.job_id}/{self.created_at}"

    @classmethod
    def parse(cls, text: str) -> Native:
        """Parse the output of `str`. Raises SpecError."""
        words = text.split("/")
        if len(words) != 4 or not all(words) or not words[3].isdecimal():
            raise SpecError(f"{text!r} is not the id of a job of a sagemaker target (region/name/job/created)")
        return cls(region=words[0], name=words[1], job_id=words[2], created_at=int(words[3]))
