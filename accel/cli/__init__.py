"""The command line: one module a command, imported only when it runs.

A command's module has `add_arguments(parser)` and `run(args) -> int`, or `run_argv(argv) -> int` if it does
not parse everything after the command (a script's own arguments).

Data and job ids go to stdout, messages to stderr. `accel.cli.exit_status` lists the exit codes.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence

from . import exit_status
from .argv import UsageError, hanging

__all__ = ["COMMANDS", "main"]

# name -> (module, summary in `accel --help`). A literal, so that help and dispatch import no command.
COMMANDS: dict[str, tuple[str, str]] = {
    "submit": ("accel.cli.submit", "Submit a script, module or command as a job to a target"),
    "launch": ("accel.cli.launch", "Launch a script on this machine, one process per accelerator"),
    "test": ("accel.cli.test", "Test that training works on this machine or on a target"),
    "list": ("accel.cli.list", "List jobs, newest first"),
    "status": ("accel.cli.status", "Show the state of a job"),
    "describe": ("accel.cli.describe", "Show the spec, plan and events of a job"),
    "logs": ("accel.cli.logs", "Print or follow the logs of a job"),
    "wait": ("accel.cli.wait", "Wait for jobs to end and exit with their exit code"),
    "fetch": ("accel.cli.fetch", "Download the results of a job"),
    "shell": ("accel.cli.shell", "Open a shell in a running job, or run a command there"),
    "cancel": ("accel.cli.cancel", "Cancel jobs: SIGTERM, then SIGKILL after the grace period"),
    "targets": ("accel.cli.targets", "List the targets that jobs can run on, or check one"),
    "prune": ("accel.cli.prune", "Delete the records and logs of ended jobs"),
    "serve": ("accel.cli.serve", "Serve this computer's targets to other computers"),
    "login": ("accel.cli.login", "Log in to a server"),
    "logout": ("accel.cli.logout", "Log out of a server and revoke the token"),
    "context": ("accel.cli.context", "List servers, or choose the current one"),
    "token": ("accel.cli.token", "Create, list or revoke tokens of a server"),
    "config": ("accel.cli.config", "Create or edit the default configuration for `accel launch`"),
    "image": ("accel.cli.image", "Build a container image with accel, torch and a project"),
    "env": ("accel.cli.env", "Print versions, devices, configuration and targets for a bug report"),
    "estimate-memory": ("accel.cli.estimate", "Estimate a model's memory for inference and training"),
    "merge-weights": ("accel.cli.merge_weights", "Merge the weights of an FSDP checkpoint into one file"),
    "to-fsdp2": ("accel.cli.to_fsdp2", "Convert a configuration file to FSDP2"),
    "tpu-config": ("accel.cli.tpu_config", "Run commands on every worker of a TPU VM"),
    "completion": ("accel.cli.completion", "Print the shell completion script for bash, zsh or fish"),
}

_GROUPS = {
    "Run": ("submit", "launch", "test"),
    "Inspect": ("list", "status", "describe", "logs", "wait", "fetch", "shell"),
    "Manage": ("cancel", "targets", "prune"),
    "Serve": ("serve", "login", "logout", "context", "token"),
    "Set up": ("config", "to-fsdp2", "image", "env", "tpu-config", "completion"),
    "Models": ("estimate-memory", "merge-weights"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. A user's mistake is one line on stderr, never a traceback.

    SystemExit propagates: `--help` raises it, and so does the user's program in a rank forked by `accel launch`.
    """
    arguments = sys.argv[1:] if argv is None else argv  # not list(argv): importing accel.cli.list rebinds that name
    _make_output_safe()
    # `launch` may become the user's program, and a caller that passes argv goes on after this call.
    owns_process = argv is None and arguments[:1] != ["launch"]
    try:
        if owns_process:
            _collect_rarely()
        code = _dispatch(arguments)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return exit_status.INTERRUPTED
    except BrokenPipeError:
        _forget_output()
        return exit_status.BROKEN_PIPE
    except Exception as error:
        return _report(error, arguments[0] if arguments and arguments[0] in COMMANDS else "")
    finally:
        try:
            if sys.stderr is not None:  # closed by the caller: accel … 2>&-
                sys.stderr.flush()
        except (OSError, ValueError):  # nobody reads it: the interpreter's exit code would be 120
            _forget_output(errors=True)
        if owns_process:
            gc.freeze()  # saves the interpreter's last collection, 10 ms at exit


def _dispatch(arguments: Sequence[str]) -> int:
    if not arguments:
        print(_overview(), end="", file=sys.stderr)
        return exit_status.USAGE
    if arguments[0] in ("-h", "--help"):
        print(_help(), end="")
        return exit_status.OK
    name, *rest = arguments
    if name == "help":
        if len(rest) > 1:
            raise UsageError("accel help", f"one command at a time, not {' '.join(rest)!r}")
        return _dispatch([*rest, "--help"])
    if name == "__complete":
        from .completion import complete

        return complete(rest)
    if name == "--version":
        print(_version())
        return exit_status.OK
    if name not in COMMANDS:
        raise _unknown(name)

    import importlib

    module = importlib.import_module(COMMANDS[name][0])
    if hasattr(module, "run_argv"):
        return int(module.run_argv(rest))
    from .arguments import Parser

    parser = Parser(name, COMMANDS[name][1], getattr(module, "EXAMPLES", ""))
    module.add_arguments(parser)
    return int(module.run(parser.read(rest)))


_TASKS = (
    ("configure training", "accel config"),
    ("test this machine", "accel test"),
    ("train on this machine", "accel launch train.py"),
    ("submit a job to a target", "accel submit --target NAME train.py"),
    ("list targets", "accel targets"),
    ("follow a job", "accel list; accel status, logs -f, wait, describe, fetch @last"),
    ("open a shell in a job", "accel shell @last"),
    ("cancel and delete jobs", "accel cancel JOB; accel prune --older-than 30d"),
    ("serve targets to others", "accel serve, login, context, token, logout"),
    ("estimate memory", "accel estimate-memory MODEL"),
    ("convert checkpoints and files", "accel merge-weights, to-fsdp2"),
    ("build an image", "accel image build --tag IMAGE"),
    ("report a bug", "accel env"),
    ("run commands on a TPU VM", "accel tpu-config"),
    ("set up shell completion", "accel completion bash"),
)


def _overview() -> str:
    lines = ["usage: accel COMMAND [OPTIONS]", "", *(hanging(task, line, 33) for task, line in _TASKS)]
    return "\n".join([*lines, "", "`accel --help` lists all commands, `accel COMMAND --help` all options."]) + "\n"


def _help() -> str:
    lines = ["usage: accel COMMAND [OPTIONS]", "", "One script, any cluster."]
    for group, names in _GROUPS.items():
        lines += ["", f"{group}:", *(hanging(name, COMMANDS[name][1], 19) for name in names)]
    lines += [
        "",
        "Examples:",
        "  accel submit --procs-per-node 2 --follow train.py --lr 1e-3",
        "  accel logs -f @last",
        "",
        "`accel COMMAND --help` lists all options of a command.",
        "A JOB is an id, a unique prefix of an id, or @last (the newest job).",
    ]
    return "\n".join(lines) + "\n"


def _version() -> str:
    import importlib.metadata

    try:
        return f"accel {importlib.metadata.version('accel-launch')}"
    except importlib.metadata.PackageNotFoundError:
        return "accel (run from a source tree that is not installed)"


def _unknown(name: str) -> UsageError:
    if name.startswith("-"):
        return UsageError("accel", f"unknown option {name!r}; options follow the command: accel COMMAND [OPTIONS]")
    if name.endswith(".py"):
        return UsageError("accel", f"{name!r} is not a command; to run a script: accel submit {name}")
    from schedulers.errors import nearest

    suggestion = nearest(name, [*COMMANDS, "help"])
    return UsageError("accel", f"unknown command {name!r}{suggestion} (accel --help lists them)")


def _report(error: Exception, command: str) -> int:
    """Print a user's mistake as one line and return the exit code. Re-raise any other error."""
    import contextlib

    from schedulers.errors import ConfigError, SchedulerError, SpecError
    from schedulers.printable import one_line

    if os.environ.get("ACCEL_DEBUG") == "1" or not isinstance(error, (UsageError, SchedulerError, OSError)):
        raise error
    prefix = error.command if isinstance(error, UsageError) else f"accel {command}".rstrip()
    code = exit_status.USAGE if isinstance(error, (UsageError, SpecError, ConfigError)) else exit_status.ERROR
    try:
        sys.stdout.flush()
    except OSError:
        _forget_output()
    with contextlib.suppress(OSError):
        print(f"{prefix}: {one_line(str(error))}", file=sys.stderr)
    return code


def _collect_rarely() -> None:
    """Collect garbage rarely: while modules load it costs a fifth of a short command's time and finds nothing."""
    gc.set_threshold(100_000, *gc.get_threshold()[1:])


def _make_output_safe() -> None:
    """Make stdout escape what this locale cannot encode, such as an argument of raw bytes."""
    import io

    if sys.stdout is None:  # closed by the caller: accel … >&-
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # for as long as the process lives
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _forget_output(*, errors: bool = False) -> None:
    """Redirect stdout, or stderr, to /dev/null, so that the interpreter's flush at exit does not fail."""
    import io

    try:
        descriptor = (sys.stderr if errors else sys.stdout).fileno()
    except (io.UnsupportedOperation, ValueError):
        return
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, descriptor)
    os.close(devnull)
