"""`accel env`: print this installation, machine and targets, for a bug report.

Secrets are hidden: values whose names mark them as secret, and those that look like one. Packages are read
from their metadata; torch and the driver are queried in separate processes, so that a broken one costs a line.

--json  {"accel", "machine", "packages", "torch", "nvidia", "config": {"path", "settings", "error"},
"environment", "targets": [{"name", "kind", "source", "answers", "message", "seconds"}], "targets_error"}. A
missing package is null; "answers" is true, false, or null for a kind of target that is not set up here.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import arguments, exit_status
from .output import print_fields, print_json

if TYPE_CHECKING:
    from argparse import Namespace

    from schedulers.config.named_targets import NamedTarget

    from .arguments import Parser


EXAMPLES = """\
  accel env
  accel env --config_file accelerate.yaml
  accel env --json | jq -r .torch.version"""

_COMMAND = "accel env"
_TORCH_LIMIT_S = 120.0
_DRIVER_LIMIT_S = 20.0
_REPORTED_PREFIXES = (
    "ACCEL",
    "NCCL_",
    "CUDA_",
    "TORCH",
    "PYTORCH_",
    "OMP_",
    "MKL_",
    "GLOO_",
    "HF_",
    "XLA_",
    "TPU_",
    "DEEPSPEED_",
)
_REPORTED_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID")


def add_arguments(parser: Parser) -> None:
    parser.add_argument("--config_file", metavar="FILE", help="show this configuration file (default: the one in use)")
    parser.add_argument(
        "--timeout",
        metavar="TIME",
        type=arguments.duration,
        default=10.0,
        help="time for the targets to answer (default: 10s)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: Namespace) -> int:
    report = gather(args.config_file, args.timeout)
    if args.json:
        print_json(report)
    else:
        _print(report)
    return exit_status.OK


def gather(config_file: str | None, limit_s: float) -> dict[str, Any]:
    """Return the report as plain values. Raises UsageError if a named configuration file cannot be read."""
    from accel.diagnostics import machine
    from accel.diagnostics.redaction import secrets_of, without_secrets
    from accel.diagnostics.subprocess_probe import SubprocessProbe

    config = _config(config_file)
    torch, driver = SubprocessProbe("torch"), SubprocessProbe("nvml")
    targets, targets_error, options = _targets(limit_s)
    known = secrets_of([dict(os.environ), config, *options])
    variables = {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(_REPORTED_PREFIXES) or name in _REPORTED_NAMES
    }
    return {
        "accel": machine.version_of("accel-launch") or "not installed: run from a source tree",
        "machine": machine.describe(),
        "packages": machine.package_versions(),
        "torch": torch.result(_TORCH_LIMIT_S),
        "nvidia": driver.result(_DRIVER_LIMIT_S),
        "config": without_secrets(config, known=known),
        "environment": without_secrets(variables, known=known),
        "targets": without_secrets(targets, known=known),
        "targets_error": without_secrets(targets_error, known=known),
    }


def _config(path: str | None) -> dict[str, Any]:
    """Return the configuration file in use, its contents, and why `accel launch` would reject it."""
    from .argv import UsageError
    from .launch_file import active_path, default_path, load, validate_file

    config_path = active_path(path)
    if config_path is None:
        return {"path": default_path(), "settings": None, "error": None}
    try:
        file = load(_COMMAND, config_path)
    except UsageError as error:
        if path is not None:
            raise
        return {"path": config_path, "settings": None, "error": str(error)}
    try:
        validate_file(_COMMAND, file)
    except UsageError as error:
        return {"path": config_path, "settings": file.document, "error": str(error)}
    return {"path": config_path, "settings": file.document, "error": None}


def _targets(limit_s: float) -> tuple[list[dict[str, Any]], str | None, list[dict[str, Any]]]:
    """Return each target's response, the error in the file, and the options, which may contain secrets."""
    from schedulers.config.named_targets import known_targets
    from schedulers.errors import SchedulerError

    try:
        targets = known_targets()
        answers = ping_targets(targets, limit_s)
    except SchedulerError as error:
        return [], " ".join(str(error).split()), []
    return [{**vars(answer)} for answer in answers], None, [dict(target.options) for target in targets]


def _print(report: dict[str, Any]) -> None:
    installed = [f"{name} {version}" for name, version in report["packages"].items() if version]
    print_fields([("accel", report["accel"]), *report["machine"].items()])
    _section("packages", [("", line) for line in installed])
    _section("torch", _torch_fields(report["torch"]))
    _section("NVIDIA driver", _driver_fields(report["nvidia"]))
    _section(f"configuration {report['config']['path']}", _config_fields(report["config"]))
    _section("environment", report["environment"].items() or [("", "no relevant variables are set")])
    _section(
        "targets",
        [*((t["name"], _target_line(t)) for t in report["targets"]), ("error", report["targets_error"] or "")],
    )


def _section(title: str, fields: Any) -> None:
    print(f"\n{title}")
    print_fields([(f"  {name}", value) for name, value in fields])


def _torch_fields(torch: dict[str, Any]) -> list[tuple[str, str]]:
    if "error" in torch:
        return [("torch", torch["error"])]
    names = ("version", "built for", "cudnn", "nccl")
    fields = [(name, str(torch[name] or "not in this build")) for name in names]
    fields.append(("backends", ", ".join(torch["backends"]) or "none"))
    return fields + [("device", _device(device)) for device in torch["devices"] or [{"name": "only the CPU"}]]


def _driver_fields(driver: dict[str, Any]) -> list[tuple[str, str]]:
    if not driver:
        return [("driver", "none")]
    if "error" in driver:
        return [("driver", driver["error"])]
    fields = [("driver", driver["driver"] or "of unknown version"), ("CUDA", driver["cuda"] or "")]
    return fields + [("device", _device(device)) for device in driver["devices"]]


def _device(device: dict[str, Any]) -> str:
    memory = f", {device['memory'] / 2**30:.1f} GiB" if device.get("memory") else ""
    used = f", {device['used'] / 2**30:.1f} GiB in use" if device.get("used") else ""
    kind = f"{device['kind']}: " if device.get("kind") else ""
    return f"{kind}{device['name'] or 'unnamed'}{memory}{used}"


def _config_fields(config: dict[str, Any]) -> list[tuple[str, str]]:
    import json

    error_fields = [("error", config["error"])] if config["error"] else []
    if config["settings"] is None:
        return error_fields or [("", "not found")]
    return error_fields + [
        (name, value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False))
        for name, value in config["settings"].items()
    ]


def _target_line(target: dict[str, Any]) -> str:
    status = {True: "answers", False: "does not answer", None: "not set up"}[target["answers"]]
    origin = f"{target['kind']}, {target['source']}" if target["kind"] != target["name"] else target["source"]
    message = f": {target['message']}" if target["message"] else ""
    return (
        f"{status} in {target['seconds']:.1f} s ({origin}){message}"
        if target["answers"]
        else f"{status} ({origin}){message}"
    )


# Ping all targets in parallel, within a time limit.


@dataclass(frozen=True, kw_only=True)
class PingResult:
    """A target's response. ``answers`` is None for a kind of target that is not set up here, which is no error."""

    name: str
    kind: str
    source: str
    answers: bool | None
    message: str
    seconds: float


def ping_targets(targets: Sequence[NamedTarget], limit_s: float) -> list[PingResult]:
    """Return a response per target, in order, after ``limit_s`` seconds at most.

    Changes nothing there. A query that is still running is abandoned and dies with this process.
    """
    replies: dict[int, PingResult] = {}
    started_at = time.monotonic()

    def ping_one(index: int, target: NamedTarget) -> None:
        reachable, message = _ping(target)
        replies[index] = _result(target, reachable, message, time.monotonic() - started_at)

    threads = [
        threading.Thread(target=ping_one, args=pair, name=f"ping {pair[1].name}", daemon=True)
        for pair in enumerate(targets)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, started_at + limit_s - time.monotonic()))
    timeout = f"no answer in {limit_s:g} s"
    received = dict(replies)
    return [received.get(index) or _result(target, False, timeout, limit_s) for index, target in enumerate(targets)]


def _result(target: NamedTarget, reachable: bool | None, message: str, seconds: float) -> PingResult:
    return PingResult(
        name=target.name, kind=target.kind, source=target.source, answers=reachable, message=message, seconds=seconds
    )


def _ping(entry: NamedTarget) -> tuple[bool | None, str]:
    from schedulers.config.named_targets import load_target
    from schedulers.errors import SchedulerError
    from schedulers.store.store import Store
    from schedulers.target import SupportsCheck

    set_up = entry.file is not None
    try:
        target = load_target(entry.name, Store.default().jobs)
        if isinstance(target, SupportsCheck):
            report = target.check()
            return (False, "; ".join(report.failures)) if report.failures else (True, "; ".join(report.warnings))
        target.poll([])
    except SchedulerError as error:
        return False if set_up else None, " ".join(str(error).split())
    except Exception as error:  # an error of a plug-in or an SDK
        return False if set_up else None, " ".join(f"{type(error).__name__}: {error}".split())
    return True, ""
