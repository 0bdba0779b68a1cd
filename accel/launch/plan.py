"""Plan this node's part of a launch from the flags of `accel launch`: processes, rendezvous and variables."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from accel.settings.contradictions import contradictions
from accel.settings.env_variables import variables
from schedulers.errors import SpecError
from schedulers.hints import check_program
from schedulers.topology import Topology

from . import alias_env, deadline, incarnation, watchdog
from .deadline import Deadline
from .devices import VISIBLE, Devices, available_cpus, find, only_cpu
from .errors import CommandNotFound, LaunchConfigError
from .incarnation import Incarnation
from .limits import check_process_limits
from .machines import NodeLayout, check_spread, node_layout, operator_processes
from .tee import parse
from .termination import TerminationReport
from .tpu import host as tpu_host
from .worker import Program

PORT = 29500


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One node's part of a run, fully resolved."""

    program: Program
    processes: int  # on this node
    nodes: int
    max_nodes: int
    node_rank: int
    address: str
    port: int
    service: str = ""  # a name of node 0 that exists before node 0 does
    own_address: str = ""  # of this node, if its scheduler sets it
    env: Mapping[str, str] = field(default_factory=dict)
    rdzv_backend: Literal["static", "c10d"] = "static"
    rdzv_conf: Mapping[str, str] = field(default_factory=dict)
    run_id: str = "accel"
    role: str = "default"
    max_restarts: int = 0
    incarnation: Incarnation = field(default_factory=Incarnation, compare=False)  # its token is random
    grace_s: float = 30.0
    monitor_interval_s: float = 0.1
    deadline: Deadline | None = None
    log_dir: str | None = None
    tee: str = "0"
    spawn: bool = False
    quiet: bool = False
    node_names: tuple[str, ...] = ()  # by rank, if a scheduler sets them
    source: str = ""  # the scheduler whose variables place this node; empty for flags
    start_message: str = ""  # printed by node 0
    node_0_reports: bool = False  # only node 0 exits with the failure's code, so that no pod is deleted early
    requeued: bool = False  # the scheduler requeues the job after its ranks were warned
    events: str | None = None  # path of the event log, instead of one in log_dir
    job_fds: tuple[int, ...] = ()  # descriptors of the job's locks, held by the launcher and not by ranks
    report: TerminationReport = field(default_factory=TerminationReport, compare=False)

    @property
    def static(self) -> bool:
        """True if the number of machines is fixed.

        One machine needs no elastic agent of torch's, whose stores listen on all interfaces.
        """
        return self.rdzv_backend == "static" or self.max_nodes == 1

    @property
    def first_attempt(self) -> int:
        return self.incarnation.attempt or 0

    @property
    def is_single_process(self) -> bool:
        """True for one process in all, without restarts: it needs no agent."""
        return self.processes == 1 and self.max_nodes == 1 and self.max_restarts == 0 and self.rdzv_backend == "static"


def plan(options: Mapping[str, Any], program: Program, env: Mapping[str, str] = os.environ) -> Launch:
    """Plan this machine's part of the launch from the flags. Raises LaunchConfigError if they are invalid."""
    problem = contradictions(options)
    if problem:
        raise LaunchConfigError(problem)
    _check_program(program)
    parse(options["tee"])
    devices = _devices(options, env)
    layout = node_layout(options, env)
    topology, nodes = layout.topology, layout.nodes
    processes = operator_processes(options, env, devices, nodes) or _per_node(options["num_processes"], nodes, devices)
    _check_gpus(processes, devices, options)
    check_process_limits(processes, options["num_processes"])
    extra = training_variables(options, devices) | thread_variables(
        options["num_cpu_threads_per_process"], processes, devices, env
    )
    if options["compat"] or alias_env.is_requested(env):
        extra |= alias_env.variables(env)
    port = _port(options["main_process_port"], layout.max_nodes, topology)
    start = incarnation.incarnation_from_env(env, topology)
    return Launch(
        program=program, processes=processes, nodes=nodes, max_nodes=layout.max_nodes, node_rank=layout.rank,
        address=layout.address, port=port, **_in_cluster(layout, env), env=extra, rdzv_backend=options["rdzv_backend"],
        rdzv_conf=_pairs(options["rdzv_conf"]), run_id=options["rdzv_id"] or env.get("ACCEL_JOB_ID") or "accel",
        role=options["role"], max_restarts=options["max_restarts"], grace_s=options["shutdown_timeout"],
        monitor_interval_s=options["monitor_interval"], log_dir=options["log_dir"], tee=options["tee"],
        spawn=(options["start_method"] or ("spawn" if sys.platform == "darwin" else "fork")) == "spawn",
        quiet=options["quiet"], incarnation=start, report=TerminationReport(pod=start.pod),
        deadline=deadline.deadline_from_env(env, layout.rank), node_names=topology.names,
        source=topology.source, start_message=_start_message(layout, port, env),
        node_0_reports="ACCEL_NODE_0_REPORTS" in env and watchdog.LAUNCH_ID not in env,
        requeued="ACCEL_REQUEUED" in env and watchdog.LAUNCH_ID not in env,
        events=None if watchdog.LAUNCH_ID in env else env.get("ACCEL_LAUNCH_EVENTS"),
        job_fds=() if watchdog.LAUNCH_ID in env else _job_fds(env),
    )  # fmt: skip


def _job_fds(env: Mapping[str, str]) -> tuple[int, ...]:
    """Return the descriptors of the locks of the job and of its GPUs or processors, which its supervisor opened."""
    numbers = f"{env.get('ACCEL_JOB_LOCK', '')},{env.get('ACCEL_JOB_SLOTS', '')}"
    return tuple(int(number) for number in numbers.split(",") if number)


def _check_program(program: Program) -> None:
    name = program.argv[0]
    if program.entry != "command":
        try:
            check_program(program.entry, name, os.getcwd())
        except SpecError as error:
            raise LaunchConfigError(str(error)) from None
    if program.entry == "command" and shutil.which(name) is None:
        if os.path.dirname(name) and os.path.exists(name):
            raise CommandNotFound(f"{name!r} is not executable: chmod +x", missing=False)
        raise CommandNotFound(f"command {name!r} not found on PATH ({os.environ.get('PATH', '')})", missing=True)


def _in_cluster(layout: NodeLayout, env: Mapping[str, str]) -> dict[str, str]:
    """Return the names by which a job's pods find node 0, unless flags place the machines."""
    if watchdog.LAUNCH_ID in env or not (layout.topology.source or layout.max_nodes > layout.nodes):
        return {}
    return {"service": env.get("ACCEL_SERVICE", ""), "own_address": env.get("ACCEL_POD_IP", "")}


def _start_message(layout: NodeLayout, port: int, env: Mapping[str, str]) -> str:
    """Return the line that node 0 prints; empty if a target reads the events instead.

    In a job every pod prints a line: it marks the beginning of a log (`LAUNCH_LINE` in
    schedulers/kubernetes/logs/cursor.py).
    """
    if "ACCEL_LAUNCH_EVENTS" in env:
        return ""
    if not layout.topology.source or layout.rank != 0:
        in_pod = "ACCEL_JOB_ID" in env and "KUBERNETES_SERVICE_HOST" in env and watchdog.LAUNCH_ID not in env
        return f"started on {os.uname().nodename}" if in_pod else ""
    return f"{layout.nodes} nodes, node 0 at {layout.address}:{port}, from {layout.topology.source}"


def _devices(options: Mapping[str, Any], env: Mapping[str, str]) -> Devices:
    if options["cpu"]:
        return only_cpu()
    if options["tpu"] and options["tpu_runtime"] == "torch_tpu":
        return _tpu_devices(env)
    devices = find(env)
    if not options["gpu_ids"] or options["gpu_ids"] == "all":
        return devices
    if devices.kind not in VISIBLE:
        raise LaunchConfigError(f"--gpu_ids {options['gpu_ids']}: this machine shows no GPU")
    chosen = find({**env, VISIBLE[devices.kind]: options["gpu_ids"]})
    requested = options["gpu_ids"].count(",") + 1
    if chosen.kind != devices.kind or chosen.count != requested:
        raise LaunchConfigError(
            f"--gpu_ids {options['gpu_ids']}: the GPUs here are 0 … {devices.count - 1}, each named once"
        )
    return chosen


def _tpu_devices(env: Mapping[str, str]) -> Devices:
    chips = tpu_host.chips(env)
    if not chips:
        raise LaunchConfigError("--tpu: no TPU found on this machine. If it has one, export TORCH_TPU_DEVICES_PER_HOST")
    return Devices(kind="tpu", ids=tuple(map(str, range(len(chips)))), cpus=available_cpus())


def _port(requested: int | None, machines: int, topology: Topology) -> int:
    if requested is None:
        return 0 if machines == 1 else topology.port or PORT
    if requested > 65535:
        raise LaunchConfigError(f"--main_process_port {requested}: ports end at 65535")
    if requested == 0 and machines > 1:
        raise LaunchConfigError(
            "--main_process_port 0 means any port, which the other machines cannot know: choose one"
        )
    return requested


def _per_node(total: int | None, machines: int, devices: Devices) -> int:
    check_spread(total, machines)
    return devices.count if total is None else total // machines


def _check_gpus(processes: int, devices: Devices, options: Mapping[str, Any]) -> None:
    if options["multi_gpu"] and devices.kind == "cpu":
        raise LaunchConfigError(
            "--multi_gpu: this machine shows no GPU (nvidia-smi lists them); without the flag the CPU is used"
        )
    if devices.kind in (*VISIBLE, "tpu") and processes > devices.count:
        noun = ("TPU device" if devices.kind == "tpu" else "visible GPU") + "s" * (devices.count != 1)
        raise LaunchConfigError(
            f"{processes} processes on this machine and {devices.count} {noun}: every rank needs one of its own; "
            "use fewer, or --cpu"
        )


def _pairs(text: str) -> dict[str, str]:
    pairs = [pair.partition("=") for pair in text.split(",") if pair]
    for key, equals, _ in pairs:
        if not key or not equals:
            raise LaunchConfigError(f"--rdzv_conf takes key=value pairs with commas between them, not {text!r}")
    return {key.strip(): value.strip() for key, _, value in pairs}


# Variables of the ranks.

# Backends for which Accelerate's launcher leaves the choice of the device to the runtime.
_OWN_DEVICE = ("use_deepspeed", "use_fsdp", "use_megatron_lm", "tpu")


def training_variables(options: Mapping[str, Any], devices: Devices) -> dict[str, str]:
    """Return the `ACCELERATE_*` variables that `Accelerator()` reads, accel's and Hugging Face's alike.

    `options` are the values of the settings, by name. A setting that is not given does not set its variable.
    """
    env = variables(options)
    if options["cpu"] or (devices.kind == "cpu" and not any(options[name] for name in _OWN_DEVICE)):
        # Hugging Face's runtime forms no world on a machine without a GPU unless this variable is set.
        env["ACCELERATE_USE_CPU"] = "true"
    if options["gpu_ids"] not in (None, "", "all") and devices.kind in VISIBLE:
        env[VISIBLE[devices.kind]] = str(options["gpu_ids"])
    return env


def thread_variables(requested: int | None, processes: int, devices: Devices, env: Mapping[str, str]) -> dict[str, str]:
    """Return `OMP_NUM_THREADS`: an equal share of this node's processors per rank, unless the variable is set."""
    if requested is not None:
        return {"OMP_NUM_THREADS": str(requested)}
    if "OMP_NUM_THREADS" in env or processes == 1:
        return {}
    return {"OMP_NUM_THREADS": str(max(1, devices.cpus // processes))}
