"""Reachability of targets: all are queried at once, each within a time limit."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from schedulers.config.named_targets import NamedTarget


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A target's response. ``answers`` is None for a kind of target that is not set up here, which is no error."""

    name: str
    kind: str
    source: str
    answers: bool | None
    message: str
    seconds: float


def ask(targets: Sequence[NamedTarget], limit_s: float) -> list[Answer]:
    """Return a response per target, in order, after ``limit_s`` seconds at most.

    Changes nothing there. A query that is still running is abandoned and dies with this process.
    """
    found: dict[int, Answer] = {}
    began = time.monotonic()

    def one(index: int, target: NamedTarget) -> None:
        answers, message = _ask(target)
        found[index] = _answer(target, answers, message, time.monotonic() - began)

    threads = [
        threading.Thread(target=one, args=pair, name=f"ask {pair[1].name}", daemon=True) for pair in enumerate(targets)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, began + limit_s - time.monotonic()))
    late = f"no answer in {limit_s:g} s"
    done = dict(found)
    return [done.get(index) or _answer(target, False, late, limit_s) for index, target in enumerate(targets)]


def _answer(target: NamedTarget, answers: bool | None, message: str, seconds: float) -> Answer:
    return Answer(
        name=target.name, kind=target.kind, source=target.source, answers=answers, message=message, seconds=seconds
    )


def _ask(named: NamedTarget) -> tuple[bool | None, str]:
    from schedulers.config.named_targets import load_target
    from schedulers.errors import SchedulerError
    from schedulers.store.store import Store
    from schedulers.target import Checks

    set_up = named.file is not None
    try:
        target = load_target(named.name, Store.default().jobs)
        if isinstance(target, Checks):
            found = target.check()
            return (False, "; ".join(found.failures)) if found.failures else (True, "; ".join(found.warnings))
        target.poll([])
    except SchedulerError as error:
        return False if set_up else None, " ".join(str(error).split())
    except Exception as error:  # a plug-in, or an SDK's own way to fail
        return False if set_up else None, " ".join(f"{type(error).__name__}: {error}".split())
    return True, ""
