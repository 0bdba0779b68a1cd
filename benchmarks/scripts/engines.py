"""Steps of an engine (`BENCHMARK_KIND=ZeRO 2`, `ZeRO 3`, `float8`) in a world of two: by hand and with accel, in turns.

By hand means the engine's own interface: `deepspeed.initialize`, and torchao's `convert_to_float8_training` under DDP.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import nn

from accel import Accelerator, DeepSpeedPlugin
from benchmarks.scripts.rounds import shortest_steps, write
from benchmarks.scripts.sharded import BATCH, CLIP, ROWS, made, prepared

ROUNDS = int(os.environ.get("BENCHMARK_ROUNDS", "8"))


def configuration(stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": ROWS, "gradient_clipping": CLIP, "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }  # fmt: skip


def deepspeed_by_hand(stage: int) -> Callable[[], None]:
    deepspeed: Any = import_module("deepspeed")
    model, optimizer = made()
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=configuration(stage))

    def step() -> None:
        engine.backward(engine(BATCH).square().mean())
        engine.step()

    return step


def float8_by_hand() -> Callable[[], None]:
    float8: Any = import_module("torchao.float8")
    model, _ = made()
    layers = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    float8.convert_to_float8_training(
        model,
        config=float8.Float8LinearConfig(emulate=True, pad_inner_dim=True),
        module_filter_fn=lambda module, name: name not in (layers[0], layers[-1]),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ddp = nn.parallel.DistributedDataParallel(model)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            output = ddp(BATCH)
        output.float().square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()

    return step


def steps(kind: str) -> dict[str, Callable[[], None]]:
    """Return the two steps. Ours first: it forms the world, and leaves out an extension that gloo can do without."""
    if kind == "float8":
        ours, by_hand = prepared(Accelerator(cpu=True, mixed_precision="fp8")), float8_by_hand()
    else:
        stage = int(kind[-1])
        plugin = DeepSpeedPlugin(hf_ds_config=configuration(stage))
        ours, by_hand = prepared(Accelerator(cpu=True, deepspeed_plugin=plugin)), deepspeed_by_hand(stage)
    return {f"{kind}, by hand": by_hand, f"{kind}, accel": ours}


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    write(shortest_steps(steps(os.environ["BENCHMARK_KIND"]), ROUNDS))
    Accelerator().end_training()


if __name__ == "__main__":
    main()
