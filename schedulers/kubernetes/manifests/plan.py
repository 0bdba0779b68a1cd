"""The plan of a submit, made before any request and without packing the code."""

from __future__ import annotations

from ...job import JobSpec
from ...target import Plan
from ..options import KubernetesOptions
from . import build, pods, validate
from . import code_delivery as delivery

KIND = "kubernetes"


def plan(spec: JobSpec, options: KubernetesOptions, job_id: str, target: str) -> Plan:
    """Return the objects as YAML and the actions on them. Raises SpecError.

    Two things are unknown until the code is packed: its digest, and with `code: auto` the use of a claim or store.
    """
    code = delivery.plan_delivery(options)
    manifests = build.build(spec, options, job_id, code, target=target)
    files = build.files(manifests)
    if code.kind == "pvc":
        files["kubernetes/code-pod.yaml"] = build.to_yaml([build.loader_pod(spec, options, job_id, target)])
    return Plan(
        target=target,
        kind=KIND,
        job_id=job_id,
        files=files,
        actions=(*_actions(manifests, spec, options, code), _command(manifests, options)),
        settings={"spec": spec.to_json()},
        warnings=build.warnings(spec, options),
    )


def _actions(
    manifests: build.Manifests, spec: JobSpec, options: KubernetesOptions, code: delivery.Code
) -> list[tuple[str, ...]]:
    name = str(manifests.workload["metadata"]["name"])
    fallback = f"claim {options.code_claim}" if options.code_claim else options.code_store and options.code_store.url
    actions: list[tuple[str, ...]] = []
    if code.kind == "pvc":
        via = f"through pod/{name}-loader"
        actions.append(("send", spec.code, "to", f"claim {options.code_claim}", via, "where it is lacking"))
    if code.kind == "store" and options.code_store:
        actions.append(("send", spec.code, "to", options.code_store.url, "where it is lacking"))
    actions += [_creating(manifest) for manifest in (*manifests.first, manifests.workload, *manifests.then)]
    if code.kind == "configmap":
        alternative = ("or, if it is more than 1 MiB, to", fallback) if options.code == "auto" and fallback else ()
        actions.append(("create", f"configmap/{name}-code-0", "out of", spec.code, *alternative))
    return actions


def _command(manifests: build.Manifests, options: KubernetesOptions) -> tuple[str, ...]:
    """Return the command that every pod runs."""
    for manifest in manifests:
        for _, template in validate.templates(manifest):
            for container in template["spec"]["containers"]:
                if container["name"] == pods.container_name(options):
                    return tuple(argument.replace("$$", "$") for argument in container.get("command", ()))
    return ()


def _creating(manifest: delivery.Object) -> tuple[str, ...]:
    return ("create", f"{str(manifest['kind']).lower()}/{manifest['metadata']['name']}")
