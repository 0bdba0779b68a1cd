"""Resume from a checkpoint at every placement, with every kind of loader: samples and random numbers to the bit."""

from __future__ import annotations

import logging
import random
from collections import UserDict
from collections.abc import Iterator
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
from ..worlds import run, run_one

Place = tuple[int, int | str]

EPOCHS = 3
SAMPLES = 13  # the last round is short for one process and for two
# In, at the end of and after the loop of an epoch; the second epoch's is resumed in what follows a first one.
PLACEMENTS: list[Place] = [(0, "last"), (0, "after"), (1, 1), (1, "after")]
ALL_PLACEMENTS: list[Place] = [*product((0, 1), (*range(1, SAMPLES // 2), "last", "after"))]
LEFT: list[Place] = [(0, 2), (1, 1), (1, "last")]  # left there by `break`, saved after the loop


@dataclass(frozen=True)
class Case:
    """One kind of loader and one way to resume it: ``skip`` (by hand), ``stateful`` (by itself) or ``torchdata``.

    ``variant``: ``windows`` of three batches, batches that are a ``mapping``, or ``rng_types=["torch"]``.
    """

    data: str
    dispatch: bool
    workers: int
    persistent: bool
    resume: str
    seedable: bool
    variant: str = "plain"


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
    kinds = [(*how, "plain") for how in staff]
    kinds += [(0, False, False, variant) for variant in ("windows", "mapping", "torch")]
    return [
        Case(data, dispatch, workers, persistent, resume, seedable, variant)
        for (workers, persistent, seedable, variant), resume in product(kinds, ("skip", "stateful", "torchdata"))
    ]


def _loader(case: Case) -> DataLoader[int]:
    # Not repeated, says docs/data.md: what workers of a data set that is indexed draw, what those that persist draw,
    # and what is drawn in a batch that the main process has read ahead.
    if case.data == "map":
        dataset: Any = Rows(draws=case.workers == 0 and not case.dispatch)
    else:
        dataset = Stream(draws=not case.persistent)
    how: dict[str, Any] = {"batch_size": 2, "shuffle": case.data == "map", "num_workers": case.workers}
    if case.variant == "mapping":
        how["collate_fn"] = _mapping
    if case.workers:
        how.update(persistent_workers=case.persistent, multiprocessing_context="fork")
    return torchdatas(dataset, **how) if case.resume == "torchdata" else DataLoader(dataset, **how)


def _mapping(rows: list[int]) -> UserDict[str, torch.Tensor]:
    return UserDict(rows=torch.tensor(rows))


def _rng_types(case: Case) -> list[str] | None:
    if case.variant != "torch":
        return None
    # A stream, and a sampler of torchdata's, draws its order from other generators too.
    return ["torch"] if case.data == "map" and case.resume != "torchdata" else ["torch", "generator"]


def _draws() -> tuple[int, int, int]:
    return int(torch.randint(1000, ())), random.randrange(1000), int(numpy.random.randint(1000))


def _train(
    case: Case, resume: Path | None = None, save: dict[Place, Path] | None = None, leave: Place | None = None
) -> tuple[list[Any], dict[Place, int]]:
    """What a run sees: of each batch its place, its samples and the numbers that the loop draws with it.

    It saves at the places of ``save``, and ends by `break` at ``leave``, where it saves after the loop. Also returns
    how much it had seen at each place.
    """
    config = DataLoaderConfiguration(
        use_seedable_sampler=case.seedable, use_stateful_dataloader=case.resume == "stateful",
        dispatch_batches=case.dispatch,
    )  # fmt: skip
    accelerator = Accelerator(
        dataloader_config=config, gradient_accumulation_steps=3 if case.variant == "windows" else 1,
        rng_types=_rng_types(case),
    )  # fmt: skip
    set_seed(1 if resume is None else 77, device_specific=True)
    loader: Any = accelerator.prepare(_loader(case))
    first = None
    if resume is not None:
        accelerator.load_state(resume)
        first = loader.iteration if case.resume == "skip" else None
    save = save or {}
    place: Place = (-1, 0)
    seen: list[Any] = []
    places: dict[Place, int] = {}
    for epoch in range(loader.iteration, EPOCHS):
        batches = accelerator.skip_first_batches(loader, loader.position) if epoch == first else loader
        for batch in batches:
            torch.rand(accelerator.process_index)  # the processes draw differently often
            rows = batch["rows"] if case.variant == "mapping" else batch
            seen.append([epoch, loader.position, rows.tolist(), *_draws()])
            place = (epoch, "last" if loader.end_of_dataloader else loader.position)
            places[place] = len(seen)
            if place == leave:
                break
            if place in save:
                accelerator.save_state(save[place])
        if place == leave:
            accelerator.save_state(save[place])
            break
        seen.append([epoch, "after", *_draws()])
        places[epoch, "after"] = len(seen)
        if (epoch, "after") in save:
            accelerator.save_state(save[epoch, "after"])
    return seen, places


def _wrong(case: Case, folder: Path, placements: list[Place]) -> list[str]:
    """The placements from which a resumed run differs from one that neither stopped nor saved."""
    whole, counts = _train(case)
    saved = {place: folder / "saved" / "-".join(map(str, place)) for place in placements if place in counts}
    left = {place: folder / "left" / "-".join(map(str, place)) for place in LEFT if place in placements}
    wrong = ["the run that saves"] if _train(case, save=saved)[0] != whole else []
    for place in left:
        seen, _ = _train(case, save=left, leave=place)
        wrong += [f"the run left at {place}"] * (seen != whole[: counts[place]])
    for place, checkpoint in [*saved.items(), *left.items()]:
        try:
            if _train(case, checkpoint)[0] != whole[counts[place] :]:
                wrong.append(str(checkpoint.relative_to(folder)))
        except Exception as error:
            wrong.append(f"{checkpoint.relative_to(folder)}: {error!r}")
    return wrong


def _all_wrong(data: str, dispatch: bool, folder: str, placements: list[Place]) -> list[str]:
    logging.getLogger("torchdata").setLevel(logging.ERROR)  # it warns of every stream without a state
    found = []
    for number, case in enumerate(cases(data, dispatch)):
        # Each epoch forks the workers: few placements have them only where the loader resumes by itself.
        if placements is ALL_PLACEMENTS or not case.workers or case.resume == "stateful":
            found += [f"{case}: {place}" for place in _wrong(case, Path(folder, str(number)), placements)]
    return found


@pytest.mark.parametrize("data", [*long("map"), "stream"])
@pytest.mark.parametrize(
    ("dispatch", "processes", "placements"),
    [(True, 2, PLACEMENTS), *long(*((*kind, ALL_PLACEMENTS) for kind in product((True, False), (1, 2))))],
)
def test_a_run_resumed_at_any_placement_equals_the_whole_one(
    tmp_path: Path, data: str, dispatch: bool, processes: int, placements: list[Place]
) -> None:
    for rank, wrong in enumerate(run(_all_wrong, data, dispatch, str(tmp_path), placements, processes=processes)):
        assert wrong == [], f"rank {rank}"


def _left(begin_next: bool) -> list[Any]:
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True))
    loader: Any = accelerator.prepare(DataLoader(range(12), batch_size=2))  # type: ignore[arg-type]
    for _ in loader:
        if loader.position == 4:
            break
    if begin_next:
        loader.set_epoch(loader.iteration + 1)
    again: Any = accelerator.prepare(DataLoader(range(12), batch_size=2))  # type: ignore[arg-type]
    again.load_state_dict(loader.state_dict())
    return [again.iteration, again.position, [batch.tolist() for batch in again]]


@pytest.mark.parametrize("begin_next", [False, True])
def test_an_epoch_left_by_break_goes_on_unless_the_next_one_is_announced(begin_next: bool) -> None:
    batches = [[row, row + 1] for row in range(0, 12, 2)]
    assert run_one(_left, begin_next) == ([1, 0, batches] if begin_next else [0, 4, batches[4:]])
