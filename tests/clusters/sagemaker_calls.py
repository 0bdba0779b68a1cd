"""What a request to the endpoint is: service, operation, region and caller; and error replies in its protocol."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any
from urllib.parse import parse_qsl, unquote
from xml.sax.saxutils import escape

from .sagemaker_validation import Refused, service_model

_SCOPE = re.compile(r"Credential=([^/]+)/\d+/([^/]+)/([^/]+)/aws4_request")
_ERROR = '<?xml version="1.0"?><{0}><Error><Code>{1}</Code><Message>{2}</Message></Error><RequestId>-</RequestId></{0}>'
_S3_ERROR = '<?xml version="1.0"?><Error><Code>{0}</Code><Message>{1}</Message></Error>'


@dataclass(frozen=True)
class Call:
    """One request. `caller` is its access key: `launcher`, `test`, or `execution-role`: containers and service."""

    service: str
    operation: str
    request: Mapping[str, Any]
    caller: str
    region: str


def read_call(environ: Mapping[str, Any], body: bytes) -> Call:
    """The call that a signed request makes. `body` may be empty for S3."""
    scope = _SCOPE.search(environ.get("HTTP_AUTHORIZATION", ""))
    caller, region, service = scope.groups() if scope else ("", "us-east-1", "")
    target = environ.get("HTTP_X_AMZ_TARGET", "")
    if target:
        return Call(service, target.rpartition(".")[2], _json(body), caller, region)
    if service == "s3":
        return Call(service, *_s3(environ), caller, region)
    request = dict(parse_qsl(body.decode(errors="replace"), keep_blank_values=True))
    return Call(service, request.get("Action", environ["PATH_INFO"]), request, caller, region)


def _json(body: bytes) -> dict[str, Any]:
    try:
        request = json.loads(body or b"{}")
    except ValueError:
        request = None
    return request if isinstance(request, dict) else {}


def _s3(environ: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Find the operation by method, path, query and headers: of all that fit, the one that needs most."""
    bucket, _, key = unquote(environ["PATH_INFO"]).lstrip("/").partition("/")
    query = dict(parse_qsl(environ.get("QUERY_STRING", ""), keep_blank_values=True))
    request = {**query, **({"Bucket": bucket} if bucket else {}), **({"Key": key} if key else {})}
    given = {*query.items(), *((name, None) for name in query)}
    given |= {(name[5:].replace("_", "-").lower(), None) for name in environ if name.startswith("HTTP_")}
    path = "/{Bucket}/{Key+}" if key else "/{Bucket}" if bucket else "/"
    fitting = [(len(needs), name) for name, needs in _s3_operations(environ["REQUEST_METHOD"], path) if needs <= given]
    return max(fitting, default=(0, f"{environ['REQUEST_METHOD']} {path}"), key=lambda pair: pair[0])[1], request


@cache
def _s3_operations(method: str, path: str) -> list[tuple[str, frozenset[tuple[str, str | None]]]]:
    """Operations and what each needs in query and headers. ListObjects comes last: others need as little."""
    operations = []
    model = service_model("s3")
    for name in model.operation_names:
        operation = model.operation_model(name)
        uri, _, query = operation.http["requestUri"].partition("?")
        if (operation.http["method"], uri) != (method, path):
            continue
        needs: set[tuple[str, str | None]] = {
            (key, value or None) for key, value in parse_qsl(query, keep_blank_values=True)
        }
        shape = operation.input_shape
        for member in shape.required_members if shape is not None else ():
            place = shape.members[member].serialization
            if place.get("location") in ("querystring", "header"):
                needs.add((place["name"].lower() if place["location"] == "header" else place["name"], None))
        operations.append((name, frozenset(needs)))
    return operations


def error_reply(call: Call, method: str, error: Refused) -> tuple[str, bytes]:
    """Content type and body, in the protocol of the call's service."""
    if call.service == "s3":
        text = _S3_ERROR.format(error.code, escape(error.message))
        return "application/xml", b"" if method == "HEAD" else text.encode()
    if call.service in ("iam", "sts"):
        return "text/xml", _ERROR.format("ErrorResponse", error.code, escape(error.message)).encode()
    return "application/x-amz-json-1.1", json.dumps({"__type": error.code, "message": error.message}).encode()
