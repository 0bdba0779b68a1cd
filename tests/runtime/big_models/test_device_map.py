from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from accel.big_models import (
    check_device_map,
    check_tied_parameters_on_same_device,
    clean_device_map,
    compute_module_sizes,
    fallback_allocate,
    infer_auto_device_map,
    init_empty_weights,
)
from accel.errors import ArgumentError
from tests.needs import package
from tests.runtime.big_models.models import Tower
from tests.runtime.big_models.trees import trees

package("hypothesis")

from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

many = settings(deadline=None, suppress_health_check=list(HealthCheck))


@given(trees(), st.integers(0, 1500), st.integers(0, 1500), st.booleans())
@many
def test_no_device_gets_more_than_it_has(model: nn.Module, first: int, host: int, look_ahead: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        device_map = infer_auto_device_map(
            model, {0: first, "cpu": host}, fallback_allocation=look_ahead, clean_result=False
        )
    sizes = compute_module_sizes(model)
    used = {device: sum(sizes[name] for name, at in device_map.items() if at == device) for device in (0, "cpu")}
    assert used[0] <= first
    assert used["cpu"] <= host
    every = [name for name, _ in [*model.named_parameters(), *model.named_buffers()]]
    for name in every:
        assert sum(name == key or name.startswith(f"{key}.") for key in device_map) == 1


@given(trees(), st.integers(0, 1500))
@many
def test_tied_weights_are_together(model: nn.Module, first: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        device_map = infer_auto_device_map(model, {0: first, "cpu": 10**6}, clean_result=False)
    names: dict[int, set[int | str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        key = next(key for key in device_map if name == key or name.startswith(f"{key}."))
        names.setdefault(id(param), set()).add(device_map[key])
    assert all(len(devices) == 1 for devices in names.values())


def test_two_ties_between_the_same_modules_count_once() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)
            self.b = nn.Linear(4, 4)
            self.b.weight, self.b.bias = self.a.weight, self.a.bias

    assert infer_auto_device_map(Pair(), {0: 161, "cpu": 1000}) == {"": 0}


def test_a_parameter_of_the_model_itself_may_be_tied() -> None:
    class Top(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4, bias=False)
            self.own = self.inner.weight

    assert infer_auto_device_map(Top(), {"cpu": 1000}) == {"": "cpu"}


def test_names_that_contain_others_are_told_apart() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4, bias=False)
            self.between = nn.Sequential(nn.Linear(9, 9, bias=False), nn.Linear(9, 9, bias=False))
            self.b = nn.Sequential()
            self.b.add_module("a", nn.Linear(4, 4, bias=False))
            self.b.a.weight = self.a.weight  # type: ignore[union-attr]

    assert infer_auto_device_map(Model(), {0: 400, "cpu": 10**6}) == {"a": 0, "between": "cpu", "b": 0}


def test_classes_that_must_stay_whole() -> None:
    with init_empty_weights():
        model = Tower(depth=4)
    whole = compute_module_sizes(model)["layers.0"]
    budget: dict[int | str, int | str] = {0: int(2.5 * whole + 600), "cpu": "1MB"}
    device_map = infer_auto_device_map(model, budget, no_split_module_classes="Layer", offload_buffers=True)
    assert all(key.count(".") < 2 for key in device_map)
    assert set(device_map.values()) == {0, "cpu"}


def test_buffers_that_fit_nowhere_are_a_warning() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(100))
    with pytest.warns(UserWarning, match="buffers of offloaded modules take 808 bytes"):
        infer_auto_device_map(model, {0: 700, "cpu": 10**6})
    assert infer_auto_device_map(model, {0: 700, "cpu": 10**6}, offload_buffers=True) == {"": "cpu"}


def test_verbose_prints_each_decision(capsys: pytest.CaptureFixture[str]) -> None:
    infer_auto_device_map(nn.Sequential(nn.Linear(4, 4), nn.Linear(5, 5)), {0: 100, "cpu": 1000}, verbose=True)
    said = capsys.readouterr().out
    assert "0 (80 bytes)" in said
    assert "on to the next device" in said


def test_look_ahead() -> None:
    model = nn.Sequential(nn.Linear(40, 40), nn.Sequential(nn.Linear(2, 2), nn.Linear(40, 40)))
    budget: dict[int | str, int | str] = {0: 6600, "cpu": 10**6}
    assert 0 not in infer_auto_device_map(model, dict(budget)).values()
    found = infer_auto_device_map(model, dict(budget), fallback_allocation=True)
    assert found["1.0"] == 0


def test_fallback_allocate_opens_what_is_around_the_module_it_finds() -> None:
    model = nn.Sequential(nn.Linear(9, 9), nn.Sequential(nn.Linear(2, 2), nn.Linear(9, 9)))
    sizes = compute_module_sizes(model)
    name, module, rest = fallback_allocate(list(model.named_children()), sizes, 24)
    assert (name, module) == ("1.0", model[1][0])  # type: ignore[index]
    assert [other for other, _ in rest] == ["0", "1.1"]
    same = list(model.named_children())
    assert fallback_allocate(same, sizes, 3) == (None, None, same)  # type: ignore[arg-type]
    assert fallback_allocate(same, sizes, -1) == (None, None, same)  # type: ignore[arg-type]


def test_clean_map_keeps_an_outer_entry_that_differs() -> None:
    assert clean_device_map({"a": 0, "a.b": 1, "a.c": 1}) == {"a": 0, "a.b": 1, "a.c": 1}
    assert clean_device_map({"a.b": 1, "a.c": 1, "d": 0}) == {"a": 1, "d": 0}
    assert clean_device_map({"x.a.b": 1, "x.a.c": 1, "x.d": 0}, "x") == {"x.a": 1, "x.d": 0}


def test_a_map_that_leaves_something_out_names_it_and_the_key_that_is_wrong() -> None:
    model = Tower()
    with pytest.raises(ArgumentError) as caught:
        check_device_map(model, {"embed": 0, "layer": 0, "norm": 0, "gain": 0})
    said = str(caught.value)
    assert "\n" not in said
    assert "has no device for layers.0.scale" in said
    assert "'layer'; did you mean 'layers" in said
    assert "head.weight" not in said
    assert "and 11 more" in said


def test_a_key_too_many_is_a_warning() -> None:
    with pytest.warns(UserWarning, match=r"unknown device_map keys for Tower: 'haed'; did you mean 'head'\?"):
        check_device_map(Tower(), {"": "cpu", "haed": 0})


def test_ties_across_devices_are_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    ties = [["embed.weight", "head.weight"]]
    check_tied_parameters_on_same_device(ties, {"": 0})
    assert not caplog.records
    check_tied_parameters_on_same_device(ties, {"embed": 0, "head": torch.device("cpu")})
    assert "on different devices" in caplog.text
    with pytest.raises(ArgumentError, match=r"no device for head\.weight"):
        check_tied_parameters_on_same_device(ties, {"embed": 0})
