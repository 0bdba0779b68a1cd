"""Resume from a checkpoint at every placement, with every kind of loader: samples and random numbers to the bit."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from accel import Accelerator, DataLoaderConfiguration, set_seed
from tests.marks import long

from ..data.test_stateful import torchdatas
from ..worlds import run

EPOCHS = 3
# In, at the end of and after the loop of an epoch; the second epoch's is resumed in what follows a first one.
PLACEMENTS = [(0, "last"), (0, "after"), (1, 1), (1, "after")]
SAMPLES = 13  # the last round is short for one process and for two


@dataclass(frozen=True)
class Case:
    """One kind of loader and one way to resume it: ``skip`` (by hand), ``stateful`` (by itself) or ``torchdata``."""

    data: str
    dispatch: bool
    workers: int
    persistent: bool
    resume: str
    seedable: bool


class Rows(Dataset[int]):
    """Samples that hold a number of the global generator if ``draws``."""

    def __init__(self, draws: bool) -> None:
        self.draws = draws

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> int:
        return index * 1000 + (int(torch.randint(1000, ())) if self.draws else 0)


class Stream(IterableDataset[int]):
    """Samples in an order drawn at the start, from a generator of its own and, if ``draws``, the global ones."""

    def __init__(self, draws: bool) -> None:
        self.draws = draws
        self.generator = torch.Generator().manual_seed(3)

    def __iter__(self) -> Iterator[int]:
        worker = torch.utils.data.get_worker_info()
        order = list(range(SAMPLES) if worker is None else range(worker.id, SAMPLES, worker.num_workers))
        if self.draws:
            order = [order[place] for place in torch.randperm(len(order)).tolist()]
            random.shuffle(order)
        if worker is None:
            order = [order[place] for place in torch.randperm(len(order), generator=self.generator).tolist()]
        return iter(order)


def cases(data: str, dispatch: bool) -> list[Case]:
    """All combinations that exist: only indexed data have a sampler, only workers can persist."""
    staff = [(0, False, False), (2, False, False), (2, True, False)]
    if data == "map":
        staff += [(0, False, True), (2, True, True)]
    return [
        Case(data, dispatch, workers, persistent, resume, seedable)
        for (workers, persistent, seedable), resume in product(staff, ("skip", "stateful", "torchdata"))
    ]


def _loader(case: Case) -> DataLoader[int]:
    # Not repeated, says docs/data.md: what workers of a data set that is indexed draw, what those that persist draw,
    # and what is drawn in a batch that the main process has read ahead.
    if case.data == "map":
        dataset: Any = Rows(draws=case.workers == 0 and not case.dispatch)
    else:
        dataset = Stream(draws=not case.persistent)
    how: dict[str, Any] = {"batch_size": 2, "shuffle": case.data == "map", "num_workers": case.workers}
    if case.workers:
        how.update(persistent_workers=case.persistent, multiprocessing_context="fork")
    return torchdatas(dataset, **how) if case.resume == "torchdata" else DataLoader(dataset, **how)


def _draws() -> tuple[int, int, int]:
    return int(torch.randint(1000, ())), random.randrange(1000), int(numpy.random.randint(1000))


def _train(
    case: Case, resume: Path | None = None, at: Callable[[Accelerator, int, int | str, int], None] | None = None
) -> list[Any]:
    """What a run sees: of each batch its place, its samples and the numbers that the loop draws with it."""
    config = DataLoaderConfiguration(
        use_seedable_sampler=case.seedable, use_stateful_dataloader=case.resume == "stateful",
        dispatch_batches=case.dispatch,
    )  # fmt: skip
    accelerator = Accelerator(dataloader_config=config)
    set_seed(1 if resume is None else 77, device_specific=True)
    loader: Any = accelerator.prepare(_loader(case))
    first = None
    if resume is not None:
        accelerator.load_state(resume)
        first = loader.iteration if case.resume == "skip" else None
    seen: list[Any] = []
    for epoch in range(loader.iteration, EPOCHS):
        batches = accelerator.skip_first_batches(loader, loader.position) if epoch == first else loader
        for batch in batches:
            seen.append([epoch, loader.position, batch.tolist(), *_draws()])
            if at is not None:
                at(accelerator, epoch, "last" if loader.end_of_dataloader else loader.position, len(seen))
        seen.append([epoch, "after", *_draws()])
        if at is not None:
            at(accelerator, epoch, "after", len(seen))
    return seen


def _wrong(case: Case, folder: Path) -> list[str]:
    """The placements from which a resumed run differs from one that neither stopped nor saved."""
    whole = _train(case)
    places: dict[str, int] = {}

    def save(accelerator: Accelerator, epoch: int, place: int | str, count: int) -> None:
        if (epoch, place) in PLACEMENTS:
            name = f"epoch {epoch}, {place}"
            places[name] = count
            accelerator.save_state(folder / name)

    wrong = ["the run that saves"] if _train(case, at=save) != whole else []
    assert len(places) == len(PLACEMENTS)
    for name, count in places.items():
        try:
            if _train(case, folder / name) != whole[count:]:
                wrong.append(name)
        except Exception as error:
            wrong.append(f"{name}: {error!r}")
    return wrong


def _all_wrong(data: str, dispatch: bool, folder: str) -> list[str]:
    logging.getLogger("torchdata").setLevel(logging.ERROR)  # it warns of every stream without a state
    found = []
    for number, case in enumerate(cases(data, dispatch)):
        found += [f"{case}: {place}" for place in _wrong(case, Path(folder, str(number)))]
    return found


@pytest.mark.parametrize("data", ["map", "stream"])
@pytest.mark.parametrize(("dispatch", "processes"), [(True, 2), *long((False, 1), (False, 2))])
def test_a_run_resumed_at_any_placement_equals_the_whole_one(
    tmp_path: Path, data: str, dispatch: bool, processes: int
) -> None:
    for rank, wrong in enumerate(run(_all_wrong, data, dispatch, str(tmp_path), processes=processes)):
        assert wrong == [], f"rank {rank}"
