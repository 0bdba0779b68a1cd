"""Splitting of the batches that the main process reads for all: into rounds, with one part for each share.

A round is one batch for each share or, for split batches, one batch cut into as many parts. With ``even``,
the parts of a round are equally long if rows can be moved between batches: the last part is completed with
rows from the start of the epoch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

from accel.data.rows import count_rows, join_rows, take_rows
from accel.errors import DataError


@dataclass(frozen=True)
class Round:
    """A round of batches, one for each share.

    ``parts``: the batch of each share, ``None`` for none.
    ``counts``: the rows of each part that are not repetitions; ``None`` if there are no repetitions and all parts
        have the nominal rows.
    """

    parts: list[Any]
    counts: tuple[int, ...] | None = None


@dataclass(kw_only=True)
class Dealer:
    """A splitter of batches into rounds of ``shares`` parts.

    ``nominal``: rows of a part, if the loader defines them.
    ``slice_fn``: ``slice_fn(batch, rows, process_index=…, num_processes=…)`` cuts a part out of a batch of all
        shares.
    ``first``: the epoch's first batch, whose rows complete the last round; by default copied from the first
        round.
    """

    shares: int
    split: bool
    even: bool
    drop_last: bool
    nominal: int | None = None
    slice_fn: Callable[..., Any] | None = None
    first: Any = None

    def deal(self, batches: Iterator[Any], skip: int = 0) -> Iterator[Round]:
        """Yield the rounds of ``batches`` after the first ``skip``."""
        taken = 1 if self.split else self.shares
        for number in count():
            dealt = list(islice(batches, taken))
            if not dealt or (len(dealt) < taken and self.drop_last):
                return
            if self.first is None and self.even and self.shares > 1:
                self.first = self._needed(dealt[0])
            if number >= skip:
                yield self._round(dealt)

    def _needed(self, batch: Any) -> Any:
        """Copy what a short last round needs of ``batch``: the training loop may change its own part in place."""
        always_cut = self.split or self.slice_fn is not None
        return copy.deepcopy(take_rows(batch, slice(0, self.shares - 1)) if always_cut else batch)

    def _round(self, dealt: list[Any]) -> Round:
        sizes = [count_rows(batch) for batch in dealt]
        alike = len(dealt) == self.shares and all(size == sizes[0] for size in sizes)
        whole = not self.split and self.slice_fn is None
        if whole and (alike or (not self.even and len(dealt) == self.shares)):
            return Round(dealt, self._counted(sizes))
        try:
            return self._cut(join_rows(dealt))
        except DataError:
            if not whole:
                raise
        return self._filled(dealt, sizes)

    def _cut(self, joined: Any) -> Round:
        rows = count_rows(joined)
        if rows is None:
            raise DataError(f"a batch of type {type(joined).__name__} has no rows to give each process a part of")
        each, rest = divmod(rows, self.shares)
        if rest and self.even:
            joined = self._completed(joined, self.shares - rest)
            each += 1
            edges = [share * each for share in range(self.shares + 1)]
            counts = tuple(min(each, max(0, rows - start)) for start in edges[:-1])
            return Round([self._slice(joined, edges, share) for share in range(self.shares)], counts)
        edges = [share * each + min(share, rest) for share in range(self.shares + 1)]
        parts = [
            self._slice(joined, edges, share) if edges[share] < edges[share + 1] else None
            for share in range(self.shares)
        ]
        return Round(parts, self._counted([edges[share + 1] - edges[share] for share in range(self.shares)]))

    def _counted(self, sizes: list[int | None]) -> tuple[int, ...] | None:
        if self.nominal is None or all(size == self.nominal or size is None for size in sizes):
            return None
        return tuple(size or 0 for size in sizes)

    def _completed(self, joined: Any, missing: int) -> Any:
        parts = [joined]
        size = count_rows(self.first) or 0
        if size == 0:
            raise DataError("the first batch of the epoch has no rows to complete the last one with")
        while missing > 0:
            parts.append(take_rows(self.first, slice(0, missing)))
            missing -= min(size, missing)
        return join_rows(parts)

    def _slice(self, joined: Any, edges: list[int], share: int) -> Any:
        cut = take_rows if self.slice_fn is None else self.slice_fn
        return cut(joined, slice(edges[share], edges[share + 1]), process_index=share, num_processes=self.shares)

    def _filled(self, dealt: list[Any], sizes: list[int | None]) -> Round:
        """Return a round of batches that cannot be cut, with the epoch's first one for shares without any."""
        missing = self.shares - len(dealt)
        if not self.even or missing == 0:
            return Round([*dealt, *[None] * missing])
        return Round([*dealt, *[self.first] * missing], (*[size or 1 for size in sizes], *[0] * missing))
