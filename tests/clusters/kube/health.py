"""What has gone wrong in a cluster by itself: a test that needs it would wait in vain, and not say for what."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ..netns import ClusterError, call
from .client import Client, Refused
from .control import Daemon
from .nodes import Node

_API = "kubernetes.default.svc.cluster.local"
_FINISHED = ("Succeeded", "Failed")


def faults(client: Client, daemons: Iterable[Daemon], nodes: Mapping[str, Node]) -> list[str]:
    """One line for each: a program that has ended, a node that takes no pods, names or pods that are not reached."""
    found = [f"{daemon.name} has ended" for daemon in daemons if not daemon.alive()]
    try:
        found += _of_nodes(client.call("GET", "/api/v1/nodes")["items"])
    except (Refused, OSError) as error:
        found.append(f"the API server does not answer: {error}")
    for node in nodes.values():
        found += _of_network(node)
    return found


def unfinished(client: Client) -> list[str]:
    """A line for each pod that has not ended: where it is, and what it waits for."""
    try:
        pods = client.call("GET", "/api/v1/pods")["items"]
    except (Refused, OSError):
        return []
    return [_line(pod) for pod in pods if pod["status"].get("phase") not in _FINISHED]


def _of_nodes(items: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    for item in items:
        name = item["metadata"]["name"]
        for taint in item["spec"].get("taints") or []:
            yield f"{name} is tainted: {taint['key']}"
        for condition in item["status"].get("conditions") or []:
            if condition["status"] != str(condition["type"] == "Ready"):
                yield f"{name}: {condition['type']} is {condition['status']}: {condition.get('message')}"


def _of_network(node: Node) -> Iterator[str]:
    try:
        here = call("ip", "route", "get", node.pods.partition("/")[0])
        if node.address not in here:
            yield f"the pods of {node.name} are not routed to from this computer: {here}"
    except ClusterError as error:
        yield f"the pods of {node.name} are not routed to from this computer: {error}"
    try:
        node.machine.run("getent", "hosts", _API)
    except ClusterError as error:
        yield f"on {node.name} nobody answers who {_API} is: {error}"
    try:
        for pods, address in node.others.items():
            there = node.machine.run("ip", "route", "get", pods.partition("/")[0])
            if address not in there:
                yield f"the pods at {address} are not routed to from {node.name}: {there}"
    except ClusterError as error:
        yield f"{node.name}: {error}"


def _line(pod: Mapping[str, Any]) -> str:
    metadata, status = pod["metadata"], pod["status"]
    states = [container.get("state") for container in status.get("containerStatuses") or []]
    waits = [each.get("message") for each in status.get("conditions") or [] if each["status"] == "False"]
    where = f"{metadata['namespace']}/{metadata['name']} on {pod['spec'].get('nodeName')} at {status.get('podIP')}"
    going = " is deleted" if "deletionTimestamp" in metadata else ""
    return f"{where}: {status.get('phase')}{going} {states} {[each for each in waits if each]}"
