"""How far a prepared loader is: what a checkpoint keeps of it, and what resuming needs."""

from __future__ import annotations

from typing import Any

from accel.logging import get_logger

logger = get_logger(__name__)


class Progress:
    """Epoch and position of a loader, shared by it and its views that skip.

    ``position`` counts the batches given in the epoch at hand, those skipped included; ``order`` is what the order of
    that epoch was drawn from, ``None`` between epochs. ``resumed``: the epoch at hand was loaded and has yet to begin;
    ``ended``: it has given its last batch. ``inner`` is the state of a torchdata loader inside: to be put back, or as
    it was at the batch given last if others have been read ahead.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self.position = 0
        self.order: dict[str, Any] | None = None
        self.resumed = False
        self.ended = False
        self.inner: Any = None
        self._same_round = True

    @property
    def running(self) -> bool:
        """Whether the epoch at hand was begun here."""
        return self.order is not None and not self.resumed

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the next one, unless that is the one being resumed."""
        if epoch != self.epoch:
            self.inner = None
        elif self.resumed:
            return
        self._leave(epoch)

    def _leave(self, following: int) -> None:
        self.epoch = following
        self.position = 0
        self.order = None
        self.resumed = self.ended = False

    def begin(self) -> tuple[int, dict[str, Any] | None, Any]:
        """Begin an epoch.

        Returns its position and what its order must be drawn from, 0 and ``None`` unless it was interrupted; and the
        state to put back into the loader inside.
        """
        left = (self.position, self.order) if self.resumed else (0, None)
        inner, self.inner = self.inner, None
        self._leave(self.epoch + self.running)  # an epoch that was left by `break` counts
        self.order = {}
        return *left, inner

    def finish(self) -> None:
        """The epoch is through."""
        self.inner = None
        self._leave(self.epoch + 1)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "order": self.order or {},
            "in_epoch": self.order is not None,
            "ended": self.ended,
        }

    def load_state_dict(self, state: dict[str, Any], process: int = 0, round_size: int = 1) -> None:
        """Go back to where `state_dict` was taken; the next epoch begun is the one interrupted there, if it was.

        The state of a loader inside is taken over if it was ``process``'s own. If it was taken with another
        ``round_size`` the position is the one behind the same samples, or the last one before.
        """
        self._leave(state["epoch"])
        self.resumed = state["in_epoch"]
        if self.resumed:
            self.position = _moved(state["position"], state.get("round", round_size), round_size)
            self.order = state["order"]
            self.ended = state.get("ended", False)
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
