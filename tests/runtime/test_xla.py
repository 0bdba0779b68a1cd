"""`Accelerator` in processes that torch_xla has started: the tests' stand-in, and torch_xla itself where it is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.marks import long
from tests.runtime.worlds import clean_env

ROOT = Path(__file__).parents[2]
TPU = ("--tpu", "--tpu_runtime", "torch_xla")
STANDINS = ROOT / "tests/standins"


def launched(here: Path, script: str, *words: str, **env: str) -> Any:
    """What the main process of `accel launch WORDS` writes to `told.json`; the script has a function `main`."""
    (here / "train.py").write_text(script)
    base = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    done = subprocess.run(
        [sys.executable, "-m", "accel", "launch", *words, "train.py"],
        cwd=here,
        env={**base, "PYTHONPATH": f"{STANDINS}:{ROOT}", "HF_HOME": str(here), "OMP_NUM_THREADS": "1", **env},
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads((here / "told.json").read_text())


TRAIN = """
import json, torch
from accel import Accelerator, set_seed

def main():
    accelerator = Accelerator(gradient_accumulation_steps=2)
    set_seed(3 + accelerator.process_index)  # every process begins with weights of its own
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    late = torch.nn.Linear(4, 1, bias=False).requires_grad_(False)
    torch.nn.init.zeros_(late.weight)
    optimizer = torch.optim.AdamW([*model.parameters(), *late.parameters()], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    x = torch.arange(96.0).reshape(24, 4).sin()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x.sum(1)), batch_size=3)
    model, late, optimizer, loader, scheduler = accelerator.prepare(model, late, optimizer, loader, scheduler)
    late.requires_grad_(True)  # which was frozen until now
    for epoch in range(2):
        for features, target in loader:
            with accelerator.accumulate(model, late):
                loss = ((model(features) + late(features)).squeeze(-1) - target).square().mean()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        if epoch == 0:
            accelerator.save_state("kept")
    weights = {**accelerator.get_state_dict(model), "late": accelerator.get_state_dict(late)["weight"]}
    end = {name: value.tolist() for name, value in weights.items()}
    everyones = accelerator.gather(torch.cat([value.reshape(-1) for value in weights.values()])[None])
    accelerator.save_state("end")
    accelerator.load_state("kept")
    kept = {name: value.tolist() for name, value in accelerator.get_state_dict(model).items()}
    if accelerator.is_main_process:
        with open("told.json", "w") as file:
            json.dump([end, kept, norm.item(), bool((everyones == everyones[0]).all())], file)
    accelerator.end_training()

if __name__ == "__main__":
    main()
"""


def test_training_is_that_of_ddp(tmp_path: Path) -> None:
    """Accumulation, clipping, a schedule and a checkpoint, to the bit: gradients are averaged once a window."""
    on_xla = launched(tmp_path, TRAIN, *TPU, STANDIN_DEVICES="2")
    by_ddp = launched(tmp_path, TRAIN, "--cpu", "--num_processes", "2")
    assert on_xla == by_ddp
    assert on_xla[0] != on_xla[1]
    assert on_xla[3]


STATE = """
import json, os, torch, torch_xla
from accel import Accelerator, set_seed
from accel.collectives.rng import synchronize_rng_state
from torch_xla.core import xla_model

def main():
    accelerator = Accelerator(mixed_precision="bf16")
    state, rank = accelerator.state, accelerator.process_index
    told = {"world": [str(state.distributed_type), state.backend, state.num_processes, state.fork_launched]}
    told["world"] += [state.local_process_index == rank, accelerator.native_amp]
    told["bf16"] = [os.environ["XLA_USE_BF16"], os.environ["XLA_DOWNCAST_BF16"], state.downcast_bfloat]
    set_seed(5, device_specific=True)
    told["seed"] = xla_model.get_rng_state() - rank
    synchronize_rng_state("xla")
    told["gather"] = accelerator.gather({"a": torch.tensor(rank), "b": torch.ones(2, 1) * rank})
    told["reduce"] = accelerator.reduce(torch.tensor([1.0 + rank]), "mean")
    told["broadcast"] = torch.tensor([7 + rank])
    from accel.collectives import all_objects, broadcast
    broadcast(told["broadcast"])
    told["objects"] = all_objects({"rank": rank})
    before = torch_xla.syncs
    loader = accelerator.prepare(torch.utils.data.DataLoader(torch.arange(8), batch_size=1))
    told["batches"] = [batch.item() for batch in loader]
    told["syncs"] = torch_xla.syncs - before
    if rank == 1:
        open("late", "w").close()
    accelerator.wait_for_everyone()
    told["waited"] = os.path.exists("late")
    accelerator.save({"weight": torch.nn.Parameter(torch.ones(2))}, "saved.pt")
    if accelerator.is_main_process:
        told["saved"] = torch.load("saved.pt")["weight"]
        with open("told.json", "w") as file:
            json.dump(told, file, default=lambda tensor: tensor.tolist())
"""


@pytest.mark.parametrize("downcast", [False, *long(True)])
def test_the_state_and_what_processes_exchange(tmp_path: Path, downcast: bool) -> None:
    words = ["--mixed_precision", "bf16", *(["--downcast_bf16"] if downcast else [])]
    told = launched(tmp_path, STATE, *TPU, *words, STANDIN_DEVICES="2")
    assert told == {
        "world": ["XLA", "xla", 2, True, True, False],
        "bf16": [str(int(not downcast)), str(int(downcast)), downcast],
        "seed": 5,
        "gather": {"a": [0, 1], "b": [[0.0], [0.0], [1.0], [1.0]]},
        "reduce": [1.5],
        "broadcast": [7],
        "objects": [{"rank": 0}, {"rank": 1}],
        "batches": [0, 2, 4, 6],
        "syncs": 4,  # a graph a batch
        "waited": True,
        "saved": [1.0, 1.0],
    }


MOVED = """
import json, torch
from accel import Accelerator

def main():
    torch.__future__.set_overwrite_module_params_on_conversion(True)  # as it is between the CPU and XLA
    accelerator = Accelerator()
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 3), "b": torch.nn.Linear(3, 3)})
    model["b"].weight = model["a"].weight
    early, late = (torch.optim.SGD(model[name].parameters(), lr=1.0, momentum=0.9) for name in "ab")
    before = [parameter for parameter in model.parameters()]
    early, model, late = accelerator.prepare(early, model, late)
    accelerator.backward(model["b"](model["a"](torch.ones(3))).sum())
    start = [parameter.detach().clone() for parameter in model.parameters()]
    early.step()
    late.step()
    told = [all(new is not old for new, old in zip(model.parameters(), before)),
            model["a"].weight is model["b"].weight,
            [not torch.equal(new, old) for new, old in zip(model.parameters(), start)],
            len(early.state) + len(late.state)]
    with open("told.json", "w") as file:
        json.dump(told, file)
"""


def test_parameters_that_the_device_makes_anew(tmp_path: Path) -> None:
    """Optimizers prepared before and after the model step those; tied ones stay tied."""
    assert launched(tmp_path, MOVED, *TPU) == [True, True, [True, True, True], 4]


REFUSED = """
import os
from accel import Accelerator

def main():
    for names, how in (({"WORLD_SIZE": "2"}, {}), ({"PJRT_LOCAL_PROCESS_COUNT": "4", "STANDIN_CORES": "2"}, {}),
                       ({}, {"mixed_precision": "fp16"})):
        os.environ.update(names)
        try:
            Accelerator(**how)
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
        for name in names:
            del os.environ[name]

said = []
main()
print(*said, sep="\\n")
"""


def test_worlds_that_cannot_be(tmp_path: Path) -> None:
    env = {**clean_env(), "PYTHONPATH": f"{STANDINS}:{ROOT}"}
    argv = [sys.executable, "-c", REFUSED]
    done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240, check=True)
    world, devices, precision = done.stdout.splitlines()
    assert world.startswith("WorldError: WORLD_SIZE=2, but torch_xla starts its processes itself: use accel launch")
    assert devices.startswith("WorldError: this process has 2 XLA devices, one per thread (TPU v2 and v3")
    assert precision.startswith("PrecisionError: mixed_precision='fp16' needs a GPU")


REAL = """
import json, torch
from accel import Accelerator

def main():
    accelerator = Accelerator()
    model = torch.nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(torch.eye(2), batch_size=1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    start = accelerator.get_state_dict(model)["weight"]
    for batch in loader:
        accelerator.backward(model(batch).sum())
        optimizer.step()
        optimizer.zero_grad()
    accelerator.save_state("kept")
    accelerator.load_state("kept")
    end = accelerator.get_state_dict(model)["weight"]
    with open("told.json", "w") as file:
        json.dump([accelerator.device.type, str(accelerator.distributed_type), (start - end).tolist()], file)
"""


def test_torch_xla_itself_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One device: its collectives abort between several on the CPU."""
    if find_spec("torch_xla") is None:
        # In CI too: it needs another torch than all other tests.
        pytest.skip("torch_xla is not installed; it needs torch 2.9.0: pip install torch==2.9.0 torch_xla==2.9.0")
    monkeypatch.setattr(sys.modules[__name__], "STANDINS", ROOT)
    device, kind, moved = launched(tmp_path, REAL, *TPU, PJRT_DEVICE="CPU")
    assert (device, kind) == ("xla", "XLA")
    assert moved[0] == pytest.approx([0.1, 0.1])
