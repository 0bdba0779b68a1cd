"""The programs of Kubernetes' control plane: where they are, and how they are made where there are none.

    python -m tests.clusters.kube.binaries     makes them, if need be, and prints the directory

It needs nothing but Python with pip, apt and dpkg. `KUBEBUILDER_ASSETS` names a directory that has them; else they are
built once from Debian's source package, into the user's cache, by `build.sh`.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..netns import ClusterError

VERSION = "1.20.2"
PROGRAMS = ("etcd", "kube-apiserver", "kube-controller-manager")
BUILD_S = 3600
_TOOLS = {"apt-get": "apt", "dpkg": "dpkg"}
_BUILD = "python -m tests.clusters.kubernetes build  (once, 3 to 7 minutes)"


def directory() -> Path:
    """Where the programs are, or would be."""
    given = os.environ.get("KUBEBUILDER_ASSETS")
    if given:
        return Path(given)
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache, "accel-tests", "kubernetes", VERSION)


def lacking() -> tuple[str, str] | None:
    """Which programs this computer lacks, and the remedy."""
    absent = [name for name in PROGRAMS if not os.access(directory() / name, os.X_OK)]
    if not absent:
        return None
    if os.environ.get("KUBEBUILDER_ASSETS"):
        return ", ".join(absent), f"put it into KUBEBUILDER_ASSETS ({directory()}), or unset that and {_BUILD}"
    return ", ".join(absent), _BUILD


def build() -> Path:
    """Builds what is absent, and returns the directory; nothing is done twice, whoever asks at the same time.

    Raises ClusterError with what the build said last.
    """
    target = directory()
    if lacking() is None:
        return target
    if os.environ.get("KUBEBUILDER_ASSETS"):
        raise ClusterError(f"KUBEBUILDER_ASSETS ({target}) lacks {', '.join(PROGRAMS)}: nothing is built there")
    absent = [package for command, package in _TOOLS.items() if shutil.which(command) is None]
    if absent:
        raise ClusterError(f"{', '.join(absent)} is missing: the programs are built from Debian's source package")
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.parent / f".{VERSION}.lock"):
        if lacking() is not None:
            _build(target)
    return target


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    with file.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _build(target: Path) -> None:
    script = Path(__file__).with_name("build.sh")
    with tempfile.TemporaryDirectory(prefix="accel-kubernetes-") as work:
        made = Path(work, "bin")
        made.mkdir()
        argv = ["bash", str(script), str(made), work, sys.executable]
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=sys.stderr, timeout=BUILD_S)
        if done.returncode != 0:
            raise ClusterError(f"{script.name}: rc {done.returncode}; its last lines say why")
        target.mkdir(exist_ok=True)
        for name in PROGRAMS:
            # Onto the file system of the cache first, so that a name is there whole or not at all.
            shutil.copy2(made / name, target / f".{name}")
            (target / f".{name}").replace(target / name)


def main() -> int:
    try:
        print(build())
    except ClusterError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
