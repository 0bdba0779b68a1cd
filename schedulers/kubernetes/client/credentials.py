"""Credentials for an API server: the official client's loader, and what it lacks.

It lacks: exec plug-ins whose failure is an error, token files that are read for every request, impersonation, a
proxy's credentials, and key files that are deleted with the process.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import datetime
import os
import re
import shutil
import ssl
import sys
import tempfile
import threading
import weakref
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from ...errors import ConfigError, CredentialsExpired
from ...printable import without_password
from .kubeconfig import Access, package

_EARLY_S = 10.0  # a credential is renewed so long before it expires
_PLUGIN_S = 300.0  # the user may have to sign in
_LONGEST = 300
# Runs a plug-in with a timeout in seconds.
_LIMITED = """
import subprocess, sys
try:
    sys.exit(subprocess.run(sys.argv[2:], timeout=float(sys.argv[1])).returncode)
except subprocess.TimeoutExpired:
    sys.exit(f"it timed out after {sys.argv[1]} s")
except OSError as error:
    sys.exit(error.strerror)
except KeyboardInterrupt:
    sys.exit(130)
"""
_PROVIDERS = ("oidc", "gcp")
_CERTIFICATE, _PAIR = ("clientCertificateData", "clientKeyData"), ("client-certificate", "client-key")
_KEEPALIVE = {"idle": 30, "interval": 10, "count": 3}  # seconds: a vanished server is noticed within a minute


class Credentials:
    """The credentials of one access. Reads and runs nothing before the first request. Thread-safe.

    One thread at a time renews them: a plug-in may prompt for a sign-in, and a refresh token may be valid only once.
    """

    def __init__(self, access: Access, target: str) -> None:
        self._access = access
        self._label = f"target {target}: {access.user_label}"
        self._target = target
        self._lock = threading.RLock()
        self._plugin_status: Mapping[str, Any] | None = None  # an exec plug-in's result
        self._expires_at: float | None = None
        self._cached_configuration: tuple[Any, Any] | None = None  # a configuration, and its certificate from a plug-in

    def configuration(self) -> Any:
        """Return the client's configuration, a new one for a new plug-in certificate. Raises ConfigError."""
        with self._lock:
            credential = self.plugin_status()
            certificate = tuple(credential.get(key) for key in _CERTIFICATE)
            if self._cached_configuration is None or self._cached_configuration[1] != certificate:
                self._cached_configuration = self._new_configuration(certificate), certificate
            return self._cached_configuration[0]

    def headers(self) -> list[tuple[str, str]]:
        """Return the headers that authenticate a request. Raises ConfigError."""
        authorization = self._authorization()
        headers = [] if authorization is None else [("authorization", authorization.strip())]
        return [*headers, *_impersonation(self._access.user)]

    def renew(self, rejected: Mapping[str, Any]) -> bool:
        """Discard credentials after a 401. Return True if the next request may get new ones.

        `rejected`: the result of `plugin_status` for the failed request. Newer credentials stay.
        """
        with self._lock:
            if self._plugin_status is rejected:
                self._plugin_status = None
        return "exec" in self._access.user or bool(self._access.user.get("tokenFile"))

    def plugin_status(self) -> Mapping[str, Any]:
        """Return the plug-in's valid credentials; empty without a plug-in. Raises ConfigError.

        https://kubernetes.io/docs/reference/access-authn-authz/authentication/#client-go-credential-plugins
        """
        if "exec" not in self._access.user:
            return {}
        with self._lock:
            now = datetime.datetime.now(datetime.timezone.utc).timestamp()
            if self._plugin_status is None or (self._expires_at is not None and now >= self._expires_at - _EARLY_S):
                self._plugin_status, self._expires_at = self._run_plugin(now)
            return self._plugin_status

    def _authorization(self) -> str | None:
        user = self._access.user
        if "exec" in user:
            token = self.plugin_status().get("token")
            return f"Bearer {token}" if token else None
        if user.get("tokenFile"):
            return f"Bearer {_read(user['tokenFile'], self._label).decode('utf-8', 'replace').strip()}"
        configuration = self.configuration()
        with self._lock, self._provider():
            header: str | None = configuration.get_api_key_with_prefix("BearerToken")  # renewed if needed
        if header is None and "auth-provider" in user:
            name = user["auth-provider"]["name"]
            raise CredentialsExpired(f"{self._label}: auth-provider {name} returned no token: sign in again")
        return header

    def _new_configuration(self, certificate: tuple[Any, ...]) -> Any:
        library = package(self._label)
        configuration = library.Configuration()
        cluster = {**self._access.cluster, "server": self._access.server}
        self._as_file(cluster, "certificate-authority", configuration)
        document = {
            "contexts": [{"name": "this", "context": {"cluster": "this", "user": "this"}}],
            "clusters": [{"name": "this", "cluster": cluster}],
            "users": [{"name": "this", "user": self._user(certificate, configuration)}],
        }
        with self._provider():
            loader = library.KubeConfigLoader(document, active_context="this", config_persister=self._access.save)
            loader.load_and_set(configuration)
        self._check(configuration)
        self._connect(configuration)
        return configuration

    def _user(self, certificate: tuple[Any, ...], configuration: Any) -> dict[str, Any]:
        """Return the user for the client's loader. Raises ConfigError for settings that it would ignore."""
        user = {key: value for key, value in self._access.user.items() if key not in ("exec", "tokenFile")}
        if all(certificate):
            for key, data in zip(_PAIR, certificate, strict=True):
                user[f"{key}-data"] = base64.b64encode(str(data).encode()).decode()
        for key in _PAIR:
            self._as_file(user, key, configuration)
        for present, missing in (_PAIR, _PAIR[::-1]):
            if present in user and missing not in user:
                raise ConfigError(f"{self._label}: the user has {present} and no {missing}")
        if user.get("username") is not None:  # the client encodes Latin-1
            user |= {key: str(user.get(key) or "").encode().decode("latin-1") for key in ("username", "password")}
        provider = (user.get("auth-provider") or {}).get("name")
        if "auth-provider" in user and provider not in _PROVIDERS:
            raise ConfigError(f"{self._label}: auth-provider {provider!r} is no longer supported: use its exec plug-in")
        return user

    def _as_file(self, values: dict[str, Any], key: str, configuration: Any) -> None:
        """Replace inline data by a file, or check the file. Raises ConfigError."""
        text, path = values.pop(f"{key}-data", None), values.pop(key, None)
        if text:
            try:
                data = base64.b64decode(str(text), validate=False)
            except (binascii.Error, ValueError):
                raise ConfigError(f"{self._label}: {key}-data is not base64") from None
            values[key] = _private_file(data, configuration)
        elif path:
            _read(str(path), f"{self._label}: {key}")
            values[key] = str(path)

    def _check(self, configuration: Any) -> None:
        """Raise ConfigError for files that are not certificates: a connection error would not name them."""
        subject = f"target {self._target}"
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        try:
            if configuration.ssl_ca_cert and configuration.verify_ssl:
                context.load_verify_locations(configuration.ssl_ca_cert)
        except (ssl.SSLError, OSError, ValueError):
            raise ConfigError(f"{subject}: certificate-authority is not a certificate (PEM)") from None
        try:
            if configuration.cert_file:
                context.load_cert_chain(configuration.cert_file, configuration.key_file, password=lambda: "")
        except (ssl.SSLError, OSError, ValueError):
            raise ConfigError(f"{subject}: client-certificate and client-key do not match, or are not PEM") from None

    def _connect(self, configuration: Any) -> None:
        """Configure connections, through a proxy or none. Raises ConfigError for an invalid proxy."""
        import urllib3
        from kubernetes.client.rest import should_bypass_proxies
        from kubernetes.utils.keepalive import tcp_keepalive_socket_options

        configuration.retries, configuration.connection_pool_maxsize = False, 64
        configuration.socket_options = tcp_keepalive_socket_options(**_KEEPALIVE)
        if not configuration.verify_ssl:
            urllib3.disable_warnings(urllib3.exceptions.InsecureRequestWarning)  # the kubeconfig asks for this
        explicit = bool(self._access.cluster.get("proxy-url"))
        if not configuration.proxy or (
            not explicit and should_bypass_proxies(configuration.host, configuration.no_proxy or "")
        ):
            configuration.proxy = None
            return
        configuration.no_proxy = None
        proxy = configuration.proxy = (
            configuration.proxy if explicit or "://" in configuration.proxy else f"http://{configuration.proxy}"
        )
        subject = f"target {self._target}: proxy-url"
        parts = urlsplit(proxy)
        if parts.scheme.startswith("socks"):
            if find_spec("socks") is None:
                raise ConfigError(f"{subject} {without_password(proxy)}: a SOCKS proxy needs pip install PySocks")
        elif parts.scheme not in ("http", "https"):
            raise ConfigError(f"{subject} must be like http://host:port, not {without_password(proxy)!r}")
        elif parts.username is not None:
            userinfo = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            configuration.proxy_headers = urllib3.make_headers(proxy_basic_auth=userinfo)
        if parts.scheme == "https":  # the system's authorities verify the proxy, not the cluster's
            configuration.proxy_ssl_context = ssl.create_default_context()

    def _run_plugin(self, now: float) -> tuple[Mapping[str, Any], float | None]:
        """Run the plug-in. Return its credentials and their expiry time."""
        credential = self._plugin_credential()
        if not credential.get("token") and not all(credential.get(key) for key in _CERTIFICATE):
            raise ConfigError(f"{self._label}: {self._plugin} returned neither a token nor a certificate with its key")
        expiration = credential.get("expirationTimestamp")
        try:
            expires_at = None if expiration is None else _timestamp(str(expiration))
        except ValueError:
            raise ConfigError(f"{self._label}: {self._plugin}: {expiration!r} is not a time") from None
        if expires_at is not None and expires_at <= now:
            raise CredentialsExpired(
                f"{self._label}: {self._plugin} returned credentials that expired at {expiration}: sign in again"
            )
        return credential, expires_at

    @property
    def _plugin(self) -> str:
        return f"exec plug-in {(self._access.user.get('exec') or {}).get('command')}"

    def _plugin_credential(self) -> Mapping[str, Any]:
        library = package(self._label)
        exec_config = self._access.user["exec"]
        if not isinstance(exec_config, Mapping):
            raise ConfigError(f"{self._label}: exec needs a command and an apiVersion")
        node = library.ConfigNode
        try:
            cluster = node("cluster", dict(self._access.cluster))
            provider = library.ExecProvider(node("exec", dict(exec_config)), self._access.directory, cluster)
            command = os.path.join(self._access.directory, exec_config["command"])
            if not (shutil.which(command) or shutil.which(exec_config["command"], path=provider.env.get("PATH"))):
                hint = " ".join(str(exec_config.get("installHint") or "").split())
                raise ConfigError(f"{self._label}: {self._plugin}: command not found{hint and f': {hint}'}")
            provider.args = [sys.executable, "-I", "-S", "-c", _LIMITED, f"{_PLUGIN_S:g}", *provider.args]
            credential = provider.run()
        except (library.ConfigException, OSError, KeyError, TypeError) as error:
            text = " ".join(str(error).removeprefix("exec: ").split())
            raise CredentialsExpired(f"{self._label}: {self._plugin}: {text[:_LONGEST]}") from None
        return credential if isinstance(credential, Mapping) else {}

    @contextlib.contextmanager
    def _provider(self) -> Iterator[None]:
        """Convert errors of an auth-provider (OIDC, GCP), whose tokens the client renews, to one line."""
        try:
            yield
        except Exception as error:  # whatever the provider's libraries raise
            name = (self._access.user.get("auth-provider") or {}).get("name")
            text = " ".join(str(error).split())[:_LONGEST] if name else "is not in the form that the client expects"
            subject = f"auth-provider {name}" if name else "the user"
            raise ConfigError(f"{self._label}: {subject}: {text or type(error).__name__}") from None


def _private_file(data: bytes, owner: object) -> str:
    """Return the path of a file that is removed with its owner; on Linux, at the latest with this process."""
    if hasattr(os, "memfd_create"):
        number = os.memfd_create("accel")
        weakref.finalize(owner, os.close, number)
        with open(number, "wb", closefd=False) as file:
            file.write(data)
        return f"/proc/self/fd/{number}"
    directory = tempfile.mkdtemp(prefix="accel-")
    weakref.finalize(owner, shutil.rmtree, directory, ignore_errors=True)
    path = os.path.join(directory, "key.pem")
    with open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
        file.write(data)
    return path


def _impersonation(user: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield impersonation headers (https://kubernetes.io/docs/reference/access-authn-authz/user-impersonation/)."""
    for key, header in (("as", "Impersonate-User"), ("as-uid", "Impersonate-Uid")):
        if user.get(key):
            yield header, str(user[key])
    for group in user.get("as-groups") or ():
        yield "Impersonate-Group", str(group)
    for key, values in (user.get("as-user-extra") or {}).items():
        yield from ((f"Impersonate-Extra-{quote(str(key).lower(), safe='')}", str(value)) for value in values or ())


def _read(path: str, subject: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise ConfigError(f"{subject}: {path}: {(error.strerror or str(error)).lower()}") from None


def _timestamp(text: str) -> float:
    """Parse RFC 3339. Python 3.10 reads neither a Z nor every fraction of a second."""
    normalized = re.sub(r"\.\d+", "", text).upper().replace("Z", "+00:00")
    return datetime.datetime.fromisoformat(normalized).timestamp()
