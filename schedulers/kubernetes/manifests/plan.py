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

    Two things are left open until the code is packed: its digest, and with `code: auto` and a claim or store
    whether that is needed.
    """
    code = delivery.planned(options)
    made = build.build(spec, options, job_id, code, target=target)
    files = build.files(made)
    if code.kind == "pvc":
        files["kubernetes/code-pod.yaml"] = build.to_yaml([build.loader_pod(spec, options, job_id, target)])
    return Plan(
        target=target,
        kind=KIND,
        job_id=job_id,
        files=files,
        actions=(*_actions(made, spec, options, code), _command(made, options)),
        settings={"spec": spec.to_json()},
        warnings=build.warnings(spec, options),
    )


def _actions(
    made: build.Manifests, spec: JobSpec, options: KubernetesOptions, code: delivery.Code
) -> list[tuple[str, ...]]:
    name = str(made.workload["metadata"]["name"])
    larger = f"claim {options.code_claim}" if options.code_claim else options.code_store and options.code_store.url
    found: list[tuple[str, ...]] = []
    if code.kind == "pvc":
        through = f"through pod/{name}-loader"
        found.append(("send", spec.code, "to", f"claim {options.code_claim}", through, "where it is lacking"))
    if code.kind == "store" and options.code_store:
        found.append(("send", spec.code, "to", options.code_store.url, "where it is lacking"))
    found += [_creating(each) for each in (*made.first, made.workload, *made.then)]
    if code.kind == "configmap":
        more = ("or, if it is more than 1 MiB, to", larger) if options.code == "auto" and larger else ()
        found.append(("create", f"configmap/{name}-code-0", "out of", spec.code, *more))
    return found


def _command(made: build.Manifests, options: KubernetesOptions) -> tuple[str, ...]:
    """Return the command of every pod, as the pod will see it."""
    for each in made:
        for _, template in validate.templates(each):
            for container in template["spec"]["containers"]:
                if container["name"] == pods.container_name(options):
                    return tuple(word.replace("$$", "$") for word in container.get("command", ()))
    return ()


def _creating(made: delivery.Object) -> tuple[str, ...]:
    return ("create", f"{str(made['kind']).lower()}/{made['metadata']['name']}")
