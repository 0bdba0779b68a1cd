"""Exit codes of a rank that mean more than success or failure; everything that starts or watches ranks reads them here.

Imports nothing: launcher and schedulers read it too.
"""

from __future__ import annotations

REQUEUE = 85
"""The rank was warned of a preemption, has left a whole checkpoint, and is to be started again."""

TIME_LIMIT = 86
"""The launcher ended its ranks since the job's time limit had passed: another attempt is of no use."""
