"""Engines whose optimizer and parameters are on the CPU, and the building of DeepSpeed's extensions."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from accel.errors import AccelError
from accel.parallel.deepspeed_ops import extensions, load_extension
from accel.plugins.deepspeed import DeepSpeedPlugin, DummyOptim
from accel.state import AcceleratorState
from tests import needs
from tests.marks import long
from tests.runtime.worlds import run, run_one

from .training import CLIP, Run, accelerator_of, assert_near, optimizer_of, plugin, quiet, trained

if find_spec("deepspeed") is None:
    needs.missing("deepspeed", "pip install --no-build-isolation -c constraints.txt deepspeed")


def _in_two_groups(model: torch.nn.Module) -> torch.optim.Optimizer:
    first, *others = model.parameters()
    groups: list[dict[str, Any]] = [{"params": [first]}, {"params": others, "lr": 0.01}]
    return torch.optim.Adagrad(groups, lr=0.02)


_OPTIMIZERS = {"AdamW": optimizer_of, "Adagrad": _in_two_groups}


def _alone() -> dict[str, Run]:
    return {name: trained(accelerator_of(4), make=make) for name, make in _OPTIMIZERS.items()}


def _of_torch() -> dict[str, Run]:
    quiet()

    def own(stage: int, **more: Any) -> DeepSpeedPlugin:
        zero = {"stage": stage, **{f"offload_{kind}": {"device": "cpu"} for kind in more}}
        config = {"zero_optimization": zero, "train_micro_batch_size_per_gpu": 1, "gradient_clipping": CLIP}
        return DeepSpeedPlugin({**config, "zero_force_ds_cpu_optimizer": False})

    plugins = {f"stage {stage}": own(stage, optimizer=True) for stage in (1, 2, 3)}
    plugins["stage 3 and parameters"] = own(3, optimizer=True, param=True)
    return _runs(plugins, {"AdamW": optimizer_of})


def _of_deepspeed() -> dict[str, Run]:
    """Optimizers that DeepSpeed compiles: in place of torch's, and by its configuration."""
    quiet()
    plugins = {f"stage {stage}": plugin(stage, offload_optimizer_device="cpu") for stage in (1, 3)}
    optimizer = {"type": "AdamW", "params": {"lr": 0.02, "weight_decay": 0.01}}
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    config = {"zero_optimization": zero, "optimizer": optimizer, "gradient_clipping": CLIP}
    runs = _runs(plugins, _OPTIMIZERS)
    AcceleratorState._reset_state()
    configured = DeepSpeedPlugin({**config, "train_micro_batch_size_per_gpu": "auto"})
    return runs | _runs({"configured": configured}, {"AdamW": lambda model: DummyOptim(model.parameters())})


def _on_disk(folder: Path) -> dict[str, Run]:
    quiet()
    optimizer = {"offload_optimizer_device": "nvme", "offload_optimizer_nvme_path": str(folder)}
    parameters = {"offload_param_device": "nvme", "offload_param_nvme_path": str(folder)}
    plugins = {"optimizer": plugin(3, **optimizer), "and parameters": plugin(3, **optimizer, **parameters)}
    return _runs(plugins, {"AdamW": optimizer_of})


def _runs(plugins: dict[str, DeepSpeedPlugin], optimizers: Mapping[str, Callable[..., Any]]) -> dict[str, Run]:
    accelerator = accelerator_of(deepspeed_plugins=plugins)
    runs = {}
    for name in plugins:
        accelerator.state.select_deepspeed_plugin(name)
        for optimizer, make in optimizers.items():
            runs[f"{name}, {optimizer}"] = trained(accelerator_of(4), make=make)
    return runs


@pytest.fixture(scope="module")
def alone() -> dict[str, Run]:
    runs: dict[str, Run] = run_one(_alone)
    return runs


@pytest.mark.parametrize("action", [_of_torch, *long(_of_deepspeed)])  # which it compiles, for minutes, once
def test_offloaded_optimizers_and_parameters_have_the_losses_of_one_process(
    alone: dict[str, Run], action: Callable[[], dict[str, Run]]
) -> None:
    for runs in run(action):
        assert_near(runs, alone)


@pytest.mark.long  # compiles for minutes, once
def test_a_run_whose_state_is_on_a_disk_has_the_losses_of_one_process(alone: dict[str, Run], tmp_path: Path) -> None:
    if not Path("/usr/include/libaio.h").exists():
        needs.missing("libaio", "apt-get install libaio-dev")
    for runs in run(_on_disk, tmp_path):
        assert len(runs) == 2
        assert_near(runs, alone)
    assert (tmp_path / "zero_stage_3" / "optimizer" / "rank1").is_dir()


def test_a_build_that_fails_or_takes_too_long_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    folder = extensions()
    assert folder.parent == tmp_path
    assert extensions() == folder
    torchs = folder / "cpu_adam" / "lock"
    torchs.parent.mkdir(parents=True)
    torchs.touch()  # of a process that was killed
    for builder, limit, words in (
        ("NoSuchBuilder", 60.0, "building cpu_adam failed: ImportError: cannot import name 'NoSuchBuilder'"),
        ("CPUAdamBuilder", 0.01, "building cpu_adam took more than 0 s: install g++ and ninja, or set zero_force"),
    ):
        with pytest.raises(AccelError) as error:
            load_extension("cpu_adam", builder, limit)
        assert words in str(error.value)
        assert "\n" not in str(error.value)
        assert not torchs.exists()
    assert os.environ["TORCH_EXTENSIONS_DIR"] == str(folder)


def test_only_optimizers_with_a_counterpart_are_replaced() -> None:
    from accel.parallel.deepspeed_settings import for_engine, has_cpu_optimizer, map_pytorch_optim_to_deepspeed

    parameters = [torch.nn.Parameter(torch.ones(2))]
    assert has_cpu_optimizer(torch.optim.Adagrad(parameters))
    assert not has_cpu_optimizer(torch.optim.AdamW(parameters, amsgrad=True))
    groups = [{"params": [parameter]} for parameter in (*parameters, torch.nn.Parameter(torch.ones(2)))]
    zero: dict[str, Any] = {"zero_optimization": {"stage": 3}}
    adagrad = torch.optim.Adagrad(groups)
    assert for_engine(adagrad, zero) is adagrad
    for stage in (1, 2):
        zero["zero_optimization"]["stage"] = stage
        with pytest.raises(AccelError, match=f"Adagrad at stage {stage} must have one group of parameters, not 2"):
            for_engine(adagrad, zero)
    with pytest.raises(AccelError, match="no optimizer for the CPU in place of SGD"):
        map_pytorch_optim_to_deepspeed(torch.optim.SGD(parameters, lr=0.1))
