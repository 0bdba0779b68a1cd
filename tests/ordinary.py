"""Programs that run as an ordinary user, who can read this project and its interpreter wherever they lie."""

from __future__ import annotations

import os
import shlex
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from .needs import missing

NOBODY = 65534
_ROOT = Path(__file__).parents[1]


def command(argv: Sequence[str], scratch: Path, uid: int = NOBODY) -> list[str]:
    """Return the command that runs `argv` as that user.

    Root's closed directories are opened in a mount namespace of the command alone. `scratch` is an empty directory.
    """
    if os.geteuid() != 0:
        return list(argv)
    script = f'{opening(scratch)}; exec "$@"'
    return [*"unshare --mount --propagation private sh -ec".split(), script, "sh", *as_user(uid), *argv]


def as_user(uid: int) -> list[str]:
    return f"setpriv --reuid {uid} --regid {uid} --clear-groups --no-new-privs --inh-caps=-all".split()


def opening(scratch: Path) -> str:
    """Shell commands that lay an open copy over each closed directory on the way to the interpreter and the project."""
    words = ["true"]
    for number, directory in enumerate(_closed()):
        own = shlex.quote(f"{scratch}/{number}")
        layers = f"lowerdir={directory},upperdir={scratch}/{number}/new,workdir={scratch}/{number}/work"
        place = shlex.quote(str(directory))
        words += [f"mkdir -p {own}", f"mount -t tmpfs tmpfs {own}", f"mkdir {own}/new {own}/work"]
        words += [f"mount -t overlay overlay -o {shlex.quote(layers)} {place}", f"chmod o+rx {place}"]
    return " && ".join(words)


def closing(scratch: Path) -> str:
    """Shell commands that take back what `opening` did."""
    closed = list(enumerate(_closed()))
    return "; ".join(f"umount -l {shlex.quote(str(d))} {shlex.quote(f'{scratch}/{n}')}" for n, d in reversed(closed))


def check(scratch: Path, uid: int = NOBODY) -> None:
    """Skip the test where no ordinary user can run the interpreter."""
    tried = subprocess.run(
        command([sys.executable, "-c", "import accel.cli, msgspec"], scratch, uid),
        cwd="/", env={**os.environ, "PYTHONPATH": str(_ROOT)}, capture_output=True, text=True,
    )  # fmt: skip
    if tried.returncode:
        missing(
            f"an ordinary user who can run {sys.executable} ({tried.stderr.strip()[-200:]})", "run as root on Linux"
        )


def _closed() -> list[Path]:
    needed = {Path(sys.base_prefix), Path(sys.prefix), _ROOT}
    above = sorted({parent for path in needed for parent in (path, *path.parents)})
    return [path for path in above if not path.stat().st_mode & stat.S_IXOTH]
