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

from ...errors import SchedulerError, Unreachable
from ...printable import without_password


class ApiError(SchedulerError):
    """The API server refused the request.

    status:  the HTTP status.
    word:    Kubernetes' own word for it (`AlreadyExists`).
    details: its information about the object.
    """

    def __init__(
        self, message: str, *, status: int = 0, word: str = "", details: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.word = word
        self.details = details or {}


class Unauthorized(ApiError):
    """401: the credentials are not accepted."""


class Forbidden(ApiError):
    """403: a Role lacks a permission, or a quota or an admission plug-in refuses."""


class NotFound(ApiError):
    """404: the object, its namespace, or its kind does not exist."""


class Conflict(ApiError):
    """409: the object exists already, or has changed meanwhile."""


class Gone(ApiError):
    """410: the requested resource version or continuation is too old; list again."""


class Invalid(ApiError):
    """400 and 422: the API server does not accept the object."""


_KINDS: Mapping[int, type[ApiError]] = {
    400: Invalid, 401: Unauthorized, 403: Forbidden, 404: NotFound, 409: Conflict, 410: Gone, 422: Invalid
}  # fmt: skip
_CANNOT = re.compile(
    r'User "(?P<who>[^"]*)" cannot (?P<verb>\S+) (?:resource "(?P<resource>[^"]*)" in API group "(?P<group>[^"]*)"'
    r'|path "(?P<path>[^"]*)")(?: in the namespace "(?P<namespace>[^"]*)")?'
)
_ACCOUNT = "system:serviceaccount:"
# What the message of a refusal holds -> what it means; webhooks choose its status.
_REFUSALS: tuple[tuple[str, str], ...] = (
    ("exceeded quota", "the namespace's quota does not allow it"),
    ("failed quota", "the namespace's quota wants to know --cpus and --memory"),
    ("violates PodSecurity", "the namespace's Pod Security Standard refuses it"),
    ("denied the request", "an admission webhook refuses it"),
    ("is being terminated", "the namespace is being deleted"),
)
_LONGEST = 600
_WARNING = re.compile(r'\d{3} \S+ "((?:[^"\\]|\\.)*)"')


def error_of(status: int, body: bytes, *, where: str, who: str) -> ApiError:
    """Return the error of a response. `where`: the start of its message; `who`: whose credentials were used."""
    said = document(body)
    message = " ".join(str(said.get("message") or body.decode("utf-8", "replace") or "no word of why").split())
    details = said.get("details") or {}
    kind = _KINDS.get(status, ApiError)
    text = _words(status, message, details, who)
    line = _short(" ".join(f"{where}: {text}".split()))
    return kind(line, status=status, word=str(said.get("reason") or ""), details=details)


def document(body: bytes) -> dict[str, Any]:
    """Return the JSON object in a response; empty if there is none."""
    try:
        found = json.loads(body)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def warnings_of(headers: Sequence[str]) -> list[str]:
    """Return the texts of `Warning` headers (RFC 7234), which are UTF-8 and were decoded as Latin-1."""
    texts = [re.sub(r"\\(.)", r"\1", found) for header in headers for found in _WARNING.findall(header)]
    return [_short(text.encode("latin-1", "replace").decode("utf-8", "replace")) for text in texts]


def _words(status: int, message: str, details: Mapping[str, Any], who: str) -> str:
    if status == 401:
        return f"the credentials of {who} are not accepted: expired, or not of this cluster ({message})"
    for words, meaning in _REFUSALS if status in (400, 403, 422) else ():
        if words in message:
            return f"{meaning}: {message}"
    if status == 403:
        return _forbidden(message, who)
    causes = [cause for cause in details.get("causes") or [] if isinstance(cause, Mapping) and cause.get("field")]
    if status == 422 and causes:
        found = [f"{cause['field']}: {cause.get('message', '')}" for cause in causes]
        name = " ".join(str(details[key]) for key in ("kind", "name") if details.get(key))
        return f"the API server does not take {name or 'the object'}: {'; '.join(found)}"
    if status in (400, 422):
        return f"the API server does not take it: {message}"
    if status == 404 and details.get("kind") == "namespaces":
        return f"there is no namespace {details.get('name')} (namespace: in accel.yaml)"
    return message


def _forbidden(message: str, who: str) -> str:
    lacks = _CANNOT.search(message)
    if lacks is None:
        return f"the API server refuses it to {who}: {message}"
    group = f".{lacks['group']}" if lacks["group"] else ""
    what = f"{lacks['resource']}{group}" if lacks["resource"] else str(lacks["path"])
    place = f" in namespace {lacks['namespace']}" if lacks["namespace"] else ""
    return f"{_named(lacks['who'])} may not {lacks['verb']} {what}{place}: no Role of it allows that"


def _named(user: str) -> str:
    if user.startswith(_ACCOUNT):
        return f"service account {user.removeprefix(_ACCOUNT).replace(':', '/')}"
    return f"user {user}"


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def unreachable(error: Exception, where: str, server: str, proxy: str | None) -> Unreachable:
    """Return an error with one line about a failed connection to the API server."""
    way = f" through proxy {without_password(proxy)}" if proxy else ""
    return Unreachable(f"{where}: the API server {server} cannot be reached{way}: {_why(error)}")


def _why(error: BaseException) -> str:
    """Return the innermost cause, which is the most specific."""
    import urllib3.exceptions as kinds

    seen: list[BaseException] = []
    at: BaseException | None = error
    while at is not None and at not in seen:
        seen.append(at)
        around = None if at.__suppress_context__ else at.__context__
        inner = (getattr(at, "reason", None), getattr(at, "original_error", None), at.__cause__, around)
        at = next((each for each in inner if isinstance(each, BaseException)), None)
    for each in seen:
        if isinstance(each, ssl.SSLCertVerificationError):
            return _untrusted(each)
        if isinstance(each, socket.gaierror):
            return f"its name is not known ({each.strerror})"
        slow = isinstance(each, (kinds.TimeoutError, TimeoutError)) and not isinstance(each, kinds.NewConnectionError)
        if slow:
            return "no answer in time"
        if isinstance(each, (kinds.ProtocolError, http.client.IncompleteRead, ConnectionResetError, BrokenPipeError)):
            return "the connection was cut off"
    told = [each for each in seen if isinstance(each, OSError) and each.strerror]
    text = (told[-1].strerror if told else None) or str(seen[-1]) or type(seen[-1]).__name__
    return " ".join(str(text).split()).lower() if told else " ".join(str(text).split())


def _untrusted(error: ssl.SSLCertVerificationError) -> str:
    why = error.verify_message.rstrip(".")
    advice = "certificate-authority in the kubeconfig is not the one that signed it, or is lacking"
    if "hostname" in why.lower() or "ip address" in why.lower():
        advice = "tls-server-name in the kubeconfig says another name"
    elif "expired" in why.lower():
        advice = "it must be renewed there"
    return f"its certificate is not trusted: {why} ({advice})"
