"""How an API server is shown who asks: what the kubeconfig holds, or what a plug-in that it names gives out."""

from __future__ import annotations

import base64
import binascii
import datetime
import re
import threading
from collections.abc import Mapping
from typing import Any

from ...errors import ConfigError
from .kubeconfig import Access

INSTALL = "pip install 'accel-launch[kubernetes]'"
# So long before its end a credential is no longer shown.
_EARLY_S = 10.0
_LONGEST = 300

Certificate = tuple[bytes, bytes]


class Credentials:
    """Of one access. Nothing is read or run before the first question. May be used from several threads.

    A plug-in may ask somebody to sign in, and a token that is renewed may be good for one renewal: so one thread does
    either, and the others wait for what it gets.
    """

    def __init__(self, access: Access, target: str) -> None:
        self._access = access
        self._where = f"target {target}: {access.who}"
        self._lock = threading.RLock()
        self._given: Mapping[str, Any] | None = None  # what an exec plug-in gave
        self._until: float | None = None
        self._configured: Any = None

    def authorization(self) -> str | None:
        """The header; None where a certificate, or nothing, is shown. Raises ConfigError."""
        user = self._access.user
        if "exec" in user:
            token = self.given().get("token")
            return f"Bearer {token}" if token else None
        if "auth-provider" in user:
            return self._provided()
        if user.get("tokenFile"):
            # Read each time: what keeps it writes a new one before the old one ends.
            return f"Bearer {_read(user['tokenFile'], self._where).decode('utf-8', 'replace').strip()}"
        if user.get("token"):
            return f"Bearer {user['token']}"
        if user.get("username") is not None:
            pair = f"{user['username']}:{user.get('password') or ''}"
            return f"Basic {base64.b64encode(pair.encode()).decode()}"
        return None

    def certificate(self) -> Certificate | None:
        """The client's certificate and its key, PEM. Raises ConfigError."""
        if "exec" in self._access.user:
            given = self.given()
            if given.get("clientCertificateData") and given.get("clientKeyData"):
                return str(given["clientCertificateData"]).encode(), str(given["clientKeyData"]).encode()
        certificate = data_of(self._access.user, "client-certificate", self._where)
        key = data_of(self._access.user, "client-key", self._where)
        if (certificate is None) != (key is None):
            lacking = "client-key" if key is None else "client-certificate"
            raise ConfigError(f"{self._where}: the user has no {lacking}, which belongs to what it has")
        return None if certificate is None or key is None else (certificate, key)

    def renew(self, refused: Mapping[str, Any]) -> bool:
        """After a 401: whether there may be others now. They are asked for with the next question.

        `refused` is what `given` was when the question was asked: what another thread has got since then stays.
        """
        with self._lock:
            if self._given is refused:
                self._given = None
        return "exec" in self._access.user or bool(self._access.user.get("tokenFile"))

    def given(self) -> Mapping[str, Any]:
        """What the plug-in gave, while it counts; empty where there is none. Raises ConfigError.

        https://kubernetes.io/docs/reference/access-authn-authz/authentication/#client-go-credential-plugins
        """
        if "exec" not in self._access.user:
            return {}
        with self._lock:
            return self._plugged()

    def _plugged(self) -> Mapping[str, Any]:
        now = datetime.datetime.now(datetime.timezone.utc).timestamp()
        if self._given is not None and (self._until is None or now < self._until - _EARLY_S):
            return self._given
        given = self._run()
        if not given.get("token") and not (given.get("clientCertificateData") and given.get("clientKeyData")):
            raise ConfigError(f"{self._where}: {self._plugin} gave neither a token nor a certificate with its key")
        until = given.get("expirationTimestamp")
        try:
            self._until = None if until is None else _timestamp(str(until))
        except ValueError:
            raise ConfigError(f"{self._where}: {self._plugin}: expirationTimestamp {until!r} is no time") from None
        if self._until is not None and self._until <= now:
            raise ConfigError(
                f"{self._where}: {self._plugin} gave credentials that expired at {until}: sign in again with it"
            )
        self._given = given
        return given

    @property
    def _plugin(self) -> str:
        return f"exec plug-in {(self._access.user.get('exec') or {}).get('command')}"

    def _run(self) -> Mapping[str, Any]:
        try:
            from kubernetes.config import exec_provider, kube_config
            from kubernetes.config.config_exception import ConfigException
        except ImportError:
            raise missing(self._where) from None
        wanted = self._access.user["exec"]
        if not isinstance(wanted, Mapping):
            raise ConfigError(f"{self._where}: exec must say a command and an apiVersion")
        # Typed by nobody.
        provider: Any = exec_provider.ExecProvider
        node: Any = kube_config.ConfigNode
        cluster = node("cluster", dict(self._access.cluster))
        try:
            found = provider(node("exec", dict(wanted)), self._access.directory, cluster).run()
        except FileNotFoundError:
            hint = " ".join(str(wanted.get("installHint") or "").split())
            raise ConfigError(
                f"{self._where}: {self._plugin}: there is no such command{hint and f': {hint}'}"
            ) from None
        except (ConfigException, OSError, KeyError, TypeError) as error:
            text = " ".join(str(error).removeprefix("exec: ").split())
            raise ConfigError(f"{self._where}: {self._plugin}: {text[:_LONGEST]}") from None
        return found if isinstance(found, Mapping) else {}

    def _provided(self) -> str | None:
        """The header of an auth-provider (OIDC, GCP), whose tokens the official package renews and keeps."""
        name = (self._access.user["auth-provider"] or {}).get("name")
        if name not in ("oidc", "gcp"):
            raise ConfigError(f"{self._where}: auth-provider {name!r} is not known any more: use its exec plug-in")
        try:
            from kubernetes.client.configuration import Configuration
            from kubernetes.config import kube_config
        except ImportError:
            raise missing(self._where) from None
        try:
            with self._lock:
                if self._configured is None:
                    made = Configuration()
                    load: Any = kube_config.load_kube_config
                    load(self._access.files, self._access.context, made)
                    self._configured = made
                header: str | None = self._configured.get_api_key_with_prefix("BearerToken")
        except Exception as error:  # whatever the provider's libraries raise
            text = " ".join(str(error).split())[:_LONGEST]
            raise ConfigError(f"{self._where}: auth-provider {name}: {text or type(error).__name__}") from None
        if not header:
            raise ConfigError(f"{self._where}: auth-provider {name} gave no token: sign in again")
        return header


def missing(where: str) -> ConfigError:
    return ConfigError(f"{where}: the package kubernetes is not installed: {INSTALL}")


def data_of(values: Mapping[str, Any], key: str, where: str) -> bytes | None:
    """What `KEY-data` holds, or the file that `KEY` names. Raises ConfigError."""
    text, path = values.get(f"{key}-data"), values.get(key)
    if text:
        try:
            return base64.b64decode(str(text), validate=False)
        except (binascii.Error, ValueError):
            raise ConfigError(f"{where}: {key}-data is not base64") from None
    return _read(str(path), f"{where}: {key}") if path else None


def _read(path: str, where: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise ConfigError(f"{where}: {path}: {(error.strerror or str(error)).lower()}") from None


def _timestamp(text: str) -> float:
    """RFC 3339, of which Python 3.10 reads neither a Z nor every fraction of a second."""
    plain = re.sub(r"\.\d+", "", text).upper().replace("Z", "+00:00")
    return datetime.datetime.fromisoformat(plain).timestamp()
