"""The program that watches over a job on each of its hosts: what to send, and how it is started."""

from __future__ import annotations

import functools
import importlib.resources
import io
import zipfile

from .files import host_program

PROGRAM = "supervisor.pyz"
_PACKAGE = "supervisor"
_CALL = "main(*sys.argv[1:])"
_DATE = (1980, 1, 1, 0, 0, 0)


@functools.cache
def program() -> bytes:
    """The supervisor as one file that any Python from 3.8 on runs: the same bytes for the same sources."""
    return pack(_PACKAGE, _CALL)


def pack(package: str, call: str) -> bytes:
    """A package beside the hosts' other programs as one file that Python runs, with `logs.py`, which it imports.

    `call` is how its `main` is called.
    """
    folder = importlib.resources.files(f"schedulers.remote.hostside.{package}")
    sources = {f"{package}/{file.name}": file.read_bytes() for file in folder.iterdir() if file.name.endswith(".py")}
    sources["logs.py"] = host_program("logs")
    main = f"import sys\nfrom {package}.main import main\n{call}\n"
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in sorted({**sources, "__main__.py": main.encode()}.items()):
            archive.writestr(zipfile.ZipInfo(name, _DATE), content, zipfile.ZIP_DEFLATED)
    return packed.getvalue()


def start_command(python: str, directory: str, node: int) -> list[str]:
    """Leaves host number `node` of the job with a supervisor, unless it has one or the job has ended there.

    `directory` is the job's on that host, with `PROGRAM` and `settings.json` in it; absolute, or from `~/` on. Ends
    with 0 at once; with another status and one line on standard error when there can be no supervisor. Its standard
    input has the values of the secrets that the settings name (`secrets`), as JSON.
    """
    # The shell's tilde is not to be had: an argv is data.
    code = (
        "import os,sys,runpy;"
        f"runpy.run_path(os.path.join(os.path.expanduser(sys.argv[1]),{PROGRAM!r}),run_name='__main__')"
    )
    return [python, "-I", "-c", code, directory, str(node)]
