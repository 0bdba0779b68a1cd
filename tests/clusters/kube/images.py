"""Images for the tests' nodes, as docker archives: a few empty directories, which this computer's are mounted over.

Containers see MOUNTS of this computer, read-only (`base_spec`): no image needs an interpreter or torch, and nothing is
built or pulled.
"""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import sys
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
TRAIN, SANDBOX = "example.org/train:1", "example.org/sandbox:1"
_USER = 1000
_DIRECTORIES = {"tmp": 0o1777, "workspace": 0o755, "home": 0o755, "home/accel": 0o755, "root": 0o755}
_EMPTY = ("usr", "etc", "proc", "sys", "dev", "run", "var", "var/tmp", "opt", "work")
# What holds a pod's namespaces: the mounts are not in its sandbox.
_PAUSE = """\
#include <signal.h>
#include <unistd.h>
static void end(int number) { _exit(0); }
int main(void) { signal(SIGTERM, end); signal(SIGINT, end); signal(SIGCHLD, SIG_IGN); for (;;) pause(); }
"""
_OWN = ("workspace", "home/accel")
_FILES = {
    "etc/passwd": f"root:x:0:0::/root:/bin/sh\naccel:x:{_USER}:{_USER}::/home/accel:/bin/sh\n",
    "etc/group": f"root:x:0:\naccel:x:{_USER}:\n",
    "etc/nsswitch.conf": "hosts: files dns\n",
}


def mounts(*, with_accel: bool = True) -> list[str]:
    """What containers see of this computer: programs, the interpreter, its packages, and accel itself."""
    wanted = ["/usr", "/etc/alternatives", sys.base_prefix, sys.prefix, *([str(ROOT)] if with_accel else [])]
    found = [path for path in dict.fromkeys(wanted) if Path(path).is_dir()]
    return [path for path in found if not any(Path(path).is_relative_to(each) for each in found if each != path)]


def base_spec() -> dict[str, Any]:
    """What every container of a node starts from: containerd's own, and the mounts."""
    done = subprocess.run(["ctr", "oci", "spec"], stdout=subprocess.PIPE, check=True)
    spec: dict[str, Any] = json.loads(done.stdout)
    options = ["rbind", "ro"]
    spec["mounts"] += [{"destination": at, "source": at, "type": "bind", "options": options} for at in mounts()]
    return spec


def write(directory: Path) -> list[Path]:
    """One archive for the pods' containers, and one for the sandboxes that hold their namespaces."""
    directory.mkdir(parents=True, exist_ok=True)
    path = f"{sys.prefix}/bin:/usr/local/bin:/usr/bin:/bin"
    config = {"User": f"{_USER}:{_USER}", "WorkingDir": "/workspace", "Env": [f"PATH={path}"]}
    train, sandbox = directory / "train.tar", directory / "sandbox.tar"
    _archive(train, TRAIN, _layer(), config)
    program = directory / "pause"
    subprocess.run(["cc", "-static", "-o", program, "-x", "c", "-"], input=_PAUSE.encode(), check=True)
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        _add(tar, "pause", program.read_bytes(), mode=0o755)
    _archive(sandbox, SANDBOX, layer.getvalue(), {"Entrypoint": ["/pause"]})
    return [train, sandbox]


def write_host(path: Path, name: str, env: Sequence[str]) -> None:
    """One archive for containers of root's, with these variables."""
    _archive(path, name, _layer(), {"WorkingDir": "/workspace", "Env": list(env)})


def _layer() -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        for name, mode in {**dict.fromkeys(_EMPTY, 0o755), **_DIRECTORIES}.items():
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, mode
            entry.uid = entry.gid = _USER if name in _OWN else 0
            tar.addfile(entry)
        for name in ("bin", "lib", "lib64", "sbin"):
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = tarfile.SYMTYPE, f"usr/{name}"
            tar.addfile(entry)
        for name, text in _FILES.items():
            _add(tar, name, text.encode())
    return made.getvalue()


def _archive(path: Path, name: str, layer: bytes, config: Mapping[str, object]) -> None:
    digest = hashlib.sha256(layer).hexdigest()
    told = {
        "architecture": "amd64", "os": "linux", "config": config,
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
    }  # fmt: skip
    described = json.dumps(told).encode()
    file = f"{hashlib.sha256(described).hexdigest()}.json"
    manifest: Sequence[object] = [{"Config": file, "RepoTags": [name], "Layers": [f"{digest}/layer.tar"]}]
    with tarfile.open(path, "w") as tar:
        _add(tar, file, described)
        _add(tar, f"{digest}/layer.tar", layer)
        _add(tar, "manifest.json", json.dumps(manifest).encode())


def _add(tar: tarfile.TarFile, name: str, data: bytes, *, mode: int = 0o644) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(data), mode
    tar.addfile(entry, io.BytesIO(data))
