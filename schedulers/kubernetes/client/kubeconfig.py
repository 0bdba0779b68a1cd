"""Which cluster, and as whom: the kubeconfig files as kubectl reads them, or what every pod is given.

https://kubernetes.io/docs/concepts/configuration/organize-cluster-access-kubeconfig/. Read here and not by the official
package, whose import takes a quarter of a second: `credentials` asks it for what it alone can do.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ...errors import ConfigError, nearest
from ...printable import without_password
from ..options import KubernetesOptions

# Where a pod finds its service account: https://kubernetes.io/docs/tasks/run-application/access-api-from-pod/
SERVICE_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
_HOST, _PORT = "KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT"
_DEFAULT = "~/.kube/config"
_SECTIONS = ("clusters", "contexts", "users")
# Keys of a cluster and of a user whose values are paths, seen from the file they stand in.
_PATHS = ("certificate-authority", "client-certificate", "client-key", "tokenFile")


@dataclass(frozen=True, kw_only=True)
class Access:
    """A cluster, and as whom.

    files:   the kubeconfig files that were read, joined as in $KUBECONFIG; None in a pod.
    context: the one chosen; None in a pod.
    cluster, user: as they stand in the files, paths in them made absolute.
    """

    server: str
    namespace: str
    context: str | None = None
    files: str | None = None
    directory: str = ""
    cluster: Mapping[str, Any] = field(default_factory=dict)
    user: Mapping[str, Any] = field(default_factory=dict)

    @property
    def shown(self) -> str:
        """For people: the server's URL without a password."""
        return without_password(self.server)

    @property
    def who(self) -> str:
        """For people: whose credentials these are."""
        return "this pod's service account" if self.context is None else f"context {self.context}"


def find(options: KubernetesOptions, target: str) -> Access:
    """The access that the options mean, with the namespace that they or the context name. Raises ConfigError."""
    where = f"target {target}: "
    said, files = _files(options, where)
    if not files:
        inside = None if options.context is not None else in_cluster()
        if inside is None:
            raise ConfigError(
                f"{where}there is no kubeconfig ({said}), and this is no pod of a cluster: set KUBECONFIG, or say "
                "kubeconfig: in accel.yaml"
            )
        found = inside
    else:
        found = _chosen(files, options.context, where)
    return replace(found, namespace=options.namespace or found.namespace)


def in_cluster(environ: Mapping[str, str] = os.environ, directory: str = SERVICE_ACCOUNT) -> Access | None:
    """What this process may do as a pod of a cluster; None outside of one. Raises ConfigError for half of it."""
    host, port = environ.get(_HOST), environ.get(_PORT)
    if not host or not port:
        return None
    token, authority = os.path.join(directory, "token"), os.path.join(directory, "ca.crt")
    for path in (token, authority):
        if not os.path.isfile(path):
            raise ConfigError(
                f"{_HOST} is set, so this is a pod, but it has no {path}: automountServiceAccountToken is off"
            )
    return Access(
        server=f"https://{f'[{host}]' if ':' in host else host}:{port}",
        namespace=_text(os.path.join(directory, "namespace")) or "default",
        cluster={"certificate-authority": authority},
        user={"tokenFile": token},
    )


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read().strip()
    except OSError:
        return ""


def _files(options: KubernetesOptions, where: str) -> tuple[str, list[str]]:
    """Where kubeconfigs were looked for, in words, and those that are there. A file that was named must be."""
    if options.kubeconfig is not None:
        # A pinned one (`cluster_ref`) may be several, as $KUBECONFIG may.
        paths = [os.path.abspath(os.path.expanduser(path)) for path in options.kubeconfig.split(os.pathsep) if path]
        missing = [path for path in paths if not os.path.exists(path)]
        if len(missing) == len(paths):
            raise ConfigError(f"{where}kubeconfig: {options.kubeconfig}: there is no such file")
        return options.kubeconfig, [path for path in paths if path not in missing]
    listed = os.environ.get("KUBECONFIG", "")
    paths = [os.path.abspath(os.path.expanduser(path)) for path in listed.split(os.pathsep) if path]
    said = f"KUBECONFIG={listed}: no such file" if paths else f"no {_DEFAULT}, and KUBECONFIG is not set"
    paths = paths or [os.path.expanduser(_DEFAULT)]
    return said, [path for path in paths if os.path.exists(path)]


def _chosen(files: list[str], wanted: str | None, where: str) -> Access:
    merged, current = _merged(files, where)
    said = files[0] if len(files) == 1 else os.pathsep.join(files)
    name = wanted or current
    contexts = merged["contexts"]
    if not name:
        raise ConfigError(f"{where}{said} has no current-context: say context: (there are {_listed(contexts)})")
    if name not in contexts:
        key = "context: " if wanted else "current-context: "
        raise ConfigError(
            f"{where}{key}{said} has no context {name!r}{nearest(name, contexts)} (contexts: {_listed(contexts)})"
        )
    path, context = contexts[name]
    cluster_path, cluster = _named(
        merged["clusters"], context.get("cluster"), f"{where}{path}: context {name}: cluster"
    )
    user_name = context.get("user")
    user = _named(merged["users"], user_name, f"{where}{path}: context {name}: user") if user_name else (path, {})
    server = cluster.get("server")
    if not isinstance(server, str) or not server.startswith(("https://", "http://")):
        raise ConfigError(
            f"{where}{cluster_path}: cluster {context['cluster']}: server must be like https://host:port, "
            f"not {without_password(server) if isinstance(server, str) else type(server).__name__!r}"
        )
    return Access(
        server=server.rstrip("/"),
        namespace=str(context.get("namespace") or "default"),
        context=name,
        files=os.pathsep.join(files),
        directory=os.path.dirname(user[0]),
        cluster=_absolute(cluster, cluster_path),
        user=_absolute(user[1], user[0]),
    )


_Section = dict[str, tuple[str, Mapping[str, Any]]]


def _merged(files: list[str], where: str) -> tuple[dict[str, _Section], str | None]:
    """Of every section, name -> (its file, what it says); and the current context. The first file that says a thing
    counts."""
    merged: dict[str, _Section] = {section: {} for section in _SECTIONS}
    current = None
    for path in files:
        document = _read(path, where)
        current = current or document.get("current-context")
        for section in _SECTIONS:
            for name, value in _entries(document, section, f"{where}{path}"):
                merged[section].setdefault(name, (path, value))
    return merged, None if current is None else str(current)


def _entries(document: Mapping[str, Any], section: str, where: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    listed = document.get(section) or []
    if not isinstance(listed, list):
        raise ConfigError(f"{where}: {section} must be a list, not a {type(listed).__name__}")
    for entry in listed:
        value = entry.get(section[:-1]) if isinstance(entry, dict) else None
        if not isinstance(entry, dict) or not entry.get("name") or not isinstance(value or {}, dict):
            raise ConfigError(f"{where}: {section}: expects entries with name and {section[:-1]}, got {_shape(entry)}")
        yield str(entry["name"]), value or {}


def _read(path: str, where: str) -> dict[str, Any]:
    import yaml

    try:
        with open(path, encoding="utf-8") as file:
            found = yaml.load(file, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except OSError as error:
        raise ConfigError(f"{where}{path}: {(error.strerror or str(error)).lower()}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{where}{path} is no kubeconfig: it is not text") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        at = "" if mark is None else f":{mark.line + 1}"
        why = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigError(f"{where}{path}{at}: {why}") from None
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise ConfigError(f"{where}{path} is no kubeconfig: it holds a {type(found).__name__}")
    return found


def _named(section: _Section, name: object, where: str) -> tuple[str, Mapping[str, Any]]:
    if not name or str(name) not in section:
        raise ConfigError(f"{where} {name!r} is in no file{nearest(str(name), section)} (there are {_listed(section)})")
    return section[str(name)]


def _absolute(values: Mapping[str, Any], path: str) -> dict[str, Any]:
    base = os.path.dirname(path)
    return {
        key: os.path.join(base, value) if key in _PATHS and isinstance(value, str) and value else value
        for key, value in values.items()
    }


def _shape(entry: object) -> str:
    """What an entry is, without its values: they may be credentials."""
    if not isinstance(entry, dict):
        return f"a {type(entry).__name__}"
    return f"a mapping of {', '.join(map(str, entry)) or 'nothing'}"


def _listed(section: Mapping[str, object]) -> str:
    return ", ".join(sorted(section)) or "none"
