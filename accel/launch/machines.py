"""The machines of a run and this one's rank, from flags or the scheduler that started this process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from accel.world.environment import one_of_several
from schedulers.errors import SpecError
from schedulers.topology import Topology

from . import watchdog
from .devices import Devices
from .errors import LaunchConfigError

_REMEDY = "leave the machine flags out"


@dataclass(frozen=True, kw_only=True)
class NodeLayout:
    """The machines of a run, and this machine's rank among them.

    nodes, max_nodes: the fewest and most machines; they differ in an elastic world.
    topology:         the scheduler's topology; that of a single node if flags decide.
    """

    nodes: int
    max_nodes: int
    rank: int
    address: str
    topology: Topology


def node_layout(options: Mapping[str, Any], env: Mapping[str, str]) -> NodeLayout:
    """Return this machine's layout.

    Raises LaunchConfigError for invalid flags, flags that contradict the scheduler, and invalid scheduler variables.
    """
    topology = _topology(env, explicit=options["num_machines"] is not None)
    low, high, rank, address = _machines(options, topology)
    _check_agreement(options, topology, low, high)
    if options["num_machines"] is not None:
        topology = Topology(node_rank=0, nodes=1, master=address)  # flags take precedence
    return NodeLayout(nodes=low, max_nodes=high, rank=rank, address=address, topology=topology)


# Options that torchrun also reads from variables (PET_MAX_RESTARTS and so on), except those that are read here too:
# https://docs.pytorch.org/docs/stable/elastic/run.html and torch/distributed/{run,argparse_util}.py.
_PET_REFUSED = """
duplicate_stderr_filters duplicate_stdout_filters event_log_handler local_addr local_ranks_filter log_dir logs_specs
max_restarts module monitor_interval no_python numa_binding rdzv_backend rdzv_conf rdzv_id redirects role run_path
shutdown_timeout signals_to_handle standalone start_method tee virtual_local_rank
""".split()


def operator_processes(options: Mapping[str, Any], env: Mapping[str, str], devices: Devices, nodes: int) -> int | None:
    """Return the number of processes per node in PET_NPROC_PER_NODE, as torchrun reads it; None for one per device.

    Flags for the machines take precedence over the operator's number of nodes, ranks and rendezvous. Raises
    LaunchConfigError for an invalid number, one that ``--num_processes`` contradicts, and for other variables of
    torchrun (``PET_…``) whose option is not given.
    """
    is_own_job = "ACCEL_JOB_ID" in env  # whose options say all
    has_machines, total = options["num_machines"] is not None, options["num_processes"]
    if is_own_job or watchdog.LAUNCH_ID in env:
        return None
    for option in _PET_REFUSED:
        name, value = f"PET_{option.upper()}", env.get(f"PET_{option.upper()}")
        # The training operator always sets the backend, with the address, in an elastic PyTorchJob:
        # https://github.com/kubeflow/training-operator/blob/release-1.9/pkg/controller.v1/pytorch/elastic.go
        is_replaced = has_machines and option == "rdzv_backend"
        if value and not is_replaced and str(options.get(option)) != value:
            remedy = f"write --{option} {value}" if option in options else "unset it"
            raise LaunchConfigError(f"environment variable {name}={value} is torchrun's, and is not read: {remedy}")
    if has_machines and total is not None:
        return None
    machines = env.get("PET_NNODES") or "1"
    if machines != "1" and "PET_NODE_RANK" not in env and not has_machines:
        raise LaunchConfigError(
            f"environment variable PET_NNODES={machines}, without PET_NODE_RANK: unset it, or write "
            f"--num_machines {machines} --machine_rank RANK --main_process_ip HOST"
        )
    text = env.get("PET_NPROC_PER_NODE") or "auto"
    if text == "gpu" and devices.kind == "cpu":
        raise LaunchConfigError("environment variable PET_NPROC_PER_NODE=gpu: this machine shows no GPU")
    if text in ("auto", "gpu"):
        return None
    if text != "cpu" and not (text.isascii() and text.isdigit() and int(text) > 0):
        raise LaunchConfigError(
            f"environment variable PET_NPROC_PER_NODE={text!r}: it must be a number from 1 on, auto, gpu or cpu"
        )
    processes = devices.cpus if text == "cpu" else int(text)
    if total not in (None, processes * nodes):
        raise LaunchConfigError(
            f"--num_processes {total} contradicts PET_NPROC_PER_NODE, which requests {processes} on each node, "
            f"{processes * nodes} in all: leave one of them out"
        )
    return processes


def check_spread(total: int | None, machines: int) -> None:
    """Raise LaunchConfigError unless the number of machines divides the number of processes."""
    if total == 0:
        raise LaunchConfigError("--num_processes 0: it must be 1 or more")
    if total is not None and total % machines:
        raise LaunchConfigError(f"--num_processes {total} is not divisible by the number of machines ({machines})")


def _topology(env: Mapping[str, str], *, explicit: bool) -> Topology:
    """Return the scheduler's topology. With `explicit`, ignore one that is invalid: flags replace it."""
    single_node = Topology(node_rank=0, nodes=1, master="127.0.0.1")
    if watchdog.LAUNCH_ID in env:  # a launch inside a rank uses this machine only
        return single_node
    try:
        topology = Topology.from_scheduler(env)
    except SpecError as error:
        if explicit:
            return single_node
        raise LaunchConfigError(str(error)) from None
    if topology is None and not explicit:
        _refuse_ranks(env)
    return topology or single_node


def _refuse_ranks(env: Mapping[str, str]) -> None:
    """Raise LaunchConfigError for the variables of one rank of several, which an operator sets, or of several tasks."""
    if env.get("WORLD_SIZE", "1") != "1" and {"RANK", "MASTER_ADDR"} <= env.keys() and "LOCAL_RANK" not in env:
        port = " --main_process_port $MASTER_PORT" if env.get("MASTER_PORT") else ""
        raise LaunchConfigError(
            f"RANK={env['RANK']} and WORLD_SIZE={env['WORLD_SIZE']} are set, as by an operator for one machine of "
            "several: write `accel launch --num_machines $WORLD_SIZE --machine_rank $RANK --main_process_ip "
            f"$MASTER_ADDR{port} …`, or unset them"
        )
    task = one_of_several(env)
    if task is not None and not {"WORLD_SIZE", "RANK"} & env.keys():
        raise LaunchConfigError(
            f"{task}: this launcher is one of several tasks, each of which would be a world of its own: start one on "
            "each node, with --num_machines, --machine_rank and --main_process_ip, or export WORLD_SIZE=1 for "
            "separate worlds"
        )


def _machines(options: Mapping[str, Any], topology: Topology) -> tuple[int, int, int, str]:
    """Return the fewest and most machines, this one's rank and machine 0's address, from flags or the scheduler."""
    if options["num_machines"] is None:
        if options["machine_rank"] is not None and topology.nodes == 1:
            raise LaunchConfigError(f"--machine_rank {options['machine_rank']} needs --num_machines")
        return topology.nodes, topology.nodes, topology.node_rank, options["main_process_ip"] or topology.master
    low, high = machine_range(options["num_machines"])
    check_spread(options["num_processes"], low)
    if high > 1 and options["rdzv_backend"] == "static":
        if low != high:
            raise LaunchConfigError("--num_machines MIN:MAX needs --rdzv_backend c10d; static worlds have one size")
        missing = [name for name in ("machine_rank", "main_process_ip") if options[name] is None]
        if missing:
            flags = " and ".join(f"--{name}" for name in missing)
            raise LaunchConfigError(f"--num_machines {options['num_machines']}: {high} machines need {flags}")
    if (options["machine_rank"] or 0) >= high:
        raise LaunchConfigError(f"--machine_rank {options['machine_rank']} is not one of 0 … {high - 1}")
    if high > 1 and options["main_process_ip"] is None:
        raise LaunchConfigError(f"--num_machines {options['num_machines']}: {high} machines need --main_process_ip")
    return low, high, options["machine_rank"] or 0, options["main_process_ip"] or "127.0.0.1"


def _check_agreement(options: Mapping[str, Any], topology: Topology, low: int, high: int) -> None:
    """Raise LaunchConfigError if flags contradict the scheduler. They may add to it."""
    if not topology.source or topology.nodes == 1:
        return
    if not low <= topology.nodes <= high:
        hint = (
            " (for separate runs, start each in a step of its own: srun --nodes=1)"
            if "Slurm" in topology.source
            else ""
        )
        raise LaunchConfigError(
            f"--num_machines {options['num_machines']} contradicts {topology.source}, "
            f"which has {topology.nodes} nodes: {_REMEDY}{hint}"
        )
    rank, address = options["machine_rank"], options["main_process_ip"]
    if rank is not None and rank != topology.node_rank:
        raise LaunchConfigError(
            f"--machine_rank {rank} contradicts {topology.source}, where this is node {topology.node_rank}: {_REMEDY}"
        )
    if address in topology.names[1:]:  # an unknown name may be another address of node 0
        raise LaunchConfigError(
            f"--main_process_ip {address} contradicts {topology.source}, "
            f"where that is node {topology.names.index(address)} and node 0 is {topology.names[0]}: {_REMEDY}"
        )


def machine_range(text: str) -> tuple[int, int]:
    """Return the fewest and most machines in `num_machines`. Raises LaunchConfigError."""
    low, _, high = str(text).partition(":")
    if (low + high).isascii() and low.isdigit() and (high or low).isdigit() and 1 <= int(low) <= int(high or low):
        return int(low), int(high or low)
    raise LaunchConfigError(f"--num_machines {text!r}: it must be a number from 1 on, or MIN:MAX")
