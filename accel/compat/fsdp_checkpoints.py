"""Checkpoints of sharded models in Accelerate's layout, for exchange with other programs.

SHARDED_STATE_DICT is a folder of `torch.distributed.checkpoint` (DCP) for each model and optimizer,
FULL_STATE_DICT a file of full tensors. Unlike these, checkpoints of `Accelerator.save_state` are verified when read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.nn.modules.module import _IncompatibleKeys

from accel.checkpoint import save
from accel.checkpoint.all_ranks import run_on_all_ranks
from accel.checkpoint.chunks import (
    Chunks,
    NameOf,
    names_of,
    outline_full_state,
    plan_full_optimizer,
    plan_module,
    plan_optimizer,
    split_optimizer,
)
from accel.checkpoint.dcp import DcpFolder, write_dcp
from accel.checkpoint.file_names import OPTIMIZER_NAME, numbered_name
from accel.checkpoint.weights import read_state_dict
from accel.compat.constants import FSDP_MODEL_NAME
from accel.compat.helpers import is_peft_model
from accel.errors import ArgumentError, CheckpointError
from accel.parallel.shares import full_state, refuse_versions
from accel.pytree import join_tensors
from accel.tensor_files import read_object

_OUTLINE = "accel_outline"


def save_fsdp_model(
    fsdp_plugin: Any,
    accelerator: Any,
    model: Any,
    output_dir: Any,
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Write the weights of ``model`` to ``pytorch_model_fsdp_<index>/``, or full ones to ``pytorch_model_fsdp.bin``.

    The ``state_dict_type`` of ``fsdp_plugin`` selects the layout. ``adapter_only``: write only the adapter of a
    `peft.PeftModel`. Call it on every process. Replaces an older checkpoint. Raises `CheckpointError`.
    """
    full = _is_full(fsdp_plugin, use_dcp)
    path = _path_of(output_dir, FSDP_MODEL_NAME, model_index, full)
    state = _weights(accelerator, model, adapter_only, full)
    if full:
        _write_file(path, full_state(state, accelerator.is_main_process))
    else:
        write_dcp(path, {"model": state})


def load_fsdp_model(
    fsdp_plugin: Any,
    accelerator: Any,
    model: Any,
    input_dir: Any,
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> Any:
    """Load a checkpoint of `save_fsdp_model` or Accelerate, of any number of processes, into ``model``'s shards.

    Returns what `torch.nn.Module.load_state_dict` returns. Raises `CheckpointError`, on all processes, for a
    missing or damaged checkpoint, and for different names or shapes.
    """
    full = _is_full(fsdp_plugin, use_dcp)
    path = _path_of(input_dir, FSDP_MODEL_NAME, model_index, full)
    accelerator.strategy.finish_pending()
    unwrapped = accelerator.strategy.unwrap(model)
    adapter = _weights(accelerator, model, adapter_only, full) if _is_adapter(unwrapped, adapter_only) else None

    def fill() -> None:
        saved, extra = _read_weights(path, full)
        if adapter is None:
            plan_module(unwrapped, saved, extra)()
        for name, value in (adapter or {}).items():
            if name not in saved:
                raise CheckpointError(f"{saved.folder} lacks {name}")
            saved.fill(name, value)

    run_on_all_ranks("load_fsdp_model", fill)
    if adapter is None or full:
        return _IncompatibleKeys([], [])
    from peft import set_peft_model_state_dict

    return set_peft_model_state_dict(unwrapped, adapter, adapter_name=unwrapped.active_adapter)


def save_fsdp_optimizer(
    fsdp_plugin: Any,
    accelerator: Any,
    optimizer: Any,
    model: Any,
    output_dir: Any,
    optimizer_index: int = 0,
    use_dcp: bool = True,
) -> None:
    """Write the state of ``optimizer``, keyed by ``model``'s parameter names, to ``optimizer_<index>/``.

    Full state goes to ``optimizer.bin``. See `save_fsdp_model` for the rest.
    """
    full = _is_full(fsdp_plugin, use_dcp)
    path = _path_of(output_dir, OPTIMIZER_NAME, optimizer_index, full)
    outline, tensors = split_optimizer(optimizer, _name_of(accelerator, model))
    refuse_versions(outline["versions"])
    if full:
        tensors = full_state(tensors, accelerator.is_main_process)
        _write_file(path, join_tensors(outline["tree"], tensors) if accelerator.is_main_process else {})
    else:
        state = {"optimizer": _without_tuples(join_tensors(outline["tree"], tensors))}
        items = {id(tensor): item for item, tensor in flatten_state_dict(state)[0].items()}
        outline["items"] = {key_path: items[id(tensor)] for key_path, tensor in tensors.items()}
        write_dcp(path, {**state, _OUTLINE: (outline,)})  # DCP writes a tuple as it is


def load_fsdp_optimizer(
    fsdp_plugin: Any,
    accelerator: Any,
    optimizer: Any,
    model: Any,
    input_dir: Any,
    optimizer_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Load a checkpoint of `save_fsdp_optimizer` or Accelerate; ``optimizer`` need not have taken a step.

    ``adapter_only`` has no effect: a checkpoint has the state of the optimizer's parameters. Raises
    `CheckpointError`, on all processes, if it is missing, damaged or does not fit.
    """
    full = _is_full(fsdp_plugin, use_dcp)
    path = _path_of(input_dir, OPTIMIZER_NAME, optimizer_index, full)
    name_of = _name_of(accelerator, model)
    fill = _fill_from_file if full else _fill_from_folder
    run_on_all_ranks("load_fsdp_optimizer", lambda: fill(optimizer, name_of, path))


def _is_full(plugin: Any, use_dcp: bool) -> bool:
    if plugin is None:
        raise ArgumentError("fsdp_plugin is None: the run is not sharded. Use accelerator.save_state and load_state")
    full: bool = plugin.state_dict_type.name == "FULL_STATE_DICT"
    if not full and not use_dcp:
        raise ArgumentError(
            "use_dcp=False is not supported: its files fit only as many processes as wrote them. Remove it"
        )
    return full


def _path_of(folder: Any, name: str, index: int, full: bool) -> Path:
    """Return the file or folder of a model or an optimizer in ``folder``, or ``folder`` if it is that folder."""
    if full:
        return Path(folder) / numbered_name(f"{name}.bin", index)
    numbered = f"{name}_{index}"
    return Path(folder) if Path(folder).name == numbered else Path(folder) / numbered


def _is_adapter(model: Any, adapter_only: bool) -> bool:
    return adapter_only and is_peft_model(model)


def _weights(accelerator: Any, model: Any, adapter_only: bool, full: bool) -> dict[str, Any]:
    """Return the state dict of ``model`` or its adapter, which shares memory with it.

    Only in a DCP folder does Accelerate name the adapter's weights as peft does, without the adapter's own name.
    """
    accelerator.strategy.finish_pending()
    unwrapped = accelerator.strategy.unwrap(model)
    if _is_adapter(unwrapped, adapter_only) and not full:
        from peft import get_peft_model_state_dict

        adapter: dict[str, Any] = get_peft_model_state_dict(unwrapped, adapter_name=unwrapped.active_adapter)
        return adapter
    state: dict[str, Any] = unwrapped.state_dict(keep_vars=full)  # tied weights are then one tensor
    if not _is_adapter(unwrapped, adapter_only):
        return state
    frozen = {name for name, value in unwrapped.named_parameters(remove_duplicate=False) if not value.requires_grad}
    return {name: value for name, value in state.items() if name not in frozen}


def _name_of(accelerator: Any, model: Any) -> NameOf:
    accelerator.strategy.finish_pending()
    return names_of(
        accelerator.strategy.unwrap(model).named_parameters(),
        "is not in the model: prepare both, and pass the model that the optimizer was created for",
    )


def _write_file(path: Path, state: Any) -> None:
    def write() -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        save(state, path)

    run_on_all_ranks(f"saving {path}", write)


def _read_weights(path: Path, full: bool) -> tuple[Chunks, dict[str, Any]]:
    """Return the saved tensors of a model, and the rest of its state dict."""
    if full:
        return Chunks.of_state(read_state_dict(path), str(path))
    folder = _open_folder(path, "model")
    key_paths = {item: folder.paths[item] for item in folder.tensors.shapes}
    items = {key_path[1]: item for item, key_path in key_paths.items() if key_path[0] == "model" and len(key_path) == 2}
    return folder.tensors.renamed(items), folder.nested("model", skip=set(items.values()))


def _without_tuples(data: Any) -> Any:
    """Return ``data`` with lists in place of tuples: DCP finds tensors only in lists and dicts."""
    if isinstance(data, dict):
        return {key: _without_tuples(item) for key, item in data.items()}
    return [_without_tuples(item) for item in data] if isinstance(data, (list, tuple)) else data


def _fill_from_file(optimizer: Any, name_of: NameOf, path: Path) -> None:
    state = read_object(path, stored=True)
    if all(isinstance(number, int) for group in state["param_groups"] for number in group["params"]):
        plan_full_optimizer(optimizer, state, path)()  # by `save_state`, which numbers parameters
        return
    outline, tensors = outline_full_state(state)
    plan_optimizer(optimizer, name_of, outline, Chunks.single_chunk(tensors, str(path)))()


def _fill_from_folder(optimizer: Any, name_of: NameOf, path: Path) -> None:
    folder = _open_folder(path, "optimizer")
    outline = folder.read_object(_OUTLINE)
    if outline is not None:
        plan_optimizer(optimizer, name_of, outline[0], folder.tensors.renamed(outline[0]["items"]))()
        return
    items = {  # by Accelerate, or an older accel
        "".join(f"[{key!r}]" for key in folder.paths[item][1:]): item
        for item in folder.tensors.shapes
        if folder.paths[item][0] == "optimizer"
    }
    tree = {"state": {}, "param_groups": [], **folder.nested("optimizer", as_outline=True)}
    plan_optimizer(optimizer, name_of, outline_full_state(tree)[0], folder.tensors.renamed(items))()


def _open_folder(path: Path, key: str) -> DcpFolder:
    folder = DcpFolder(path)
    if not any(key_path[0] == key and len(key_path) > 1 for key_path in folder.paths.values()):
        raise CheckpointError(f"{path} has no {key}: pass the folder that save_fsdp_{key} wrote")
    return folder
