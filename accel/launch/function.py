"""Launchers that run a function in several processes of one world, from a notebook or a test."""

from __future__ import annotations

import contextlib
import os
import socket
import string
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TextIO

from accel.enums import DistributedType, PrecisionType
from accel.errors import ArgumentError, ProcessError, StateError, one_of
from accel.world.environment import World, are_libraries_initialized, patch_environment, read_flag, torchrun_variables
from accel.world.ports import get_free_port, port_number

from .devices import find, only_cpu
from .fork_pool import Task
from .fork_pool import run as run_forked

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

_PORT = "29500"
_BACKENDS = ("static", "c10d")


def test_launch() -> None:
    """Form the world; `notebook_launcher` runs this first in debug mode."""
    from accel.state import PartialState

    PartialState()


test_launch.__test__ = False  # type: ignore[attr-defined]  # the name is Accelerate's: keep pytest from collecting it


def notebook_launcher(
    function: Callable[..., Any],
    args: tuple[Any, ...] = (),
    num_processes: int | None = None,
    mixed_precision: str = "no",
    use_port: int | str = _PORT,
    master_addr: str = "127.0.0.1",
    node_rank: int = 0,
    num_nodes: int = 1,
    rdzv_backend: str = "static",
    rdzv_endpoint: str = "",
    rdzv_conf: Mapping[str, Any] | None = None,
    rdzv_id: str = "none",
    max_restarts: int = 0,
    monitor_interval: float = 0.1,
    log_line_prefix_template: str | None = None,
) -> None:
    """Run ``function(*args)`` in ``num_processes`` processes of one world, forked from this one.

    ``num_processes``: on this machine (default: one per GPU, or one). Without GPUs the world uses gloo. If the
        world has one process, the function runs in this one.
    ``mixed_precision``: unless ``"no"``, the default for `Accelerator`.
    ``use_port``: on one machine, 29500 means any free port.
    ``num_nodes``: each machine calls this with the same ``master_addr`` and ``use_port``, or ``rdzv_endpoint``,
        and its own ``node_rank``.
    ``rdzv_backend``: ``"c10d"`` connects machines through torch's elastic agent, with ``rdzv_conf``, ``rdzv_id``
        and ``monitor_interval``.
    ``max_restarts``: how often all processes are restarted after a failure.
    ``log_line_prefix_template``: a prefix for printed lines, with ``${rank}``, ``${local_rank}`` or
        ``${role_name}``.

    Forked processes compute with one CPU thread: OpenMP's threads do not survive a fork.

    Raises `StateError` if this process has used the GPU or created an `Accelerator`, which forks cannot share,
    `ProcessError` with the traceback of the process that failed first, and `ArgumentError`. On any error, an
    interrupt included, all processes and their descendants are ended first.
    """
    precision = one_of(
        str(mixed_precision).lower(), PrecisionType.list(), source="notebook_launcher(mixed_precision=…)"
    )
    one_of(rdzv_backend, _BACKENDS, source="notebook_launcher(rdzv_backend=…)")
    _check_nodes(node_rank, num_nodes, rdzv_backend, max_restarts)
    _refuse_tpu()
    cpu = read_flag(os.environ, "ACCELERATE_USE_CPU")
    devices = only_cpu() if cpu else find()
    count = devices.count if num_processes is None else _positive("num_processes", num_processes)
    extra = {} if precision == "no" else {"ACCELERATE_MIXED_PRECISION": precision}
    if count * num_nodes == 1:
        print(f"Launching training on one {devices.kind.upper()}.")
        with patch_environment(**extra):
            function(*args)
        return
    if devices.kind in ("cuda", "xpu") and count > devices.count:
        raise ArgumentError(
            f"notebook_launcher(num_processes={count}): this machine shows {devices.count} {devices.kind} device(s), "
            "and every process needs one of its own; use fewer, or set ACCELERATE_USE_CPU=1"
        )
    _refuse_unforkable_state(devices.kind)
    launch = _Launch(
        count=count, nodes=num_nodes, node_rank=node_rank, endpoint=rdzv_endpoint or f"{master_addr}:{use_port}",
        env=extra, prefix=log_line_prefix_template, backend=rdzv_backend, conf=dict(rdzv_conf or {}), run_id=rdzv_id,
        restarts=max_restarts, interval_s=monitor_interval,
    )  # fmt: skip
    if read_flag(os.environ, "ACCELERATE_DEBUG_MODE"):
        launch.run(test_launch, ())
    print(f"Launching training on {count} {devices.kind.upper()} processes.")
    launch.run(function, tuple(args))


def debug_launcher(function: Callable[..., Any], args: tuple[Any, ...] = (), num_processes: int = 2) -> None:
    """Run ``function(*args)`` in ``num_processes`` CPU processes of one world, for tests.

    The processes are forked, use gloo and one thread each. Raises the errors of `notebook_launcher`.
    """
    count = _positive("num_processes", num_processes, "debug_launcher")
    _refuse_unforkable_state("cpu")
    env = {"ACCELERATE_USE_CPU": "1", "ACCELERATE_MIXED_PRECISION": "no"}
    _Launch(count=count, endpoint=f"127.0.0.1:{_PORT}", env=env).run(function, tuple(args))


class PrepareForLaunch:
    """A callable for `torch.multiprocessing.start_processes` that sets the rank, then calls ``launcher(*args)``.

    ``NPROC`` in the environment is the number of processes per node, ``NODE_RANK`` this node's rank. With
    ``debug`` it first forms a gloo world of ``WORLD_SIZE`` processes that meet in ``ACCELERATE_DEBUG_RDV_FILE``.
    """

    def __init__(self, launcher: Callable[..., Any], distributed_type: str = "NO", debug: bool = False) -> None:
        self.launcher = launcher
        self.distributed_type = DistributedType(distributed_type)
        self.debug = debug

    def __call__(self, index: int, *args: Any) -> None:
        if self.debug:
            _file_rendezvous(index)
        elif self.distributed_type is not DistributedType.NO:
            per_node, node = int(os.environ.get("NPROC", "1")), int(os.environ.get("NODE_RANK", "0"))
            os.environ.update(LOCAL_RANK=str(index), RANK=str(per_node * node + index))
        os.environ["FORK_LAUNCHED"] = "1"
        self.launcher(*args)


@dataclass(frozen=True, kw_only=True)
class _Launch:
    """This machine's part of a world of forked processes."""

    count: int
    endpoint: str
    env: Mapping[str, str]
    nodes: int = 1
    node_rank: int = 0
    prefix: str | None = None
    backend: str = "static"
    conf: Mapping[str, Any] = field(default_factory=dict)
    run_id: str = "none"
    restarts: int = 0
    interval_s: float = 0.1

    def run(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        if self.backend == "c10d" and self.nodes > 1:
            self._run_elastic(function, args)
            return
        for attempt in range(self.restarts + 1):
            try:
                with self._rendezvous() as (host, port, variables):
                    tasks = [
                        self._task(rank, host, port, attempt, variables, function, args) for rank in range(self.count)
                    ]
                    run_forked(tasks, partial(_prepare, self.prefix), _finish)
                return
            except ProcessError as error:
                if attempt == self.restarts:
                    raise
                print(f"attempt {attempt}: {str(error).splitlines()[0]}; starting again", file=sys.stderr)

    @contextlib.contextmanager
    def _rendezvous(self) -> Iterator[tuple[str, int, dict[str, str]]]:
        """Yield the host and port of the rendezvous, and its variables.

        The store of a one-machine world is served here, on the loopback address. A port that is only free now, for
        rank 0 to bind later, can be lost to another launch.
        """
        host, port = self._master()
        if self.nodes > 1:
            yield host, port, {}
            return
        from torch._C._distributed_c10d import TCPStore

        host = "127.0.0.1"
        try:
            listener = socket.create_server((host, port))
        except OSError as error:
            raise ArgumentError(
                f"notebook_launcher: port {port}: {error.strerror}. Use another, or 0 for any"
            ) from None
        port = listener.getsockname()[1]
        store = TCPStore(host, port, None, True, wait_for_workers=False, master_listen_fd=listener.detach())
        try:
            yield host, port, {"TORCHELASTIC_USE_AGENT_STORE": "True"}
        finally:
            del store

    def _master(self) -> tuple[str, int]:
        """Return host and port; port 0 means any free one, on one machine."""
        host, _, port = self.endpoint.rpartition(":")
        if not host:
            raise ArgumentError(f"notebook_launcher(rdzv_endpoint={self.endpoint!r}) must be HOST:PORT")
        if self.nodes == 1 and port in (_PORT, "0"):
            return host, 0
        return host, port_number(port)

    def _task(
        self, local_rank: int, host: str, port: int, attempt: int, variables: Mapping[str, str],
        function: Callable[..., Any], args: tuple[Any, ...],
    ) -> Task:  # fmt: skip
        world = World(
            rank=self.node_rank * self.count + local_rank, size=self.nodes * self.count, local_rank=local_rank,
            local_size=self.count, master_addr=host, master_port=port,
        )  # fmt: skip
        restarts = {"TORCHELASTIC_RESTART_COUNT": str(attempt), "TORCHELASTIC_MAX_RESTARTS": str(self.restarts)}
        env = {**self.env, **restarts, **torchrun_variables(world), **variables}
        return Task(rank=world.rank, local_rank=local_rank, env=env, function=function, args=args)

    def _run_elastic(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

        host, port = self._master()
        config = LaunchConfig(
            min_nodes=self.nodes, max_nodes=self.nodes, nproc_per_node=self.count, run_id=self.run_id,
            rdzv_endpoint=f"{host}:{port or get_free_port()}", rdzv_backend=self.backend, rdzv_configs=dict(self.conf),
            max_restarts=self.restarts, monitor_interval=self.interval_s, start_method="fork",
        )  # fmt: skip

        def rank(*args: Any) -> None:
            _as_elastic_rank(function, self.env, self.prefix, args)

        try:
            elastic_launch(config, rank)(*args)
        except ChildFailedError as error:
            raise _first_of(error) from None


def _prepare(prefix: str | None, task: Task) -> None:
    """Set up a forked process before the function runs: reset the state inherited from its parent."""
    import torch

    from accel.gradient_state import GradientState
    from accel.state import PartialState

    PartialState._reset_state()
    GradientState._reset_state()
    torch.set_num_threads(1)  # GNU's OpenMP would wait for ever for the parent's threads
    os.environ["FORK_LAUNCHED"] = "1"
    label = string.Template(prefix or "").safe_substitute(
        rank=os.environ["RANK"], local_rank=os.environ["LOCAL_RANK"], role_name="default"
    )
    sys.stdout, sys.stderr = _LineBuffer(sys.stdout, label), _LineBuffer(sys.stderr, label)


def _finish() -> None:
    from accel.world import process_group as world

    world.destroy_process_group()


def _as_elastic_rank(
    function: Callable[..., Any], env: Mapping[str, str], prefix: str | None, args: tuple[Any, ...]
) -> None:
    os.environ.update(env)
    task = Task(
        rank=int(os.environ["RANK"]), local_rank=int(os.environ["LOCAL_RANK"]), env=env, function=function, args=args
    )
    _prepare(prefix, task)
    function(*args)
    _finish()


def _first_of(error: ChildFailedError) -> ProcessError:
    rank, failure = error.get_first_failure()
    message: dict[str, Any] = failure.error_file_data.get("message", {}) or {}
    text = message if isinstance(message, str) else str(message.get("message") or failure.message)
    trace = "" if isinstance(message, str) else str(message.get("extraInfo", {}).get("py_callstack", ""))
    return ProcessError("\n\n".join(filter(None, (f"process {rank} failed first: {text}", trace.rstrip()))))


class _LineBuffer:
    """A stream that forwards complete lines, each with a label; other attributes are the stream's own.

    A notebook shows every write separately, and `print` writes once per argument: the lines of several processes
    would mix.
    """

    def __init__(self, stream: TextIO, label: str) -> None:
        self._stream = stream
        self._label = label
        self._partial_line = ""
        self._at_start = True

    def write(self, text: str) -> int:
        """Forward the lines that ``text`` completes, in one write."""
        lines, newline, self._partial_line = (self._partial_line + text).rpartition("\n")
        self._forward(lines + newline)
        return len(text)

    def flush(self) -> None:
        """Forward an incomplete last line too."""
        last_line, self._partial_line = self._partial_line, ""
        self._forward(last_line)
        self._stream.flush()

    def writelines(self, lines: Iterable[str]) -> None:
        self.write("".join(lines))

    def _forward(self, text: str) -> None:
        if text:
            lines = text.splitlines(keepends=True)
            labels = [self._label * self._at_start, *[self._label] * (len(lines) - 1)]
            self._stream.write("".join(label + line for label, line in zip(labels, lines, strict=True)))
            self._at_start = text.endswith("\n")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _file_rendezvous(rank: int) -> None:
    import torch.distributed as dist
    from torch.distributed import FileStore  # type: ignore[attr-defined]

    size, path = int(os.environ["WORLD_SIZE"]), os.environ["ACCELERATE_DEBUG_RDV_FILE"]
    dist.init_process_group("gloo", rank=rank, store=FileStore(path, size), world_size=size)


def _positive(name: str, value: int, launcher: str = "notebook_launcher") -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ArgumentError(f"{launcher}({name}={value!r}): expects a whole number of 1 or more")
    return value


def _check_nodes(node_rank: int, num_nodes: int, backend: str, restarts: int) -> None:
    _positive("num_nodes", num_nodes)
    if not 0 <= node_rank < num_nodes:
        raise ArgumentError(f"notebook_launcher(node_rank={node_rank}) is not one of 0 … {num_nodes - 1} (num_nodes)")
    if restarts and num_nodes > 1 and backend == "static":
        raise ArgumentError("notebook_launcher(max_restarts=…) on several nodes needs rdzv_backend='c10d'")


def _refuse_tpu() -> None:
    if os.environ.get("PJRT_DEVICE") == "TPU" or os.environ.get("TPU_NAME"):
        raise StateError("notebook_launcher does not support TPUs: choose a GPU runtime")


def _refuse_unforkable_state(kind: str) -> None:
    import torch

    from accel.state import PartialState, is_initialized

    if is_initialized() or PartialState._shared_state.get("use_distributed"):
        raise StateError(
            "this program has made an Accelerator, which forked processes cannot share: restart it, "
            "and make the Accelerator inside the function that is launched"
        )
    if kind == "cpu":
        return
    module = getattr(torch, kind)
    used = bool(module.is_initialized()) or PartialState._shared_state.get("device", torch.device("cpu")).type == kind
    if used:
        raise StateError(
            f"this program has used {kind.upper()}, which forked processes cannot share: restart it (in a notebook: "
            f"Kernel, Restart), and touch {kind.upper()} only inside the function that is launched"
        )
    libraries = are_libraries_initialized("bitsandbytes")
    if libraries:
        raise StateError(
            f"{libraries[0]} was imported, which uses {kind.upper()} at once, and forked processes cannot share that: "
            "restart this program, and import it inside the function that is launched"
        )
