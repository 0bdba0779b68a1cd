"""How far a prepared loader is: what a checkpoint keeps of it, and what resuming needs."""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger(__name__)


class Progress:
    """Epoch and position of a loader, shared by it and its views that skip.

    ``position`` counts the batches given in the running epoch, those skipped included; ``order`` is what the order of
    that epoch was drawn from.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self.position = 0
        self.order: dict[str, Any] = {}
        self.running = False
        self.resumed = False
        self.ended = False  # whether the running epoch has given its last batch
        self.ahead: Any = None  # the `Lookahead` of the running epoch, if it has one
        self._inner: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "ahead": None}  # a copy reads for itself

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the next one, unless that is the one being resumed."""
        if not (self.resumed and epoch == self.epoch):
            self.resumed = False
            self.epoch = epoch
        self.running = False

    def begin(self) -> tuple[int, dict[str, Any] | None, Any]:
        """Begin an epoch.

        Returns, for one that was interrupted: its position, what its order must be drawn from, and the state of the
        loader inside. Else 0, ``None`` and ``None``.
        """
        resumed = (self.position, self.order, self._inner) if self.resumed else (0, None, None)
        if self.running and not self.resumed:
            self.epoch += 1  # the last epoch was left by `break`: it counts
        self.resumed = False
        self.running = True
        self.ended = False
        self.position = 0
        self.ahead = self._inner = None
        return resumed

    def finish(self) -> None:
        """The epoch is through."""
        self.epoch += 1
        self.position = 0
        self.order = {}
        self.running = False

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "order": self.order,
            "in_epoch": self._in_epoch,
            "ended": self.ended and self._in_epoch,
        }

    @property
    def _in_epoch(self) -> bool:
        return self.running or self.resumed

    def load_state_dict(self, state: dict[str, Any], process: int = 0, round_size: int = 1) -> None:
        """Go back to where `state_dict` was taken; the next epoch begun is the one interrupted there, if it was.

        The state of a loader inside is taken over if it was ``process``'s own. If it was taken with another
        ``round_size`` the position is the one behind the same samples, or the last one before.
        """
        self.epoch = state["epoch"]
        self.position = _moved(state["position"], state.get("round", round_size), round_size)
        self.order = state["order"]
        self.running = False
        self.resumed = state["in_epoch"]
        self.ended = state.get("ended", False)
        mine = state.get("process", process) == process and state.get("round", round_size) == round_size
        self._inner = state.get("loader") if mine else None

    def set_inner(self, state: Any) -> None:
        """Take ``state`` for the loader inside, if an interrupted epoch is next."""
        if self.resumed and state is not None:
            self._inner = state


def _moved(position: int, was: int, now: int) -> int:
    """The position in rounds of ``now`` samples that ``position`` was in rounds of ``was``."""
    moved, again = divmod(position * was, now)
    if again:
        logger.warning(
            "the epoch was stopped after %d samples, which rounds of %d do not reach: %d samples are given again",
            position * was, now, again,
        )  # fmt: skip
    return moved
