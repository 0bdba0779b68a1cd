"""Prepared loaders: shares, ends, settings, epochs, and going on in the middle of one."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
)

from accel import Accelerator, DataLoaderConfiguration, set_seed, skip_first_batches
from accel.collectives.rng import host_rng_state
from accel.data import DataLoaderShard, PreparedLoader, prepare_data_loader
from accel.errors import ArgumentError
from accel.state import GradientState

from ..small import Numbers
from ..worlds import run


class Stream(IterableDataset[int]):
    def __init__(self, size: int, sized: bool = False) -> None:
        self.size = size
        self.epochs: list[int] = []
        if sized:
            type(self).__len__ = lambda self: self.size  # type: ignore[attr-defined]

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.size))


class Shuffled(Sampler[int]):
    """A script's own sampler, which shuffles with Python's global generator."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        order = list(range(self.size))
        random.shuffle(order)
        return iter(order)


class Drawn(IterableDataset[int]):
    """A stream in an order that is drawn at its start."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[int]:
        return iter(Shuffled(self.size))


class OwnBatches(BatchSampler):
    """A script's own batch sampler: its batches are dealt out whole."""


def listed(loader: Any) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def prepared(size: int = 20, batch: int = 4, *, processes: int = 1, index: int = 0, **how: Any) -> PreparedLoader:
    keys = (
        "split_batches",
        "even_batches",
        "use_seedable_sampler",
        "data_seed",
        "use_stateful_dataloader",
        "non_blocking",
    )
    ours = {key: how.pop(key) for key in keys if key in how}
    dataset = how.pop("dataset", None) or Numbers(size)
    loader: DataLoader[Any] = DataLoader(dataset, batch_size=batch, **how)
    return prepare_data_loader(loader, None, processes, index, rng_types=[], **ours)


def test_one_process_sees_the_order_of_a_plain_loop() -> None:
    torch.manual_seed(0)
    plain = DataLoader(Numbers(20), batch_size=4, shuffle=True)
    expected = [listed(plain) for _ in range(3)]
    torch.manual_seed(0)
    mine = prepared(shuffle=True)
    assert [listed(mine) for _ in range(3)] == expected


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning", "ignore::DeprecationWarning")
def test_end_is_known_with_the_last_batch_and_nothing_is_read_ahead(workers: int) -> None:
    loader = prepared(10, 4, num_workers=workers)
    state = GradientState()
    ends, lefts = [], []
    for _ in loader:
        ends.append(state.end_of_dataloader)
        lefts.append(loader.batches_left)
        if not workers:
            assert len(loader.base_dataloader.dataset.read) == min(10, 4 * len(ends))  # type: ignore[attr-defined]
    assert ends == [False, False, True]
    assert lefts == [3, 2, 1]
    assert not state.in_dataloader


def test_settings_are_kept_by_preparing_and_by_skipping() -> None:
    """Accelerate's defect 8: skipping forgot drop_last and non_blocking."""

    class Odd(DataLoader[Any]):
        """A script's own loader class."""

    plain = Odd(Numbers(11), batch_size=2, drop_last=True, timeout=0, generator=torch.Generator().manual_seed(1))
    loader = prepare_data_loader(plain, torch.device("cpu"), 1, 0, put_on_device=True, non_blocking=True)
    for view in (loader, skip_first_batches(loader, 2)):
        assert isinstance(view, DataLoader)
        assert isinstance(view, DataLoaderShard)
        assert isinstance(view.base_dataloader, Odd)
        assert view.drop_last is True
        assert view.non_blocking is True
        assert view.device == torch.device("cpu")
        assert view.generator is plain.generator
    assert listed(skip_first_batches(loader, 2)) == [[4, 5], [6, 7], [8, 9]]
    assert len(skip_first_batches(loader, 2)) == 3
    assert plain.batch_sampler is not loader.base_dataloader.batch_sampler
    assert prepare_data_loader(loader) is loader


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))])
def test_a_copy_of_a_loader_is_a_loader_of_its_own(copied: Any) -> None:
    loader = prepared(20, 4)
    running = iter(loader)
    next(running)
    other = copied(loader)
    assert not next(running).equal(next(iter(other)))
    for batch in other:
        assert GradientState().active_dataloader is other
        assert batch.tolist() == [0, 1, 2, 3]
        break
    assert loader.position == 2


def test_skipping_a_plain_loader() -> None:
    assert listed(skip_first_batches(DataLoader(Numbers(7), batch_size=2), 2)) == [[4, 5], [6]]
    with pytest.raises(ArgumentError, match="must be 0 or more, got -1"):
        skip_first_batches(DataLoader(Numbers(7)), -1)


def seedable(**how: Any) -> PreparedLoader:
    return prepared(use_seedable_sampler=True, data_seed=3, shuffle=True, **how)


def test_breaking_out_ends_the_epoch() -> None:
    loader = seedable()
    expected = [listed(undisturbed := seedable()), listed(undisturbed)]
    for number, batch in enumerate(loader):
        assert batch.tolist() == expected[0][number]
        if number == 1:
            break
    assert not GradientState().in_dataloader
    assert listed(loader) == expected[1]


@pytest.mark.parametrize("saved_at", [0, 1, 3])
@pytest.mark.parametrize("stateful", [False, True])
@pytest.mark.parametrize("by_number", [False, True])
def test_a_look_at_the_first_batch_is_no_epoch(saved_at: int, stateful: bool, by_number: bool) -> None:
    """Neither in a new run nor in a resumed one; ``by_number``: the script calls `set_epoch`, as for Accelerate."""
    expected = [listed(undisturbed := seedable()), listed(undisturbed)]
    loader = seedable(use_stateful_dataloader=stateful)
    running = iter(loader)
    seen = [next(running).tolist() for _ in range(saved_at)]
    state = loader.state_dict()
    loader = seedable(use_stateful_dataloader=stateful)
    loader.load_state_dict(state)
    for _ in range(2):
        first = expected[0][saved_at if stateful else 0]
        assert next(iter(loader)).tolist() == first
        assert (loader.iteration, loader.position) == (0, saved_at)
        if by_number:
            loader.set_epoch(0)
    assert [*seen, *listed(loader if stateful else skip_first_batches(loader, loader.position))] == expected[0]
    look = iter(loader)  # it stays, unlike those above
    assert next(look).tolist() == expected[1][0]
    assert listed(loader) == expected[1]
    assert loader.iteration == 2


def test_a_checkpoint_of_an_epoch_left_at_its_first_batch_goes_on_after_it() -> None:
    loader = seedable(use_stateful_dataloader=True)
    expected = listed(seedable())
    for position in range(1, 4):
        for batch in loader:
            assert batch.tolist() == expected[position - 1]
            break
        state = loader.state_dict()
        assert state["position"] == position
        loader.load_state_dict(state)
    assert listed(loader) == expected[3:]


def test_set_epoch_reaches_samplers_and_data_sets() -> None:
    stream = Stream(8)
    loader = prepare_data_loader(DataLoader(stream, batch_size=2), None, 2, 0)
    loader.set_epoch(5)
    assert listed(loader) == [[0, 1], [4, 5]]
    assert stream.epochs == [5, 5]
    assert loader.iteration == 6


def _orders(kind: str, own_seed: bool) -> list[list[list[int]]]:
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(use_seedable_sampler=kind == "seedable"))
    set_seed(11, device_specific=own_seed)
    how: dict[str, Any] = {"shuffle": True}
    if kind == "custom":
        how = {"sampler": Shuffled(24)}
    if kind == "generator":
        generator = torch.Generator().manual_seed(accelerator.process_index)
        how = {"sampler": RandomSampler(range(24), generator=generator)}
    loader = accelerator.prepare(DataLoader(Numbers(24), batch_size=3, **how))
    return [listed(loader) for _ in range(2)]


@pytest.mark.parametrize("kind", ["shuffle", "seedable", "custom", "generator"])
@pytest.mark.parametrize("own_seed", [False, True])
def test_ranks_deal_out_one_order_whatever_their_seeds(kind: str, own_seed: bool) -> None:
    first, second = run(_orders, kind, own_seed)
    for epoch in range(2):
        dealt = chain.from_iterable(first[epoch] + second[epoch])
        assert sorted(dealt) == list(range(24))
    assert first[0] != first[1]


def _beside_a_plain_loop(kind: str) -> list[Any]:
    accelerator = Accelerator()
    epochs = []
    for prepare in (False, True):
        set_seed(11, device_specific=True)
        sampler = RandomSampler(range(24), replacement=kind == "replacement")
        how: dict[str, Any] = {"batch_size": 3, "sampler": sampler}
        if kind == "own sampler":
            how["sampler"] = WeightedRandomSampler([1.0] * 24, 24)
        if kind == "own batches":
            how = {"batch_sampler": OwnBatches(sampler, 3, False)}
        plain = DataLoader(Numbers(24), **how)
        loader: Any = accelerator.prepare(plain) if prepare else plain
        epochs.append([listed(loader) for _ in range(2)])
        epochs[-1].append([[int(torch.randint(1000, ())), random.randrange(1000)]])
    next(iter(loader))
    order = loader.state_dict()["order"]
    return [*epochs, {key: type(value).__name__ for key, value in order.items()}]


@pytest.mark.parametrize("kind", ["shuffle", "replacement", "own sampler", "own batches"])
def test_processes_share_the_main_processs_plain_order(kind: str) -> None:
    """Each process goes on with its own random numbers, the main process as after a plain loop."""
    (plain, first, order), (_, second, other) = run(_beside_a_plain_loop, kind)
    for epoch in range(2):
        assert list(chain.from_iterable(zip(first[epoch], second[epoch], strict=True))) == plain[epoch]
    assert first[2] == plain[2]
    drawn_from = {"host": "dict"} if kind.startswith("own") else {"seed": "int"}
    assert order == other == {"generators": "list", **drawn_from}


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("kind", ["shuffle", "replacement", "generator", "custom", "stream"])
def test_a_state_of_an_older_version_goes_on(kind: str, processes: int) -> None:
    """It holds the states of the global generators."""
    generator = torch.Generator().manual_seed(8) if kind == "generator" else None
    how: dict[str, Any] = {"sampler": RandomSampler(range(24), kind == "replacement", generator=generator)}
    if kind == "custom":
        how = {"sampler": Shuffled(24)}
    if kind == "stream":
        how = {"dataset": Drawn(24)}
    set_seed(5)
    order = {"host": host_rng_state(), "generators": [generator.get_state()] if generator else []}
    if kind == "stream":
        batches = listed(DataLoader(Drawn(24), batch_size=3))
    else:
        batches = [list(batch) for batch in BatchSampler(how["sampler"], 3, False)]
    state = {"epoch": 1, "position": 2, "order": order, "in_epoch": True, "ended": False, "process": 0}
    state |= {"round": 3 * processes, "generators": order["generators"], "seeds": []}
    set_seed(99)
    numbers = host_rng_state()
    loader = prepared(24, 3, processes=processes, index=processes - 1, use_stateful_dataloader=True, **how)
    loader.load_state_dict(state)
    assert listed(loader) == batches[processes - 1 :: processes][2:]
    assert str(host_rng_state()) == str(numbers)


def _order_of_global_batches(processes: int) -> list[list[int]]:
    config = DataLoaderConfiguration(split_batches=True)
    accelerator = Accelerator(dataloader_config=config)
    set_seed(4)
    loader = accelerator.prepare(DataLoader(Numbers(24), batch_size=4, shuffle=True))
    return [sorted(accelerator.gather(batch).tolist()) for batch in loader]


def test_the_order_does_not_depend_on_the_number_of_processes() -> None:
    alone = run(_order_of_global_batches, 1, processes=1)
    assert run(_order_of_global_batches, 2, processes=2) == alone * 2


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("size", [24, 26])
@pytest.mark.parametrize("kind", ["shuffle", "seedable", "generator", "custom"])
@pytest.mark.parametrize("stateful", [False, True])
def test_resuming_gives_exactly_the_rest_and_the_same_next_epochs(
    processes: int, size: int, kind: str, stateful: bool
) -> None:
    """Accelerate's defect 4: the rest was wrong in all of its configurations."""

    def make() -> PreparedLoader:
        how: dict[str, Any] = {"shuffle": True}
        if kind == "custom":
            how = {"sampler": Shuffled(size)}
        if kind == "generator":
            how = {"sampler": RandomSampler(range(size), generator=torch.Generator().manual_seed(8))}
        seedable = {"use_seedable_sampler": True, "data_seed": 2} if kind == "seedable" else {}
        return prepared(
            size, 3, processes=processes, index=processes - 1, use_stateful_dataloader=stateful, **how, **seedable
        )

    def training(interrupt_at: int | None) -> tuple[list[list[int]], Any, Any]:
        random.seed(1)
        torch.manual_seed(1)
        loader, seen = make(), []
        for _ in range(3):
            for batch in loader:
                seen.append([*batch.tolist(), int(torch.randint(1000, ()))])  # the loop draws numbers of its own
                if len(seen) == interrupt_at:
                    return seen, loader.state_dict(), (torch.get_rng_state(), random.getstate())
        return seen, None, None

    expected, _, _ = training(None)
    per_epoch = len(expected) // 3
    for interrupt_at in range(1, len(expected)):
        seen, state, (rng, python) = training(interrupt_at)
        torch.manual_seed(12345)
        random.seed(54321)
        loader = make()
        torch.set_rng_state(rng)
        random.setstate(python)
        loader.load_state_dict(state)
        epoch, skip = loader.iteration, loader.position
        assert (epoch, skip) == (
            (interrupt_at - 1) // per_epoch,
            (interrupt_at - 1) % per_epoch + 1,
        )
        for number in range(epoch, 3):
            batches: Any = loader
            if number == epoch and not stateful:
                batches = skip_first_batches(loader, skip)
            for batch in batches:
                seen.append([*batch.tolist(), int(torch.randint(1000, ()))])
        assert seen == expected


class Augmented(Numbers):
    """Draws from the global generator with each sample, as augmentations do."""

    def __getitem__(self, index: int) -> int:
        return index * 1000 + int(torch.randint(1000, ()))


def test_resuming_repeats_augmentations_too() -> None:
    def epochs(interrupted: bool) -> list[list[int]]:
        torch.manual_seed(3)
        loader, seen = prepared(dataset=Augmented(12), shuffle=True), []
        for batch in loader:
            seen.append(batch.tolist())
            if interrupted and len(seen) == 2:
                state, rng = loader.state_dict(), torch.get_rng_state()
                torch.manual_seed(77)
                loader = prepared(dataset=Augmented(12), shuffle=True)
                torch.set_rng_state(rng)
                loader.load_state_dict(state)
                seen += listed(skip_first_batches(loader, 2))
                break
        return seen + listed(loader)

    assert epochs(True) == epochs(False)


def test_a_checkpoint_between_epochs_goes_on_with_the_next() -> None:
    loader = prepared(use_seedable_sampler=True, data_seed=3, shuffle=True, use_stateful_dataloader=True)
    listed(loader)
    state = loader.state_dict()
    second = listed(loader)
    again = prepared(use_seedable_sampler=True, data_seed=3, shuffle=True, use_stateful_dataloader=True)
    again.load_state_dict(state)
    assert listed(again) == second


def test_a_run_goes_on_with_another_number_of_processes(caplog: pytest.LogCaptureFixture) -> None:
    how: dict[str, Any] = {
        "shuffle": True,
        "use_seedable_sampler": True,
        "data_seed": 6,
        "use_stateful_dataloader": True,
    }
    four = [prepared(48, 2, processes=4, index=index, **how) for index in range(4)]
    epochs = [iter(loader) for loader in four]
    seen = [item for _ in range(3) for epoch in epochs for item in next(epoch).tolist()]
    state = four[0].state_dict()
    for processes, batch, again in ((2, 2, 0), (3, 4, 0), (1, 5, 4)):
        caplog.clear()
        rest = []
        for index in range(processes):
            loader = prepared(48, batch, processes=processes, index=index, **how)
            loader.load_state_dict(state)
            rest += list(chain.from_iterable(listed(loader)))
        assert sorted(seen + rest) == sorted([*range(48), *seen[len(seen) - again :]])
        told = "24 samples were seen, 5 are used by each round of this world: 4 are repeated"
        assert [record.getMessage().rpartition("epoch: ")[2] for record in caplog.records] == [told] * bool(again)


def _unbatched() -> list[Any]:
    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(Numbers(5), batch_size=None))
    return [int(item) for item in loader]


def test_loaders_without_batches_are_dealt_item_by_item() -> None:
    assert run(_unbatched) == [[0, 2, 4], [1, 3, 0]]


def test_remainder_and_lengths() -> None:
    loader = prepared(13, 4, processes=2, index=1)
    assert loader.total_batch_size == 8
    assert loader.total_dataset_length == 13
    assert len(loader) == 2
    listed(loader)
    assert loader.remainder == 5
    assert loader.real_counts() == (4, 1)


def _drawn() -> list[int]:
    accelerator = Accelerator(rng_types=["torch"])
    loader = accelerator.prepare(DataLoader(Numbers(8), batch_size=2))
    set_seed(1, device_specific=True)
    return [int(torch.randint(1000, ())) for _ in loader]


def test_the_generators_named_in_rng_types_are_the_main_processs_from_an_epochs_start() -> None:
    first, second = run(_drawn)
    assert first == second
