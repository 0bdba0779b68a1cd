"""Checks of a cluster without submitting a job (`accel targets check`)."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from ..errors import SpecError
from ..target import CheckReport
from .client.api import Api
from .client.errors import ApiError, Forbidden, NotFound
from .manifests import build
from .manifests.build import POD_GROUP
from .manifests.workloads import BUILDERS, RUNTIME_API_VERSION, RUNTIME_PLURAL
from .options import KubernetesOptions, gpu_resource

_HEADER = ["what", "found"]
_REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
_MAX_WORKERS = 8
_NAME = "accel-check"
# Opening a WebSocket is a GET; Kubernetes 1.35 and later require create too.
_EXEC = ("get", "create")


@dataclass
class _Report:
    rows: list[list[str]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def check(api: Api, options: KubernetesOptions, gpus: int) -> CheckReport:
    """Check the cluster, for `gpus` GPUs per node, without changing it. Raises Unreachable, SchedulerError."""
    report = _Report()
    access = api.access
    report.rows.append(["API server", f"{access.display_url}, as {access.user_label}"])
    version = api.call("GET", "/version")
    report.rows.append(["Kubernetes", str(version.get("gitVersion"))])
    _kinds(api, options, report)
    _namespace(api, report)
    _permissions(api, options, report)
    _claim(api, options, report)
    _quotas(api, options, gpus, report)
    _nodes(api, options, gpus, report)
    return CheckReport(table=[_HEADER, *report.rows], failures=tuple(report.failures), warnings=tuple(report.warnings))


def _kinds(api: Api, options: KubernetesOptions, report: _Report) -> None:
    versions = api.versions()
    report.rows.append(["workloads", ", ".join(build.runnable(versions)) or "none"])
    try:
        build.check_kind(options, versions, api.target)
    except SpecError as error:
        report.failures.append(str(error))


def _namespace(api: Api, report: _Report) -> None:
    """Check the namespace by a dry-run create in it: few users may read namespaces."""
    state = "exists"
    try:
        body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": _NAME}}
        api.call("POST", api.path("v1", "configmaps"), body=body, query={"dryRun": "All"})
    except NotFound as error:
        state = "not found"
        report.failures.append(str(error))
    except Forbidden as error:
        state = "unknown" if "quota" not in str(error) else "exists"
    except ApiError:
        pass  # such as an existing name or a webhook's refusal: the namespace exists
    report.rows.append([f"namespace {api.namespace}", state])


def required_permissions(options: KubernetesOptions) -> dict[tuple[str, str], tuple[str, ...]]:
    """Return (API group, resource) -> the verbs needed for jobs of this target."""
    builder = BUILDERS[options.workload]
    managed_verbs = ("create", "get", "list", "patch", "delete")
    permissions: dict[tuple[str, str], tuple[str, ...]] = {
        (_group(builder.api_version), builder.plural): ("create", "get", "list", "watch", "delete"),
        ("", "pods"): ("get", "list", "watch"),
        ("", "pods/log"): ("get",),
        ("", "events"): ("list",),
        ("", "services"): managed_verbs,
    }
    if options.code in ("auto", "configmap"):
        permissions["", "configmaps"] = managed_verbs
    if options.code_claim is not None:
        permissions["", "pods"] += ("create", "delete")
        permissions["", "pods/exec"] = _EXEC
        permissions["", "persistentvolumeclaims"] = ("get",)
    if options.workload == "trainjob" and options.runtime is None:
        permissions[_group(RUNTIME_API_VERSION), RUNTIME_PLURAL] = ("create", "get", "patch", "delete")
    if options.has_pod_group:
        permissions[_group(POD_GROUP), "podgroups"] = ("create", "get", "patch", "delete")
    return permissions


def _optional(options: KubernetesOptions) -> dict[tuple[str, str], tuple[tuple[str, ...], str]]:
    """Return (API group, resource) -> the optional verbs, and the effect of lacking them."""
    builder = BUILDERS[options.workload]
    reason = "Without it the reason of a failure is lost with the pods"
    permissions: dict[tuple[str, str], tuple[tuple[str, ...], str]]
    permissions = {
        (_group(builder.api_version), builder.plural): (("patch",), reason),
        ("", "namespaces"): (("get",), "Without it, another cluster at the same address is taken for this one"),
    }
    if ("", "pods/exec") not in required_permissions(options):
        permissions["", "pods/exec"] = (_EXEC, "Only `accel shell` needs it")
    return permissions


def _group(api_version: str) -> str:
    return api_version.rpartition("/")[0]


def _permissions(api: Api, options: KubernetesOptions, report: _Report) -> None:
    required, optional = required_permissions(options), _optional(options)
    verbs_by_resource = {key: (*required.get(key, ()), *optional.get(key, ((), ""))[0]) for key in required | optional}
    permissions = [(group, resource, verb) for (group, resource), verbs in verbs_by_resource.items() for verb in verbs]

    def allowed(permission: tuple[str, str, str]) -> bool:
        group, resource, verb = permission
        plural, _, sub = resource.partition("/")
        attributes = {"namespace": api.namespace, "group": group, "resource": plural, "verb": verb}
        attributes |= {"subresource": sub} if sub else {}
        attributes |= {"name": options.code_claim} if plural == "persistentvolumeclaims" and options.code_claim else {}
        body = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": attributes},
        }
        return bool((api.call("POST", _REVIEWS, body=body).get("status") or {}).get("allowed"))

    with ThreadPoolExecutor(max_workers=_MAX_WORKERS) as pool:
        granted = dict(zip(permissions, pool.map(allowed, permissions), strict=True))
    for (group, resource), verbs in verbs_by_resource.items():
        missing = [verb for verb in verbs if not granted[group, resource, verb]]
        resource_name = f"{resource}.{group}" if group else resource
        report.rows.append([f"may use {resource_name}", f"not {', '.join(missing)}" if missing else ", ".join(verbs)])
        optional_verbs, reason = optional.get((group, resource), ((), ""))
        subject = f"{resource_name} in namespace {api.namespace}"
        message = f"{api.label}: {api.access.user_label} may not {{}} {subject}: no Role grants this"
        if missing_required := [verb for verb in missing if verb not in optional_verbs]:
            report.failures.append(message.format(", ".join(missing_required)))
        if missing_optional := [verb for verb in missing if verb in optional_verbs]:
            report.warnings.append(f"{message.format(', '.join(missing_optional))}. {reason}")


def _claim(api: Api, options: KubernetesOptions, report: _Report) -> None:
    if options.code_claim is None:
        return
    try:
        claim = api.call("GET", api.path("v1", "persistentvolumeclaims", options.code_claim))
    except NotFound:
        report.failures.append(f"{api.label}: code_claim: no claim {options.code_claim} in namespace {api.namespace}")
        phase = "not found"
    except Forbidden:
        return  # `_permissions` reports it
    else:
        phase = str((claim.get("status") or {}).get("phase") or "Pending")
        modes = (claim.get("spec") or {}).get("accessModes") or []
        if not {"ReadWriteMany", "ReadOnlyMany"} & set(modes):
            report.warnings.append(
                f"{api.label}: code_claim: {options.code_claim} is {' and '.join(modes)}: pods on several nodes "
                "cannot all mount it"
            )
    report.rows.append([f"claim {options.code_claim}", phase])


def _quotas(api: Api, options: KubernetesOptions, gpus: int, report: _Report) -> None:
    for quota in _list_if_allowed(api, api.path("v1", "resourcequotas")):
        hard, used = (dict((quota.get("status") or {}).get(key) or {}) for key in ("hard", "used"))
        usage = ", ".join(f"{key} {used.get(key, '0')} of {value}" for key, value in sorted(hard.items()))
        report.rows.append([f"quota {quota['metadata']['name']}", usage])
        key = f"requests.{gpu_resource(options)}"
        remaining = _int_or_zero(hard.get(key)) - _int_or_zero(used.get(key)) if key in hard else None
        if remaining is not None and remaining < gpus:
            name = quota["metadata"]["name"]
            report.failures.append(
                f"{api.label}: quota {name} has {remaining} {gpu_resource(options)} left, and {gpus} are requested"
            )


def _nodes(api: Api, options: KubernetesOptions, gpus: int, report: _Report) -> None:
    if not gpus:
        return
    nodes = list(_list_if_allowed(api, api.path("v1", "nodes", namespace="")))
    counts = [
        _int_or_zero(((node.get("status") or {}).get("allocatable") or {}).get(gpu_resource(options))) for node in nodes
    ]
    if not nodes:
        return
    report.rows.append(["nodes", f"{len(nodes)} ({sum(count > 0 for count in counts)} with GPUs)"])
    if max(counts) < gpus:
        report.failures.append(f"{api.label}: no node has {gpus} {gpu_resource(options)}: the most is {max(counts)}")


def _list_if_allowed(api: Api, path: str) -> Iterator[dict[str, Any]]:
    """Yield the items of a list, or none without the permission to read it."""
    try:
        yield from api.call("GET", path).get("items") or []
    except Forbidden:
        return


def _int_or_zero(quantity: object) -> int:
    return int(str(quantity)) if str(quantity).isdigit() else 0
