"""Kubernetes' own programs: where they are, and how they get out of their archive.

`ACCEL_KUBERNETES_PROGRAMS` names a directory of them, or an archive (tar.xz), which is unpacked once into the user's
cache. `KUBEBUILDER_ASSETS`, a directory of etcd, kube-apiserver and kube-controller-manager, is enough for the tests
that need the API alone.
"""

from __future__ import annotations

import fcntl
import os
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ..netns import ClusterError

API = ("etcd", "kube-apiserver")
ALL = (*API, "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy", "coredns", "training-operator")
_VARIABLE, _API_VARIABLE = "ACCEL_KUBERNETES_PROGRAMS", "KUBEBUILDER_ASSETS"
_REMEDY = f"{_VARIABLE} names a directory or a tar.xz of them; or ACCEL_TEST_KUBECONFIG a cluster that runs"


def lacking(names: Sequence[str] = ALL) -> tuple[str, str] | None:
    """Which of these programs this computer lacks, and the remedy."""
    try:
        found = directory(names)
    except ClusterError as error:
        return "Kubernetes", f"{error}: {_REMEDY}"
    absent = [name for name in names if not os.access(found / name, os.X_OK)]
    return (f"Kubernetes ({', '.join(absent)})", f"not in {found}: {_REMEDY}") if absent else None


def directory(names: Sequence[str] = ALL) -> Path:
    """Where they are. Raises ClusterError when no variable names a place, or the archive cannot be unpacked."""
    given = os.environ.get(_VARIABLE)
    if not given and set(names) <= {*API, "kube-controller-manager"}:
        given = os.environ.get(_API_VARIABLE)
    if not given:
        raise ClusterError(f"{_VARIABLE} is not set")
    place = Path(given).expanduser().absolute()
    if place.is_file():
        place = _unpacked(place)
    if not place.is_dir():
        raise ClusterError(f"{_VARIABLE}: there is no {place}")
    return place / "bin" if (place / "bin").is_dir() else place


def _unpacked(archive: Path) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "accel-tests", "kubernetes")
    told = archive.stat()
    target = cache / f"{archive.name.partition('.tar')[0]}-{told.st_size:x}-{int(told.st_mtime):x}"
    cache.mkdir(parents=True, exist_ok=True)
    with _locked(cache / ".lock"):
        if not target.exists():
            with tempfile.TemporaryDirectory(dir=cache) as scratch:
                try:
                    with tarfile.open(archive) as tar:
                        tar.extractall(f"{scratch}/all", filter="data")
                except (OSError, tarfile.TarError, EOFError) as error:
                    raise ClusterError(f"{archive}: {error}") from None
                Path(scratch, "all").rename(target)
    return target


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    with file.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
