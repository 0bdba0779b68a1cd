"""Saving and loading as all processes do it together: every step ends with all agreeing that it went well."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from accel import collectives
from accel.checkpoint.contents import Contents
from accel.checkpoint.directory import leftovers, numbered, publish, recover, remove, start_draft
from accel.checkpoint.files import Digest, digest_of
from accel.checkpoint.manifest import NAME, Manifest, damage, read_manifest, write_manifest
from accel.errors import CheckpointError
from accel.logging import get_logger
from accel.plugins import ProjectConfiguration
from accel.state import PartialState

logger = get_logger(__name__)
Result = TypeVar("Result")

_PREFIX = "checkpoint_"


def together(what: str, action: Callable[[], Result]) -> list[Result]:
    """Run ``action`` on every process and return all results, in rank order.

    If it fails anywhere, `CheckpointError` is raised everywhere, naming the process: no process is left waiting.
    """
    result: tuple[Result | None, str | None]
    cause: Exception | None = None
    try:
        result = action(), None
    except Exception as error:
        cause = error
        result = None, str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
    everyones = collectives.all_objects(result)
    failed = [(rank, message) for rank, (_, message) in enumerate(everyones) if message is not None]
    if failed:
        rank, message = failed[0]
        where = f"process {rank}: " if len(everyones) > 1 else ""
        raise CheckpointError(f"{what}: {where}{message}") from cause
    return [value for value, _ in everyones]


class Checkpoints:
    """Writes and reads the checkpoints of a run. Every method is called by all processes."""

    def __init__(self, state: PartialState, config: ProjectConfiguration) -> None:
        self.state = state
        self.config = config

    @property
    def _keeper(self) -> bool:
        """Whether this process writes what all have in common: one in the world, or one a node."""
        return self.state.is_local_main_process if self.config.save_on_each_node else self.state.is_main_process

    def next_place(self) -> Path:
        """Where the next automatically named checkpoint goes. Raises `CheckpointError` if something is there."""
        place = self.config.checkpoints / f"{_PREFIX}{self.config.iteration}"
        if place.exists():
            raise CheckpointError(f"{place} exists: load_state() first to go on from it, or set save_iteration")
        return place

    def save(self, place: Path, fill: Callable[[Path], dict[str, Digest]]) -> None:
        """Make a checkpoint in ``place``; ``fill`` writes this process's files into a directory and returns digests.

        When this returns, or raises, ``place`` is whole: as it is now, or as it was before.
        """
        place = place.resolve()
        what = f"saving {place}"
        drafts = together(what, lambda: str(start_draft(place)) if self._keeper else None)
        draft = Path(self._own(drafts))
        try:
            digests: dict[str, Digest] = {}
            for written in together(what, lambda: fill(draft)):
                digests.update(written)
            together(what, lambda: self._finish(draft, place, digests))
        except BaseException:
            if self._keeper:
                shutil.rmtree(draft, ignore_errors=True)
            raise

    def _own(self, drafts: list[str | None]) -> str:
        """The draft of this process's node: that of the last keeper up to this rank."""
        return next(draft for draft in reversed(drafts[: self.state.process_index + 1]) if draft is not None)

    def _finish(self, draft: Path, place: Path, digests: dict[str, Digest]) -> None:
        if not self._keeper:
            return
        present = [str(path.relative_to(draft)) for path in sorted(draft.rglob("*")) if path.is_file()]
        files = {name: digests.get(name) or digest_of(draft / name) for name in present}
        write_manifest(draft, Manifest(num_processes=self.state.num_processes, files=files))
        publish(draft, place)

    def prune(self) -> None:
        """Delete the oldest automatically named checkpoints beyond ``total_limit``, now that a newer one is whole."""
        if self.config.total_limit is not None and self._keeper:
            for _, folder in numbered(self.config.checkpoints, _PREFIX)[: -self.config.total_limit]:
                remove(folder)

    def find(self, asked: Path | None) -> Path:
        """Return the checkpoint in ``asked``, verified; without it, the newest whole one of the automatically named.

        Raises `CheckpointError` naming the file that is missing or damaged.
        """
        what = "loading a checkpoint"
        found = together(what, lambda: str(self._find(asked)) if self._keeper else None)
        return Path(self._own(found))

    def _find(self, asked: Path | None) -> Path:
        if asked is None:
            return self._newest()
        place = asked.resolve()
        done = recover(place)
        if done is not None:
            logger.warning(done)
        if not place.is_dir():
            waiting = leftovers(place, "draft") + leftovers(place, "old")
            more = f" (only {waiting[0].name}, which is not whole)" if waiting else ""
            raise CheckpointError(f"{asked} is not there{more}")
        if read_manifest(place) is None:
            logger.warning(f"{place} has no {NAME}: it was not written by accel and cannot be verified")
            return place
        problem = damage(place)
        if problem is not None:
            raise CheckpointError(problem)
        return place

    def _newest(self) -> Path:
        problems: list[str] = []
        for number, folder in reversed(numbered(self.config.checkpoints, _PREFIX)):
            problem = damage(folder)
            if problem is None:
                self.config.iteration = number + 1
                for told in problems:
                    logger.warning(f"passed over: {told}")
                return folder
            problems.append(problem)
        why = f": {'; '.join(problems)}" if problems else ""
        raise CheckpointError(f"{self.config.checkpoints} holds no whole checkpoint{why}")

    def load(self, folder: Path, contents: Contents, **load_model_kwargs: object) -> int:
        """Put back what ``folder`` holds; returns the step of the accumulation window.

        With another number of processes than it was saved by, generators of processes that are new keep their state,
        and the step is that of process 0; this is logged as a warning.
        """
        steps = together(f"loading {folder}", lambda: contents.read(folder, **load_model_kwargs))
        manifest = read_manifest(folder)
        if manifest is not None and manifest.num_processes != self.state.num_processes:
            logger.warning(
                f"{folder} was saved by {manifest.num_processes} process(es), this run has {self.state.num_processes}: "
                "random numbers, and what each process sees of an interrupted epoch, are not those of the saved run"
            )
        elif None in steps:
            raise CheckpointError(f"{folder} has no random_states_{steps.index(None)}.pkl")
        return steps[self.state.process_index] or steps[0] or 0
