"""A wheel of the running accel, for images: they get the same version, wherever this one was installed from."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import importlib.util
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path

from ..errors import ConfigError

_NAME, _PACKAGES = "accel-launch", ("accel", "schedulers")
_LICENCE = "licenses/LICENSE"
# The earliest time that a zip file can hold.
_ZIP_EPOCH = (1980, 1, 1, 0, 0, 0)


def write(directory: Path) -> Path:
    """Write the wheel into the directory; equal files make equal bytes. Raises ConfigError."""
    try:
        distribution = importlib.metadata.distribution(_NAME)
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(f"accel runs from sources that are not installed: pip install {_NAME}, or -e .") from None
    stem = f"{_NAME.replace('-', '_')}-{distribution.version}"
    info = f"{stem}.dist-info"
    path = directory / f"{stem}-py3-none-any.whl"
    lines: list[str] = []
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in [*_modules(), *_metadata(distribution, info)]:
            lines.append(f"{name},sha256={_digest(data)},{len(data)}")
            _add(archive, name, data)
        _add(archive, f"{info}/RECORD", "\n".join([*lines, f"{info}/RECORD,,", ""]).encode())
    return path


def _modules() -> Iterator[tuple[str, bytes]]:
    for package in _PACKAGES:
        top = _directory(package)
        for directory, names, files in os.walk(top):
            names[:] = sorted(name for name in names if name != "__pycache__")
            for name in sorted(files):
                relative_path = os.path.relpath(os.path.join(directory, name), top.parent)
                yield relative_path.replace(os.sep, "/"), Path(directory, name).read_bytes()


def _directory(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise ConfigError(f"the package {package} has no files here that could go into an image")
    return Path(spec.origin).parent


def _metadata(distribution: importlib.metadata.Distribution, info: str) -> Iterator[tuple[str, bytes]]:
    yield f"{info}/METADATA", (distribution.read_text("METADATA") or "").encode()
    yield f"{info}/WHEEL", b"Wheel-Version: 1.0\nGenerator: accel\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    yield f"{info}/entry_points.txt", (distribution.read_text("entry_points.txt") or "").encode()
    licence = distribution.read_text(_LICENCE)
    if licence is not None:
        yield f"{info}/{_LICENCE}", licence.encode()


def _add(archive: zipfile.ZipFile, name: str, data: bytes) -> None:
    entry = zipfile.ZipInfo(name, _ZIP_EPOCH)
    entry.external_attr = 0o644 << 16
    entry.compress_type = zipfile.ZIP_DEFLATED
    archive.writestr(entry, data)


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
