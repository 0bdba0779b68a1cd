"""Checks of checkpoints, preemption, records, traces and big models."""

from __future__ import annotations

import glob
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import DataLoader

from accel.accelerator import Accelerator
from accel.big_models import init_empty_weights, load_checkpoint_and_dispatch
from accel.collectives import all_objects
from accel.parallel.shares import full_tensor
from accel.plugins import ProfileKwargs
from accel.selftest.expect import expect_close, expect_equal
from accel.selftest.training_checks import Layer

_STEPS_TO_AGREE = 64  # there is an exchange every 16 steps or sooner, and the third reports a warning at the latest


@contextmanager
def _shared_folder(accelerator: Accelerator) -> Iterator[str]:
    """Yield a folder that all processes see: a temporary one, or, with several nodes, one in the working directory."""
    one_node = len(set(all_objects(os.uname().nodename))) == 1
    created = ""
    if accelerator.is_main_process:
        created = tempfile.mkdtemp(prefix="accel-sanity-", dir=None if one_node else os.getcwd())
    folder = str(all_objects(created)[0])
    try:
        yield folder
        accelerator.wait_for_everyone()
    finally:
        if accelerator.is_main_process:
            shutil.rmtree(folder, ignore_errors=True)


def checkpoints(accelerator: Accelerator) -> None:
    """Check that a checkpoint restores weights, momentum and random numbers."""
    plain_model = Layer(2, 2)
    samples: Any = torch.ones(4 * accelerator.num_processes, 2)
    model, optimizer, loader = accelerator.prepare(
        plain_model, torch.optim.SGD(plain_model.parameters(), lr=0.1, momentum=0.9), DataLoader(samples, batch_size=2)
    )

    def epoch() -> list[float]:
        for batch in loader:
            accelerator.backward(model(batch).pow(2).sum())
            optimizer.step()
            optimizer.zero_grad()
        return [*full_tensor(plain_model.weight).flatten().tolist(), torch.rand(1).item()]

    with _shared_folder(accelerator) as folder:
        epoch()
        path = os.path.join(folder, "checkpoint")
        accelerator.save_state(path)
        expected = epoch()
        accelerator.load_state(path)
        expect_equal("going on from a checkpoint", epoch(), expected)
        weights = glob.glob(os.path.join(path, "**", "*.safetensors"), recursive=True)
        expect_equal("a file of weights", bool(weights), True)
    accelerator.free_memory()


def preemption(accelerator: Accelerator) -> None:
    """Check that all processes learn of a warning to one of them at the same step."""
    expect_equal("before a warning", accelerator.preempted, False)
    if accelerator.is_last_process:
        os.kill(os.getpid(), signal.SIGUSR1)
    agreed_step = next((step for step in range(_STEPS_TO_AGREE) if accelerator.preempted), None)
    expect_equal("a warning is reported", agreed_step is not None, True)
    expect_equal("the step of the report", all_objects(agreed_step), [agreed_step] * accelerator.num_processes)


def records(accelerator: Accelerator) -> None:
    """Check that logged values are on disk, once."""
    with _shared_folder(accelerator) as folder:
        tracked = Accelerator(log_with="jsonl", project_dir=folder)
        tracked.init_trackers("sanity", config={"lr": 0.1})
        tracked.log({"loss": 0.5}, step=3)
        for tracker in tracked.trackers:
            tracker.finish()
        accelerator.wait_for_everyone()
        logged = [
            (line["step"], line["values"])
            for path in glob.glob(os.path.join(folder, "**", "*.jsonl"), recursive=True)
            for line in _lines(path)
            if line["kind"] == "log"
        ]
        expect_equal("records", logged, [(3, {"loss": 0.5})])


def _lines(path: str) -> list[dict[str, Any]]:
    with open(path) as file:
        return [json.loads(line) for line in file]


def big_models(accelerator: Accelerator) -> None:
    """Check that an empty model, loaded from a file and offloaded to CPU and disk, computes the same."""
    torch.manual_seed(7)
    reference = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    inputs = torch.ones(1, 4)
    with tempfile.TemporaryDirectory(prefix="accel-sanity-") as folder, torch.no_grad():
        weights = os.path.join(folder, "pytorch_model.bin")
        torch.save(reference.state_dict(), weights)
        with init_empty_weights():
            empty = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        expect_equal("an empty model's device", str(empty[0].weight.device), "meta")
        device_map = {"0": "cpu", "1": "disk"}
        dispatched = load_checkpoint_and_dispatch(
            empty, weights, device_map, offload_folder=os.path.join(folder, "offload")
        )
        expect_close("the output", dispatched(inputs), reference(inputs))


def profiling(accelerator: Accelerator) -> None:
    """Check that every process writes its own trace."""
    with _shared_folder(accelerator) as folder:
        handler = ProfileKwargs(activities=["cpu"], output_trace_dir=folder)
        with _silence_stderr(), accelerator.profile(handler):
            torch.ones(2, 2) @ torch.ones(2, 2)
        names = sorted(os.listdir(folder))
        expect_equal("traces", names, sorted(f"profile_{rank}.json" for rank in range(accelerator.num_processes)))
        with open(os.path.join(folder, names[0])) as file:
            expect_equal("events in a trace", bool(json.load(file)["traceEvents"]), True)


@contextmanager
def _silence_stderr() -> Iterator[None]:
    """Silence stderr: torch's profiler reports its start and end there, from C++."""
    stderr_copy, devnull = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 2)
    try:
        yield
    finally:
        os.dup2(stderr_copy, 2)
        os.close(stderr_copy)
        os.close(devnull)
