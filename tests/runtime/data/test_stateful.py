"""torchdata's loaders, prepared: they go on by their own state, exactly, wherever they were stopped."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from accel import Accelerator, DataLoaderConfiguration, skip_first_batches
from accel.data import DataLoaderShard, prepare_data_loader
from accel.errors import ArgumentError
from tests.marks import long
from tests.needs import missing

from ..small import Numbers
from ..worlds import run, run_one

try:
    from torchdata.stateful_dataloader import StatefulDataLoader
except ImportError:
    missing("torchdata", "pip install torchdata")


def torchdatas(dataset: Any, **how: Any) -> DataLoader[Any]:
    """A loader of torchdata's, whose constructor calls something that torch warns of from 2.10 on."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="'set_vital' is deprecated")
        made: DataLoader[Any] = StatefulDataLoader(dataset, **how)
    return made


class Counting(Dataset[int]):
    """A data set with a state of its own: how many samples it has given, ever."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.given = 0

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        self.given += 1
        return index * 1000 + self.given

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.given = state["given"]


class Cursor(Iterator[int]):
    """Reads a worker's part of a stream; can begin in the middle."""

    def __init__(self, owner: Resumable) -> None:
        self.owner = owner
        self.at = 0

    def __next__(self) -> int:
        info = torch.utils.data.get_worker_info()
        step, first = (1, 0) if info is None else (info.num_workers, info.id)
        item = self.at * step + first
        if item >= self.owner.size:
            raise StopIteration
        self.at += 1
        self.owner.reads += 1
        return item

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Resumable(IterableDataset[int]):
    """A stream whose iterators have a state; knows how much was read from it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.reads = 0

    def __iter__(self) -> Cursor:
        return Cursor(self)


def _loader(kind: str, workers: int, processes: int, index: int, persistent: bool = False) -> DataLoaderShard:
    dataset: Any = Counting(26) if kind == "map" else Resumable(26)
    plain = torchdatas(
        dataset, batch_size=3, shuffle=kind == "map", num_workers=workers, persistent_workers=persistent,
        multiprocessing_context="fork" if workers else None,
    )  # fmt: skip
    loader = prepare_data_loader(plain, None, processes, index, rng_types=[], use_seedable_sampler=True, data_seed=4)
    assert isinstance(loader, DataLoaderShard)
    return loader


def _stopped_everywhere(kind: str, workers: int, processes: int, persistent: bool) -> list[Any]:
    index = processes - 1
    whole_loader = _loader(kind, workers, processes, index, persistent)
    epochs = [[batch.tolist() for batch in whole_loader] for _ in range(3)]
    length = len(epochs[0])
    wrong = []
    for stop_at in (1, 2, length - 1, length, length + 1):
        loader = _loader(kind, workers, processes, index, persistent)
        seen = []
        for batch in loader:
            seen.append(batch.tolist())
            if len(seen) == stop_at:
                state = copy.deepcopy(loader.state_dict())
                break
        else:
            state = copy.deepcopy(loader.state_dict())
        again = _loader(kind, workers, processes, index, persistent)
        again.load_state_dict(state)
        if stop_at != length:
            next(iter(again))  # a look is no epoch
        assert (again.iteration, again.position) == ((0, stop_at) if stop_at <= length else (1, 0))
        if stop_at <= length:
            seen += [batch.tolist() for batch in again]
        following = [[batch.tolist() for batch in again] for _ in range(2)]
        if [seen, *following] != epochs:
            wrong.append([stop_at, seen, following, epochs])
    return wrong


@pytest.mark.parametrize("kind", ["map", "stream"])
@pytest.mark.parametrize(("workers", "persistent"), [(0, False), *long((2, False)), (2, True)])
@pytest.mark.parametrize("processes", [2, *long(1)])
def test_a_loader_of_torchdatas_goes_on_where_it_was(kind: str, workers: int, persistent: bool, processes: int) -> None:
    """With what workers had prefetched, the batch that was read ahead, and the data set's own state."""
    assert run_one(_stopped_everywhere, kind, workers, processes, persistent) == []


def test_a_stream_with_a_state_is_not_read_again() -> None:
    loader = _loader("stream", 0, 1, 0)
    for number, _ in enumerate(loader):
        if number == 4:
            state = loader.state_dict()
            break
    again = _loader("stream", 0, 1, 0)
    again.load_state_dict(state)
    rest = [batch.tolist() for batch in again]
    assert rest[0] == [15, 16, 17]
    assert again.dataset.reads == 26 - 15  # type: ignore[attr-defined]


def test_skipping_a_sampler_does_not_walk_it() -> None:
    """torchdata asks the iterator over the batch sampler for its state, and gives it back."""
    loader = _loader("map", 0, 1, 0)
    for number, _ in enumerate(loader):
        if number == 4:
            inner = loader.state_dict()["loader"]
            break
    assert inner["_sampler_iter_state"] == {"given": 5}


def test_a_state_keeps_readable_keys() -> None:
    loader = _loader("map", 0, 2, 1)
    next(iter(loader))
    state = loader.state_dict()
    about = {"epoch", "position", "order", "in_epoch", "ended", "generators", "seeds"}
    assert set(state) == about | {"process", "round", "loader"}
    assert (state["epoch"], state["process"]) == (0, 1)


def test_a_state_of_torchdatas_own_loader_is_refused() -> None:
    inner: Any = torchdatas([1, 2])
    loader: Any = prepare_data_loader(torchdatas([1, 2]))
    with pytest.raises(ArgumentError, match="not the state of a prepared loader"):
        loader.load_state_dict(inner.state_dict())


def test_another_processs_state_counts_for_the_position_alone() -> None:
    whole = _loader("map", 0, 2, 1)
    expected = [[item // 1000 for item in batch.tolist()] for batch in whole]
    main = _loader("map", 0, 2, 0)
    for number, _ in enumerate(main):
        if number == 1:
            state = main.state_dict()
            break
    other = _loader("map", 0, 2, 1)
    other.load_state_dict(state)
    assert [[item // 1000 for item in batch.tolist()] for batch in other] == expected[2:]


def test_a_processs_own_state_can_be_kept_apart() -> None:
    main = _loader("map", 0, 2, 0)
    state = main.state_dict() | {"position": 2, "in_epoch": True}
    before = _loader("map", 0, 2, 1)
    seen = []
    for batch in before:
        seen.append(batch.tolist())
        if len(seen) == 2:
            own = copy.deepcopy(before.own_state_dict())
            break
    again = _loader("map", 0, 2, 1)
    again.load_state_dict(state)
    again.load_own_state_dict(own)
    whole = [batch.tolist() for batch in _loader("map", 0, 2, 1)]
    assert seen + [batch.tolist() for batch in again] == whole


def test_the_state_of_a_world_of_another_size_counts_for_the_position_alone() -> None:
    order = [item // 1000 for batch in _loader("map", 0, 1, 0) for item in batch.tolist()]
    main = _loader("map", 0, 2, 0)
    for number, _ in enumerate(main, 1):
        if number == 2:
            state, own = main.state_dict(), main.own_state_dict()
            break
    alone = _loader("map", 0, 1, 0)
    alone.load_state_dict(state)
    alone.load_own_state_dict(own)
    assert [item // 1000 for batch in alone for item in batch.tolist()] == order[12:]


def test_a_state_loaded_and_saved_again_is_the_same() -> None:
    loader = _loader("map", 0, 1, 0)
    for number, _ in enumerate(loader, 1):
        if number == 2:
            state = loader.state_dict()
            break
    again = _loader("map", 0, 1, 0)
    again.load_state_dict(state)
    assert again.state_dict()["loader"] == state["loader"]


def _saved_by_accelerator(directory: str, resume: bool, workers: int) -> list[Any]:
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=3))
    plain = torchdatas(
        Counting(30), batch_size=2, shuffle=True, num_workers=workers,
        multiprocessing_context="fork" if workers else None,
    )  # fmt: skip
    loader = accelerator.prepare(plain)
    seen: list[Any] = []
    if resume:
        accelerator.load_state(directory)
    for batch in loader:
        seen.append([item // 1000 for item in batch.tolist()])
        if not resume and len(seen) == 3:
            accelerator.save_state(directory)
    return seen


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("processes", [1, 2])
def test_saved_and_loaded_with_the_run(tmp_path: Any, workers: int, processes: int) -> None:
    whole = run(_saved_by_accelerator, str(tmp_path / "here"), False, workers, processes=processes)
    rest = run(_saved_by_accelerator, str(tmp_path / "here"), True, workers, processes=processes)
    assert rest == [batches[3:] for batches in whole]


def _dispatched(stop_at: int | None, state: Any) -> list[Any]:
    from accel.state import PartialState

    dataset = Resumable(32)
    plain = torchdatas(dataset, batch_size=3)
    loader = prepare_data_loader(plain, PartialState().device, put_on_device=True)
    if state is not None:
        loader.load_state_dict(state)
    seen = []
    for batch in loader:
        seen.append(batch.tolist())
        if len(seen) == stop_at:
            return [seen, loader.state_dict(), dataset.reads]
    return [seen, None, dataset.reads]


def test_dispatching_goes_on_from_the_main_processs_state() -> None:
    whole = run(_dispatched, None, None)
    stopped = run(_dispatched, 3, None)
    rest = run(_dispatched, None, stopped[0][1])
    for rank in range(2):
        assert stopped[rank][0] + rest[rank][0] == whole[rank][0]
    assert rest[0][2] == 32 - 18  # of the six batches given the first alone was read again, from a copy
    assert rest[1][2] == 0


def test_skipping_by_hand_still_works() -> None:
    plain = _loader("map", 0, 1, 0)
    whole = [[item // 1000 for item in batch.tolist()] for batch in plain]
    again = _loader("map", 0, 1, 0)
    assert [[item // 1000 for item in batch.tolist()] for batch in skip_first_batches(again, 4)] == whole[4:]


def test_plain_loaders_with_the_setting_need_no_torchdata() -> None:
    loader = prepare_data_loader(DataLoader(Counting(9), batch_size=2), None, 1, 0, use_stateful_dataloader=True)
    assert not loader.stateful_base
    assert loader.use_stateful_dataloader


@pytest.mark.parametrize("dispatch", [None, True])
def test_a_loader_that_resumes_is_torchdatas_for_isinstance(dispatch: bool | None) -> None:
    config = DataLoaderConfiguration(use_stateful_dataloader=True, dispatch_batches=dispatch)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    loader = accelerator.prepare(DataLoader(Numbers(6), batch_size=2))
    assert isinstance(loader, StatefulDataLoader)
    assert loader.use_stateful_dataloader
    again = pickle.loads(pickle.dumps(loader))
    for one in (loader, again, copy.copy(loader)):
        assert type(one) is type(loader)
        assert [batch.tolist() for batch in one] == [[0, 1], [2, 3], [4, 5]]
    plain = Accelerator().prepare(DataLoader(Numbers(6)))
    assert not isinstance(plain, StatefulDataLoader)
    assert not plain.use_stateful_dataloader
