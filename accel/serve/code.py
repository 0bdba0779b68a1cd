"""Code of jobs: uploads in pieces, which become snapshots once their digest is verified."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Body, Header
from fastapi import Path as InPath
from sqlalchemy import delete, insert, select
from starlette.responses import Response

from schedulers.errors import SnapshotError
from schedulers.store import atomic_files
from schedulers.store.snapshot import prune_snapshots, unpack

from .auth import Submitter
from .context import Context, ServeContext
from .problems import Problem
from .settings import size_text
from .tables import code, job

router = APIRouter(tags=["code"])

_ABANDONED_S = 86_400.0  # after which an upload that was not continued is deleted

Digest = Annotated[str, InPath(pattern="^[0-9a-f]{64}$", description="sha256 of the tree, as `accel` computes it")]


@router.head("/code/{digest}", response_class=Response)
def show_code(digest: Digest, caller: Submitter, context: Context) -> Response:
    """Answer how much of this code the server has from the caller: `Accel-Complete`, `Accel-Offset`; 404 for none."""
    if is_complete(context, digest, caller.name):
        return Response(headers={"Accel-Complete": "true"})
    offset = _received(_upload(context, digest, caller.name))
    if not offset:
        raise Problem(404, f"code {digest} not found")
    return Response(headers={"Accel-Complete": "false", "Accel-Offset": str(offset)})


@router.patch(
    "/code/{digest}",
    status_code=202,
    response_class=Response,
    responses={201: {"description": "The code is complete"}},
)
def add_piece(
    digest: Digest,
    caller: Submitter,
    context: Context,
    accel_offset: Annotated[int, Header(ge=0, le=2**53)],
    accel_size: Annotated[int, Header(ge=1, le=2**53)],
    piece: Annotated[bytes, Body(media_type="application/octet-stream")],
) -> Response:
    """Append the body, a piece of a snapshot's tar file, at `Accel-Offset`; `Accel-Size` is the size of the whole file.

    The last piece is answered with status 201, others with 202. An upload without that digest is deleted.
    """
    if is_complete(context, digest, caller.name):
        return Response(status_code=201)
    if accel_size > (limit := int(context.settings.max_code)):
        raise Problem(413, f"the code has {size_text(accel_size)}, at most {size_text(limit)} are allowed")
    path = _upload(context, digest, caller.name)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with atomic_files.exclusive_lock(f"{path}.lock"):
            has = _received(path)
            if accel_offset != has or has + len(piece) > accel_size:
                raise Problem(409, f"the upload continues at byte {has:,} of {accel_size:,}", "header.Accel-Offset")
            with open(path, "ab") as file:
                file.write(piece)
            if has + len(piece) < accel_size:
                return Response(status_code=202)
            _accept(context, digest, caller.name, path)
    except OSError as error:
        raise atomic_files.store_error(error, str(path), "write") from error
    return Response(status_code=201)


def is_complete(context: ServeContext, digest: str, owner: str) -> bool:
    """Return True if this user has sent the code, and the server still has it."""
    query = select(code.c.digest).where(code.c.digest == digest, code.c.owner == owner)
    return bool(context.database.rows(query)) and _snapshot(context, digest).exists()


def delete_abandoned(context: ServeContext) -> None:
    """Delete uploads that nobody has continued for a day."""
    for path in (context.home / "uploads").glob("*/*"):
        _delete_old(path)


def delete_unused(context: ServeContext) -> None:
    """Delete code that no job has, and that nobody has sent for a day."""
    in_use = select(job.c.digest).where(job.c.digest.is_not(None))
    old = delete(code).where(code.c.digest.not_in(in_use), code.c.sent_at < time.time() - _ABANDONED_S)
    with context.database.write() as connection:
        connection.execute(old)
        known = set(connection.execute(select(code.c.digest)).scalars())
        for path in (context.home / "code").iterdir():
            if path.name.removeprefix(".").removesuffix(".snapshot") not in known:
                _delete_old(path)
    prune_snapshots(context.home, context.store.records())


def _delete_old(path: Path) -> None:
    if path.stat().st_mtime < time.time() - _ABANDONED_S:
        atomic_files.remove_tree(str(path)) if path.is_dir() else path.unlink(missing_ok=True)


def _accept(context: ServeContext, digest: str, owner: str, upload: Path) -> None:
    """Verify the upload, which is always unpacked: a digest alone gives nobody the code of others."""
    tree = upload.with_suffix("")
    try:
        unpack(upload, tree, max_files=context.settings.max_files)
    except SnapshotError as error:
        upload.unlink()
        raise Problem(422, f"the code is not accepted: {error}".replace(str(upload), digest)) from None
    size = upload.stat().st_size
    marker, destination = tree.with_name(f".{digest}.snapshot"), context.home / "code" / digest
    if destination.exists():
        atomic_files.remove_tree(str(tree))
        marker.unlink()
    else:
        marker.replace(destination.with_name(marker.name))
        tree.replace(destination)
    upload.replace(_snapshot(context, digest))
    row = {"digest": digest, "owner": owner, "size": size, "sent_at": time.time()}
    with context.database.write() as connection:
        connection.execute(delete(code).where(code.c.digest == digest, code.c.owner == owner))
        connection.execute(insert(code).values(row))


def _received(upload: Path) -> int:
    """Return the number of bytes that the server has of an upload."""
    return upload.stat().st_size if upload.exists() else 0


def _snapshot(context: ServeContext, digest: str) -> Path:
    return context.home / "snapshots" / f"{digest}.tar"


def _upload(context: ServeContext, digest: str, owner: str) -> Path:
    return context.home / "uploads" / hashlib.sha256(owner.encode()).hexdigest()[:16] / f"{digest}.tar"
