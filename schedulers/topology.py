"""`Topology`: which node this is, how many there are and where node 0 answers. Read on the node, by `accel launch`."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .errors import SpecError


@dataclass(frozen=True, kw_only=True)
class Topology:
    """The one thing that all targets must agree on. The rest of the world (ranks, ports, logs) follows from it.

    node_rank: 0 … nodes - 1.
    master:    a name or address of node 0 that every node can reach.
    attempt:   how often the backend has started the whole gang before.
    port:      of node 0, where the scheduler has chosen one.
    names:     of the nodes, by rank, where they are known.
    source:    where this was found, for people, when it is a place that says how many nodes there are and who is who.
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
        """The variables from which `from_env` reads this topology back, but for its source."""
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
        """The topology that the scheduler gave this node; one node when no rule's marker is set.

        The first rule of `RULES` whose marker is in `env`, and that knows its place by it, decides. Raises SpecError,
        naming the variable, when one that the rule needs is missing or is not a number: a wrong world is never guessed.
        """
        return cls.placed(env) or cls(node_rank=0, nodes=1, master="127.0.0.1")

    @classmethod
    def placed(cls, env: Mapping[str, str]) -> Topology | None:
        """What `from_env` gives where a scheduler has placed this process; else None. Raises SpecError."""
        found = (_rule(rule)(env) for marker, rule in RULES.items() if marker in env)
        return next((topology for topology in found if topology is not None), None)


def from_accel(env: Mapping[str, str]) -> Topology:
    """The topology in the variables that `Topology.environment` gives. Raises SpecError."""
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


# The variable that marks a scheduler -> what reads its environment, which is imported only where the variable is set.
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
    """The whole number that variable `name` holds. Raises SpecError."""
    text = env.get(name)
    if text is None:
        if default is None:
            raise SpecError(f"the environment says this is one node of several, but {name} is not set")
        return default
    try:
        return int(text)
    except ValueError:
        raise SpecError(f"environment: {name} must be a whole number, not {text!r}") from None
