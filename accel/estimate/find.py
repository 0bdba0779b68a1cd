"""Find a model by name: a safetensors file, a directory, a factory, or a name on the Hub or in timm."""

from __future__ import annotations

import inspect
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from accel.errors import AccelError, ArgumentError, CheckpointError, nearest, one_of
from accel.tensor_files import SafetensorsFile


class NotFound(AccelError):
    """Error for a model that is unknown or cannot be built."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model to be built.

    make:    builds a new model on the current default device.
    inputs:  returns a batch (batch size, sequence length) as keyword arguments of a training forward, or raises
        `NotFound` if it is unknown; None without a forward.
    longest: the maximum sequence length, if known.
    """

    name: str
    library: str
    make: Callable[[], nn.Module]
    inputs: Callable[[nn.Module, int, int], Mapping[str, Any]] | None
    longest: int | None = None


def on_meta(subject: Subject) -> nn.Module:
    """Return the model on the meta device, in float32. Raises `NotFound` if it cannot be built there."""
    from accel.big_models.init import init_empty_weights

    try:
        with init_empty_weights(include_buffers=True):
            model = subject.make()
    except AccelError:
        raise
    except Exception:  # some constructors read a buffer's value: leave buffers real
        try:
            with init_empty_weights(include_buffers=False):
                model = subject.make()
        except Exception as error:
            detail = " ".join(f"{type(error).__name__}: {error}".split())
            raise NotFound(f"{subject.name} cannot be built: {detail}") from error
    return model.to(torch.float32)


# Safetensors files: their headers have every tensor's name, type and shape.


def from_safetensors_file(path: str) -> Subject:
    """Return the model of a safetensors file, or of the index of several. Raises `NotFound` if it is neither."""
    if not path.endswith(".index.json"):
        return _from_tensors(path, read_header(path))
    try:
        with open(path, "rb") as file:
            names = sorted(set(json.load(file)["weight_map"].values()))
    except OSError as error:
        raise NotFound(f"{path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise NotFound(f"{path} is not an index of safetensors files") from None
    return _from_files(path, [os.path.join(os.path.dirname(path), os.path.basename(str(name))) for name in names])


def from_safetensors_directory(path: str) -> Subject:
    """Return the model of all safetensors files in a directory. Raises `NotFound` if there are none."""
    names = sorted(name for name in os.listdir(path) if name.endswith(".safetensors"))
    if not names:
        raise NotFound(f"{path} has neither a config.json nor a safetensors file")
    return _from_files(path, [os.path.join(path, name) for name in names])


def _from_files(name: str, paths: list[str]) -> Subject:
    tensors: dict[str, torch.Tensor] = {}
    for path in paths:
        tensors |= read_header(path)
    return _from_tensors(name, tensors)


def read_header(path: str) -> Mapping[str, torch.Tensor]:
    """Return the tensors in a file, each weight once, which are not read. Raises `NotFound`."""
    try:
        file = SafetensorsFile(path)
        return {name: tensor for name, tensor in file.tensors.items() if name not in file.aliases}
    except CheckpointError as error:
        raise NotFound(str(error)) from None


def _from_tensors(name: str, tensors: Mapping[str, torch.Tensor]) -> Subject:
    def make() -> nn.Module:
        root = nn.Module()
        for key, stored in tensors.items():
            *path, last = key.split(".")
            parent = root
            for part in path:
                if part not in parent._modules:
                    parent.add_module(part, nn.Module())
                parent = parent.get_submodule(part)
            tensor = torch.empty(stored.shape, dtype=stored.dtype, device="meta")
            if tensor.is_floating_point() or tensor.is_complex():
                parent.register_parameter(last, nn.Parameter(tensor))
            else:
                parent.register_buffer(last, tensor)
        return root

    return Subject(name=name, library="safetensors", make=make, inputs=None)


# Models of transformers, made from their configuration.

_PREDICTS_TOKENS = ("ForCausalLM", "ForMaskedLM", "ForConditionalGeneration", "LMHeadModel", "ForTokenClassification")
_PREDICTS_CLASSES = ("ForSequenceClassification", "ForImageClassification", "ForAudioClassification")


def from_config(name: str, folder: str, config: Mapping[str, Any], *, trust_remote_code: bool = False) -> Subject:
    """Return a model of the first architecture in ``config`` that transformers has. Raises `NotFound`."""
    if find_spec("transformers") is None:
        raise NotFound(f"{name} is a model of transformers: pip install transformers")
    try:
        import transformers
        from transformers import AutoConfig
    except Exception as error:
        raise NotFound(f"{name}: transformers cannot be imported: {type(error).__name__}: {error}") from None
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # warnings about settings that do not affect memory
    remote = bool(config.get("auto_map")) and config.get("model_type") not in transformers.CONFIG_MAPPING
    if remote and not trust_remote_code:
        raise NotFound(f"{name} needs code from its repository: review it, then pass --trust_remote_code")
    try:
        model_config = AutoConfig.from_pretrained(name if remote else folder, trust_remote_code=remote)
    except Exception as error:
        detail = str(error).strip().split("\n")[0]
        raise NotFound(f"{name}: its config.json has no model type that transformers supports: {detail}") from None
    class_name = next((n for n in config.get("architectures") or [] if hasattr(transformers, str(n))), None)

    def make() -> nn.Module:
        if remote:
            return _from_remote_code(transformers, model_config)
        if class_name is not None:
            model: nn.Module = getattr(transformers, class_name)(model_config)
            return model
        base_model: nn.Module = transformers.AutoModel.from_config(model_config, dtype=torch.float32)  # type: ignore[no-untyped-call]
        return base_model

    text = model_config.get_text_config()
    return Subject(
        name=name,
        library="transformers",
        make=make,
        inputs=transformers_inputs,
        longest=getattr(text, "max_position_embeddings", None) or getattr(text, "n_positions", None),
    )


def _from_remote_code(transformers: Any, model_config: Any) -> nn.Module:
    kinds = [kind for kind in model_config.auto_map if kind.startswith("AutoModel")]
    kind = next((kind for kind in kinds if "For" in kind), "AutoModel")
    model: nn.Module = getattr(transformers, kind).from_config(
        model_config, dtype=torch.float32, trust_remote_code=True
    )
    return model


def transformers_inputs(model: nn.Module, batch: int, length: int) -> Mapping[str, Any]:
    """Return the inputs of ``model`` in a training step. Raises `NotFound` for an unknown kind of model."""
    config: Any = model.config
    kind = type(model).__name__
    tokens = torch.zeros(batch, length, dtype=torch.long)
    main = getattr(model, "main_input_name", "input_ids")
    if main == "input_ids":
        model_inputs = {"input_ids": tokens}
    elif main == "pixel_values":
        size = getattr(config, "image_size", 224)
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        model_inputs = {"pixel_values": torch.zeros(batch, getattr(config, "num_channels", 3), height, width)}
    elif main == "input_features" and hasattr(config, "max_source_positions"):
        frames = 2 * int(config.max_source_positions)
        model_inputs = {"input_features": torch.zeros(batch, int(config.num_mel_bins), frames)}
    elif main == "input_values":
        model_inputs = {"input_values": torch.zeros(batch, length)}
    else:
        raise NotFound(f"the inputs of a {kind} ({main}) are unknown")
    if kind.endswith(_PREDICTS_TOKENS) and main in ("input_ids", "input_features"):
        return {**model_inputs, "labels": tokens}
    if kind.endswith(_PREDICTS_CLASSES):
        return {**model_inputs, "labels": torch.zeros(batch, dtype=torch.long)}
    if getattr(config, "is_encoder_decoder", False):
        model_inputs["decoder_input_ids"] = tokens
    return model_inputs


# Models on the Hugging Face Hub, from their config.json alone, and models of timm.


def fetch_config(name: str) -> str:
    """Return the folder of the Hub's cache with the config.json of ``name``, downloading it if needed.

    Raises `NotFound` with a line for each cause: no such name, no access, no network.
    """
    if find_spec("huggingface_hub") is None:
        raise NotFound(f"{name} is not a file or directory; for a name on the Hub: pip install huggingface_hub")
    try:
        from huggingface_hub import constants, errors, hf_hub_download
        from huggingface_hub.utils import logging
    except Exception as error:
        raise NotFound(f"{name}: huggingface_hub cannot be imported: {type(error).__name__}: {error}") from None

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # it would report every retry
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    try:
        return _without_network(name) or os.path.dirname(hf_hub_download(name, "config.json"))
    except errors.GatedRepoError:
        raise NotFound(f"{name} is gated: request access on its page, then log in: hf auth login") from None
    except errors.RepositoryNotFoundError:
        raise NotFound(
            f"{name}: no such file, directory or model on {endpoint}; a private one needs: hf auth login"
        ) from None
    except (_Unreachable, errors.LocalEntryNotFoundError):
        reason = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"{endpoint} cannot be reached"
        raise NotFound(f"{name}: {reason}, and its config.json is not in the cache") from None
    except errors.EntryNotFoundError:
        raise NotFound(f"{name} has no config.json on {endpoint}: name one of its safetensors files instead") from None
    except errors.HFValidationError:
        raise NotFound(f"{name!r} is neither a file or directory nor a valid name of a model on the Hub") from None
    except (OSError, errors.HfHubHTTPError) as error:
        raise NotFound(f"{name}: {endpoint} failed: {' '.join(str(error).split())}") from None


class _Unreachable(Exception):
    pass


def _without_network(name: str) -> str | None:
    """Return the cache's folder at once if the Hub does not respond: `hf_hub_download` retries for half a minute.

    None if the Hub responds, even with an error. Raises `_Unreachable` if the cache does not have the file either.
    """
    from huggingface_hub import errors, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache

    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json"))
    except (errors.HfHubHTTPError, errors.EntryNotFoundError, errors.HFValidationError):
        return None
    except Exception:  # a connection error of requests, httpx or the system
        cached = try_to_load_from_cache(name, "config.json")
        if not isinstance(cached, str):
            raise _Unreachable from None
        return os.path.dirname(cached)
    return None


def read_config(folder: str) -> Mapping[str, Any]:
    """Read a folder's config.json. Raises NotFound if it is absent or invalid."""
    path = os.path.join(folder, "config.json")
    try:
        with open(path, "rb") as file:
            config = json.load(file)
    except OSError as error:
        raise NotFound(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise NotFound(f"{path} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise NotFound(f"{path} does not describe a model")
    return config


def timm_has_model(name: str) -> bool:
    """Return True if timm can be imported and has a model of that name."""
    if find_spec("timm") is None:
        return False
    try:
        timm: Any = import_module("timm")
    except Exception:
        return False
    return bool(timm.is_model(name))


def from_timm(name: str, config: Mapping[str, Any] | None = None) -> Subject:
    """Return a model of timm, by its name or by timm's config.json. Raises `NotFound`."""
    if find_spec("timm") is None:
        raise NotFound(f"{name} is a model of timm: pip install timm")
    try:
        timm: Any = import_module("timm")
    except Exception as error:
        raise NotFound(f"{name}: timm cannot be imported: {type(error).__name__}: {error}") from None
    config = config or {}
    architecture = str(config.get("architecture", name.partition(":")[2] or name))
    if not timm.is_model(architecture):
        raise NotFound(f"{architecture}: timm has no such model{nearest(architecture, timm.list_models())}")
    kwargs = {key: config[key] for key in ("num_classes", "global_pool") if key in config} | config.get(
        "model_args", {}
    )

    def inputs(model: nn.Module, batch: int, length: int) -> Mapping[str, Any]:
        shape = (getattr(model, "pretrained_cfg", None) or {}).get("input_size", (3, 224, 224))
        return {"x": torch.zeros(batch, *shape)}

    return Subject(
        name=name,
        library="timm",
        make=lambda: timm.create_model(architecture, pretrained=False, **kwargs),
        inputs=inputs,
    )


# Any name.

LIBRARIES = ("transformers", "timm")


def find(name: str, library: str | None = None, *, trust_remote_code: bool = False) -> Subject:
    """Return the model for ``name``: a safetensors file, a directory, ``module:factory``, or a name on the Hub.

    Raises `NotFound` or `ArgumentError`, in one line.
    """
    if name.endswith(".py") and os.path.isfile(name):
        module = os.path.splitext(os.path.normpath(name))[0].replace(os.sep, ".")
        raise NotFound(f"{name} is a Python file: name a factory in it, such as {module}:FACTORY")
    if name.endswith((".safetensors", ".safetensors.index.json")) or os.path.isfile(name):
        return from_safetensors_file(name)
    if os.path.isdir(name):
        return _from_directory(name, library, trust_remote_code)
    if name.startswith((".", "/", "~")):
        raise NotFound(f"{name}: no such file or directory")
    module, colon, factory = name.partition(":")
    if colon and module not in ("hf-hub", "hf_hub"):
        return from_factory(name, module, factory)
    if library == "timm" or (library is None and "/" not in name and timm_has_model(name)):
        return from_timm(name)
    folder = fetch_config(name.removeprefix("hf-hub:").removeprefix("hf_hub:"))
    return _by_config(name, folder, library, trust_remote_code)


def _from_directory(path: str, library: str | None, trust_remote_code: bool) -> Subject:
    has_config = os.path.isfile(os.path.join(path, "config.json"))
    has_weights = any(name.endswith(".safetensors") for name in os.listdir(path))
    if has_config and (library or find_spec("transformers") or not has_weights):
        return _by_config(path, path, library, trust_remote_code)
    return from_safetensors_directory(path)


def _by_config(name: str, folder: str, library: str | None, trust_remote_code: bool) -> Subject:
    config = read_config(folder)
    if library is None:
        library = "timm" if "architecture" in config and "model_type" not in config else "transformers"
    if one_of(library, LIBRARIES, source="--library_name") == "timm":
        return from_timm(name, config)
    return from_config(name, folder, config, trust_remote_code=trust_remote_code)


def from_factory(name: str, module: str, factory: str) -> Subject:
    """Return the model of ``module:factory``, which returns a model, or a model and its forward's arguments.

    It is called with ``batch_size`` and ``sequence_length`` if it has such parameters, else without arguments.
    """
    sys.path[:0] = [""] if "" not in sys.path else []  # the current directory, as for `python -m`
    try:
        target: Any = import_module(module)
    except ModuleNotFoundError as error:
        raise NotFound(f"{name}: no module {error.name!r} here") from None
    except Exception as error:
        raise NotFound(f"{name}: module {module} cannot be imported: {type(error).__name__}: {error}") from error
    for part in factory.split("."):
        target = getattr(target, part, None)
    if not callable(target):
        raise NotFound(f"{name}: module {module} has no function or class {factory!r}")
    call: Callable[..., Any] = target

    def make(batch_size: int = 1, sequence_length: int = 1) -> tuple[nn.Module, Mapping[str, Any] | None]:
        created = call(**_accepted_kwargs(call, batch_size=batch_size, sequence_length=sequence_length))
        model, inputs = created if isinstance(created, tuple) and len(created) == 2 else (created, None)
        if not isinstance(model, nn.Module):
            raise ArgumentError(f"{name} returned a {type(model).__name__}, not a torch.nn.Module")
        if inputs is not None and not isinstance(inputs, Mapping):
            raise ArgumentError(f"{name}: the returned inputs are a {type(inputs).__name__}, not a mapping")
        return model, inputs

    def inputs(model: nn.Module, batch: int, length: int) -> Mapping[str, Any]:
        forward_kwargs = make(batch, length)[1]
        if forward_kwargs is None:
            raise NotFound(f"{name} returns no inputs: make it return (model, inputs)")
        return forward_kwargs

    return Subject(name=name, library="torch", make=lambda: make()[0], inputs=inputs)


def _accepted_kwargs(call: Callable[..., Any], **arguments: Any) -> dict[str, Any]:
    try:
        names = inspect.signature(call).parameters
    except (TypeError, ValueError):
        return {}
    if isinstance(call, type) and issubclass(call, nn.Module):
        return {}
    return {name: value for name, value in arguments.items() if name in names}
