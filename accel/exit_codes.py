"""Exit codes of a rank with a meaning beyond success or failure, for all that start or watch ranks.

Imports nothing, because the launcher and the schedulers use it too.
"""

from __future__ import annotations

REQUEUE = 85
"""The rank was warned of a preemption, has written a complete checkpoint, and should be restarted."""

TIME_LIMIT = 86
"""The launcher ended its ranks because the job's time limit had passed. A restart would not help."""
