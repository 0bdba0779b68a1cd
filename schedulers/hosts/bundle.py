"""The supervisor of a job on a host as one packed program."""

from __future__ import annotations

import functools
import importlib.resources
import io
import os
import zipfile

from .remote_files import host_program

PROGRAM = "supervisor.pyz"
_PACKAGE = "schedulers.hosts.supervisor"
_CALL = "main(*sys.argv[1:])"
_IMPORTED = ("listen", "logs", "process_table", "redaction")  # of `schedulers.node`
_DATE = (1980, 1, 1, 0, 0, 0)


@functools.cache
def program() -> bytes:
    """Return the supervisor as one file for any Python from 3.8 on; equal sources make equal bytes."""
    return pack(_PACKAGE, _CALL)


def pack(module: str, call: str) -> bytes:
    """Pack a package, with the host programs that it imports, into one file that Python runs.

    `call` is the expression that calls its `main`.
    """
    files, folder = importlib.resources.files(module).iterdir(), module.replace(".", "/")
    sources = {f"{folder}/{file.name}": file.read_bytes() for file in files if file.name.endswith(".py")}
    sources |= {f"schedulers/node/{name}.py": host_program(name) for name in _IMPORTED}
    packages = ("schedulers", "schedulers/node", os.path.dirname(folder))
    sources |= {f"{package}/__init__.py": b"" for package in packages}
    main = f"import sys\nfrom {module}.main import main\n{call}\n"
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in sorted({**sources, "__main__.py": main.encode()}.items()):
            archive.writestr(zipfile.ZipInfo(name, _DATE), content, zipfile.ZIP_DEFLATED)
    return buffer.getvalue()
