"""The part of `Accelerator` that prepares data loaders."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader

from accel.accelerator.run import Part
from accel.data.prepare import prepare_data_loader
from accel.data.skip_batches import skip_first_batches
from accel.plugins import DataLoaderConfiguration


class LoadingControl(Part):
    """Preparation of data loaders according to `DataLoaderConfiguration`."""

    dataloader_config: DataLoaderConfiguration
    device_placement: bool
    rng_types: Sequence[str] | None

    @property
    def split_batches(self) -> bool:
        """True if a loader's batch size is the total of all processes."""
        return self.dataloader_config.split_batches

    @property
    def dispatch_batches(self) -> bool | None:
        """True if the main process reads for all; ``None``: for iterable data sets only."""
        return self.dataloader_config.dispatch_batches

    @property
    def even_batches(self) -> bool:
        """True if an incomplete last round is completed."""
        return self.dataloader_config.even_batches

    @even_batches.setter
    def even_batches(self, even_batches: bool) -> None:
        self.dataloader_config.even_batches = even_batches

    @property
    def use_seedable_sampler(self) -> bool:
        """True if shuffling depends on seed and epoch only."""
        return self.dataloader_config.use_seedable_sampler

    @property
    def use_stateful_dataloader(self) -> bool:
        """True if loaders resume their position after `load_state`."""
        return self.dataloader_config.use_stateful_dataloader

    @property
    def non_blocking(self) -> bool:
        """True if copies to the device are asynchronous."""
        return self.dataloader_config.non_blocking

    def prepare_data_loader(
        self,
        data_loader: DataLoader[Any],
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Callable[..., Any] | None = None,
    ) -> DataLoader[Any]:
        """Return ``data_loader`` limited to this process's share; see `accel.data.prepare_data_loader`."""
        config = self.dataloader_config
        device: torch.device = self.state.device
        prepared = prepare_data_loader(
            data_loader,
            device,
            *self.strategy.data_place,
            split_batches=config.split_batches,
            put_on_device=self.device_placement if device_placement is None else device_placement,
            rng_types=self.rng_types,
            dispatch_batches=config.dispatch_batches,
            even_batches=config.even_batches,
            slice_fn_for_dispatch=slice_fn_for_dispatch,
            use_seedable_sampler=config.use_seedable_sampler,
            data_seed=config.data_seed,
            non_blocking=config.non_blocking,
            use_stateful_dataloader=config.use_stateful_dataloader,
            already_sharded=config.already_sharded,
        )
        if all(known is not prepared for known in self._run.loaders):
            self._run.loaders.append(prepared)
        return prepared

    def skip_first_batches(self, dataloader: DataLoader[Any], num_batches: int = 0) -> DataLoader[Any]:
        """See `accel.skip_first_batches`."""
        return skip_first_batches(dataloader, num_batches)
