"""Native ids of Slurm jobs: the number at Slurm and the id in the store, `123/06a…` or `123_4/06a…`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..errors import SpecError

_TEXT = re.compile(r"(?P<slurm>\d+(_\d+)?)/(?P<job>[A-Za-z0-9_-]+)\Z")


@dataclass(frozen=True)
class Native:
    slurm: str
    job_id: str

    def __str__(self) -> str:
        return f"{self.slurm}/{self.job_id}"

    def to_json(self) -> dict[str, str]:
        return {"job": self.job_id, "slurm": self.slurm}

    @classmethod
    def parse(cls, text: str) -> Native:
        """Parse the output of `str`. Raises SpecError."""
        match = _TEXT.match(text)
        if match is None:
            raise SpecError(f"{text!r} is not a native id of a slurm target (NUMBER/JOB)")
        return cls(match["slurm"], match["job"])
