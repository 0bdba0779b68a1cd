"""A program that creates a virtual environment on its host, once per requirements and interpreter.

It reads one line of JSON:

    {"root": "~/.accel", "files": {"requirements.txt": "…"}, "version": null, "make": true}

Standard input then stays open: its end means that the client is gone. It prints one line,
`{"python": "/…/envs/<digest>/bin/python", "made": true}` (`null` if there is none and none was to be made) or
`{"error": "…"}`.

An environment is used only with its marker, which is written last. Its creator holds its lock, and so does
the pip that it runs: an orphaned pip is waited for, and its work is discarded. With a `version` (`"3.12"`) uv
creates the environment, of that Python, which it downloads if the host has none; pip fills either kind.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import shutil
import signal
import site
import subprocess
import sys
import sysconfig
import threading

from .program import InvalidRequest, answer, write_reply

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

SCHEMA = 1
MARKER = ".whole"
TAIL = 8192
ERROR_LINES = 2
INSTALL = ["-m", "pip", "install", "--no-input", "--disable-pip-version-check", "--no-color"]

running: list[int] = []  # process groups to kill when the client is gone
building = threading.Event()
client_gone = threading.Event()


def main() -> None:
    os.umask(0o077)
    line = answer(provide_environment)
    with contextlib.suppress(BrokenPipeError):
        write_reply(line)
    os._exit(0)  # the thread that reads must not be waited for


def exit_with_client() -> None:
    while os.read(0, 4096):
        pass
    client_gone.set()
    kill_children()
    if not building.is_set():  # else `provide_environment` removes what is half built
        os._exit(1)


def kill_children() -> None:
    for group in list(running):
        with contextlib.suppress(OSError):
            os.killpg(group, signal.SIGKILL)


def provide_environment(root: str, request: dict[str, Any]) -> dict[str, Any]:
    threading.Thread(target=exit_with_client, daemon=True).start()
    files, version = request["files"], request["version"]
    key = [SCHEMA, version, sys.version, sys.executable, sys.prefix, sorted(files.items())]
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()
    top = os.path.join(root, "envs")
    directory = os.path.join(top, digest)
    python = os.path.join(directory, "bin", "python")
    if not request["make"]:
        return {"python": python if is_complete(directory) else None, "made": False}
    os.makedirs(top, mode=0o700, exist_ok=True)
    lock = locked(directory + ".lock")
    if is_complete(directory):
        os.utime(os.path.join(directory, MARKER))  # its last use, for the removal of old ones
        return {"python": python, "made": False}
    shutil.rmtree(directory, ignore_errors=True)
    building.set()
    try:
        build(directory, python, files, version, lock)
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    return {"python": python, "made": True}


def is_complete(directory: str) -> bool:
    return os.path.exists(os.path.join(directory, MARKER))


def locked(path: str) -> int:
    """Wait for the lock and return it. Its file is deleted together with the environment."""
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            if os.path.samestat(os.fstat(lock), os.stat(path)):
                return lock
        except FileNotFoundError:
            pass
        os.close(lock)


def build(directory: str, python: str, files: dict[str, str], version: str | None, lock: int) -> None:
    log = directory + ".log"
    with open(log, "wb"):
        pass  # emptied: it is of this try only
    if version:
        create_from_other_python(directory, version, log, lock)
    else:
        create_from_this_python(directory, log, lock)
    if subprocess.call([python, "-m", "pip", "--version"], **quietly(directory)) != 0:
        run([python, "-m", "ensurepip", "--default-pip"], log, lock, "ensurepip")
    requirements_dir = os.path.join(directory, "requirements")
    os.mkdir(requirements_dir)
    for name, text in files.items():
        with open(os.path.join(requirements_dir, name), "w", encoding="utf-8", errors="surrogateescape") as file:
            file.write(text)
    label = f"pip install (Python {version or platform.python_version()})"
    run([python, *INSTALL, "-r", os.path.join(requirements_dir, "requirements.txt")], log, lock, label)
    os.sync()  # after a power loss a marker must not stand over empty files
    os.close(os.open(os.path.join(directory, MARKER), os.O_WRONLY | os.O_CREAT, 0o600))


def create_from_this_python(directory: str, log: str, lock: int) -> None:
    in_venv = sys.prefix != sys.base_prefix
    flags = [] if in_venv else ["--system-site-packages"]
    run([sys.executable, "-m", "venv", "--without-pip", *flags, directory], log, lock, "venv")
    if in_venv:  # whose packages are not the system's: made visible in the new one
        purelib = sysconfig.get_path("purelib", "posix_prefix", {"base": directory, "platbase": directory})
        lines = [f"import site; site.addsitedir({path!r})\n" for path in site.getsitepackages()]
        with open(os.path.join(purelib, "_packages_below.pth"), "w") as file:
            file.writelines(lines)


def create_from_other_python(directory: str, version: str, log: str, lock: int) -> None:
    """Create it with uv and without this Python's packages, which another Python cannot use."""
    places = (os.environ.get("PATH", os.defpath), os.path.expanduser("~/.local/bin"))
    uv = shutil.which("uv", path=os.pathsep.join(places))
    if uv is None:
        uv_dir = os.path.join(directory, "uv")
        run([sys.executable, *INSTALL, "--target", uv_dir, "uv"], log, lock, "pip install uv")
        uv = os.path.join(uv_dir, "bin", "uv")
    os.environ.setdefault("UV_PYTHON_INSTALL_DIR", os.path.join(os.path.dirname(os.path.dirname(directory)), "pythons"))
    flags = ["--no-project", "--allow-existing", "--no-progress", "--color", "never"]
    run([uv, "venv", *flags, "--python", version, directory], log, lock, f"uv venv --python {version}")


def quietly(directory: str) -> dict[str, Any]:
    inherited = {
        name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME", "PIP_TARGET")
    }
    null = subprocess.DEVNULL
    env = {**inherited, "PIP_USER": "0"}
    return {"stdin": null, "stdout": null, "stderr": null, "cwd": directory, "env": env}


def run(argv: list[str], log: str, lock: int, name: str) -> None:
    with open(log, "ab") as output:
        popen_options = {**quietly(os.path.dirname(log)), "stdout": output, "stderr": output}
        process = subprocess.Popen(argv, pass_fds=(lock,), start_new_session=True, **popen_options)
        running.append(process.pid)
        if client_gone.is_set():
            kill_children()
        status = process.wait()
        running.remove(process.pid)
    if client_gone.is_set():
        raise InvalidRequest("the client is gone")
    if status != 0:
        raise InvalidRequest(f"{name} failed (status {status}): {last_errors(log)} (all of it: {log})")


def last_errors(log: str) -> str:
    """Return the likely reason in the log: the last errors, or the last lines."""
    with open(log, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL))
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.lower().startswith(("error", "cause:"))]  # pip, uv
    return " / ".join((errors or lines or ["it said nothing"])[-ERROR_LINES:])
