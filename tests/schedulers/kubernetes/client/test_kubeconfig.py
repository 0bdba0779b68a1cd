"""Which cluster a target means, and as whom: the files as kubectl reads them, and what is said of those it cannot."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

from schedulers.errors import ConfigError, CredentialsExpired
from schedulers.kubernetes.client import credentials as access_credentials
from schedulers.kubernetes.client import kubeconfig
from schedulers.kubernetes.client.credentials import Credentials
from schedulers.kubernetes.client.kubeconfig import Access
from schedulers.kubernetes.options import KubernetesOptions
from schedulers.processes import Identity

from ..servers import authority


@pytest.fixture(autouse=True)
def _nothing_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("KUBECONFIG", "KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


SHAPE = " is not a kubeconfig: clusters, contexts and users must be lists of entries with a name and a "


def config(
    *names: str,
    current: str | None = None,
    user: Mapping[str, Any] | None = None,
    cluster: Mapping[str, Any] | None = None,
    namespace: str | None = None,
) -> dict[str, Any]:
    """A context of each name, with a cluster and a user of its own."""
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": f"{n}-c", "cluster": {"server": f"https://{n}:6443", **(cluster or {})}} for n in names],
        "users": [
            {"name": f"{n}-u", "user": dict(user if user is not None else {"token": f"{n}-token"})} for n in names
        ],
        "contexts": [
            {
                "name": n,
                "context": {
                    "cluster": f"{n}-c",
                    "user": f"{n}-u",
                    **({"namespace": namespace} if namespace else {}),
                },
            }
            for n in names
        ],
        **({"current-context": current} if current else {}),
    }


def write(path: Path, content: Mapping[str, Any] | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(dict(content)))
    return path


def find(**options: Any) -> Access:
    return kubeconfig.find(KubernetesOptions(**options), "k")


def refusal(**options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        find(**options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def credentials(access: Access) -> Credentials:
    return Credentials(access, "k")


def authorization(shown: Credentials) -> str | None:
    return dict(shown.headers()).get("authorization")


def certificate(shown: Credentials) -> tuple[bytes, bytes] | None:
    made = shown.configuration()
    return None if made.cert_file is None else (Path(made.cert_file).read_bytes(), Path(made.key_file).read_bytes())


def test_the_current_context_of_the_file_in_the_home_directory(tmp_path: Path) -> None:
    path = write(tmp_path / "home/.kube/config", config("lab", "cloud", current="cloud", namespace="team"))
    found = find()
    assert (found.server, found.context, found.namespace) == ("https://cloud:6443", "cloud", "team")
    assert found.files == str(path)
    assert authorization(credentials(found)) == "Bearer cloud-token"


def test_the_options_win_over_the_file(tmp_path: Path) -> None:
    write(tmp_path / "home/.kube/config", config("home", current="home"))
    path = write(tmp_path / "other.yaml", config("lab", "cloud", current="cloud", namespace="team"))
    found = find(kubeconfig=str(path), context="lab", namespace="mine")
    assert (found.context, found.namespace, found.files) == ("lab", "mine", str(path))
    assert find(kubeconfig="~/../other.yaml").context == "cloud"


def test_a_context_without_a_namespace_means_default(tmp_path: Path) -> None:
    assert find(kubeconfig=str(write(tmp_path / "c", config("a", current="a")))).namespace == "default"


def test_of_several_files_the_first_that_says_a_thing_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = write(tmp_path / "first", config("a"))
    other = config("a", "b", current="b", user={"token": "second"})
    second = write(tmp_path / "second", {**other, "current-context": "b"})
    third = write(tmp_path / "third", {**config(), "current-context": "a"})
    paths = [first, tmp_path / "not-there", second, third]
    monkeypatch.setenv("KUBECONFIG", os.pathsep.join(map(str, paths)))
    found = find()
    assert found.context == "b"
    assert authorization(credentials(found)) == "Bearer second"
    assert authorization(credentials(find(context="a"))) == "Bearer a-token"
    assert found.files == os.pathsep.join(map(str, [first, second, third]))


def test_what_was_found_once_is_found_again_whatever_became_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = write(tmp_path / "one", config("a")), write(tmp_path / "two", {**config("b"), "current-context": "b"})
    monkeypatch.setenv("KUBECONFIG", f"{one}{os.pathsep}{two}")
    found = find()
    monkeypatch.delenv("KUBECONFIG")
    assert find(kubeconfig=found.files, context=found.context) == found


def test_paths_are_seen_from_the_file_they_stand_in(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/token").write_text("from a file\n")
    user = {"tokenFile": "token", "token": "older"}
    path = write(tmp_path / "sub/c", config("a", current="a", user=user, cluster={"certificate-authority": "ca.crt"}))
    found = find(kubeconfig=str(path))
    assert found.cluster["certificate-authority"] == str(tmp_path / "sub/ca.crt")
    shown = credentials(found)
    assert authorization(shown) == "Bearer from a file"
    (tmp_path / "sub/token").write_text("a newer one")
    assert authorization(shown) == "Bearer a newer one"


def test_a_name_and_a_password(tmp_path: Path) -> None:
    path = write(tmp_path / "c", config("a", current="a", user={"username": "ann", "password": "pä:ss"}))
    header = authorization(credentials(find(kubeconfig=str(path))))
    assert header == "Basic " + base64.b64encode("ann:pä:ss".encode()).decode()


def test_a_certificate_needs_its_key(tmp_path: Path) -> None:
    file, key = authority(tmp_path / "ours").issue("ann")
    data = {"client-certificate-data": base64.b64encode(file.read_bytes()).decode()}
    path = write(tmp_path / "c", config("a", current="a", user=data))
    with pytest.raises(ConfigError, match="target k: context a: the user has client-certificate and no client-key"):
        certificate(credentials(find(kubeconfig=str(path))))
    both = {**data, "client-key": key.name}
    (tmp_path / key.name).write_bytes(key.read_bytes())
    path = write(tmp_path / "d", config("a", current="a", user=both))
    assert certificate(credentials(find(kubeconfig=str(path)))) == (file.read_bytes(), key.read_bytes())
    other = authority(tmp_path / "other").issue("bob")[1]
    path = write(tmp_path / "e", config("a", current="a", user={**data, "client-key": str(other)}))
    with pytest.raises(ConfigError, match="target k: client-certificate and client-key do not match"):
        certificate(credentials(find(kubeconfig=str(path))))


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("a: b: c", ":1: "),
        ("- a list", SHAPE),
        ({"clusters": {"a": 1}, "current-context": "a"}, SHAPE),
        ({"contexts": [{"context": {}}], "current-context": "a"}, SHAPE),
        ({"users": [{"user": {"token": "t0p-secret"}}], "current-context": "a"}, SHAPE),
        (config("a"), " has no current-context: set context: (contexts: a)"),
        ("", " has no current-context: set context: (contexts: none)"),
        (config("lab", current="lob"), " has no context 'lob'; did you mean 'lab'? (contexts: lab)"),
        ({**config("a", current="a"), "clusters": []}, ": context a: cluster 'a-c' is not defined (defined: none)"),
        ({**config("a", current="a"), "users": []}, ": context a: user 'a-u' is not defined (defined: none)"),
        (
            config("a", current="a", cluster={"server": "lab:6443"}),
            ": cluster a-c: server must be like https://host:port",
        ),
        ("\udcff", " is not a kubeconfig: it is not text"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_with_its_name(
    tmp_path: Path, content: Mapping[str, Any] | str, line: str
) -> None:
    path = tmp_path / "c.yaml"
    if content == "\udcff":
        path.write_bytes(b"\xff\xfe\x00")
    else:
        write(path, content)
    said = refusal(kubeconfig=str(path))
    assert said.startswith("target k: ")
    assert f"{path}{line}" in said
    assert "t0p-secret" not in said


def test_a_file_that_is_named_must_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "none"
    assert refusal(kubeconfig=str(path)) == f"target k: kubeconfig: {path}: no such file"
    monkeypatch.setenv("KUBECONFIG", str(path))
    assert f"no kubeconfig (KUBECONFIG={path}: no such file)" in refusal()


def test_a_file_that_may_not_be_read(tmp_path: Path) -> None:
    assert "c: is a directory" in refusal(kubeconfig=str(write(tmp_path / "c/d", "")).removesuffix("/d"))


def test_no_file_at_all() -> None:
    said = refusal()
    assert said.startswith("target k: no kubeconfig (no ~/.kube/config, and KUBECONFIG is not set)")
    assert "kubeconfig: in accel.yaml" in said


def test_a_context_that_is_not_there_names_the_nearest(tmp_path: Path) -> None:
    path = write(tmp_path / "c", config("production", "staging", current="staging"))
    said = refusal(kubeconfig=str(path), context="prodution")
    assert "has no context 'prodution'; did you mean 'production'? (contexts: production, staging)" in said


def in_pod(tmp_path: Path) -> tuple[Mapping[str, str], str]:
    directory = tmp_path / "serviceaccount"
    directory.mkdir()
    for name, text in {"token": "pod-token", "ca.crt": "a certificate", "namespace": "team\n"}.items():
        (directory / name).write_text(text)
    return {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "KUBERNETES_SERVICE_PORT": "443"}, str(directory)


def test_a_pod_has_its_service_account(tmp_path: Path) -> None:
    environ, directory = in_pod(tmp_path)
    found = kubeconfig.in_cluster(environ, directory)
    assert found is not None
    assert (found.server, found.namespace, found.context) == ("https://10.0.0.1:443", "team", None)
    assert found.user_label == "this pod's service account"
    shown = credentials(found)
    assert authorization(shown) == "Bearer pod-token"
    (tmp_path / "serviceaccount/token").write_text("the next hour's")  # the kubelet renews it
    assert authorization(shown) == "Bearer the next hour's"


def test_a_pod_of_a_cluster_with_ipv6(tmp_path: Path) -> None:
    environ, directory = in_pod(tmp_path)
    found = kubeconfig.in_cluster({**environ, "KUBERNETES_SERVICE_HOST": "fd00::1"}, directory)
    assert found is not None
    assert found.server == "https://[fd00::1]:443"


def test_a_pod_without_its_token_and_no_pod(tmp_path: Path) -> None:
    environ, directory = in_pod(tmp_path)
    (tmp_path / "serviceaccount/token").unlink()
    with pytest.raises(ConfigError, match="automountServiceAccountToken is off"):
        kubeconfig.in_cluster(environ, directory)
    assert kubeconfig.in_cluster({}, directory) is None


def plugin(tmp_path: Path, script: str, **more: Any) -> Access:
    """A context whose user is an exec plug-in, this script."""
    path = tmp_path / "plugin.sh"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    wanted = {"apiVersion": "client.authentication.k8s.io/v1", "command": "./plugin.sh", "interactiveMode": "Never"}
    user = {"exec": {**wanted, **more}}
    return find(kubeconfig=str(write(tmp_path / "c", config("a", current="a", user=user))))


def answer(status: str) -> str:
    return (
        "echo run >> runs\n"
        f'echo \'{{"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", "status": {status}}}\''
    )


def test_an_exec_plug_in_is_run_once_and_again_when_its_token_is_refused(tmp_path: Path) -> None:
    shown = credentials(plugin(tmp_path, answer('{"token": "t1"}'), env=[{"name": "A", "value": "b"}]))
    assert [authorization(shown), authorization(shown)] == ["Bearer t1"] * 2
    assert certificate(shown) is None
    assert (tmp_path / "runs").read_text() == "run\n"
    refused = shown.plugin_status()
    assert shown.renew(refused)
    assert authorization(shown) == "Bearer t1"
    assert (tmp_path / "runs").read_text() == "run\n" * 2
    assert shown.renew(refused)  # as another thread would, whose question was older
    assert authorization(shown) == "Bearer t1"
    assert (tmp_path / "runs").read_text() == "run\n" * 2


def test_an_exec_plug_in_that_asks_somebody_asks_once_for_all_threads(tmp_path: Path) -> None:
    told = answer('{"token": "t1"}')
    shown = credentials(plugin(tmp_path, f"sleep 0.2\n{told}"))
    with ThreadPoolExecutor(max_workers=16) as pool:
        found = list(pool.map(lambda _: authorization(shown), range(16)))
    assert found == ["Bearer t1"] * 16
    assert (tmp_path / "runs").read_text() == "run\n"


def test_an_exec_plug_in_is_asked_again_when_its_token_is_about_to_end(tmp_path: Path) -> None:
    until = '"expirationTimestamp": "\'$(date -u -d "+5 seconds" +%Y-%m-%dT%H:%M:%S.123456789Z)\'"'
    shown = credentials(plugin(tmp_path, answer(f'{{"token": "t1", {until}}}')))
    assert [authorization(shown), authorization(shown)] == ["Bearer t1"] * 2
    assert (tmp_path / "runs").read_text() == "run\n" * 2


def test_an_exec_plug_in_may_give_a_certificate(tmp_path: Path) -> None:
    pair = [file.read_text() for file in authority(tmp_path / "ours").issue("ann")]
    given = json.dumps(dict(zip(("clientCertificateData", "clientKeyData"), pair, strict=True)))
    shown = credentials(plugin(tmp_path, answer(given.replace("\\", "\\\\"))))
    assert authorization(shown) is None
    assert certificate(shown) == tuple(text.encode() for text in pair)


@pytest.mark.parametrize(
    ("script", "line"),
    [
        ("echo 'session ended,' >&2; echo 'sign in' >&2; exit 3", "process returned 3. session ended, sign in"),
        (f"echo Welcome; {answer('{}')}", "failed to decode process output"),
        (answer("{}"), "returned neither a token nor a certificate with its key"),
        (answer('{"token": "t", "expirationTimestamp": "2020-01-01T00:00:00Z"}'), "expired at 2020-01-01T00:00:00Z"),
        (answer('{"token": "t", "expirationTimestamp": "soon"}'), "'soon' is not a time"),
    ],
)
def test_what_an_exec_plug_in_does_wrong_is_said_in_a_line(tmp_path: Path, script: str, line: str) -> None:
    with pytest.raises((ConfigError, CredentialsExpired)) as caught:
        authorization(credentials(plugin(tmp_path, script)))
    assert str(caught.value).startswith("target k: context a: exec plug-in ./plugin.sh")
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_exec_plug_in_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access_credentials, "_PLUGIN_S", 0.5)
    shown = credentials(plugin(tmp_path, "echo $$ >pid; exec sleep 600"))
    with pytest.raises(CredentialsExpired, match=r"plug-in \./plugin\.sh: .*it timed out after 0\.5 s$"):
        authorization(shown)
    assert not (tmp_path / "pid").exists() or Identity.of(int((tmp_path / "pid").read_text())) is None


_KILLED = """
import os, signal, sys
from schedulers.kubernetes.client import kubeconfig
from schedulers.kubernetes.client.credentials import Credentials
from schedulers.kubernetes.options import KubernetesOptions
made = Credentials(kubeconfig.find(KubernetesOptions(kubeconfig=sys.argv[1]), "k"), "k").configuration()
print(open(made.key_file).read(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no files without a name")
def test_a_client_that_is_killed_leaves_no_key(tmp_path: Path) -> None:
    pair = authority(tmp_path / "ours").issue("ann")
    keys = ("client-certificate-data", "client-key-data")
    user = {key: base64.b64encode(file.read_bytes()).decode() for key, file in zip(keys, pair, strict=True)}
    path = write(tmp_path / "c", config("a", current="a", user=user))
    (tmp_path / "tmp").mkdir()
    env = {**os.environ, "TMPDIR": str(tmp_path / "tmp")}
    done = subprocess.run([sys.executable, "-c", _KILLED, str(path)], env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (-9, pair[1].read_text().strip()), done.stderr
    assert list((tmp_path / "tmp").iterdir()) == []


def test_somebody_else_is_asked_for(tmp_path: Path) -> None:
    user = {"token": "t", "as": "ann", "as-uid": 7, "as-groups": ["a", "b"], "as-user-extra": {"Why/not": ["x", "y"]}}
    path = write(tmp_path / "c", config("a", current="a", user=user))
    assert credentials(find(kubeconfig=str(path))).headers() == [
        ("authorization", "Bearer t"), ("Impersonate-User", "ann"), ("Impersonate-Uid", "7"),
        ("Impersonate-Group", "a"), ("Impersonate-Group", "b"),
        ("Impersonate-Extra-why%2Fnot", "x"), ("Impersonate-Extra-why%2Fnot", "y"),
    ]  # fmt: skip


def test_an_exec_plug_in_that_is_not_installed(tmp_path: Path) -> None:
    access = plugin(tmp_path, "", command="accel-no-such-plugin", installHint="Get it\nfrom the cloud.")
    with pytest.raises(ConfigError, match="exec plug-in accel-no-such-plugin: command not found: Get it from"):
        authorization(credentials(access))


def test_the_token_of_an_oidc_provider(tmp_path: Path) -> None:
    def part(text: str) -> str:
        return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")

    token = ".".join(part(text) for text in ("{}", '{"exp": 4102444800}', "signed"))
    user = {"auth-provider": {"name": "oidc", "config": {"id-token": token}}}
    path = write(tmp_path / "c", config("a", current="a", user=user))
    assert authorization(credentials(find(kubeconfig=str(path)))) == f"Bearer {token}"


def test_an_auth_provider_that_is_gone(tmp_path: Path) -> None:
    path = write(tmp_path / "c", config("a", current="a", user={"auth-provider": {"name": "azure"}}))
    with pytest.raises(ConfigError, match="auth-provider 'azure' is no longer supported: use its exec plug-in"):
        authorization(credentials(find(kubeconfig=str(path))))
