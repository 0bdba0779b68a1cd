"""Launches by other programs (DeepSpeed's launcher, mpirun, torch_xla), and the TPU environment.

Each runs as a separate program with Accelerate's environment and command line; the scripts use Accelerate's
runtime (or `--compat`'s), which reads that environment. FSDP, and DeepSpeed and Megatron-LM on one machine, need
no other launcher: they run in accel's gang with that environment.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from accel.settings.contradictions import BACKEND_SWITCHES
from schedulers.processes import die_with_parent

from . import plan as plans
from . import run as launch_run
from .console import print_message
from .errors import LaunchConfigError, LaunchError
from .plan import Launch
from .worker import Program

_EXTRA = "pip install 'accel-launch[{}]'"
# setting -> (package, display name, install command)
_NEEDS = {
    "use_deepspeed": ("deepspeed", "DeepSpeed", _EXTRA.format("deepspeed")),
}
_RUNTIMES = ("torch_tpu", "torch_xla")
_TORCH_TPU_PYTHON = (3, 11)


def launch(options: Mapping[str, Any], program: Program) -> int:
    """Run the program to its end and return its exit code. May replace this process instead.

    Raises LaunchError if the program cannot be launched, for example because a package is missing.
    """
    refuse_missing(options)
    if _has_unclaimed_tpu(options, os.environ) and not _is_installed("torch_tpu") and not options["quiet"]:
        print_message("accel launch: this machine has TPU chips that the ranks do not use: pass --tpu or --cpu")
    if options["tpu"] and program.entry == "command" and _tpu_runtime(options) == "torch_xla":
        raise LaunchConfigError(
            "--tpu and --no_python contradict each other: torch_xla calls a function of a Python script"
        )
    if options["tpu"] and options["num_processes"] and not options["quiet"] and _tpu_runtime(options) == "torch_xla":
        ignored = f"--num_processes {options['num_processes']} is ignored"
        print_message(f"accel launch: {ignored}: torch_xla starts one process per chip")
    run = plan_launch(options, program)
    if options["use_deepspeed"] and _has_own_launcher(options, run):
        return _run_deepspeed(options, program, run)
    if options["mpirun_hostfile"]:
        return _run(mpi_command(options, program, run), mpi_environment(run))
    return launch_run.launch(run)


def starts_locally(options: Mapping[str, Any]) -> bool:
    """Return True if the launch starts on this machine rather than on a pod's hosts or SageMaker's."""
    return not (is_for_pod(options) or options["compute_environment"] == "AMAZON_SAGEMAKER")


def is_for_pod(options: Mapping[str, Any]) -> bool:
    """Return True for a launch on all hosts of a TPU slice, from any machine."""
    return bool(options["tpu"] and options["tpu_use_cluster"] and not options["no_tpu_cluster"])


def plan_launch(options: Mapping[str, Any], program: Program, env: Mapping[str, str] = os.environ) -> Launch:
    """Return `plan.plan`'s result with the environment and program that an engine needs."""
    if _has_unclaimed_tpu(options, env) and _is_installed("torch_tpu"):
        options = {**options, "tpu": True, "tpu_runtime": "torch_tpu"}
    if options["tpu"]:
        return _plan_tpu({**options, "tpu_runtime": _tpu_runtime(options)}, program, env)
    run = plans.plan(with_default_rank(options), program, env)
    extra = dict(run.env) | options.get("overridden", {})
    if options["use_deepspeed"]:
        paths = [path for path in (extra.get("PYTHONPATH") or env.get("PYTHONPATH", "")).split(os.pathsep) if path]
        extra["PYTHONPATH"] = os.pathsep.join([*paths, os.getcwd()])
    return replace(run, env=extra)


def _plan_tpu(options: Mapping[str, Any], program: Program, env: Mapping[str, str]) -> Launch:
    """Plan a process per chip with torch_tpu's variables, or one process in which torch_xla starts one per chip."""
    from .tpu import host

    torch_tpu = options["tpu_runtime"] == "torch_tpu"
    place = host.slice_environment(env) if torch_tpu else {}
    env = {**env, **place}
    # A file's number is each host's, and so is the flag of `pod_command`. The settings count hosts that variables name.
    is_per_host = (place and options.get("num_processes_from_file")) or "ACCELERATE_IN_TPU_POD" in env
    if is_per_host and options["num_processes"] and options["num_machines"] is None:
        hosts = env.get("TPU_WORKER_HOSTNAMES", "").count(",") + 1
        options = {**options, "num_processes": options["num_processes"] * hosts}
    run = plans.plan(options, program, env)
    extra = dict(run.env) | options.get("overridden", {})
    if torch_tpu:
        tpu_variables = host.torch_tpu_variables(
            env, host.chips(env), nodes=run.nodes, processes=run.processes, run_id=run.run_id
        )
        return replace(run, env=extra | tpu_variables)
    extra.setdefault("PJRT_DEVICE", env.get("PJRT_DEVICE", "TPU"))
    # torch_xla finds the slice's other hosts itself.
    overrides: dict[str, Any] = {"processes": 1, "nodes": 1, "max_nodes": 1, "max_restarts": 0}
    return replace(run, program=tpu_program(options, program), env=extra, **overrides)


def _has_unclaimed_tpu(options: Mapping[str, Any], env: Mapping[str, str]) -> bool:
    """Return True if this machine has TPU chips and no GPU, and no option selects a device or launcher."""
    from .devices import find
    from .tpu import host

    explicit = options["mpirun_hostfile"] or any(options[name] for name in BACKEND_SWITCHES)
    return not explicit and bool(host.chips(env)) and find(env).kind == "cpu"


def _tpu_runtime(options: Mapping[str, Any]) -> str:
    """Return the requested runtime, else the installed one: torch_tpu before torch_xla."""
    return options["tpu_runtime"] or next(filter(_is_installed, _RUNTIMES), "torch_xla")


def with_default_rank(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Fill in a default machine rank and address if one command starts the ranks of all machines."""
    runs_once = options["mpirun_hostfile"] or (options["use_deepspeed"] and not _is_per_machine(options))
    if options["num_machines"] is None or not runs_once:
        return options
    filled = {"machine_rank": 0, "main_process_ip": ""}
    return {**options, **{name: value for name, value in filled.items() if options[name] is None}}


def _is_per_machine(options: Mapping[str, Any]) -> bool:
    """Return True if DeepSpeed's launcher is started on every machine, as accel's is."""
    return _deepspeed_launcher(options) in ("standard", "nossh")


def _deepspeed_launcher(options: Mapping[str, Any], env: Mapping[str, str] = os.environ) -> str:
    """Return DeepSpeed's launcher: by default "standard" if a scheduler started this process, else pdsh."""
    from schedulers.topology import RULES

    is_scheduled = any(marker in env for marker in (*RULES, "ACCEL_JOB_ID"))
    return options["deepspeed_multinode_launcher"] or ("standard" if is_scheduled else "pdsh")


def refuse_missing(options: Mapping[str, Any]) -> None:
    """Raise LaunchError if an engine's package is not installed; the message has the command that installs it."""
    for name, (package, display_name, remedy) in _NEEDS.items():
        if options[name]:
            _check_installed(package, f"--{name}", display_name, remedy)
    if options["tpu"] and options["tpu_runtime"]:
        name = options["tpu_runtime"]
        _check_installed(name, f"--tpu_runtime {name}", name, _tpu_remedy(name))
    elif options["tpu"] and not any(map(_is_installed, _RUNTIMES)):
        raise LaunchError(
            f"--tpu: neither torch_tpu nor torch_xla is installed in {sys.executable}: {_tpu_remedy('torch_tpu')}"
        )


def _tpu_remedy(runtime: str) -> str:
    if runtime == "torch_tpu" and sys.version_info < _TORCH_TPU_PYTHON:
        return f"torch_tpu needs Python 3.11 or newer, and this is {sys.version.split()[0]}"
    return _EXTRA.format(runtime.replace("_", "-"))


def _check_installed(package: str, flag: str, display_name: str, remedy: str) -> None:
    if not _is_installed(package):
        raise LaunchError(f"{flag}: {display_name} is not installed in {sys.executable}: {remedy}")


def _is_installed(module: str) -> bool:
    from importlib.util import find_spec

    try:
        return find_spec(module) is not None
    except ImportError:  # of its parent package
        return False


def _has_own_launcher(options: Mapping[str, Any], run: Launch) -> bool:
    return run.max_nodes > 1 and _deepspeed_launcher(options) != "standard"


def deepspeed_command(options: Mapping[str, Any], program: Program, run: Launch) -> list[str]:
    """Return the `deepspeed` command line, which starts all machines' ranks (with `nossh`, only this machine's)."""
    launcher = _deepspeed_launcher(options)
    if options["deepspeed_hostfile"] is None:
        raise LaunchConfigError(f"--use_deepspeed on {run.max_nodes} machines needs --deepspeed_hostfile")
    command = ["deepspeed", "--hostfile", str(options["deepspeed_hostfile"])]
    if launcher == "nossh":
        command += ["--node_rank", str(run.node_rank), "--no_ssh"]
    else:
        command += ["--no_local_rank", "--launcher", launcher]
    if options["deepspeed_exclusion_filter"] is not None:
        command += ["--exclude", options["deepspeed_exclusion_filter"]]
    elif options["deepspeed_inclusion_filter"] is not None:
        command += ["--include", options["deepspeed_inclusion_filter"]]
    else:
        command += ["--num_gpus", str(run.processes)]
    if options["main_process_ip"] or run.source:  # else DeepSpeed takes the first host of its file
        command += ["--master_addr", run.address]
    command += ["--master_port", str(run.port)]
    command += {"module": ["--module"], "command": ["--no_python"], "script": []}[program.entry]
    return [*command, *program.argv]


def _run_deepspeed(options: Mapping[str, Any], program: Program, run: Launch) -> int:
    """Run DeepSpeed's launcher. It exports the variables in DS_ENV_FILE to other machines' ranks."""
    command = deepspeed_command(options, program, run)
    with tempfile.NamedTemporaryFile("w", prefix="accel-deepspeed-", suffix=".env") as file:
        file.writelines(f"{name}={value}\n" for name, value in run.env.items() if _is_plain(value))
        file.flush()
        return _run(command, dict(run.env) | {"DS_ENV_FILE": file.name})


def _is_plain(value: str) -> bool:
    """Return True if a value survives DeepSpeed's variables file, which has no quoting."""
    return bool(value) and not any(char in value for char in " \n;<>|&\"'")


def mpi_command(options: Mapping[str, Any], program: Program, run: Launch) -> list[str]:
    """Return the command line of Open MPI, Intel MPI or MVAPICH, depending on the output of `--version`."""
    mpirun = next((path for path in map(shutil.which, ("mpirun", "mpiexec")) if path), None)
    if mpirun is None:
        raise LaunchError("--mpirun_hostfile: neither mpirun nor mpiexec found on PATH: install Open MPI")
    version = subprocess.run([mpirun, "--version"], capture_output=True, text=True, check=False).stdout
    hosts = os.path.expanduser(options["mpirun_hostfile"])
    per_node, total = str(run.processes), str(run.processes * run.nodes)
    if "Open MPI" in version or "OpenRTE" in version:
        command = [mpirun, "--hostfile", hosts, "--npernode", per_node, "-n", total, "--bind-to", "socket"]
    else:
        command = [mpirun, "-f", hosts, "-ppn", per_node, "-n", total]
    return [*command, *program.command(unbuffered=False)]


def mpi_environment(run: Launch) -> dict[str, str]:
    """Return the variables for mpirun's ranks: rendezvous address and thread affinity."""
    return {
        **run.env,
        "MASTER_ADDR": run.address,
        "MASTER_PORT": str(run.port or plans.PORT),
        "KMP_AFFINITY": "granularity=fine,compact,1,0",
        "KMP_BLOCKTIME": "1",
    }


def tpu_program(options: Mapping[str, Any], program: Program) -> Program:
    """Return the program that runs the script's function on every core of this host."""
    kind = "module" if program.entry == "module" else "script"
    function = options["main_training_function"] or "main"
    return Program(argv=["accel.launch.xla", kind, function, *program.argv], entry="module")


def pod_command(options: Mapping[str, Any], program: Program, launcher: Sequence[str] = ("accel-launch",)) -> list[str]:
    """Return the command line that each host of a slice runs for this launch."""
    argv = [*(["sudo"] if options["tpu_use_sudo"] else []), "env", *(options["env"] or []), "ACCELERATE_IN_TPU_POD=1"]
    argv += [*launcher, "--tpu", "--no_tpu_cluster"]
    machines = int(options["num_machines"]) if str(options["num_machines"]).isdigit() else 1
    per_host = {**options, "num_processes": options["num_processes"] and options["num_processes"] // machines}
    for name in ("num_processes", "mixed_precision", "tpu_runtime"):
        argv += [f"--{name}", str(per_host[name])] if per_host[name] is not None else []
    argv += ["--main_training_function", options["main_training_function"] or "main"]
    argv += ["--downcast_bf16"] if options["downcast_bf16"] else []
    argv += {"module": ["-m"], "command": ["--no_python"], "script": []}[program.entry]
    return [*argv, *program.argv]


def _run(command: list[str], env: Mapping[str, str]) -> int:
    """Run another launcher and return its exit code. Forwards signals; the launcher ends with this process."""
    import signal

    parent = os.getpid()
    try:
        running = subprocess.Popen(
            command, env={**os.environ, **env}, preexec_fn=lambda: die_with_parent(signal.SIGTERM, parent)
        )
    except OSError as error:
        raise LaunchError(f"cannot run {command[0]!r}: {error.strerror}") from None

    def forward_signal(signum: int, _: object) -> None:
        running.send_signal(signum)

    for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(signum, forward_signal)
    code = running.wait()
    return 128 - code if code < 0 else code
