"""Assertions of the checks."""

from __future__ import annotations

from typing import Any

import torch

from accel.parallel.shares import whole


class SanityError(Exception):
    """A check failed; the message has the expected and the actual value."""


def expect_equal(what: str, found: Any, expected: Any) -> None:
    """Raise `SanityError` unless ``found`` equals ``expected``; tensors, also nested ones, are compared as lists."""
    if _plain(found) != _plain(expected):
        raise SanityError(f"{what}: expected {_plain(expected)}, got {_plain(found)}")


def expect_close(what: str, found: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-4) -> None:
    """Raise `SanityError` unless the two differ only by rounding: by ``tolerance``, relative.

    A sharded tensor is gathered, so all processes must call this.
    """
    found, expected = whole(found).detach().cpu(), expected.detach().cpu()
    if not torch.allclose(found, expected, rtol=tolerance, atol=tolerance / 100):
        raise SanityError(f"{what}: expected {expected.flatten()[:4].tolist()}…, got {found.flatten()[:4].tolist()}…")


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().tolist()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
