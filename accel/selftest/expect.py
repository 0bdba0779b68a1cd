"""Assertions of the checks."""

from __future__ import annotations

from typing import Any

import torch

from accel.parallel.shares import full_tensor


class SanityError(Exception):
    """A check failed; the message has the expected and the actual value."""


def expect_equal(label: str, actual: Any, expected: Any) -> None:
    """Raise `SanityError` unless ``actual`` equals ``expected``. Tensors, also nested ones, are compared as lists."""
    if _plain(actual) != _plain(expected):
        raise SanityError(f"{label}: expected {_plain(expected)}, got {_plain(actual)}")


def expect_close(label: str, actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-4) -> None:
    """Raise `SanityError` unless the two are equal within the relative ``tolerance``.

    All processes must call this if a tensor is sharded, since it is gathered.
    """
    actual, expected = full_tensor(actual).detach().cpu(), expected.detach().cpu()
    if not torch.allclose(actual, expected, rtol=tolerance, atol=tolerance / 100):
        raise SanityError(f"{label}: expected {expected.flatten()[:4].tolist()}…, got {actual.flatten()[:4].tolist()}…")


def expect_near(label: str, actual: Any, expected: Any) -> None:
    """Raise `SanityError` if the difference of two tensors is more than a tenth of the expected one, by norms."""
    difference = float((actual - expected).norm() / expected.norm())
    if not difference <= 0.1:
        raise SanityError(f"{label}: expected a difference of at most 10 %, got {difference:.0%}")


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().tolist()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
