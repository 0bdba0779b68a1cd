"""DeepSpeed's sequence parallelism (Ulysses, ALST): the processes of a group have parts of the same sequences.

In attention each of them has the whole sequence of its share of the heads.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from copy import copy
from typing import Any, ClassVar
from weakref import WeakSet

import torch
from torch import nn

from accel.errors import ArgumentError
from accel.state import GradientState
from accel.world.versions import compare_versions

_CALL = "sp_size under DeepSpeed"
_OLDEST = "0.18.2"
_ATTENTIONS = ("sdpa", "flash_attention_2", "flash_attention_3")
_LAYERS = ("full_attention", "sliding_attention", "dense", "sparse")
_LOSSES = (None, "ForCausalLM", "ForConditionalGeneration")  # of next tokens, as labels are shifted by one


class Sequences:
    """The groups of ``size`` processes, and the attention of the model that is trained, until `release` or the next.

    All processes must create it together. ``requested``: the attention that the settings name, if they do; ``zero``:
    DeepSpeed's settings of ZeRO. Raises `ArgumentError` for a model whose sequences cannot be split, and at stage 3 for
    a setting with which DeepSpeed adds the gradients of some parameters and averages those of others.
    """

    _active: ClassVar[Sequences | None] = None

    def __init__(self, model: nn.Module, size: int, requested: str | None, zero: Mapping[str, Any]) -> None:
        self._check(model, size, requested)
        if zero["stage"] == 3 and not zero.get("reduce_scatter", True):
            raise ArgumentError(f"{_CALL} at stage 3 needs zero_optimization.reduce_scatter=true: remove the setting")
        from deepspeed.runtime.sequence_parallel import parallel_state_sp
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        if Sequences._active is not None:
            Sequences._active.release()
        Sequences._active = self
        self.size = size
        self.groups: Any = parallel_state_sp  # the `mpu` of an engine
        self.groups.initialize_sequence_parallel(size)
        self.group: Any = self.groups.get_sequence_parallel_group()
        self.rank: int = self.groups.get_sequence_parallel_rank()
        config: Any = model.config
        self._modules = WeakSet(model.modules())
        self._name: str = config._attn_implementation
        self._functions: Any = ALL_ATTENTION_FUNCTIONS
        self._whole = self._functions[self._name]
        self._by_shape: dict[tuple[int, ...], Any] = {}
        self._functions[self._name] = self._attention

    @contextmanager
    def whole_layers(self) -> Iterator[None]:
        """Make DeepSpeed treat layers as whole while it saves or loads; it takes these groups for splits of them."""
        self.groups.get_tensor_model_parallel_world_size = lambda: 1
        self.groups.get_tensor_model_parallel_rank = lambda: 0
        try:
            yield
        finally:
            del self.groups.get_tensor_model_parallel_world_size, self.groups.get_tensor_model_parallel_rank

    @staticmethod
    def _check(model: Any, size: int, requested: str | None) -> None:
        if compare_versions("deepspeed", "<", _OLDEST):
            raise ArgumentError(f"{_CALL} needs DeepSpeed {_OLDEST} or later: pip install --upgrade deepspeed")
        name = type(model).__name__
        outer: Any = getattr(model, "config", None)
        attention = getattr(outer, "_attn_implementation", None)
        if attention is None:
            raise ArgumentError(f"{_CALL} needs a model of transformers, not a {name}")
        if attention not in _ATTENTIONS or requested not in (None, attention):
            raise ArgumentError(
                f"{_CALL}: {name} computes attention by {attention!r}: load it with "
                f"attn_implementation={requested or 'sdpa'!r}"
            )
        config: Any = outer.get_text_config()
        others = sorted(set(getattr(config, "layer_types", None) or ()) - set(_LAYERS))
        if outer.is_encoder_decoder:
            raise ArgumentError(f"{_CALL}: {name} has an encoder and a decoder: only self-attention can be split")
        if others or model._is_stateful:
            kind = ", ".join(others) or "recurrent layers"
            raise ArgumentError(f"{_CALL}: {name} has {kind}: only layers of self-attention can be split")
        if getattr(model, "loss_type", None) not in _LOSSES:
            raise ArgumentError(f"{_CALL} is for models with the loss of next tokens, which {name} does not have")
        heads = config.num_attention_heads
        shared = getattr(config, "num_key_value_heads", None) or heads
        if heads % size or (shared % size and size % shared):
            raise ArgumentError(
                f"{_CALL}: {heads} heads ({shared} of keys) cannot be shared equally by {size} processes"
            )

    def _attention(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Compute the attention of a layer: in training over the processes of the group, otherwise on this one.

        The function serves all models of the process: layers of other models have whole sequences.
        """
        if module not in self._modules:
            return self._whole(module, query, key, value, attention_mask, *args, **kwargs)
        if hasattr(module, "num_key_value_groups"):  # DeepSpeed changes it where it repeats the heads of keys
            module.num_key_value_groups = query.shape[1] // key.shape[1]  # type: ignore[assignment]
        loader, length = GradientState().active_dataloader, query.shape[2]
        if not module.training:
            if isinstance(loader, SplitLoader) and length == loader.length:
                raise ArgumentError(
                    f"{_CALL}: a model in evaluation has whole sequences: prepare its loader in a call of prepare() "
                    "without the model"
                )
            return self._whole(module, query, key, value, attention_mask, *args, **kwargs)
        if loader is not None and not isinstance(loader, SplitLoader):
            raise ArgumentError(
                f"{_CALL}: the batches of this loader are not split: prepare it in one call with the model, or by "
                "deepspeed_ulysses_dl_adapter(loader, model)"
            )
        window = kwargs.get("sliding_window")
        if self._name == "sdpa" and window is not None and window < length * self.size:
            raise ArgumentError(
                f"{_CALL}: 'sdpa' would ignore the sliding window of {window} in a sequence of {length * self.size}: "
                "use flash attention"
            )
        if kwargs.get("position_ids") is None:
            start = self.rank * length
            kwargs["position_ids"] = torch.arange(start, start + length, device=query.device)[None]
        return self._split(query, key)(module, query, key, value, None, *args, **kwargs)

    def _split(self, query: torch.Tensor, key: torch.Tensor) -> Any:
        """Return DeepSpeed's attention for tensors of these shapes and any length."""
        rows, heads, _, width = query.shape
        shape = (rows, heads, key.shape[1], width)
        if shape not in self._by_shape:
            from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

            self._by_shape[shape] = UlyssesSPAttentionHF(
                attn=self._whole,
                batch_size=rows,
                attn_head_count=heads,
                attn_head_size=width,
                kv_head_count=key.shape[1],
                num_hidden_layers=0,
                process_group=self.group,
                seq_length_is_variable=True,
            )
        return self._by_shape[shape]

    def release(self) -> None:
        """Compute attention on each process again, and let other engines be without these groups."""
        if Sequences._active is not self:
            return
        from deepspeed.utils import groups

        Sequences._active = None
        del self._functions[self._name]
        groups.mpu = None
        self.groups._SEQUENCE_PARALLEL_GROUP = self.groups._SEQUENCE_DATA_PARALLEL_GROUP = None


class SplitLoader:
    """This process's parts of the batches of ``loader``, a prepared one, by DeepSpeed's adapter.

    Each batch of each process of a group is split over the group: one round of ``loader`` is ``size`` batches here.
    Batches are mappings with ``input_ids`` and ``labels``; they get ``position_ids`` if they have none, and
    ``shift_labels`` in place of ``labels``. Other attributes are those of ``loader``.

    ``length``: the length of the parts of the current batch.
    """

    def __init__(self, loader: Any, sequences: Sequences, device: torch.device, skip_batches: int = 0) -> None:
        if not hasattr(loader, "batches_left"):
            raise ArgumentError("deepspeed_ulysses_dl_adapter: pass a loader that accelerator.prepare has returned")
        if not loader.even_batches:
            raise ArgumentError(f"{_CALL}: all processes need equal batches: set even_batches=True")
        self.loader, self.device = loader, device
        self.length: int | None = None
        self._sequences = sequences
        self._skip_batches = skip_batches
        self._waiting: Any = ()  # the batches of this round that were not yielded yet

    def __getattr__(self, name: str) -> Any:
        if name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __len__(self) -> int:
        return max(0, len(self.loader) * self._sequences.size - self._skip_batches)

    def skipping(self, batches: int) -> SplitLoader:
        """Return a view that skips the first ``batches`` of every epoch."""
        rounds, rest = divmod(self._skip_batches + batches, self._sequences.size)
        view = copy(self)
        view.loader, view._skip_batches = self.loader.skipping(rounds), rest
        return view

    def __iter__(self) -> Iterator[dict[str, Any]]:
        from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPDataLoaderAdapter

        group = self._sequences
        reader = self._read()
        adapter = UlyssesSPDataLoaderAdapter(reader, group.rank, group.group, group.size, self.device)
        self._waiting = adapter.micro_batches
        state, registered = GradientState(), False
        try:
            for number, batch in enumerate(adapter):
                if not registered:  # after the loader inside, which is thus not the active one
                    state._add_dataloader(self)
                    registered = True
                if number >= self._skip_batches:
                    self.length = batch["input_ids"].shape[1]
                    yield {
                        key: item.to(self.device).contiguous() if isinstance(item, torch.Tensor) else item
                        for key, item in batch.items()
                    }
        finally:
            state._remove_dataloader(self)
            reader.close()

    def _read(self) -> Generator[Any]:
        for batch in self.loader:
            _check_batch(batch, self._sequences.size, self._sequences._name == "sdpa")
            yield batch

    @property
    def end_of_dataloader(self) -> bool:
        """True if the last batch of this epoch was yielded."""
        return self.loader.end_of_dataloader and not self._waiting

    @property
    def batches_left(self) -> int | None:
        """See `PreparedLoader.batches_left`."""
        rounds: int | None = self.loader.batches_left
        return None if rounds is None else (rounds - 1) * self._sequences.size + len(self._waiting) + 1

    @property
    def remainder(self) -> int:
        """0 at the end, -1 before: all rows of the last round are returned by `gather_for_metrics`."""
        return 0 if self.end_of_dataloader else -1

    def real_counts(self) -> None:
        """Return None: see `remainder`."""


def _check_batch(batch: Any, size: int, by_sdpa: bool) -> None:
    """Add ``position_ids`` to ``batch``. Raises `ArgumentError` if it cannot be split over ``size`` processes."""
    if not isinstance(batch, MutableMapping) or not {"input_ids", "labels"} <= set(batch):
        content = (
            f"has {', '.join(map(str, batch))}" if isinstance(batch, MutableMapping) else f"is a {type(batch).__name__}"
        )
        raise ArgumentError(f"{_CALL}: a batch must be a dict with input_ids and labels: this one {content}")
    shape = batch["input_ids"].shape
    if "position_ids" not in batch:
        batch["position_ids"] = torch.arange(shape[1], device=batch["input_ids"].device).expand(shape).contiguous()
    for key, item in batch.items():
        if isinstance(item, torch.Tensor) and item.shape != shape:
            raise ArgumentError(
                f"{_CALL}: {key} of shape {tuple(item.shape)} cannot be split as input_ids of shape {tuple(shape)}: "
                "leave it out of the batch"
            )
    if shape[1] % size:
        raise ArgumentError(
            f"{_CALL}: sequence length ({shape[1]}) is not divisible by sp_size ({size}): "
            f"pad it to {shape[1] + -shape[1] % size}"
        )
    mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
    if bool((mask[:, 1:] & ~mask[:, :-1]).any()):
        raise ArgumentError(f"{_CALL}: attention_mask has padding before tokens, which is not masked: pad on the right")
    positions = batch["position_ids"]
    if by_sdpa and bool(((positions[:, 1:] <= positions[:, :-1]) & mask[:, 1:]).any()):
        raise ArgumentError(
            f"{_CALL}: position_ids restart within a row, and 'sdpa' would attend across packed sequences: use "
            "flash attention"
        )
