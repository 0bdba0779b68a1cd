"""One watch of a job and one of its pods, on a real API server without nodes: the tests change its objects."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import multiprocessing
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from accel.cli import exit_status, main
from schedulers import JobSpec, Reason, Retry, State
from schedulers.kubernetes.client import informer
from schedulers.kubernetes.client.api import Api
from schedulers.kubernetes.follower import Follower
from schedulers.kubernetes.manifests import build
from schedulers.kubernetes.manifests.code_delivery import Code
from schedulers.kubernetes.native_id import Native
from schedulers.kubernetes.options import KubernetesOptions
from schedulers.kubernetes.status import watch
from schedulers.store.store import Store
from schedulers.target import Plan
from tests.clusters.kube import crds, programs
from tests.clusters.kube.control import API_PORT, ControlPlane
from tests.marks import long
from tests.needs import missing
from tests.waiting import until

from ..relays import Relay

_PATIENCE_S = 60.0
_CONDITION = {"reason": "Test", "message": "by the test", "lastTransitionTime": "2026-11-21T16:00:00Z"}


class Server:
    """The API server, and what is done there."""

    def __init__(self, control: ControlPlane) -> None:
        self.control = control
        self._numbers = itertools.count()
        self.admin = self.api()
        for definition in crds.definitions("pytorchjob"):
            path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
            self.admin.call("POST", path, body=definition)
            name = f"{path}/{definition['metadata']['name']}"
            until(lambda name=name: crds.established(self.admin.call("GET", name)), "the kind is served")  # type: ignore[misc]

    def api(self, user: str = "admin", *, port: int | None = None, namespace: str = "default") -> Api:
        return Api(self.options(user, port=port, namespace=namespace), "k")

    def options(self, user: str = "admin", *, port: int | None = None, namespace: str = "default") -> KubernetesOptions:
        shown = self.control.credentials(user, ("system:masters",) if user == "admin" else ())
        server = self.control.server if port is None else f"https://127.0.0.1:{port}"
        text = {
            "apiVersion": "v1", "kind": "Config", "current-context": "c",
            "clusters": [{"name": "c", "cluster": {
                "server": server, "certificate-authority": str(self.control.authority.certificate)}}],
            "users": [{"name": user, "user": {
                "client-certificate": str(shown.certificate), "client-key": str(shown.key)}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": user, "namespace": namespace}}],
        }  # fmt: skip
        file = self.control.box / f"{user}-{port}-{namespace}.yaml"
        file.write_text(yaml.safe_dump(text))
        return KubernetesOptions(kubeconfig=str(file), image="example.org/train")

    def submit(
        self, namespace: str = "default", job_id: str = "", ttl_s: int | None = None, max_restarts: int = 0
    ) -> Native:
        job_id = job_id or f"job{next(self._numbers)}"
        options = dataclasses.replace(self.options(namespace=namespace), ttl_s=ttl_s)
        spec = JobSpec(argv=("train.py",), retry=Retry(max_restarts=max_restarts))
        made = build.build(spec, options, job_id, Code(kind="image")).workload
        path = self.admin.path("kubeflow.org/v1", "pytorchjobs", namespace=namespace)
        there = self.admin.call("POST", path, body=build.with_digest(made, spec))
        return Native("pytorchjob", namespace, there["metadata"]["name"], job_id)

    def end(self, native: Native, condition: str = "Succeeded") -> None:
        path = self.admin.path(native.api_version, native.plural, native.name, "status", native.namespace)
        body = {"status": {"conditions": [{**_CONDITION, "type": condition, "status": "True"}], "replicaStatuses": {}}}
        self.admin.call("PATCH", path, body=body, content_type="application/merge-patch+json")

    def delete(self, native: Native) -> None:
        path = self.admin.path(native.api_version, native.plural, native.name, namespace=native.namespace)
        self.admin.call("DELETE", path)

    def allows(self, user: str, place: dict[str, str]) -> bool:
        spec = {"user": user, "resourceAttributes": place}
        review = {"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "spec": spec}
        told = self.admin.call("POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", body=review)
        return bool(told["status"].get("allowed"))

    def namespace(self) -> str:
        name = f"ns{next(self._numbers)}"
        self.admin.call("POST", "/api/v1/namespaces", body={"metadata": {"name": name}})
        return name

    def restart(self) -> None:
        self.control.api.stop()
        self.control.start_api()

    def counted(self, metric: str, namespaced_only: bool = True) -> dict[tuple[str, str], float]:
        """A metric of the server's by (resource, verb), as it is asked for in a namespace."""
        stream = self.admin.stream("/metrics")
        text = b"".join(stream).decode()
        found: dict[tuple[str, str], float] = {}
        for labels, value in re.findall(rf"^{metric}{{([^}}]*)}} (\S+)$", text, re.MULTILINE):
            said = dict(re.findall(r'(\w+)="([^"]*)"', labels))
            if said.get("scope") in ("namespace", "resource"):
                key = said["resource"], said["verb"]
                found[key] = found.get(key, 0) + float(value)
        return found


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if (absent := programs.lacking(programs.API)) is not None:
        missing(*absent)
    # An address that no other process takes, whose port is then free.
    high, low = divmod(os.getpid() % 64000, 250)
    control = ControlPlane(tmp_path_factory.mktemp("control"), f"127.83.{high}.{low + 1}")
    try:
        control.create()
        control.start_etcd()
        control.start_api()
        yield Server(control)
    finally:
        for daemon in (control.api, control.etcd):
            daemon.stop()


@pytest.fixture(autouse=True)
def _there(server: Server) -> None:
    """Also after a test that failed while it was down."""
    server.control.start_api()


@pytest.fixture
def followers() -> Iterator[list[Follower]]:
    found: list[Follower] = []
    yield found
    for each in found:
        each.close()
    # Of the next test no watch, request or connection is another's.
    until(lambda: not watching_threads(), "the watches of this test have ended")
    assert not watch._watchers


@pytest.fixture
def follower(server: Server, followers: list[Follower]) -> Follower:
    followers.append(Follower(server.api()))
    return followers[0]


def waited(follower: Follower, native: Native) -> None:
    """Until there is news of the job."""
    until(lambda: follower.wait(native, 1.0) is True, f"news of {native}")


def watched(follower: Follower, *natives: Native) -> None:
    """Until there is none: a server that has just begun may be silent for so long that this is news."""
    for native in natives:
        until(lambda native=native: follower.wait(native, 0.1) is False, f"{native} is watched")  # type: ignore[misc]


def is_seen(follower: Follower, native: Native, state: State) -> None:
    """Of a server that was away: it may not answer each question yet."""

    def seen() -> bool:
        found = follower.statuses([native])[0].get(str(native))
        return found is not None and found.state is state

    until(seen, f"{native} is {state.value}")


def status(follower: Follower, native: Native) -> Any:
    found, silent = follower.statuses([native])
    assert not silent, silent
    return found[str(native)]


@pytest.mark.parametrize("count", [4, *long(20)])
def test_a_job_is_followed_by_one_watch_of_it_and_one_of_its_pods_until_it_is_over(
    server: Server, follower: Follower, count: int
) -> None:
    jobs = [server.submit() for _ in range(count)]
    for native in jobs:
        server.end(native, "Running")
    ended: list[State] = []
    rounds = dict.fromkeys(map(str, jobs), 0)

    def wait(native: Native) -> None:
        while not status(follower, native).state.final:
            follower.wait(native, 0.2)
            rounds[str(native)] += 1
        ended.append(status(follower, native).state)

    threads = [threading.Thread(target=wait, args=(native,)) for native in jobs]
    for each in threads:
        each.start()
    kinds = ("pytorchjobs", "pods")

    def watches() -> list[float]:
        counted = server.counted("apiserver_longrunning_requests")
        return [counted.get((kind, "WATCH"), 0.0) for kind in kinds]

    until(lambda: watches() == [count, count], "one of each job, and one of its pods")

    def quiet() -> bool:
        before, begun = server.counted("apiserver_request_total"), dict(rounds)
        until(lambda: all(rounds[job] >= begun[job] + 4 for job in rounds), "each follower asks four times")
        after = server.counted("apiserver_request_total")
        return not any(after[key] != before.get(key) and key[0] in kinds for key in after)

    until(quiet, "what is watched is not asked for; what was asked before has its answer")
    for native in jobs:
        server.end(native)
    for each in threads:
        each.join(_PATIENCE_S)
    assert ended == [State.SUCCEEDED] * len(jobs)
    assert not watch._watchers
    until(lambda: watches() == [0, 0], "a job's watches are closed at its end")


def test_a_job_that_ends_or_is_deleted_wakes_who_waits_for_it_and_no_other(server: Server, follower: Follower) -> None:
    ended, deleted, other = (server.submit() for _ in range(3))
    watched(follower, ended, deleted, other)
    server.end(ended, "Failed")
    waited(follower, ended)
    assert status(follower, ended).state is State.FAILED
    server.delete(deleted)
    waited(follower, deleted)
    gone = status(follower, deleted)
    assert (gone.state, gone.reason, gone.native_state) == (State.FAILED, Reason.LOST, "Deleted")
    assert gone.message == "its PyTorchJob is gone: it was cancelled from another machine, or somebody deleted it"
    assert follower.wait(other, 0.1) is False
    assert status(follower, other).state is State.QUEUED


def test_a_later_object_of_the_same_name_is_not_the_job_that_is_watched(server: Server, follower: Follower) -> None:
    native = dataclasses.replace(server.submit(), uid="u-1")
    waited(follower, native)
    assert watch.shared(server.admin, native).snapshot() == (None, [])
    assert status(follower, native).reason is Reason.LOST


@pytest.mark.parametrize("how", [{}, {"ttl_s": 60}, {"max_restarts": 1}], ids=str)
def test_who_waits_is_told_once_that_the_logs_go_with_the_pods(
    server: Server, follower: Follower, caplog: pytest.LogCaptureFixture, how: dict[str, Any]
) -> None:
    """Waiting reads no log. Who reads them archives them, and needs no warning."""
    native, read = server.submit(**how), server.submit(**how)
    for _ in range(3):
        follower.wait(native, 0.1)
        follower.wait(read, 0.1)
        list(follower.logs(read, None, None))
    warning = (
        f"job {native.job_id}: the cluster may delete its pods, with their logs, when it ends. "
        f"`accel logs -f {native.job_id}` archives them"
    )
    assert [record.getMessage() for record in caplog.records] == ([warning] if how else [])


def test_only_the_job_s_own_objects_are_watched(server: Server, follower: Follower) -> None:
    """Of a namespace with many jobs."""
    first, second = (server.submit() for _ in range(2))
    watched(follower, first, second)
    for native in (first, second):
        watcher = watch.running(follower.api, native)
        assert watcher is not None
        assert set(watcher._workloads.objects) == {native.name}


def test_a_job_that_was_submitted_this_moment_is_never_gone(server: Server, follower: Follower) -> None:
    follower.wait(server.submit(), 0.1)
    for _ in range(20):
        assert status(follower, server.submit()).state is State.QUEUED


def test_a_server_that_restarts_is_said_and_then_asked_at_once(server: Server, follower: Follower) -> None:
    native = server.submit()
    watched(follower, native)
    server.control.api.stop()
    until(lambda: "cannot be reached" in follower.statuses([native])[1].get(str(native), ""), "it is said")
    waited(follower, native)  # told that nothing is known
    server.control.start_api()
    server.end(native)
    waited(follower, native)
    is_seen(follower, native, State.SUCCEEDED)


def test_nothing_is_missed_when_the_server_has_forgotten_the_time_between(
    server: Server, followers: list[Follower]
) -> None:
    with Relay(server.control.address, API_PORT) as relay:
        follower = Follower(server.api(port=relay.port))
        followers.append(follower)
        ended, deleted, other = (server.submit() for _ in range(3))
        watched(follower, ended, deleted, other)
        relay.cut()
        server.end(ended)
        server.delete(deleted)
        server.control.api.stop()
        server.control.compact()
        server.control.start_api()
        late = server.submit()
        server.end(late)
        relay.mend()
        for native, state in ((ended, State.SUCCEEDED), (deleted, State.FAILED), (late, State.SUCCEEDED)):
            waited(follower, native)
            is_seen(follower, native, state)
        assert status(follower, other).state is State.QUEUED


def test_connections_that_break_off_all_the_time_lose_nothing(server: Server, followers: list[Follower]) -> None:
    with Relay(server.control.address, API_PORT) as relay:
        follower = Follower(server.api(port=relay.port))
        followers.append(follower)
        for _ in range(5):
            native = server.submit()
            follower.wait(native, 0.05)
            relay.break_off()
            server.end(native)
            waited(follower, native)
            is_seen(follower, native, State.SUCCEEDED)


def test_without_the_verb_watch_it_is_named_and_the_state_is_asked_for(
    server: Server, followers: list[Follower], caplog: pytest.LogCaptureFixture
) -> None:
    role = "/apis/rbac.authorization.k8s.io/v1/namespaces/default"
    rule = {"apiGroups": ["", "kubeflow.org"], "resources": ["pods", "events", "pytorchjobs"], "verbs": ["get", "list"]}
    server.admin.call("POST", f"{role}/roles", body={"metadata": {"name": "reads"}, "rules": [rule]})
    binding = {
        "metadata": {"name": "reads"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "reads"},
        "subjects": [{"kind": "User", "name": "reader", "apiGroup": "rbac.authorization.k8s.io"}],
    }
    server.admin.call("POST", f"{role}/rolebindings", body=binding)
    place = {"namespace": "default", "group": "kubeflow.org", "resource": "pytorchjobs", "verb": "list"}
    until(lambda: server.allows("reader", place), "the Role counts")
    follower = Follower(server.api("reader"))
    followers.append(follower)
    native = server.submit()
    with caplog.at_level(logging.WARNING):
        until(lambda: follower.wait(native, 0.1) is None, "it cannot be told")
    assert "user reader may not watch pytorchjobs.kubeflow.org in namespace default" in caplog.text
    assert status(follower, native).state is State.QUEUED
    server.end(native)
    assert status(follower, native).state is State.SUCCEEDED


def test_targets_of_one_server_and_user_share_a_job_s_watches(server: Server, followers: list[Follower]) -> None:
    followers += [Follower(server.api()), Follower(server.api())]
    native = server.submit()
    for each in followers:
        each.wait(native, 0.1)
    until(lambda: len(watching_threads()) == 2, "two watch")
    followers[0].close()  # the other's next question opens them anew
    server.end(native)
    waited(followers[1], native)


def test_watches_end_when_nobody_asks_and_leave_no_connection(
    server: Server, followers: list[Follower], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(informer, "_LIFETIME_S", (1, 1))
    with Relay(server.control.address, API_PORT) as relay:
        api = server.api(port=relay.port)
        follower = Follower(api)
        followers.append(follower)
        native = server.submit()
        follower.wait(native, 0.1)
        until(lambda: relay.open >= 2, "two watch")
        monkeypatch.setattr(watch, "_IDLE_S", 0.5)
        until(lambda: not watching_threads(), "the threads end")
        api.close()
        until(lambda: relay.open == 0, "the connections are closed")
        server.end(native)
        waited(follower, native)  # and are opened anew
        follower.close()
        until(lambda: not watching_threads(), "the threads end")
        api.close()
        until(lambda: relay.open == 0, "the connections are closed")


def test_a_child_of_a_process_that_watches_asks_for_itself(server: Server, follower: Follower) -> None:
    native = server.submit()
    follower.wait(native, 0.1)
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)

    def child() -> None:
        mine = Follower(server.api())
        watched(mine, native)
        send.send(status(mine, native).state.value)

    process = context.Process(target=child)
    process.start()
    assert receive.poll(_PATIENCE_S)
    assert receive.recv() == "queued"
    process.join(_PATIENCE_S)
    server.end(native)
    waited(follower, native)


def test_what_keeps_pods_from_being_made_is_seen_where_it_is_warned_of(server: Server, follower: Follower) -> None:
    native, other = server.submit(), server.submit()
    for job in (native, other):
        body = {
            "metadata": {"generateName": "warning-", "namespace": "default"},
            "involvedObject": {"kind": "PyTorchJob", "name": job.name, "namespace": "default"},
            "type": "Warning", "reason": "FailedCreatePod", "lastTimestamp": "2026-11-21T16:00:00Z",
            "message": 'pods "x-master-0" is forbidden: exceeded quota: small, requested: cpu=4',
        }  # fmt: skip
        if job is other:
            follower.wait(native, 0.1)  # the first is there before it is watched, the other comes then
        server.admin.call("POST", "/api/v1/namespaces/default/events", body=body)
    for job in (native, other):
        until(lambda job=job: status(follower, job).reason is Reason.NO_CAPACITY, "the reason")  # type: ignore[misc]
        assert "quota does not allow its pods" in status(follower, job).message
    alone = Follower(server.api("admin", namespace="elsewhere"))  # asks, since nobody watches
    watch.release(follower.api)
    assert status(alone, native).reason is Reason.NO_CAPACITY


def test_many_jobs_are_asked_for_in_few_questions(server: Server, followers: list[Follower]) -> None:
    namespace = server.namespace()
    jobs = [server.submit(namespace) for _ in range(120)]
    followers.append(Follower(server.api()))
    before = server.counted("apiserver_request_total")
    found, silent = followers[0].statuses(jobs)
    after = server.counted("apiserver_request_total")
    assert len(found) == 120
    assert not silent
    asked = sum(after[key] - before.get(key, 0) for key in after if key[0] in ("pytorchjobs", "pods", "events"))
    assert asked <= 6


def test_wait_queries_once_for_all_jobs_that_have_ended(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ACCEL_HOME", str(tmp_path))
    store = Store.default()
    namespace = server.namespace()
    options = {"kubeconfig": server.options(namespace=namespace).kubeconfig, "image": "example.org/train"}
    ids = [store.new_id() for _ in range(10)]
    for job_id in ids:
        native, spec = server.submit(namespace, job_id), JobSpec(argv=("train.py",))
        plan = Plan(target="k", kind="kubernetes", job_id=job_id)
        store.create(job_id, spec, plan, target="k", kind="kubernetes", options=options, native_id=str(native))
        server.end(native)
    before = server.counted("apiserver_request_total")
    assert main(["wait", *ids]) == exit_status.OK
    after = server.counted("apiserver_request_total")
    asked = {key: after[key] - before.get(key, 0) for key in after if key[0] in ("pytorchjobs", "pods", "events")}
    assert {key: count for key, count in asked.items() if count} == {("pytorchjobs", "LIST"): 1, ("pods", "LIST"): 1}
    assert capsys.readouterr().out == "".join(f"{job_id}\tsucceeded\n" for job_id in ids)


def watching_threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name.startswith("watching /")]


def test_nothing_is_read_of_a_file_that_is_not_asked_for(tmp_path: Path) -> None:
    """A follower that is made, and closed, needs no cluster."""
    Follower(Api(KubernetesOptions(kubeconfig=str(tmp_path / "none")), "k")).close()
