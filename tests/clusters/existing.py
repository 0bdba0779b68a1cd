"""A Kubernetes that somebody has: `ACCEL_TEST_KUBECONFIG` names its kubeconfig, `ACCEL_TEST_IMAGE` an image there.

The tests run in namespaces of their own in its current context, as whoever that names, who must be allowed to make
those. The image needs accel, `sh` and, for the training tests, torch. Tests that stop the API server, lose a node or
fill its disk, and those of operators that the cluster does not have, are skipped.
"""

from __future__ import annotations

import copy
import os
import subprocess
import tempfile
import uuid
from pathlib import Path
from typing import Any, NoReturn

import pytest
import yaml

from .kube.client import Client
from .kube.control import ControlPlane
from .kube.nodes import Node
from .kubernetes import Kubernetes
from .netns import ClusterError

_FILES = ("certificate-authority", "client-certificate", "client-key", "tokenFile")


class Existing(Kubernetes):
    """Reached through `kubectl proxy`, which knows every way to prove who one is. To be closed."""

    alone = True

    def __init__(self, kubeconfig: Path) -> None:
        self._config = _absolute(yaml.safe_load(kubeconfig.read_text()), kubeconfig.parent)
        self._directory = tempfile.TemporaryDirectory()
        argv = ["kubectl", "--kubeconfig", str(kubeconfig), "proxy", "--port=0"]
        self._proxy = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert self._proxy.stdout is not None
        said = self._proxy.stdout.readline()  # "Starting to serve on 127.0.0.1:PORT"
        if "Starting to serve on" not in said:
            raise ClusterError(f"kubectl proxy: {said.strip()}")
        self._client = Client(f"http://{said.split()[-1]}", None, "")

    def __exit__(self, *_: object) -> None:
        with self._proxy:  # closes what it prints to
            self._proxy.terminate()
        self._directory.cleanup()

    @property
    def server(self) -> str:
        context = _named(self._config["contexts"], self._config["current-context"])["context"]
        return str(_named(self._config["clusters"], context["cluster"])["cluster"]["server"])

    def kubeconfig(
        self,
        user: str = "admin",
        *,
        service_account: str | None = None,
        namespace: str = "default",
        token: str | None = None,
    ) -> Path:
        """Of whoever the given one names, of a service account, or with a token; skips for another user."""
        if user != "admin":
            _skip("certificates of users")
        config = copy.deepcopy(self._config)
        context = _named(config["contexts"], config["current-context"])["context"]
        context["namespace"] = namespace
        if service_account is not None:
            token = token or self.token(service_account, namespace)
        if token is not None:
            config["users"].append({"name": "test", "user": {"token": token}})
            context["user"] = "test"
        file = Path(self._directory.name, f"{namespace}-{uuid.uuid4().hex[:6]}.yaml")
        file.touch(mode=0o600)
        file.write_text(yaml.safe_dump(config))
        return file

    def token(self, service_account: str, namespace: str, *, expired: bool = False) -> str:
        if expired:
            _skip("expired tokens")
        return super().token(service_account, namespace)

    def start_api(self) -> None:
        """It runs."""

    def check(self) -> None:
        """It is its owner's to look after."""

    def stop_api(self) -> None:
        _skip("an API server that stops")

    def report(self, name: str, capacity: dict[str, str]) -> None:
        _skip("things that a node may be said to have")

    def freeze(self, part: str, frozen: bool = True) -> None:
        _skip(f"a {part} that freezes")

    def compact(self) -> None:
        _skip("a store that forgets")

    def calls_back(self) -> None:
        _skip("an API server that reaches this process")

    def share(self, directory: Path) -> None:
        _skip("directories that its nodes share with this computer")

    def evict(self, namespace: str, pod: str) -> None:
        _skip("a node whose disk is full")

    def lose_node(self, name: str) -> None:
        _skip("a node that is lost")

    @property
    def control(self) -> ControlPlane:  # type: ignore[override]
        _skip("an address of this computer that its pods reach")

    @property
    def nodes(self) -> dict[str, Node]:  # type: ignore[override]
        _skip("nodes that can be broken")

    def diagnose(self) -> str:
        return f"the cluster of ACCEL_TEST_KUBECONFIG ({self.server})"


def _skip(what: str) -> NoReturn:
    pytest.skip(f"needs {what}: only the tests' own cluster has that, and ACCEL_TEST_KUBECONFIG names another")


def given() -> Path | None:
    """The kubeconfig of `ACCEL_TEST_KUBECONFIG`."""
    path = os.environ.get("ACCEL_TEST_KUBECONFIG")
    return Path(path).expanduser() if path else None


def _named(items: list[Any], name: str) -> Any:
    return next(each for each in items if each["name"] == name)


def _absolute(config: Any, directory: Path) -> Any:
    """With the files that it names found from anywhere."""
    for each in (*config["clusters"], *config["users"]):
        inside = each.get("cluster") or each.get("user") or {}
        inside.update({key: str(directory / inside[key]) for key in _FILES if key in inside})
    return config
