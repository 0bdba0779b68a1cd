"""A node's place in a Slurm step, from srun's variables. For batch scripts written by hand."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ..errors import SpecError
from ..topology import Topology, number

# The same formula as in slurm/batch/slurm.py, which also checks that the port is free.
FIRST_PORT, PORTS = 20000, 12000
_PORTS_BETWEEN_STEPS = 101
# Ids of steps that srun did not create: batch scripts, interactive shells, processes outside any step
# (slurm.h: SLURM_BATCH_SCRIPT and its neighbours; before 20.11 the two highest numbers).
_SPECIAL_STEPS = 0xFFFF_FFF0
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?\Z")
_PART = re.compile(r"[^\[\],\s]+|\[[^\[\]]*\]")
_RANGE = re.compile(r"(?P<first>\d+)(?:-(?P<last>\d+))?\Z")
_LIMIT = 1 << 17


def from_slurm(env: Mapping[str, str]) -> Topology:
    """Return the topology of this process's step; one node outside any step of a one-node job.

    Every node must have one task, which starts the ranks there. Raises SpecError, which names the variable, if it
    has more, if the job has several nodes and this is no step, and for invalid values.
    """
    job, step = number(env, "SLURM_JOB_ID"), _step(env)
    attempt = number(env, "SLURM_RESTART_COUNT", default=0)
    alone = Topology(node_rank=0, nodes=1, master="127.0.0.1", attempt=attempt)
    if step is None:
        _check_one_node(env, job)
        return alone
    nodes = number(env, "SLURM_STEP_NUM_NODES" if "SLURM_STEP_NUM_NODES" in env else "SLURM_NNODES")
    # With SLURM_PTY_PORT, a shell for a person: `srun --ntasks-per-node=4 --pty bash` is how people ask for four cores.
    if nodes != 1 or "SLURM_PTY_PORT" not in env:
        _check_one_task_a_node(env, nodes)
    if nodes == 1:
        return alone
    names = _names(env, nodes)
    node_name = env.get("SLURMD_NODENAME")
    # If the step has a part of the job's nodes, the position in its list counts: node 0 must be the first name.
    rank = names.index(node_name) if node_name in names else number(env, "SLURM_NODEID")
    return Topology(
        node_rank=rank,
        nodes=nodes,
        master=names[0],
        attempt=attempt,
        port=port_of(job, step),
        names=tuple(names),
        source=f"step {step} of Slurm job {job}",
    )


def port_of(job: int, step: int) -> int:
    """Return a port of node 0 that steps of different jobs on one node rarely share."""
    return FIRST_PORT + (job + step * _PORTS_BETWEEN_STEPS) % PORTS


def _step(env: Mapping[str, str]) -> int | None:
    if "SLURM_STEP_ID" not in env:
        return None
    step = number(env, "SLURM_STEP_ID")
    return None if step >= _SPECIAL_STEPS else step


def _check_one_node(env: Mapping[str, str], job: int) -> None:
    nodes = number(env, "SLURM_JOB_NUM_NODES", default=number(env, "SLURM_NNODES", default=1))
    if nodes > 1:
        raise SpecError(
            f"Slurm job {job} has {nodes} nodes (SLURM_JOB_NUM_NODES), and this process is in no step: write "
            "`srun --ntasks-per-node=1 accel launch …` to use them all, or --num_machines 1 for this node alone"
        )


def _check_one_task_a_node(env: Mapping[str, str], nodes: int) -> None:
    text = env.get("SLURM_STEP_TASKS_PER_NODE")
    if text is None:
        tasks = number(env, "SLURM_STEP_NUM_TASKS", default=number(env, "SLURM_NTASKS", default=nodes))
        peak, setting = -(-tasks // nodes), f"SLURM_STEP_NUM_TASKS={tasks} on {nodes} nodes"
    else:
        matches = [_TASKS.match(part) for part in text.split(",")]
        counts = [int(match[1]) for match in matches if match is not None]
        if len(counts) != len(matches):
            raise SpecError(f"environment: SLURM_STEP_TASKS_PER_NODE must be like 1(x2), not {text!r}")
        peak, setting = max(counts), f"SLURM_STEP_TASKS_PER_NODE={text}"
    if peak > 1:
        raise SpecError(
            f"{setting}: accel launch starts all ranks of a node and must itself be started once per node: write "
            f"`srun --ntasks-per-node=1 accel launch --num_processes {peak * nodes} …` (and --cpus-per-task for cores)"
        )


def _names(env: Mapping[str, str], nodes: int) -> list[str]:
    text = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST", "")
    if not text:
        raise SpecError(f"Slurm says that this step has {nodes} nodes, but SLURM_STEP_NODELIST is not set")
    names = expand(text)
    if len(names) != nodes:
        raise SpecError(f"SLURM_STEP_NODELIST={text} names {len(names)} nodes, and SLURM_STEP_NUM_NODES is {nodes}")
    return names


# Slurm's compressed node lists, `gpu[01-03,07],login`, without `scontrol`, which containers lack.


def expand(text: str) -> list[str]:
    """Return the names in `text`, in its order, as `scontrol show hostnames` prints them.

    Numbers keep the width of the first of their range. Several brackets in one name vary as digits do, the last
    one fastest. Raises SpecError for an invalid list.
    """
    names = [name for token in _split_commas(text) for name in _names_of_token(token, text)]
    if len(names) > _LIMIT:
        raise SpecError(f"node list {text[:60]!r}… has {len(names)} nodes, more than {_LIMIT}")
    return names


def _split_commas(text: str) -> list[str]:
    """Split the text at the commas outside brackets."""
    tokens, depth, start = [], 0, 0
    for index, char in enumerate(text):
        depth += (char == "[") - (char == "]")
        if depth not in (0, 1):
            raise _parse_error(text, "its brackets do not match")
        if char == "," and not depth:
            tokens.append(text[start:index])
            start = index + 1
    tokens.append(text[start:])
    if depth:
        raise _parse_error(text, "its brackets do not match")
    if not all(tokens):
        raise _parse_error(text, "a name is missing")
    return tokens


def _names_of_token(token: str, text: str) -> list[str]:
    parts = _PART.findall(token)
    if "".join(parts) != token:
        raise _parse_error(text, f"{token!r} is not a name")
    names = [""]
    for part in parts:
        values = _values(part, text) if part.startswith("[") else [part]
        if len(names) * len(values) > _LIMIT:
            raise _parse_error(text, "it has too many nodes")
        names = [name + value for name in names for value in values]
    return names


def _values(bracket: str, text: str) -> list[str]:
    values: list[str] = []
    for item in bracket[1:-1].split(","):
        match = _RANGE.match(item)
        if match is None:
            raise _parse_error(text, f"{item!r} is not a range of numbers")
        first, last = match["first"], match["last"] or match["first"]
        if int(last) < int(first) or int(last) - int(first) > _LIMIT:
            raise _parse_error(text, f"{item!r} is not a range of numbers")
        values += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return values


def _parse_error(text: str, problem: str) -> SpecError:
    return SpecError(f"not a list of Slurm's nodes: {text[:80]!r}: {problem}")
