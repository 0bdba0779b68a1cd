"""The pod template of a job, the same for all kinds of objects that create pods."""

from __future__ import annotations

import json
import math
import posixpath
import shlex
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...clean_env import installed_main
from ...errors import SpecError, nearest
from ...job import JobSpec, check_cpu
from .. import names, tpu_slices
from ..options import VENDORS, KubernetesOptions, Volume, gpu_resource, is_word
from . import code_delivery as delivery
from .code_delivery import Code, Object

PORT = 29500
# The launcher gives its ranks the whole grace period, and then needs time to report their end.
_MARGIN_S = 10
# The exit code of a launcher that ended its ranks at the time limit, as `accel.exit_codes` has it.
TIME_LIMIT = 86
# The cluster's own limit deletes the pods with their logs. It is for launchers that fail to enforce theirs.
_BACKSTOP_S = 300
# Paths in volumes that exist as long as the pod.
_LOGS, _HOME, _STARTS = "/tmp/accel-logs", "/accel/home", "/accel/starts"
# Trainer's controller cannot read a runtime with other control characters.
_PLAIN_CONTROLS = "\n\t"
_DECODE = (
    "import json, os, sys; given = json.loads(sys.argv[1]); os.environ.update(given['env']); "
    "os.execvp(given['argv'][0], given['argv'])"
)
_RESERVED_VARIABLES = frozenset(
    "ACCEL_JOB_ID ACCEL_NODES ACCEL_NODE_RANK ACCEL_MASTER ACCEL_PORT ACCEL_SERVICE ACCEL_POD_UID ACCEL_POD_IP "
    "ACCEL_POD_FAILURES ACCEL_STARTS ACCEL_NODE_0_REPORTS ACCEL_TIME_LIMIT ACCEL_TIME_LIMIT_EXIT ACCEL_SECRETS "
    "JOBSET_RESTART_ATTEMPT".split()
)
_REFERENCE = "secret:NAME/KEY"


def check(spec: JobSpec, options: KubernetesOptions, name: str) -> None:
    """Raise SpecError for a job that no workload can run."""
    subject = f"target {name}"
    if options.read_only_root_filesystem and spec.setup:
        raise SpecError(f"{subject}: --setup cannot install anything with read_only_root_filesystem: remove one")
    if (spec.image or options.image) is None:
        raise SpecError(f"{subject}: no container image: use --image, or set image: in accel.yaml")
    if spec.image is not None and not is_word(spec.image):
        raise SpecError(f"{subject}: --image must be one word, not {spec.image!r}")
    if spec.after:
        raise SpecError(
            f"{subject}: --after is not supported on Kubernetes; submit the job when those of --after have ended"
        )
    check_cpu(spec, options.cpu, name)
    if spec.resources.accelerator is not None:
        if not spec.resources.gpus:
            raise SpecError(f"{subject}: --accelerator needs --gpus")
        _accelerator(spec.resources.accelerator, options, subject)
    tpu_slices.check(spec, options, node_selector(spec, options), subject)
    reserved = _RESERVED_VARIABLES.union(tpu_slices.MEGASCALE) if options.slices > 1 else _RESERVED_VARIABLES
    for variable in (*spec.env, *spec.secrets):
        if variable in reserved:
            raise SpecError(f"{subject}: accel sets {variable} itself: leave it out of --env and --secret")
    for variable, reference in spec.secrets.items():
        _secret(variable, reference, subject)
    for text in (*spec.argv, *spec.env.values()):
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise SpecError(f"{subject}: {text!r} is not UTF-8, which the cluster requires")


def processes(spec: JobSpec) -> int:
    """Return the number of processes of each pod."""
    return spec.procs_per_node or spec.resources.gpus or 1


def world(spec: JobSpec, master: str) -> list[Object]:
    """Return the variables with the job's nodes. Each node's rank comes from fields of its pod."""
    return [
        {"name": "ACCEL_NODES", "value": str(spec.nodes)},
        {"name": "ACCEL_MASTER", "value": master},
        {"name": "ACCEL_PORT", "value": str(PORT)},
    ]


def backstop_s(spec: JobSpec) -> int | None:
    """Return the cluster's time limit in seconds, some minutes after the launchers' own, or None."""
    return None if spec.time_limit_s is None else math.ceil(spec.time_limit_s + spec.grace_s) + _BACKSTOP_S


def deadline(spec: JobSpec) -> Object:
    """Return the field with the cluster's time limit, if there is one."""
    return {} if spec.time_limit_s is None else {"activeDeadlineSeconds": backstop_s(spec)}


def lifecycle(options: KubernetesOptions) -> Object:
    """Return the fields that delay a job's start and remove it after its end."""
    return {
        **({} if options.ttl_s is None else {"ttlSecondsAfterFinished": options.ttl_s}),
        **({"suspend": True} if options.suspend or options.queue else {}),
    }


def variable_from(name: str, field_path: str) -> Object:
    """Return an environment variable with the value of a field of the pod."""
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": field_path}}}


def needs_rendezvous(spec: JobSpec) -> bool:
    """Return True if the job may have several nodes."""
    return (spec.max_nodes or spec.nodes) > 1


def service(metadata: Object, job_id: str, selector: Mapping[str, str], **fields: Any) -> Object:
    """Build a Service, in which each selected pod of the job has a name before it is ready."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata,
        "spec": {
            **fields,
            "publishNotReadyAddresses": True,
            "selector": {names.JOB_ID: names.label_value(job_id), **selector},
            # A server-side apply (Helm 4) on an old server needs the protocol.
            "ports": [{"name": "rendezvous", "port": PORT, "protocol": "TCP"}],
        },
    }


def rendezvous(options: KubernetesOptions, metadata: Object, job_id: str) -> Object:
    """Build the Service of node 0, created before any pod.

    A pod's own name does not resolve until the pod has an address, and name servers cache that for half a minute. The
    Service's name resolves from the beginning, and its address stays when the pod is replaced.
    """
    index = names.REPLICA_INDEX if options.workload == "pytorchjob" else names.COMPLETION_INDEX
    first = {index: "0", **({names.JOB_INDEX: "0"} if options.slices > 1 else {})}
    return service({**metadata, "name": rendezvous_name(metadata["name"])}, job_id, first)


def rendezvous_name(name: str) -> str:
    return f"{name}-rendezvous"


def container_name(options: KubernetesOptions) -> str:
    """Return the name of the training container, by which the operators find it."""
    return "node" if options.workload == "trainjob" else "pytorch"


def template(
    spec: JobSpec,
    options: KubernetesOptions,
    name: str,
    job_id: str,
    code: Code,
    *,
    env: Sequence[Object] = (),
    launch: Sequence[str] = (),
    labels: Mapping[str, str] | None = None,
    annotations: Mapping[str, str] | None = None,
) -> Object:
    """Build a PodTemplateSpec without a restart policy. The optional arguments are additions of one kind of object."""
    pod_labels = {**names.labels(spec.name, job_id), **(labels or {}), **options.labels}
    launcher_stays = processes(spec) * spec.nodes > 1 or bool(launch) or spec.time_limit_s is not None
    report = names.REPORTED if launcher_stays else names.NOT_REPORTED
    notes = {names.REPORT: report, **(annotations or {}), **options.annotations}
    variables = [*_environment(spec, options, job_id), *_downward_fields(spec, options, name), *env]
    main = _main(spec, options, code, command(spec, options, launch), variables)
    return {
        "metadata": {"labels": pod_labels, "annotations": notes},
        "spec": _drop_empty(_pod_spec(spec, options, name, code, main)),
    }


def _base(spec: JobSpec, options: KubernetesOptions) -> Object:
    """Return the settings of all containers."""
    return {
        "image": spec.image or options.image,
        "imagePullPolicy": options.image_pull_policy,
        "resources": _resources(spec, options, devices=False),
        "securityContext": security(options),
    }


def _pod_spec(spec: JobSpec, options: KubernetesOptions, name: str, code: Code, main: Object) -> Object:
    base, python = _base(spec, options), options.python or "python3"
    return {
        "terminationGracePeriodSeconds": math.ceil(spec.grace_s) + _MARGIN_S,
        # The first process of a PID namespace ignores SIGTERM unless it has a handler.
        "shareProcessNamespace": True,
        "automountServiceAccountToken": None if options.service_account else False,
        "enableServiceLinks": False,
        "serviceAccountName": options.service_account,
        "imagePullSecrets": [{"name": secret} for secret in options.image_pull_secrets],
        "priorityClassName": options.priority_class,
        "schedulerName": "volcano" if options.volcano_queue else None,
        "hostNetwork": options.host_network or None,
        "dnsPolicy": "ClusterFirstWithHostNet" if options.host_network else None,
        "nodeSelector": node_selector(spec, options),
        "affinity": dict(options.affinity),
        "tolerations": list(_tolerations(spec, options)),
        "securityContext": {} if options.fs_group is None else {"fsGroup": options.fs_group},
        "initContainers": [
            _drop_empty({**container, "command": [unexpanded(argument) for argument in container["command"]]})
            for container in delivery.init_containers(code, options, base, python, tmp_mounts(options))
        ],
        "containers": [_drop_empty(main)],
        "volumes": _volumes(spec, options, name, code),
    }


def _main(
    spec: JobSpec, options: KubernetesOptions, code: Code, arguments: list[str], variables: list[Object]
) -> Object:
    """Build the training container. `arguments`: its command."""
    port_name = "pytorchjob-port" if options.workload == "pytorchjob" else "rendezvous"
    return {
        "name": container_name(options),
        **_base(spec, options),
        "command": [unexpanded(argument) for argument in _encoded_command(arguments, spec, options)],
        "workingDir": delivery.workdir(code, options, spec.workdir),
        "env": variables,
        "ports": [] if options.workload == "trainjob" else [{"name": port_name, "containerPort": PORT}],
        "resources": _resources(spec, options, devices=True),
        # `File` would lose the last line of a failed setup, a broken installation, or a program without a launcher.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            {"name": "accel", "mountPath": "/accel"},
            *([{"name": "accel-home", "mountPath": _HOME}] if _needs_home(options) else []),
            *tmp_mounts(options),
            {"name": "accel-shm", "mountPath": "/dev/shm"},
            *(_mount(volume, index) for index, volume in enumerate(options.volumes)),
        ],
    }


# https://cloud.google.com/kubernetes-engine/docs/how-to/tpus: for containers that are not privileged.
_LOCK_MEMORY = "ulimit -l 68719476736"


def command(spec: JobSpec, options: KubernetesOptions, launch: Sequence[str] = ()) -> list[str]:
    """Return a pod's command: `setup`, then `accel launch`, which with several ranks prefixes lines with `[rank N]`."""
    count = processes(spec)
    arguments = ["accel"] if options.python is None else [options.python, "-c", installed_main("accel.cli")]
    arguments += ["launch", "--num_processes", str(count * spec.nodes), *launch]
    if spec.nodes > 1 or launch:
        arguments += ["--rdzv_conf", f"timeout={options.start_timeout_s:g}"]
    if options.cpu:
        arguments += ["--cpu"]
    arguments += ["--shutdown_timeout", f"{spec.grace_s:g}"]
    if count > 1:
        arguments += ["--log_dir", _LOGS, "--tee", "3"]
    arguments += {"script": [], "module": ["-m"], "command": ["--no_python"]}[spec.entry]
    arguments += ["--", *spec.argv]
    lines = [_LOCK_MEMORY] if options.ipc_lock and options.gpu == "tpu" else []
    lines += [shlex.join(argv) for argv in (*options.setup, *spec.setup)]
    if not lines:
        return arguments
    lines = ["set -e", *lines, 'exec "$@"']
    return ["sh", "-c", "\n".join(lines), "sh", *arguments]


def _encoded_command(arguments: list[str], spec: JobSpec, options: KubernetesOptions) -> list[str]:
    """Return the command, encoded as JSON if the object cannot hold its control characters."""
    env = {key: value for key, value in spec.env.items() if not _can_hold(value, options)}
    if not env and all(_can_hold(argument, options) for argument in arguments):
        return arguments
    text = json.dumps({"argv": arguments, "env": env}).replace("\x7f", "\\u007f")
    return [options.python or "python3", "-c", _DECODE, text]


def _can_hold(text: str, options: KubernetesOptions) -> bool:
    """Return True if an object of this kind can hold the text."""
    stripped = text.translate({ord(char): None for char in _PLAIN_CONTROLS})
    return options.workload != "trainjob" or not any(unicodedata.category(char) == "Cc" for char in stripped)


def unexpanded(text: str) -> str:
    """Escape the text: Kubernetes expands `$(NAME)`, and `$$` is a dollar sign.

    https://kubernetes.io/docs/tasks/inject-data-application/define-command-argument-container/
    """
    return text.replace("$", "$$")


def security(options: KubernetesOptions) -> Object:
    """Return a container's security context.

    It follows https://kubernetes.io/docs/concepts/security/pod-security-standards/. The pod itself sets no user:
    containers that the cluster adds, such as a service mesh's, may need another one.
    """
    context: Object = {"runAsUser": options.run_as_user, "runAsGroup": options.run_as_group}
    if options.read_only_root_filesystem:
        context["readOnlyRootFilesystem"] = True
    if options.pod_security == "restricted":
        context |= {
            "runAsNonRoot": True,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        }
    elif options.ipc_lock:
        context["capabilities"] = {"add": ["SYS_RESOURCE" if options.gpu == "tpu" else "IPC_LOCK"]}
    return _drop_empty(context)


def memory(gigabytes: float) -> str:
    return f"{int(gigabytes)}Gi" if gigabytes == int(gigabytes) else f"{math.ceil(gigabytes * 1024)}Mi"


def _environment(spec: JobSpec, options: KubernetesOptions, job_id: str) -> Iterator[Object]:
    yield {"name": "ACCEL_JOB_ID", "value": job_id}
    # A user id without an entry in the image's /etc/passwd has no home, and libraries need a user name.
    user_variables = {} if options.run_as_user is None else {"USER": "accel", "LOGNAME": "accel"}
    for key, value in {**({"HOME": _HOME} if _needs_home(options) else {}), **user_variables}.items():
        if key not in spec.env:
            yield {"name": key, "value": value}
    for key, value in spec.env.items():
        if not _can_hold(value, options):
            continue
        yield {"name": key, "value": unexpanded(value)}
    if spec.secrets:
        yield {"name": "ACCEL_SECRETS", "value": ",".join(spec.secrets)}
    for key, reference in spec.secrets.items():
        secret, secret_key = _secret(key, reference, "")
        yield {"name": key, "valueFrom": {"secretKeyRef": {"name": secret, "key": secret_key}}}


def _needs_home(options: KubernetesOptions) -> bool:
    """Return True if the image's home is read-only or not this user's."""
    return options.run_as_user is not None or options.read_only_root_filesystem


def tmp_mounts(options: KubernetesOptions) -> list[Object]:
    """Return a mount for /tmp if the image's is read-only, unless the options mount another."""
    if not options.read_only_root_filesystem or any(
        posixpath.normpath(volume.mount) == "/tmp" for volume in options.volumes
    ):
        return []
    return [{"name": "accel-tmp", "mountPath": "/tmp"}]


def _downward_fields(spec: JobSpec, options: KubernetesOptions, name: str) -> Iterator[Object]:
    """Yield the variables that distinguish a launcher from its predecessors and let others find it."""
    yield variable_from("ACCEL_POD_UID", "metadata.uid")
    yield {"name": "ACCEL_STARTS", "value": _STARTS}
    if needs_rendezvous(spec):
        yield {"name": "ACCEL_SERVICE", "value": rendezvous_name(name)}
    if spec.nodes > 1 and spec.max_nodes is None:
        yield variable_from("ACCEL_POD_IP", "status.podIP")
        if not _restarts_pods(spec, options):
            yield {"name": "ACCEL_NODE_0_REPORTS", "value": "1"}
    if spec.time_limit_s is not None:
        yield {"name": "ACCEL_TIME_LIMIT", "value": str(math.ceil(spec.time_limit_s))}
        yield {"name": "ACCEL_TIME_LIMIT_EXIT", "value": _limit_codes(spec, options)}


def _limit_codes(spec: JobSpec, options: KubernetesOptions) -> str:
    """Return the exit codes of node 0 and of the others at the time limit. They preserve the logs.

    A failed job deletes its running pods: so the others succeed, and node 0 exits last. The kubelets of a PyTorchJob
    with restarts restart failed containers: so all succeed.
    """
    return "0,0" if options.workload == "pytorchjob" and spec.retry.max_restarts else f"{TIME_LIMIT},0"


def _restarts_pods(spec: JobSpec, options: KubernetesOptions) -> bool:
    """Return True if each failed pod restarts by itself, or may (`backoffLimit` of a runtime of the cluster).

    In other jobs node 0 reports for all.
    """
    if options.runtime is not None:
        return True
    return options.workload in ("pytorchjob", "job") and spec.retry.max_restarts > 0


def _secret(variable: str, reference: str, subject: str) -> tuple[str, str]:
    kind, _, rest = reference.partition(":")
    secret, slash, key = rest.partition("/")
    if kind != "secret":
        raise SpecError(f"--secret {variable}: {subject} reads the cluster's Secrets only, as {_REFERENCE}")
    if not (slash and names.is_subdomain(secret) and names.is_qualified(key) and "/" not in key):
        raise SpecError(
            f"--secret {variable}: {subject} expects {_REFERENCE}: a Secret of the cluster, and a key in it"
        )
    return secret, key


def _resources(spec: JobSpec, options: KubernetesOptions, *, devices: bool) -> Object:
    """Return equal requests and limits, so that a pod's resources are guaranteed."""
    resources = spec.resources
    quantities: dict[str, str] = {}
    if resources.cpus is not None:
        quantities["cpu"] = str(resources.cpus)
    if resources.memory_gb is not None:
        quantities["memory"] = memory(resources.memory_gb)
    if devices:
        if resources.gpus:
            quantities[gpu_resource(options)] = str(resources.gpus)
        quantities |= {key: str(value) for key, value in options.resources.items()}
    return {"requests": dict(quantities), "limits": dict(quantities)} if quantities else {}


def _accelerator(accelerator: str, options: KubernetesOptions, subject: str) -> Mapping[str, str]:
    if options.accelerators:
        if accelerator not in options.accelerators:
            choices = ", ".join(options.accelerators)
            suggestion = nearest(accelerator, options.accelerators)
            raise SpecError(f"{subject}: --accelerator {accelerator}: accelerators has {choices}{suggestion}")
        return options.accelerators[accelerator]
    if not names.is_label_value(accelerator):
        raise SpecError(
            f"{subject}: --accelerator {accelerator!r} is not a node label's value; name it under accelerators:"
        )
    return {options.gpu_label or VENDORS[options.gpu][1]: accelerator}


def node_selector(spec: JobSpec, options: KubernetesOptions) -> dict[str, str]:
    accelerator = spec.resources.accelerator
    return {
        **options.node_selector,
        **(_accelerator(accelerator, options, "") if accelerator else {}),
        **tpu_slices.selector(options),
    }


def _tolerations(spec: JobSpec, options: KubernetesOptions) -> Iterator[Object]:
    for toleration in options.tolerations:
        operator = toleration.operator or ("Exists" if toleration.value is None else "Equal")
        fields = {
            "key": toleration.key,
            "operator": operator,
            "value": toleration.value,
            "effect": toleration.effect,
            "tolerationSeconds": toleration.seconds,
        }
        yield _drop_empty(fields)
    resource = gpu_resource(options)
    if spec.resources.gpus and resource not in {toleration.key for toleration in options.tolerations}:
        # Nodes with GPUs commonly have a taint of the resource's name, against pods that need none.
        yield {"key": resource, "operator": "Exists", "effect": "NoSchedule"}


def _volumes(spec: JobSpec, options: KubernetesOptions, name: str, code: Code) -> list[Object]:
    shm: Object = {"medium": "Memory"}
    if spec.resources.shm_gb is not None:
        shm["sizeLimit"] = memory(spec.resources.shm_gb)
    return [
        {"name": "accel", "emptyDir": {}},
        *([{"name": "accel-home", "emptyDir": {}}] if _needs_home(options) else []),
        *({"name": mount["name"], "emptyDir": {}} for mount in tmp_mounts(options)),
        {"name": "accel-shm", "emptyDir": shm},
        *delivery.volumes(code, options, name),
        *({"name": f"volume-{index}", **_source(volume)} for index, volume in enumerate(options.volumes)),
    ]


def _source(volume: Volume) -> Object:
    if volume.claim is not None:
        return {"persistentVolumeClaim": {"claimName": volume.claim}}
    if volume.config_map is not None:
        return {"configMap": {"name": volume.config_map}}
    if volume.secret is not None:
        return {"secret": {"secretName": volume.secret}}
    if volume.host_path is not None:
        return {"hostPath": {"path": volume.host_path}}
    if volume.nfs is not None:
        server, _, path = volume.nfs.partition(":")
        return {"nfs": {"server": server, "path": path}}
    return dict(volume.source or {})


def _mount(volume: Volume, index: int) -> Object:
    extra = {"subPath": volume.sub_path, "readOnly": volume.read_only or None}
    return _drop_empty({"name": f"volume-{index}", "mountPath": volume.mount, **extra})


def _drop_empty(value: Object) -> Object:
    return {key: child for key, child in value.items() if child is not None and child not in ({}, [], ())}
