"""A model, an optimizer, a script's own object and a dataset, small enough to be saved and read often."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from accel import Accelerator
from accel.checkpoint.durable import digest_of
from accel.checkpoint.file_names import MANIFEST
from accel.checkpoint.manifest import SCHEMA, _manifest_checksum, read_manifest, write_manifest


class Numbers(Dataset[int]):
    """The numbers below ``size``; knows what was read."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        self.read.append(index)
        return index


class Tally:
    """A script's own object."""

    def __init__(self, value: Any = 0) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def simple(**how: Any) -> tuple[Accelerator, Any, Any, Tally]:
    accelerator = Accelerator(**how)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    tally = Tally()
    accelerator.register_for_checkpointing(tally)
    return accelerator, model, optimizer, tally


def renew_manifest(folder: Path, schema: int = SCHEMA) -> None:
    """Have the manifest list the files that are there now."""
    manifest = read_manifest(folder)
    assert manifest is not None
    (folder / MANIFEST).unlink()
    names = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
    write_manifest(folder, replace(manifest, files={name: digest_of(folder / name) for name in names}))
    if schema == 2:
        document = json.loads((folder / MANIFEST).read_bytes())
        del document["models"], document["optimizers"]
        document["schema"] = schema
        document["manifest_crc32"] = _manifest_checksum(document)
        (folder / MANIFEST).write_text(json.dumps(document))


def fill(model: nn.Module, value: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)


def save_twice(directory: str) -> None:
    """Save values of 1, then of 2, in the same place, and put a file of the script's own there."""
    accelerator, model, _, tally = simple()
    for value in (1.0, 2.0):
        fill(model, value)
        tally.value = value
        accelerator.save_state(directory)
        (Path(directory) / "notes.txt").write_text("the script's own")


def value_of(model: nn.Module) -> float:
    """The one value that all parameters have."""
    (value,) = {value for parameter in model.parameters() for value in parameter.flatten().tolist()}
    return float(value)
