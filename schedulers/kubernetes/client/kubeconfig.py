"""The cluster and user: from kubeconfig files, merged by the official client, or from a pod's service account.

https://kubernetes.io/docs/concepts/configuration/organize-cluster-access-kubeconfig/
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from ...errors import ConfigError, nearest
from ...printable import without_password
from ..options import KubernetesOptions

INSTALL = "pip install 'accel-launch[kubernetes]'"
# Where a pod finds its service account: https://kubernetes.io/docs/tasks/run-application/access-api-from-pod/
SERVICE_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
_HOST, _PORT = "KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT"
_DEFAULT = "~/.kube/config"
# Keys of a cluster and of a user whose values are paths, seen from the file they stand in: the client takes a user's
# from the file of the cluster.
_PATHS = ("certificate-authority", "client-certificate", "client-key", "tokenFile")
_SHAPE = "clusters, contexts and users must be lists of entries with a name and a cluster, context or user"


@dataclass(frozen=True, kw_only=True)
class Access:
    """A cluster and its user.

    files:     the kubeconfig files that were read, joined as in $KUBECONFIG; None in a pod.
    context:   the chosen context; None in a pod.
    cluster, user: as in the files, with absolute paths.
    directory: the directory of the user's file.
    keep:      writes renewed tokens of `user` to their file.
    """

    server: str
    namespace: str
    context: str | None = None
    files: str | None = None
    directory: str = ""
    cluster: Mapping[str, Any] = field(default_factory=dict)
    user: Mapping[str, Any] = field(default_factory=dict)
    keep: Callable[[], None] | None = field(default=None, compare=False)

    @property
    def shown(self) -> str:
        """The server's URL for messages, without a password."""
        return without_password(self.server)

    @property
    def who(self) -> str:
        """The owner of the credentials, for messages."""
        return "this pod's service account" if self.context is None else f"context {self.context}"


def find(options: KubernetesOptions, target: str) -> Access:
    """Return the access and namespace that the options, else the context, select. Raises ConfigError."""
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
    """Return the access of a pod of a cluster, None outside of one. Raises ConfigError if it is incomplete."""
    if not environ.get(_HOST) or not environ.get(_PORT):
        return None
    token, authority = os.path.join(directory, "token"), os.path.join(directory, "ca.crt")
    library = package("this pod")
    made = library.Configuration()
    try:
        library.InClusterConfigLoader(token, authority, environ=environ).load_and_set(made)
    except library.ConfigException as error:
        raise ConfigError(
            f"{_HOST} is set, so this is a pod, but {str(error).lower().rstrip('.')} in {directory}: "
            "automountServiceAccountToken is off"
        ) from None
    return Access(
        server=made.host,
        namespace=_text(os.path.join(directory, "namespace")) or "default",
        cluster={"certificate-authority": made.ssl_ca_cert},
        user={"tokenFile": token},
    )


def package(where: str) -> Any:
    """Return the official client's modules for configuration. Raises ConfigError if it is not installed."""
    try:
        from kubernetes import client, config
        from kubernetes.config import exec_provider, incluster_config, kube_config
    except ImportError:
        raise ConfigError(f"{where}: the package kubernetes is not installed: {INSTALL}") from None
    modules = (client, config, exec_provider, incluster_config, kube_config)
    return SimpleNamespace(**{name: value for module in modules for name, value in vars(module).items()})


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read().strip()
    except OSError:
        return ""


def _files(options: KubernetesOptions, where: str) -> tuple[str, list[str]]:
    """Return the searched places in words, and the existing files. Raises ConfigError if the option names none."""
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
    merger = _merged(files, where)
    said = os.pathsep.join(files)
    contexts, clusters, users = (_entries(merger, section, where) for section in ("contexts", "clusters", "users"))
    # Of several files the client takes the last one's current context, and kubectl the first one's.
    currents = (str(file["current-context"]) for file in merger.config_files.values() if file.get("current-context"))
    name = wanted or next(currents, None)
    if not name:
        raise ConfigError(f"{where}{said} has no current-context: say context: (there are {_listed(contexts)})")
    if name not in contexts:
        key = "context: " if wanted else "current-context: "
        raise ConfigError(
            f"{where}{key}{said} has no context {name!r}{nearest(name, contexts)} (contexts: {_listed(contexts)})"
        )
    path, context = contexts[name]
    cluster_path, cluster = _named(clusters, context.get("cluster"), f"{where}{path}: context {name}: cluster")
    user_name, who = context.get("user"), f"{where}{path}: context {name}: user"
    user_path, user = _named(users, user_name, who) if user_name else (path, {})
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
        files=said,
        directory=os.path.dirname(user_path),
        cluster=_absolute(cluster, cluster_path),
        user=_absolute(user, user_path),
        keep=merger.save_changes,
    )


def _merged(files: list[str], where: str) -> Any:
    """Return the client's merger with all files read. Raises ConfigError, which names an invalid file."""
    import yaml

    library = package(where.rstrip(": "))
    merger = library.KubeConfigMerger("")
    for path in files:
        try:
            merger.load_config(path)
        except library.ConfigException:
            continue  # it is empty
        except OSError as error:
            raise ConfigError(f"{where}{path}: {(error.strerror or str(error)).lower()}") from None
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            at = "" if mark is None else f":{mark.line + 1}"
            raise ConfigError(f"{where}{path}{at}: {getattr(error, 'problem', None) or 'this is not YAML'}") from None
        except UnicodeDecodeError:
            raise ConfigError(f"{where}{path} is no kubeconfig: it is not text") from None
        except (AttributeError, KeyError, TypeError):  # whose texts may hold credentials
            raise ConfigError(f"{where}{path} is no kubeconfig: {_SHAPE}") from None
        merger.paths.append(path)
    merger.config_saved = copy.deepcopy(merger.config_files)
    return merger


_Section = dict[str, tuple[str, Mapping[str, Any]]]


def _entries(merger: Any, section: str, where: str) -> _Section:
    """Return name -> (file, content). Raises ConfigError, without any value: it may be a credential."""
    found: _Section = {}
    for entry in merger.config.value[section] if merger.config is not None else ():
        said = entry.value if isinstance(entry.value, dict) else {}
        value = said.get(section[:-1]) or {}
        if not said.get("name") or not isinstance(value, dict):
            raise ConfigError(f"{where}{entry.path} is no kubeconfig: {_SHAPE}")
        found[str(said["name"])] = (entry.path, value)
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


def _listed(section: Mapping[str, object]) -> str:
    return ", ".join(sorted(section)) or "none"
