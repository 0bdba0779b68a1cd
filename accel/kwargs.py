"""The base of dataclasses that hold keyword arguments for other libraries."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any


class KwargsHandler:
    """Base of dataclasses that hold keyword arguments for a function or class of torch."""

    def to_dict(self) -> dict[str, Any]:
        """Return a copy of every field, by its name."""
        return {f.name: copy.deepcopy(getattr(self, f.name)) for f in dataclasses.fields(self)}  # type: ignore[arg-type]

    def to_kwargs(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults, so that the receiver's own defaults apply to the rest."""
        default = self.default_values()
        return {name: value for name, value in self.to_dict().items() if default[name] != value}

    def default_values(self) -> dict[str, Any]:
        """Return the default of every field, in the form of `to_dict`, regardless of the environment."""
        return type(self)().to_dict()
