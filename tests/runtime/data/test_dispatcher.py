"""Loaders that the main process reads for all: against Accelerate's; odd, broken and interrupted batches."""

from __future__ import annotations

import pickle
import random
from collections import UserDict
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from accel import Accelerator, DataLoaderConfiguration, set_seed, skip_first_batches
from accel.data import DataLoaderDispatcher, prepare_data_loader
from accel.data.dispatcher import BatchSplitter
from accel.data.transfer import decode, encode
from accel.errors import DataError
from accel.plugins import GradientAccumulationPlugin
from accel.state import GradientState, PartialState
from tests.marks import long

from ..small import Numbers
from ..worlds import outcomes, run, run_one
from .test_stateful import torchdatas


class Stream(IterableDataset[Any]):
    """Yields ``items``; raises ``error`` when it comes to number ``fails_at``."""

    def __init__(self, items: Any, fails_at: int | None = None) -> None:
        self.items = items
        self.fails_at = fails_at
        self.read = 0

    def __iter__(self) -> Iterator[Any]:
        for number, item in enumerate(self.items):
            if number == self.fails_at:
                raise LookupError(f"shard {number} is gone")
            self.read += 1
            yield item


class Shuffled(IterableDataset[int]):
    """Shuffles with the global generator when it is begun, as many scripts do."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(self.size).tolist())


class Pair(NamedTuple):
    left: Any
    right: Any


def dispatched(loader: DataLoader[Any], **how: Any) -> Any:
    state = PartialState()
    prepared = prepare_data_loader(loader, state.device, put_on_device=True, dispatch_batches=True, **how)
    assert isinstance(prepared, DataLoaderDispatcher) == state.use_distributed
    return prepared


def _both(cases: list[dict[str, Any]]) -> None:
    """Ours and Accelerate's, in the same world, batch by batch."""
    world = PartialState()
    import accelerate

    assert accelerate.PartialState(cpu=True).num_processes == world.num_processes
    from accelerate.data_loader import prepare_data_loader as their_prepare

    for case in cases:
        dataset: Any = Stream(range(case["samples"])) if case["stream"] else Numbers(case["samples"])
        size = case["batch"] * (world.num_processes if case["split"] else 1)
        plain = DataLoader(dataset, batch_size=size, drop_last=case["drop_last"])
        theirs = their_prepare(
            plain, world.device, put_on_device=True, dispatch_batches=True, split_batches=case["split"]
        )
        expected = [(batch.tolist(), theirs.end_of_dataloader) for batch in theirs]
        ours = dispatched(plain, split_batches=case["split"])
        assert [(batch.tolist(), ours.end_of_dataloader) for batch in ours] == expected, case
        assert [batch.tolist() for batch in ours] == [batch for batch, _ in expected], case


@pytest.mark.usefixtures("accelerate")
@pytest.mark.parametrize("processes", [*long(2), 3])
def test_same_batches_as_accelerate(processes: int) -> None:
    draw = random.Random(processes)
    cases = [
        {
            "samples": draw.randint(1, 40),
            "batch": draw.randint(1, 5),
            "split": draw.random() < 0.4,
            "drop_last": draw.random() < 0.3,
            "stream": draw.random() < 0.6,
        }
        for _ in range(60)
    ]
    # Where all is dropped theirs fails, for want of a batch; ours ends at once, as a plain loader does.
    cases = [case for case in cases if not (case["drop_last"] and case["samples"] < case["batch"] * processes)]
    run(_both, cases, processes=processes)


def _ends_at_once() -> list[Any]:
    loaders = [DataLoader(Stream(()), batch_size=2), DataLoader(Stream(range(3)), batch_size=2, drop_last=True)]
    return [list(dispatched(loader)) for loader in loaders]


def test_nothing_to_give_is_no_error() -> None:
    assert run(_ends_at_once) == [[[], []]] * 2


def _defaults() -> list[str]:
    accelerator = Accelerator()
    loaders = accelerator.prepare(DataLoader(Stream(range(4))), DataLoader(Numbers(4)))
    accelerator.dataloader_config.dispatch_batches = False
    loaders += (accelerator.prepare(DataLoader(Stream(range(4)))),)
    accelerator.dataloader_config.dispatch_batches = True
    loaders += (accelerator.prepare(DataLoader(Numbers(4))),)
    return [type(loader).__name__ for loader in loaders]


def test_by_default_iterable_data_sets_are_dispatched_and_others_are_not() -> None:
    chosen = ["DataLoaderDispatcher", "DataLoaderShard", "DataLoaderShard", "DataLoaderDispatcher"]
    assert run(_defaults) == [chosen] * 2
    assert run(_defaults, processes=1) == [[*["DataLoaderShard"] * 3, "DataLoaderDispatcher"]]  # where asked to


def _who_reads() -> list[Any]:
    counts: list[Any] = []
    for dataset in (Stream(range(20)), Numbers(20)):
        loader = dispatched(DataLoader(dataset, batch_size=2))
        ends = []
        for _ in loader:
            read = dataset.read if isinstance(dataset, Stream) else len(dataset.read)
            ends.append((read, loader.end_of_dataloader))
        counts.append(ends)
    return counts


def test_the_main_process_alone_reads_and_one_round_ahead() -> None:
    main, other = run(_who_reads)
    for ends in main:
        assert [read for read, _ in ends] == [8, 12, 16, 20, 20]
        assert [end for _, end in ends] == [False] * 4 + [True]
    assert [[read for read, _ in ends] for ends in other] == [[0] * 5] * 2


def _odd_batches(batches: list[Any]) -> list[Any]:
    return list(dispatched(DataLoader(Stream(batches), batch_size=None)))


def test_batches_of_any_shape_and_content_arrive_as_they_were() -> None:
    """What Accelerate refuses: sizes that vary, objects beside tensors, another structure in the middle."""
    batches: list[Any] = [
        {"ids": torch.ones(2, 5, dtype=torch.int64), "text": ["a", "b"], "scale": torch.tensor(0.5)},
        {"ids": torch.zeros(3, 9, dtype=torch.int64), "text": ["c", "d", "e"], "scale": torch.tensor(2.0)},
        Pair(torch.arange(6.0).reshape(2, 3).t(), [torch.tensor([True, False, True]), None]),
        Pair(torch.arange(4, dtype=torch.bfloat16), [torch.zeros(0, 7), "odd"]),
        {"ids": torch.ones(2, 5, dtype=torch.int64), "text": ["f", "g"], "scale": torch.tensor(0.5)},
        {"ids": torch.ones(4, 2, dtype=torch.int32), "text": "one for all", "scale": torch.tensor(1j)},
    ]
    received = [batch for pair in zip(*run(_odd_batches, batches), strict=True) for batch in pair]
    assert len(received) == len(batches)
    for got, sent in zip(received, batches, strict=True):
        assert type(got) is type(sent)
        flat_got, flat_sent = ([*b.values()] if isinstance(b, dict) else [b.left, *b.right] for b in (got, sent))
        for one, other in zip(flat_got, flat_sent, strict=True):
            if isinstance(other, torch.Tensor):
                assert one.dtype == other.dtype
                assert torch.equal(one, other)
            else:
                assert one == other


def test_a_last_round_that_cannot_be_cut_is_completed_with_whole_batches() -> None:
    widths = [torch.full((2, width), width) for width in (3, 4, 5, 6, 7)]
    shapes = [[tuple(batch.shape) for batch in batches] for batches in run(_odd_batches, widths, processes=3)]
    assert shapes == [[(2, 3), (2, 6)], [(2, 4), (2, 7)], [(2, 5), (2, 3)]]


def _dealer(**how: Any) -> BatchSplitter:
    return BatchSplitter(shares=2, split=False, even_batches=True, drop_last=False, **how)


def test_a_loop_that_changes_its_batch_does_not_change_what_completes_the_last_round() -> None:
    rounds = []
    for dealt in _dealer().rounds(iter([torch.tensor([0.0, 1]), torch.tensor([2.0, 3]), torch.tensor([4.0])])):
        rounds.append([part.tolist() for part in dealt.parts])
        dealt.parts[0].add_(100)
    assert rounds == [[[0, 1], [2, 3]], [[4], [0]]]


class Encoding(UserDict[str, Any]):
    """A mapping that is no `dict`, as the tokenizers of transformers return it."""


def _encode(rows: list[int]) -> Encoding:
    return Encoding(ids=torch.tensor(rows), text=[str(row) for row in rows])


class Cursor(IterableDataset[int]):
    """A stream that knows how far it was read, and goes on there; in an order drawn at its start."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(self.size).tolist()
        while self.at < self.size:
            self.at += 1
            yield order[self.at - 1]
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def _completed_last_round(kind: str, stop_at: int, by_hand: bool) -> list[Any]:
    """The rest of an epoch of 13 samples in rounds of 4: as a whole run has it, and as it is reached by skipping."""
    parts = []
    state: Any = None
    for resumed in (False, True):
        set_seed(3, device_specific=True)
        how: dict[str, Any] = {"batch_size": 2, "collate_fn": _encode}
        if kind == "stream":
            made = torchdatas(Cursor(13), **how)
        else:
            made = (torchdatas if kind == "torchdata" else DataLoader)(Numbers(13), shuffle=True, **how)
        loader = dispatched(made)
        if resumed and not by_hand:
            loader.load_state_dict(state)
        seen = []
        for batch in skip_first_batches(loader, stop_at) if resumed and kind == "map" else loader:
            seen.append([batch["ids"].tolist(), batch["text"], type(batch).__name__])
            if len(seen) == stop_at and not resumed:
                state = loader.state_dict()
                everyones = [pickle.dumps(state)]
                torch.distributed.broadcast_object_list(everyones)
                state = pickle.loads(everyones[0])
        parts.append(seen if resumed else seen[stop_at:])
    return parts


@pytest.mark.parametrize("stop_at", [1, 3, 4])
@pytest.mark.parametrize(("kind", "by_hand"), [("map", True), ("map", False), ("torchdata", False), ("stream", False)])
def test_the_last_round_is_completed_with_the_epochs_first_rows_however_it_is_reached(
    kind: str, by_hand: bool, stop_at: int
) -> None:
    """Also with batches of a type that a checkpoint does not hold."""
    for whole, reached in run(_completed_last_round, kind, stop_at, by_hand):
        assert reached == whole


def test_objects_are_cut_with_the_rows_they_belong_to() -> None:
    batches = [{"x": torch.arange(n), "name": [f"item {i}" for i in range(n)]} for n in (2, 2, 5)]
    first, second = run(_odd_batches, batches)
    assert first[1]["x"].tolist() == [0, 1, 2]
    assert second[1]["x"].tolist() == [3, 4, 0]
    assert second[1]["name"] == ["item 3", "item 4", "item 0"]


def test_a_message_holds_tensors_of_any_type_and_strides() -> None:
    rows = torch.arange(6, dtype=torch.int64).reshape(3, 2)
    batch = {
        "column of one row": rows[:1, 1],
        "expanded": torch.ones(1).expand(4),
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "bfloat16": torch.arange(3, dtype=torch.bfloat16),
        "empty": torch.zeros(0, 7),
        "scalar": torch.tensor(True),
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "text": ["a", None],
    }
    received = decode(encode([batch, Pair(rows.t(), rows)]))
    for got, sent in zip(received[0].values(), batch.values(), strict=True):
        if isinstance(sent, torch.Tensor):
            assert (got.dtype, got.tolist()) == (sent.dtype, sent.tolist())
        else:
            assert got == sent
    assert torch.equal(received[1].left, rows.t())
    sparse = torch.eye(2).to_sparse()
    assert torch.equal(decode(encode(sparse)).to_dense(), torch.eye(2))


def _failing(kind: str, fails_at: int) -> list[int]:
    seen = []
    how: dict[str, Any] = {}
    dataset: Any = Stream(range(20), fails_at if kind == "data set" else None)
    if kind == "collate":
        how["collate_fn"] = _collate_less(fails_at)
    slicing = {"slice_fn_for_dispatch": _bad_slice} if kind == "slice" else {}
    try:
        for batch in dispatched(DataLoader(dataset, batch_size=2, **how), **slicing):
            seen.extend(batch.tolist())
    except Exception as error:
        raise type(error)(f"{error}; seen {seen}") from error
    return seen


def _bad_slice(batch: Any, rows: slice, process_index: int, num_processes: int) -> Any:
    raise LookupError(f"no rows for {process_index} of {num_processes}")


class _collate_less:  # noqa: N801 - a function with a state
    def __init__(self, limit: int) -> None:
        self.limit = limit

    def __call__(self, items: list[int]) -> torch.Tensor:
        if items[0] >= self.limit:
            raise LookupError(f"{items} cannot be collated")
        return torch.tensor(items)


@pytest.mark.parametrize(("kind", "fails_at"), [("data set", 0), ("data set", 9), ("collate", 8), ("slice", 0)])
def test_what_the_main_process_fails_with_is_raised_everywhere(kind: str, fails_at: int) -> None:
    main, other = outcomes(_failing, kind, fails_at)
    assert main.error == "LookupError"
    assert other.error == "DataError"
    assert "process 0, which reads the data for all, failed: LookupError: " in other.message
    cause = {"data set": f"shard {fails_at} is gone", "collate": "[8, 9] cannot be collated", "slice": "no rows for 0"}
    assert cause[kind] in main.message
    assert cause[kind] in other.message
    given = {0: "[]", 8: "[2, 3, 6, 7]", 9: "[2, 3, 6, 7]"}[fails_at]
    assert other.message.endswith(f"seen {given}")


def _goes_on_after_break(batches: int) -> list[Any]:
    loader = dispatched(DataLoader(Stream(range(12)), batch_size=2))
    first = []
    for batch in loader:
        first.append(batch.tolist())
        if len(first) == batches:
            break
    assert not GradientState().in_dataloader
    return [first, [batch.tolist() for batch in loader], loader.iteration]


def test_an_epoch_left_by_break_does_not_disturb_the_next() -> None:
    """A look at the first batch is no epoch."""
    for batches in (1, 2):
        for rank, epoch in enumerate(run(_goes_on_after_break, batches)):
            complete = [[start, start + 1] for start in range(rank * 2, 12, 4)]
            assert epoch == [complete[:batches], complete, batches]


def _uneven(size: int) -> list[Any]:
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(even_batches=False))
    loader: Any = accelerator.prepare(DataLoader(Stream(range(size)), batch_size=2))
    uneven = [(batch.tolist(), loader.end_of_dataloader) for batch in loader]
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    with accelerator.join_uneven_inputs([model], even_batches=False):
        for batch in loader:
            model(batch[:, None].float()).sum().backward()
    loader.even_batches = True
    return [uneven, [batch.tolist() for batch in loader]]


def test_without_even_batches_the_last_processes_have_less_or_nothing() -> None:
    first, second = run(_uneven, 7)
    assert first[0] == [([0, 1], False), ([4, 5], True)]
    assert second[0] == [([2, 3], False), ([6], True)]
    first, second = run(_uneven, 5)
    assert first[0] == [([0, 1], False), ([4], True)]
    assert second[0] == [([2, 3], True)]
    assert second[1] == [[2, 3], [0]]


def _short_round_amid_others() -> list[int]:
    batches = [torch.arange(4), torch.arange(1), torch.arange(4)]
    loader = dispatched(DataLoader(Stream(batches), batch_size=None), split_batches=True, even_batches=False)
    return [len(batch) for batch in loader]


def test_a_process_without_a_part_ends_its_epoch_and_is_sent_nothing_more() -> None:
    assert run(_short_round_amid_others) == [[2, 1, 2], [2]]


def _cut_by_hand(batch: Any, rows: slice, process_index: int, num_processes: int) -> Any:
    return {"rows": batch[rows], "all": batch, "who": torch.tensor([process_index, num_processes])}


def _sliced() -> list[Any]:
    loader = dispatched(DataLoader(Stream(range(8)), batch_size=2), slice_fn_for_dispatch=_cut_by_hand)
    return [{key: value.tolist() for key, value in batch.items()} for batch in loader]


def test_slice_fn_cuts_each_part_out_of_the_whole() -> None:
    first, second = run(_sliced)
    assert first[1] == {"rows": [4, 5], "all": [4, 5, 6, 7], "who": [0, 2]}
    assert second[1] == {"rows": [6, 7], "all": [4, 5, 6, 7], "who": [1, 2]}


def _epochs(kind: str, how: dict[str, Any], stop_at: int | None, state: Any = None) -> list[Any]:
    set_seed(5, device_specific=True)
    dataset: Any = Shuffled(26) if kind == "stream" else Numbers(26)
    loader = dispatched(
        DataLoader(dataset, batch_size=4 if how["split_batches"] else 2, shuffle=kind != "stream"),
        use_seedable_sampler=kind == "seedable", **how,
    )  # fmt: skip
    seen = []
    if state is not None:
        set_seed(99)
        loader.load_state_dict(state[0])
        torch.set_rng_state(state[1])
    while loader.iteration < 3:
        batches = loader
        if state is not None and not how["use_stateful_dataloader"]:
            batches, state = skip_first_batches(loader, loader.position), None
        for batch in batches:
            seen.append([*batch.tolist(), int(torch.randint(1000, ()))])
            if len(seen) == stop_at:
                return [seen, loader.state_dict(), torch.get_rng_state()]
    return [seen]


def _resumed(kind: str) -> list[Any]:
    """Stops at several batches and goes on from the main process's state; returns what went differently."""
    wrong = []
    for split, stateful in ((False, False), (True, False), (False, True)):
        how = {"split_batches": split, "use_stateful_dataloader": stateful}
        (whole,) = _epochs(kind, how, None)
        for stop_at in (1, 6, 7, 8, 13):
            seen, state, rng = _epochs(kind, how, stop_at)
            everyones = [state]
            torch.distributed.broadcast_object_list(everyones)
            (rest,) = _epochs(kind, how, None, (everyones[0], rng))
            if seen + rest != whole:
                wrong.append([how, stop_at, seen, rest, whole])
    return [wrong, [row[:2] for row in whole[:7]]]


@pytest.mark.parametrize("kind", ["stream", "shuffle", "seedable"])
def test_resuming_gives_exactly_the_rest_and_the_same_next_epochs(kind: str) -> None:
    (first_wrong, first), (second_wrong, second) = run(_resumed, kind)
    assert first_wrong == second_wrong == []
    assert len({item for row in first + second for item in row[:2]}) >= 26


def _windows() -> list[Any]:
    plugin = GradientAccumulationPlugin(num_steps=4)
    accelerator = Accelerator(gradient_accumulation_plugin=plugin)
    loader: Any = accelerator.prepare(DataLoader(Stream(range(24)), batch_size=2))
    return [loader.batches_left for _ in loader]


def test_the_length_of_the_last_window_is_known_with_its_first_batch() -> None:
    """Six rounds in windows of four: the window of two begins with the fifth."""
    for left in run(_windows):
        assert left == [None, None, 4, 3, 2, 1] or left == [None, None, None, 3, 2, 1]
        assert left[4:] == [2, 1]


def _meshed() -> list[Any]:
    world = PartialState()
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    found = []
    for dataset, dispatch in ((Stream(range(10)), True), (Numbers(10), False), (Stream(range(10)), False)):
        loader = prepare_data_loader(
            DataLoader(dataset, batch_size=2), world.device, put_on_device=True, dispatch_batches=dispatch,
            torch_device_mesh=mesh,
        )  # fmt: skip
        found.append([batch.tolist() for batch in loader])
    return found


def test_processes_that_share_a_model_see_the_same_data() -> None:
    ranks = run(_meshed, processes=4)
    assert ranks[0] == ranks[1]
    assert ranks[2] == ranks[3]
    assert ranks[0][0] == [[0, 1], [4, 5], [8]]
    assert ranks[2][0] == [[2, 3], [6, 7], [9]]
    assert ranks[0][1] == ranks[0][2] == [[0, 1], [4, 5], [8, 9]]
    assert ranks[2][1] == ranks[2][2] == [[2, 3], [6, 7], [0, 1]]


def _split_odd() -> None:
    dispatched(DataLoader(Numbers(9), batch_size=3), split_batches=True)


def test_split_names_batch_size_and_the_nearest_that_fit() -> None:
    for outcome in outcomes(_split_odd):
        assert outcome.error == DataError.__name__
        assert "batch size 3 is not a multiple of the 2 processes; nearest are 2 and 4" in outcome.message


def _alone() -> list[Any]:
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
    loader = accelerator.prepare(DataLoader(range(5), batch_size=2))  # type: ignore[arg-type]
    by_hand = DataLoaderDispatcher(range(5), batch_size=2)
    return [isinstance(loader, DataLoaderDispatcher), *[[batch.tolist() for batch in one] for one in (loader, by_hand)]]


def test_one_process_dispatches_to_itself() -> None:
    assert run_one(_alone) == [True, [[0, 1], [2, 3], [4]], [[0, 1], [2, 3], [4]]]
