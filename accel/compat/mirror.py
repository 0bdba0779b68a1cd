"""Stand-ins for Accelerate's modules, whose names are imported from accel on first use, and for its metadata."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.metadata import Distribution
from os import PathLike
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from accel.compat.name_table import find, is_module, names_of, where_to_read
from accel.compat.version import NAME, VERSION
from accel.errors import nearest

_PATCHED = "_patched_homes"


class AliasModule(ModuleType):
    """One of Accelerate's modules.

    Setting a name also sets it in its home, so that the calling code sees a patch of
    ``accelerate.hooks.add_hook_to_module``; deleting it restores the earlier value.
    """

    def __getattr__(self, name: str) -> Any:
        if name == "__version__" and self.__name__ == NAME:
            return VERSION
        if name == "__all__":
            return names_of(self.__name__)
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        origin = find(self.__name__, name)
        if origin is None and is_module(f"{self.__name__}.{name}"):
            return import_module(f"{self.__name__}.{name}")
        if origin is None:
            raise _missing(self.__name__, name, sys._getframe(1))
        value = getattr(import_module(origin.module), origin.name)
        self.__dict__[name] = value
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        origin = find(self.__name__, name) if not name.startswith("__") else None
        if origin is not None and isinstance(value, AliasModule):
            return  # `accelerate.utils.tqdm` is a module and, as an attribute, the function in it
        if origin is not None:
            module = import_module(origin.module)
            self.__dict__.setdefault(_PATCHED, {}).setdefault(name, getattr(module, origin.name))
            setattr(module, origin.name, value)
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        patched = self.__dict__.get(_PATCHED, {})
        origin = find(self.__name__, name)
        if origin is not None and name in patched:
            setattr(import_module(origin.module), origin.name, patched.pop(name))

    def __dir__(self) -> list[str]:
        return sorted({*self.__dict__, *names_of(self.__name__)} - {_PATCHED})


def _missing(module: str, name: str, caller: FrameType) -> Exception:
    text = f"{module} has no {name!r} under accel.compat{nearest(name, names_of(module))}; {where_to_read()}"
    # `from … import …` replaces an AttributeError, and its text, by its own; hasattr() needs one.
    return ImportError(text, name=module) if _is_import_from(caller) else AttributeError(text)


def _is_import_from(frame: FrameType) -> bool:
    import dis

    code = frame.f_code.co_code
    return 0 <= frame.f_lasti < len(code) and dis.opname[code[frame.f_lasti]] == "IMPORT_FROM"


# The distribution that `importlib.metadata` finds.

_FILES = {
    "METADATA": f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {VERSION}\nSummary: answered by accel.compat\n",
    "top_level.txt": f"{NAME}\n",
}


class StubDistribution(Distribution):
    """A distribution with two metadata texts and no files."""

    def read_text(self, filename: str | PathLike[str]) -> str | None:
        """Return the text of a metadata file, or ``None``."""
        return _FILES.get(str(filename))

    def locate_file(self, path: str | PathLike[str]) -> Path:
        """Return the path that a file of the distribution would have."""
        return Path(__file__).parent / path
