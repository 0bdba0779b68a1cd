"""Modules that the fork server imports besides torch, so that the ranks need not import them."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
from pathlib import Path

from . import alias_env
from .worker import Program

# The first optimizer that a process makes imports torch._dynamo: 1.4 s, once here instead of once a rank. A program
# that makes none should not wait for it; so its text is asked, and being wrong costs only time.
_TRAINS = re.compile(rb"\boptim\b|\bAdamW?\b|\bSGD\b|accelerat|transformers|lightning|\baccel\b|torch\.compile")
_MIRRORED = re.compile(rb"^\s*(?:from|import)\s+(?:accelerate|transformers|peft|trl)\b", re.MULTILINE)
_OURS = re.compile(rb"^\s*(?:from|import)\s+accel\b", re.MULTILINE)


def modules_for(program: Program) -> list[str]:
    """Return the names of the modules that the program will probably import."""
    text = _text(program)
    names = ["torch._dynamo"] if _TRAINS.search(text) else []
    # Under `accel.compat` ours is what stands behind their names.
    ours = _OURS.search(text) or (alias_env.is_asked(os.environ) and _MIRRORED.search(text))
    return [*names, "accel.accelerator", "safetensors.torch"] if ours else names


def preload(program: Program) -> None:
    """Import the program's likely modules, ignoring missing ones, which are the program's concern."""
    for name in modules_for(program):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def _text(program: Program) -> bytes:
    path = program.argv[0]
    if program.entry == "module":
        # Beside the caller, where `python -m` looks first. An installed module is not read: finding it would import
        # its parents, which are the program's own.
        parts = program.argv[0].split(".")
        found = [Path(*parts).with_suffix(".py"), Path(*parts, "__main__.py")]
        path = next((str(file) for file in found if file.is_file()), "")
    try:
        return Path(path).read_bytes() if path.endswith(".py") else b""
    except OSError:
        return b""
