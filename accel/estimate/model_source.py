"""A model for `accel estimate-memory`: its construction and its inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from accel.errors import AccelError


class NotFound(AccelError):
    """There is no such model, or it cannot be built."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model to be built.

    make:   builds it on the current default device, all of it new each time.
    inputs: a batch for it (batch size, sequence length), as keyword arguments of a training forward; None if
        nothing describes them. Raises `NotFound` for a model with unknown inputs.
    """

    name: str
    library: str
    make: Callable[[], nn.Module]
    inputs: Callable[[nn.Module, int, int], Mapping[str, Any]] | None
    longest: int | None = None


def on_meta(subject: Subject) -> nn.Module:
    """Return the model on the meta device, in float32. Raises `NotFound` if it cannot be built so."""
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
