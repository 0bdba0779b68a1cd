"""How far a prepared loader is: what a checkpoint keeps of it, and what resuming needs."""

from __future__ import annotations

from typing import Any

from accel.logging import get_logger

logger = get_logger(__name__)


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
        self.started = False  # whether the loader inside has been iterated in this run or in the one it continues
        self.ahead: Any = None  # the `Lookahead` of the running epoch, if it has one
        self.inner: Any = None  # the state of the loader inside, until it is put back
        self._same_round = True

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "ahead": None}  # a copy reads for itself

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the next one, unless that is the one being resumed."""
        if epoch != self.epoch:
            self.resumed = False
            self.inner = None
            self.epoch = epoch
        self.running = False

    def begin(self) -> tuple[int, dict[str, Any] | None]:
        """Begin an epoch.

        Returns, for one that was interrupted, its position and what its order must be drawn from; else 0 and ``None``.
        """
        resumed = (self.position, self.order) if self.resumed else (0, None)
        if self.running and not self.resumed:
            self.epoch += 1  # the last epoch was left by `break`: it counts
        self.resumed = False
        self.running = True
        self.ended = False
        self.position = 0
        self.ahead = None
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
            "started": self.started,
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
        self.started = state.get("started", self.resumed or self.epoch > 0)
        self._same_round = state.get("round", round_size) == round_size
        mine = self._same_round and state.get("process", process) == process
        self.inner = state.get("loader") if mine else None

    def set_inner(self, state: Any) -> None:
        """Take ``state`` for the loader inside, unless it was taken in rounds of another size."""
        if self._same_round and state is not None:
            self.inner = state


def _moved(position: int, was: int, now: int) -> int:
    """The position in rounds of ``now`` samples that ``position`` was in rounds of ``was``."""
    moved, again = divmod(position * was, now)
    if again:
        logger.warning(
            "resuming in the middle of an epoch: "
            "%d samples were seen, %d are used by each round of this world: %d are repeated",
            position * was, now, again,
        )  # fmt: skip
    return moved
