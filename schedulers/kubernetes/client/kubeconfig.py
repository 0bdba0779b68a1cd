"""The cluster and user: from kubeconfig files, merged by the official client, or from a pod's service account.

https://kubernetes.io/docs/concepts/configuration/organize-cluster-access-kubeconfig/
"""

from __future__ import annotations

import contextlib
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
# The service account's files in a pod: https://kubernetes.io/docs/tasks/run-application/access-api-from-pod/
SERVICE_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
_HOST, _PORT = "KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT"
_DEFAULT = "~/.kube/config"
# Keys whose values are paths relative to their own file: the client resolves a user's against the cluster's file.
_PATHS = ("certificate-authority", "client-certificate", "client-key", "tokenFile")
_SHAPE = "clusters, contexts and users must be lists of entries with a name and a cluster, context or user"


@dataclass(frozen=True, kw_only=True)
class Access:
    """A cluster and its user.

    files:     the kubeconfig files that were read, joined as in $KUBECONFIG; None in a pod.
    context:   the chosen context; None in a pod.
    cluster, user: their entries in the files, with absolute paths.
    directory: the directory of the user's file.
    save:      writes renewed tokens of `user` to their file.
    """

    server: str
    namespace: str
    context: str | None = None
    files: str | None = None
    directory: str = ""
    cluster: Mapping[str, Any] = field(default_factory=dict)
    user: Mapping[str, Any] = field(default_factory=dict)
    save: Callable[[], None] | None = field(default=None, compare=False)

    @property
    def display_url(self) -> str:
        """The server's URL for messages, without a password."""
        return without_password(self.server)

    @property
    def user_label(self) -> str:
        """The owner of the credentials, for messages."""
        return "this pod's service account" if self.context is None else f"context {self.context}"


def find(options: KubernetesOptions, target: str) -> Access:
    """Return the access that the options select. Raises ConfigError."""
    subject = f"target {target}: "
    sources, files = _files(options, subject)
    if not files:
        pod_access = None if options.context is not None else in_cluster()
        if pod_access is None:
            raise ConfigError(
                f"{subject}no kubeconfig ({sources}), and this is not a pod of a cluster: set KUBECONFIG, or "
                "kubeconfig: in accel.yaml"
            )
        access = pod_access
    else:
        access = _select_context(files, options.context, subject)
    return replace(access, namespace=options.namespace or access.namespace)


def in_cluster(environ: Mapping[str, str] = os.environ, directory: str = SERVICE_ACCOUNT) -> Access | None:
    """Return this pod's access, or None outside of a cluster. Raises ConfigError if it is incomplete."""
    if not environ.get(_HOST) or not environ.get(_PORT):
        return None
    token, authority = os.path.join(directory, "token"), os.path.join(directory, "ca.crt")
    library = package("this pod")
    configuration = library.Configuration()
    try:
        library.InClusterConfigLoader(token, authority, environ=environ).load_and_set(configuration)
    except library.ConfigException as error:
        raise ConfigError(
            f"{_HOST} is set, so this is a pod, but {str(error).lower().rstrip('.')} in {directory}: "
            "automountServiceAccountToken is off"
        ) from None
    namespace = ""
    with contextlib.suppress(OSError), open(os.path.join(directory, "namespace"), encoding="utf-8") as file:
        namespace = file.read().strip()
    return Access(
        server=configuration.host,
        namespace=namespace or "default",
        cluster={"certificate-authority": configuration.ssl_ca_cert},
        user={"tokenFile": token},
    )


def package(subject: str) -> Any:
    """Return the configuration API of the official client. Raises ConfigError if it is not installed."""
    try:
        from kubernetes import client, config
        from kubernetes.config import exec_provider, incluster_config, kube_config
    except ImportError:
        raise ConfigError(f"{subject}: the package kubernetes is not installed: {INSTALL}") from None
    modules = (client, config, exec_provider, incluster_config, kube_config)
    return SimpleNamespace(**{name: value for module in modules for name, value in vars(module).items()})


def _files(options: KubernetesOptions, subject: str) -> tuple[str, list[str]]:
    """Return a description of the search, and the existing files. Raises ConfigError if the option names none."""
    if options.kubeconfig is not None:
        # The value in `cluster_ref` may be several files, joined as in $KUBECONFIG.
        paths = [os.path.abspath(os.path.expanduser(path)) for path in options.kubeconfig.split(os.pathsep) if path]
        missing = [path for path in paths if not os.path.exists(path)]
        if len(missing) == len(paths):
            raise ConfigError(f"{subject}kubeconfig: {options.kubeconfig}: no such file")
        return options.kubeconfig, [path for path in paths if path not in missing]
    path_list = os.environ.get("KUBECONFIG", "")
    paths = [os.path.abspath(os.path.expanduser(path)) for path in path_list.split(os.pathsep) if path]
    sources = f"KUBECONFIG={path_list}: no such file" if paths else f"no {_DEFAULT}, and KUBECONFIG is not set"
    paths = paths or [os.path.expanduser(_DEFAULT)]
    return sources, [path for path in paths if os.path.exists(path)]


def _select_context(files: list[str], requested: str | None, subject: str) -> Access:
    merger = _merged(files, subject)
    sources = os.pathsep.join(files)
    contexts, clusters, users = (_entries(merger, section, subject) for section in ("contexts", "clusters", "users"))
    # kubectl uses the first file's current context, the client the last one's.
    currents = (str(file["current-context"]) for file in merger.config_files.values() if file.get("current-context"))
    name = requested or next(currents, None)
    if not name:
        raise ConfigError(
            f"{subject}{sources} has no current-context: set context: (contexts: {_format_names(contexts)})"
        )
    if name not in contexts:
        key = "context: " if requested else "current-context: "
        raise ConfigError(
            f"{subject}{key}{sources} has no context {name!r}{nearest(name, contexts)} "
            f"(contexts: {_format_names(contexts)})"
        )
    path, context = contexts[name]
    cluster_path, cluster = _entry(clusters, context.get("cluster"), f"{subject}{path}: context {name}: cluster")
    user_name, user_subject = context.get("user"), f"{subject}{path}: context {name}: user"
    user_path, user = _entry(users, user_name, user_subject) if user_name else (path, {})
    server = cluster.get("server")
    if not isinstance(server, str) or not server.startswith(("https://", "http://")):
        raise ConfigError(
            f"{subject}{cluster_path}: cluster {context['cluster']}: server must be like https://host:port, "
            f"not {without_password(server) if isinstance(server, str) else type(server).__name__!r}"
        )
    return Access(
        server=server.rstrip("/"),
        namespace=str(context.get("namespace") or "default"),
        context=name,
        files=sources,
        directory=os.path.dirname(user_path),
        cluster=_absolute(cluster, cluster_path),
        user=_absolute(user, user_path),
        save=merger.save_changes,
    )


def _merged(files: list[str], subject: str) -> Any:
    """Return the client's merger of all files. Raises ConfigError, which names an invalid file."""
    import yaml

    library = package(subject.rstrip(": "))
    merger = library.KubeConfigMerger("")
    for path in files:
        try:
            merger.load_config(path)
        except library.ConfigException:
            continue  # it is empty
        except OSError as error:
            raise ConfigError(f"{subject}{path}: {(error.strerror or str(error)).lower()}") from None
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            line_suffix = "" if mark is None else f":{mark.line + 1}"
            raise ConfigError(
                f"{subject}{path}{line_suffix}: {getattr(error, 'problem', None) or 'not valid YAML'}"
            ) from None
        except UnicodeDecodeError:
            raise ConfigError(f"{subject}{path} is not a kubeconfig: it is not text") from None
        except (AttributeError, KeyError, TypeError):  # their messages may contain credentials
            raise ConfigError(f"{subject}{path} is not a kubeconfig: {_SHAPE}") from None
        merger.paths.append(path)
    merger.config_saved = copy.deepcopy(merger.config_files)
    return merger


_Section = dict[str, tuple[str, Mapping[str, Any]]]


def _entries(merger: Any, section: str, subject: str) -> _Section:
    """Return name -> (file, content). Raises ConfigError without values, which may be credentials."""
    entries: _Section = {}
    for entry in merger.config.value[section] if merger.config is not None else ():
        document = entry.value if isinstance(entry.value, dict) else {}
        value = document.get(section[:-1]) or {}
        if not document.get("name") or not isinstance(value, dict):
            raise ConfigError(f"{subject}{entry.path} is not a kubeconfig: {_SHAPE}")
        entries[str(document["name"])] = (entry.path, value)
    return entries


def _entry(section: _Section, name: object, subject: str) -> tuple[str, Mapping[str, Any]]:
    if not name or str(name) not in section:
        raise ConfigError(
            f"{subject} {name!r} is not defined{nearest(str(name), section)} (defined: {_format_names(section)})"
        )
    return section[str(name)]


def _absolute(values: Mapping[str, Any], path: str) -> dict[str, Any]:
    base = os.path.dirname(path)
    return {
        key: os.path.join(base, value) if key in _PATHS and isinstance(value, str) and value else value
        for key, value in values.items()
    }


def _format_names(section: Mapping[str, object]) -> str:
    return ", ".join(sorted(section)) or "none"
