"""Atomic writing of files: each is complete, or left as it was."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence

from .argv import UsageError


def write(command: str, files: Sequence[tuple[str, str]]) -> None:
    """Write each text to its path, following links and keeping the mode of the file that it replaces.

    All files are written to temporary files before the first is replaced. Raises UsageError.
    """
    drafts: list[tuple[str, str, str]] = []
    try:
        for path, text in files:
            with _usage_errors(command, path):
                target = os.path.realpath(path)
                draft = os.path.join(os.path.dirname(target), f".{os.path.basename(target)}.{os.getpid()}")
                drafts.append((path, target, draft))
                _write(draft, text, target)
        for path, target, draft in drafts:
            with _usage_errors(command, path):
                os.replace(draft, target)
    finally:
        for _, _, draft in drafts:
            with contextlib.suppress(OSError):
                os.unlink(draft)


@contextlib.contextmanager
def _usage_errors(command: str, path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(command, f"cannot write {path}: {error.strerror}") from None


def _write(draft: str, text: str, target: str) -> None:
    with contextlib.suppress(FileExistsError):
        os.makedirs(os.path.dirname(target))
    mode = os.stat(target).st_mode & 0o7777 if os.path.exists(target) else None
    # The draft of a file that few may read is never readable by more.
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666 if mode is None else 0o600)
    with open(descriptor, "w", encoding="utf-8") as file:
        if mode is not None:
            os.fchmod(descriptor, mode)
        file.write(text)
