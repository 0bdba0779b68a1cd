"""The base of the dataclasses that stand for somebody else's keyword arguments."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any


class KwargsHandler:
    """Base of the dataclasses that stand for keyword arguments of something in torch."""

    def to_dict(self) -> dict[str, Any]:
        """A copy of every field, by its name."""
        return {f.name: copy.deepcopy(getattr(self, f.name)) for f in dataclasses.fields(self)}  # type: ignore[arg-type]

    def to_kwargs(self) -> dict[str, Any]:
        """Only the fields that differ from their default, so that the defaults of what takes them hold for the rest."""
        default = self.default_values()
        return {name: value for name, value in self.to_dict().items() if default[name] != value}

    def default_values(self) -> dict[str, Any]:
        """What `to_dict` gives where no field was given; what the environment says does not count."""
        return type(self)().to_dict()
