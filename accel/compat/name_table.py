"""The table of the mirror: the names that each of Accelerate's modules defines, and their homes in accel.

A row per module of Accelerate has the home of each name it defines. `accelerate` and `accelerate.utils`
collect names of the others. Any other name is unavailable; docs/migrating.md lists it with the reason, which
tests/compat/test_surface.py checks.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple


class Home(NamedTuple):
    """The home of a name: a module, and the name in it."""

    module: str
    name: str


TABLE: dict[str, dict[str, str]] = {
    "accelerate.accelerator": {"accel.accelerator": "Accelerator"},
    "accelerate.big_modeling": {
        "accel.big_models": "attach_layerwise_casting_hooks cpu_offload cpu_offload_with_hook disk_offload "
        "dispatch_model init_empty_weights init_on_device load_checkpoint_and_dispatch",
    },
    "accelerate.checkpointing": {
        "accel.compat.checkpointing": "load_accelerator_state load_custom_state save_accelerator_state "
        "save_custom_state",
    },
    "accelerate.commands": {},
    "accelerate.commands.config": {"accel.compat.commands": "default_config_file load_config_from_file"},
    "accelerate.commands.config.config_args": {
        "accel.compat.commands": "cache_dir default_config_file default_json_config_file default_yaml_config_file "
        "load_config_from_file",
    },
    "accelerate.commands.estimate": {"accel.big_models.sizes": "estimate_training_usage"},
    "accelerate.commands.launch": {"accel.compat.commands": "launch_command launch_command_parser main"},
    "accelerate.data_loader": {
        "accel.data": "BatchSamplerShard DataLoaderAdapter DataLoaderDispatcher DataLoaderShard DataLoaderStateMixin "
        "get_sampler IterableDatasetShard prepare_data_loader SeedableRandomSampler skip_first_batches "
        "SkipBatchSampler SkipDataLoader",
    },
    "accelerate.hooks": {
        "accel.big_models": "add_hook_to_module AlignDevicesHook attach_align_device_hook "
        "attach_align_device_hook_on_blocks attach_execution_device_hook CpuOffload LayerwiseCastingHook ModelHook "
        "remove_hook_from_module remove_hook_from_submodules SequentialHook UserCpuOffloadHook",
    },
    "accelerate.inference": {
        "accel.inference": "build_pipeline find_pippy_batch_size generate_device_map pippy_forward prepare_pippy",
    },
    "accelerate.launchers": {"accel.launch.function": "debug_launcher notebook_launcher test_launch"},
    "accelerate.local_sgd": {"accel.local_sgd": "LocalSGD"},
    "accelerate.logging": {"accel.logging": "MultiProcessAdapter get_logger"},
    "accelerate.memory_utils": {},
    "accelerate.optimizer": {
        "accel.training.optimizer": "AcceleratedOptimizer",
        "accel.compat.helpers": "move_to_device",
    },
    "accelerate.parallelism_config": {"accel.plugins.parallelism": "ParallelismConfig"},
    "accelerate.scheduler": {"accel.training.optimizer": "AcceleratedScheduler"},
    "accelerate.state": {"accel.state": "AcceleratorState GradientState PartialState do_nothing is_initialized"},
    "accelerate.test_utils": {},
    "accelerate.test_utils.testing": {
        "accel.compat.testing":
        "AccelerateTestCase are_the_same_tensors assert_exception capture_call_output DEFAULT_LAUNCH_COMMAND "
        "device_count execute_subprocess_async get_backend get_launch_command get_torch_dist_unique_port "
        "memory_allocated_func MockingTestCase path_in_accelerate_package pytest_xdist_worker_id require_aim "
        "require_bnb require_clearml require_comet_ml require_cpu require_cuda require_cuda_or_hpu "
        "require_cuda_or_xpu require_datasets require_deepspeed require_dvclive require_fp16 require_fp8 "
        "require_fsdp2 require_huggingface_suite require_import_timer require_matplotlib require_mlflow require_mlu "
        "require_mps require_multi_device require_multi_gpu require_multi_gpu_or_xpu require_multi_xpu require_musa "
        "require_neuron require_non_cpu require_non_hpu require_non_torch_xla require_non_xpu require_npu "
        "require_pandas require_peft require_pippy require_schedulefree require_sdaa require_single_device "
        "require_single_gpu require_single_xpu require_swanlab require_tensorboard require_timm "
        "require_torch_min_version require_torchao require_torchdata_stateful_dataloader require_torchvision "
        "require_tp require_tpu require_trackers require_trackio require_transformer_engine "
        "require_transformer_engine_mxfp8 require_transformers require_triton require_wandb require_xpu run_command "
        "run_first skip slow SubprocessCallException TempDirTestCase torch_device",
    },
    "accelerate.tracking": {
        "accel.tracking": "AimTracker ClearMLTracker CometMLTracker DVCLiveTracker filter_trackers GeneralTracker "
        "get_available_trackers LOGGER_TYPE_TO_CLASS MLflowTracker on_main_process register_tracker_class "
        "SwanLabTracker TensorBoardTracker TrackioTracker WandBTracker",
    },
    "accelerate.utils": {},
    "accelerate.utils.ao": {
        "accel.precision.float8": "convert_model_to_fp8_ao filter_first_and_last_linear_layers filter_linear_layers "
        "find_first_last_linear_layers has_ao_layers",
    },
    "accelerate.utils.bnb": {
        "accel.big_models.quantised": "get_keys_to_not_convert get_parameter_device get_quantized_model_device_map "
        "has_4bit_bnb_layers load_and_quantize_model replace_with_bnb_layers",
        "accel.big_models.load": "quantize_and_offload_8bit",
    },
    "accelerate.utils.constants": {
        "accel.checkpoint.file_names": "MODEL_NAME OPTIMIZER_NAME RNG_STATE_NAME SAFE_MODEL_NAME "
        "SAFE_WEIGHTS_INDEX_NAME SAFE_WEIGHTS_NAME SAFE_WEIGHTS_PATTERN_NAME SAMPLER_NAME SCALER_NAME SCHEDULER_NAME "
        "WEIGHTS_INDEX_NAME WEIGHTS_NAME WEIGHTS_PATTERN_NAME",
        "accel.accelerator.trackers": "PROFILE_PATTERN_NAME",
        "accel.compat.constants": "BETA_CP_AVAILABLE_PYTORCH_VERSION BETA_SP_AVAILABLE_DEEPSPEED_VERSION "
        "BETA_TP_AVAILABLE_PYTORCH_VERSION BETA_TP_AVAILABLE_TRANSFORMERS_VERSION CUDA_DISTRIBUTED_TYPES "
        "DTENSOR_PYTORCH_VERSION ELASTIC_LOG_LINE_PREFIX_TEMPLATE_PYTORCH_VERSION FSDP2_PYTORCH_VERSION "
        "FSDP2_STATE_DICT_TYPE FSDP_AUTO_WRAP_POLICY FSDP_BACKWARD_PREFETCH FSDP_MODEL_NAME FSDP_PYTORCH_VERSION "
        "FSDP_SHARDING_STRATEGY FSDP_STATE_DICT_TYPE MITA_PROFILING_AVAILABLE_PYTORCH_VERSION "
        "SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING TORCH_DISTRIBUTED_OPERATION_TYPES TORCH_DYNAMO_MODES "
        "XPU_PROFILING_AVAILABLE_PYTORCH_VERSION",
    },
    "accelerate.utils.dataclasses": {
        "accel.enums": "BaseEnum ComputeEnvironment CustomDtype DDPCommunicationHookType DistributedType DynamoBackend "
        "EnumWithContains FP8BackendType LoggerType PrecisionType RNGType SageMakerDistributedType",
        "accel.plugins": "AutocastKwargs DataLoaderConfiguration DistributedDataParallelKwargs "
        "GradientAccumulationPlugin GradScalerKwargs InitProcessGroupKwargs KwargsHandler ProfileKwargs "
        "ProjectConfiguration TorchDynamoPlugin",
        "accel.collectives.operations": "TensorInformation",
        "accel.fp8_recipes": "AORecipeKwargs FP8RecipeKwargs MSAMPRecipeKwargs TERecipeKwargs",
        "accel.plugins.bnb": "BnbQuantizationConfig",
        "accel.plugins.deepspeed": "DeepSpeedPlugin",
        "accel.plugins.fsdp": "FullyShardedDataParallelPlugin",
        "accel.plugins.megatron": "MegatronLMPlugin",
        "accel.plugins.parallelism": "DeepSpeedSequenceParallelConfig TorchContextParallelConfig "
        "TorchTensorParallelConfig TorchTensorParallelPlugin",
        "accel.compat.helpers": "get_module_class_from_name",
    },
    "accelerate.utils.deepspeed": {
        "accel.plugins.deepspeed": "DummyOptim DummyScheduler HfDeepSpeedConfig get_active_deepspeed_plugin",
        "accel.training.optimizer": "DeepSpeedSchedulerWrapper",
        "accel.parallel.deepspeed_engine": "DeepSpeedEngineWrapper",
        "accel.parallel.deepspeed_settings": "map_pytorch_optim_to_deepspeed",
        "accel.compat.helpers": "DeepSpeedOptimizerWrapper",
    },
    "accelerate.utils.environment": {
        "accel.world.environment": "are_libraries_initialized clear_environment convert_dict_to_env_variables "
        "get_int_from_env parse_choice_from_env parse_flag_from_env patch_environment purge_accelerate_environment "
        "str_to_bool",
        "accel.world.hardware": "check_cuda_fp8_capability check_cuda_p2p_ib_support CPUInformation "
        "get_cpu_distributed_information get_current_device_type get_driver_version get_gpu_info "
        "override_numa_affinity set_numa_affinity",
    },
    "accelerate.utils.fsdp_utils": {
        "accel.compat.fsdp_checkpoints": "load_fsdp_model load_fsdp_optimizer save_fsdp_model save_fsdp_optimizer",
        "accel.compat.helpers": "disable_fsdp_ram_efficient_loading enable_fsdp_ram_efficient_loading "
        "get_fsdp2_grad_scaler get_parameters_from_modules",
        "accel.checkpoint.merge": "merge_fsdp_weights",
    },
    "accelerate.utils.imports": {
        "accel.world.available": "deepspeed_required is_4bit_bnb_available is_8bit_bnb_available is_aim_available "
        "is_amdsmi_available is_bf16_available is_bitsandbytes_multi_backend_available is_bnb_available "
        "is_boto3_available is_clearml_available is_comet_ml_available is_cuda_available is_datasets_available "
        "is_deepspeed_available is_dvclive_available is_fp16_available is_fp8_available is_habana_gaudi1 "
        "is_hpu_available is_import_timer_available is_lomo_available is_matplotlib_available "
        "is_megatron_lm_available is_mlflow_available is_mlu_available is_mps_available is_msamp_available "
        "is_musa_available is_neuron_available is_npu_available is_numpy_available is_pandas_available "
        "is_peft_available is_pippy_available is_pynvml_available is_pytest_available is_rich_available "
        "is_rocm_available is_sagemaker_available is_schedulefree_available is_sdaa_available is_swanlab_available "
        "is_tensorboard_available is_timm_available is_torch_distributed_available is_torch_xla_available "
        "is_torchao_available is_torchdata_available is_torchdata_stateful_dataloader_available "
        "is_torchvision_available is_tqdm_available is_trackio_available is_transformer_engine_available "
        "is_transformer_engine_mxfp8_available is_transformers_available is_triton_available is_wandb_available "
        "is_weights_only_available is_xccl_available is_xpu_available torchao_required",
    },
    "accelerate.utils.launch": {"accel.launch.function": "PrepareForLaunch"},
    "accelerate.utils.megatron_lm": {
        "accel.plugins.megatron": "MegatronLMDummyScheduler",
        "accel.parallel.megatron_engine": "AbstractTrainStep GPTTrainStep MegatronEngine "
        "avg_losses_across_data_parallel_group gather_across_data_parallel_groups",
    },
    "accelerate.utils.memory": {
        "accel.memory": "clear_device_cache find_executable_batch_size release_memory should_reduce_batch_size",
    },
    "accelerate.utils.modeling": {
        "accel.big_models": "align_module_device calculate_maximum_sizes check_device_map check_device_same "
        "check_tied_parameters_in_config check_tied_parameters_on_same_device clean_device_map compute_module_sizes "
        "compute_module_total_buffer_size convert_file_size_to_int dtype_byte_size fallback_allocate "
        "find_tied_parameters get_balanced_memory get_max_layer_size get_max_memory get_module_leaves "
        "get_module_size_with_ties get_non_persistent_buffers get_state_dict_from_offload "
        "get_state_dict_offloaded_model has_offloaded_params id_tensor_storage infer_auto_device_map "
        "load_checkpoint_in_model load_offloaded_weights load_state_dict named_module_tensors retie_parameters "
        "set_module_tensor_to_device",
        "accel.compat.helpers": "_get_proper_dtype get_grad_scaler get_mixed_precision_context_manager is_peft_model",
    },
    "accelerate.utils.offload": {
        "accel.big_models": "extract_submodules_state_dict load_offloaded_weight offload_state_dict offload_weight "
        "OffloadedWeightsLoader PrefixedDataset save_offload_index",
    },
    "accelerate.utils.operations": {
        "accel.collectives": "broadcast broadcast_object_list CannotPadNestedTensorWarning concatenate "
        "copy_tensor_to_devices gather gather_object gather_tensor_shape pad_across_processes reduce",
        "accel.collectives.operations": "find_batch_size find_device get_data_structure get_shape "
        "ignorant_find_batch_size initialize_tensors is_tensor_information is_torch_tensor listify "
        "pad_input_tensors recursively_apply",
        "accel.pytree": "honor_type is_namedtuple send_to_device slice_tensors",
        "accel.precision.outputs": "convert_outputs_to_fp32 convert_to_fp32 ConvertOutputsToFp32",
        "accel.compat.helpers": "chained_operation DistributedOperationException GatheredParameters verify_operation",
    },
    "accelerate.utils.other": {
        "accel.training.introspection": "get_module_children_bottom_up get_pretty_name merge_dicts model_has_dtensor "
        "recursive_getattr",
        "accel.world.ports": "check_os_kernel get_free_port is_port_in_use",
        "accel.memory": "convert_bytes",
        "accel.collectives": "wait_for_everyone",
        "accel.checkpoint": "clean_state_dict_for_safetensors load save",
        "accel.training.compile": "compile_regions has_compiled_regions has_repeated_blocks is_repeated_blocks",
        "accel.parallel.unwrap": "extract_model_from_parallel is_compiled_module",
        "accel.compat.commands": "write_basic_config",
        "accel.compat.helpers": "compile_regions_deepspeed compile_regions_fsdp2",
    },
    "accelerate.utils.random": {"accel.collectives.rng": "set_seed synchronize_rng_state synchronize_rng_states"},
    "accelerate.utils.tqdm": {"accel.progress": "tqdm"},
    "accelerate.utils.transformer_engine": {
        "accel.precision.transformer_engine": "apply_fp8_autowrap contextual_fp8_autocast convert_model "
        "has_transformer_engine_layers",
    },
    "accelerate.utils.versions": {"accel.world.versions": "STR_OPERATION_TO_FUNC compare_versions is_torch_version"},
}  # fmt: skip

# Names that one module defines and another calls: a patch of Accelerate's name must reach the caller.
SEEN_FROM = {
    ("accelerate.big_modeling", "check_device_map"): Home("accel.big_models.dispatch", "check_device_map"),
}

# The names of `accelerate` itself. `accelerate.utils` has those of all its submodules.
_TOP = (
    "Accelerator AutocastKwargs DDPCommunicationHookType DataLoaderConfiguration DeepSpeedPlugin "
    "DistributedDataParallelKwargs DistributedType FullyShardedDataParallelPlugin GradScalerKwargs "
    "InitProcessGroupKwargs ParallelismConfig PartialState ProfileKwargs cpu_offload cpu_offload_with_hook "
    "debug_launcher disk_offload dispatch_model find_executable_batch_size infer_auto_device_map init_empty_weights "
    "init_on_device is_rich_available load_checkpoint_and_dispatch load_checkpoint_in_model notebook_launcher "
    "prepare_pippy skip_first_batches synchronize_rng_states"
).split()


def where_to_read() -> str:
    """Return the sentence that points to the list of unavailable names."""
    return "docs/migrating.md lists the names of Accelerate 1.15 that are unavailable, and why"


def is_module(name: str) -> bool:
    """Return True if Accelerate's module of this name is mirrored."""
    return name == "accelerate" or name in TABLE


@cache
def is_package(name: str) -> bool:
    """Return True if the module has submodules."""
    return any(module.startswith(f"{name}.") for module in TABLE)


@cache
def names_of(module: str) -> list[str]:
    """Return the names in a module of the mirror, without submodules."""
    if module == "accelerate":
        return list(_TOP)
    names = [name for _, name in _homes(module)]
    if module == "accelerate.test_utils":
        names += names_of("accelerate.test_utils.testing")
    if module == "accelerate.utils":
        names += [name for part in TABLE if part.startswith("accelerate.utils.") for name in names_of(part)]
        names.append("ParallelismConfig")
    names += [name for part, name in SEEN_FROM if part == module and name not in names]
    return names


def find(module: str, name: str) -> Home | None:
    """Return the home of ``name`` in ``module``; ``None`` if that module has no such name.

    Accelerate's modules also expose their imports from each other, and scripts use them (``from accelerate.state
    import DistributedType``): all modules but the two that collect resolve every known name.
    """
    special = SEEN_FROM.get((module, name))
    if special is not None:
        return special
    table_module = "accelerate.test_utils.testing" if module == "accelerate.test_utils" else module
    match = next((Home(origin, exported) for origin, exported in _homes(table_module) if exported == name), None)
    if match is not None or (module in ("accelerate", "accelerate.utils") and name not in names_of(module)):
        return match
    return _everywhere().get(name)


@cache
def _homes(module: str) -> list[tuple[str, str]]:
    return [(origin, name) for origin, names in TABLE.get(module, {}).items() for name in names.split()]


@cache
def _everywhere() -> dict[str, Home]:
    return {
        name: Home(origin, name)
        for module in TABLE
        if not module.startswith(("accelerate.commands", "accelerate.test_utils")) or module.endswith("config_args")
        for origin, name in _homes(module)
    }
