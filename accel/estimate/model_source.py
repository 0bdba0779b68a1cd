"""A model that `accel estimate-memory` is asked about: how it is made, and on what it computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from accel.errors import AccelError


class NotFound(AccelError):
    """There is no such model, or it cannot be made from what is there."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model to be made.

    make:   makes it, on whatever device is the default one then, all of it anew each time.
    inputs: a batch for it (batch size, sequence length), as the keyword arguments of a training forward; None where
            nothing tells what it computes on. Raises `NotFound` for a model whose inputs are not known.
    """

    name: str
    library: str
    make: Callable[[], nn.Module]
    inputs: Callable[[nn.Module, int, int], Mapping[str, Any]] | None
    longest: int | None = None


def on_meta(subject: Subject) -> nn.Module:
    """The model without memory, its floating-point tensors float32. Raises `NotFound` if it cannot be made so."""
    from accel.big_models.init import init_empty_weights

    try:
        with init_empty_weights(include_buffers=True):
            model = subject.make()
    except AccelError:
        raise
    except Exception:  # some read a tensor's value while they are made: only their parameters are then without memory
        try:
            with init_empty_weights(include_buffers=False):
                model = subject.make()
        except Exception as error:
            said = " ".join(f"{type(error).__name__}: {error}".split())
            raise NotFound(f"{subject.name} cannot be made: {said}") from error
    return model.to(torch.float32)
