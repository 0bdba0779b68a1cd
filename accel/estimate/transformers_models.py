"""Models of transformers, built from their configuration."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from accel.estimate.model_source import NotFound, Subject

_PREDICTS_TOKENS = ("ForCausalLM", "ForMaskedLM", "ForConditionalGeneration", "LMHeadModel", "ForTokenClassification")
_PREDICTS_CLASSES = ("ForSequenceClassification", "ForImageClassification", "ForAudioClassification")


def of_config(name: str, folder: str, config: Mapping[str, Any], *, trust_remote_code: bool = False) -> Subject:
    """Return the model of the class that ``config`` names first, the one of its weights. Raises `NotFound`."""
    if find_spec("transformers") is None:
        raise NotFound(f"{name} is a model of transformers: pip install transformers")
    try:
        import transformers
        from transformers import AutoConfig
    except Exception as error:
        raise NotFound(f"{name}: transformers cannot be imported: {type(error).__name__}: {error}") from None
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # of settings that take no memory
    remote = bool(config.get("auto_map")) and config.get("model_type") not in transformers.CONFIG_MAPPING
    if remote and not trust_remote_code:
        raise NotFound(f"{name} is defined by code of its own: read it, and if you trust it, give --trust_remote_code")
    try:
        known = AutoConfig.from_pretrained(name if remote else folder, trust_remote_code=remote)
    except Exception as error:
        said = str(error).strip().split("\n")[0]
        raise NotFound(f"{name}: its config.json is of no model that transformers knows: {said}") from None
    named = next((n for n in config.get("architectures") or [] if hasattr(transformers, str(n))), None)

    def make() -> nn.Module:
        if remote:
            return _of_remote_code(transformers, known)
        if named is not None:
            made: nn.Module = getattr(transformers, named)(known)
            return made
        found: nn.Module = transformers.AutoModel.from_config(known, dtype=torch.float32)  # type: ignore[no-untyped-call]
        return found

    text = known.get_text_config()
    return Subject(
        name=name,
        library="transformers",
        make=make,
        inputs=inputs,
        longest=getattr(text, "max_position_embeddings", None) or getattr(text, "n_positions", None),
    )


def _of_remote_code(transformers: Any, known: Any) -> nn.Module:
    kinds = [kind for kind in known.auto_map if kind.startswith("AutoModel")]
    kind = next((kind for kind in kinds if "For" in kind), "AutoModel")
    made: nn.Module = getattr(transformers, kind).from_config(known, dtype=torch.float32, trust_remote_code=True)
    return made


def inputs(model: nn.Module, batch: int, length: int) -> Mapping[str, Any]:
    """Return the inputs of ``model`` in a training step. Raises `NotFound` for an unknown kind of model."""
    config: Any = model.config
    kind = type(model).__name__
    tokens = torch.zeros(batch, length, dtype=torch.long)
    main = getattr(model, "main_input_name", "input_ids")
    if main == "input_ids":
        given = {"input_ids": tokens}
    elif main == "pixel_values":
        size = getattr(config, "image_size", 224)
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        given = {"pixel_values": torch.zeros(batch, getattr(config, "num_channels", 3), height, width)}
    elif main == "input_features" and hasattr(config, "max_source_positions"):
        frames = 2 * int(config.max_source_positions)
        given = {"input_features": torch.zeros(batch, int(config.num_mel_bins), frames)}
    elif main == "input_values":
        given = {"input_values": torch.zeros(batch, length)}
    else:
        raise NotFound(f"what a {kind} computes on ({main}) is not known here")
    if kind.endswith(_PREDICTS_TOKENS) and main in ("input_ids", "input_features"):
        return {**given, "labels": tokens}
    if kind.endswith(_PREDICTS_CLASSES):
        return {**given, "labels": torch.zeros(batch, dtype=torch.long)}
    if getattr(config, "is_encoder_decoder", False):
        given["decoder_input_ids"] = tokens
    return given
