"""`accelerate.test_utils.testing`: the helpers that the tests of peft, diffusers and others import."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import shutil
import subprocess
import sys
import tempfile
import unittest
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch

import accel
from accel.collectives import gather
from accel.state import AcceleratorState, GradientState
from accel.world import available
from accel.world.environment import parse_flag_from_env
from accel.world.hardware import check_cuda_fp8_capability
from accel.world.versions import compare_versions, is_torch_version

Test = TypeVar("Test")

_MODULES = ("mlu", "sdaa", "musa", "npu", "xpu", "hpu", "neuron")


def get_backend() -> tuple[str, int, Callable[[], int]]:
    """Return the kind of device for tests, the number of devices, and a function that returns the bytes allocated."""
    if available.is_torch_xla_available():
        return "xla", torch.cuda.device_count(), torch.cuda.memory_allocated
    if available.is_cuda_available():
        return "cuda", torch.cuda.device_count(), torch.cuda.memory_allocated
    if available.is_mps_available():
        return "mps", 1, torch.mps.current_allocated_memory
    for kind in _MODULES:
        if getattr(available, f"is_{kind}_available")():
            module = getattr(torch, kind)
            return kind, module.device_count(), module.memory_allocated
    return "cpu", 1, lambda: 0


torch_device, device_count, memory_allocated_func = get_backend()


def path_in_accelerate_package(*components: str) -> Path:
    """Return a path within the imported `accelerate` package, which is accel's own directory."""
    return Path(accel.__file__).parent.joinpath(*components)


def get_launch_command(**flags: Any) -> list[str]:
    """Return the argv of an ``accelerate launch``. ``True`` is a bare flag; ``None`` and ``False`` are omitted."""
    argv = ["accelerate", "launch"]
    for name, value in flags.items():
        if value is True:
            argv.append(f"--{name}")
        elif value is not None and value is not False:
            argv.append(f"--{name}={value}")
    return argv


DEFAULT_LAUNCH_COMMAND = get_launch_command(num_processes=device_count, monitor_interval=0.1)


class _Need(NamedTuple):
    met: Callable[[], bool]
    reason: str


def _packages(*names: str) -> Callable[[], bool]:
    return lambda: all(getattr(available, f"is_{name}_available")() for name in names)


def _is_cuda() -> bool:
    return available.is_cuda_available() and not available.is_torch_xla_available()


def _has_fp8() -> bool:
    if torch.cuda.is_available() and not check_cuda_fp8_capability():
        return False
    return available.is_fp8_available() and not (available.is_hpu_available() and available.is_habana_gaudi1())


def _has_trackers() -> bool:
    installed = (_packages(name)() for name in ("wandb", "tensorboard", "trackio", "swanlab"))
    return any(installed) and not available.is_comet_ml_available()


# NAME of require_NAME → the condition for running a test, and what the test requires.
_NEEDS: dict[str, _Need] = {
    "cpu": _Need(lambda: torch_device == "cpu", "a machine without accelerators"),
    "non_cpu": _Need(lambda: torch_device != "cpu", "an accelerator"),
    "cuda": _Need(_is_cuda, "a GPU"),
    "cuda_or_hpu": _Need(lambda: _is_cuda() or available.is_hpu_available(), "a GPU or HPU"),
    "cuda_or_xpu": _Need(lambda: _is_cuda() or available.is_xpu_available(), "a GPU or XPU"),
    "non_xpu": _Need(lambda: torch_device != "xpu", "a device other than an XPU"),
    "non_hpu": _Need(lambda: torch_device != "hpu", "a device other than an HPU"),
    "fp8": _Need(_has_fp8, "fp8"),
    "fsdp2": _Need(lambda: is_torch_version(">=", "2.5.0"), "torch 2.5 or newer"),
    "huggingface_suite": _Need(_packages("transformers", "datasets"), "transformers and datasets"),
    "tpu": _Need(lambda: available.is_torch_xla_available(check_is_tpu=True), "a TPU"),
    "non_torch_xla": _Need(lambda: not available.is_torch_xla_available(), "an environment without torch_xla"),
    "single_device": _Need(lambda: torch_device != "cpu" and device_count == 1, "exactly one accelerator"),
    "single_gpu": _Need(lambda: torch.cuda.device_count() == 1, "exactly one GPU"),
    "single_xpu": _Need(lambda: torch.xpu.device_count() == 1, "exactly one XPU"),
    "multi_device": _Need(lambda: device_count > 1, "several accelerators"),
    "multi_gpu": _Need(lambda: torch.cuda.device_count() > 1, "several GPUs"),
    "multi_xpu": _Need(lambda: torch.xpu.device_count() > 1, "several XPUs"),
    "multi_gpu_or_xpu": _Need(lambda: torch_device in ("cuda", "xpu") and device_count > 1, "several GPUs or XPUs"),
    "tp": _Need(
        lambda: available.is_transformers_available() and compare_versions("transformers", ">=", "4.52.0"),
        "transformers 4.52 or newer",
    ),
    "trackers": _Need(_has_trackers, "a tracker, and no comet_ml"),
} | {
    name: _Need(_packages(name), name)
    for name in (
        "xpu", "peft", "mlu", "sdaa", "musa", "npu", "neuron", "mps", "datasets", "transformers", "timm", "torchvision",
        "triton", "schedulefree", "bnb", "deepspeed", "tensorboard", "wandb", "trackio", "comet_ml", "aim", "clearml",
        "dvclive", "swanlab", "pandas", "mlflow", "pippy", "import_timer", "transformer_engine",
        "transformer_engine_mxfp8", "torchao", "matplotlib", "torchdata_stateful_dataloader", "fp16",
    )
}  # fmt: skip


def __getattr__(name: str) -> Any:
    requirement = _NEEDS.get(name.removeprefix("require_")) if name.startswith("require_") else None
    if requirement is None:
        raise AttributeError(f"module {__name__} has no attribute {name!r}")
    return partial(_unless, requirement)


def _unless(requirement: _Need, test: Test) -> Test:
    return unittest.skipUnless(requirement.met(), f"test requires {requirement.reason}")(test)  # type: ignore[type-var]


skip = unittest.skip("Test was skipped")


def slow(test: Any) -> Any:
    """Skip a test unless the environment variable ``RUN_SLOW`` is true."""
    return unittest.skipUnless(parse_flag_from_env("RUN_SLOW", False), "test is slow")(test)


def require_torch_min_version(test: Any = None, version: str | None = None) -> Any:
    """Skip a test if torch is older than ``version``."""
    if test is None:
        return partial(require_torch_min_version, version=version)
    met = is_torch_version(">=", str(version))
    return unittest.skipUnless(met, f"test requires torch {version} or newer")(test)


def run_first(test: Any) -> Any:
    """Mark a test to run before others, if pytest and pytest-order are installed."""
    if not available.is_pytest_available():
        return test
    import pytest

    return pytest.mark.order(1)(test)


class TempDirTestCase(unittest.TestCase):
    """A test case with a temporary directory, ``tmpdir``, emptied before each test if ``clear_on_setup``."""

    clear_on_setup = True
    tmpdir: ClassVar[Path]

    @classmethod
    def setUpClass(cls) -> None:
        """Create the directory that the class's tests share."""
        cls.tmpdir = Path(tempfile.mkdtemp())

    @classmethod
    def tearDownClass(cls) -> None:
        """Remove the directory."""
        shutil.rmtree(cls.tmpdir, ignore_errors=True)

    def setUp(self) -> None:
        """Empty the directory, if `clear_on_setup`."""
        for path in self.tmpdir.iterdir() if self.clear_on_setup else ():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()


class AccelerateTestCase(unittest.TestCase):
    """A test case that resets the states after each test."""

    def tearDown(self) -> None:
        """Reset accel's shared states."""
        super().tearDown()
        AcceleratorState._reset_state(True)
        GradientState._reset_state()


class MockingTestCase(unittest.TestCase):
    """A test case that applies mocks for the length of a test."""

    def add_mocks(self, mocks: Any) -> None:
        """Start one or several mocks; each stops when the test ends."""
        self.mocks = mocks if isinstance(mocks, (list, tuple)) else [mocks]
        for mock in self.mocks:
            mock.start()
            self.addCleanup(mock.stop)


def are_the_same_tensors(tensor: torch.Tensor) -> bool:
    """Return True if every process has the same tensor."""
    local = tensor.to(AcceleratorState().device)
    return all(torch.equal(row, local) for row in gather(local[None].clone()))


class RunOutput(NamedTuple):
    """The exit code of a command, and its output as lines."""

    returncode: int
    stdout: list[str]
    stderr: list[str]


def execute_subprocess_async(
    cmd: Sequence[str | Path],
    env: Mapping[str, str] | None = None,
    stdin: Any = None,
    timeout: float = 180,
    quiet: bool = False,
    echo: bool = True,
) -> RunOutput:
    """Run a command and print its lines as they come, unless ``quiet``.

    Raises `RuntimeError` with its stderr if it fails or exceeds ``timeout`` seconds.
    """
    argv = [str(argument) for argument in cmd]
    if echo:
        print("\nRunning: ", " ".join(argv))
    completed = asyncio.run(_stream(argv, env, stdin, timeout, quiet))
    if completed.returncode:
        stderr = "\n".join(completed.stderr)
        raise RuntimeError(f"'{' '.join(argv)}' failed with returncode {completed.returncode}\n\n{stderr}")
    return completed


async def _stream(argv: list[str], env: Mapping[str, str] | None, stdin: Any, timeout: float, quiet: bool) -> RunOutput:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*argv, env=env, stdin=stdin, stdout=pipe, stderr=pipe)
    assert process.stdout is not None
    assert process.stderr is not None
    stdout: list[str] = []
    stderr: list[str] = []

    async def show(stream: asyncio.StreamReader, lines: list[str], file: Any, label: str) -> None:
        async for raw in stream:
            lines.append(raw.decode(errors="replace").rstrip())
            if not quiet:
                print(label, lines[-1], file=file)

    reading = asyncio.gather(
        show(process.stdout, stdout, sys.stdout, "stdout:"), show(process.stderr, stderr, sys.stderr, "stderr:")
    )
    try:
        await asyncio.wait_for(reading, timeout)
    except asyncio.TimeoutError:
        process.kill()
        stderr.append(f"killed after {timeout:g} s")
    return RunOutput(await process.wait(), stdout, stderr)


def pytest_xdist_worker_id() -> int:
    """Return the number of this pytest-xdist worker; 0 without xdist."""
    return int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))


def get_torch_dist_unique_port() -> int:
    """Return a port that tests of other pytest-xdist workers do not use."""
    return 29500 + pytest_xdist_worker_id()


class SubprocessCallException(Exception):
    """A command run by `run_command` failed."""


def run_command(
    command: Sequence[str | Path], return_stdout: bool = False, env: Mapping[str, str] | None = None
) -> str | None:
    """Run a command; with ``return_stdout`` return its output. Raises `SubprocessCallException`."""
    argv = [str(argument) for argument in command]
    completed = subprocess.run(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    printed = completed.stdout.decode(errors="replace")
    if completed.returncode:
        raise SubprocessCallException(f"Command `{' '.join(argv)}` failed with the following error:\n\n{printed}")
    return printed if return_stdout else None


@contextlib.contextmanager
def assert_exception(exception_class: type[BaseException], msg: str | None = None) -> Iterator[None]:
    """Assert that the block raises this exception, with ``msg`` in its text."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, exception_class):
            raise AssertionError(f"expected {exception_class}, got {type(error)}") from error
        if msg is not None and msg not in str(error):
            raise AssertionError(f"expected {msg!r} in {str(error)!r}") from error
    else:
        raise AssertionError(f"expected {exception_class}, and nothing was raised")


def capture_call_output(func: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """Return what ``func(*args, **kwargs)`` prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        func(*args, **kwargs)
    return printed.getvalue()
