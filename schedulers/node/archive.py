"""Extraction of tar archives from elsewhere, with any Python from 3.8 on."""

from __future__ import annotations

import os
import tarfile


def extract(tar: tarfile.TarFile, top: str) -> None:
    """Extract all members below the directory `top`.

    Raises tarfile.TarError for a path or a link that leads outside, and for a device. Python before 3.8.17, 3.9.17,
    3.10.12 and 3.11.4 has no filter for them (https://docs.python.org/3/library/tarfile.html#extraction-filters).
    """
    if hasattr(tarfile, "data_filter"):
        tar.extractall(top, filter="data")
        return
    top = os.path.realpath(top)
    for member in tar:
        path = os.path.join(top, member.name)
        paths = [path]  # followed to its end: a link that was extracted before may be part of it
        if member.issym():
            paths.append(os.path.join(os.path.dirname(path), member.linkname))
        elif member.islnk():
            paths.append(os.path.join(top, member.linkname))
        elif not (member.isreg() or member.isdir()):
            raise tarfile.ExtractError(f"{member.name!r} is neither a file, a link nor a directory")
        if os.path.isabs(member.name) or not all(_is_below(top, other) for other in paths):
            raise tarfile.ExtractError(f"{member.name!r} leads outside the directory")
        member.mode = 0o755 if member.isdir() else (member.mode & 0o755) | 0o600
        member.uid, member.gid, member.uname, member.gname = os.getuid(), os.getgid(), "", ""
        tar.extract(member, top)


def _is_below(top: str, path: str) -> bool:
    path = os.path.realpath(path)
    return path == top or path.startswith(os.path.join(top, ""))
