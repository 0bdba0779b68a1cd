"""Files of objects, written by `torch.save` and only ever read with ``weights_only=True``.

So no file of a checkpoint can run code. See `accel.checkpoint.tensors` for files of tensors.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from accel.checkpoint.durable import Digest, write_durably
from accel.errors import CheckpointError


def write_bytes(path: Path, data: bytes) -> Digest:
    """Write ``data`` to a new file and flush it to the disk."""
    return write_durably(path, lambda file: file.write(data))


def write_object(path: Path, value: Any) -> Digest:
    """Write ``value``, of any type, with `torch.save`."""
    return write_durably(path, lambda file: torch.save(value, file))  # type: ignore[arg-type]


def write_safe_object(path: Path, value: Any) -> Digest:
    """Write ``value`` so that `read_object` can read it.

    Raises `CheckpointError` for a type that `read_object` would refuse, while the script can still change it.
    """
    digest = write_object(path, value)
    refused = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    if refused:
        raise CheckpointError(
            f"{path.name} would hold {', '.join(sorted(set(refused)))}, which cannot be loaded safely: "
            "keep tensors, numbers, strings, lists, tuples and dicts in a state_dict"
        )
    return digest


def read_object(path: Path, *, mapped: bool = False, allowed: Iterable[Any] = (), **options: Any) -> Any:
    """Read a file by `torch.save`, its tensors on the CPU.

    ``mapped``: memory-map the tensors of a file in torch's present format; see `accel.checkpoint.tensors.let_go`.
    ``allowed``: types that may be in the file besides torch's defaults.
    ``options``: further options of `torch.load`.

    Raises `CheckpointError` for a file that is missing, damaged, or holds other types.
    """
    try:
        with torch.serialization.safe_globals(list(allowed)):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped or None, **options)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing") from error
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError) as error:
        if mapped and not _is_archive(path):
            return read_object(path, allowed=allowed, **options)
        raise CheckpointError(f"{path} cannot be loaded: {str(error).splitlines()[0]}") from error


def _is_archive(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"PK\x03\x04"


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a draft path next to ``path``, and rename it to ``path`` when the block ends.

    If the block fails the draft is deleted.
    """
    draft = path.with_name(f".{path.name}.draft")
    draft.unlink(missing_ok=True)
    try:
        yield draft
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
