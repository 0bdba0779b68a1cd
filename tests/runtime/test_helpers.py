"""Small helpers about processes: progress bars, warnings said once, shares of data sets, questions about objects."""

from __future__ import annotations

import io
import logging
import os
import platform
import socket
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from accel.errors import ArgumentError
from accel.logging import get_logger
from accel.progress import tqdm
from accel.state import PartialState
from accel.training.introspection import (
    get_module_children_bottom_up,
    get_pretty_name,
    merge_dicts,
    model_has_dtensor,
    recursive_getattr,
)
from accel.world import hardware, ports
from accel.world.split import share_of
from tests.needs import package

from .worlds import run, run_one, world_env


def test_worlds_of_several_see_no_gpu() -> None:
    """A machine may have fewer GPUs than a test has processes."""
    assert world_env(1, 2, 1)["CUDA_VISIBLE_DEVICES"] == ""
    assert run(os.getenv, "CUDA_VISIBLE_DEVICES") == ["", ""]
    makefile = (Path(__file__).parents[2] / "Makefile").read_text()
    assert "test test-all test-fast test-affected: export CUDA_VISIBLE_DEVICES :=\n" in makefile


def _bars() -> list[Any]:
    PartialState()
    seen: list[Any] = []
    for options in ({}, {"main_process_only": False}, {"disable": True}):
        shown = io.StringIO()
        items = list(tqdm(range(3), file=shown, **options))
        seen.append((items, "3/3" in shown.getvalue()))
    try:
        tqdm(True, range(3))
    except ArgumentError as error:
        seen.append(str(error))
    return seen


def test_one_bar_for_all_processes() -> None:
    items = [0, 1, 2]
    said = "tqdm(True, …): write it as tqdm(…, main_process_only=True)"
    main, other = run(_bars)
    assert main == [(items, True), (items, True), (items, False), said]
    assert other == [(items, False), (items, True), (items, False), said]


def _warned() -> list[tuple[str, str]]:
    seen: list[tuple[str, str]] = []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append((record.getMessage(), record.funcName))  # type: ignore[method-assign]
    logging.getLogger("warned").addHandler(handler)
    for _ in range(2):
        logger = get_logger("warned")
        logger.warning_once("slow %s", "disk")
        logger.warning_once("slow %s", ["network"])
        logger.warning_once("everywhere", main_process_only=False)
    return seen


def test_a_warning_is_said_once_with_its_caller() -> None:
    main, other = run(_warned)
    assert main == [("slow disk", "_warned"), ("slow ['network']", "_warned"), ("everywhere", "_warned")]
    assert other == [("everywhere", "_warned")]


def test_shares_of_a_data_set() -> None:
    datasets = package("datasets")
    whole = datasets.Dataset.from_dict({"x": list(range(5))})
    assert [share_of(whole, index, 2, False)["x"][:] for index in range(2)] == [[0, 1, 2], [3, 4]]
    assert [share_of(whole, index, 2, True)["x"][:] for index in range(2)] == [[0, 1, 2], [3, 4, 4]]
    few = datasets.Dataset.from_dict({"x": [7]})
    assert [share_of(few, index, 3, True)["x"][:] for index in range(3)] == [[7], [7], [7]]


def test_shares_of_arrays_and_texts() -> None:
    import numpy

    shares = [share_of(numpy.arange(3), index, 2, True).tolist() for index in range(2)]
    assert shares == [[0, 1], [2, 2]]
    with pytest.raises(ArgumentError, match=r"cannot split a set: it has no slices; pass a list"):
        share_of({1, 2, 3}, 0, 2, False)
    with pytest.raises(ArgumentError, match=r"cannot pad a range"):
        share_of(range(3), 1, 2, True)
    with pytest.raises(ArgumentError, match=r"cannot split a int: it has no length"):
        share_of({"a": 1}, 0, 2, False)


def _seeded_before_numpy() -> tuple[float, float]:
    from accel import set_seed

    set_seed(5)
    import numpy

    first = float(numpy.random.rand())
    set_seed(5)
    return first, float(numpy.random.rand())


def test_a_seed_holds_for_numpy_imported_later() -> None:
    first, second = run_one(_seeded_before_numpy)
    assert first == second


def test_modules_come_after_all_they_hold() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Linear(1, 1)))
    named = get_module_children_bottom_up(model, return_fqns=True)
    assert [name for name, _ in named] == ["0", "1.0", "1.1", "1", ""]
    assert [module for _, module in named] == get_module_children_bottom_up(model)
    assert not model_has_dtensor(model)
    assert recursive_getattr(model, "1.1.weight") is named[2][1].weight
    with pytest.raises(AttributeError):
        recursive_getattr(model, "1.9.weight")


def test_a_model_spread_over_a_mesh() -> None:
    assert run(_dtensor) == [True, True]


def _dtensor() -> bool:
    PartialState(cpu=True)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    model = torch.nn.Linear(2, 2)
    mesh = init_device_mesh("cpu", (2,))
    model.weight = torch.nn.Parameter(distribute_tensor(model.weight.detach(), mesh))
    return model_has_dtensor(model)


def test_names_and_dicts() -> None:
    assert [get_pretty_name(thing) for thing in (len, torch.nn.Linear(1, 1), Path)] == ["len", "Linear", "Path"]
    into = {"a": {"x": 1, "y": 2}, "b": 3, "c": 4}
    merged = merge_dicts({"a": {"y": 5}, "b": {"z": 6}}, into)
    assert merged is into
    assert into == {"a": {"x": 1, "y": 5}, "b": {"z": 6}, "c": 4}


def test_ports() -> None:
    port = ports.get_free_port()
    assert not ports.is_port_in_use(port)
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", port))
        listening.listen()
        assert ports.is_port_in_use(str(port))
    with pytest.raises(ArgumentError, match="port 70000 is not a number from 0 to 65535"):
        ports.is_port_in_use(70000)


@pytest.mark.parametrize(("release", "warned"), [("4.19.0-amd64", True), ("5.5.0", False), ("6.1-cloud", False)])
def test_an_old_kernel_is_named(
    release: str, warned: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(platform, "release", lambda: release)
    monkeypatch.setattr(sys, "platform", "linux")
    ports.check_os_kernel()
    assert ["Linux 4.19.0 is older than 5.5.0: processes may hang; update it" in caplog.text] == [warned]


SMI = """#!/bin/sh
case "$1" in
  --query-gpu=name) printf 'NVIDIA GeForce RTX 4090\\nNVIDIA GeForce RTX 4090\\n';;
  --query-gpu=driver_version) printf '%s\\n%s\\n' DRIVER DRIVER;;
  --query-gpu=compute_cap) echo CAPABILITY;;
esac
"""


@pytest.mark.parametrize(
    ("driver", "capability", "safe", "fp8"), [("535.1", "8.6", False, False), ("551.2", "8.9", True, True)]
)
def test_what_the_driver_says(
    driver: str, capability: str, safe: bool, fp8: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a program of nvidia-smi's name, which answers as the real one does."""
    smi = tmp_path / "nvidia-smi"
    smi.write_text(SMI.replace("DRIVER", driver).replace("CAPABILITY", capability))
    smi.chmod(smi.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    hardware.check_cuda_fp8_capability.cache_clear()
    assert hardware.get_gpu_info() == (["NVIDIA GeForce RTX 4090"] * 2, 2)
    assert hardware.get_driver_version() == driver
    assert hardware.check_cuda_p2p_ib_support() is safe
    assert hardware.check_cuda_fp8_capability() is fp8
    hardware.check_cuda_fp8_capability.cache_clear()


def test_without_a_driver_links_are_not_doubted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert hardware.check_cuda_p2p_ib_support() is True


def test_processors_as_linux_lists_them() -> None:
    assert hardware.processors("0-3,8, 10-11\n") == {0, 1, 2, 3, 8, 10, 11}
    assert hardware.processors("") == set()


def test_which_process_this_is_by_any_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert hardware.get_cpu_distributed_information() == hardware.CPUInformation()
    monkeypatch.setenv("PMI_RANK", "3")
    monkeypatch.setenv("PMI_SIZE", "8")
    monkeypatch.setenv("MPI_LOCALRANKID", "1")
    monkeypatch.setenv("MPI_LOCALNRANKS", "2")
    assert hardware.get_cpu_distributed_information() == hardware.CPUInformation(3, 8, 1, 2)
