"""The launcher's report in its container's termination message, from which `accel status` reads the failure.

A program can write to that file too. So the launcher overwrites it at its end, when no process of the program is left.
It also writes before it starts ranks: the kubelet shows the end of the log only in place of an empty file.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

SCHEMA = 1
_PATH = "/dev/termination-log"
# In characters. A pod's containers share 12 KiB; the kubelet cuts off what exceeds a container's share.
_MAX_MESSAGE = 400


@dataclass(kw_only=True)
class TerminationReport:
    """The report of the outermost launcher in a pod.

    pod:     the pod's uid; empty outside of a pod and in a nested launcher, which write nothing.
    outcome: the failure's fields (`Failure.summary`), or only a message; empty until the end and after success.
    """

    pod: str = ""
    outcome: dict[str, Any] = field(default_factory=dict)

    @contextlib.contextmanager
    def written(self) -> Iterator[None]:
        """Write the report now, and again after the block."""
        self._write()
        try:
            yield
        except Exception as error:
            self.record({"message": str(error) or type(error).__name__})
            raise
        finally:
            self._write()

    def record(self, outcome: dict[str, Any]) -> None:
        """Write the outcome at once: the launcher may be killed before its end."""
        self.outcome = outcome
        self._write()

    def _write(self) -> None:
        if not self.pod:
            return
        fields = {"schema": SCHEMA, "pod": self.pod, **self.outcome}
        if "message" in fields:
            fields["message"] = fields["message"][:_MAX_MESSAGE]
        text = json.dumps(fields, ensure_ascii=False)
        with contextlib.suppress(OSError):
            descriptor = os.open(os.environ.get("ACCEL_TERMINATION_LOG", _PATH), os.O_WRONLY | os.O_TRUNC)
            try:
                os.write(descriptor, text.encode(errors="replace"))
            finally:
                os.close(descriptor)
