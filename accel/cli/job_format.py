"""Jobs as JSON and as text. `list`, `status`, `wait`, `cancel` and `submit --follow --json` share the shape:

    {"id", "name", "target", "kind", "nodes", "created_at", "native_id",
     "state", "reason", "exit_code", "attempt", "message", "native_state", "observed_at", "warning"}

A sagemaker job also has
"details": {"secondary_status", "billable_seconds", "training_seconds", "spot_saving_percent"}.

Times are seconds since the epoch. `state` is submitting, queued, running, succeeded, failed or cancelled.
`warning` is why the state may be stale (its target could not be polled), else empty.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from schedulers.job import Status
    from schedulers.store.record import Record


def record_json(record: Record) -> dict[str, Any]:
    return {
        "id": record.id,
        "name": record.name,
        "target": record.target,
        "kind": record.kind,
        "nodes": record.nodes,
        "created_at": record.created_at,
        "native_id": record.native_id,
        **record.status.to_json(),
        "warning": record.warning,
    }


def outcome(job_id: str, status: Status) -> str:
    """Return `job 1a2b3c failed (exit code 3): ValueError: …`, in one line."""
    return f"job {job_id} {phrase(status)}"


def phrase(status: Status) -> str:
    """Return the state with its explanation: `failed (exit code 3): ValueError: …`."""
    why = []
    if status.state.value == "failed" and status.exit_code is not None:
        why.append(f"exit code {status.exit_code}")
    if status.reason.value not in ("none", "exit_code", "user"):
        why.append(status.reason.value.replace("_", " "))
    if status.attempt:
        why.append(f"attempt {status.attempt + 1}")
    details = f" ({', '.join(why)})" if why else ""
    message = "" if status.message == status.state.value else status.message  # cancelled: cancelled
    return f"{status.state.value}{details}" + (f": {message}" if message else "")
