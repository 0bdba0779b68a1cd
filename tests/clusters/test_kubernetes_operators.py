"""The stand-ins for JobSet and Trainer, on the real cluster, do what the real ones are known to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.clusters.kube.client import Object, Refused
from tests.clusters.kube.images import TRAIN
from tests.clusters.kubernetes import Kubernetes
from tests.clusters.netns import wait_until

_S = 90.0
_PATHS = {
    "JobSet": "/apis/jobset.x-k8s.io/v1alpha2/namespaces/{}/jobsets/j",
    "TrainJob": "/apis/trainer.kubeflow.org/v1alpha1/namespaces/{}/trainjobs/j",
}


def _template(text: str, container: str = "pytorch", **more: Any) -> Object:
    inside = {"name": container, "image": TRAIN, "command": ["sh", "-c", text], **more}
    return {"spec": {"restartPolicy": "Never", "terminationGracePeriodSeconds": 1, "containers": [inside]}}


def _job_spec(template: Object, **more: Any) -> Object:
    return {
        "completions": 2, "parallelism": 2, "completionMode": "Indexed", "backoffLimit": 0, "template": template, **more
    }  # fmt: skip


def _object(kind: str, version: str, spec: Object) -> Object:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": "j"}, "spec": spec}


def _jobset_spec(template: Object, restarts: int, **more: Any) -> Object:
    job = {"name": "node", "replicas": 1, "template": {"spec": _job_spec(template)}}
    policy = {"maxRestarts": restarts, "restartStrategy": "BlockingRecreate"}
    return {"failurePolicy": policy, "replicatedJobs": [job], **more}


def _jobset(text: str, restarts: int = 0, **more: Any) -> Object:
    return _object("JobSet", "jobset.x-k8s.io/v1alpha2", _jobset_spec(_template(text), restarts, **more))


def _trainjob(text: str) -> list[Object]:
    template = _jobset_spec(_template(text, "node"), 0)
    template["replicatedJobs"][0]["template"]["metadata"] = {
        "labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    }
    runtime = {"mlPolicy": {"numNodes": 1, "torch": {}}, "template": {"spec": template}}
    version = "trainer.kubeflow.org/v1alpha1"
    spec = {"runtimeRef": {"name": "j"}, "trainer": {"numNodes": 2, "numProcPerNode": 4}}
    return [_object("TrainingRuntime", version, runtime), _object("TrainJob", version, spec)]


def _get(cluster: Kubernetes, place: str, kind: str) -> Object:
    return cluster.client.call("GET", _PATHS[kind].format(place))


def _condition(cluster: Kubernetes, place: str, kind: str, name: str) -> Object | None:
    conditions = (_get(cluster, place, kind).get("status") or {}).get("conditions") or []
    return next((each for each in conditions if each["type"] == name and each["status"] == "True"), None)


def _until(cluster: Kubernetes, place: str, kind: str, name: str) -> Object:
    wait_until(f"{kind} is {name}", lambda: _condition(cluster, place, kind, name) is not None, _S)
    found = _condition(cluster, place, kind, name)
    assert found is not None
    return found


def _until_empty(cluster: Kubernetes, place: str, *kept: str) -> None:
    wait_until("nothing is left", lambda: cluster.objects(place) == sorted(kept), _S)


def _printed(cluster: Kubernetes, place: str) -> list[str]:
    return sorted(cluster.logs(place, pod["metadata"]["name"]).strip() for pod in cluster.pods(place))


def _delete(cluster: Kubernetes, place: str, kind: str) -> None:
    cluster.client.call("DELETE", _PATHS[kind].format(place), {"propagationPolicy": "Foreground"})


@pytest.mark.long
def test_a_jobset_restarts_all_its_pods_when_one_has_failed(cluster: Kubernetes, place: str, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    attempt = "metadata.annotations['jobset.sigs.k8s.io/restart-attempt']"
    env = [{"name": "ATTEMPT", "valueFrom": {"fieldRef": {"fieldPath": attempt}}}]
    text = (
        '[ "$ATTEMPT$JOB_COMPLETION_INDEX" = 01 ] && exit 1; [ "$ATTEMPT" = 0 ] && exec sleep 1000; '
        "until getent hosts j-node-0-0.j >/dev/null; do sleep 0.1; done; touch /shared/$JOB_COMPLETION_INDEX; "
        "until [ -e /shared/1 ]; do sleep 0.1; done; echo $ATTEMPT $(hostname)"  # who has ended is not found any more
    )
    template = _template(text, env=env, volumeMounts=[{"name": "shared", "mountPath": "/shared"}])
    template["spec"]["volumes"] = [{"name": "shared", "hostPath": {"path": str(tmp_path)}}]
    made = _object("JobSet", "jobset.x-k8s.io/v1alpha2", _jobset_spec(template, 1))
    cluster.apply(made, place)
    _until(cluster, place, "JobSet", "Completed")
    assert _get(cluster, place, "JobSet")["status"]["restarts"] == 1
    assert _printed(cluster, place) == ["1 j-node-0-0", "1 j-node-0-1"]
    _delete(cluster, place, "JobSet")
    _until_empty(cluster, place)


@pytest.mark.long
def test_a_jobset_fails_for_good_after_its_last_restart(cluster: Kubernetes, place: str) -> None:
    cluster.apply(_jobset("exit 1", restarts=1, ttlSecondsAfterFinished=1, suspend=True), place)
    _until(cluster, place, "JobSet", "Suspended")
    assert cluster.pods(place) == []
    body = {"spec": {"suspend": False}}
    cluster.client.call("PATCH", _PATHS["JobSet"].format(place), body, content_type="application/merge-patch+json")

    def told() -> list[str]:
        events = cluster.client.call("GET", f"/api/v1/namespaces/{place}/events")["items"]
        return [each["reason"] for each in events if each["involvedObject"]["kind"] == "JobSet"]

    wait_until("it has failed", lambda: "ReachedMaxRestarts" in told(), _S)
    _until_empty(cluster, place)


@pytest.mark.long
def test_a_trainjob_is_run_by_its_runtime(cluster: Kubernetes, place: str) -> None:
    for document in _trainjob("echo $PET_NODE_RANK $PET_NNODES $PET_NPROC_PER_NODE $PET_MASTER_ADDR"):
        cluster.apply(document, place)
    _until(cluster, place, "TrainJob", "Complete")
    assert _printed(cluster, place) == ["0 2 4 j-node-0-0.j", "1 2 4 j-node-0-0.j"]
    _delete(cluster, place, "TrainJob")
    _until_empty(cluster, place, "trainingruntimes/j")


def test_a_trainjob_without_its_runtime_is_refused(cluster: Kubernetes, place: str) -> None:
    runtime, job = _trainjob("true")
    with pytest.raises(Refused, match="specified trainingRuntime must be created before the TrainJob is created"):
        cluster.apply(job, place)
    assert cluster.objects(place) == []
    suspended = {**job, "spec": {**job["spec"], "suspend": True}}
    for document in (runtime, suspended):
        cluster.apply(document, place)
    _until(cluster, place, "TrainJob", "Suspended")


def test_a_trainjob_hangs_where_its_runtime_goes_first(cluster: Kubernetes, place: str) -> None:
    """In the foreground; what the collector cannot take off, a deletion in the background does not need."""
    runtime, job = _trainjob("true")
    runtime_made = cluster.apply(runtime, place)[0]
    made = cluster.apply({**job, "spec": {**job["spec"], "suspend": True}}, place)[0]
    owner = {"apiVersion": made["apiVersion"], "kind": "TrainJob", "name": "j", "uid": made["metadata"]["uid"]}
    body = {"metadata": {"ownerReferences": [{**owner, "blockOwnerDeletion": True}]}}
    path = f"/apis/trainer.kubeflow.org/v1alpha1/namespaces/{place}/trainingruntimes/j"
    assert runtime_made["metadata"]["name"] == "j"
    cluster.client.call("PATCH", path, body, content_type="application/merge-patch+json")
    _delete(cluster, place, "TrainJob")
    wait_until("its runtime is gone", lambda: "trainingruntimes/j" not in cluster.objects(place), _S)
    held = _get(cluster, place, "TrainJob")["metadata"]
    assert held["finalizers"] == ["foregroundDeletion"]
    with pytest.raises(Refused, match="specified trainingRuntime must be created before"):
        cluster.client.call("PATCH", _PATHS["TrainJob"].format(place), {"metadata": {"finalizers": None}},
                            content_type="application/merge-patch+json")  # fmt: skip
    cluster.apply(runtime, place)
    _until_empty(cluster, place, "trainingruntimes/j")


def test_a_job_that_the_server_refuses_is_told_of(cluster: Kubernetes, place: str) -> None:
    wrong = {**_template("true")}
    wrong["spec"] = {**wrong["spec"], "restartPolicy": "Sometimes"}
    cluster.apply(_object("JobSet", "jobset.x-k8s.io/v1alpha2", _jobset_spec(wrong, 0)), place)

    def told() -> list[str]:
        events = cluster.client.call("GET", f"/api/v1/namespaces/{place}/events")["items"]
        return [each["message"] for each in events if each["reason"] == "JobCreationFailed"]

    wait_until("it is told", lambda: told() != [], _S)
    assert "restartPolicy" in told()[0]
