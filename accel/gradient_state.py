"""The position of a process in its gradient accumulation window and in its data loaders."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

from accel.plugins import GradientAccumulationPlugin


class ActiveLoader(Protocol):
    """The interface of a prepared loader during iteration, documented in `accel.data.loader.PreparedLoader`."""

    @property
    def end_of_dataloader(self) -> bool: ...
    @property
    def remainder(self) -> int: ...
    @property
    def batches_left(self) -> int | None: ...
    @property
    def nominal_rows(self) -> int: ...
    @property
    def even_batches(self) -> bool: ...
    def last_rows(self) -> int: ...
    def real_counts(self) -> tuple[int, ...] | None: ...


class GradientState:
    """The position of the process in its accumulation window and in its data loaders.

    ``sync_gradients`` is true on the batch that ends a window: only then do optimizers step and processes
    exchange gradients.
    """

    _shared_state: ClassVar[dict[str, Any]] = {}

    sync_gradients: bool
    plugin: GradientAccumulationPlugin
    _plugin_was_given: bool
    dataloader_references: list[ActiveLoader]
    _is_xla_gradients_synced: bool

    def __init__(self, gradient_accumulation_plugin: GradientAccumulationPlugin | None = None) -> None:
        self.__dict__ = GradientState._shared_state
        if not self.initialized:
            self.sync_gradients = True
            self.dataloader_references = []
            self.plugin = GradientAccumulationPlugin()
            self._plugin_was_given = False
        if gradient_accumulation_plugin is not None:
            self.plugin = gradient_accumulation_plugin
            self._plugin_was_given = True

    def __reduce__(self) -> Any:
        return GradientState, ()

    @property
    def initialized(self) -> bool:
        """True once the state exists."""
        return "sync_gradients" in GradientState._shared_state

    @property
    def plugin_kwargs(self) -> dict[str, Any]:
        """The given plugin's number of steps and its settings that are not defaults."""
        if not self._plugin_was_given:
            return {}
        return {"num_steps": self.plugin.num_steps, **self.plugin.to_kwargs()}

    @plugin_kwargs.setter
    def plugin_kwargs(self, settings: dict[str, Any]) -> None:
        self.plugin, self._plugin_was_given = GradientAccumulationPlugin(**settings), bool(settings)

    @property
    def is_xla_gradients_synced(self) -> bool:
        """The script's claim that it has reduced gradients with torch_xla; `Accelerator.backward` reduces them too."""
        return bool(self.__dict__.get("_is_xla_gradients_synced", False))

    @is_xla_gradients_synced.setter
    def is_xla_gradients_synced(self, is_synced: bool) -> None:
        self.__dict__["_is_xla_gradients_synced"] = is_synced

    @property
    def num_steps(self) -> int:
        """The number of batches in one accumulation window."""
        return self.plugin.num_steps

    @property
    def adjust_scheduler(self) -> bool:
        """True if batches between steps are counted in the scheduler's step count."""
        return self.plugin.adjust_scheduler

    @property
    def sync_with_dataloader(self) -> bool:
        """True if the last batch of a loader ends the window."""
        return self.plugin.sync_with_dataloader

    @property
    def active_dataloader(self) -> ActiveLoader | None:
        """The innermost prepared loader that is being iterated."""
        return self.dataloader_references[-1] if self.dataloader_references else None

    @property
    def in_dataloader(self) -> bool:
        """True while a prepared loader is iterated."""
        return bool(self.dataloader_references)

    @property
    def end_of_dataloader(self) -> bool:
        """True if the active loader has yielded its last batch of this epoch."""
        active = self.active_dataloader
        return active is not None and active.end_of_dataloader

    @property
    def remainder(self) -> int:
        """The samples in the last, incomplete round of the active loader: 0 if it is complete, -1 if unknown."""
        active = self.active_dataloader
        return -1 if active is None else active.remainder

    def __repr__(self) -> str:
        return (
            f"Sync gradients: {self.sync_gradients}\nAt end of dataloader: {self.end_of_dataloader}\n"
            f"Extra samples: {self.remainder}\nGradient accumulation steps: {self.num_steps}\n"
        )

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        self.sync_gradients = sync_gradients

    def _add_dataloader(self, loader: ActiveLoader) -> None:
        self.dataloader_references.append(loader)

    def _remove_dataloader(self, loader: ActiveLoader) -> None:
        references = self.dataloader_references
        for index in range(len(references) - 1, -1, -1):
            if references[index] is loader:
                del references[index]
                return

    @staticmethod
    def _reset_state() -> None:
        GradientState._shared_state.clear()
