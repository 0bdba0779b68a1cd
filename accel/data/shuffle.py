"""The sample order of an epoch: the same on every process, and drawn again on resume."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import torch
from torch.utils.data import BatchSampler, RandomSampler, Sampler, SequentialSampler

from accel import collectives
from accel.collectives.rng import fork_host_rng, host_rng_state, set_host_rng_state

# torchdata's versions of torch's samplers, which its loader creates in place of torch's.
_TORCHDATA = "torchdata.stateful_dataloader.sampler"


class SeedableRandomSampler(RandomSampler):
    """A shuffle that depends only on a seed and the epoch: ``set_epoch(e)`` always yields the same order.

    Takes the arguments of torch's `RandomSampler`, and ``data_seed`` (default: `torch.initial_seed`); a
    ``generator`` is seeded again for each epoch. Iterating to the end advances to the next epoch.
    """

    def __init__(
        self,
        data_source: Any,
        replacement: bool = False,
        num_samples: int | None = None,
        generator: torch.Generator | None = None,
        *,
        data_seed: int | None = None,
    ) -> None:
        super().__init__(data_source, replacement, num_samples, generator or torch.Generator())
        self.initial_seed = torch.initial_seed() if data_seed is None else data_seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Shuffle as in epoch ``epoch`` from the next iteration on."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        yield from self.draw().tolist()
        self.set_epoch(self.epoch + 1)

    def draw(self) -> torch.Tensor:
        """Return the order of the current epoch, a tensor of shape ``(num_samples,)``."""
        assert self.generator is not None
        self.generator.manual_seed(self.initial_seed + self.epoch)
        if self.replacement:
            return torch.tensor(list(super().__iter__()), dtype=torch.int64)
        return _permutations(self, self.generator)


def is_plain(item: Any, kind: type) -> bool:
    """Return True if ``item`` is of torch's class ``kind``, or torchdata's of that name, but not of a subclass."""
    return type(item) is kind or (type(item).__module__, type(item).__name__) == (_TORCHDATA, kind.__name__)


def _is_indexable(item: Any) -> bool:
    return hasattr(item, "__len__") and hasattr(item, "__getitem__")


def _permutations(sampler: Any, generator: torch.Generator) -> torch.Tensor:
    # The draws of torch's RandomSampler as a tensor: a process converts only its own share to a list.
    size, num_samples = len(sampler.data_source), sampler.num_samples
    full_passes, rest = divmod(num_samples, size)
    permutations = [torch.randperm(size, generator=generator) for _ in range(full_passes)]
    if rest or (type(sampler) is RandomSampler and generator is sampler.generator):
        # torch draws a last permutation even if it uses none of it: the user's generator must advance equally.
        permutations.append(torch.randperm(size, generator=generator)[:rest])
    return permutations[0] if len(permutations) == 1 else torch.cat(permutations)


def draw(sampler: Any, seed: int | None = None) -> Sequence[int] | torch.Tensor | Iterator[Any]:
    """Draw the order of one epoch: indexable if the sampler allows it, otherwise an iterator.

    ``seed``: the number that torch's `RandomSampler` draws if it has no ``generator``.
    """
    if isinstance(sampler, SeedableRandomSampler):
        return sampler.draw()
    if type(sampler) is SequentialSampler:
        return range(len(sampler))
    if is_plain(sampler, RandomSampler) and not sampler.replacement:
        generator = sampler.generator if seed is None else _seeded(seed)
        return _permutations(sampler, generator or _seeded(_draw_seed()))
    return cast(Sequence[int], sampler) if _is_indexable(sampler) else iter(sampler)


def _draw_seed() -> int:
    return int(torch.empty((), dtype=torch.int64).random_().item())


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class OrderRng:
    """The random state from which epochs' orders are drawn: the same on all processes, and restored on resuming.

    It is one number an epoch, which torch's `RandomSampler` draws, and the states of the owners' own generators. For a
    script's samplers and streams it is the states of the global generators.

    ``owners``: samplers, or a data set and its loader.
    ``shared``: use the main process's numbers and states.
    """

    def __init__(self, owners: Sequence[Any], *, shared: bool) -> None:
        self._owners = owners
        self._shared = shared

    def generators(self) -> list[torch.Generator]:
        """Return the owners' own generators."""
        candidates = [getattr(owner, "generator", None) for owner in self._owners]
        return [generator for generator in candidates if isinstance(generator, torch.Generator)]

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the owners' own generators, and the seeds of each `SeedableRandomSampler`."""
        return {
            "generators": [generator.get_state() for generator in self.generators()],
            "seeds": [owner.initial_seed for owner in self._seedable()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        for generator, generator_state in zip(self.generators(), state["generators"], strict=False):
            generator.set_state(generator_state)
        for owner, seed in zip(self._seedable(), state.get("seeds", []), strict=False):
            owner.initial_seed = seed

    def _seedable(self) -> list[SeedableRandomSampler]:
        return [owner for owner in self._owners if isinstance(owner, SeedableRandomSampler)]

    def _start(self) -> dict[str, Any]:
        drawing = [owner for owner in self._owners if not _draws_nothing(owner)]
        if not drawing:
            return {}
        start: dict[str, Any] = {"generators": self.state_dict()["generators"]}
        if not all(is_plain(owner, RandomSampler) for owner in drawing):
            start["host"] = host_rng_state()
        elif not all(owner.generator for owner in drawing):
            start["seed"] = _draw_seed()
        return collectives.broadcast_object_list([start])[0] if self._shared else start

    @contextmanager
    def drawing(self, replay: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
        """Draw an order in the block, as one was drawn from ``replay`` if given; yield what it is drawn from."""
        start = self._start() if replay is None else replay
        if not start:
            yield start
            return
        seed = start.get("seed")
        as_they_are = replay is None and "host" in start and _equal(start["host"], host_rng_state())
        shuffles = [] if seed is None else [owner for owner in self._owners if is_plain(owner, RandomSampler)]
        lent = [shuffle for shuffle in shuffles if not shuffle.generator]
        with nullcontext() if as_they_are else fork_host_rng(seed):
            self.load_state_dict(start)
            if "host" in start and not as_they_are:
                set_host_rng_state(start["host"])
            for shuffle in lent:
                shuffle.generator = _seeded(start["seed"])
            try:
                yield start
            finally:
                for shuffle in lent:
                    shuffle.generator = None


def _equal(first: dict[str, Any], second: dict[str, Any]) -> bool:
    """Return True if two results of `host_rng_state` are equal."""
    return first.keys() == second.keys() and all(
        torch.equal(state, second[name]) if isinstance(state, torch.Tensor) else state == second[name]
        for name, state in first.items()
    )


def _draws_nothing(owner: Any) -> bool:
    if owner is None or isinstance(owner, SeedableRandomSampler) or is_plain(owner, BatchSampler):
        return True
    return type(owner) is SequentialSampler or (_is_indexable(owner) and not isinstance(owner, Sampler))
