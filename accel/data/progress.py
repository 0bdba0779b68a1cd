"""How far a prepared loader is: what a checkpoint keeps of it, and what resuming needs."""

from __future__ import annotations

from typing import Any


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

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the next one, unless that is the one being resumed."""
        if not (self.resumed and epoch == self.epoch):
            self.resumed = False
            self.epoch = epoch
        self.running = False

    def begin(self) -> dict[str, Any] | None:
        """Begin an epoch; returns what its order must be drawn from if it was interrupted, else ``None``."""
        replay = self.order if self.resumed else None
        if self.running and not self.resumed:
            self.epoch += 1  # the last epoch was left by `break`: it counts
        self.resumed = False
        self.running = True
        self.position = 0
        return replay

    def finish(self) -> None:
        """The epoch is through."""
        self.epoch += 1
        self.position = 0
        self.order = {}
        self.running = False

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"epoch": self.epoch, "position": self.position, "order": self.order, "in_epoch": self._in_epoch}

    @property
    def _in_epoch(self) -> bool:
        return self.running or self.resumed

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to where `state_dict` was taken; the next epoch begun is the one interrupted there, if it was."""
        self.epoch = state["epoch"]
        self.position = state["position"]
        self.order = state["order"]
        self.running = False
        self.resumed = state["in_epoch"]
