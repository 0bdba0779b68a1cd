"""Models larger than memory: empty weights, device maps, loading piece by piece, offload to host and disk.

Like ``accel`` itself, the package is a table: a name is imported from its module on first access.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

_NAMES_IN = {
    "align": "AlignDevicesHook align_module_device attach_align_device_hook attach_align_device_hook_on_blocks "
    "attach_execution_device_hook has_offloaded_params",
    "max_memory": "available_host_memory get_balanced_memory get_max_memory get_module_leaves",
    "casting": "LayerwiseCastingHook attach_layerwise_casting_hooks",
    "device_map": "check_device_map check_tied_parameters_on_same_device clean_device_map fallback_allocate "
    "get_module_size_with_ties infer_auto_device_map",
    "devices": "as_device check_device_same",
    "dispatch": "cpu_offload cpu_offload_with_hook disk_offload dispatch_model load_checkpoint_and_dispatch",
    "sizes": "Estimate calculate_maximum_sizes compute_module_sizes compute_module_total_buffer_size "
    "convert_file_size_to_int dtype_byte_size estimate_model estimate_training_usage get_max_layer_size",
    "hooks": "CpuOffload ModelHook SequentialHook UserCpuOffloadHook add_hook_to_module remove_hook_from_module "
    "remove_hook_from_submodules",
    "init": "init_empty_weights init_on_device",
    "load": "get_state_dict_from_offload get_state_dict_offloaded_model load_checkpoint_in_model "
    "load_offloaded_weights",
    "module_tensors": "check_tied_parameters_in_config find_tied_parameters get_non_persistent_buffers "
    "id_tensor_storage named_module_tensors retie_parameters set_module_tensor_to_device",
    "quantised": "load_and_quantize_model",
    "offload": "OffloadedWeightsLoader PrefixedDataset extract_submodules_state_dict load_offloaded_weight "
    "offload_state_dict offload_weight save_offload_index",
    "checkpoint_shards": "load_state_dict",
}
_HOME_OF = {name: f"accel.big_models.{module}" for module, names in _NAMES_IN.items() for name in names.split()}

__all__ = [
    "AlignDevicesHook",
    "CpuOffload",
    "Estimate",
    "LayerwiseCastingHook",
    "ModelHook",
    "OffloadedWeightsLoader",
    "PrefixedDataset",
    "SequentialHook",
    "UserCpuOffloadHook",
    "add_hook_to_module",
    "align_module_device",
    "as_device",
    "attach_align_device_hook",
    "attach_align_device_hook_on_blocks",
    "attach_execution_device_hook",
    "attach_layerwise_casting_hooks",
    "available_host_memory",
    "calculate_maximum_sizes",
    "check_device_map",
    "check_device_same",
    "check_tied_parameters_in_config",
    "check_tied_parameters_on_same_device",
    "clean_device_map",
    "compute_module_sizes",
    "compute_module_total_buffer_size",
    "convert_file_size_to_int",
    "cpu_offload",
    "cpu_offload_with_hook",
    "disk_offload",
    "dispatch_model",
    "dtype_byte_size",
    "estimate_model",
    "estimate_training_usage",
    "extract_submodules_state_dict",
    "fallback_allocate",
    "find_tied_parameters",
    "get_balanced_memory",
    "get_max_layer_size",
    "get_max_memory",
    "get_module_leaves",
    "get_module_size_with_ties",
    "get_non_persistent_buffers",
    "get_state_dict_from_offload",
    "get_state_dict_offloaded_model",
    "has_offloaded_params",
    "id_tensor_storage",
    "infer_auto_device_map",
    "init_empty_weights",
    "init_on_device",
    "load_and_quantize_model",
    "load_checkpoint_and_dispatch",
    "load_checkpoint_in_model",
    "load_offloaded_weight",
    "load_offloaded_weights",
    "load_state_dict",
    "named_module_tensors",
    "offload_state_dict",
    "offload_weight",
    "remove_hook_from_module",
    "remove_hook_from_submodules",
    "retie_parameters",
    "save_offload_index",
    "set_module_tensor_to_device",
]

if TYPE_CHECKING:
    from accel.big_models.align import (
        AlignDevicesHook,
        align_module_device,
        attach_align_device_hook,
        attach_align_device_hook_on_blocks,
        attach_execution_device_hook,
        has_offloaded_params,
    )
    from accel.big_models.casting import LayerwiseCastingHook, attach_layerwise_casting_hooks
    from accel.big_models.checkpoint_shards import load_state_dict
    from accel.big_models.device_map import (
        check_device_map,
        check_tied_parameters_on_same_device,
        clean_device_map,
        fallback_allocate,
        get_module_size_with_ties,
        infer_auto_device_map,
    )
    from accel.big_models.devices import as_device, check_device_same
    from accel.big_models.dispatch import (
        cpu_offload,
        cpu_offload_with_hook,
        disk_offload,
        dispatch_model,
        load_checkpoint_and_dispatch,
    )
    from accel.big_models.hooks import (
        CpuOffload,
        ModelHook,
        SequentialHook,
        UserCpuOffloadHook,
        add_hook_to_module,
        remove_hook_from_module,
        remove_hook_from_submodules,
    )
    from accel.big_models.init import init_empty_weights, init_on_device
    from accel.big_models.load import (
        get_state_dict_from_offload,
        get_state_dict_offloaded_model,
        load_checkpoint_in_model,
        load_offloaded_weights,
    )
    from accel.big_models.max_memory import (
        available_host_memory,
        get_balanced_memory,
        get_max_memory,
        get_module_leaves,
    )
    from accel.big_models.module_tensors import (
        check_tied_parameters_in_config,
        find_tied_parameters,
        get_non_persistent_buffers,
        id_tensor_storage,
        named_module_tensors,
        retie_parameters,
        set_module_tensor_to_device,
    )
    from accel.big_models.offload import (
        OffloadedWeightsLoader,
        PrefixedDataset,
        extract_submodules_state_dict,
        load_offloaded_weight,
        offload_state_dict,
        offload_weight,
        save_offload_index,
    )
    from accel.big_models.quantised import load_and_quantize_model
    from accel.big_models.sizes import (
        Estimate,
        calculate_maximum_sizes,
        compute_module_sizes,
        compute_module_total_buffer_size,
        convert_file_size_to_int,
        dtype_byte_size,
        estimate_model,
        estimate_training_usage,
        get_max_layer_size,
    )


def __getattr__(name: str) -> object:
    module_name = _HOME_OF.get(name)
    if module_name is None:
        raise AttributeError(f"module 'accel.big_models' has no attribute {name!r}")
    value: object = getattr(import_module(module_name), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
