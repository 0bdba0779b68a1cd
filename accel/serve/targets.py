"""The targets that a server offers, and what its users may do with each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel
from sqlalchemy import func, select

from schedulers.config.named_targets import ResolvedTarget, described_targets, resolve_target
from schedulers.errors import ConfigError, UnknownTarget, nearest
from schedulers.store import paths
from schedulers.target import BUILT_IN, kinds

from .auth import Viewer
from .context import Context
from .settings import Settings, TargetRules
from .tables import job

router = APIRouter(tags=["targets"])

_LOCAL = "local"


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


@dataclass(frozen=True, kw_only=True)
class Offer:
    """A target of this server. `is_shared`: its jobs do not run as the server on the server's own computer."""

    name: str
    kind: str
    rules: TargetRules
    is_shared: bool

    def resolve(self, settings: Settings, options: Mapping[str, Any]) -> ResolvedTarget:
        """Return the target with `options` over those in the user's `accel.yaml`. Raises ConfigError."""
        return resolve_target(self.name, Path(settings.home) / "jobs", start=paths.config_home(), overrides=options)


def offered_targets(settings: Settings) -> dict[str, Offer]:
    """Return the targets in `serve.yaml`; without any there, those in the user's `accel.yaml`, and `local`.

    Never reads a project's `accel.yaml`. Raises ConfigError for a target that does not exist.
    """
    described = described_targets(paths.config_home())
    names = list(settings.targets) or [*sorted(described), *({_LOCAL} - set(described))]
    offers = {}
    for name in names:
        if name not in described and name not in BUILT_IN and name not in kinds():  # asks all installed packages
            hint = nearest(name, [*described, *kinds()])
            raise UnknownTarget(f"serve.yaml: targets: no target {name!r}{hint}")
        target = described.get(name)
        kind, options = (name, {}) if target is None else (target.kind, target.options)
        is_here = kind == _LOCAL or (kind == "slurm" and not options.get("login"))
        rules = settings.targets.get(name, TargetRules())
        offers[name] = Offer(name=name, kind=kind, rules=rules, is_shared=not is_here)
    return offers


def check_sharing(settings: Settings) -> None:
    """Raise ConfigError unless every offered target may run the jobs of several users."""
    for offer in offered_targets(settings).values():
        if not offer.is_shared:
            raise ConfigError(
                f"a second user could read the server's database by a job on target {offer.name}, which runs as the "
                "server: list only other targets under `targets` in serve.yaml"
            )
        if offer.rules.run_as is None:
            raise ConfigError(
                f"jobs of all users would run as one on target {offer.name}: if that is meant, set `run_as: service` "
                f"for it under `targets` in serve.yaml"
            )
