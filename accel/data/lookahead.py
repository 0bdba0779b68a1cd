"""Read-ahead, only as far as the end of an accumulation window must be known."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from accel.state import GradientState


def window_depth(state: GradientState) -> int:
    """Return the number of batches to buffer so that a window cut short by the end is known at its first batch."""
    plugin = state.plugin
    return max(1, plugin.num_steps - 1) if plugin.sync_with_dataloader else 1


class Lookahead(Iterator[Any]):
    """An iterator over ``source`` that buffers ``depth()`` items after the current one.

    ``snapshot`` is called after each item is read; `snapshot_here` is its result for the current item, the state
    from which to resume after it.
    """

    def __init__(
        self, source: Iterator[Any], depth: Callable[[], int], snapshot: Callable[[], Any] | None = None
    ) -> None:
        self._source = source
        self._depth = depth
        self._snapshot = snapshot
        self._held: deque[tuple[Any, Any]] = deque()
        self.exhausted = False
        self.snapshot_here: Any = None

    def fill(self) -> None:
        """Read until the buffer is full or the source ends."""
        wanted = self._depth()
        while not self.exhausted and len(self._held) < wanted:
            self._read()

    def _read(self) -> None:
        try:
            item = next(self._source)
        except StopIteration:
            self.exhausted = True
            return
        self._held.append((item, None if self._snapshot is None else self._snapshot()))

    def peek(self) -> Any:
        """Return the next item, or ``None`` if there is none."""
        return self._held[0][0] if self._held else None

    def __len__(self) -> int:
        return len(self._held)

    def __next__(self) -> Any:
        if not self._held:
            self.fill()
            if not self._held:
                raise StopIteration
        item, self.snapshot_here = self._held.popleft()
        self.fill()
        return item
