"""The options of `accel submit`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import option_values

if TYPE_CHECKING:
    from argparse import _ArgumentGroup as Group

    from .parser import Parser

_MANY: dict[str, Any] = {"action": "append", "default": []}
_COUNT: dict[str, Any] = {"type": option_values.whole, "metavar": "N"}
_TIME: dict[str, Any] = {"type": option_values.duration, "metavar": "TIME"}


def add_arguments(parser: Parser) -> None:
    _what_to_run(parser.add_argument_group("what to run"))
    _where(parser.add_argument_group("where, and with what"))
    _sweep(parser.add_argument_group("many jobs at once"))
    _when(parser.add_argument_group("when, and for how long"))
    _how_to_answer(parser.add_argument_group("how to answer"))


def _what_to_run(group: Group) -> None:
    entry = group.add_mutually_exclusive_group()
    entry.add_argument("-m", "--module", action="store_true", help="the word that follows the options is a module")
    entry.add_argument("--no-python", action="store_true", help="it is a command that is not Python")
    group.add_argument("--name", help="what people call the job (default: the script's name)")
    group.add_argument("--code", metavar="DIR", help="the directory that holds the program (default: this one)")
    setup = "a command that is run once on each node before the ranks, its words as in a shell; repeatable"
    group.add_argument("--setup", metavar="COMMAND", type=option_values.command, **_MANY, help=setup)
    file = "settings of the launch, from a file that `accel config` writes; --env, --nodes and the like go before it"
    group.add_argument("--config_file", metavar="FILE", help=file)
    variable = "a variable for the job; without a value, the one it has here; repeatable"
    group.add_argument("--env", metavar="NAME[=VALUE]", type=option_values.environment, **_MANY, help=variable)
    secret = "a variable whose value is read here: env:NAME or file:PATH (kubernetes: secret:NAME/KEY); repeatable"
    group.add_argument("--secret", metavar="NAME=REFERENCE", type=option_values.secret, **_MANY, help=secret)


def _where(group: Group) -> None:
    group.add_argument("--target", help="a name in accel.yaml, or a kind of target (default: local)")
    nodes = "machines (default: 1, or as --hosts, --hostfile or --config_file says); 2:8 for a world that may grow"
    group.add_argument("--nodes", type=option_values.nodes, metavar="N", help=nodes)
    group.add_argument("--procs-per-node", **_COUNT, help="processes on each (default: one per GPU, or one)")
    group.add_argument("--gpus", **_COUNT, help="GPUs on each node (default: 0, or as a --config_file says)")
    group.add_argument("--cpus", **_COUNT, help="CPU cores on each node")
    group.add_argument(
        "--memory", metavar="SIZE", type=option_values.memory, help="on each node: 512M, 16G (16 means 16G)"
    )
    option = "an option of the target, typed as in accel.yaml; repeatable"
    group.add_argument("--accelerator", metavar="TYPE", help="the type of the GPUs, where the target can choose")
    group.add_argument("--image", metavar="IMAGE", help="a container image, where the target runs one")
    group.add_argument("--option", metavar="KEY=VALUE", type=option_values.option, **_MANY, help=option)
    hosts = "machines of an ssh target: a,b or user@host:port or gpu[01-16], or a pattern of ~/.ssh/config"
    group.add_argument("--hosts", metavar="LIST", help=hosts)
    group.add_argument(
        "--hostfile", metavar="FILE", help="a file with a machine a line (Open MPI's, DeepSpeed's syntax)"
    )
    group.add_argument("--spares", **_COUNT, help="further machines of the ssh target, to replace bad ones")
    group.add_argument("--interface", metavar="NAME", help="the network interface that machines of it meet on")
    group.add_argument("--concurrency", **_COUNT, help="jobs that run at once on a machine (local, ssh); others wait")
    group.add_argument("--snapshot", action="store_true", help="run a copy of the code as it is now (local, slurm)")


def _sweep(group: Group) -> None:
    axis = "a job for each value: {NAME} in the arguments, or --NAME VALUE after them; repeatable, all combinations"
    group.add_argument("--sweep", metavar="NAME=V1,V2", type=option_values.axis, **_MANY, help=axis)
    group.add_argument("--array", metavar="FILE", help="the same from a table: CSV, or YAML with points or a grid")


def _when(group: Group) -> None:
    group.add_argument("--after", metavar="JOB", **_MANY, help="start when this job has succeeded; repeatable")
    group.add_argument("--time-limit", **_TIME, help="for one attempt: 90 (s), 30m, 1h30m")
    group.add_argument("--grace", **_TIME, default=30.0, help="between SIGTERM and SIGKILL (default: 30s)")
    restarts = "how often all ranks are started again after a failure (default: 0)"
    group.add_argument("--max-restarts", **_COUNT, default=0, help=restarts)


def _how_to_answer(group: Group) -> None:
    follow = group.add_mutually_exclusive_group()
    follow.add_argument("--follow", action="store_true", help="print what the job writes and exit with its exit code")
    follow.add_argument("--detach", action="store_true", help="print the job's id and return (the default)")
    dry = "print what would be done, and do nothing; =server: and ask the target what it would refuse of it"
    group.add_argument("--dry-run", nargs="?", const="client", choices=("client", "server"), help=dry)
    group.add_argument("--json", action="store_true", help="answer in JSON")
