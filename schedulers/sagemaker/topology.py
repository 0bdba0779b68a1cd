"""A container's place among those of its SageMaker training job."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Mapping

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
    host_info = _from_toolkit(env) if "SM_HOSTS" in env else _from_file(env)
    if host_info is None:
        return None
    subject, current_host, names = host_info
    if not (isinstance(names, list) and names and all(isinstance(name, str) and name for name in names)):
        raise SpecError(f"{subject}: the hosts must be a list of names in JSON, not {names!r}")
    hosts = sorted(set(names), key=_numbered)
    if current_host not in hosts:
        raise SpecError(f"{subject}: this host, {current_host!r}, is not one of {', '.join(hosts)}")
    if len(hosts) == 1:
        return Topology(node_rank=0, nodes=1, master="127.0.0.1")
    return Topology(
        node_rank=hosts.index(current_host), nodes=len(hosts), master=hosts[0], names=tuple(hosts), source=_SOURCE
    )


def _from_toolkit(env: Mapping[str, str]) -> tuple[str, object, object]:
    hosts: object = env["SM_HOSTS"]
    with contextlib.suppress(ValueError):
        hosts = json.loads(env["SM_HOSTS"])
    return "environment: SM_HOSTS", env.get("SM_CURRENT_HOST"), hosts


def _from_file(env: Mapping[str, str]) -> tuple[str, object, object] | None:
    path = os.path.join(env.get("ACCEL_SM_ROOT") or _ROOT, _FILE)
    try:
        with open(path, encoding="utf-8") as file:
            config = dict(json.load(file))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise SpecError(f"{path} cannot be read: {error}") from None
    return path, config.get("current_host"), config.get("hosts")


def _numbered(name: str) -> list[tuple[int, str]]:
    """Return a sort key that puts algo-10 after algo-2."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name) if part]
