"""The run of a plan on this node, from its start to its exit code."""

from __future__ import annotations

import os
import signal
import sys
import uuid
from dataclasses import replace
from typing import NoReturn

from accel.known_causes import EXPLAIN

from . import incarnation, signals, watchdog
from .console import cannot_run, event_writer, print_message
from .errors import LaunchConfigError, LaunchError, RendezvousFailed
from .plan import Launch
from .worker import Program, exec_command, ignore_warnings, open_log


def launch(run: Launch) -> int:
    """Run this node's ranks to their end. Return the exit code of the first rank, on any node, that failed.

    With one process in all, and neither log directory nor time limit, this does not return: the program replaces
    this process, or the child of PID 1.
    """
    _open_standard_descriptors()
    for fd in run.job_fds:
        os.set_inheritable(fd, False)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # inherited as ignored, it would hide children's exit codes
    run = _count_start(run)
    if run.start_message and not run.quiet:
        print_message(f"accel launch: {run.start_message}")
    ignore_warnings()  # at once: a scheduler's warning may come while torch loads
    if run.log_dir:
        _check_log_dir(run.log_dir)
    launch_id = uuid.uuid4().hex
    os.environ.update(run.env)
    os.environ.pop(EXPLAIN, None)  # a launcher reports the errors of the ranks that it starts
    os.environ[watchdog.LAUNCH_ID] = launch_id
    if run.is_single_process:
        os.environ.update(_single_process_variables(run))
        if run.log_dir is None and run.deadline is None:
            code = signals.stay_as_pid1() if os.getpid() == 1 else None
            if code is not None:
                return code
            os.environ[EXPLAIN] = "1"
            _exec_program(run.program, launch_id)
        from .single_process import run_single

        with run.report.written():
            return run_single(run, launch_id)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Nothing runs yet that must be ended, and a KeyboardInterrupt in torch's native initialisation would abort.
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
        event_writer(run.log_dir, run.events)("refused", reason=reason, message=str(error))
        raise


def _count_start(run: Launch) -> Launch:
    """Count this start, and measure the time limit from the first one."""
    start = incarnation.count_start(run.incarnation, os.environ)
    limit = run.deadline and replace(run.deadline, first_at=start.first_at)
    return replace(run, incarnation=start, deadline=limit)


def _single_process_variables(run: Launch) -> dict[str, str]:
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


def _exec_program(program: Program, launch_id: str) -> NoReturn:
    """Replace this process by the program: same pid, same terminal, nothing between it and its user."""
    if sys.platform == "linux":
        watchdog.start_detached(launch_id)
    command = program.command(unbuffered=False)
    sys.stdout.flush()
    try:
        exec_command(command)
    except OSError as error:
        raise cannot_run(command, error) from None


def _open_standard_descriptors() -> None:
    """Open 0, 1 and 2 if the caller closed them, so that no pipe of accel's gets the number and so ranks' output."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, this one


def _check_log_dir(log_dir: str) -> None:
    try:
        os.makedirs(log_dir, exist_ok=True)
        os.close(open_log(os.path.join(log_dir, "launch.jsonl")))
    except OSError as error:
        raise LaunchConfigError(f"--log_dir {log_dir} cannot be written to: {error.strerror}") from None


def _free_port() -> int:
    import socket

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
