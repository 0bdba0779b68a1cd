"""`Topology`: a node's rank, the number of nodes and the address of node 0, as `accel launch` reads them there."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .errors import SpecError


@dataclass(frozen=True, kw_only=True)
class Topology:
    """A node's place in its job: the one thing that all targets must agree on. Ranks, ports and logs follow from it.

    node_rank: 0 … nodes - 1.
    master:    a name or address of node 0 that every node can reach.
    attempt:   number of earlier starts of the whole gang by the backend.
    port:      of node 0, if the scheduler has chosen one.
    names:     of the nodes, by rank, if they are known.
    source:    for messages: the place that defines the node count and the ranks; empty if no place does.
    """

    node_rank: int
    nodes: int
    master: str
    attempt: int = 0
    port: int | None = None
    names: tuple[str, ...] = ()
    source: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.node_rank < self.nodes:
            raise SpecError(f"node rank {self.node_rank} is not one of 0 … {self.nodes - 1}")
        if not self.master:
            raise SpecError("no address for node 0")

    def environment(self) -> dict[str, str]:
        """Return the variables from which `from_env` reads this topology back, except for its source."""
        return {
            "ACCEL_NODE_RANK": str(self.node_rank),
            "ACCEL_NODES": str(self.nodes),
            "ACCEL_MASTER": self.master,
            "ACCEL_ATTEMPT": str(self.attempt),
            **({} if self.port is None else {"ACCEL_PORT": str(self.port)}),
            **({"ACCEL_NODE_NAMES": ",".join(self.names)} if self.names else {}),
        }

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Topology:
        """Return the topology that the scheduler gave this node; one node if no rule's marker is set.

        The first rule of `RULES` whose marker is in `env` and that returns a topology wins. Raises SpecError, naming
        the variable, if one that the rule needs is missing or is not a number: a wrong world is never guessed.
        """
        return cls.from_scheduler(env) or cls(node_rank=0, nodes=1, master="127.0.0.1")

    @classmethod
    def from_scheduler(cls, env: Mapping[str, str]) -> Topology | None:
        """Return the topology if a scheduler has placed this process, else None. Raises SpecError."""
        candidates = (_rule(rule)(env) for marker, rule in RULES.items() if marker in env)
        return next((topology for topology in candidates if topology is not None), None)


def from_accel(env: Mapping[str, str]) -> Topology:
    """Read the topology from the variables that `Topology.environment` returns. Raises SpecError."""
    nodes = number(env, "ACCEL_NODES")
    return Topology(
        node_rank=number(env, "ACCEL_NODE_RANK"),
        nodes=nodes,
        master=env.get("ACCEL_MASTER", ""),
        attempt=number(env, "ACCEL_ATTEMPT", default=0),
        port=number(env, "ACCEL_PORT") if "ACCEL_PORT" in env else None,
        names=tuple(name for name in env.get("ACCEL_NODE_NAMES", "").split(",") if name),
        source="the job's environment (ACCEL_NODES)" if nodes > 1 else "",
    )


# Variable that marks a scheduler -> the function that reads its environment, imported only if the variable is set.
RULES: Mapping[str, str] = {
    "ACCEL_NODE_RANK": "schedulers.topology:from_accel",
    "SLURM_JOB_ID": "schedulers.slurm.topology:from_slurm",
    "PET_NODE_RANK": "schedulers.kubernetes.topology:from_operator",
    "PET_RDZV_ENDPOINT": "schedulers.kubernetes.topology:from_operator",
    "JOB_COMPLETION_INDEX": "schedulers.kubernetes.topology:from_index",
    "SM_HOSTS": "schedulers.sagemaker.topology:from_container",
    "TRAINING_JOB_NAME": "schedulers.sagemaker.topology:from_container",
    "TPU_WORKER_HOSTNAMES": "schedulers.tpu.topology:from_worker",
}


def _rule(reference: str) -> Callable[[Mapping[str, str]], Topology | None]:
    module, _, name = reference.partition(":")
    rule: Callable[[Mapping[str, str]], Topology | None] = getattr(importlib.import_module(module), name)
    return rule


def number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Return the integer that variable `name` holds, or `default`. Raises SpecError."""
    text = env.get(name)
    if text is None:
        if default is None:
            raise SpecError(f"the environment describes one of several nodes, but {name} is not set")
        return default
    try:
        return int(text)
    except ValueError:
        raise SpecError(f"environment: {name} must be a whole number, not {text!r}") from None
