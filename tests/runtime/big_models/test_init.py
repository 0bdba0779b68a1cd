from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from accel.big_models import find_tied_parameters, init_empty_weights, init_on_device
from accel.errors import ArgumentError
from tests.runtime.big_models.models import Tower

META = torch.device("meta")


def test_parameters_are_empty_and_buffers_are_not() -> None:
    with init_empty_weights():
        model = Tower()
    assert {param.device for param in model.parameters()} == {META}
    assert {buffer.device for buffer in model.buffers()} == {torch.device("cpu")}
    assert nn.Linear(2, 2).weight.device.type == "cpu"


def test_buffers_too_if_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    with init_empty_weights(include_buffers=True):
        assert {buffer.device for buffer in Tower().buffers()} == {META}
    monkeypatch.setenv("ACCELERATE_INIT_INCLUDE_BUFFERS", "yes")
    with init_empty_weights():
        assert {buffer.device for buffer in Tower().buffers()} == {META}
    monkeypatch.setenv("ACCELERATE_INIT_INCLUDE_BUFFERS", "perhaps")
    with pytest.raises(ArgumentError, match="ACCELERATE_INIT_INCLUDE_BUFFERS='perhaps'"), init_empty_weights():
        pass


def test_what_is_tied_stays_tied() -> None:
    with init_empty_weights():
        model = Tower()
        shared = nn.Parameter(torch.zeros(2))
        left, right = nn.Module(), nn.Module()
        left.p = shared
        right.p = shared
    assert find_tied_parameters(model) == [["embed.weight", "head.weight"]]
    assert left.p is right.p
    assert left.p.device == META


def test_class_attributes_and_gradients_of_parameters_stay() -> None:
    class Special(nn.Parameter):
        pass

    with init_empty_weights():
        module = nn.Module()
        special = Special(torch.ones(3), requires_grad=False)
        special.mark = "kept"  # type: ignore[attr-defined]
        module.p = special
        module.count = nn.Parameter(torch.ones(2, dtype=torch.int64), requires_grad=False)
        module.register_parameter("none", None)
    assert type(module.p) is Special
    assert (module.p.device, module.p.requires_grad, module.p.mark) == (META, False, "kept")  # type: ignore[attr-defined]
    assert module.count.dtype == torch.int64


def test_lazy_modules_stay_lazy() -> None:
    with init_empty_weights():
        module = nn.LazyLinear(3)
    assert module(torch.ones(1, 2)).shape == (1, 3)


def test_nested_places_and_errors() -> None:
    with init_on_device(torch.device("cpu")):
        with init_empty_weights():
            inner = nn.Linear(1, 1)
        outer = nn.Linear(1, 1)
    assert (inner.weight.device.type, outer.weight.device.type) == ("meta", "cpu")
    with pytest.raises(KeyError), init_empty_weights():
        raise KeyError
    assert nn.Linear(1, 1).weight.device.type == "cpu"
    with pytest.raises(ArgumentError, match=r"'mteal'.*unknown to torch"), init_on_device("mteal"):
        pass


def test_other_threads_are_left_alone() -> None:
    inside, built = threading.Event(), threading.Event()
    found: list[str] = []

    def build() -> None:
        inside.wait(30)
        found.append(nn.Linear(1, 1).weight.device.type)
        with init_empty_weights():
            built.set()
            found.append(nn.Linear(1, 1).weight.device.type)

    thread = threading.Thread(target=build)
    thread.start()
    with init_empty_weights():
        inside.set()
        built.wait(30)
    thread.join()
    assert found == ["cpu", "meta"]
    assert nn.Linear(1, 1).weight.device.type == "cpu"
