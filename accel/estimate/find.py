"""Resolution of a name to a model: a file, a directory, a factory, or a name on the Hub."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from accel.errors import ArgumentError, one_of
from accel.estimate import hub
from accel.estimate.model_source import NotFound, Subject
from accel.estimate.safetensors_files import of_directory, of_file
from accel.estimate.transformers_models import of_config

LIBRARIES = ("transformers", "timm")


def find(name: str, library: str | None = None, *, trust_remote_code: bool = False) -> Subject:
    """Return the model for ``name``: a safetensors file, a directory, ``module:factory``, or a name on the Hub.

    Raises `NotFound` or `ArgumentError`, in one line.
    """
    if name.endswith(".py") and os.path.isfile(name):
        module = os.path.splitext(os.path.normpath(name))[0].replace(os.sep, ".")
        raise NotFound(f"{name} is code: name what makes the model in it, as in {module}:FACTORY")
    if name.endswith((".safetensors", ".safetensors.index.json")) or os.path.isfile(name):
        return of_file(name)
    if os.path.isdir(name):
        return _of_directory(name, library, trust_remote_code)
    if name.startswith((".", "/", "~")):
        raise NotFound(f"{name}: no such file or directory")
    module, colon, factory = name.partition(":")
    if colon and module not in ("hf-hub", "hf_hub"):
        return of_factory(name, module, factory)
    if library == "timm" or (library is None and "/" not in name and hub.timm_knows(name)):
        return hub.of_timm(name)
    folder = hub.fetch_config(name.removeprefix("hf-hub:").removeprefix("hf_hub:"))
    return _by_config(name, folder, library, trust_remote_code)


def _of_directory(path: str, library: str | None, trust_remote_code: bool) -> Subject:
    if os.path.isfile(os.path.join(path, "config.json")):
        from importlib.util import find_spec

        if library or find_spec("transformers") or not any(n.endswith(".safetensors") for n in os.listdir(path)):
            return _by_config(path, path, library, trust_remote_code)
    return of_directory(path)


def _by_config(name: str, folder: str, library: str | None, trust_remote_code: bool) -> Subject:
    config = hub.read_config(folder)
    if library is None:
        library = "timm" if "architecture" in config and "model_type" not in config else "transformers"
    if one_of(library, LIBRARIES, what="--library_name") == "timm":
        return hub.of_timm(name, config)
    return of_config(name, folder, config, trust_remote_code=trust_remote_code)


def of_factory(name: str, module: str, factory: str) -> Subject:
    """Return the model of ``module:factory``, which returns a model, or a model and its forward's arguments.

    It is called with ``batch_size`` and ``sequence_length`` if it has such parameters, else without arguments.
    """
    import importlib

    sys.path[:0] = [""] if "" not in sys.path else []  # the current directory, as for `python -m`
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise NotFound(f"{name}: no module {error.name!r} here") from None
    except Exception as error:
        raise NotFound(f"{name}: module {module} cannot be imported: {type(error).__name__}: {error}") from error
    for part in factory.split("."):
        found = getattr(found, part, None)  # type: ignore[assignment]
    if not callable(found):
        raise NotFound(f"{name}: module {module} has no function or class {factory!r}")
    call: Callable[..., Any] = found

    def make(batch_size: int = 1, sequence_length: int = 1) -> tuple[nn.Module, Mapping[str, Any] | None]:
        made = call(**_wanted(call, batch_size=batch_size, sequence_length=sequence_length))
        model, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
        if not isinstance(model, nn.Module):
            raise ArgumentError(f"{name} gives a {type(model).__name__}, not a torch.nn.Module")
        if inputs is not None and not isinstance(inputs, Mapping):
            raise ArgumentError(f"{name}: the inputs beside the model are a {type(inputs).__name__}, not a mapping")
        return model, inputs

    def inputs(model: nn.Module, batch: int, length: int) -> Mapping[str, Any]:
        given = make(batch, length)[1]
        if given is None:
            raise NotFound(f"{name} gives no inputs: let it return (model, inputs)")
        return given

    return Subject(name=name, library="torch", make=lambda: make()[0], inputs=inputs)


def _wanted(call: Callable[..., Any], **given: Any) -> dict[str, Any]:
    try:
        names = inspect.signature(call).parameters
    except (TypeError, ValueError):
        return {}
    if isinstance(call, type) and issubclass(call, nn.Module):
        return {}
    return {name: value for name, value in given.items() if name in names}
