"""What the description of a pod comes to on a node of the tests: its environment, user, files."""

from __future__ import annotations

import base64
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .client import Object, Refused
from .sandbox import Mount, Program, Sandbox
from .watch import Connection

# Whatever an image is called, this is its user where the pod must not be root's and says no other.
_IMAGE_USER = 1000


class NotYet(Exception):
    """The pod cannot start as things are; the kubelet tries again. `reason` is its word for it."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class Surroundings:
    """What a pod can learn of where it is."""

    connection: Connection
    node: str
    host_address: str
    address: str
    api_address: str
    api_port: int


async def program(pod: Object, container: Object, around: Surroundings, volumes: Mapping[str, Path]) -> Program:
    """Raises NotYet."""
    spec = pod["spec"]
    env = {
        "PATH": f"{sys.prefix}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOSTNAME": spec.get("hostname") or pod["metadata"]["name"],
        "KUBERNETES_SERVICE_HOST": around.api_address,
        "KUBERNETES_SERVICE_PORT": str(around.api_port),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    env |= await _environment(pod, container, around, env)
    user, privileges = _privileges({**(spec.get("securityContext") or {}), **(container.get("securityContext") or {})})
    env = {"HOME": "/" if user else "/root", **env}
    argv = [expanded(word, env) for word in (*(container.get("command") or []), *(container.get("args") or []))]
    security = container.get("securityContext") or {}
    return Program(
        argv=argv or ["sleep", "infinity"],
        env=env,
        workdir=container.get("workingDir") or "/",
        mounts=[_mount(each, volumes) for each in container.get("volumeMounts") or []],
        privileges=privileges,
        read_only=bool(security.get("readOnlyRootFilesystem")),
        shared=bool(spec.get("shareProcessNamespace")),
    )


def expanded(text: str, env: Mapping[str, str]) -> str:
    """`$(NAME)` replaced where it is known, `$$` by one of them."""
    out, rest = "", text
    while "$" in rest:
        before, _, rest = rest.partition("$")
        out += before
        if rest.startswith("$"):
            out, rest = out + "$", rest[1:]
        elif rest.startswith("(") and ")" in rest:
            name, _, rest = rest[1:].partition(")")
            out += env.get(name, f"$({name})")
        else:
            out += "$"
    return out + rest


def cannot_start(program: Program) -> str | None:
    """What the runtime says of a program that is nowhere."""
    name = program.argv[0]
    if any(name.startswith(f"{mount.target}/") for mount in program.mounts) or ("/" in name and name[0] != "/"):
        return None
    if shutil.which(name, path=program.env.get("PATH", "")) is not None:
        return None
    why = "no such file or directory" if "/" in name else "executable file not found in $PATH"
    return (
        "failed to create containerd task: failed to create shim task: OCI runtime create failed: runc create failed: "
        f'unable to start container process: exec: "{name}": {why}: unknown'
    )


def unpullable(image: str) -> tuple[str, str] | None:
    """Why the registry of the tests does not give the image: a reason and a message."""
    if image != image.lower().strip() or " " in image:
        what = f'Failed to apply default image tag "{image}": couldn\'t parse image reference "{image}"'
        return "InvalidImageName", f"{what}: invalid reference format"
    if "no-such" not in image:
        return None
    return "ErrImagePull", (
        f'rpc error: code = NotFound desc = failed to pull and unpack image "{image}": failed to resolve reference '
        f'"{image}": {image}: not found'
    )


async def volumes(pod: Object, around: Surroundings, sandbox: Sandbox) -> dict[str, Path]:
    """The directory of each volume of the pod. Raises NotYet for one that is not there."""
    found = {}
    for volume in pod["spec"].get("volumes") or []:
        found[volume["name"]] = await _volume(pod, volume, around, sandbox)
    return found


async def _volume(pod: Object, volume: Object, around: Surroundings, sandbox: Sandbox) -> Path:
    name, place = volume["name"], pod["metadata"]["namespace"]
    directory: Path = sandbox.directory / "volumes" / name
    group = (pod["spec"].get("securityContext") or {}).get("fsGroup")
    if "emptyDir" in volume:
        if not directory.exists():
            empty = volume["emptyDir"]
            if empty.get("medium") == "Memory":
                await sandbox.add_tmpfs(directory, _tmpfs_size(empty.get("sizeLimit")))
            directory.mkdir(parents=True, exist_ok=True)
            _open_to(directory, group)
        return directory
    if "hostPath" in volume:
        path = Path(volume["hostPath"]["path"])
        if "Create" in (volume["hostPath"].get("type") or ""):
            path.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            said = f'MountVolume.SetUp failed for volume "{name}" : hostPath type check failed: {path} is not there'
            raise NotYet("FailedMount", said)
        return path
    if "persistentVolumeClaim" in volume:
        claimed = await _claimed(volume["persistentVolumeClaim"]["claimName"], place, around)
        _open_to(claimed, group)
        return claimed
    files: dict[str, bytes] = {}
    try:
        for kind, source in _sources(volume):
            files |= await _files(kind, source, pod, around)
    except NotYet as error:
        raise NotYet("FailedMount", f'MountVolume.SetUp failed for volume "{name}" : {error}') from None
    for key, data in files.items():
        file = directory / key
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def _sources(volume: Object) -> Iterator[tuple[str, Object]]:
    if "projected" in volume:
        for source in volume["projected"].get("sources") or []:
            yield from source.items()
        return
    for kind in ("configMap", "secret", "downwardAPI"):
        if kind in volume:
            yield kind, volume[kind]
            return
    raise NotYet("FailedMount", f"no volume plugin matched: {', '.join(volume)}")


async def _files(kind: str, source: Object, pod: Object, around: Surroundings) -> dict[str, bytes]:
    place = pod["metadata"]["namespace"]
    if kind == "downwardAPI":
        items = source.get("items") or []
        return {each["path"]: _field(pod, each["fieldRef"]["fieldPath"], around).encode() for each in items}
    if kind == "serviceAccountToken":
        account = pod["spec"].get("serviceAccountName") or "default"
        body = {"spec": {"expirationSeconds": max(600, source.get("expirationSeconds") or 3600)}}
        path = f"/api/v1/namespaces/{place}/serviceaccounts/{account}/token"
        told = await around.connection.call("POST", path, body)
        return {source.get("path") or "token": told["status"]["token"].encode()}
    name = str(source.get("secretName") or source.get("name"))
    data = await _data(kind, name, place, around, optional=bool(source.get("optional")))
    items = source.get("items")
    if items is None:
        return data
    absent = [each["key"] for each in items if each["key"] not in data]
    if absent and not source.get("optional"):
        raise NotYet("FailedMount", f"references non-existent {kind.lower()} key: {absent[0]}")
    return {each["path"]: data[each["key"]] for each in items if each["key"] in data}


async def _data(kind: str, name: str, place: str, around: Surroundings, *, optional: bool) -> dict[str, bytes]:
    try:
        found = await around.connection.call("GET", f"/api/v1/namespaces/{place}/{kind.lower()}s/{name}")
    except Refused as error:
        if optional and error.status == 404:
            return {}
        raise NotYet("CreateContainerConfigError", f'{kind.lower()} "{name}" not found') from None
    if kind == "secret":
        return {key: base64.b64decode(value) for key, value in (found.get("data") or {}).items()}
    binary = {key: base64.b64decode(value) for key, value in (found.get("binaryData") or {}).items()}
    return {key: value.encode() for key, value in (found.get("data") or {}).items()} | binary


async def _claimed(name: str, place: str, around: Surroundings) -> Path:
    try:
        claim = await around.connection.call("GET", f"/api/v1/namespaces/{place}/persistentvolumeclaims/{name}")
    except Refused:
        raise NotYet("FailedMount", f'persistentvolumeclaim "{name}" not found') from None
    if (claim.get("status") or {}).get("phase") != "Bound":
        raise NotYet("FailedMount", f'persistentvolumeclaim "{name}" is not bound')
    volume = await around.connection.call("GET", f"/api/v1/persistentvolumes/{claim['spec']['volumeName']}")
    return Path(volume["spec"]["hostPath"]["path"])


async def _environment(pod: Object, container: Object, around: Surroundings, base: Mapping[str, str]) -> dict[str, str]:
    place = pod["metadata"]["namespace"]
    env = dict(base)
    for source in container.get("envFrom") or []:
        kind = "secret" if "secretRef" in source else "configMap"
        reference = source[f"{kind}Ref"]
        data = await _data(kind, reference["name"], place, around, optional=bool(reference.get("optional")))
        env |= {f"{source.get('prefix', '')}{key}": value.decode() for key, value in data.items()}
    for each in container.get("env") or []:
        if "valueFrom" not in each:
            env[each["name"]] = expanded(each.get("value") or "", env)
            continue
        value = await _value(pod, container, each["valueFrom"], around)
        if value is not None:
            env[each["name"]] = value
    return env


async def _value(pod: Object, container: Object, source: Object, around: Surroundings) -> str | None:
    if "fieldRef" in source:
        return _field(pod, source["fieldRef"]["fieldPath"], around)
    if "resourceFieldRef" in source:
        kind, _, resource = source["resourceFieldRef"]["resource"].partition(".")
        return str(((container.get("resources") or {}).get(kind) or {}).get(resource, "0"))
    kind = "secret" if "secretKeyRef" in source else "configMap"
    reference, place = source[f"{kind}KeyRef"], pod["metadata"]["namespace"]
    data = await _data(kind, reference["name"], place, around, optional=bool(reference.get("optional")))
    if reference["key"] in data:
        return data[reference["key"]].decode()
    if reference.get("optional"):
        return None
    what = f"couldn't find key {reference['key']} in {kind[0].upper()}{kind[1:]} {place}/{reference['name']}"
    raise NotYet("CreateContainerConfigError", what)


def _field(pod: Object, path: str, around: Surroundings) -> str:
    metadata, spec = pod["metadata"], pod["spec"]
    for kind in ("labels", "annotations"):
        if path.startswith(f"metadata.{kind}['"):
            return str((metadata.get(kind) or {}).get(path.split("'")[1], ""))
    known = {
        "metadata.name": metadata["name"], "metadata.namespace": metadata["namespace"], "metadata.uid": metadata["uid"],
        "spec.nodeName": around.node, "spec.serviceAccountName": spec.get("serviceAccountName", ""),
        "status.podIP": around.address, "status.podIPs": around.address, "status.hostIP": around.host_address,
    }  # fmt: skip
    return str(known[path])


def _privileges(security: Mapping[str, object]) -> tuple[int, list[str]]:
    """The user's number, and the words of setpriv. Raises NotYet."""
    said = security.get("runAsUser")
    must_not_be_root = bool(security.get("runAsNonRoot"))
    user = int(str(said)) if said is not None else _IMAGE_USER if must_not_be_root else 0
    if user == 0 and must_not_be_root:
        raise NotYet("CreateContainerConfigError", "container's runAsUser breaks non-root policy")
    words = []
    if security.get("allowPrivilegeEscalation") is False:
        words += ["--no-new-privs"]
    if user or security.get("runAsGroup"):
        group = security.get("runAsGroup", user and _IMAGE_USER)
        words += ["--reuid", str(user), "--regid", str(group)]
        extra = security.get("fsGroup")
        words += ["--groups", str(extra)] if extra is not None else ["--clear-groups"]
    dropped = (security.get("capabilities") or {}).get("drop") or []  # type: ignore[attr-defined]
    if "ALL" in dropped:
        words += ["--bounding-set", "-all", "--inh-caps", "-all"]
    return user, words


def _mount(mount: Object, volumes: Mapping[str, Path]) -> Mount:
    source = volumes[mount["name"]]
    if mount.get("subPath"):
        source = source / mount["subPath"]
        if not source.exists():
            source.mkdir(parents=True)
    return Mount(source, mount["mountPath"], bool(mount.get("readOnly")))


def _open_to(directory: Path, group: int | None) -> None:
    directory.chmod(0o777)
    if group is not None:
        os.chown(directory, -1, group)
        directory.chmod(0o2777)


def _tmpfs_size(limit: str | None) -> str | None:
    """As mount has it: Kubernetes' units of 1024 without their i, those of 1000 as they are."""
    return None if limit is None else str(limit).removesuffix("i")


def requested(pod: Object) -> dict[str, float]:
    """What the pod takes of its node, by resource; cpu in cores, memory in bytes."""
    total: dict[str, float] = {"pods": 1}
    for container in pod["spec"]["containers"]:
        for key, value in _requests(container).items():
            total[key] = total.get(key, 0) + value
    for container in pod["spec"].get("initContainers") or []:
        for key, value in _requests(container).items():
            total[key] = max(total.get(key, 0), value)
    return total


def _requests(container: Object) -> Mapping[str, float]:
    resources = container.get("resources") or {}
    asked = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
    return {key: quantity(value) for key, value in asked.items()}


_UNITS: Sequence[tuple[str, float]] = (
    ("Ki", 2**10), ("Mi", 2**20), ("Gi", 2**30), ("Ti", 2**40),
    ("m", 1e-3), ("k", 1e3), ("M", 1e6), ("G", 1e9), ("T", 1e12),
)  # fmt: skip


def quantity(text: object) -> float:
    for unit, factor in _UNITS:
        if str(text).endswith(unit):
            return float(str(text).removesuffix(unit)) * factor
    return float(str(text))
