"""A program that writes and deletes files on its host.

It reads one line of JSON:

    {"root": "~/.accel", "do": [{"op": "put", "path": "a", "size": 3, "mode": 384}, …]}

Contents follow the line as raw bytes, in the order of the operations; a blob's only after the reply
`{"need": true}`. The last line that it prints is `{"done": […]}` or `{"error": "…"}`.
"""

from __future__ import annotations

import os
import signal
import sys
import time

from .program import InvalidRequest, answer, check_free_space, partial_path, sync_directory, write_all, write_reply

# hashlib, shutil and tarfile, which take long to load, are imported where they are needed.

TYPE_CHECKING = False  # typing itself would take as long to import as all the rest
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    Step = dict[str, Any]

CHUNK = 1 << 20
STALL_S = 120  # then the process of a client that was cut off ends
STALE_S = 86400


def main() -> None:
    signal.signal(signal.SIGALRM, on_stall)
    os.umask(0o077)
    write_reply(answer(respond))


def respond(root: str, request: dict[str, Any]) -> dict[str, Any]:
    os.makedirs(root, mode=0o700, exist_ok=True)
    return {"done": [OPERATIONS[step["op"]](root, step) for step in request["do"]]}


def on_stall(*_: object) -> None:
    raise InvalidRequest(f"no data for {STALL_S} s")


def path_below(root: str, path: str) -> str:
    """Return a path below the root. Raises InvalidRequest for one outside it."""
    parts = path.split("/")
    if not path or path.startswith("/") or ".." in parts or "." in parts or not all(parts):
        raise InvalidRequest(f"{path!r} is not a path inside {root}")
    return os.path.join(root, *parts)


def receive(size: int) -> Iterator[bytes]:
    remaining = size
    while remaining:
        signal.alarm(STALL_S)
        data = sys.stdin.buffer.read1(min(CHUNK, remaining))  # type: ignore[union-attr]  # standard input has it
        signal.alarm(0)
        if not data:
            raise InvalidRequest(f"the transfer broke off, {size - remaining} of {size} bytes in")
        remaining -= len(data)
        yield data


def write_atomically(path: str, size: int, mode: int, digest: str | None = None) -> None:
    """Write a file: with all of its content and on disk, or not at all."""
    parent, temporary = os.path.dirname(path), partial_path(path)
    os.makedirs(parent, mode=0o700, exist_ok=True)
    hashed = None
    if digest is not None:
        import hashlib

        hashed = hashlib.sha256()
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(fd, "wb", buffering=0) as file:
            for data in receive(size):
                if hashed is not None:
                    hashed.update(data)
                write_all(file.fileno(), data, path)
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        if hashed is not None and hashed.hexdigest() != digest:
            raise InvalidRequest(f"{path} arrived damaged")
        os.replace(temporary, path)
        sync_directory(parent)
    except BaseException:
        if os.path.lexists(temporary):
            os.unlink(temporary)
        raise


def put(root: str, step: Step) -> bool:
    path = path_below(root, step["path"])
    check_free_space(root, step["size"], path)
    write_atomically(path, step["size"], step["mode"])
    return True


def blob_path(root: str, digest: str) -> str:
    return path_below(root, f"blobs/{digest}")


def blob(root: str, step: Step) -> bool:
    """Store a blob under its digest; request it only if it is missing. Return True if it was sent."""
    path = blob_path(root, step["digest"])
    if os.path.exists(path):
        os.utime(path)  # its last use, for the removal of old ones
        write_reply({"need": False})
        return False
    sweep(os.path.dirname(path), step.get("unused_s"))
    check_free_space(root, step["size"], path)
    write_reply({"need": True})
    write_atomically(path, step["size"], 0o600, step["digest"])
    return True


def sweep(directory: str, unused_s: float | None) -> None:
    """Delete what killed transfers left behind, and blobs not used for `unused_s` seconds.

    Jobs have copies of their own, so only the time of the last use counts.
    """
    if not os.path.isdir(directory):
        return
    for entry in os.scandir(directory):
        max_age_s = STALE_S if entry.name.endswith(".part") else unused_s
        if max_age_s is None or entry.is_dir(follow_symlinks=False):
            continue
        try:
            if time.time() - entry.stat(follow_symlinks=False).st_mtime > max_age_s:
                os.unlink(entry.path)
        except FileNotFoundError:  # another process was quicker
            continue


def unpack(root: str, step: Step) -> bool:
    """Unpack a tar blob to a directory, which appears only complete. Return False if it was there."""
    import shutil

    digest, destination = step["digest"], path_below(root, step["path"])
    parent, name = os.path.split(destination)
    marker = os.path.join(parent, f".{name}.digest")
    if os.path.lexists(destination):
        if os.path.exists(marker) and open(marker).read() == digest:  # noqa: SIM115  # ends with the program
            return False
        raise InvalidRequest(f"{destination} exists with other content")
    source = blob_path(root, digest)
    check_digest(source, digest)
    check_free_space(root, os.path.getsize(source), destination)
    temporary = partial_path(destination)
    try:
        os.makedirs(temporary, mode=0o700)
        extract(source, temporary)
        with open(temporary + ".digest", "w") as file:
            file.write(digest)
        os.replace(temporary + ".digest", marker)
        finish(temporary, destination, marker, digest)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        if os.path.lexists(temporary + ".digest"):
            os.unlink(temporary + ".digest")
        raise
    return True


def finish(temporary: str, destination: str, marker: str, digest: str) -> None:
    import shutil

    try:
        os.rename(temporary, destination)
    except OSError:
        # Another process was quicker, perhaps with the same content.
        if not (os.path.isdir(destination) and open(marker).read() == digest):  # noqa: SIM115
            raise
        shutil.rmtree(temporary, ignore_errors=True)
    sync_directory(os.path.dirname(destination))


def check_digest(path: str, digest: str) -> None:
    import hashlib

    hashed = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            for data in iter(lambda: file.read(CHUNK), b""):
                hashed.update(data)
    except FileNotFoundError:
        raise InvalidRequest(f"blob {digest} does not exist") from None
    if hashed.hexdigest() != digest:
        os.unlink(path)
        raise InvalidRequest(f"{path} was damaged on this disk and is removed: send it again")


def extract(source: str, top: str) -> None:
    import tarfile

    from .archive import extract as extract_members

    try:
        with tarfile.open(source, "r:", encoding="utf-8", errors="surrogateescape") as tar:
            extract_members(tar, top, modes=0o777, max_bytes=os.path.getsize(source))
    except tarfile.TarError as error:
        raise InvalidRequest(f"{source}: {error}") from None


def remove(root: str, step: Step) -> bool:
    """Delete a file, or a directory with its contents. Return True if it existed."""
    path = path_below(root, step["path"])
    if not os.path.lexists(path):
        return False
    if os.path.isdir(path) and not os.path.islink(path):
        import shutil

        shutil.rmtree(path)
    else:
        os.unlink(path)
    return True


OPERATIONS = {"put": put, "blob": blob, "unpack": unpack, "remove": remove}
