from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from accel.big_models import (
    AlignDevicesHook,
    LayerwiseCastingHook,
    ModelHook,
    SequentialHook,
    add_hook_to_module,
    align_module_device,
    attach_align_device_hook,
    attach_align_device_hook_on_blocks,
    attach_execution_device_hook,
    attach_layerwise_casting_hooks,
    cpu_offload_with_hook,
    has_offloaded_params,
    remove_hook_from_module,
    remove_hook_from_submodules,
    set_module_tensor_to_device,
)
from tests.runtime.big_models.models import TOKENS, Tower, addresses, scores, tower, twin

CPU, META = torch.device("cpu"), torch.device("meta")


class Add(ModelHook):
    """Adds to what goes in and multiplies what comes out."""

    def __init__(self, amount: float = 1, factor: float = 1) -> None:
        self.amount = amount
        self.factor = factor
        self.seen: list[str] = []

    def init_hook(self, module: nn.Module) -> nn.Module:
        self.seen.append("init")
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (args[0] + self.amount, *args[1:]), kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        return output * self.factor

    def detach_hook(self, module: nn.Module) -> nn.Module:
        self.seen.append("detach")
        return module


def test_a_hook_goes_around_forward_and_comes_off_again() -> None:
    module = nn.Linear(2, 2)
    before, x = module.forward, torch.rand(3, 2)
    plain = module(x)
    hook = Add(factor=2)
    assert add_hook_to_module(module, hook) is module
    assert torch.equal(module(x), (module.weight @ (x + 1).T).T.add(module.bias) * 2) or torch.allclose(
        module(x), 2 * nn.functional.linear(x + 1, module.weight, module.bias)
    )
    assert inspect.signature(module.forward) == inspect.signature(before)
    assert remove_hook_from_module(module) is module
    assert hook.seen == ["init", "detach"]
    assert torch.equal(module(x), plain)
    assert not hasattr(module, "_hf_hook")
    assert not hasattr(module, "_old_forward")


def test_a_second_hook_replaces_or_follows() -> None:
    x = torch.zeros(1, 1)
    module = nn.Identity()
    add_hook_to_module(module, Add(1))
    add_hook_to_module(module, Add(10))
    assert module(x).item() == 10
    add_hook_to_module(module, Add(5, factor=3), append=True)
    assert isinstance(module._hf_hook, SequentialHook)
    assert module(x).item() == 45
    remove_hook_from_module(module)
    assert module(x).item() == 0


def test_hooks_below_come_off_too() -> None:
    model = nn.Sequential(nn.Identity(), nn.Sequential(nn.Identity()))
    for module in model.modules():
        add_hook_to_module(module, Add())
    remove_hook_from_submodules(model)
    assert not any(hasattr(module, "_hf_hook") for module in model.modules())


def test_forward_without_gradients() -> None:
    module = nn.Linear(1, 1)
    hook = Add()
    hook.no_grad = True
    add_hook_to_module(module, hook)
    assert not module(torch.ones(1, 1)).requires_grad


def test_copies_of_a_hooked_module_have_their_own_weights() -> None:
    module = add_hook_to_module(nn.Linear(2, 2), Add())
    other = copy.deepcopy(module)
    with torch.no_grad():
        for param in other.parameters():
            param.zero_()
    assert other(torch.ones(1, 2)).tolist() == [[0, 0]]
    assert module(torch.ones(1, 2)).tolist() != [[0, 0]]


def test_a_hooked_module_can_be_pickled() -> None:
    module = add_hook_to_module(nn.Linear(2, 2), AlignDevicesHook(execution_device="cpu"))
    x = torch.rand(1, 2)
    assert torch.equal(pickle.loads(pickle.dumps(module))(x), module(x))


def test_a_traced_graph_keeps_its_hook_when_it_is_recompiled() -> None:
    graph = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2)))
    x = torch.rand(1, 2)
    plain = graph(x)
    add_hook_to_module(graph, Add(0, factor=2))
    assert torch.equal(graph(x), plain * 2)
    remove_hook_from_module(graph)
    assert torch.equal(graph(x), plain)


def test_a_compiled_model_with_hooks_gives_the_same() -> None:
    model = tower()
    plain = scores(model)
    attach_align_device_hook(model, execution_device="cpu", offload=True)
    compiled: Any = torch.compile(model, backend="eager")
    assert torch.equal(scores(compiled), plain)
    assert torch.equal(scores(compiled), plain)


@pytest.mark.parametrize("buffers", [False, True])
@pytest.mark.parametrize("whole", [False, True])
def test_offloaded_weights_are_away_between_forwards(buffers: bool, whole: bool) -> None:
    model = tower()
    plain, at = scores(model), addresses(model)
    preload = ["Layer"] if whole else None
    attach_align_device_hook(
        model, execution_device="cpu", offload=True, offload_buffers=buffers, preload_module_classes=preload
    )
    for _ in range(2):
        away = {name for name, device in addresses(model).items() if device == META}
        kept = {name for name in at if name.endswith("shift")}
        if not buffers:
            kept |= {name for name, _ in model.named_buffers()}
        assert away == at.keys() - kept
        assert torch.equal(scores(model), plain)
    assert hasattr(model.layers[0].up, "_hf_hook") is not whole
    remove_hook_from_submodules(model)
    assert addresses(model) == at
    assert torch.equal(scores(model), plain)


def test_offload_of_a_whole_tied_module() -> None:
    model = tower()
    plain = scores(model)
    hook = AlignDevicesHook(execution_device="cpu", offload=True, place_submodules=True)
    add_hook_to_module(model, hook)
    assert {name for name, device in addresses(model).items() if device != META} == {
        name for name, _ in model.named_buffers()
    }
    assert torch.equal(scores(model), plain)
    remove_hook_from_module(model)
    assert torch.equal(scores(model), plain)


def test_a_forward_that_failed_leaves_the_next_one_its_weights() -> None:
    model = tower()
    plain = scores(model)
    attach_align_device_hook(model, execution_device="cpu", offload=True)
    with pytest.raises(IndexError):
        model(TOKENS + 100)
    assert torch.equal(scores(model), plain)
    assert {name for name, device in addresses(model).items() if device != META} == {
        name for name, _ in model.named_buffers()
    }


def test_gradients_pass_through_an_offloaded_module() -> None:
    model = tower()
    twin_of = twin(model)
    attach_align_device_hook(model, execution_device="cpu", offload=True)
    times = [torch.ones(4, 6, requires_grad=True) for _ in range(2)]
    model(TOKENS, times=times[0])["scores"].sum().backward()
    twin_of(TOKENS, times=times[1])["scores"].sum().backward()
    assert torch.equal(times[0].grad, times[1].grad)  # type: ignore[arg-type]


def test_inputs_and_outputs_travel_and_skipped_ones_do_not() -> None:
    class Echo(nn.Module):
        def forward(self, x: Any, y: Any = None, past: Any = None) -> dict[str, Any]:
            return {"x": x, "y": y, "past": past}

    module = Echo()
    add_hook_to_module(module, AlignDevicesHook(execution_device="meta", io_same_device=True, skip_keys="past"))
    given = [torch.ones(1)]
    seen: list[Any] = []

    def spy(x: Any, y: Any = None, past: Any = None) -> dict[str, Any]:
        seen.extend([x[0].device, y["deep"][0].device, past.device])
        return {"y": torch.ones(1), "past": torch.ones(1, device="meta"), "n": 3}

    module._old_forward = spy  # type: ignore[assignment]
    result = module(given, y={"deep": (torch.ones(2), "word")}, past=torch.ones(1))
    assert seen == [META, META, CPU]
    assert (result["y"].device, result["past"].device, result["n"]) == (CPU, META, 3)
    assert given[0].device == CPU


def test_what_needs_no_move_is_passed_on_itself() -> None:
    class Same(nn.Module):
        def forward(self, nest: Any) -> Any:
            return nest

    module = add_hook_to_module(Same(), AlignDevicesHook(execution_device="cpu", io_same_device=True))
    nest = {"a": [torch.ones(1), ("b", None)]}
    assert module(nest) is nest


def test_execution_hooks_go_on_modules_with_tensors_alone() -> None:
    model = nn.Sequential(nn.ReLU(), nn.Sequential(nn.Linear(1, 1)))
    attach_execution_device_hook(model, "cpu")
    assert [hasattr(module, "_hf_hook") for module in model.modules()] == [True, False, True, True]
    other = nn.Sequential(nn.Sequential(nn.Linear(1, 1)))
    attach_execution_device_hook(other, "cpu", preload_module_classes=["Sequential"])
    assert [hasattr(module, "_hf_hook") for module in other.modules()] == [True, False, False]


def test_blocks_offloaded_one_by_one() -> None:
    model = tower()
    plain = scores(model)
    attach_align_device_hook_on_blocks(
        model,
        execution_device="cpu",
        offload={"layers.0": True, "layers.1": False, "embed": False, "head": False, "norm": False, "layers.2": True},
    )
    away = {name for name, device in addresses(model).items() if device == META}
    assert away == {f"layers.{i}.{j}.{k}" for i in (0, 2) for j in ("up", "down") for k in ("weight", "bias")}
    assert torch.equal(scores(model), plain)


def test_one_device_for_all_blocks() -> None:
    model = tower()
    plain = scores(model)
    attach_align_device_hook_on_blocks(model, execution_device="cpu", offload=True, preload_module_classes=["Layer"])
    assert not hasattr(model.layers[0].up, "_hf_hook")
    assert torch.equal(scores(model), plain)
    other = tower()
    attach_align_device_hook_on_blocks(other, execution_device="cpu")
    assert torch.equal(scores(other), plain)


def test_a_hook_that_offloads_computes_on_the_host_unless_told_otherwise() -> None:
    model = tower()
    plain = scores(model)
    attach_align_device_hook(model, offload=True)
    assert {param.device for param in model.parameters()} == {META}
    assert torch.equal(scores(model), plain)
    remove_hook_from_submodules(model)
    assert {param.device for param in model.parameters()} == {CPU}


def test_a_traced_graph_can_be_changed_after_its_hook_is_removed() -> None:
    inputs = torch.randn(2, 3)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))
    plain = model(inputs)
    graph = torch.fx.symbolic_trace(model)
    add_hook_to_module(graph, Add())
    assert not torch.equal(graph(inputs), plain)
    remove_hook_from_module(graph, recurse=True)
    assert torch.equal(graph(inputs), plain)
    (output,) = (node for node in graph.graph.nodes if node.op == "output")
    (last,) = output.all_input_nodes
    with graph.graph.inserting_after(last):
        output.replace_input_with(last, graph.graph.call_function(torch.sigmoid, (last,)))
    graph.recompile()
    assert torch.equal(graph(inputs), torch.sigmoid(plain))


def test_hooks_can_be_made_again_from_their_attributes() -> None:
    hook = AlignDevicesHook(execution_device="cpu", skip_keys=["past"], offload=True)
    known = inspect.signature(AlignDevicesHook.__init__).parameters
    again = AlignDevicesHook(**{name: value for name, value in vars(hook).items() if name in known})
    assert repr(again) == repr(hook)
    assert "skip_keys=['past']" in repr(hook)


def test_align_module_device() -> None:
    layer = nn.Linear(2, 2)
    values = layer.weight.detach().clone()
    with align_module_device(layer, "meta"):
        assert layer.weight.device == META
    assert torch.equal(layer.weight, values)
    with align_module_device(layer):
        assert layer.weight.device == CPU
    attach_align_device_hook(layer, execution_device="meta", offload=True)
    assert has_offloaded_params(layer)
    with align_module_device(layer, "cpu"):
        assert torch.equal(layer.weight, values)
    assert layer.weight.device == META
    add_hook_to_module(layer, Add(), append=True)
    assert has_offloaded_params(layer)
    with pytest.raises(KeyError), align_module_device(layer, "cpu"):
        raise KeyError
    assert layer.weight.device == META


def test_a_pipeline_on_the_host() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    x = torch.rand(1, 2)
    plain = second(first(x))
    first, hook = cpu_offload_with_hook(first, "cpu")  # type: ignore[assignment]
    second, after = cpu_offload_with_hook(second, "cpu", prev_module_hook=hook)  # type: ignore[assignment]
    assert torch.equal(second(first(x)), plain)
    after.offload()
    hook.remove()
    after.remove()
    assert torch.equal(second(first(x)), plain)
    assert not hasattr(first, "_hf_hook")


def test_the_model_before_goes_back_when_the_next_one_runs() -> None:
    first, hook = cpu_offload_with_hook(nn.Linear(2, 2), "cpu")
    second, _ = cpu_offload_with_hook(nn.Linear(2, 2), prev_module_hook=hook)
    gone: list[nn.Module] = []
    hook.offload = lambda: gone.append(hook.model)  # type: ignore[method-assign]
    second(torch.ones(1, 2))
    assert gone == []  # it is on the host
    set_module_tensor_to_device(first, "weight", "meta")
    second(torch.ones(1, 2))
    assert gone == [first]


def test_layers_are_stored_narrow_and_computed_wide() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Sequential(nn.Conv1d(4, 4, 1), nn.Linear(1, 1)))
    plain, x = copy.deepcopy(model), torch.rand(2, 4, 4)
    attach_layerwise_casting_hooks(model[:2], torch.bfloat16, torch.float32)
    assert [param.dtype for param in model[:2].parameters()] == [torch.bfloat16] * 2 + [torch.float32] * 2
    rounded = copy.deepcopy(plain)
    rounded[0].to(torch.bfloat16).to(torch.float32)
    assert torch.equal(model[:2](x), rounded[:2](x))
    assert model[0].weight.dtype == torch.bfloat16
    assert isinstance(model[0]._hf_hook, LayerwiseCastingHook)


def test_layers_left_out_of_casting() -> None:
    model = nn.Sequential()
    model.add_module("in", nn.Linear(2, 2))
    model.add_module("out_norm", nn.Linear(2, 2))
    model.add_module("conv", nn.Conv1d(1, 1, 1))
    attach_layerwise_casting_hooks(
        model, torch.float16, torch.float32, skip_modules_pattern="norm$", skip_modules_classes=(nn.Conv1d,)
    )
    cast = {name for name, param in model.named_parameters() if param.dtype == torch.float16}
    assert cast == {"in.weight", "in.bias"}


def test_a_model_on_the_meta_device_runs_there() -> None:
    with torch.device("meta"):
        model = Tower().eval()
    attach_execution_device_hook(model, "meta")
    assert model(TOKENS)["scores"].device == META
