"""The position of a prepared loader, for checkpoints and resuming."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from accel.logging import get_logger

logger = get_logger(__name__)


@dataclass
class EpochPosition:
    """A position in an epoch.

    ``position``: the batches yielded, including skipped ones.
    ``order``: what the epoch's order was drawn from; ``None`` before it begins.
    ``ended``: True if the epoch has yielded its last batch.
    ``inner``: the state of a torchdata loader inside: to be restored, or as of the batch yielded last.
    """

    epoch: int = 0
    position: int = 0
    order: dict[str, Any] | None = None
    ended: bool = False
    inner: Any = None


class Progress:
    """Epoch and position of a loader, shared by it and its views that skip.

    ``here``: the current place. ``next``: where the next iteration begins: at the start of the current one if that
    yields no second batch, otherwise in the next epoch. ``saved``: what a checkpoint keeps: ``here``, or the place
    where an iteration of one batch was left.
    """

    def __init__(self) -> None:
        self._go_to(EpochPosition())
        self._same_round = True

    def _go_to(self, place: EpochPosition) -> None:
        self.here = self.next = self.saved = place

    @property
    def running(self) -> bool:
        """True if the current epoch has begun in this process."""
        return self.saved is not self.next

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the next one, unless that is the one being resumed."""
        self._go_to(self.next if epoch == self.next.epoch else EpochPosition(epoch))

    def begin(self) -> EpochPosition:
        """Begin an iteration; return its first place, which has an ``order`` if it resumes an epoch."""
        self.here = self.saved = EpochPosition(self.next.epoch, order={})
        return self.next

    def count_epoch(self, here: EpochPosition) -> None:
        """Advance to the next epoch if the iteration at ``here`` is the current one."""
        if here is self.here:
            self.next = EpochPosition(here.epoch + 1)

    def leave(self, here: EpochPosition) -> None:
        """End the iteration at ``here``; one that was left at its first batch is repeated by the next."""
        if here is self.here and self.next.epoch == here.epoch:
            self.here = self.next

    def finish(self, here: EpochPosition) -> None:
        """End the epoch at ``here`` and move on to the next."""
        if here is self.here:
            self._go_to(self.next)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        saved = self.saved
        return {
            "epoch": saved.epoch,
            "position": saved.position,
            "order": saved.order or {},
            "in_epoch": saved.order is not None,
            "ended": saved.ended,
        }

    def load_state_dict(self, state: dict[str, Any], process: int = 0, round_size: int = 1) -> None:
        """Restore the state that `state_dict` returned; the next epoch is the one interrupted there, if any.

        The state of a loader inside is used if it was ``process``'s own. With another ``round_size`` the position is
        the one after the same samples, or the last one before.
        """
        old_size = state.get("round", round_size)
        self._same_round = old_size == round_size
        place = EpochPosition(state["epoch"])
        if state["in_epoch"]:
            place.position = _rescaled_position(state["position"], old_size, round_size)
            place.order, place.ended = state["order"], state.get("ended", False)
        self._go_to(place)
        if state.get("process", process) == process:
            self.set_inner(state.get("loader"))

    def set_inner(self, state: Any) -> None:
        """Set the state of the loader inside, unless it was saved with another round size."""
        if self._same_round and state is not None:
            self.next.inner = state


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
