"""The sample order of an epoch: the same on every process, and drawn again on resume."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from torch.utils.data import BatchSampler, RandomSampler, Sampler, SequentialSampler

from accel import collectives
from accel.collectives.rng import host_rng_state, set_host_rng_state

# torchdata's versions of torch's samplers, which its loader creates in place of torch's.
_TORCHDATA = "torchdata.stateful_dataloader.sampler"


@runtime_checkable
class Indexable(Protocol):
    """A sampler with random access."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


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


def is_plain_batch_sampler(item: Any) -> bool:
    """Return True for torch's own `BatchSampler` or torchdata's: batches of one size, samples in order."""
    return type(item) is BatchSampler or _is_torchdata(item, "BatchSampler")


def is_plain_shuffle(item: Any) -> bool:
    """Return True for torch's own `RandomSampler` or torchdata's, but not for a subclass."""
    return type(item) is RandomSampler or _is_torchdata(item, "RandomSampler")


def _is_torchdata(item: Any, name: str) -> bool:
    return type(item).__module__ == _TORCHDATA and type(item).__name__ == name


def _permutations(sampler: Any, generator: torch.Generator) -> torch.Tensor:
    # The draws of torch's RandomSampler as a tensor: a process converts only its own share to a list.
    size, num_samples = len(sampler.data_source), sampler.num_samples
    full_passes, rest = divmod(num_samples, size)
    permutations = [torch.randperm(size, generator=generator) for _ in range(full_passes)]
    if rest or (type(sampler) is RandomSampler and generator is sampler.generator):
        # torch draws a last permutation even if it uses none of it: the user's generator must advance equally.
        permutations.append(torch.randperm(size, generator=generator)[:rest])
    return permutations[0] if len(permutations) == 1 else torch.cat(permutations)


def draw(sampler: Iterable[Any]) -> Sequence[int] | torch.Tensor | Indexable | Iterator[Any]:
    """Draw the order of one epoch: indexable if the sampler allows it, otherwise an iterator."""
    if isinstance(sampler, SeedableRandomSampler):
        return sampler.draw()
    if type(sampler) is SequentialSampler:
        return range(len(sampler))
    if is_plain_shuffle(sampler) and not sampler.replacement:  # type: ignore[attr-defined]
        return _permutations(sampler, sampler.generator or _fresh_generator())  # type: ignore[attr-defined]
    if isinstance(sampler, Indexable):
        return sampler
    return iter(sampler)


def _fresh_generator() -> torch.Generator:
    seed = int(torch.empty((), dtype=torch.int64).random_().item())
    return torch.Generator().manual_seed(seed)


class OrderRng:
    """The random state that orders are drawn from: saved, synchronized over all processes, and replayed.

    ``owners``: samplers or data sets whose ``generator`` may be used, as well as the global generators.
    """

    def __init__(self, owners: Sequence[Any], *, shared: bool) -> None:
        self._owners = owners
        self._shared = shared
        self._fixed = all(_draws_nothing(owner) for owner in owners)

    def generators(self) -> list[torch.Generator]:
        """Return the owners' own generators."""
        candidates = [getattr(owner, "generator", None) for owner in self._owners]
        return [generator for generator in candidates if isinstance(generator, torch.Generator)]

    def capture(self) -> dict[str, Any]:
        """Return the state of all generators in types that a safe unpickler reads; empty if an order needs none."""
        if self._fixed:
            return {}
        return {"host": host_rng_state(), "generators": self.generator_states()}

    def generator_states(self) -> list[torch.Tensor]:
        """Return the state of the owners' own generators."""
        return [generator.get_state() for generator in self.generators()]

    def set_generator_states(self, states: list[torch.Tensor]) -> None:
        """Restore what `generator_states` returned."""
        for generator, state in zip(self.generators(), states, strict=False):
            generator.set_state(state)

    def seeds(self) -> list[int]:
        """Return the seeds of owners that draw only from a seed and the epoch."""
        return [owner.initial_seed for owner in self._seedable()]

    def set_seeds(self, seeds: list[int]) -> None:
        """Restore what `seeds` returned."""
        for owner, seed in zip(self._seedable(), seeds, strict=False):
            owner.initial_seed = seed

    def _seedable(self) -> list[SeedableRandomSampler]:
        return [owner for owner in self._owners if isinstance(owner, SeedableRandomSampler)]

    @contextmanager
    def drawing(self, replay: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
        """Use the main process's generator states, or ``replay``, in the block; yield the states at its start.

        Afterwards the global generators have the process's own states again, if those differed.
        """
        captured = self.capture()
        start = replay if replay is not None else self._agreed(captured)
        differs = bool(start) and start is not captured and not _states_equal(start, captured)
        if differs:
            self.restore(start)
        try:
            yield start
        finally:
            if differs:
                set_host_rng_state(captured["host"])

    def _agreed(self, captured: dict[str, Any]) -> dict[str, Any]:
        if not self._shared or not captured:
            return captured
        start: dict[str, Any] = collectives.broadcast_object_list([captured])[0]
        return start

    def restore(self, state: dict[str, Any]) -> None:
        """Restore what `capture` returned."""
        set_host_rng_state(state["host"])
        self.set_generator_states(state["generators"])


def _draws_nothing(owner: Any) -> bool:
    if owner is None or isinstance(owner, SeedableRandomSampler) or is_plain_batch_sampler(owner):
        return True
    return type(owner) is SequentialSampler or (isinstance(owner, Indexable) and not isinstance(owner, Sampler))


def _states_equal(first: dict[str, Any], second: dict[str, Any]) -> bool:
    return bool(_plain(first) == _plain(second))


def _plain(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return state.tolist()
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    return [_plain(item) for item in state] if isinstance(state, list) else state
