"""Save and load on all processes together, with one copy for all or one on each node; all agree that it went well."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from accel.checkpoint.all_ranks import Result, refuse_absent, side_group, together
from accel.checkpoint.background import Background, Staging
from accel.checkpoint.contents import Contents, Piece
from accel.checkpoint.directory import (
    Manifest,
    delete_given_up,
    differing,
    leftovers,
    misfit,
    numbered,
    publish,
    read_manifest,
    recover,
    remove,
    start_draft,
    write_manifest,
)
from accel.checkpoint.durable import Digest, fsync_directory, reporting_full_disk, settle
from accel.checkpoint.file_names import CHECKPOINT_PREFIX, MANIFEST, random_states_name
from accel.checkpoint.weights import keeps
from accel.errors import CheckpointError
from accel.logging import get_logger
from accel.plugins import ProjectConfiguration
from accel.state import PartialState
from accel.world import environment

logger = get_logger(__name__)

# The fence: an attempt that has a successor must not write any more.
#
# A scheduler that loses a node starts the job again elsewhere while its first processes may still run there.
# Such a process must not replace a checkpoint that the new start has written.

FENCE, ATTEMPT = "ACCEL_FENCE", "ACCEL_ATTEMPT"


def check_fence() -> None:
    """Raise `CheckpointError` if a later start of this job has begun. Without a scheduler's fence nothing happens.

    ``ACCEL_FENCE`` names a file with the number of the newest start, ``ACCEL_ATTEMPT`` is that of this one. A
    missing file blocks nobody; an unreadable one raises `OSError`.
    """
    name = os.environ.get(FENCE)
    if not name:
        return
    try:
        newest = Path(name).read_text().strip()
    except FileNotFoundError:
        return
    own = os.environ.get(ATTEMPT, "0")
    if newest.isdigit() and own.isdigit() and int(newest) > int(own):
        raise CheckpointError(
            f"start {newest} of this job has begun ({name}), and this process belongs to start {own}: "
            "it leaves the checkpoints alone"
        )


# Nodes without a common file system: each keeps a whole copy.
#
# Any file of a copy may be missing or from an earlier save, because the program that copies it to the next
# start of the nodes works file by file (see `accel.world.environment`) and may be interrupted.


@dataclass(frozen=True, kw_only=True)
class Copy:
    """A node's copy of a checkpoint: the id of its save, and its problem if there is one."""

    folder: str
    save: str | None = None
    problem: str | None = None


def copy_in(place: Path, num_processes: int) -> Copy:
    """Return this node's copy of the checkpoint in ``place``, checked only by file lengths.

    If another number of processes wrote the checkpoint, a new node has no copy: it uses that of node 0.
    """
    folder = environment.own_copy(place)
    if not folder.is_dir() and folder != place and _written_by(place) not in (None, num_processes):
        folder = place
    problem = misfit(folder) if folder.is_dir() else f"{folder} is not there"
    manifest = None if problem else read_manifest(folder)
    return Copy(folder=str(folder), save=manifest.save if manifest else None, problem=problem)


def _written_by(folder: Path) -> int | None:
    try:
        manifest = read_manifest(folder)
    except CheckpointError:
        return None
    return manifest.num_processes if manifest else None


# The writer.

_Publish: TypeAlias = Callable[[dict[str, Digest]], None]


class Checkpoints:
    """A writer and reader of a run's checkpoints. All processes must call every method."""

    def __init__(self, state: PartialState, config: ProjectConfiguration) -> None:
        self.state = state
        self.config = config
        self._background = Background()
        self._staging: Staging | None = None
        self._group: Any = None
        self._roll_call = side_group() if state.debug else None
        self._last: Path | None = None  # the last checkpoint that this run has saved or loaded
        self._passed_over: set[Path] = set()

    @property
    def on_each_node(self) -> bool:
        """True if every node keeps a checkpoint of its own."""
        return self.config.save_on_each_node or environment.project_root() is not None

    @property
    def keeper(self) -> bool:
        """True if this process writes shared data: one process in the world, or one per node."""
        return keeps(self.state, self.on_each_node)

    def next_place(self) -> Path:
        """Return the path of the next automatically named checkpoint. Raises `CheckpointError` if it exists."""
        place = self.config.checkpoints / f"{CHECKPOINT_PREFIX}{self.config.iteration}"
        if environment.own_copy(place).exists() and place not in self._passed_over:
            raise CheckpointError(f"{place} exists: load_state() first to go on from it, or set save_iteration")
        return place

    def wait(self) -> None:
        """Wait for the save in progress. Raises `CheckpointError`, on every process, if it failed."""
        self._background.wait()

    def release(self) -> None:
        """Wait, and release the memory for background saves."""
        self.wait()
        if self._staging is not None:
            self._staging.free()

    def save(
        self, place: Path, collect: Callable[[Path], Sequence[Piece]], *, beside: bool = False, prune: bool = False
    ) -> None:
        """Write a checkpoint to ``place`` from the files that ``collect`` returns for a draft directory.

        When this returns or raises, ``place`` is complete: the new checkpoint or the old one. With ``beside`` it
        returns once the state is copied and writes in the background; `wait` raises its error. ``prune`` then deletes
        the oldest automatically named checkpoints beyond ``total_limit``, and the remains of older interrupted saves.
        """
        refuse_absent("save_state", self._roll_call)
        self.wait()
        place = environment.own_copy(place.resolve())
        drafts = self._saving(place, lambda: self._start(place))
        draft = Path(self._own(drafts))
        publish = partial(self._publish, draft, place, str(drafts[0])[-8:], prune)
        if beside:
            self._save_beside(draft, place, collect, publish)
        else:
            self._finish(draft, place, lambda: collect(draft), publish, None)

    def _saving(self, place: Path, action: Callable[[], Result], group: Any = None) -> list[Result]:
        """Run one step of saving a checkpoint in ``place`` with `together`."""
        last = f"; the last whole checkpoint is {self._last}" if self._last is not None else ""
        return together(f"saving {place}", reporting_full_disk(place, last)(action), group)

    def _start(self, place: Path) -> str | None:
        if not self.keeper:
            return None
        check_fence()  # before it deletes what looks like drafts that were given up
        return str(start_draft(place))

    def _save_beside(
        self, draft: Path, place: Path, collect: Callable[[Path], Sequence[Piece]], publish: _Publish
    ) -> None:
        if self._group is None:
            self._group = side_group()
        if self._staging is None:
            self._staging = Staging(self.state.device)
        staged: list[Piece] = []
        try:
            self._saving(place, lambda: staged.extend(self._copied(collect(draft))))
        except BaseException:
            self._abandon(draft)
            raise
        self._background.start(lambda: self._finish(draft, place, lambda: staged, publish, self._group))

    def _copied(self, pieces: Sequence[Piece]) -> list[Piece]:
        assert self._staging is not None
        values = self._staging.copy([piece.value for piece in pieces])
        return [
            Piece(piece.name, piece.kind, value, piece.metadata) for piece, value in zip(pieces, values, strict=True)
        ]

    def _finish(
        self, draft: Path, place: Path, pieces: Callable[[], Sequence[Piece]], publish: _Publish, group: Any
    ) -> None:
        """Write the files, agree that all are written, and publish."""
        try:
            digests: dict[str, Digest] = {}
            everyones = self._saving(place, lambda: _written(draft, pieces), group)
            for written in (*everyones, everyones[self.state.process_index]):
                digests.update(written)  # its own last: a node without the others' disks has files of its own
            self._saving(place, lambda: publish(digests), group)
            self._last = place
        except BaseException:
            self._abandon(draft)
            raise

    def _abandon(self, draft: Path) -> None:
        if self.keeper:
            shutil.rmtree(draft, ignore_errors=True)

    def _own(self, keepers: list[Result | None]) -> Result:
        """Return the result of this node's writer: the last writer up to this rank."""
        return next(said for said in reversed(keepers[: self.state.process_index + 1]) if said is not None)

    def _publish(self, draft: Path, place: Path, save: str, prune: bool, digests: dict[str, Digest]) -> None:
        if not self.keeper:
            return
        present = sorted(draft.rglob("*"))
        names = [str(path.relative_to(draft)) for path in present if path.is_file()]
        files = {name: digests.get(name) or settle(draft / name) for name in names}
        for folder in present:
            if folder.is_dir():
                fsync_directory(folder)
        write_manifest(draft, Manifest(num_processes=self.state.num_processes, save=save, files=files))
        check_fence()
        publish(draft, place)
        if not prune:
            return
        named = numbered(place.parent, CHECKPOINT_PREFIX)
        delete_given_up(place, CHECKPOINT_PREFIX)
        if self.config.total_limit is not None:
            for _, folder in named[: -self.config.total_limit]:
                remove(folder)

    def find(self, asked: Path | None) -> Path:
        """Return the verified checkpoint in ``asked``, by default the newest complete one with an automatic name.

        Raises `CheckpointError` naming the file that is missing or damaged.
        """
        self.wait()
        if asked is None:
            return self._newest()
        copies = self._verified(lambda: self._find(asked))
        problem = _disagreement(copies)
        if problem is not None:
            raise CheckpointError(f"loading a checkpoint: {problem}")
        return Path(self._own(copies).folder)

    def _copies(self, find: Callable[[], Result]) -> list[Result | None]:
        """Return the results of ``find`` on the writers, and None for other processes, in rank order."""
        return together("loading a checkpoint", lambda: find() if self.keeper else None)

    def _verified(self, find: Callable[[], Copy]) -> list[Copy | None]:
        """Return the writers' copies after reading every file: each process reads its part of its writer's copy."""
        copies = self._copies(find)
        keepers = [rank for rank, copy in enumerate(copies) if copy is not None]
        mine = [max(k for k in keepers if k <= rank) for rank in range(self.state.num_processes)]
        copy, here = self._own(copies), mine[self.state.process_index]
        part, parts = self.state.process_index - here, mine.count(here)
        problems = together("loading a checkpoint", lambda: copy.problem or differing(Path(copy.folder), part, parts))
        for keeper, problem in zip(mine, problems, strict=True):
            found = copies[keeper]
            if found is not None and found.problem is None and problem is not None:
                copies[keeper] = replace(found, problem=problem)
        return copies

    def _find(self, asked: Path) -> Copy:
        place = environment.own_copy(asked.resolve())
        done = recover(place)
        if done is not None:
            logger.warning(done)
        copy = copy_in(asked.resolve(), self.state.num_processes)
        folder = Path(copy.folder)
        if not folder.is_dir():
            waiting = leftovers(place, "draft") + leftovers(place, "old")
            more = f" (only {waiting[0].name}, which is not whole)" if waiting else ""
            raise CheckpointError(f"{asked if folder == asked.resolve() else folder} is not there{more}")
        if copy.problem is not None and (folder / MANIFEST).exists():
            raise CheckpointError(copy.problem)
        if copy.problem is not None:
            logger.warning(f"{folder} has no {MANIFEST}: it was not written by accel and cannot be verified")
        return Copy(folder=copy.folder, save=copy.save)

    def _newest(self) -> Path:
        """Return the newest checkpoint with a complete copy of the same save on every node."""
        checkpoints = self.config.checkpoints.resolve()
        held = self._copies(
            lambda: [number for number, _ in numbered(environment.own_copy(checkpoints), CHECKPOINT_PREFIX)]
        )
        problems: list[str] = []
        for number in sorted({number for numbers in held for number in numbers or ()}, reverse=True):
            place = self.config.checkpoints / f"{CHECKPOINT_PREFIX}{number}"
            copies = self._verified(partial(copy_in, place.resolve(), self.state.num_processes))
            problem = _disagreement(copies)
            if problem is None:
                for told in problems:
                    logger.warning(f"passed over: {told}")
                return Path(self._own(copies).folder)
            problems.append(problem)
            self._passed_over.add(place)
        why = f": {'; '.join(problems)}" if problems else ""
        raise CheckpointError(f"loading a checkpoint: {self.config.checkpoints} holds no whole checkpoint{why}")

    def load(self, folder: Path, contents: Contents, **load_model_kwargs: Any) -> int:
        """Restore ``contents`` from ``folder``; return the step of the accumulation window.

        If another number of processes saved it, new processes keep their generators' state, the step is that of
        process 0, and a warning is logged.
        """
        steps = together(f"loading {folder}", lambda: contents.read(folder, **load_model_kwargs))
        self._last = folder
        manifest = read_manifest(folder)
        saved_by = manifest.num_processes if manifest is not None else _writers(folder)
        if steps[0] is None or (None in steps and saved_by == self.state.num_processes):
            raise CheckpointError(f"{folder} has no {random_states_name(steps.index(None))}")
        if saved_by != self.state.num_processes:
            logger.warning(
                f"{folder} was saved by {saved_by} process(es), this run has {self.state.num_processes}: "
                "random numbers, and what each process sees of an interrupted epoch, are not those of the saved run"
            )
        return steps[self.state.process_index] or steps[0]


def _disagreement(copies: Sequence[Copy | None]) -> str | None:
    """Return one line on why the nodes' copies are not one complete checkpoint, or None if they are."""
    found = [copy for copy in copies if copy is not None]
    problem = next((copy.problem for copy in found if copy.problem is not None), None)
    other = next((copy.folder for copy in found if copy.save != found[0].save), None)
    if problem is None and other is not None:
        problem = f"{other} and {found[0].folder} are of different saves"
    return problem


def _written(draft: Path, pieces: Callable[[], Sequence[Piece]]) -> dict[str, Digest]:
    if not draft.is_dir():
        raise CheckpointError(
            f"{draft.parent} is not, on this node, the directory that it is for process 0: with "
            "ProjectConfiguration(save_on_each_node=True) each node keeps a whole copy"
        )
    return {piece.name: piece.write(draft) for piece in pieces()}


def _writers(folder: Path) -> int:
    """Count the processes that left random states in a checkpoint without a manifest."""
    stem, suffix = random_states_name(0).split("0")
    ranks = [path.name.removeprefix(stem).removesuffix(suffix) for path in folder.glob(f"{stem}*{suffix}")]
    return max((int(rank) + 1 for rank in ranks if rank.isdigit()), default=0)
