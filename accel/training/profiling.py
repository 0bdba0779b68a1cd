"""Profiling: what `torch.profiler` is asked to record, and the part of `Accelerator` that runs it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from accel.errors import ArgumentError, nearest, one_of
from accel.kwargs import KwargsHandler

if TYPE_CHECKING:
    from torch.profiler import ProfilerActivity, profile

    from accel.state import AcceleratorState

PROFILE_PATTERN_NAME = "profile_{suffix}.json"
ACTIVITIES = ("cpu", "xpu", "mtia", "cuda", "hpu")
_SCHEDULE = ("wait", "warmup", "active", "repeat", "skip_first", "skip_first_wait")


@dataclass
class ProfileKwargs(KwargsHandler):
    """What `Accelerator.profile` records; the fields are those of `torch.profiler.profile`, but for these.

    ``activities``: some of cpu, cuda, xpu, mtia and hpu (default: all that torch supports here).
    ``schedule_option``: the arguments of `torch.profiler.schedule`, such as ``{"wait": 1, "warmup": 1, "active": 3}``;
    the script then calls ``profiler.step()`` after each step. ``on_trace_ready(profiler)`` is called at the end of each
    cycle of it. ``output_trace_dir``: where every process writes its trace, in Chrome's format.

    Raises `ArgumentError` for an unknown activity or part of a schedule.
    """

    activities: list[str] | None = None
    schedule_option: dict[str, int] | None = None
    on_trace_ready: Callable[[Any], Any] | None = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: str | None = None

    def __post_init__(self) -> None:
        for activity in self.activities or ():
            one_of(activity, ACTIVITIES, what="ProfileKwargs(activities=…)")
        for name in self.schedule_option or ():
            if name not in _SCHEDULE:
                known = ", ".join(_SCHEDULE)
                raise ArgumentError(
                    f"ProfileKwargs(schedule_option=…): {name!r} is none of {known}{nearest(name, _SCHEDULE)}"
                )

    def build(self) -> profile:
        """The profiler, not yet started. Raises `ArgumentError` for an activity that this build of torch lacks."""
        from torch.profiler import profile, schedule

        return profile(
            activities=None if self.activities is None else [_activity(name) for name in self.activities],
            schedule=None if self.schedule_option is None else schedule(**self.schedule_option),
            on_trace_ready=self.on_trace_ready,
            record_shapes=self.record_shapes,
            profile_memory=self.profile_memory,
            with_stack=self.with_stack,
            with_flops=self.with_flops,
            with_modules=self.with_modules,
        )


def _activity(name: str) -> ProfilerActivity:
    from torch.profiler import ProfilerActivity, supported_activities

    supported: set[ProfilerActivity] = supported_activities()  # type: ignore[no-untyped-call]
    here = {activity.name.lower(): activity for activity in supported}
    found = here.get(name)
    if found is None and name == "cuda":
        return ProfilerActivity.CUDA  # torch records nothing of it where there is none, and says so itself
    if found is None:
        raise ArgumentError(
            f"ProfileKwargs(activities=…): this build of torch cannot record {name!r}, only {list(here)}"
        )
    return found


class ProfileControl:
    """The part of `Accelerator` that profiles."""

    state: AcceleratorState
    profile_handler: ProfileKwargs | None = None

    @contextmanager
    def profile(self, profile_handler: ProfileKwargs | None = None) -> Iterator[profile]:
        """A region that is profiled as ``profile_handler`` says, else as the one given to `Accelerator`; yields it.

        With ``output_trace_dir`` every process writes ``profile_<rank>.json`` there when the region ends without an
        error; when it returns, all have.
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
