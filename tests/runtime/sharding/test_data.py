"""Data, schedules and what is gathered go by the processes that see different data, on every mesh."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from accel import Accelerator, DataLoaderConfiguration
from accel.plugins.fsdp import FullyShardedDataParallelPlugin as Plugin
from accel.plugins.parallelism import ParallelismConfig
from tests.runtime.worlds import run

_ROWS = 26  # of which the last round of four processes has fewer than it needs


def _seen(replicas: int, split: bool) -> dict[str, Any]:
    config = ParallelismConfig(dp_replicate_size=replicas) if replicas > 1 else None
    accelerator = Accelerator(
        fsdp_plugin=Plugin(), parallelism_config=config, dataloader_config=DataLoaderConfiguration(split_batches=split)
    )
    model = nn.Linear(1, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda count: float(count))
    rows = torch.arange(float(_ROWS)).unsqueeze(1)
    loader: Any = DataLoader(rows, batch_size=8 if split else 2)  # type: ignore[arg-type]
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    mine, all_of_it = [], []
    for batch in loader:
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        mine += batch.flatten().tolist()
        all_of_it += accelerator.gather_for_metrics(batch).flatten().tolist()
    return {
        "batches": len(loader),
        "batch": loader.total_batch_size,
        "mine": mine,
        "gathered": all_of_it,
        "counted": schedule.get_last_lr(),
    }


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("split", [False, True])
def test_every_process_sees_its_part_of_the_data_and_schedules_count_all_of_them(replicas: int, split: bool) -> None:
    worlds = run(_seen, replicas, split, processes=4)
    parts = [seen.pop("mine") for seen in worlds]
    assert all(len(part) == 8 for part in parts)
    assert sorted({row for part in parts for row in part}) == [float(row) for row in range(_ROWS)]
    for seen in worlds:
        assert seen == {
            "batches": 4,
            "batch": 8,
            "gathered": [float(row) for row in range(_ROWS)],
            "counted": [4.0 if split else 16.0],
        }
