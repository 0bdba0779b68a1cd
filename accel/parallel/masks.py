"""Masks, positions and labels of transformers' models in a block of `accel.parallel.context`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any
from weakref import WeakValueDictionary

import torch

from accel.errors import ArgumentError
from accel.parallel.parts import Gathered, state
from accel.parallel.units import is_inside

_CALL = "maybe_context_parallel"
_MASKING = "transformers.masking_utils"  # loaded with every model of transformers
_TOKEN_LOSSES = ("ForMaskedLM", "ForTokenClassification")  # of each token by itself
_NEXT_TOKEN_LOSSES = (None, "ForCausalLM", "ForConditionalGeneration")
_LAYERS = ("full_attention", "sliding_attention", "chunked_attention", "dense", "sparse")
_configs: WeakValueDictionary[int, Any] = WeakValueDictionary()  # of models with hooks, by `id`: they have no hash


@dataclass(frozen=True)
class _InputHook:
    """A forward pre-hook of a model of transformers, with an effect in blocks.

    ``outer``, ``inner``: no other model of transformers is around it, inside it. ``names``: the parameters of its
    forward. ``rotary``: it has rotary positions. ``limit``: above this length they depend on the length.
    """

    outer: bool
    inner: bool
    names: list[str]
    rotary: bool
    limit: int | None

    def adapt(self, model: Any, args: Any, kwargs: Any) -> tuple[tuple[()], dict[str, Any]] | None:
        """Return the arguments of ``model`` with positions of this process's part, and the mask of the whole."""
        region = state.region
        arguments = {**dict(zip(self.names, args, strict=False)), **kwargs}
        tokens = next(
            (arguments[key] for key in ("input_ids", "inputs_embeds") if arguments.get(key) is not None), None
        )
        if region is None or tokens is None:
            return None
        length = tokens.shape[1]
        if self.outer:
            self._check_outputs(model, arguments)
            if region.length not in (None, length):
                raise ArgumentError(
                    f"{_CALL}: {type(model).__name__} got a sequence of {length}, and a process has {region.length} "
                    f"of {region.length * region.size}: name its inputs in buffers"
                )
            arguments["position_ids"] = self._positions(region, model, arguments.get("position_ids"), tokens)
        if self.inner:
            self._check_layers(model, length * region.size)
            mask = arguments.get("attention_mask")
            if isinstance(mask, torch.Tensor) and mask.ndim == 2 and mask.shape[1] == length:
                arguments["attention_mask"] = region.whole(mask, 1)
        return (), arguments

    __call__ = adapt

    def _check_outputs(self, model: Any, arguments: dict[str, Any]) -> None:
        name, loss = type(model).__name__, getattr(model, "loss_type", None)
        if model.config.is_encoder_decoder:
            raise ArgumentError(f"{_CALL}: {name} has an encoder and a decoder: only self-attention can be split")
        if loss not in _TOKEN_LOSSES + _NEXT_TOKEN_LOSSES:
            raise ArgumentError(
                f"{_CALL}: the output of {name} is for whole sequences, and a process has parts of them"
            )
        labels, shifted = arguments.get("labels"), arguments.get("shift_labels")
        if labels is not None and shifted is None and loss in _NEXT_TOKEN_LOSSES:
            raise ArgumentError(
                f"{_CALL}: {name} would shift labels after the sequence was cut: shift them before the block, name "
                "them in buffers, and pass them as shift_labels too"
            )

    def _check_layers(self, model: Any, total: int) -> None:
        name, config = type(model).__name__, model.config
        if config._attn_implementation != "sdpa":
            raise ArgumentError(
                f"{_CALL}: {name} computes attention by {config._attn_implementation!r}, which cannot be split: load "
                "it with attn_implementation='sdpa'"
            )
        others = sorted(set(getattr(config, "layer_types", None) or ()) - set(_LAYERS))
        if others or model._is_stateful:
            kind = ", ".join(others) or "recurrent layers"
            raise ArgumentError(f"{_CALL}: {name} has {kind}: only layers of self-attention can be split")
        if self.limit is not None and total > self.limit:
            raise ArgumentError(
                f"{_CALL}: rotary positions of {name} depend on the length of sequences above {self.limit}, and this "
                f"one has {total}: set another rope_type"
            )

    def _positions(
        self, region: Gathered, model: Any, positions: torch.Tensor | None, tokens: torch.Tensor
    ) -> torch.Tensor:
        total = tokens.shape[1] * region.size
        if positions is not None:
            return region.own_part(positions, -1) if positions.shape[-1] == total else positions
        if not self.rotary or "position_ids" not in self.names:
            raise ArgumentError(
                f"{_CALL}: {type(model).__name__} would count positions from 0 on each process: pass position_ids, "
                "and name them in buffers"
            )
        return region.own_part(torch.arange(total, device=tokens.device)[None], 1)


def prepare_models(model: torch.nn.Module) -> None:
    """Register hooks with the models of transformers in ``model``. Raises `ArgumentError` if it is too old."""
    parts = {
        name: part
        for name, part in model.named_modules()
        if any(kind.__name__ == "PreTrainedModel" for kind in type(part).__mro__)
    }
    if parts and _masking() is None:
        raise ArgumentError(f"{_CALL}: masks of this version of transformers cannot be split: install 5.23 or later")
    for name, part in parts.items():
        others = [other for other in parts if other != name]
        rotary = [module for module in part.modules() if hasattr(module, "rope_type")]
        hook = _InputHook(
            outer=not any(is_inside(name, other) for other in others),
            inner=not any(is_inside(other, name) for other in others),
            names=list(inspect.signature(type(part).forward).parameters)[1:],
            rotary=bool(rotary),
            limit=min((limit for module in rotary for limit in _limits(module)), default=None),
        )
        part.register_forward_pre_hook(hook, with_kwargs=True)
        _configs[id(part.config)] = part.config
    if parts:  # as a method, so that a model with hooks can be pickled
        _InputHook.__call__ = _not_compiled(_InputHook.adapt)  # type: ignore[method-assign]


def _limits(rotary: Any) -> Iterator[int]:
    """Yield the lengths above which positions of a rotary module depend on the length."""
    parameters = rotary.config.rope_parameters
    for kind in parameters.values() if isinstance(rotary.rope_type, dict) else [parameters]:
        if kind["rope_type"] in ("dynamic", "longrope"):
            yield kind.get("original_max_position_embeddings") or rotary.config.max_position_embeddings


def _masking() -> Any:
    """Return transformers' module of masks, if it is loaded and its functions have the arguments used here."""
    module: Any = sys.modules.get(_MASKING)
    return module if module is not None and "q_length" in inspect.signature(module.sdpa_mask).parameters else None


@contextmanager
def split_masks() -> Iterator[None]:
    """Have transformers create masks for the parts of sequences in the block."""
    masking = _masking()
    if masking is None:
        yield
        return
    find_packed = _packing_of_transformers()
    masking.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"] = _not_compiled(_create_mask)
    masking.find_packed_sequence_indices = _not_compiled(_find_packed)
    try:
        yield
    finally:
        del masking.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]  # transformers' own is behind it
        masking.find_packed_sequence_indices = find_packed


@cache
def _packing_of_transformers() -> Callable[[torch.Tensor], torch.Tensor | None]:
    find_packed: Callable[[torch.Tensor], torch.Tensor | None] = sys.modules[_MASKING].find_packed_sequence_indices
    return find_packed


@cache
def _not_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` for use in compiled models; always the same object, as they are guarded by it."""
    replacement: Callable[..., Any] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return replacement


def _find_packed(position_ids: torch.Tensor) -> None:
    """Find packed sequences in the whole of ``position_ids``, for the next mask; in a part they look different."""
    region = state.region
    assert region is not None
    positions = region.whole(position_ids, -1)
    indices = _packing_of_transformers()(positions)
    region.packed = None if indices is None else (positions, indices)


def _create_mask(
    batch_size: int,
    q_length: int,
    mask_function: Callable[..., torch.Tensor],
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    config: Any = None,
    **more: Any,
) -> torch.Tensor | None:
    """Return transformers' mask of this process's queries and all keys, with the arguments of its `sdpa_mask`."""
    masking: Any = sys.modules[_MASKING]
    region = state.region
    assert region is not None
    total = q_length * region.size
    if _configs.get(id(config)) is not config:
        raise ArgumentError(
            f"{_CALL}: a model of transformers ({getattr(config, 'model_type', None)}) was not prepared, and would "
            "count positions from 0 on each process: pass it to accelerator.prepare"
        )
    if attention_mask is not None and attention_mask.shape[-1] != total:
        raise ArgumentError(
            f"{_CALL}: attention_mask has shape {tuple(attention_mask.shape)} (sequence: {total}, this process: "
            f"{q_length}): pass a mask of the sequence, or name it in buffers"
        )
    _check_mask_function(mask_function, q_length)
    packed, region.packed = region.packed, None
    if packed is not None:
        mask_function = masking.packed_sequence_compatibility_function(mask_function, *packed)
        allow_is_causal_skip = False
    elif (
        ((allow_is_causal_skip and q_length > 1) or allow_is_bidirectional_skip)
        and (local_size is None or total < local_size)
        and (attention_mask is None or bool(attention_mask.all()))
    ):
        return None
    queries = region.queries(total).to(device)

    def of_queries(batch: Any, head: Any, query: Any, key: Any) -> torch.Tensor:
        return mask_function(batch, head, queries[query], key)

    mask: torch.Tensor = masking.sdpa_mask(
        batch_size=batch_size,
        q_length=len(queries),
        kv_length=total,
        mask_function=of_queries,
        attention_mask=attention_mask,
        allow_is_causal_skip=False,
        use_vmap=use_vmap,
        device=device,
    )
    return mask


def _check_mask_function(mask_function: Any, length: int) -> None:
    """Raise `ArgumentError` if ``mask_function`` holds a tensor over this process's part, which has ``length``."""
    for owner, tensor in _held_tensors(mask_function):
        if length in tensor.shape and not owner.startswith("chunked_overlay."):  # which holds a number for each row
            raise ArgumentError(
                f"{_CALL}: a mask is computed by {owner.partition('.')[0]} from a tensor of shape "
                f"{tuple(tensor.shape)}, over the part of the sequence that a process has: it cannot be split"
            )


def _held_tensors(value: Any, owner: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors in the closure of a function, and of functions inside it, each with its function's name."""
    if isinstance(value, torch.Tensor):
        yield owner, value
        return
    inside: list[Any] = []
    if isinstance(value, list | tuple):
        inside = list(value)
    elif isinstance(value, partial):
        inside = [value.func, *value.args, *value.keywords.values()]
    elif callable(value):
        owner = getattr(value, "__qualname__", type(value).__name__)
        inside = [cell.cell_contents for cell in getattr(value, "__closure__", None) or ()]
    for part in inside:
        yield from _held_tensors(part, owner)
