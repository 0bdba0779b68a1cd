"""The position of a prepared loader, for checkpoints and resuming."""

from __future__ import annotations

from typing import Any

from accel.logging import get_logger

logger = get_logger(__name__)


class Progress:
    """Epoch and position of a loader, shared by it and its views that skip.

    ``position``: the batches yielded in the current epoch, including skipped ones.
    ``order``: the random state that the epoch's order was drawn from; ``None`` between epochs.
    ``resumed``: True if the current epoch was loaded and has not begun.
    ``ended``: True if the current epoch has yielded its last batch.
    ``inner``: the state of a torchdata loader inside: to be restored, or as of the batch yielded last.
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
        """True if the current epoch has begun in this process."""
        return self.order is not None and not self.resumed

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the next one, unless that is the one being resumed."""
        if epoch != self.epoch:
            self.inner = None
        elif self.resumed:
            return
        self._next_epoch(epoch)

    def _next_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.position = 0
        self.order = None
        self.resumed = self.ended = False

    def begin(self) -> tuple[int, dict[str, Any] | None, Any]:
        """Begin an epoch.

        Returns its position and the random state to draw its order from (0 and ``None`` unless it is resumed), and
        the state to restore in the loader inside.
        """
        start = (self.position, self.order) if self.resumed else (0, None)
        inner, self.inner = self.inner, None
        self._next_epoch(self.epoch + self.running)  # an epoch that was left by `break` counts
        self.order = {}
        return *start, inner

    def finish(self) -> None:
        """End the epoch and move on to the next."""
        self.inner = None
        self._next_epoch(self.epoch + 1)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "order": self.order or {},
            "in_epoch": self.order is not None,
            "ended": self.ended,
        }

    def load_state_dict(self, state: dict[str, Any], process: int = 0, round_size: int = 1) -> None:
        """Restore the state that `state_dict` returned; the next epoch is the one interrupted there, if any.

        The state of a loader inside is used if it was ``process``'s own. With another ``round_size`` the position is
        the one after the same samples, or the last one before.
        """
        self._next_epoch(state["epoch"])
        self.resumed = state["in_epoch"]
        if self.resumed:
            self.position = _rescaled_position(state["position"], state.get("round", round_size), round_size)
            self.order = state["order"]
            self.ended = state.get("ended", False)
        self._same_round = state.get("round", round_size) == round_size
        same_process = self._same_round and state.get("process", process) == process
        self.inner = state.get("loader") if same_process else None

    def set_inner(self, state: Any) -> None:
        """Set the state of the loader inside, unless it was saved with another round size."""
        if self._same_round and state is not None:
            self.inner = state


def _rescaled_position(position: int, old_size: int, new_size: int) -> int:
    """Convert ``position`` from rounds of ``old_size`` samples to rounds of ``new_size``; warn if some are repeated."""
    rounds, repeated = divmod(position * old_size, new_size)
    if repeated:
        logger.warning(
            "resuming in the middle of an epoch: "
            "%d samples were seen, %d are used by each round of this world: %d are repeated",
            position * old_size, new_size, repeated,
        )  # fmt: skip
    return rounds
