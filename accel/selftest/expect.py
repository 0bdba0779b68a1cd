"""How a check says that something is not as it must be."""

from __future__ import annotations

from typing import Any

import torch

from accel.parallel.shares import whole


class SanityError(Exception):
    """Something is not as it must be; the message says what was expected and what was found."""


def expect_equal(what: str, found: Any, expected: Any) -> None:
    """Raise `SanityError` unless ``found`` is ``expected``; tensors and nests of them are compared as lists."""
    if _plain(found) != _plain(expected):
        raise SanityError(f"{what}: expected {_plain(expected)}, got {_plain(found)}")


def expect_close(what: str, found: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-4) -> None:
    """Raise `SanityError` unless the two differ by rounding only: by ``tolerance`` of their size.

    A sharded tensor is made whole, for which all processes come here.
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
