"""`accel launch`: run a script on this machine, a rank per accelerator, or print its settings (`--explain`)."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from . import exit_status

if TYPE_CHECKING:
    from accel.launch.worker import Program
    from accel.settings import Setting
    from accel.settings.precedence import Nodes, Value


EXAMPLES = """\
  accel launch train.py --lr 1e-3                      one rank per GPU, or one
  accel launch --num_processes 4 --cpu train.py        four ranks on the CPU
  accel launch --num_machines 2 --machine_rank 1 --main_process_ip node0 --num_processes 16 train.py
  accel launch --config_file fsdp.yaml --explain       print the settings and their sources

Precedence: flags, the environment, the scheduler, the configuration file, the defaults."""

_COMMAND = "accel launch"


def run_argv(argv: Sequence[str]) -> int:
    """Parse `accel launch`'s own flags, which end at the program, and run it. Return its exit code."""
    from accel.launch.flags import add_arguments

    from . import COMMANDS
    from .arguments import Parser
    from .argv import UsageError

    parser = Parser("launch", COMMANDS["launch"][1], EXAMPLES, usage="accel launch [OPTIONS] SCRIPT [ARGUMENTS]")
    add_arguments(parser, defaults_too=False)
    args, program_argv = parser.read_before_script(argv)
    explicit = vars(args)
    if not program_argv and not explicit.get("explain"):
        raise UsageError(_COMMAND, "nothing to run: give a script, -m MODULE, or --no_python COMMAND")
    settings = resolve_settings(explicit)
    return _explain(settings) if explicit.get("explain") else _launch(explicit, settings, program_argv)


def _explain(settings: Mapping[str, Value]) -> int:
    from accel.launch.errors import LaunchConfigError

    from .argv import UsageError

    try:
        return explain(settings, launch_options(settings))
    except LaunchConfigError as error:
        raise UsageError(_COMMAND, _with_location(str(error), settings)) from None


def _launch(explicit: Mapping[str, Any], settings: Mapping[str, Value], program_argv: list[str]) -> int:
    from accel.launch.console import print_message
    from accel.launch.errors import CommandNotFound, LaunchConfigError, LaunchError
    from accel.launch.worker import Program
    from accel.settings.contradictions import without_effect

    options = launch_options(settings)
    if not options["quiet"]:
        for line in without_effect(explicit, options):
            print_message(f"accel launch: {line}")
    if options["compute_environment"] == "AMAZON_SAGEMAKER":
        return _on_sagemaker(settings, options, program_argv)
    try:
        return start(options, Program.parse(program_argv, module=options["module"], command=options["no_python"]))
    except LaunchError as error:
        print_message(f"accel launch: {_with_location(str(error), settings)}")
        if isinstance(error, CommandNotFound):
            return error.exit_code
        return exit_status.USAGE if isinstance(error, LaunchConfigError) else exit_status.ERROR


def start(options: Mapping[str, Any], program: Program) -> int:
    """Run the program here, or on all hosts of a TPU slice. Return its exit code, or that of the first failing host.

    Raises LaunchError.
    """
    from accel.launch.external import is_for_pod, launch

    return _on_pod(options, program) if is_for_pod(options) else launch(options, program)


def _on_pod(options: Mapping[str, Any], program: Program) -> int:
    """Launch over the transport of a tpu target, or with gcloud."""
    import shlex

    from accel.launch.errors import LaunchConfigError, LaunchError
    from accel.launch.external import pod_command
    from accel.launch.tpu import pod

    from . import tpu_config

    name, zone = options["tpu_name"], options["tpu_zone"]
    if options["vm"]:
        raise LaunchConfigError("--vm: the hosts come from tpu_name in the configuration file: leave it out")
    if name is None:
        raise LaunchConfigError("--tpu_cluster needs the pod's name: set tpu_name in the configuration file")
    try:
        if zone is None and tpu_config.is_target(_COMMAND, name):
            return tpu_config.run_by_target(name, lambda python: [
                shlex.join(pod_command(options, program, [python, "-m", "accel.commands.launch"]))
            ])  # fmt: skip
        if zone is None:
            raise LaunchConfigError(
                f"--tpu_cluster: tpu_name {name} is not a tpu target in accel.yaml: "
                "to use gcloud, set tpu_zone in the configuration file"
            )
        return pod.run(tpu_config.GCLOUD, name, zone, [shlex.join(pod_command(options, program))])
    except pod.PodError as error:
        raise LaunchError(str(error)) from None


def _on_sagemaker(all_settings: Mapping[str, Value], options: Mapping[str, Any], program_argv: list[str]) -> int:
    """Submit the job that the file describes and follow it to its end. Return its exit code."""
    from . import submit, submit_config
    from .argv import UsageError
    from .output import note

    entry = ["-m"] if options["module"] else ["--no-python"] if options["no_python"] else []
    settings, warnings = submit_config.use_keys(all_settings)
    defaults = submit_config.from_sagemaker_config(_COMMAND, settings, "" if entry else program_argv[0])
    for line in (*warnings, *defaults.notes):
        note(line)
    restarts = ["--max-restarts", str(options["max_restarts"] or 0)]
    try:
        return submit.run_argv(["--follow", *restarts, *entry, "--", *program_argv], defaults)
    except UsageError as error:
        raise UsageError(_COMMAND, str(error)) from None


def _with_location(message: str, settings: Mapping[str, Value]) -> str:
    """Insert the setting's source into a message that begins with its flag, unless it was given as a flag."""
    from accel.settings import BY_NAME

    flag = message.partition(" ")[0].rstrip(":,")
    name = next((name for name, setting in BY_NAME.items() if setting.flag and setting.display_name == flag), "")
    if not name or settings[name].layer in ("flag", "default"):
        return message
    value = settings[name].value
    for prefix in (f"{flag} {value}", f"{flag} {value!r}", flag):
        rest = message.removeprefix(prefix)
        if rest != message and rest[:1] in ("", " ", ",", ":"):
            return f"{prefix} ({settings[name].source}){rest}"
    return message


def resolve_settings(
    explicit: Mapping[str, Any], env: Mapping[str, str] = os.environ, *, command: str = _COMMAND
) -> dict[str, Value]:
    """Return every setting with the source of its value. Raises UsageError for invalid or contradictory values."""
    from accel.settings.contradictions import contradictions
    from accel.settings.precedence import resolve
    from accel.settings.setting import BadValue

    from .argv import UsageError

    file = _file(explicit, command)
    try:
        settings = resolve(explicit, env, file.entries, file.location, None if _is_for_sagemaker(file) else _nodes(env))
    except BadValue as error:
        raise UsageError(command, str(error)) from None
    entry = file.entries.get("num_processes")
    if entry is not None and entry.value == -1 and settings["num_processes"].value is None:
        raise UsageError(
            command, f"{file.location(entry.keys)}: num_processes: -1 needs --num_processes on the command line"
        )
    sources = {name: value.source for name, value in settings.items() if value.layer not in ("default", "flag")}
    problem = contradictions({name: value.value for name, value in settings.items()}, sources)
    if problem:
        raise UsageError(command, problem)
    return settings


def _file(explicit: Mapping[str, Any], command: str) -> Any:
    """Return the named file, else the default one, which --cpu disables, as in Accelerate."""
    from .launch_file import default_path, empty, read_file

    path = explicit.get("config_file")
    if path is None and (explicit.get("cpu") or not os.path.isfile(default_path())):
        return empty(command)
    return read_file(command, path or default_path())


def _is_for_sagemaker(file: Any) -> bool:
    """Return True for a file for SageMaker's machines, regardless of a scheduler here."""
    entry = file.entries.get("compute_environment")
    return entry is not None and entry.value == "AMAZON_SAGEMAKER"


def _nodes(env: Mapping[str, str]) -> Nodes | None:
    """Return the scheduler's view if it placed this process, else None; `plan` reports invalid variables."""
    from accel.launch.watchdog import LAUNCH_ID
    from accel.settings.precedence import Nodes
    from schedulers.errors import SpecError
    from schedulers.topology import Topology

    if LAUNCH_ID in env:
        return None
    try:
        topology = Topology.from_scheduler(env)
    except SpecError:
        return None
    if topology is None:
        return None
    return Nodes(topology.nodes, topology.node_rank, topology.master, topology.port, topology.source or "the scheduler")


def launch_options(settings: Mapping[str, Value]) -> dict[str, Any]:
    """Return every setting's value for `accel.launch.external.launch`.

    Values that `plan` reads from the scheduler itself are None. DeepSpeed gets the names of the file's settings.
    """
    from accel.settings import BY_NAME
    from accel.settings.precedence import overridden

    from_file = [name for name, value in settings.items() if value.layer == "file" and BY_NAME[name].file_key]
    fields = [name for name in from_file if name == "mixed_precision" or _is_deepspeeds(BY_NAME[name])]
    options = {name: None if value.layer == "scheduler" else value.value for name, value in settings.items()}
    options["deepspeed_fields_from_accelerate_config"] = ",".join(fields)
    options["num_processes_from_file"] = "num_processes" in from_file
    return options | {"overridden": overridden(settings, os.environ)}


def _is_deepspeeds(setting: Setting) -> bool:
    return setting.name == "gradient_accumulation_steps" or "deepspeed" in setting.used_by


# `--explain`: each setting with its value and where the value comes from.

# Settings whose variables the program inherits if nothing else sets them.
_INHERITED = ("num_cpu_threads_per_process", "gpu_ids")
_INHERITED_BY_SAGEMAKER = ("aws_access_key_id", "aws_secret_access_key", "profile")
_SECRET = ("aws_access_key_id", "aws_secret_access_key")


def explain(settings: Mapping[str, Value], options: Mapping[str, Any], env: Mapping[str, str] = os.environ) -> int:
    """Print the settings, those that are not defaults first. Raises LaunchConfigError as a launch would."""
    from .output import print_rows

    effective = {
        **settings,
        **dict(_inherited(settings, options, env)),
        **dict(_computed_values(settings, options, env)),
    }
    rows = [
        (name, _format_value(name, value.value), value.source) for name, value in effective.items() if name != "explain"
    ]
    rows.sort(key=lambda row: row[2] == "default")
    print_rows(("setting", "value", "from"), rows, on_terminal=rows)
    return exit_status.OK


def _inherited(
    settings: Mapping[str, Value], options: Mapping[str, Any], env: Mapping[str, str]
) -> Iterator[tuple[str, Value]]:
    from accel.launch import alias_env
    from accel.settings import BY_NAME
    from accel.settings.precedence import Value

    on_sagemaker = options["compute_environment"] == "AMAZON_SAGEMAKER"
    for name in (*_INHERITED, *(_INHERITED_BY_SAGEMAKER if on_sagemaker else ())):
        variable = BY_NAME[name].env
        if settings[name].value is None and env.get(variable):
            yield name, Value(env[variable], f"environment variable {variable}", "environment")
    if not settings["compat"].value and alias_env.is_requested(env):
        yield "compat", Value(True, f"environment variable {alias_env.FLAG}", "environment")


def _computed_values(
    settings: Mapping[str, Value], options: Mapping[str, Any], env: Mapping[str, str]
) -> Iterator[tuple[str, Value]]:
    """Yield the values that a launch derives itself where nothing sets them."""
    from accel.launch.external import plan_launch, starts_locally
    from accel.launch.worker import Program

    if not starts_locally(options):
        return
    run = plan_launch(options, Program(argv=[sys.executable], entry="command"), env)  # any program has these values
    if settings["num_processes"].value is None and run.nodes == run.max_nodes and not options["tpu"]:
        yield "num_processes", settings["num_processes"]._replace(value=run.processes * run.nodes)
    threads = "num_cpu_threads_per_process"
    if settings[threads].value is None and "OMP_NUM_THREADS" in run.env:
        yield threads, settings[threads]._replace(value=run.env["OMP_NUM_THREADS"])


def _format_value(name: str, value: Any) -> str:
    if value is None:
        return ""
    if name in _SECRET:
        return "(not shown)"
    from accel.diagnostics.redaction import without_secrets

    value = without_secrets(value)
    return str(value).lower() if isinstance(value, bool) else str(value)
