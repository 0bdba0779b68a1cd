"""The endpoint for targets."""

from __future__ import annotations

from fastapi import APIRouter
from pydantic import BaseModel
from sqlalchemy import func, select

from ..auth import Viewer
from ..tables import job
from ..targets import offered_targets
from .people import Context

router = APIRouter(tags=["targets"])


class TargetInfo(BaseModel):
    """A target.

    options:     those that the caller may set; None: every option of its kind.
    answered_at: when it last told the status of a job; None before.
    """

    name: str
    kind: str
    run_as: str | None
    options: list[str] | None
    answered_at: float | None


@router.get("/targets")
def list_targets(caller: Viewer, context: Context) -> list[TargetInfo]:
    """Return the targets of the server."""
    answers = select(job.c.target, func.max(job.c.observed_at).label("at")).where(job.c.native_id.is_not(None))
    answered_at = {row["target"]: row["at"] for row in context.database.rows(answers.group_by(job.c.target))}
    return [
        TargetInfo(
            name=offer.name,
            kind=offer.kind,
            run_as=offer.rules.run_as,
            options=None if caller.may("owner") else sorted(offer.rules.allow_options),
            answered_at=answered_at.get(offer.name),
        )
        for _, offer in sorted(offered_targets(context.settings).items())
    ]
