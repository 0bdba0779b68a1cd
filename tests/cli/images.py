"""A real builder, a real registry and a small base image, for the tests of `accel image`."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from schedulers.processes import die_with_parent

from ..needs import missing
from ..ports import free_port

_APPLETS = "cat chmod chown cp env ls mkdir rm sh sleep".split()
# What accel needs to print its version, and pip to see that nothing is lacking.
_PACKAGES = "pip msgspec pathspec platformdirs PyYAML rich markdown-it-py mdurl Pygments urllib3".split()
_ACCEPTED = "application/vnd.oci.image.manifest.v1+json, application/vnd.docker.distribution.manifest.v2+json"


@dataclass(frozen=True)
class Workshop:
    """buildah with a store of its own, and a registry at `registry`."""

    box: Path
    registry: str

    @property
    def env(self) -> dict[str, str]:
        return {
            "BUILDAH_ISOLATION": "chroot",
            "CONTAINERS_STORAGE_CONF": str(self.box / "storage.conf"),
            "CONTAINERS_REGISTRIES_CONF": str(self.box / "registries.conf"),
            "XDG_RUNTIME_DIR": str(self.box),
            "TMPDIR": str(self.box),
        }

    def buildah(self, *words: str) -> str:
        env = {**os.environ, **self.env}
        done = subprocess.run(["buildah", *words], env=env, capture_output=True, text=True, timeout=250)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def run(self, image: str, *argv: str) -> str:
        """What a program prints in a container of an image, pulled, as the user that the image names."""
        container = self.buildah("from", "--pull-always", image).strip()
        try:
            return self.buildah("run", container, "--", *argv)
        finally:
            self.buildah("rm", container)

    def base(self, torch: str) -> str:
        """Makes an image with this Python, pip, and what looks like a torch of that version."""
        context = self.box / "base"
        root = context / "root"
        _copy_python(root)
        _put(root / _site(), "torch", torch)
        path = f"{sys.base_prefix}/bin:/usr/local/bin:/usr/bin:/bin"
        # Without a network, pip would try for seconds to find out whether it is the newest.
        settings = f"PATH={path} PIP_DISABLE_PIP_VERSION_CHECK=1"
        (context / "Dockerfile").write_text(f"FROM scratch\nCOPY root/ /\nENV {settings}\n")
        self.buildah("build", "--tag", "localhost/base", str(context))
        shutil.rmtree(context)
        return "localhost/base"

    def derived(self, base: str, *commands: str) -> str:
        """Makes an image out of another one by commands in it."""
        context = self.box / "derived"
        context.mkdir()
        (context / "Dockerfile").write_text("".join(f"{line}\n" for line in (f"FROM {base}", *commands)))
        self.buildah("build", "--tag", "localhost/derived", str(context))
        return "localhost/derived"

    def manifest(self, name: str, tag: str) -> tuple[str, dict[str, Any]]:
        """(digest, configuration) of an image, as the registry knows it."""
        with self._get(f"{name}/manifests/{tag}") as answer:
            digest, found = answer.headers["Docker-Content-Digest"], json.load(answer)
        with self._get(f"{name}/blobs/{found['config']['digest']}") as answer:
            return digest, json.load(answer)

    def _get(self, path: str) -> Any:
        request = urllib.request.Request(f"http://{self.registry}/v2/{path}", headers={"Accept": _ACCEPTED})
        return urllib.request.urlopen(request, timeout=30)


@contextlib.contextmanager
def workshop(box: Path, driver: str = "vfs") -> Iterator[Workshop]:
    """Skips the test for want of buildah or of a registry."""
    wanted = {"buildah": "buildah", "docker-registry": "docker-registry", "busybox": "busybox-static"}
    absent = [package for program, package in wanted.items() if not shutil.which(program)]
    if absent or os.getuid() != 0 or sys.platform != "linux":
        missing("buildah as root, with a registry", f"apt-get install {' '.join(absent) or '…; and be root'}")
    (box / "storage.conf").write_text(
        f'[storage]\ndriver = "{driver}"\ngraphroot = "{box}/store"\nrunroot = "{box}/run"\n'
    )
    try:
        with registry(box) as address:
            (box / "registries.conf").write_text(f'[[registry]]\nlocation = "{address}"\ninsecure = true\n')
            yield Workshop(box, address)
    finally:
        shutil.rmtree(box / "store", ignore_errors=True)


@contextlib.contextmanager
def registry(box: Path, host: str = "127.0.0.1") -> Iterator[str]:
    """The address of a registry, which keeps its images in `box`."""
    address = f"{host}:{free_port()}"
    settings = {
        "version": 0.1,
        "log": {"level": "error"},
        "storage": {"filesystem": {"rootdirectory": str(box / "registry")}},
        "http": {"addr": address},
    }
    (box / "registry.yml").write_text(json.dumps(settings))
    with (box / "registry.log").open("wb") as log:
        argv = ["docker-registry", "serve", str(box / "registry.yml")]
        # A worker of pytest-xdist is killed 10 seconds after its run was ended.
        server = subprocess.Popen(argv, stdout=log, stderr=log, preexec_fn=die_with_parent)
    try:
        _until_answers(f"http://{address}/v2/", server)
        yield address
    finally:
        server.terminate()
        server.wait(30)


def _copy_python(root: Path) -> None:
    program = Path(os.path.realpath(sys.executable))
    library = Path(sysconfig.get_path("stdlib", vars={"installed_base": sys.base_prefix}))
    _copy(root, program)
    ignored = shutil.ignore_patterns(
        "__pycache__",
        "test",
        "tests",
        "idlelib",
        "tkinter",
        "lib2to3",
        "ensurepip",
        "pydoc_data",
        "turtledemo",
        "config-*",
        "*.a",
        "site-packages",
        "dist-packages",
    )
    shutil.copytree(
        library, root / library.relative_to("/"), ignore=ignored, symlinks=False, ignore_dangling_symlinks=True
    )
    for shared in {
        *_libraries(program),
        *(each for file in library.glob("lib-dynload/*.so") for each in _libraries(file)),
    }:
        _copy(root, shared)
    for directory in ("bin", "usr/bin", "usr/local/bin", "tmp", "etc", "root"):
        (root / directory).mkdir(parents=True, exist_ok=True)
    link = root / "usr/bin/python3"
    if not link.exists():
        link.symlink_to(program)
    _copy(root, Path(shutil.which("busybox") or ""))
    for applet in _APPLETS:
        if not (root / "bin" / applet).exists():
            (root / "bin" / applet).symlink_to(shutil.which("busybox") or "")
    for package in _PACKAGES:
        _copy_package(root / _site(), package)


def _site() -> str:
    """Where a package that is installed by root goes, below the root."""
    program = os.path.realpath(sys.executable)
    code = "import site; print(site.getsitepackages()[0])"
    found = subprocess.run([program, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
    return found.strip().lstrip("/")


def _copy(root: Path, path: Path) -> None:
    made = root / path.relative_to("/")
    made.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(path, made)


def _libraries(program: Path) -> set[Path]:
    said = subprocess.run(["ldd", str(program)], capture_output=True, text=True, timeout=60).stdout
    return {Path(path) for path in re.findall(r"(/\S+)", said) if Path(path).is_file()}


def _copy_package(site: Path, name: str) -> None:
    for file in importlib.metadata.distribution(name).files or ():
        source = Path(str(file.locate()))
        if ".." in file.parts or file.suffix == ".pyc" or not source.is_file():
            continue
        (site / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, site / file)


def _put(site: Path, name: str, version: str) -> None:
    (site / name).mkdir(parents=True)
    (site / name / "__init__.py").write_text(f"__version__ = {version!r}\n")
    about = site / f"{name}-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (about / "RECORD").write_text("")
    (about / "INSTALLER").write_text("test\n")


def _until_answers(url: str, server: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + 60
    while True:
        assert server.poll() is None, "the registry has ended"
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except OSError:
            assert time.monotonic() < end, "the registry does not answer"
            time.sleep(0.05)


def recording(directory: Path, name: str, answers: Mapping[str, str]) -> None:
    """Puts a program there that writes its words to `NAME.said` and answers some of its commands."""
    cases = "".join(f"'{first}') {script};;\n" for first, script in answers.items())
    text = f'#!/bin/sh\nprintf "%s\\n" "$*" >>{directory}/{name}.said\ncase "$1" in\n{cases}esac\n'
    (directory / name).write_text(text)
    (directory / name).chmod(0o755)
