"""Translate a configuration file of `accel launch`, or Accelerate's for SageMaker, into the settings of a job."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from .argv import UsageError
from .launch_defaults import LaunchDefaults, launch_variables, layout

if TYPE_CHECKING:
    from accel.settings.precedence import Value


# Accelerate's configuration file for SageMaker.

_KEYS = ("aws_access_key_id", "aws_secret_access_key")
# Arguments of SDK 2's estimators -> the settings of the file that they overrule.
_SETTINGS = {
    "base_job_name": "base_job_name", "image_uri": "image_uri", "instance_count": "num_machines",
    "instance_type": "ec2_instance_type", "py_version": "py_version", "pytorch_version": "pytorch_version",
    "role": "iam_role_name", "transformers_version": "transformers_version",
}  # fmt: skip
# -> options of the target.
_OPTIONS = {
    "checkpoint_local_path": "checkpoint_local_path",
    "checkpoint_s3_uri": "checkpoint_s3_uri",
    "enable_network_isolation": "enable_network_isolation",
    "enable_remote_debug": "enable_remote_debug",
    "encrypt_inter_container_traffic": "enable_inter_container_traffic_encryption",
    "keep_alive_period_in_seconds": "keep_alive_period_in_seconds",
    "max_retry_attempts": "maximum_retry_attempts",
    "max_wait": "max_wait_time_in_seconds",
    "output_kms_key": "output_kms_key_id",
    "output_path": "s3_output_path",
    "security_group_ids": "security_group_ids",
    "subnets": "subnets",
    "training_plan": "training_plan_arn",
    "use_spot_instances": "enable_managed_spot_training",
    "volume_kms_key": "volume_kms_key_id",
    "volume_size": "volume_size_in_gb",
}
# -> options, or fields of `LaunchDefaults`, whose values have another form.
_CONVERTED: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    "disable_output_compression": ("output_compression_type", lambda value: "NONE" if value else "GZIP"),
    "environment": ("env", lambda value: {str(name): str(text) for name, text in value.items()}),
    "max_run": ("time_limit_s", float),
    "metric_definitions": ("metric_definitions", lambda value: [_metric(row["Name"], row["Regex"]) for row in value]),
    "tags": ("tags", lambda value: value if isinstance(value, dict) else {row["Key"]: row["Value"] for row in value}),
}


def from_sagemaker_config(command: str, settings: Mapping[str, Value], script: str = "") -> LaunchDefaults:
    """Return the job that the settings of a SageMaker file describe. Its options override the target's.

    script: the program; a requirements.txt in its directory is installed, as by SageMaker's estimators.

    Raises UsageError with the line of the file.
    """
    values = {name: value.value for name, value in settings.items()}
    options = _from_arguments(command, settings, values)
    for name in ("ec2_instance_type", "iam_role_name"):
        if not values[name]:
            raise UsageError(command, f"{settings['compute_environment'].source}: SageMaker needs {name} in this file")
    kind, source = values["distributed_type"] or "NO", settings["distributed_type"].source
    if kind == "MODEL_PARALLEL":
        raise UsageError(command, f"{source}: distributed_type MODEL_PARALLEL: SageMaker's library is not supported: "
                         "give DATA_PARALLEL, or shard with FSDP (accel submit --target NAME)")  # fmt: skip
    notes = []
    if kind == "DATA_PARALLEL":
        notes.append(f"warning: {source}: distributed_type DATA_PARALLEL runs as DDP, without SageMaker's own library")
    image, image_warnings = _image(settings, values)
    env, time_limit_s = options.pop("env", {}), options.pop("time_limit_s", None)
    options["metric_definitions"] = options.get("metric_definitions", []) + [
        _metric(*row) for _, row in _rows(command, values["sagemaker_metrics_file"], settings["sagemaker_metrics_file"])
    ]
    options["input_data_config"] = _channels(
        command, values["sagemaker_inputs_file"], settings["sagemaker_inputs_file"]
    )
    requirements = os.path.join(os.path.dirname(script), "requirements.txt")
    if script and not os.path.isabs(script) and os.path.isfile(requirements):
        options["requirements"] = requirements
    base_options = {"role": values["iam_role_name"], "instance_type": values["ec2_instance_type"], "image": image}
    base_options |= {"profile": values["profile"], "region": values["region"], "cpu": values["cpu"] or None}
    low, high, per_node = layout(settings["compute_environment"].source, values, command)
    return LaunchDefaults(
        env=launch_variables(values) | env,
        nodes=(low, high if high != low else None),
        procs_per_node=1 if kind == "NO" and not per_node else per_node,
        notes=(*notes, *image_warnings),
        kind="sagemaker",
        name=values["base_job_name"],
        time_limit_s=time_limit_s,
        options={name: value for name, value in {**base_options, **options}.items() if value not in (None, [])},
    )


def use_keys(settings: Mapping[str, Value]) -> tuple[dict[str, Value], list[str]]:
    """Put AWS keys from the command line into this process's environment only. They override a profile.

    Returns the settings without the profile, and a warning.
    """
    key_names = [name for name in _KEYS if settings[name].layer == "flag"]
    if not key_names:
        return dict(settings), []
    os.environ.update({name.upper(): str(settings[name].value) for name in key_names})
    for name in ("AWS_SESSION_TOKEN", "AWS_SECURITY_TOKEN", "AWS_CREDENTIAL_EXPIRATION"):
        os.environ.pop(name, None)  # of other keys
    warning = (
        f"warning: --{key_names[0]}: other users see it in the list of processes, and it holds for this process only: "
        "leave keys to AWS's credential chain (aws configure, aws sso login, AWS_PROFILE, AWS_ACCESS_KEY_ID)"
    )
    return {**settings, "profile": settings["profile"]._replace(value=None)}, [warning]


def _from_arguments(command: str, settings: Mapping[str, Value], values: dict[str, Any]) -> dict[str, Any]:
    """Return the options in `additional_args`; those that are settings of the file are set in `values`."""
    options: dict[str, Any] = {}
    for name, value in (values["additional_args"] or {}).items():
        location = f"{settings['additional_args'].source}: additional_args: {name}"
        if name in _SETTINGS:
            values[_SETTINGS[name]] = value
        elif name in _OPTIONS:
            _check(command, location, _OPTIONS[name], value)
            options[_OPTIONS[name]] = value
        elif name in _CONVERTED:
            option, convert = _CONVERTED[name]
            try:
                options[option] = convert(value)
            except (AttributeError, KeyError, TypeError, ValueError):
                raise UsageError(command, f"{location}: not a value of SageMaker's estimators: {value!r}") from None
        else:
            from accel.errors import nearest

            known = sorted({**_SETTINGS, **_OPTIONS, **_CONVERTED})
            problem = f"not supported{nearest(str(name), known)} (supported: {', '.join(known)})"
            raise UsageError(command, f"{location}: {problem}")
    return options


def _check(command: str, location: str, option: str, value: Any) -> None:
    """Raise UsageError for an invalid value of the option."""
    from schedulers.config.schema import make_options
    from schedulers.errors import ConfigError
    from schedulers.sagemaker.options import SageMakerOptions

    required = {"role": "it", "instance_type": "it"}
    try:
        make_options(SageMakerOptions, {**required, option: value}, {}, lambda path, of_key: location)
    except ConfigError as error:
        raise UsageError(command, str(error)) from None


def _image(settings: Mapping[str, Value], values: Mapping[str, Any]) -> tuple[str, list[str]]:
    """Return the image, and a warning if it is not of the version that the file names."""
    from schedulers.sagemaker.options import NEWEST, VERSIONS

    version = str(values["pytorch_version"])
    if values["image_uri"]:
        return str(values["image_uri"]), []
    if any(known in (version, f"{version}.0") or known.rpartition(".")[0] == version for known in VERSIONS):
        return f"pytorch:{version}", []
    pins = f"pytorch_version {version}, py_version {values['py_version']}"
    image = f"pytorch:{NEWEST} ({VERSIONS[NEWEST]})"
    remedy = "name packages in requirements.txt, or give image_uri"
    warning = f"warning: {settings['pytorch_version'].source}: {pins}: accel does not run on this image; using {image}"
    return f"pytorch:{NEWEST}", [f"{warning}, without Transformers: {remedy}"]


def _metric(name: Any, regex: Any) -> dict[str, str]:
    return {"name": str(name), "regex": str(regex)}


def _channels(command: str, path: str | None, value: Value) -> list[dict[str, Any]]:
    channels = []
    for location, (name, uri) in _rows(command, path, value):
        if name == "code" or not uri.startswith("s3://"):
            problem = "accel uses this name: choose another" if name == "code" else f"not an s3:// location: {uri!r}"
            raise UsageError(command, f"{location}: channel {name}: {problem}")
        source = {"s3_data_type": "S3Prefix", "s3_uri": uri, "s3_data_distribution_type": "FullyReplicated"}
        channels.append({"channel_name": name, "data_source": {"s3_data_source": source}})
    return channels


def _rows(command: str, path: str | None, value: Value) -> list[tuple[str, tuple[str, str]]]:
    """Return the rows of a tab-separated file of two columns, after its heading, each with its place."""
    if not path:
        return []
    try:
        with open(path, encoding="utf-8") as file:
            lines = file.read().splitlines()[1:]
    except (OSError, ValueError) as error:
        problem = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise UsageError(command, f"{value.source}: cannot read {path}: {problem}") from None
    rows = []
    for number, line in enumerate(lines, start=2):
        name, tab, rest = line.partition("\t")
        if not line.strip():
            continue
        if not (tab and name.strip() and rest.strip()):
            raise UsageError(command, f"{path}:{number}: expects two columns with a tab between them, not {line!r}")
        rows.append((f"{path}:{number}", (name.strip(), rest.strip())))
    return rows


# A configuration file of `accel launch`: nodes, processes, GPUs, and the launch variables of the rest.

_COMMAND = "accel submit"
# Settings that work on this machine only -> the launcher that they are for.
_LOCAL_LAUNCHERS = {"mpirun_hostfile": "mpirun", "deepspeed_hostfile": "DeepSpeed's own launcher"}
# Settings that a job's target determines.
_OF_TARGET = ("gpu_ids", "rdzv_backend", "deepspeed_inclusion_filter", "deepspeed_exclusion_filter")
# Settings of a pod that only `accel launch` uses.
_OF_POD = ("tpu_use_sudo", "vm")


def from_config_file(path: str, script: str = "") -> LaunchDefaults:
    """Return the settings of a file; `script` is the program.

    Raises UsageError for an invalid file, and for one that a job cannot use.
    """
    from accel.settings.contradictions import contradictions
    from accel.settings.precedence import resolve

    from .launch_file import read_file

    file = read_file(_COMMAND, path)
    settings = resolve({}, {}, file.entries, file.location)
    options = {name: value.value for name, value in settings.items()}
    problem = contradictions(options, {name: value.source for name, value in settings.items() if value.layer == "file"})
    if problem:
        raise UsageError(_COMMAND, problem)
    if options["compute_environment"] != "LOCAL_MACHINE":
        return from_sagemaker_config(_COMMAND, settings, script)
    for name, platform in _LOCAL_LAUNCHERS.items():
        if options[name]:
            raise UsageError(_COMMAND, f"{path} is for {platform}: use accel launch --config_file {path} SCRIPT")
    low, high, per_node = layout(path, options, _COMMAND)
    return LaunchDefaults(
        env=launch_variables(options) | _pod_variables(options),
        nodes=(low, high if high != low else None) if settings["num_machines"].layer == "file" else None,
        procs_per_node=per_node,
        gpus=per_node if options["multi_gpu"] else None,
        notes=tuple(_dropped_settings(settings)),
        kind="tpu" if options["tpu"] else None,
        options=_tpu_options(options) if options["tpu"] else {},
    )


def _tpu_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a TPU file's settings as options of a tpu target."""
    names = {"name": "tpu_name", "zone": "tpu_zone", "main_training_function": "main_training_function"}
    return {key: options[name] for key, name in names.items() if options[name]}


def _pod_variables(options: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables that a TPU's file sets on the hosts of its pod."""
    return dict(pair.split("=", 1) for pair in options["env"] or ())


def _dropped_settings(settings: Mapping[str, Value]) -> Iterator[str]:
    from accel.settings import BY_NAME
    from accel.settings.contradictions import is_given

    options = {name: value.value for name, value in settings.items()}
    for name in _OF_TARGET:
        if is_given(name, options) and options[name] != BY_NAME[name].default:
            prefix = f"{settings[name].source}: {BY_NAME[name].file_key} {options[name]}"
            yield f"{prefix} is ignored: the target determines a job's machines and GPUs"
    for name in _OF_POD:
        if is_given(name, options) and options[name] != BY_NAME[name].default:
            yield f"{settings[name].source}: {BY_NAME[name].file_key} is ignored: only accel launch uses it"
    if options["multi_gpu"] and not options["num_processes"]:
        yield f"{settings['multi_gpu'].source}: num_processes is missing: the job requests the GPUs of --gpus"
