"""Prepared loaders that are torchdata's for `isinstance` too. Needs torchdata: imported lazily."""

from __future__ import annotations

from torchdata.stateful_dataloader import StatefulDataLoader

from accel.data.dispatcher import DataLoaderDispatcher
from accel.data.loader import DataLoaderShard
from accel.data.prepare import SkipDataLoader


class StatefulShard(DataLoaderShard, StatefulDataLoader):  # type: ignore[misc]
    """A `DataLoaderShard` that resumes by itself."""


class StatefulSkip(SkipDataLoader, StatefulDataLoader):  # type: ignore[misc]
    """A `SkipDataLoader` that resumes by itself."""


class StatefulDispatcher(DataLoaderDispatcher, StatefulDataLoader):  # type: ignore[misc]
    """A `DataLoaderDispatcher` that resumes by itself."""


stateful_kinds = {kind.__bases__[0]: kind for kind in (StatefulShard, StatefulSkip, StatefulDispatcher)}
