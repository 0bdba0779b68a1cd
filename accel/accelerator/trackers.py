"""The parts of `Accelerator` that record training: experiment trackers and profiles."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from accel.accelerator.run import Part
from accel.errors import ArgumentError, StateError, nearest
from accel.plugins import ProfileKwargs

if TYPE_CHECKING:
    from torch.profiler import profile

    from accel.tracking.base import GeneralTracker
    from accel.tracking.isolation import IsolatedTracker
    from accel.tracking.registry import Choice

logger = logging.getLogger("accel.tracking")


class TrackingControl(Part):
    """Experiment trackers, run on the main process.

    A script's own tracker runs on every process if its class, or the instance, sets ``main_process_only=False``.
    """

    log_with: list[Choice]
    trackers: list[GeneralTracker]
    _guards: list[IsolatedTracker]
    _tracking_started: bool
    _warned_not_tracking: bool

    def _init_tracking(self, log_with: Any, logging_dir: str | None) -> None:
        self.log_with = []
        self.trackers = []
        self._guards = []
        self._tracking_started = False
        self._warned_not_tracking = False
        if log_with is not None:
            from accel.tracking.registry import filter_trackers

            self.log_with = filter_trackers(log_with, logging_dir)

    def init_trackers(
        self, project_name: str, config: dict[str, Any] | None = None, init_kwargs: dict[str, Any] | None = None
    ) -> None:
        """Start every tracker of ``log_with`` for ``project_name``, and store ``config`` with each.

        Call it on all processes. ``init_kwargs`` has more arguments for the constructors, by tracker name.

        A tracker whose server is unreachable is skipped with a warning, and training continues. Raises `TrackerError`
        for one with a setup that cannot start, `ArgumentError` for arguments of an unknown tracker, and `StateError`
        if trackers are already running.
        """
        if self._guards:
            raise StateError("init_trackers() was called already: call end_training() first")
        if not self.log_with:
            return
        options = _by_tracker(init_kwargs, self.log_with, "init_kwargs")
        trackers = [
            _make(choice, project_name, self.project_configuration.logging_dir, options) for choice in self.log_with
        ]
        local_trackers = [tracker for tracker in trackers if self.state.is_main_process or _runs_everywhere(tracker)]
        self._guards = _start_trackers(local_trackers)
        self._tracking_started = True
        self.trackers = [guard.tracker for guard in self._guards]
        if config is not None:
            for guard in self._guards:
                guard.store(config)

    def log(self, values: dict[str, Any], step: int | None = None, log_kwargs: dict[str, Any] | None = None) -> None:
        """Record ``values`` at ``step`` with every tracker that runs on this process.

        ``log_kwargs`` has more arguments for ``log``, by tracker name. If a tracker's server or disk fails, its
        records are lost but training continues: a warning is logged, and later calls retry.
        """
        if not self._guards:
            self._warn_not_tracking()
            return
        if not isinstance(values, Mapping):
            raise ArgumentError(f"log() takes a dict of values by name, got {type(values).__name__}")
        options = _by_tracker(log_kwargs, self.log_with, "log_kwargs") if log_kwargs else {}
        for guard in self._guards:
            guard.log(values, step, options.get(guard.tracker.name, {}) if options else {})  # type: ignore[attr-defined]

    def _warn_not_tracking(self) -> None:
        if (
            self.log_with
            and not self._tracking_started
            and self.state.is_main_process
            and not self._warned_not_tracking
        ):
            self._warned_not_tracking = True
            logger.warning("log() records nothing: no tracker runs (init_trackers() starts them)")

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return the running tracker called ``name``; with ``unwrap``, the object of its package.

        If it does not run (on other processes, with an unreachable server, without ``log_with``), return a stand-in
        that is false and accepts every call, attribute and item. Raises `ArgumentError` for a name that ``log_with``
        does not have, and `StateError` before `init_trackers`.
        """
        from accel.tracking.base import NoTracker
        from accel.tracking.registry import name_of

        for tracker in self.trackers:
            if tracker.name == name:  # type: ignore[attr-defined]
                return tracker.tracker if unwrap else tracker  # type: ignore[attr-defined]
        names = [name_of(choice) for choice in self.log_with]
        if names and name not in names:
            raise ArgumentError(f"get_tracker({name!r}): log_with has {', '.join(names)}{nearest(name, names)}")
        if names and not self._tracking_started:
            raise StateError(f"get_tracker({name!r}): no tracker runs; init_trackers() starts them")
        return NoTracker()

    def _finish_trackers(self) -> None:
        guards, self._guards = self._guards, []
        self._tracking_started = False
        errors = []
        for guard in guards:
            try:
                guard.finish()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]


def _by_tracker(options: Mapping[str, Any] | None, chosen: list[Choice], source: str) -> Mapping[str, Any]:
    """Return ``options`` if its keys are names of existing trackers, chosen or not; else raise `ArgumentError`."""
    from accel.tracking.registry import LOGGER_TYPE_TO_CLASS, name_of

    if not options:
        return {}
    known = {*LOGGER_TYPE_TO_CLASS, *(name_of(choice) for choice in chosen)}
    for name in options:
        if str(name) not in known:
            raise ArgumentError(f"{source}: no tracker is called {name!r}{nearest(str(name), sorted(known))}")
    return {str(name): value for name, value in options.items()}


def _make(choice: Choice, project_name: str, logging_dir: str | None, options: Mapping[str, Any]) -> GeneralTracker:
    from accel.tracking.base import GeneralTracker
    from accel.tracking.registry import LOGGER_TYPE_TO_CLASS, name_of

    if isinstance(choice, GeneralTracker):
        return choice
    kind: Any = LOGGER_TYPE_TO_CLASS[str(choice)] if isinstance(choice, str) else choice
    directories = (logging_dir,) if kind.requires_logging_directory else ()
    try:
        tracker: GeneralTracker = kind(project_name, *directories, **options.get(name_of(choice), {}))
    except TypeError as error:
        raise ArgumentError(f"init_kwargs of tracker {name_of(choice)!r}: {error}") from error
    return tracker


def _start_trackers(trackers: list[GeneralTracker]) -> list[IsolatedTracker]:
    from accel.tracking.isolation import IsolatedTracker

    started: list[IsolatedTracker] = []
    try:
        for tracker in trackers:
            guard = IsolatedTracker(tracker)
            if guard.start():
                started.append(guard)
    except BaseException:
        for guard in started:
            # The script must see why a tracker did not start, not why another did not finish.
            with suppress(Exception):
                guard.finish()
        raise
    return started


def _runs_everywhere(tracker: GeneralTracker) -> bool:
    """Return True if the script set ``main_process_only=False``, on the instance or in a class of its own.

    Some built-in classes set it too, as Accelerate's do, but run on one process.
    """
    if tracker.main_process_only:
        return False
    if "main_process_only" in vars(tracker):
        return True
    owner = next(kind for kind in type(tracker).__mro__ if "main_process_only" in vars(kind))
    return not owner.__module__.startswith("accel.tracking.")


# Profiles, by `torch.profiler`.

PROFILE_PATTERN_NAME = "profile_{suffix}.json"


class ProfileControl(Part):
    """The part of `Accelerator` that profiles."""

    profile_handler: ProfileKwargs | None = None

    @contextmanager
    def profile(self, profile_handler: ProfileKwargs | None = None) -> Iterator[profile]:
        """Profile the block with ``profile_handler``, by default the one given to `Accelerator`; yield the profiler.

        With ``output_trace_dir`` every process writes ``profile_<rank>.json`` there if the block ends without an
        error, and waits until all have.
        """
        handler = profile_handler or self.profile_handler or ProfileKwargs()
        with handler.build() as profiler:
            yield profiler
        if handler.output_trace_dir is None:
            return
        os.makedirs(handler.output_trace_dir, exist_ok=True)
        name = PROFILE_PATTERN_NAME.format(suffix=self.state.process_index)
        profiler.export_chrome_trace(os.path.join(handler.output_trace_dir, name))
        self.state.wait_for_everyone()
