"""The variables that AWS's toolkit sets for a training script, from the files in `/opt/ml/input/config`.

https://github.com/aws/sagemaker-training-toolkit/blob/master/ENVIRONMENT_VARIABLES.md. Runs in the container.
"""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

_PREFIX = "sagemaker_"  # of hyperparameters for the toolkit itself
_OWN = {f"{_PREFIX}{name}" for name in "program submit_directory region container_log_level job_name".split()}
# In SM_TRAINING_ENV only.
_UNEXPORTED = """
additional_framework_parameters channel_input_dirs distribution_hosts hyperparameters is_master
is_modelparallel_enabled is_smddpmprun_installed is_smddprun_installed job_name master_hostname
""".split()


def variables(root: str, code: str, program: str, env: dict[str, str]) -> dict[str, str]:
    """Return the variables. `code`: the directory of the code; `program`: the script, relative to it."""
    config, data = os.path.join(root, "input", "config"), os.path.join(root, "input", "data")
    inputs, resources = (_read(os.path.join(config, f"{name}.json")) for name in ("inputdataconfig", "resourceconfig"))
    channels = {name: os.path.join(data, name) for name in sorted({*inputs, *os.listdir(data)})}
    parameters = {key: _parse(value) for key, value in _read(os.path.join(config, "hyperparameters.json")).items()}
    own = {key: value for key, value in parameters.items() if key.startswith(_PREFIX)}
    parameters = {key: value for key, value in parameters.items() if key not in own}
    hosts, host = resources.get("hosts") or [], resources.get("current_host")
    group = resources.get("current_group_name") or "homogeneousCluster"
    groups = {entry["instance_group_name"]: entry for entry in resources.get("instance_groups") or []}
    values: dict[str, Any] = {
        "additional_framework_parameters": {key: value for key, value in own.items() if key not in _OWN},
        "channel_input_dirs": channels,
        "current_host": host,
        "current_instance_group": group,
        "current_instance_group_hosts": groups.get(group, {}).get("hosts") or hosts,
        "current_instance_type": resources.get("current_instance_type") or "local",
        "distribution_hosts": [],
        "distribution_instance_groups": [],
        "framework_module": None,
        "hosts": hosts,
        "hyperparameters": parameters,
        "input_config_dir": config,
        "input_data_config": inputs,
        "input_dir": os.path.join(root, "input"),
        "instance_groups": list(groups),
        "instance_groups_dict": groups,
        "is_hetero": len(groups) > 1,
        "is_master": bool(hosts) and host == hosts[0],
        "is_modelparallel_enabled": None,
        "is_smddpmprun_installed": False,
        "is_smddprun_installed": False,
        "job_name": env.get("TRAINING_JOB_NAME"),
        "log_level": 20,
        "master_hostname": next(iter(hosts), None),
        "model_dir": os.path.join(root, "model"),
        "module_dir": code,
        "module_name": program.removesuffix(".py"),
        "network_interface_name": resources.get("network_interface_name") or "eth0",
        "num_cpus": os.cpu_count(),
        "num_gpus": _gpus(),
        "num_neurons": 0,
        "output_data_dir": os.path.join(root, "output", "data"),
        "output_dir": os.path.join(root, "output"),
        "output_intermediate_dir": os.path.join(root, "output", "intermediate"),
        "resource_config": resources,
        "topology": resources.get("topology") or [],
        "user_entry_point": program,
    }
    exported = {key: value for key, value in values.items() if key not in _UNEXPORTED and (key != "topology" or value)}
    exported |= {f"channel_{name}": path for name, path in channels.items()}
    exported |= {f"hp_{key}": value for key, value in parameters.items()}
    exported |= {"channels": list(channels), "hps": parameters, "training_env": values}
    exported["framework_params"] = values["additional_framework_parameters"]
    exported["user_args"] = [part for key in sorted(parameters) for part in _argument(key, parameters[key])]
    return {
        **{f"SM_{key.upper()}": _text(value) for key, value in exported.items()},
        "CURRENT_HOST": str(host or ""),
        "SAGEMAKER_JOB_NAME": str(own.get("sagemaker_job_name", "")),
        "SAGEMAKER_REGION": str(own.get("sagemaker_region") or env.get("AWS_REGION") or ""),
    }


def _read(path: str) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            return dict(json.load(file))
    except (OSError, ValueError, TypeError):
        return {}


def _parse(value: Any) -> Any:
    try:
        return json.loads(value)
    except (ValueError, TypeError):
        return value


def _argument(key: str, value: Any) -> list[str]:
    if isinstance(value, dict):
        value = ",".join(f"{name}={item}" for name, item in sorted(value.items()))
    return [f"--{key}" if len(key) > 1 else f"-{key}", "" if value is None else str(value)]


def _text(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _gpus() -> int:
    try:
        listing = subprocess.run(["nvidia-smi", "--list-gpus"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    except OSError:
        return 0
    return sum(line.startswith(b"GPU ") for line in listing.stdout.splitlines())
