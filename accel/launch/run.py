"""`accel launch` on this node: from its flags to running ranks, and back to an exit code."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NoReturn

from accel.settings.contradictions import contradictions
from schedulers.topology import Topology

from . import alias_env, deadline, incarnation, pid1, watchdog, worker_env
from .deadline import Deadline
from .devices import VISIBLE, Devices, available_cpus, find, only_cpu
from .errors import CannotRun, LaunchError, Refused, RendezvousFailed
from .incarnation import Incarnation
from .limits import check_room
from .machines import Place, check_spread, place
from .tee import parse
from .tpu import host as tpu_host
from .worker import Program, exec_command, ignore_warnings, open_log

PORT = 29500


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One node's part of a run, with nothing left to be found out."""

    program: Program
    processes: int  # on this node
    nodes: int
    max_nodes: int
    node_rank: int
    address: str
    port: int
    service: str = ""  # a name of node 0 that exists before node 0 does
    own_address: str = ""  # of this node, where its scheduler tells it
    env: Mapping[str, str] = field(default_factory=dict)
    rdzv_backend: Literal["static", "c10d"] = "static"
    rdzv_conf: Mapping[str, str] = field(default_factory=dict)
    run_id: str = "accel"
    role: str = "default"
    max_restarts: int = 0
    incarnation: Incarnation = field(default_factory=Incarnation, compare=False)  # each has a token of its own
    grace_s: float = 30.0
    monitor_interval_s: float = 0.1
    deadline: Deadline | None = None
    log_dir: str | None = None
    tee: str = "0"
    spawn: bool = False
    quiet: bool = False
    node_names: tuple[str, ...] = ()  # by rank, where a scheduler has told them
    source: str = ""  # what has told how many machines there are and which of them this is
    told: str = ""  # what it has, for people
    node_0_reports: bool = False  # how the gang ended; the others end with 0, so that no pod is deleted early
    requeued: bool = False  # by its scheduler, when its ranks were warned
    events: str | None = None  # where to tell what happens, instead of beside the logs
    job_lock: int | None = None  # the descriptor of a local job's lock: held by the launcher, and not by ranks

    @property
    def static(self) -> bool:
        """Return True if the number of machines is fixed. One machine needs no elastic agent of torch's, whose stores
        listen on all interfaces."""
        return self.rdzv_backend == "static" or self.max_nodes == 1

    @property
    def first_attempt(self) -> int:
        return self.incarnation.attempt or 0

    @property
    def alone(self) -> bool:
        """One process in all, and nothing to watch over: it takes the launcher's place."""
        return self.processes == 1 and self.max_nodes == 1 and self.max_restarts == 0 and self.rdzv_backend == "static"


def plan(options: Mapping[str, Any], program: Program, env: Mapping[str, str] = os.environ) -> Launch:
    """What the flags mean on this machine. Raises Refused for what cannot be."""
    wrong = contradictions(options)
    if wrong:
        raise Refused(wrong)
    _check_program(program)
    parse(options["tee"])
    devices = _devices(options, env)
    placed = place(options, env)
    found, nodes = placed.found, placed.nodes
    processes = _per_node(options["num_processes"], nodes, devices)
    _check_gpus(processes, devices, options)
    check_room(processes, options["num_processes"])
    extra = worker_env.training(options, devices) | worker_env.threads(
        options["num_cpu_threads_per_process"], processes, devices, env
    )
    if options["compat"] or alias_env.is_asked(env):
        extra |= alias_env.variables(env)
    port = _port(options["main_process_port"], placed.max_nodes, found)
    return Launch(
        program=program, processes=processes, nodes=nodes, max_nodes=placed.max_nodes, node_rank=placed.rank,
        address=placed.address, port=port, **_in_cluster(placed, env), env=extra, rdzv_backend=options["rdzv_backend"],
        rdzv_conf=_pairs(options["rdzv_conf"]), run_id=options["rdzv_id"] or env.get("ACCEL_JOB_ID") or "accel",
        role=options["role"], max_restarts=options["max_restarts"], grace_s=options["shutdown_timeout"],
        monitor_interval_s=options["monitor_interval"], log_dir=options["log_dir"], tee=options["tee"],
        spawn=(options["start_method"] or ("spawn" if sys.platform == "darwin" else "fork")) == "spawn",
        quiet=options["quiet"], incarnation=incarnation.planned(env, found),
        deadline=deadline.planned(env, placed.rank), node_names=found.names,
        source=found.source, told=_told(placed, port, env),
        node_0_reports="ACCEL_NODE_0_REPORTS" in env and watchdog.LAUNCH_ID not in env,
        requeued="ACCEL_REQUEUED" in env and watchdog.LAUNCH_ID not in env,
        events=None if watchdog.LAUNCH_ID in env else env.get("ACCEL_LAUNCH_EVENTS"),
        job_lock=int(env["ACCEL_JOB_LOCK"]) if "ACCEL_JOB_LOCK" in env and watchdog.LAUNCH_ID not in env else None,
    )  # fmt: skip


def launch(run: Launch) -> int:
    """Runs this node's ranks to their end. Returns the exit code of the rank, of all nodes, that failed first.

    With one process in all, whose output goes where this process's goes, this does not return: the program takes
    this process's place, or that of a child of PID 1.
    """
    _open_standard_descriptors()
    if run.job_lock is not None:
        os.set_inheritable(run.job_lock, False)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # inherited as ignored, it would hide how children end
    run = _counted(run)
    if run.told and not run.quiet:
        say(f"accel launch: {run.told}")
    ignore_warnings()  # from the first moment: loading torch takes a second, and a scheduler's warning may come in it
    if run.log_dir:
        _check_log_dir(run.log_dir)
    launch_id = uuid.uuid4().hex
    os.environ.update(run.env)
    os.environ[watchdog.LAUNCH_ID] = launch_id
    if run.alone:
        os.environ.update(_world_of_one(run))
        if run.log_dir is None and run.deadline is None:
            code = pid1.stay() if os.getpid() == 1 else None
            if code is not None:
                return code
            _become(run.program, launch_id)
        from .single_process import run_single

        return run_single(run, launch_id)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Nothing is there to be ended yet, and a KeyboardInterrupt inside torch's native initialisation would abort.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        import torch.distributed
    except ModuleNotFoundError as error:
        raise LaunchError(
            f"{error.name} is not installed in {sys.executable}: pip install 'accel-launch[train]'"
        ) from None
    if not torch.distributed.is_available():
        raise LaunchError("this build of torch has no torch.distributed: several processes cannot form a world")
    from .multi_process import run_gang

    try:
        return run_gang(run, launch_id)
    except LaunchError as error:
        reason = "rendezvous" if isinstance(error, RendezvousFailed) else "setup"
        recorder(run.log_dir, run.events)("refused", reason=reason, message=str(error))
        raise


def _counted(run: Launch) -> Launch:
    """Count this start, and the time limit from the first one."""
    start = incarnation.started(run.incarnation, os.environ)
    limit = run.deadline and replace(run.deadline, first_at=start.first_at)
    return replace(run, incarnation=start, deadline=limit)


def say(text: str) -> None:
    """Tells people something; that they have gone changes nothing about the gang or its exit code."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            print(text, file=sys.stderr, flush=True)


def said_again(signum: int) -> bool:
    """Return True for a second signal that must not cut the grace short: SIGALRM, or SIGTERM, which Slurm repeats."""
    return signum == signal.SIGALRM or (signum == signal.SIGTERM and "SLURM_STEP_ID" in os.environ)


def log_path(log_dir: str | None, rank: int, attempt: int) -> str | None:
    return os.path.join(log_dir, f"rank-{rank}.a{attempt}.log") if log_dir else None


def recorder(log_dir: str | None, events: str | None = None) -> Callable[..., None]:
    """Writes what happens to `events`, by default `launch.jsonl` beside the logs, where a supervisor reads it; nothing
    without a log_dir."""

    def record(event: str, **facts: Any) -> None:
        if log_dir is None:
            return
        line = json.dumps({"schema": 1, "event": event, "time": time.time(), **facts}) + "\n"
        with contextlib.suppress(OSError):  # a full disk must not end a training run
            fd = open_log(events or os.path.join(log_dir, "launch.jsonl"), os.O_RDWR)
            try:
                size = os.fstat(fd).st_size
                torn = size > 0 and os.pread(fd, 1, size - 1) != b"\n"  # a line that a full disk cut short
                os.write(fd, b"\n" * torn + line.encode())
            finally:
                os.close(fd)

    return record


def _world_of_one(run: Launch) -> dict[str, str]:
    return {
        **dict.fromkeys(("RANK", "LOCAL_RANK", "GROUP_RANK", "NODE_RANK", "ROLE_RANK"), "0"),
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"), "1"),
        "TORCHELASTIC_RESTART_COUNT": str(run.first_attempt),
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "ROLE_NAME": run.role,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(run.port or _free_port()),
        "TORCHELASTIC_RUN_ID": run.run_id,
    }


def _become(program: Program, launch_id: str) -> NoReturn:
    """Puts the program in this process's place: same pid, same terminal, nothing between it and its user."""
    if sys.platform == "linux":
        watchdog.start_apart(launch_id)
    command = program.command(unbuffered=False)
    sys.stdout.flush()
    try:
        exec_command(command)
    except OSError as error:
        raise cannot_run(command, error) from None


def cannot_run(command: list[str], error: OSError) -> CannotRun:
    missing = isinstance(error, FileNotFoundError)
    return CannotRun(f"cannot run {command[0]!r}: {error.strerror}", missing=missing)


def _open_standard_descriptors() -> None:
    """Fills 0, 1 and 2 where the caller has closed them, lest a pipe of ours gets that number and a rank's output."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one


def _check_log_dir(log_dir: str) -> None:
    try:
        os.makedirs(log_dir, exist_ok=True)
        os.close(open_log(os.path.join(log_dir, "launch.jsonl")))
    except OSError as error:
        raise Refused(f"--log_dir {log_dir} cannot be written to: {error.strerror}") from None


def _free_port() -> int:
    import socket

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _check_program(program: Program) -> None:
    name = program.argv[0]
    if program.entry == "script" and not os.path.exists(name):
        here = os.getcwd()
        raise Refused(f"there is no script {name!r} in {here}{_near_script(name)}")
    if program.entry == "command" and shutil.which(name) is None:
        if os.path.dirname(name) and os.path.exists(name):
            raise CannotRun(f"{name!r} is not executable: chmod +x", missing=False)
        raise CannotRun(f"there is no command {name!r} on PATH ({os.environ.get('PATH', '')})", missing=True)


def _near_script(name: str) -> str:
    import difflib

    folder = os.path.dirname(name) or "."
    try:
        there = [os.path.join(os.path.dirname(name), file) for file in os.listdir(folder) if file.endswith(".py")]
    except OSError:
        return ""
    near = difflib.get_close_matches(name, there, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _in_cluster(placed: Place, env: Mapping[str, str]) -> dict[str, str]:
    """How the pods of a job find node 0, where their places are the cluster's and not typed."""
    if watchdog.LAUNCH_ID in env or not (placed.found.source or placed.max_nodes > placed.nodes):
        return {}
    return {"service": env.get("ACCEL_SERVICE", ""), "own_address": env.get("ACCEL_POD_IP", "")}


def _told(placed: Place, port: int, env: Mapping[str, str]) -> str:
    """Said once, by node 0; a job that a target watches over has it on record.

    Every pod of a job prints a line, by which a reader knows that its log has its beginning (`GREETING` in
    schedulers/kubernetes/logs/cursor.py).
    """
    if "ACCEL_LAUNCH_EVENTS" in env:
        return ""
    if not placed.found.source or placed.rank != 0:
        in_pod = "ACCEL_JOB_ID" in env and "KUBERNETES_SERVICE_HOST" in env and watchdog.LAUNCH_ID not in env
        return f"started on {os.uname().nodename}" if in_pod else ""
    return f"{placed.nodes} nodes, node 0 at {placed.address}:{port}, as {placed.found.source} says"


def _devices(options: Mapping[str, Any], env: Mapping[str, str]) -> Devices:
    if options["cpu"]:
        return only_cpu()
    if options["tpu"] and options["tpu_runtime"] == "torch_tpu":
        return _tpu_devices(env)
    found = find(env)
    if not options["gpu_ids"] or options["gpu_ids"] == "all":
        return found
    if found.kind not in VISIBLE:
        raise Refused(f"--gpu_ids {options['gpu_ids']}: this machine shows no GPU")
    chosen = find({**env, VISIBLE[found.kind]: options["gpu_ids"]})
    wanted = options["gpu_ids"].count(",") + 1
    if chosen.kind != found.kind or chosen.count != wanted:
        raise Refused(f"--gpu_ids {options['gpu_ids']}: the GPUs here are 0 … {found.count - 1}, each named once")
    return chosen


def _tpu_devices(env: Mapping[str, str]) -> Devices:
    chips = tpu_host.chips(env)
    if not chips:
        raise Refused("--tpu: this machine shows no TPU; where it has one, export TORCH_TPU_DEVICES_PER_HOST")
    return Devices(kind="tpu", ids=tuple(map(str, range(len(chips)))), cpus=available_cpus())


def _port(asked: int | None, machines: int, found: Topology) -> int:
    if asked is None:
        return 0 if machines == 1 else found.port or PORT
    if asked > 65535:
        raise Refused(f"--main_process_port {asked}: ports end at 65535")
    if asked == 0 and machines > 1:
        raise Refused("--main_process_port 0 takes any port, which the other machines could not know: name one")
    return asked


def _per_node(total: int | None, machines: int, devices: Devices) -> int:
    check_spread(total, machines)
    return devices.count if total is None else total // machines


def _check_gpus(processes: int, devices: Devices, options: Mapping[str, Any]) -> None:
    if options["multi_gpu"] and devices.kind == "cpu":
        raise Refused(
            "--multi_gpu: this machine shows no GPU (nvidia-smi lists them); without the flag the CPU is used"
        )
    if devices.kind in (*VISIBLE, "tpu") and processes > devices.count:
        what = "TPU devices" if devices.kind == "tpu" else "visible GPUs"
        raise Refused(
            f"{processes} processes on this machine and {devices.count} {what}: every rank needs one of its own; "
            "use fewer, or --cpu"
        )


def _pairs(text: str) -> dict[str, str]:
    pairs = [pair.partition("=") for pair in text.split(",") if pair]
    for key, equals, _ in pairs:
        if not key or not equals:
            raise Refused(f"--rdzv_conf takes key=value pairs with commas between them, not {text!r}")
    return {key.strip(): value.strip() for key, _, value in pairs}
