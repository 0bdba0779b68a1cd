"""`accel launch --explain`: each setting with its value and the source of that value."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from . import exit_status

if TYPE_CHECKING:
    from accel.settings.precedence import Value

# Where these say nothing, their variable reaches the program as somebody has set it.
_INHERITED = ("num_cpu_threads_per_process", "gpu_ids")
_INHERITED_BY_SAGEMAKER = ("aws_access_key_id", "aws_secret_access_key", "profile")
_SECRET = ("aws_access_key_id", "aws_secret_access_key")


def explain(found: Mapping[str, Value], options: Mapping[str, Any], env: Mapping[str, str] = os.environ) -> int:
    """Print the settings, those not at their defaults first. Raises Refused as `accel launch` would here."""
    from .output import print_rows

    held = {**found, **dict(_inherited(found, options, env)), **dict(_found_out(found, options, env))}
    rows = [(name, _shown(name, value.value), value.source) for name, value in held.items() if name != "explain"]
    rows.sort(key=lambda row: row[2] == "default")
    print_rows(("setting", "value", "from"), rows, on_terminal=rows)
    return exit_status.OK


def _inherited(
    found: Mapping[str, Value], options: Mapping[str, Any], env: Mapping[str, str]
) -> Iterator[tuple[str, Value]]:
    from accel.launch import alias_env
    from accel.settings import BY_NAME
    from accel.settings.precedence import Value

    on_sagemaker = options["compute_environment"] == "AMAZON_SAGEMAKER"
    for name in (*_INHERITED, *(_INHERITED_BY_SAGEMAKER if on_sagemaker else ())):
        variable = BY_NAME[name].env
        if found[name].value is None and env.get(variable):
            yield name, Value(env[variable], f"environment variable {variable}", "environment")
    if not found["compat"].value and alias_env.is_asked(env):
        yield "compat", Value(True, f"environment variable {alias_env.FLAG}", "environment")


def _found_out(
    found: Mapping[str, Value], options: Mapping[str, Any], env: Mapping[str, str]
) -> Iterator[tuple[str, Value]]:
    """Yield the values that a launch derives itself where nothing sets them."""
    from accel.launch.external import planned, starts_here
    from accel.launch.worker import Program

    if not starts_here(options):
        return
    run = planned(options, Program(argv=[sys.executable], entry="command"), env)  # whatever the program is
    if found["num_processes"].value is None and run.nodes == run.max_nodes and not options["tpu"]:
        yield "num_processes", found["num_processes"]._replace(value=run.processes * run.nodes)
    threads = "num_cpu_threads_per_process"
    if found[threads].value is None and "OMP_NUM_THREADS" in run.env:
        yield threads, found[threads]._replace(value=run.env["OMP_NUM_THREADS"])


def _shown(name: str, value: Any) -> str:
    if value is None:
        return ""
    if name in _SECRET:
        return "(not shown)"
    from accel.diagnostics.redaction import without_secrets

    value = without_secrets(value)
    return str(value).lower() if isinstance(value, bool) else str(value)
