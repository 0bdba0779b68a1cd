"""States, words, handlers and questions are as in Accelerate: compared with the real package, name by name."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import sys
from typing import Any

import pytest

import accel.accelerator.trackers
import accel.collectives.rng
import accel.enums
import accel.launch.function
import accel.memory
import accel.plugins
import accel.progress
import accel.state
import accel.training.introspection
import accel.world.available
import accel.world.environment
import accel.world.hardware
import accel.world.ports
import accel.world.versions
from accel.errors import ArgumentError, PrecisionError, StateError
from tests.needs import package

from .worlds import run, run_one

package("accelerate")

import accelerate  # noqa: E402
import accelerate.state  # noqa: E402
import accelerate.utils  # noqa: E402
import accelerate.utils.environment  # noqa: E402
import accelerate.utils.imports  # noqa: E402

HOMES: dict[Any, tuple[Any, str]] = {
    accel.world.environment: (
        accelerate.utils.environment,
        "are_libraries_initialized clear_environment convert_dict_to_env_variables get_int_from_env "
        "parse_choice_from_env parse_flag_from_env patch_environment purge_accelerate_environment str_to_bool",
    ),
    accel.world.hardware: (
        accelerate.utils.environment,
        "CPUInformation check_cuda_p2p_ib_support get_cpu_distributed_information get_current_device_type "
        "get_driver_version get_gpu_info override_numa_affinity set_numa_affinity check_cuda_fp8_capability",
    ),
    accel.world.versions: (accelerate.utils, "compare_versions is_torch_version"),
    accel.training.introspection: (
        accelerate.utils,
        "get_pretty_name merge_dicts recursive_getattr get_module_children_bottom_up model_has_dtensor",
    ),
    accel.world.ports: (accelerate.utils.other, "is_port_in_use get_free_port check_os_kernel"),
    accel.memory: (
        accelerate.utils.memory,
        "find_executable_batch_size release_memory clear_device_cache should_reduce_batch_size",
    ),
    accel.launch.function: (accelerate.launchers, "notebook_launcher debug_launcher test_launch PrepareForLaunch"),
    accel.progress: (accelerate.utils, "tqdm"),
    accel.collectives.rng: (accelerate.utils, "set_seed synchronize_rng_state synchronize_rng_states"),
    accel.state: (accelerate.state, "is_initialized do_nothing"),
    accel.world.available: (accelerate.utils.imports, "torchao_required deepspeed_required"),
}
NAMES = [(ours, theirs, name) for ours, (theirs, names) in HOMES.items() for name in names.split()]


def parameters(function: Any) -> list[tuple[str, Any, Any]]:
    """Name, kind and default of each parameter; ours may have further ones, by keyword only."""
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


@pytest.mark.parametrize(("ours", "theirs", "name"), NAMES, ids=[name for *_, name in NAMES])
def test_signatures(ours: Any, theirs: Any, name: str) -> None:
    mine = getattr(ours, name)
    assert mine.__doc__
    assert parameters(mine) == parameters(getattr(theirs, name))


AVAILABLE = [name for name in dir(accelerate.utils.imports) if name.startswith("is_") and "available" in name]


@pytest.mark.parametrize("name", [*AVAILABLE, "is_habana_gaudi1"])
def test_what_is_available(name: str) -> None:
    ours, theirs = getattr(accel.world.available, name), getattr(accelerate.utils.imports, name)
    assert ours.__doc__
    assert parameters(ours) == parameters(theirs)
    assert bool(ours()) == bool(theirs())


ENUMS = """
ComputeEnvironment CustomDtype DDPCommunicationHookType DistributedType DynamoBackend LoggerType PrecisionType RNGType
SageMakerDistributedType
""".split()


EXTRA = {("JSONL", "jsonl")}  # a tracker without a dependency


@pytest.mark.parametrize("name", [*ENUMS, "FP8BackendType"])
def test_enums_have_the_same_members(name: str) -> None:
    ours: type[enum.Enum] = getattr(accel.enums, name)
    theirs: type[enum.Enum] = getattr(accelerate.utils.dataclasses, name)
    assert {(member.name, member.value) for member in ours} - EXTRA == {(m.name, m.value) for m in theirs}


def test_words_are_strings() -> None:
    word = accel.enums.PrecisionType.BF16
    assert word == "bf16"
    assert f"{word:>5}" == " bf16"
    assert "fp16" in accel.enums.PrecisionType
    assert "fp61" not in accel.enums.PrecisionType
    assert accel.enums.PrecisionType.list() == ["no", "fp8", "fp16", "bf16"]


HANDLERS = """
AORecipeKwargs AutocastKwargs DistributedDataParallelKwargs FP8RecipeKwargs GradScalerKwargs InitProcessGroupKwargs
MSAMPRecipeKwargs ProfileKwargs TERecipeKwargs
""".split()


@pytest.mark.parametrize("name", HANDLERS)
def test_handlers_have_the_same_fields(name: str) -> None:
    ours, theirs = getattr(accel.plugins, name), getattr(accelerate.utils.dataclasses, name)
    # An explicit "nccl" is dropped by Accelerate, as equal to the default: ours says `None` for the device's own.
    ours_on_purpose = {("InitProcessGroupKwargs", "backend")}

    def fields(cls: Any) -> list[tuple[str, Any]]:
        return [
            (field.name, None if (name, field.name) in ours_on_purpose else _plain(field.default))
            for field in dataclasses.fields(cls)
        ]

    assert fields(ours) == fields(theirs)
    members = {n for n, value in vars(theirs).items() if callable(value) and not n.startswith("_")} - {"config"}
    assert members <= set(dir(ours))


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, enum.Enum) else value if not callable(value) else "a factory"


STATES = ("PartialState", "AcceleratorState", "GradientState")


@pytest.mark.parametrize("name", STATES)
def test_states_have_the_same_members(name: str) -> None:
    ours: Any = getattr(accel.state, name)
    theirs: Any = getattr(accelerate.state, name)
    for member, value in vars(theirs).items():
        if (member.startswith("__") and member != "__init__") or member in ("_shared_state", "_known_attrs"):
            continue
        if member.startswith("_") and member not in ("__init__", "_reset_state", "_set_sync_gradients"):
            continue
        assert hasattr(ours, member) or member in annotated(ours), member
        mine = getattr(ours, member, None)
        if callable(value) and callable(mine):
            assert parameters(mine) == parameters(value), member
        if isinstance(value, property) and value.fset is not None and isinstance(mine, property):
            assert mine.fset is not None, member


def annotated(cls: type) -> set[str]:
    return {name for base in cls.__mro__ for name in vars(base).get("__annotations__", {})}


def _attributes() -> dict[str, list[str]]:
    accelerator = accel.Accelerator(cpu=True)
    found = {"Accelerator": [], "GradientState": dir(accelerator.gradient_state)}
    for name in ("PartialState", "AcceleratorState"):
        state = getattr(accel.state, name)()
        found[name] = [attribute for attribute in [*dir(state), *vars(state)] if hasattr(state, attribute)]
    return found


ATTRIBUTES = {
    "PartialState": "_cpu backend debug device distributed_type fork_launched local_process_index num_processes "
    "process_index",
    "AcceleratorState": "_mixed_precision deepspeed_plugins device_mesh distributed_type downcast_bfloat dynamo_plugin "
    "fsdp_plugin megatron_lm_plugin parallelism_config torch_tp_plugin",
    "GradientState": "_is_xla_gradients_synced dataloader_references plugin_kwargs sync_gradients",
}


def test_states_have_the_attributes_that_accelerate_sets() -> None:
    found = run_one(_attributes)
    for name, attributes in ATTRIBUTES.items():
        lacking = set(attributes.split()) - set(found[name])
        assert lacking - {"_is_xla_gradients_synced"} == set(), name


def _without_accelerator() -> list[Any]:
    state = accel.state.PartialState(cpu=True)
    seen: list[Any] = [accel.state.is_initialized(), state.initialized, state.default_device.type]
    whole = accel.state.AcceleratorState()
    seen += [accel.state.is_initialized(), whole.initialized, whole.is_fsdp2, whole.deepspeed_plugin]
    state.set_device()
    gradients = accel.state.GradientState()
    gradients._set_sync_gradients(False)
    gradients.is_xla_gradients_synced = True
    seen += [gradients.sync_gradients, gradients.is_xla_gradients_synced, gradients.plugin_kwargs]
    accel.state.AcceleratorState._reset_state()
    seen += [accel.state.is_initialized(), state.initialized]
    accel.state.AcceleratorState._reset_state(reset_partial_state=True)
    seen.append(accel.state.PartialState._shared_state)
    try:
        state.device  # noqa: B018
    except AttributeError as error:
        seen.append(str(error))
    return seen


def test_states_need_no_accelerator() -> None:
    said = "PartialState.device: the state was reset, make a new Accelerator or PartialState"
    first = [False, True, "cpu", True, True, False, None]
    assert run_one(_without_accelerator, env={"CUDA_VISIBLE_DEVICES": ""}) == [
        *first, False, True, {}, False, True, {}, said,
    ]  # fmt: skip


def _refused() -> list[str]:
    told = []
    actions: list[Any] = [
        lambda: accel.state.AcceleratorState(deepspeed_plugin=object()),
        lambda: accel.state.AcceleratorState().select_deepspeed_plugin("b"),
        lambda: accel.state.AcceleratorState().get_deepspeed_plugin("b"),
        lambda: (accel.state.AcceleratorState._reset_state(), accel.state.AcceleratorState("fp9")),
    ]
    for action in actions:
        try:
            action()
        except (ArgumentError, StateError, PrecisionError) as error:
            told.append(str(error))
    return told


def test_ways_of_training_that_are_not_here_are_named() -> None:
    assert run_one(_refused) == [
        "deepspeed_plugin must be a DeepSpeedPlugin, or a dict of them by name, not object",
        "select_deepspeed_plugin('b') needs a run under DeepSpeed, this is NO",
        "get_deepspeed_plugin('b') needs a run under DeepSpeed, this is NO",
        "mixed_precision: 'fp9' is not one of no, fp8, fp16, bf16; did you mean 'fp8'?",
    ]


def _from_many_threads() -> list[tuple[int, int]]:
    import threading

    seen: list[tuple[int, int]] = []
    barrier = threading.Barrier(8)

    def look() -> None:
        barrier.wait()
        state = accel.state.AcceleratorState()
        seen.append((state.process_index, id(state.__dict__)))

    threads = [threading.Thread(target=look) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return seen


def test_threads_that_begin_together_form_one_world() -> None:
    for rank, seen in enumerate(run(_from_many_threads, env={"ACCELERATE_USE_CPU": "1"})):
        assert len(seen) == 8
        assert {index for index, _ in seen} == {rank}
        assert len({identity for _, identity in seen}) == 1


def test_comparing_versions() -> None:
    from packaging.version import Version

    assert accel.world.versions.is_torch_version(">=", "2.0")
    assert not accel.world.versions.is_torch_version("<", "2.0")
    assert accel.world.versions.compare_versions(Version("1.10"), ">", "1.9")
    with pytest.raises(ValueError, match=r"operation: '=>' is not one of >, >=, ==, !=, <=, <"):
        accel.world.versions.compare_versions("torch", "=>", "1")
    with pytest.raises(ArgumentError, match="no-such-package is not installed: pip install no-such-package"):
        accel.world.versions.compare_versions("no-such-package", ">", "1")
    with pytest.raises(ArgumentError, match="'one' is not a version"):
        accel.world.versions.compare_versions("torch", ">", "one")


def test_what_is_installed_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert accel.world.available.is_rich_available() is False
    monkeypatch.setenv("ACCELERATE_ENABLE_RICH", "1")
    assert accel.world.available.is_rich_available() is True
    monkeypatch.setattr(sys, "path", [])
    assert accel.world.available.is_rich_available() is True


def test_what_lacks_is_said_when_it_is_called() -> None:
    def convert() -> str:
        return "converted"

    if not accel.world.available.is_torchao_available():
        with pytest.raises(ImportError, match=r"convert needs torchao 0\.6\.1 or newer: pip install torchao"):
            accel.world.available.torchao_required(convert)()
    assert run_one(_needs_deepspeed) == ["converted", "convert needs a run under DeepSpeed, this is NO"]


def _needs_deepspeed() -> list[str]:
    def convert() -> str:
        return "converted"

    needy = accel.world.available.deepspeed_required(convert)
    seen = [needy()]
    accel.state.AcceleratorState()
    try:
        needy()
    except StateError as error:
        seen.append(str(error))
    return seen
