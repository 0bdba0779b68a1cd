"""Settings of DeepSpeed, and placeholders for the optimizer and scheduler of its configuration.

DeepSpeed is imported for modules of mixtures of experts only, when a model with them is prepared.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Literal

from accel.errors import ArgumentError, StateError, one_of
from accel.plugins.deepspeed_config import HfDeepSpeedConfig as HfDeepSpeedConfig
from accel.world.environment import read_flag

_DEVICES = ("none", "cpu", "nvme")
_HALVES = ("fp16", "bf16")


def _steps(value: Any, source: str) -> int | str:
    text = str(value).lower()
    if text == "auto" or (text.isdecimal() and int(text)):
        return text if text == "auto" else int(text)
    raise ArgumentError(f"{source}: {value!r} is neither a positive integer nor 'auto'")


def _norm(value: Any, source: str) -> float | str:
    if str(value).lower() == "auto":
        return "auto"
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = -1.0
    if not number >= 0:
        raise ArgumentError(f"{source}: {value!r} is neither a number of 0 or more nor 'auto'")
    return number


def _stage(value: Any, source: str) -> int:
    return int(one_of(str(value), ("0", "1", "2", "3"), source=source))


def _device(value: Any, source: str) -> str:
    return one_of(str(getattr(value, "value", value)).lower(), _DEVICES, source=source)


def _path(value: Any, source: str) -> str | None:
    return None if str(value) == "none" else os.fspath(value)


def _flag(value: Any, source: str) -> bool:
    return one_of(str(value).lower(), ("true", "false", "1", "0"), source=source) in ("true", "1")


@dataclass(frozen=True)
class _Field:
    """A field of the plug-in that is also a key of DeepSpeed's configuration."""

    env: str | None
    key: str
    read: Callable[[Any, str], Any]


_FIELDS = {
    # The variable sets the window of any `Accelerator` that does not set its own.
    "gradient_accumulation_steps": _Field(None, "gradient_accumulation_steps", _steps),
    "gradient_clipping": _Field("ACCELERATE_GRADIENT_CLIPPING", "gradient_clipping", _norm),
    "zero_stage": _Field("ACCELERATE_DEEPSPEED_ZERO_STAGE", "zero_optimization.stage", _stage),
    "offload_optimizer_device": _Field(
        "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "zero_optimization.offload_optimizer.device", _device
    ),
    "offload_param_device": _Field(
        "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE", "zero_optimization.offload_param.device", _device
    ),
    "offload_optimizer_nvme_path": _Field(
        "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH", "zero_optimization.offload_optimizer.nvme_path", _path
    ),
    "offload_param_nvme_path": _Field(
        "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH", "zero_optimization.offload_param.nvme_path", _path
    ),
    "zero3_save_16bit_model": _Field(
        "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL",
        "zero_optimization.stage3_gather_16bit_weights_on_model_save",
        _flag,
    ),
}
# Values of fields without a key in the configuration.
_ABSENT = {"zero_stage": 0, "zero3_save_16bit_model": False, "gradient_accumulation_steps": "auto"}


@dataclass
class DeepSpeedPlugin:
    """Settings of DeepSpeed. The fields are Accelerate's.

    Missing values are read from ``ACCELERATE_DEEPSPEED_ZERO_STAGE`` and so on.

    ``hf_ds_config``: DeepSpeed's own configuration: a JSON file, a dict, or base64 text of JSON. `Accelerator.prepare`
        replaces each ``"auto"`` in it; see docs/engines.md.
    ``gradient_accumulation_steps``: batches per optimizer step (default: those of the `Accelerator`).
    ``gradient_clipping``: the maximum norm of the gradients (default: they are not clipped).
    ``zero_stage``: shard nothing (0), the optimizer (1), gradients too (2, the default), parameters too (3).
    ``is_train_batch_min``: with several loaders, ``"auto"`` is the smallest batch size rather than the largest.
    ``zero3_init_flag``: `transformers` loads models in shards (default: at stage 3).
    ``zero3_save_16bit_model``: at stage 3, `Accelerator.save_model` and `get_state_dict` gather the weights.
    ``transformer_moe_cls_names``: names, separated by commas, of mixture-of-experts classes, whose parameters are
        gathered at once.

    Raises `ArgumentError` for an invalid value, and for a field that contradicts the configuration.
    """

    hf_ds_config: Any = None
    gradient_accumulation_steps: int = None  # type: ignore[assignment]
    gradient_clipping: float | None = None
    zero_stage: int = None  # type: ignore[assignment]
    is_train_batch_min: bool = True
    offload_optimizer_device: str = None  # type: ignore[assignment]
    offload_param_device: str = None  # type: ignore[assignment]
    offload_optimizer_nvme_path: str = None  # type: ignore[assignment]
    offload_param_nvme_path: str = None  # type: ignore[assignment]
    zero3_init_flag: bool = None  # type: ignore[assignment]
    zero3_save_16bit_model: bool = None  # type: ignore[assignment]
    transformer_moe_cls_names: str | None = None
    enable_msamp: bool = None  # type: ignore[assignment]
    msamp_opt_level: Literal["O1", "O2"] | None = None

    def __post_init__(self) -> None:
        if self.enable_msamp:
            raise ArgumentError("DeepSpeedPlugin(enable_msamp=True): MS-AMP is abandoned: use mixed_precision='bf16'")
        source = self.hf_ds_config
        if source is None:
            source = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE") or None
        if source is None or source == "none":
            self.hf_ds_config = HfDeepSpeedConfig(_default_config())
        elif not isinstance(source, HfDeepSpeedConfig):
            self.hf_ds_config = HfDeepSpeedConfig(source)
        self._merge(self._stated(), self.hf_ds_config, is_default=source in (None, "none"))
        self.hf_ds_config.set_stage_and_offload()
        self.deepspeed_config: dict[str, Any] = self.hf_ds_config.config
        self.deepspeed_config["steps_per_print"] = float("inf")  # DeepSpeed prints nothing
        self._check_offload()
        self._filled: list[str] = []  # keys whose "auto" was replaced
        self._selected = False
        if self.transformer_moe_cls_names is None:
            self.transformer_moe_cls_names = os.environ.get("ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES") or None
        if self.zero3_init_flag is None:
            self.zero3_init_flag = read_flag(
                os.environ, "ACCELERATE_DEEPSPEED_ZERO3_INIT", self.hf_ds_config.is_zero3()
            )
        if self.zero3_init_flag and not self.hf_ds_config.is_zero3():
            warnings.warn(f"zero3_init_flag has no effect at stage {self.zero_stage}: it is for stage 3", stacklevel=3)
            self.zero3_init_flag = False

    def _stated(self) -> dict[str, tuple[Any, str]]:
        """Return the fields that an argument or a variable sets, with the name of that."""
        stated = {}
        for name, field in _FIELDS.items():
            value, source = getattr(self, name), f"DeepSpeedPlugin({name}=…)"
            if value is None and field.env is not None:
                value, source = os.environ.get(field.env), f"environment variable {field.env}"
            if value is not None and value != "":
                stated[name] = field.read(value, source), source
        return stated

    def _merge(self, stated: Mapping[str, tuple[Any, str]], config: HfDeepSpeedConfig, is_default: bool) -> None:
        """Write the fields into ``config``, and its values into the fields."""
        if "zero_optimization" not in config.config and "zero_stage" not in stated:
            raise ArgumentError(f"{config.source}: zero_optimization is missing: set zero_optimization.stage")
        for name, field in _FIELDS.items():
            value, source = stated.get(name, (None, ""))
            present = config.get_value(field.key)
            if is_default or present in (None, "auto"):
                if value is not None:
                    config.set_value(field.key, value)
            elif value not in (None, "auto") and field.read(present, f"{config.source}: {field.key}") != value:
                raise ArgumentError(
                    f"{source} is {value!r}, but {field.key} is {present!r} in {config.source}: remove one of the two"
                )
        for name, default in (("zero_stage", 2), ("offload_optimizer_device", "none"), ("offload_param_device", "none"),
                              ("zero3_save_16bit_model", False)):  # fmt: skip
            if config.get_value(_FIELDS[name].key) == "auto":
                config.set_value(_FIELDS[name].key, default)
        for name, field in _FIELDS.items():
            value = config.get_value(field.key)
            source = f"{config.source}: {field.key}"
            setattr(self, name, _ABSENT.get(name) if value is None else field.read(value, source))

    def _check_offload(self) -> None:
        stage = self.zero_stage
        for kind in ("optimizer", "param"):
            device = getattr(self, f"offload_{kind}_device")
            if device in (None, "none"):
                continue
            if kind == "optimizer" and stage == 0:
                raise ArgumentError(
                    f"DeepSpeed: offload_optimizer_device={device!r} is for stages 1 to 3, not zero_stage=0"
                )
            if kind == "param" and stage != 3:  # files by `accelerate config` have it at stage 2
                warnings.warn(
                    f"offload_param_device={device!r} has no effect at stage {stage}: it is for stage 3", stacklevel=4
                )
            elif device == "nvme" and getattr(self, f"offload_{kind}_nvme_path") is None:
                raise ArgumentError(f"DeepSpeed: offload_{kind}_device='nvme' needs offload_{kind}_nvme_path")
            elif device == "nvme" and stage != 3:
                warnings.warn(
                    f"offload_{kind}_device='nvme' at stage {stage} uses the host's memory: disks are for stage 3",
                    stacklevel=4,
                )

    def is_auto(self, ds_key_long: str) -> bool:
        """Return True if the value of a key, such as ``"zero_optimization.stage"``, is ``"auto"``."""
        return bool(self.get_value(ds_key_long) == "auto")

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """Return the value of a key of the configuration."""
        return self.hf_ds_config.get_value(ds_key_long, default)

    def fill_match(
        self, ds_key_long: str, mismatches: list[str] | None = None, must_match: bool = True, **kwargs: Any
    ) -> None:
        """Replace an ``"auto"`` by the value of its key in ``kwargs``; list another value in ``mismatches``.

        Raises `ArgumentError` if ``kwargs`` has no value for an ``"auto"``.
        """
        node, key = self.hf_ds_config.find_config_node(ds_key_long)
        if node is None:
            return
        if node.get(key) == "auto":
            if ds_key_long not in kwargs:
                raise ArgumentError(f"DeepSpeed: there is no value for {ds_key_long}='auto': set a number")
            node[key] = kwargs[ds_key_long]
            return
        present = node.get(key)
        if must_match and mismatches is not None and present not in (None, kwargs.get(ds_key_long, present)):
            mismatches.append(f"{ds_key_long} is {present!r} in the configuration, not {kwargs[ds_key_long]!r}")

    def deepspeed_config_process(
        self,
        prefix: str = "",
        mismatches: list[str] | None = None,
        config: Mapping[str, Any] | None = None,
        must_match: bool = True,
        **kwargs: Any,
    ) -> None:
        """Replace every ``"auto"`` by the value of its key in ``kwargs``.

        Raises `ArgumentError`, in one line, for all that have none and, with ``must_match``, for other values.
        """
        mismatches = [] if mismatches is None else mismatches
        missing = []
        for name in _leaves(self.deepspeed_config if config is None else config, prefix):
            if self.is_auto(name) and kwargs.get(name) is None:
                missing.append(name)
            else:
                self.fill_match(name, mismatches, must_match, **kwargs)
        if missing:
            raise ArgumentError(
                f"DeepSpeed: there is no value for 'auto' in {', '.join(missing)}: set numbers. Batch sizes come from "
                "a data loader in the same prepare(), bucket sizes from model.config.hidden_size, and the rest from "
                "DummyOptim and DummyScheduler"
            )
        if mismatches:
            raise ArgumentError(f"DeepSpeed: {'; '.join(mismatches)}: set 'auto' in the configuration")

    def is_filled(self, key: str) -> bool:
        """Return True if the value of a key is ``"auto"``, or was before `fill` replaced it."""
        return self.is_auto(key) or key in self._filled

    def fill(self, values: Mapping[str, Any]) -> None:
        """Replace every ``"auto"`` by the value of its key, also those that an earlier call has replaced.

        Raises `ArgumentError`, in one line, for all that have none.
        """
        for name in self._filled:
            self.hf_ds_config.set_value(name, "auto")
        self._filled = [name for name in _leaves(self.deepspeed_config) if self.is_auto(name)]
        self.deepspeed_config_process(must_match=False, **values)

    def set_mixed_precision(self, mixed_precision: str) -> None:
        """Set the type in which the engine computes. Raises `ArgumentError` for a configuration that differs.

        With ``"fp8"``, all but the converted layers compute in bf16.
        """
        config = self.deepspeed_config
        enabled = "bf16" if mixed_precision == "fp8" else mixed_precision
        for half in _HALVES:
            # With auto_cast, DeepSpeed casts inputs to fp16 even where fp16 is off.
            cast = {"auto_cast": True} if half == enabled == "fp16" else {}
            section = config.setdefault(half, {"enabled": "auto", **cast})
            if enabled in _HALVES and half != enabled and _is_on(section):
                raise ArgumentError(
                    f"mixed_precision={mixed_precision!r}, but {half} is enabled in {self.hf_ds_config.source}: "
                    "remove one of the two"
                )
            if section.get("enabled") == "auto":
                section["enabled"] = half == enabled

    @property
    def mixed_precision(self) -> str:
        """``"fp16"``, ``"bf16"`` or ``"no"``, as the configuration has it."""
        return next((half for half in _HALVES if _is_on(self.deepspeed_config.get(half, {}))), "no")

    def set_moe_leaf_modules(self, model: Any) -> None:
        """Make stage 3 gather each mixture-of-experts layer of ``model`` at once."""
        if self.transformer_moe_cls_names is None:
            return
        names = [name.strip() for name in self.transformer_moe_cls_names.split(",")]
        classes = {type(module).__name__: type(module) for module in model.modules()}
        unknown = [name for name in names if name not in classes]
        if unknown:
            raise ArgumentError(f"transformer_moe_cls_names: the model has no module of class {', '.join(unknown)}")
        from deepspeed.utils import set_z3_leaf_modules

        set_z3_leaf_modules(model, [classes[name] for name in names])

    def select(self, _from_accelerator_state: bool = False) -> None:
        """Make `transformers` load models for this plug-in. Scripts call `AcceleratorState.select_deepspeed_plugin`."""
        if not _from_accelerator_state:
            raise StateError("DeepSpeedPlugin.select: call AcceleratorState().select_deepspeed_plugin(name)")
        self.set_deepspeed_weakref()
        self._selected = True

    @property
    def selected(self) -> bool:
        """True for the plug-in that the next `Accelerator.prepare` uses."""
        return self._selected

    @selected.setter
    def selected(self, value: bool) -> None:
        raise StateError("DeepSpeedPlugin.selected: call AcceleratorState().select_deepspeed_plugin(name)")

    def deselect(self) -> None:
        """Mark the plug-in as not selected."""
        self._selected = False

    def is_zero3_init_enabled(self) -> bool:
        """Return True if `transformers` loads models in shards."""
        return self.zero3_init_flag

    @contextmanager
    def zero3_init_context_manager(self, enable: bool = False) -> Iterator[None]:
        """Make `transformers` load models in shards in the block, or with ``enable=False`` whole."""
        previous = self.zero3_init_flag
        self.zero3_init_flag = enable
        self.set_deepspeed_weakref()
        try:
            yield
        finally:
            self.zero3_init_flag = previous
            self.set_deepspeed_weakref()

    def set_deepspeed_weakref(self) -> None:
        """Register the configuration with `transformers`, whose `from_pretrained` reads it, if that is installed."""
        shards = self.hf_ds_config.is_zero3() and self.zero3_init_flag
        if not shards and "transformers" not in sys.modules:  # nothing to undo
            return
        try:
            from transformers.integrations import deepspeed as registry
        except ImportError:
            return
        registry.unset_hf_deepspeed_config()  # type: ignore[no-untyped-call]
        if not shards:
            return
        config = deepcopy(self.deepspeed_config)
        for key in ("gradient_accumulation_steps", "train_micro_batch_size_per_gpu"):
            if config.get(key) in (None, "auto"):
                config[key] = 1
        if config.get("train_batch_size") == "auto":
            del config["train_batch_size"]
        self.dschf = HfDeepSpeedConfig(config)  # the registry keeps no reference
        registry.set_hf_deepspeed_config(self.dschf)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> DeepSpeedPlugin:
        copy = object.__new__(type(self))
        for name, value in vars(self).items():
            vars(copy)[name] = deepcopy(value, memo)
        copy.deepspeed_config = copy.hf_ds_config.config
        return copy


def check_plugins(plugins: Any) -> None:
    """Raise `ArgumentError` unless ``plugins`` is a `DeepSpeedPlugin`, or a dict of some by name."""
    for item in plugins.values() if isinstance(plugins, dict) and plugins else [plugins]:
        if not isinstance(item, DeepSpeedPlugin):
            raise ArgumentError(
                f"deepspeed_plugin must be a DeepSpeedPlugin, or a dict of them by name, not {type(item).__name__}"
            )


class _RefusingConfig:
    """A configuration for `transformers` that raises `StateError` when a model is to be loaded in shards."""

    def is_zero3(self) -> bool:
        """Return True: `transformers` then reads `config`, which raises."""
        return True

    @property
    def config(self) -> dict[str, Any]:
        """Raise `StateError`."""
        raise StateError(
            "from_pretrained in main_process_first: with zero3_init_flag all processes must load a model together: "
            "move the call out of the block, or pass DeepSpeedPlugin(zero3_init_flag=False)"
        )


@contextmanager
def refusing_sharded_loads(plugins: DeepSpeedPlugin | dict[str, DeepSpeedPlugin] | None) -> Iterator[None]:
    """Make loads of models in shards raise `StateError` in the block, which the processes enter one after another."""
    candidates = plugins.values() if isinstance(plugins, dict) else [plugins]
    active = [plugin for plugin in candidates if plugin is not None and plugin.selected and plugin.zero3_init_flag]
    registry: Any = sys.modules.get("transformers.integrations.deepspeed")
    if not active or registry is None:
        yield
        return
    refusing = _RefusingConfig()
    registry.set_hf_deepspeed_config(refusing)
    try:
        yield
    finally:
        active[0].set_deepspeed_weakref()


def get_active_deepspeed_plugin(state: Any) -> DeepSpeedPlugin:
    """Return the selected plug-in of ``state``, an `AcceleratorState`. Raises `StateError` without DeepSpeed."""
    plugin: DeepSpeedPlugin | None = state.deepspeed_plugin
    if plugin is None:
        raise StateError("get_active_deepspeed_plugin: this run does not use DeepSpeed: pass deepspeed_plugin=…")
    return plugin


class DummyOptim:
    """A placeholder for the optimizer of DeepSpeed's configuration: `Accelerator.prepare` returns that one.

    ``lr``, ``weight_decay`` and ``kwargs`` replace ``"auto"`` in ``optimizer.params``.
    """

    engine, plugin = "DeepSpeed", "deepspeed_plugin"

    def __init__(self, params: Any, lr: float = 0.001, weight_decay: float = 0, **kwargs: Any) -> None:
        self.params = list(params)  # a failed prepare() must not use up a generator
        self.lr = lr
        self.weight_decay = weight_decay
        self.kwargs = kwargs


class DummyScheduler:
    """A placeholder for the scheduler of DeepSpeed's configuration: `Accelerator.prepare` returns that one.

    ``total_num_steps`` and ``warmup_num_steps`` replace ``"auto"`` in ``scheduler.params``; the first counts the steps
    of one process, as for any scheduler of `prepare`. ``lr_scheduler_callable``: a function that makes a scheduler
    from an optimizer, in place of the configuration's.
    """

    engine, plugin = "DeepSpeed", "deepspeed_plugin"

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int | None = None,
        warmup_num_steps: int = 0,
        lr_scheduler_callable: Callable[[Any], Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.optimizer = optimizer
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = warmup_num_steps
        self.lr_scheduler_callable = lr_scheduler_callable
        self.kwargs = kwargs


def _default_config() -> dict[str, Any]:
    offload = {"device": "none", "nvme_path": None}
    return {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": dict(offload),
            "offload_param": dict(offload),
            "stage3_gather_16bit_weights_on_model_save": False,
        },
    }


def _leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def _is_on(section: Mapping[str, Any]) -> bool:
    return str(section.get("enabled", False)).lower() == "true"
