"""Refusals of an API server as errors with one-line messages.

The parsed texts are those of https://github.com/kubernetes/apimachinery/blob/master/pkg/apis/meta/v1/types.go
(`Status`), the authorizer and the admission plug-ins.
"""

from __future__ import annotations

import http.client
import json
import re
import socket
import ssl
from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import CredentialsExpired, SchedulerError, Unreachable
from ...printable import without_password


class ApiError(SchedulerError):
    """The API server refused the request. `api_reason`: Kubernetes' (`AlreadyExists`), not a `Reason` of ours."""

    def __init__(self, message: str, *, api_reason: str = "") -> None:
        super().__init__(message)
        self.api_reason = api_reason


class Unauthorized(ApiError, CredentialsExpired):
    """401: the credentials are not accepted."""


class Forbidden(ApiError):
    """403: a Role lacks a permission, or a quota or an admission plug-in refuses."""


class NotFound(ApiError):
    """404: the object, its namespace or its kind does not exist."""


class Conflict(ApiError):
    """409: the object exists already, or has changed meanwhile."""


class ResourceExpired(ApiError):
    """410: the requested resource version or continuation is too old; list again."""


class Invalid(ApiError):
    """400 and 422: the API server does not accept the object."""


_KINDS: Mapping[int, type[ApiError]] = {
    400: Invalid, 401: Unauthorized, 403: Forbidden, 404: NotFound, 409: Conflict, 410: ResourceExpired, 422: Invalid
}  # fmt: skip
_CANNOT = re.compile(
    r'User "(?P<who>[^"]*)" cannot (?P<verb>\S+) (?:resource "(?P<resource>[^"]*)" in API group "(?P<group>[^"]*)"'
    r'|path "(?P<path>[^"]*)")(?: in the namespace "(?P<namespace>[^"]*)")?'
)
_ACCOUNT = "system:serviceaccount:"
# A phrase in the message of a refusal -> its meaning; webhooks choose the status.
_REFUSALS: tuple[tuple[str, str], ...] = (
    ("exceeded quota", "the namespace's quota does not allow it"),
    ("failed quota", "the namespace's quota requires --cpus and --memory"),
    ("violates PodSecurity", "the namespace's Pod Security Standard refuses it"),
    ("denied the request", "an admission webhook refuses it"),
    ("is being terminated", "the namespace is being deleted"),
)
_LONGEST = 600
_WARNING = re.compile(r'\d{3} \S+ "((?:[^"\\]|\\.)*)"')


def error_of(status: int, body: bytes, *, subject: str, user: str) -> ApiError:
    """Return the error of a response. `subject`: the start of its message; `user`: the owner of the credentials."""
    reply = _document(body)
    message = " ".join(str(reply.get("message") or body.decode("utf-8", "replace") or "no reason given").split())
    details = reply.get("details") or {}
    kind = _KINDS.get(status, ApiError)
    text = _message_of(status, message, details, user)
    line = _short(" ".join(f"{subject}: {text}".split()))
    return kind(line, api_reason=str(reply.get("reason") or ""))


def _document(body: bytes) -> dict[str, Any]:
    """Return the JSON object in a response; empty if there is none."""
    try:
        value = json.loads(body)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def warnings_of(headers: Sequence[str]) -> list[str]:
    """Return the texts of `Warning` headers (RFC 7234): UTF-8 that was decoded as Latin-1."""
    texts = [re.sub(r"\\(.)", r"\1", quoted) for header in headers for quoted in _WARNING.findall(header)]
    return [_short(text.encode("latin-1", "replace").decode("utf-8", "replace")) for text in texts]


def _message_of(status: int, message: str, details: Mapping[str, Any], user: str) -> str:
    if status == 401:
        return f"the credentials of {user} are not accepted: expired, or not of this cluster ({message})"
    for phrase, explanation in _REFUSALS if status in (400, 403, 422) else ():
        if phrase in message:
            return f"{explanation}: {message}"
    if status == 403:
        return _forbidden(message, user)
    causes = [cause for cause in details.get("causes") or [] if isinstance(cause, Mapping) and cause.get("field")]
    if status == 422 and causes:
        problems = [f"{cause['field']}: {cause.get('message', '')}" for cause in causes]
        name = " ".join(str(details[key]) for key in ("kind", "name") if details.get(key))
        return f"the API server rejects {name or 'the object'}: {'; '.join(problems)}"
    if status in (400, 422):
        return f"the API server rejects it: {message}"
    if status == 404 and details.get("kind") == "namespaces":
        return f"namespace {details.get('name')} not found (namespace: in accel.yaml)"
    return message


def _forbidden(message: str, user: str) -> str:
    match = _CANNOT.search(message)
    if match is None:
        return f"the API server denies this to {user}: {message}"
    group = f".{match['group']}" if match["group"] else ""
    resource = f"{match['resource']}{group}" if match["resource"] else str(match["path"])
    scope = f" in namespace {match['namespace']}" if match["namespace"] else ""
    account = match["who"].removeprefix(_ACCOUNT)
    who = f"user {account}" if account == match["who"] else f"service account {account.replace(':', '/')}"
    return f"{who} may not {match['verb']} {resource}{scope}: no Role grants this"


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def unreachable(error: Exception, subject: str, server: str, proxy: str | None) -> Unreachable:
    """Return an error with one line about a failed connection to the API server."""
    via = f" through proxy {without_password(proxy)}" if proxy else ""
    return Unreachable(f"{subject}: the API server {server} cannot be reached{via}: {_root_cause(error)}")


def _root_cause(error: BaseException) -> str:
    """Return the innermost cause, which is the most specific."""
    import urllib3.exceptions as kinds

    chain: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in chain:
        chain.append(current)
        context = None if current.__suppress_context__ else current.__context__
        named = (getattr(current, name, None) for name in ("reason", "original_error"))
        causes = (*named, current.__cause__, context)
        current = next((cause for cause in causes if isinstance(cause, BaseException)), None)
    for cause in chain:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return _untrusted(cause)
        if isinstance(cause, socket.gaierror):
            return f"its name cannot be resolved ({cause.strerror})"
        if isinstance(cause, (kinds.TimeoutError, TimeoutError)) and not isinstance(cause, kinds.NewConnectionError):
            return "no answer in time"
        if isinstance(cause, (kinds.ProtocolError, http.client.IncompleteRead, ConnectionResetError, BrokenPipeError)):
            return "the connection was cut off"
    os_errors = [cause for cause in chain if isinstance(cause, OSError) and cause.strerror]
    text = (os_errors[-1].strerror if os_errors else None) or str(chain[-1]) or type(chain[-1]).__name__
    return " ".join(str(text).split()).lower() if os_errors else " ".join(str(text).split())


def _untrusted(error: ssl.SSLCertVerificationError) -> str:
    reason = error.verify_message.rstrip(".")
    advice = "certificate-authority in the kubeconfig did not sign it, or is missing"
    if "hostname" in reason.lower() or "ip address" in reason.lower():
        advice = "tls-server-name in the kubeconfig is another name"
    elif "expired" in reason.lower():
        advice = "renew it on the server"
    return f"its certificate is not trusted: {reason} ({advice})"
