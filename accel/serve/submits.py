"""Requests for jobs: each is checked against its target, and kept as a row that the submitter carries out."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Response
from fastapi import Path as InPath
from pydantic import BaseModel, Field
from sqlalchemy import insert
from sqlalchemy.exc import IntegrityError

from schedulers.config.named_targets import ResolvedTarget
from schedulers.errors import ConfigError, SpecError, nearest
from schedulers.hints import check_program
from schedulers.job import JobSpec
from schedulers.jobs.submit import admit, sized
from schedulers.printable import one_line
from schedulers.store import atomic_files
from schedulers.target import Plan, SupportsReview

from . import auth, code, jobs
from .auth import Caller, Submitter
from .context import Context, ServeContext
from .jobs import JobView, Row
from .problems import Problem, Strict
from .tables import job
from .targets import Offer, offered_targets

router = APIRouter(tags=["jobs"])

# The ids that clients make: eight characters of time, three random ones.
NewId = Annotated[str, InPath(pattern="^[0-9a-hjkmnp-tv-z]{11}$", description="an id that the client has made")]

_RESOLVED_HERE = ("env:", "file:")  # references that the client resolves, and sends the value of
_DEFAULTS = JobSpec(argv=("-",)).to_json() | {"argv": None}


class JobRequest(Strict):
    """A job to submit.

    spec:    `code` must not be set: the digest names it.
    digest:  sha256 of the code, which was sent before; only a dry run may lack it.
    secrets: the values of the secrets in `spec.secrets` that refer to the client's computer.
    """

    spec: JobSpec
    target: str
    project: str = Field("default", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")
    digest: Annotated[str, Field(pattern="^[0-9a-f]{64}$")] | None = None
    secrets: dict[str, str] = Field(default_factory=dict)


class Submitted(JobView):
    """A job that was accepted. `warnings`: of its plan."""

    warnings: list[str]


class DryRun(BaseModel):
    """The plan of a submit. `refusals`: why the request would be refused; then there is no plan."""

    plan: str | None
    warnings: list[str]
    refusals: list[str]


@router.put(
    "/jobs/{job_id}",
    status_code=201,
    response_model=Submitted | DryRun,
    responses={200: {"model": Submitted | DryRun, "description": "A dry run, or the same request again"}},
)
def put_job(
    job_id: NewId, body: JobRequest, caller: Submitter, context: Context, response: Response, dry_run: bool = False
) -> Submitted | DryRun:
    """Submit a job under an id that the client has made; the same request again changes nothing."""
    response.status_code = 200
    if dry_run:
        return _dry_run(context, caller, job_id, body)
    text = _text(body)
    sha256 = hashlib.sha256(text.encode()).hexdigest()
    before = jobs.find(context, job_id)
    if before is not None:
        return _submitted(before, caller, sha256)
    spec, resolved, plan = _check(context, caller, job_id, body)
    # Under a name of this request's own: another one with the same id may be just as far.
    secrets = jobs.secrets_of(context, f"{job_id}.{os.urandom(8).hex()}")
    try:
        _write_secrets(secrets, body)
        admit(resolved.target, [with_secret_files(spec, secrets)])
        row = _new_row(job_id, body, spec, resolved) | {"owner": caller.name, "request": text, "sha256": sha256}
        if _insert(context, caller, row, secrets):
            response.status_code = 201
            context.submits.set()
    finally:
        atomic_files.remove_tree(str(secrets))
    return _submitted(jobs.get(context, job_id), caller, sha256, plan.warnings)


def _submitted(row: Row, caller: Caller, sha256: str, warnings: Sequence[str] = ()) -> Submitted:
    """Return the answer for the job. Raises Problem with status 409 if another request has the id."""
    if (row["owner"], row["sha256"]) != (caller.name, sha256):
        raise Problem(409, f"there is another job with the id {row['id']}")
    return Submitted(**jobs.view(row).model_dump(), warnings=list(warnings))


def _check(
    context: ServeContext, caller: Caller, job_id: str, request: JobRequest
) -> tuple[JobSpec, ResolvedTarget, Plan]:
    """Check all of the request but what `admit` of the target does; change nothing.

    Returns the job with its code's directory here, and its secrets as they were given. Raises Problem, SpecError,
    ConfigError.
    """
    spec = request.spec
    if spec.code != ".":
        raise Problem(
            422, "spec.code must be '.': upload the code (PATCH /code/DIGEST) and send its digest", "body.spec.code"
        )
    workdir = os.path.normpath(spec.workdir)
    if os.path.isabs(workdir) or workdir.split(os.sep)[0] == os.pardir:
        raise Problem(422, f"workdir {spec.workdir} is not inside the code", "body.spec.workdir")
    for before in dict.fromkeys(spec.after):
        if jobs.find(context, before) is None:
            raise Problem(422, f"after: the server has no job {before!r}", "body.spec.after")
    offer = _offer(context, caller, request)
    spec = on_server(context, spec, request.digest, offer)
    resolved = offer.resolve(context.settings, spec.options)
    spec = sized(spec, resolved)
    plan = resolved.plan(spec, job_id)
    if request.digest is not None:
        if not code.is_complete(context, request.digest, caller.name):
            raise Problem(422, f"the code {request.digest} was not sent: PATCH /code/DIGEST", "body.digest")
        try:
            check_program(spec.entry, spec.argv[0], os.path.join(spec.code, spec.workdir))
        except SpecError as error:
            raise SpecError(str(error).replace(spec.code, "the code")) from None
    return spec, resolved, plan


def on_server(context: ServeContext, spec: JobSpec, digest: str | None, offer: Offer) -> JobSpec:
    """Return the job with the directory of its code here, which it must not run in: others run the same code."""
    options = spec.options if offer.is_shared else {**spec.options, "snapshot": True}
    return dataclasses.replace(spec, code=str(context.home / "code" / (digest or "-")), options=options)


def _dry_run(context: ServeContext, caller: Caller, job_id: str, request: JobRequest) -> DryRun:
    """Return the plan of a request, its warnings, and why the request would be refused; change nothing.

    Raises what the target raises if its backend cannot be reached to review the plan.
    """
    try:
        spec, resolved, plan = _check(context, caller, job_id, request)
        admit(resolved.target, [dataclasses.replace(spec, secrets={})])
    except (Problem, SpecError, ConfigError) as error:
        detail = error.detail if isinstance(error, Problem) else one_line(str(error))
        return DryRun(plan=None, warnings=[], refusals=[detail])
    refusals = resolved.target.review(plan) if isinstance(resolved.target, SupportsReview) else []
    return DryRun(plan=str(plan), warnings=list(plan.warnings), refusals=refusals)


def with_secret_files(spec: JobSpec, directory: Path) -> JobSpec:
    """Return the job with references to the server's files in place of those to the client's computer."""
    references = {
        name: f"file:{directory / name}" if reference.startswith(_RESOLVED_HERE) else reference
        for name, reference in spec.secrets.items()
    }
    return dataclasses.replace(spec, secrets=references)


def _text(request: JobRequest) -> str:
    """Return the request as ASCII text without values of secrets. Fields with default values are left out."""
    spec = {name: value for name, value in request.spec.to_json().items() if value != _DEFAULTS.get(name)}
    document = {"spec": spec, "target": request.target, "project": request.project, "digest": request.digest}
    try:
        return json.dumps(document, sort_keys=True, allow_nan=False)
    except ValueError:
        raise Problem(422, "NaN and infinite numbers are not allowed", "body") from None


def _offer(context: ServeContext, caller: Caller, request: JobRequest) -> Offer:
    offers = offered_targets(context.settings)
    offer = offers.get(request.target)
    if offer is None:
        hint = nearest(request.target, offers)
        raise Problem(422, f"no target {request.target!r}{hint} (targets: {', '.join(offers)})", "body.target")
    allowed = offer.rules.allow_options
    refused = sorted(set(request.spec.options) - set(allowed))
    if refused and not caller.may("owner"):
        lets = f"lets you set {', '.join(allowed)}" if allowed else "lets you set no options"
        raise Problem(422, f"--option {refused[0]}: target {request.target} {lets}", "body.spec.options", audited=True)
    return offer


def _write_secrets(directory: Path, request: JobRequest) -> None:
    needed = {name for name, reference in request.spec.secrets.items() if reference.startswith(_RESOLVED_HERE)}
    for name in sorted(needed ^ set(request.secrets)):
        reason = "send its value in `secrets`" if name in needed else "no secret of the job needs a value"
        raise Problem(422, f"secret {name}: {reason}", "body.secrets")
    try:
        for name in needed:
            directory.mkdir(mode=0o700, exist_ok=True)
            atomic_files.replace_file(str(directory / name), request.secrets[name].encode(errors="surrogateescape"))
    except OSError as error:
        raise atomic_files.store_error(error, str(directory), "write") from error


def _new_row(job_id: str, request: JobRequest, spec: JobSpec, resolved: ResolvedTarget) -> dict[str, Any]:
    now = time.time()
    return {
        "id": job_id, "project": request.project, "name": spec.name, "target": resolved.name, "kind": resolved.kind,
        "nodes": spec.nodes, "gpus": spec.nodes * spec.resources.gpus, "state": "submitting", "reason": "none",
        "attempt": 0, "message": "", "native_state": "", "warning": "", "created_at": now, "observed_at": now,
        "digest": request.digest, "changed_at": now,
    }  # fmt: skip


def _insert(context: ServeContext, caller: Caller, row: Mapping[str, Any], secrets: Path) -> bool:
    """Insert the row, and make `secrets` the job's directory. Return False if another request has taken the id."""
    job_id = row["id"]
    try:
        with context.database.write() as connection:
            connection.execute(insert(job).values(**row))
            auth.record(connection, caller, "submit", f"job {job_id} on {row['target']}")
            if secrets.exists():  # before the commit, after which the job may be submitted at any time
                jobs.delete_secrets(context, job_id)  # of a server that was killed just here
                secrets.rename(jobs.secrets_of(context, job_id))
    except IntegrityError:
        return False
    return True
