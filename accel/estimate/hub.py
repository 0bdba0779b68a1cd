"""Models on the Hugging Face Hub, from their config.json alone, and models of timm."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from accel.errors import nearest
from accel.estimate.model_source import NotFound, Subject


def fetch_config(name: str) -> str:
    """Return the folder of the Hub's cache with the config.json of ``name``, downloading it if needed.

    Raises `NotFound` with a line for each cause: no such name, no access, no network.
    """
    if find_spec("huggingface_hub") is None:
        raise NotFound(f"{name} is no file or directory, and a name on the Hub needs: pip install huggingface_hub")
    try:
        from huggingface_hub import constants, errors, hf_hub_download
        from huggingface_hub.utils import logging
    except Exception as error:
        raise NotFound(f"{name}: huggingface_hub cannot be imported: {type(error).__name__}: {error}") from None

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # it would tell of every attempt
    where = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    try:
        return _without_network(name) or os.path.dirname(hf_hub_download(name, "config.json"))
    except errors.GatedRepoError:
        raise NotFound(f"{name} is gated: ask for access on its page, then log in: hf auth login") from None
    except errors.RepositoryNotFoundError:
        raise NotFound(
            f"{name}: no such file, directory or model on {where}; a private one needs: hf auth login"
        ) from None
    except (_Unreachable, errors.LocalEntryNotFoundError):
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"{where} cannot be reached"
        raise NotFound(f"{name}: {why}, and its config.json is not in the cache") from None
    except errors.EntryNotFoundError:
        raise NotFound(f"{name} has no config.json on {where}: name one of its safetensors files instead") from None
    except errors.HFValidationError:
        raise NotFound(f"{name!r} is no file or directory here, and no name that a model on the Hub can have") from None
    except (OSError, errors.HfHubHTTPError) as error:
        raise NotFound(f"{name}: {where} failed: {' '.join(str(error).split())}") from None


class _Unreachable(Exception):
    pass


def _without_network(name: str) -> str | None:
    """Return the cache's folder at once if the Hub does not respond: `hf_hub_download` retries for half a minute.

    None if it responds, whatever the response. Raises `_Unreachable` if the cache has nothing either.
    """
    from huggingface_hub import errors, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache

    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json"))
    except (errors.HfHubHTTPError, errors.EntryNotFoundError, errors.HFValidationError):
        return None
    except Exception:  # the connection's own errors: requests', httpx's or the system's, by the version of the package
        cached = try_to_load_from_cache(name, "config.json")
        if not isinstance(cached, str):
            raise _Unreachable from None
        return os.path.dirname(cached)
    return None


def read_config(folder: str) -> Mapping[str, Any]:
    path = os.path.join(folder, "config.json")
    try:
        with open(path, "rb") as file:
            found = json.load(file)
    except OSError as error:
        raise NotFound(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise NotFound(f"{path} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise NotFound(f"{path} does not describe a model")
    return found


def timm_knows(name: str) -> bool:
    """Return True if timm can be imported and has a model of that name."""
    if find_spec("timm") is None:
        return False
    try:
        timm: Any = import_module("timm")
    except Exception:
        return False
    return bool(timm.is_model(name))


def of_timm(name: str, config: Mapping[str, Any] | None = None) -> Subject:
    """Return a model of timm, by its name or by a config.json in timm's form. Raises `NotFound`."""
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
    given = {key: config[key] for key in ("num_classes", "global_pool") if key in config} | config.get("model_args", {})

    def inputs(model: nn.Module, batch: int, length: int) -> Mapping[str, Any]:
        shape = (getattr(model, "pretrained_cfg", None) or {}).get("input_size", (3, 224, 224))
        return {"x": torch.zeros(batch, *shape)}

    return Subject(
        name=name,
        library="timm",
        make=lambda: timm.create_model(architecture, pretrained=False, **given),
        inputs=inputs,
    )
