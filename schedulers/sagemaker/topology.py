"""A container's place among those of its SageMaker training job."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from typing import Any

from ..errors import SpecError
from ..topology import Topology

_ROOT = "/opt/ml"
_FILE = "input/config/resourceconfig.json"
_SOURCE = "SageMaker"


def from_container(env: Mapping[str, str]) -> Topology | None:
    """Return the topology of a training job's container, or None if this is no such container.

    It is read from the variables of SageMaker's toolkit (SM_HOSTS, SM_CURRENT_HOST), else from the file that
    every container has. SageMaker lists the hosts in no order: node 0 is the one with the lowest number. Raises
    SpecError, which names the variable or the file, for invalid values.

    https://docs.aws.amazon.com/sagemaker/latest/dg/your-algorithms-training-algo-running-container.html
    """
    host_info = _from_toolkit(env) or _from_file(env)
    if host_info is None:
        return None
    subject, current_host, raw_hosts = host_info
    if not (isinstance(raw_hosts, list) and raw_hosts and all(isinstance(host, str) and host for host in raw_hosts)):
        raise SpecError(f"{subject}: the hosts must be a list of names, not {raw_hosts!r}")
    hosts = sorted(set(raw_hosts), key=_numbered)
    if current_host not in hosts:
        raise SpecError(f"{subject}: this host, {current_host!r}, is not one of {', '.join(hosts)}")
    if len(hosts) == 1:
        return Topology(node_rank=0, nodes=1, master="127.0.0.1")
    return Topology(
        node_rank=hosts.index(current_host), nodes=len(hosts), master=hosts[0], names=tuple(hosts), source=_SOURCE
    )


def _from_toolkit(env: Mapping[str, str]) -> tuple[str, Any, Any] | None:
    if "SM_HOSTS" not in env:
        return None
    try:
        return "environment: SM_HOSTS", env.get("SM_CURRENT_HOST"), json.loads(env["SM_HOSTS"])
    except ValueError:
        raise SpecError(f"environment: SM_HOSTS must be a list in JSON, not {env['SM_HOSTS']!r}") from None


def _from_file(env: Mapping[str, str]) -> tuple[str, Any, Any] | None:
    path = os.path.join(env.get("ACCEL_SM_ROOT") or _ROOT, _FILE)
    try:
        with open(path, encoding="utf-8") as file:
            config = json.load(file)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise SpecError(f"{path} cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise SpecError(f"{path} must hold names and values, not {config!r}")
    return path, config.get("current_host"), config.get("hosts")


def _numbered(name: str) -> list[tuple[int, str]]:
    """Return a sort key that puts algo-10 after algo-2."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name) if part]
