"""Releases in a cluster, by Helm 3 and Helm 4: installed, upgraded, tested, uninstalled."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Protocol

import pytest

from tests.marks import long

from . import helms
from .helms import Values

_WAIT_S = 240


class Failed(Exception):
    """Helm could not do it; what it said."""


class Releases(Protocol):
    """One version of Helm, on one namespace of a cluster."""

    def install(self, name: str, chart: Path, values: Values) -> None: ...

    def upgrade(self, name: str, chart: Path, values: Values) -> None: ...

    def test(self, name: str) -> None:
        """Runs the chart's own tests. Raises Failed."""

    def uninstall(self, name: str) -> None: ...

    def revisions(self, name: str) -> int | None:
        """Of a release that there is."""


class Releases3:
    """By the command of Helm 3."""

    def __init__(self, kubeconfig: Path, namespace: str) -> None:
        self._program = str(helms.helm3())
        self._kubeconfig, self._namespace = str(kubeconfig), namespace

    def install(self, name: str, chart: Path, values: Values) -> None:
        self._run("install", name, str(chart), values=values)

    def upgrade(self, name: str, chart: Path, values: Values) -> None:
        self._run("upgrade", name, str(chart), values=values)

    def test(self, name: str) -> None:
        self._run("test", name, "--timeout", f"{_WAIT_S}s")

    def uninstall(self, name: str) -> None:
        self._run("uninstall", name)

    def revisions(self, name: str) -> int | None:
        listed: list[dict[str, Any]] = json.loads(self._run("list", "--all", "--output", "json"))
        return next((int(each["revision"]) for each in listed if each["name"] == name), None)

    def _run(self, *words: str, values: Values | None = None) -> str:
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("HELM_", "KUBE"))}
        with tempfile.TemporaryDirectory() as home:
            given = []
            if values is not None:
                Path(home, "values.json").write_text(json.dumps(values))
                given = ["--values", f"{home}/values.json"]
            where = ["--kubeconfig", self._kubeconfig, "--namespace", self._namespace]
            done = subprocess.run(
                [self._program, *words, *given, *where], env={**kept, "HOME": home}, capture_output=True, text=True,
                timeout=_WAIT_S + 60,
            )  # fmt: skip
        if done.returncode:
            raise Failed(done.stderr + done.stdout)
        return done.stdout


class Releases4:
    """By the library of Helm 4."""

    def __init__(self, kubeconfig: Path, namespace: str) -> None:
        helms.check_helm4()
        import helm_python

        self._config = helm_python.Config(kubeconfig_path=kubeconfig, namespace=namespace)
        self._error = helm_python.HelmError

    def install(self, name: str, chart: Path, values: Values) -> None:
        self._config.install(chart, name, dict(values), timeout=_WAIT_S)

    def upgrade(self, name: str, chart: Path, values: Values) -> None:
        self._config.upgrade(chart, name, dict(values), timeout=_WAIT_S)

    def test(self, name: str) -> None:
        try:
            self._config.test(name, timeout=_WAIT_S)
        except self._error as error:
            raise Failed(str(error)) from None

    def uninstall(self, name: str) -> None:
        self._config.uninstall(name, timeout=_WAIT_S)

    def revisions(self, name: str) -> int | None:
        found = [each for each in self._config.list(all_states=True) if each["name"] == name]
        return int(found[0]["revision"]) if found else None


def releases(version: str, kubeconfig: Path, namespace: str) -> Releases:
    """Skips the test for want of that version."""
    if version == "helm3":
        return Releases3(kubeconfig, namespace)
    return Releases4(kubeconfig, namespace)


both = pytest.mark.parametrize("version", ["helm4", *long("helm3")])
