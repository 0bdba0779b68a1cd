"""Saving and loading on all processes together, with one copy for all or one per node; a failure is raised on all."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, Any

from accel.checkpoint import directory
from accel.checkpoint.all_ranks import Result, call_roll, run_on_all_ranks
from accel.checkpoint.background import Background, Staging
from accel.checkpoint.contents import CheckpointContents, Loading, Piece
from accel.checkpoint.durable import digest_of, fsync, reporting_full_disk
from accel.checkpoint.file_names import CHECKPOINT_PREFIX, LOCK, MANIFEST, random_states_name
from accel.checkpoint.manifest import Manifest, find_changed_file, inspect, unverified, write_manifest
from accel.checkpoint.weights import is_writer
from accel.errors import CheckpointError
from accel.logging import get_logger
from accel.plugins import ProjectConfiguration
from accel.state import PartialState
from accel.world import environment
from accel.world.process_group import new_group

logger = get_logger(__name__)

# The fence: a start of the job that has a successor must not write any more.
#
# A scheduler that loses a node starts the job again elsewhere while its first processes may still run there.
# Such a process must not replace a checkpoint that the new start has written.

FENCE, ATTEMPT = "ACCEL_FENCE", "ACCEL_ATTEMPT"


def check_fence() -> None:
    """Raise `CheckpointError` if a later start of this job has begun; do nothing without a scheduler's fence.

    ``ACCEL_FENCE`` names a file with the number of the newest start, ``ACCEL_ATTEMPT`` is this start's number. A
    missing file blocks nothing; an unreadable one raises `OSError`.
    """
    name = os.environ.get(FENCE)
    if not name:
        return
    try:
        newest = Path(name).read_text().strip()
    except FileNotFoundError:
        return
    attempt = os.environ.get(ATTEMPT, "0")
    if newest.isdigit() and attempt.isdigit() and int(newest) > int(attempt):
        raise CheckpointError(
            f"start {newest} of this job has begun ({name}), but this process belongs to start {attempt}: "
            "it no longer writes checkpoints"
        )


# Nodes without a shared file system: each keeps a complete copy.
#
# Any file of a copy may be missing or from an earlier save, because the program that copies it to the next
# start of the nodes works file by file (see `accel.world.environment`) and may be interrupted.


@dataclass(frozen=True, kw_only=True)
class Copy:
    """A node's copy of a checkpoint: the id of its save, and its problem if any (``missing``: nothing is there)."""

    folder: str
    save: str | None = None
    problem: str | None = None
    missing: bool = False


def find_copy(path: Path, num_processes: int, *, by_accel: bool) -> Copy:
    """Return this node's copy of the checkpoint in ``path``, checked only by file lengths.

    A node without a copy uses node 0's if another number of processes wrote that. With ``by_accel`` a checkpoint of
    another program has a problem.
    """
    folder = own = environment.own_copy(path)
    recovered = directory.recover(own)
    if recovered is not None:
        logger.warning(recovered)
    if not folder.is_dir() and folder != path:
        shared, _ = inspect(path)
        folder = folder if shared is None or shared.num_processes == num_processes else path
    unfinished = directory.drafts(own)
    hint = f" (only {unfinished[0].name}, which is incomplete)" if unfinished else ""
    if not folder.is_dir():
        exists = os.path.lexists(folder)
        return Copy(
            folder=str(folder),
            problem=f"{folder} {'is not a directory' if exists else 'does not exist'}{hint}",
            missing=not unfinished and not exists,
        )
    manifest, problem = inspect(folder)
    copy = Copy(folder=str(folder), save=manifest.save if manifest else None, problem=problem)
    if problem is None or by_accel or (folder / MANIFEST).exists():
        return copy
    if directory.is_half_replaced(own):
        return replace(copy, problem=f"{problem}{hint}")
    try:
        manifest = unverified(folder)
    except CheckpointError as error:
        return replace(copy, problem=str(error))
    if not (manifest.models or manifest.optimizers or manifest.num_processes):
        return replace(copy, problem=f"{folder} holds no checkpoint{hint}", missing=not unfinished)
    logger.warning(f"{problem}: it was not written by accel and cannot be verified")
    return replace(copy, problem=None)


def _disagreement(copies: Sequence[Copy]) -> str | None:
    """Return one line on why the nodes' copies are not one complete checkpoint, or None if they are."""
    problem = next((copy.problem for copy in copies if copy.problem is not None), None)
    other = next((copy for copy in copies if copy.save != copies[0].save), None)
    if problem is None and other is not None:
        problem = f"{other.folder} and {copies[0].folder} are from different saves"
    return problem


# The writer.


class Checkpoints:
    """A writer and reader of a run's checkpoints. All processes must call every method."""

    def __init__(self, state: PartialState, config: ProjectConfiguration) -> None:
        self.state = state
        self.config = config
        self._background = Background()
        self._staging: Staging | None = None
        self._group: Any = None
        self._lock: IO[str] | None = None  # a writer's, on its draft
        self._last: Path | None = None  # the last checkpoint that this run has saved or loaded
        self._skipped: set[Path] = set()

    @property
    def on_each_node(self) -> bool:
        """True if every node keeps its own copy of a checkpoint."""
        return self.config.save_on_each_node or environment.project_root() is not None

    @property
    def is_writer(self) -> bool:
        """True if this process writes shared data: one process in the world, or one per node."""
        return is_writer(self.state, self.on_each_node)

    def next_path(self) -> Path:
        """Return the path of the next automatically named checkpoint.

        Raises `CheckpointError` if it exists or a later one does, before which ``total_limit`` would delete it.
        """
        parent, iteration = self.config.checkpoints, self.config.iteration
        for number, existing in directory.listed(environment.own_copy(parent), CHECKPOINT_PREFIX):
            path = parent / existing.name
            if number >= iteration and path not in self._skipped:
                raise CheckpointError(f"{path} exists: call load_state() first to resume, or set save_iteration")
        return parent / f"{CHECKPOINT_PREFIX}{iteration}"

    def wait(self) -> None:
        """Wait for the save in progress. Raises `CheckpointError`, on every process, if it failed."""
        self._background.wait()

    def release(self) -> None:
        """Wait, and release the memory for background saves."""
        self.wait()
        if self._staging is not None:
            self._staging.free()

    def save(
        self,
        final: Path,
        run_hooks: Callable[[Path], None],
        save_engines: Callable[[Path], Manifest],
        collect: Callable[[], Sequence[Piece]],
        *,
        background: bool = False,
        prune: bool = False,
    ) -> None:
        """Write a checkpoint to ``final`` from the files that ``collect`` returns and those by hooks in the draft.

        ``run_hooks``: runs the hooks with the draft.
        ``save_engines``: saves the engines, by collectives, into the draft; returns the manifest without files.

        When this returns or raises, ``final`` is complete: the new checkpoint or the old one. With ``background`` it
        returns once the state is copied and writes in the background; `wait` raises its error. ``prune`` then deletes
        the oldest automatically named checkpoints beyond ``total_limit``, and the remains of older interrupted saves.
        """
        call_roll("save_state")
        self.wait()
        final = environment.own_copy(final.resolve())
        drafts_by_rank = self._saving(final, lambda: self._start(final))
        peers = self._peers(drafts_by_rank)
        draft = Path(str(drafts_by_rank[peers[0]]))
        pieces: list[Piece] = []
        with self._discarding(draft, final):
            self._saving(final, lambda: _check_shared(draft))
            self._saving(final, lambda: run_hooks(draft))
            in_draft = self._saving(final, lambda: (save_engines(draft), _files(draft)))
            if background:
                self._group = self._group or new_group(backend="gloo")
            self._saving(final, lambda: pieces.extend(self._copied(collect()) if background else collect()))
        names = {name for rank in peers for name in in_draft[rank][1]}
        manifest = replace(in_draft[peers[0]][0], save=str(drafts_by_rank[0])[-8:])
        group = self._group if background else None

        def finish() -> None:
            """Write the files, agree that all are written, and publish."""
            with self._discarding(draft, final):
                written = self._saving(final, lambda: {piece.name: piece.write(draft) for piece in pieces}, group)
                files = {name: digest for rank in peers for name, digest in written[rank].items()}
                complete = replace(manifest, files=files)
                self._saving(final, lambda: self._publish(draft, final, complete, names, prune), group)
                self._last = final

        if background:
            self._background.start(finish)
        else:
            finish()

    def _peers(self, results: Sequence[Any]) -> range:
        """Return the ranks that share this process's copy, its writer first. Only a writer's result is not None."""
        writers, rank = [rank for rank, result in enumerate(results) if result is not None], self.state.process_index
        first = max(writer for writer in writers if writer <= rank)
        return range(first, min((writer for writer in writers if writer > rank), default=len(results)))

    def _saving(self, final: Path, action: Callable[[], Result], group: Any = None) -> list[Result]:
        """Run one step of saving a checkpoint in ``final`` with `run_on_all_ranks`."""
        last = f"; the last complete checkpoint is {self._last}" if self._last is not None else ""
        return run_on_all_ranks(f"saving {final}", reporting_full_disk(last)(action), group)

    def _start(self, final: Path) -> str | None:
        if not self.is_writer:
            return None
        check_fence()  # before start_draft deletes drafts that look abandoned
        draft, self._lock = directory.start_draft(final)
        return str(draft)

    def _copied(self, pieces: Sequence[Piece]) -> list[Piece]:
        self._staging = self._staging or Staging(self.state.device)
        values = self._staging.copy([piece.value for piece in pieces])
        return [replace(piece, value=value) for piece, value in zip(pieces, values, strict=True)]

    @contextmanager
    def _discarding(self, draft: Path, final: Path) -> Iterator[None]:
        """Delete the draft, on its writer, if the block fails."""
        try:
            yield
        except BaseException:
            if self._lock is not None:
                self._lock.close()
                directory.discard(draft, final)
            raise

    def _publish(self, draft: Path, final: Path, manifest: Manifest, by_hooks: set[str], prune: bool) -> None:
        if not self.is_writer:
            return
        by_hooks = by_hooks.difference(manifest.files)
        for name in by_hooks:
            fsync(draft / name)
        files = {name: digest_of(draft / name) for name in by_hooks}
        manifest = replace(manifest, files={**manifest.files, **files})
        directory.fsync_folders(draft, manifest.files)
        write_manifest(draft, manifest)
        _, problem = inspect(draft)
        if problem is not None:
            raise CheckpointError(problem)
        check_fence()
        directory.publish(draft, final, self._lock)
        if not prune:
            return
        checkpoints = directory.numbered(final.parent, CHECKPOINT_PREFIX)
        directory.delete_abandoned(final, CHECKPOINT_PREFIX)
        if self.config.total_limit is not None:
            for _, folder in checkpoints[: -self.config.total_limit]:
                directory.remove(folder)

    def find(self, requested: Path | None, *, missing_ok: bool = False) -> Path | None:
        """Return the verified checkpoint in ``requested``, by default the newest with an automatic name.

        A checkpoint is a complete copy of the same save on every node. With ``missing_ok``, return None if there is
        none. Raises `CheckpointError` naming the file that is missing or damaged.
        """
        call_roll("load_state")
        self.wait()
        copies: list[Copy] = []
        problems: list[str] = []
        for path in self._automatic_paths() if requested is None else [requested]:
            copies = self._verified(path.resolve(), by_accel=requested is None)
            problem = _disagreement(copies)
            if problem is None:
                for reason in problems:
                    logger.warning(f"skipped: {reason}")
                return Path(copies[self.state.process_index].folder)
            problems.append(problem)
            if requested is None:
                self._skipped.add(path)
        if missing_ok and all(copy.missing for copy in copies):
            return None
        problem = "; ".join(problems)
        if requested is None:
            problem = f"{self.config.checkpoints} holds no complete checkpoint{problem and f': {problem}'}"
        raise CheckpointError(f"loading a checkpoint: {problem}")

    def _on_writers(self, action: Callable[[], Any]) -> list[Any]:
        """Return the results of ``action`` on the writers, and None for other processes, in rank order."""
        return run_on_all_ranks("loading a checkpoint", lambda: action() if self.is_writer else None)

    def _automatic_paths(self) -> list[Path]:
        """Return the paths of all automatically named checkpoints on any node, the newest first."""
        folder = environment.own_copy(self.config.checkpoints.resolve())
        by_rank = self._on_writers(lambda: [number for number, _ in directory.numbered(folder, CHECKPOINT_PREFIX)])
        numbers = {number for numbers in by_rank for number in numbers or ()}
        return [self.config.checkpoints / f"{CHECKPOINT_PREFIX}{number}" for number in sorted(numbers, reverse=True)]

    def _verified(self, path: Path, *, by_accel: bool) -> list[Copy]:
        """Return each process's copy of ``path`` after reading every file: each reads its part of its node's copy."""
        copies = self._on_writers(lambda: find_copy(path, self.state.num_processes, by_accel=by_accel))
        peers = self._peers(copies)
        copy: Copy = copies[peers[0]]
        part = peers.index(self.state.process_index)

        def verify() -> Copy:
            problem = copy.problem or find_changed_file(Path(copy.folder), part, len(peers))
            return replace(copy, problem=problem)

        return run_on_all_ranks("loading a checkpoint", verify)

    def load(
        self,
        folder: Path,
        contents: CheckpointContents,
        run_hooks: Callable[[Path], Collection[int]] | None,
        **load_model_kwargs: Any,
    ) -> int:
        """Restore ``contents`` from ``folder``; return the step of the accumulation window.

        ``run_hooks``: runs the hooks, if there are any, and returns the numbers of the models that they have loaded. If
        another number of processes saved it, additional processes keep their generators' states and use the step of
        process 0, and a warning is logged.
        """
        together = partial(run_on_all_ranks, f"loading {folder}")
        loading = Loading(contents, folder, **load_model_kwargs)
        has_states, saved = together(lambda: loading.check(run_hooks is None)), loading.manifest.num_processes
        together(loading.check_numbers)
        if not has_states[0] or (not all(has_states) and saved == self.state.num_processes):
            raise CheckpointError(f"{folder} has no {random_states_name(has_states.index(False))}")
        if run_hooks is not None:
            hooked = together(partial(run_hooks, folder))[self.state.process_index]
            together(lambda: loading.check_weights(hooked))
        loading.load(together)
        steps = together(loading.load_random_states)
        self._last = folder
        if saved != self.state.num_processes:
            logger.warning(
                f"{folder} was saved by {saved} process(es), this run has {self.state.num_processes}: "
                "random numbers, and each process's own buffers and rest of an interrupted epoch, differ from that run"
            )
        return steps[self.state.process_index] or steps[0] or 0


def _check_shared(draft: Path) -> None:
    if not draft.is_dir():
        raise CheckpointError(
            f"{draft.parent} is not shared with process 0's node: use a shared file system, or "
            "ProjectConfiguration(save_on_each_node=True) for a copy on each node"
        )


def _files(draft: Path) -> list[str]:
    return [str(path.relative_to(draft)) for path in draft.rglob("*") if path.is_file() and path != draft / LOCK]
