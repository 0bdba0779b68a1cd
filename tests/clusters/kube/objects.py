"""Objects of a cluster of the tests, of whatever kind: made, looked for, counted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..netns import ClusterError
from .client import Client, Object, Refused, path_of

# What a cluster itself puts into a namespace, or tells of it.
_TOLD = ("events",)
_ALWAYS = {"serviceaccounts": "default", "secrets": "default-token-", "configmaps": "kube-root-ca.crt"}


def apply(client: Client, document: Mapping[str, Any], namespace: str) -> Object:
    """Makes the object, or puts it in place of the one that is there. Raises Refused."""
    body = {**document, "metadata": dict(document["metadata"])}
    plural, inside = _plural(client, body["apiVersion"], body["kind"])
    if inside:
        body["metadata"].setdefault("namespace", namespace)
    try:
        return client.call("POST", path_of(body, plural, named=False), body)
    except Refused as error:
        if error.reason != "AlreadyExists":
            raise
    path = path_of(body, plural)
    body["metadata"]["resourceVersion"] = client.call("GET", path)["metadata"]["resourceVersion"]
    return client.call("PUT", path, body)


def create(client: Client, path: str, body: Object) -> None:
    """Nothing when it is there."""
    try:
        client.call("POST", path, body)
    except Refused as error:
        if error.reason != "AlreadyExists":
            raise


def quietly(client: Client, method: str, path: str, body: object = None) -> None:
    """Nothing when it is gone."""
    try:
        client.call(method, path, body)
    except Refused as error:
        if error.status not in (404, 409):
            raise


def exists(client: Client, path: str) -> bool:
    try:
        client.call("GET", path)
    except Refused as error:
        if error.status == 404:
            return False
        raise
    return True


def inside(client: Client, namespace: str) -> list[str]:
    """All that is in a namespace, as `pods/name`."""
    found = set()
    for top in _served(client):
        for plural in _listed(client, top):
            for item in client.call("GET", f"{top}/namespaces/{namespace}/{plural}")["items"] or []:
                name = item["metadata"]["name"]
                if not (plural in _ALWAYS and name.startswith(_ALWAYS[plural])):
                    found.add(f"{plural}/{name}")
    return sorted(found)


def _plural(client: Client, api_version: str, kind: str) -> tuple[str, bool]:
    """What the server calls objects of this kind, and whether they are in namespaces."""
    top = f"/api/{api_version}" if "/" not in api_version else f"/apis/{api_version}"
    for each in client.call("GET", top)["resources"]:
        if each["kind"] == kind and "/" not in each["name"]:
            return each["name"], each["namespaced"]
    raise ClusterError(f"the cluster has no {kind} of {api_version}")


def _served(client: Client) -> list[str]:
    groups = client.call("GET", "/apis")["groups"]
    return ["/api/v1", *(f"/apis/{group['preferredVersion']['groupVersion']}" for group in groups)]


def _listed(client: Client, top: str) -> Iterator[str]:
    for each in client.call("GET", top)["resources"]:
        if each["namespaced"] and "/" not in each["name"] and "list" in each["verbs"] and each["name"] not in _TOLD:
            yield each["name"]
