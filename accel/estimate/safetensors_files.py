"""Models known only from their safetensors files, whose headers have each tensor's name, type and shape."""

from __future__ import annotations

import json
import math
import os
from typing import Any

import torch
from torch import nn

from accel.checkpoint.tensors import TYPES
from accel.estimate.model_source import NotFound, Subject

_MAX_HEADER = 100_000_000  # as the format's own reader has it
_BY_NAME = {name: kind for kind, name in TYPES.items()}


def of_file(path: str) -> Subject:
    """Return the model of a safetensors file, or of the index of several. Raises `NotFound` if it is neither."""
    if not path.endswith(".index.json"):
        return _of_tensors(path, read_header(path))
    try:
        with open(path, "rb") as file:
            names = sorted(set(json.load(file)["weight_map"].values()))
    except OSError as error:
        raise NotFound(f"{path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise NotFound(f"{path} is no index of safetensors files") from None
    return _of_files(path, [os.path.join(os.path.dirname(path), os.path.basename(str(name))) for name in names])


def of_directory(path: str) -> Subject:
    """Return the model of all safetensors files in a directory. Raises `NotFound` if there are none."""
    names = sorted(name for name in os.listdir(path) if name.endswith(".safetensors"))
    if not names:
        raise NotFound(f"{path} has neither a config.json nor a safetensors file")
    return _of_files(path, [os.path.join(path, name) for name in names])


def _of_files(name: str, paths: list[str]) -> Subject:
    tensors: dict[str, tuple[torch.dtype, list[int]]] = {}
    for path in paths:
        tensors |= read_header(path)
    return _of_tensors(name, tensors)


def read_header(path: str) -> dict[str, tuple[torch.dtype, list[int]]]:
    """Return type and shape of each tensor. Raises `NotFound`."""
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            left = os.fstat(file.fileno()).st_size - 8
            header: dict[str, Any] = json.loads(file.read(length)) if 0 < length <= min(left, _MAX_HEADER) else {}
            entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
            found = {name: (_BY_NAME[entry["dtype"]], [*entry["shape"]]) for name, entry in entries.items()}
            whole = sum(kind.itemsize * math.prod(shape) for kind, shape in found.values()) == left - length
    except OSError as error:
        raise NotFound(f"{path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        whole = False
    if not whole:
        raise NotFound(f"{path} is not a safetensors file, or it is damaged")
    return found


def _of_tensors(name: str, tensors: dict[str, tuple[torch.dtype, list[int]]]) -> Subject:
    def make() -> nn.Module:
        root = nn.Module()
        for key, (kind, shape) in tensors.items():
            *path, last = key.split(".")
            place = root
            for part in path:
                if part not in place._modules:
                    place.add_module(part, nn.Module())
                place = place.get_submodule(part)
            held = torch.empty(shape, dtype=kind, device="meta")
            if kind.is_floating_point or kind.is_complex:
                place.register_parameter(last, nn.Parameter(held))
            else:
                place.register_buffer(last, held)
        return root

    return Subject(name=name, library="safetensors", make=make, inputs=None)
