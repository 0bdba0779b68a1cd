"""Names of modules that are stored, pickled, sent to other machines or printed in documents answer as before."""

from __future__ import annotations

import importlib
import pickle
import subprocess
import sys

import pytest

from tests.needs import package

# Run with `python -m`: arguments, and how the output begins.
RUN: tuple[tuple[str, list[str], str], ...] = (
    ("accel.commands.launch", ["--help"], "usage: accel launch"),
    ("accel.compat", ["--help"], "usage: python -m accel.compat"),
    ("accel.launch.devices", [], '{"kind": '),
)
# Pickled in the files of users' models and in queued jobs.
PICKLED = (
    "accel.big_models.align AlignDevicesHook",
    "accel.big_models.casting LayerwiseCastingHook",
    "accel.big_models.hooks ModelHook",
    "accel.big_models.hooks SequentialHook",
    "accel.big_models.hooks CpuOffload",
    "accel.big_models.hooks UserCpuOffloadHook",
    "accel.big_models.offload OffloadedWeightsLoader",
    "accel.big_models.offload PrefixedDataset",
    "accel.precision.amp AutocastForward",
    "accel.precision.outputs ConvertOutputsToFp32",
    "schedulers.slurm.node NodeMain",
)
# Printed in documents, called by entry points, or run by name: here in the argv of stored jobs, or on other machines.
IMPORTED = (
    "accel.cli main",
    "accel.compiling compile_regions",
    "accel.exit_codes REQUEUE",
    "accel.launch.function notebook_launcher",
    "accel.launch.xla main",
    "accel.local_sgd LocalSGD",
    "accel.memory find_executable_batch_size",
    "accel.plugins GradientAccumulationPlugin",
    "accel.progress tqdm",
    "accel.sanity main",
    "accel.settings.reference write",
    "schedulers.local.supervisor main",
    "schedulers.slurm.submitting main",
    "schedulers.sweeps submit_sweep",
)


@pytest.mark.parametrize("name", IMPORTED)
def test_a_name_is_offered(name: str) -> None:
    module, _, attribute = name.partition(" ")
    assert hasattr(importlib.import_module(module), attribute)


@pytest.mark.parametrize("name", PICKLED)
def test_a_pickle_finds_its_class(name: str) -> None:
    package("torch")
    module, _, attribute = name.partition(" ")
    found = pickle.loads(f"c{module}\n{attribute}\n.".encode())
    assert (found.__module__, found.__qualname__) == (module, attribute)  # and is pickled under that name


@pytest.mark.parametrize(("module", "argv", "output"), RUN, ids=[module for module, _, _ in RUN])
def test_a_module_runs(module: str, argv: list[str], output: str) -> None:
    done = subprocess.run([sys.executable, "-m", module, *argv], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(output)
