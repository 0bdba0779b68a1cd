"""The import hook that replaces Accelerate by accel, here and in child processes.

It imports little: every Python process of a run may load it, and most of them never import `accelerate`.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

from accel.compat.version import NAME
from accel.errors import StateError
from accel.launch.alias_env import variables

if TYPE_CHECKING:
    from importlib.metadata import Distribution


class Finder:
    """The first finder on ``sys.meta_path``, responsible for `accelerate` and everything below it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the mirror's spec; ``None`` for other packages. Raises `ModuleNotFoundError` for an unmirrored module.

        If the next finder looked for such a submodule, it could mix a part of Accelerate itself into the mirror.
        """
        if fullname.partition(".")[0] != NAME:
            return None
        from accel.compat.name_table import is_module, is_package, where_to_read

        if not is_module(fullname):
            raise ModuleNotFoundError(
                f"No module named {fullname!r} under accel.compat: {where_to_read()}", name=fullname
            )
        spec = ModuleSpec(fullname, cast(Any, _Loader()), origin=str(Path(__file__).with_name("mirror.py")))
        spec.has_location = True
        spec.submodule_search_locations = [] if is_package(fullname) else None
        return spec

    def find_distributions(self, context: Any = None) -> Iterator[Distribution]:
        """Yield Accelerate's distribution, for `importlib.metadata`."""
        name = getattr(context, "name", None)
        if name is None or re.sub(r"[-_.]+", "-", name).lower() == NAME:
            from accel.compat.mirror import StubDistribution

            yield StubDistribution()


class _Loader:
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        from accel.compat.mirror import AliasModule

        return AliasModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: names are resolved when they are used."""


def install() -> None:
    """Replace Accelerate by accel from now on; a second call changes nothing.

    Raises `StateError` if Accelerate itself is already imported: its objects in use would remain.
    """
    loaded = sys.modules.get(NAME)
    if loaded is not None and type(loaded).__name__ != "AliasModule":
        origin = getattr(loaded, "__file__", None) or "an unknown place"
        raise StateError(f"accelerate is already imported, from {origin}: import accel.compat before it")
    if not any(type(finder).__name__ == "Finder" and type(finder).__module__ == __name__ for finder in sys.meta_path):
        sys.meta_path.insert(0, Finder())
    # accel's loggers inherit the level and handlers that a script sets on the logger "accelerate".
    logging.getLogger("accel").parent = logging.getLogger(NAME)
    os.environ.update(variables(os.environ))
