"""Extraction of tar archives from elsewhere, with any Python from 3.8 on."""

from __future__ import annotations

import os
import shutil
import tarfile

TYPE_CHECKING = False  # typing itself would take as long to import as all the rest
if TYPE_CHECKING:
    from collections.abc import Iterator

CHUNK = 1 << 20


def members(
    tar: tarfile.TarFile, max_bytes: int | None = None, max_files: int | None = None
) -> Iterator[tarfile.TarInfo]:
    """Yield the files, links and directories of an archive.

    Raises tarfile.ExtractError for a name that leads outside or is none, for a device, and beyond `max_files` members.
    With `max_bytes`, the size of the uncompressed archive, nothing is yielded that would write more than that.
    """
    remaining = max_bytes or 0
    for number, member in enumerate(tar):
        if number == max_files:
            raise tarfile.ExtractError(f"the archive holds more than {max_files:,} files")
        if member.name.startswith("/") or ".." in member.name.split("/") or "\0" in member.name + member.linkname:
            raise tarfile.ExtractError(f"{member.name!r} leads outside the directory")
        if not (member.isreg() or member.issym() or member.islnk() or member.isdir()):
            raise tarfile.ExtractError(f"{member.name!r} is neither a file, a link nor a directory")
        # Sparse files and hard links take less room in the archive than their contents.
        if max_bytes is not None and (member.issparse() or member.islnk()):
            raise tarfile.ExtractError(f"{member.name!r} would write more than the archive holds")
        remaining -= member.size
        if member.size < 0 or (max_bytes is not None and remaining < 0):
            raise tarfile.ReadError(f"{member.name!r} is larger than the archive")
        yield member


def extract(
    tar: tarfile.TarFile, top: str, *, modes: int = 0o755, max_bytes: int | None = None, max_files: int | None = None
) -> None:
    """Extract all members below `top`, a new directory, with the bits of `modes` of their permissions.

    Raises what `members` does, also for a link that leads outside. Python's own filters are not used: versions before
    3.8.17, 3.9.17, 3.10.12 and 3.11.4 have none (https://docs.python.org/3/library/tarfile.html#extraction-filters).
    """
    links = []
    for member in members(tar, max_bytes, max_files):
        path = os.path.join(top, member.name)
        if member.isdir():
            os.makedirs(path, exist_ok=True)
            os.chmod(path, member.mode & modes | 0o700)
            continue
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if member.issym():
            links.append((path, member.linkname))
        else:
            _write(tar, member, path, member.mode & modes)
    for path, target in links:  # last, so that no file is written through one
        if os.path.lexists(path):
            raise tarfile.ExtractError(f"{os.path.relpath(path, top)!r} is in the archive twice")
        os.symlink(target, path)
    real_top = os.path.join(os.path.realpath(top), "")
    for path, target in links:
        if os.path.isabs(target) or not os.path.join(os.path.realpath(path), "").startswith(real_top):
            raise tarfile.ExtractError(f"{os.path.relpath(path, top)!r} is a link that leads outside")


def _write(tar: tarfile.TarFile, member: tarfile.TarInfo, path: str, mode: int) -> None:
    try:
        content = tar.extractfile(member)
    except KeyError:
        raise tarfile.ExtractError(f"{member.name!r} is a link to a file that is not in the archive") from None
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(fd, "wb") as out:
            if content is not None:  # None: a hard link to a directory
                shutil.copyfileobj(content, out, CHUNK)
            os.fchmod(fd, mode)
        if member.mtime:
            os.utime(path, (member.mtime, member.mtime))
    except FileExistsError:
        raise tarfile.ExtractError(f"{member.name!r} is in the archive twice") from None
    except OSError as error:
        error.filename = error.filename or path  # writes do not name their file
        raise
