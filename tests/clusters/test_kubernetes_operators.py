"""The doubles of operators in the Kubernetes clusters of the tests do what the real ones are known to do."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests.clusters.kube.client import Object, Refused
from tests.clusters.kubernetes import Kubernetes
from tests.clusters.netns import wait_until

_S = 90.0
_PATHS = {
    "PyTorchJob": "/apis/kubeflow.org/v1/namespaces/{}/pytorchjobs/j",
    "Job": "/apis/batch/v1/namespaces/{}/jobs/j",
    "JobSet": "/apis/jobset.x-k8s.io/v1alpha2/namespaces/{}/jobsets/j",
    "TrainJob": "/apis/trainer.kubeflow.org/v1alpha1/namespaces/{}/trainjobs/j",
}


def _template(text: str, container: str = "pytorch", **more: Any) -> Object:
    inside = {"name": container, "image": "any", "command": ["sh", "-c", text], **more}
    return {"spec": {"restartPolicy": "Never", "terminationGracePeriodSeconds": 1, "containers": [inside]}}


def _job_spec(template: Object, **more: Any) -> Object:
    return {
        "completions": 2, "parallelism": 2, "completionMode": "Indexed", "backoffLimit": 0, "template": template, **more
    }  # fmt: skip


def _object(kind: str, version: str, spec: Object) -> Object:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": "j"}, "spec": spec}


def _pytorchjob(text: str, policy: Object | None = None, *, restart: str = "Never") -> Object:
    replicas = {
        role: {"replicas": 1, "restartPolicy": restart, "template": _template(text)} for role in ("Master", "Worker")
    }
    spec = {"nprocPerNode": "2", "runPolicy": policy or {}, "pytorchReplicaSpecs": replicas}
    return _object("PyTorchJob", "kubeflow.org/v1", spec)


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


def _job(text: str, **more: Any) -> Object:
    return _object("Job", "batch/v1", _job_spec(_template(text), **more))


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


def _stands_still(cluster: Kubernetes, place: str, kind: str) -> bool:
    before = _get(cluster, place, kind)["metadata"]["resourceVersion"]
    time.sleep(0.2)
    return bool(_get(cluster, place, kind)["metadata"]["resourceVersion"] == before)


def _until_empty(cluster: Kubernetes, place: str, *kept: str) -> None:
    wait_until("nothing is left", lambda: cluster.objects(place) == sorted(kept), _S)


def _printed(cluster: Kubernetes, place: str) -> list[str]:
    return sorted(cluster.logs(place, pod["metadata"]["name"]).strip() for pod in cluster.pods(place))


def _phases(cluster: Kubernetes, place: str) -> dict[str, str]:
    return {pod["metadata"]["name"]: pod["status"]["phase"] for pod in cluster.pods(place)}


def _delete(cluster: Kubernetes, place: str, kind: str) -> None:
    cluster.client.call("DELETE", _PATHS[kind].format(place), {"propagationPolicy": "Foreground"})


def test_a_pytorchjob_has_a_master_that_its_worker_finds(cluster: Kubernetes, place: str, tmp_path: Path) -> None:
    found = "until getent hosts $MASTER_ADDR >/dev/null; do sleep 0.1; done; touch /shared/$RANK"
    waited = "until [ -e /shared/1 ]; do sleep 0.1; done"  # a pod that has ended is not found any more
    made = _pytorchjob(f"{found}; {waited}; echo $RANK $WORLD_SIZE $PET_NNODES $MASTER_PORT")
    for replica in made["spec"]["pytorchReplicaSpecs"].values():
        inside = replica["template"]["spec"]
        inside["volumes"] = [{"name": "shared", "hostPath": {"path": str(tmp_path)}}]
        inside["containers"][0]["volumeMounts"] = [{"name": "shared", "mountPath": "/shared"}]
    cluster.apply(made, place)
    _until(cluster, place, "PyTorchJob", "Succeeded")
    wait_until("both have ended", lambda: set(_phases(cluster, place).values()) == {"Succeeded"}, _S)
    assert _printed(cluster, place) == ["0 4 2 23456", "1 4 2 23456"]
    labels = [pod["metadata"]["labels"] for pod in cluster.pods(place)]
    key, role = "training.kubeflow.org/replica-type", "training.kubeflow.org/job-role"
    assert {each[key]: each.get(role) for each in labels} == {"master": "master", "worker": None}
    wait_until("nobody writes to it any more", lambda: _stands_still(cluster, place, "PyTorchJob"), _S)
    _delete(cluster, place, "PyTorchJob")
    _until_empty(cluster, place)


def test_a_failed_pytorchjob_keeps_its_pods_unless_it_has_a_backoff_limit(cluster: Kubernetes, place: str) -> None:
    other = cluster.namespace()
    try:
        cluster.apply(_pytorchjob("exit 3"), place)
        cluster.apply(_pytorchjob("exit 3", {"backoffLimit": 0, "cleanPodPolicy": "None"}), other)
        said = _until(cluster, place, "PyTorchJob", "Failed")["message"]
        assert said.startswith("PyTorchJob j is failed because 1 ")
        assert "Failed" in _phases(cluster, place).values()
        assert "backoff limit" in _until(cluster, other, "PyTorchJob", "Failed")["message"]
        wait_until("its pods are gone", lambda: cluster.pods(other) == [], _S)
    finally:
        cluster.remove_namespace(other, wait=False)


def test_a_suspended_pytorchjob_has_no_pods_until_it_is_resumed_and_goes_after_its_ttl(
    cluster: Kubernetes, place: str
) -> None:
    cluster.apply(_pytorchjob("true", {"suspend": True, "ttlSecondsAfterFinished": 1}), place)
    _until(cluster, place, "PyTorchJob", "Suspended")
    assert cluster.pods(place) == []
    body = {"spec": {"runPolicy": {"suspend": False}}}
    cluster.client.call("PATCH", _PATHS["PyTorchJob"].format(place), body, content_type="application/merge-patch+json")
    _until_empty(cluster, place)


def test_pods_that_a_quota_forbids_are_told_of(cluster: Kubernetes, place: str) -> None:
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "q"}, "spec": {"hard": {"pods": "0"}}}
    cluster.apply(quota, place)
    path = f"/api/v1/namespaces/{place}/resourcequotas/q"
    wait_until("the quota is known", lambda: "hard" in cluster.client.call("GET", path)["status"], _S)
    cluster.apply(_job("true"), place)

    def told() -> list[str]:
        events = cluster.client.call("GET", f"/api/v1/namespaces/{place}/events")["items"]
        return [each["message"] for each in events if each["reason"] == "FailedCreate"]

    wait_until("it is told", lambda: told() != [], _S)
    assert "exceeded quota: q" in told()[0]


def test_the_pods_of_an_indexed_job_have_names_and_indexes(cluster: Kubernetes, place: str) -> None:
    cluster.apply(_job('echo "$JOB_COMPLETION_INDEX $(hostname)"'), place)
    _until(cluster, place, "Job", "Complete")
    assert _printed(cluster, place) == ["0 j-0", "1 j-1"]
    assert _get(cluster, place, "Job")["status"]["completedIndexes"] == "0,1"
    _delete(cluster, place, "Job")
    _until_empty(cluster, place)


def test_an_indexed_job_replaces_a_pod_that_failed_until_its_limit(cluster: Kubernetes, place: str) -> None:
    text = "[ $JOB_COMPLETION_INDEX = 1 ] && exit 5; exec sleep 1000"
    cluster.apply(_job(text, backoffLimit=1), place)
    assert _until(cluster, place, "Job", "Failed")["reason"] == "BackoffLimitExceeded"
    # The one that was ended with it is told of as failed before it is gone.
    wait_until("the other is gone", lambda: list(_phases(cluster, place).values()) == ["Failed", "Failed"], _S)
    assert _get(cluster, place, "Job")["status"]["failed"] >= 2  # and the one that was ended with it


def test_a_code_that_a_policy_names_fails_the_job_at_once(cluster: Kubernetes, place: str) -> None:
    codes = {"containerName": "pytorch", "operator": "In", "values": [127]}
    policy = {"rules": [{"action": "FailJob", "onExitCodes": codes, "onPodConditions": []}]}
    cluster.apply(_job("exit 127", backoffLimit=9, podFailurePolicy=policy), place)
    said = _until(cluster, place, "Job", "Failed")
    assert said["reason"] == "PodFailurePolicy"
    assert "exit code 127 matching FailJob rule at index 0" in said["message"]


def test_a_job_has_its_time_and_is_gone_after_its_ttl(cluster: Kubernetes, place: str) -> None:
    cluster.apply(_job("exec sleep 1000", activeDeadlineSeconds=1), place)
    assert _until(cluster, place, "Job", "Failed")["reason"] == "DeadlineExceeded"
    _delete(cluster, place, "Job")
    _until_empty(cluster, place)
    cluster.apply(_job("true", ttlSecondsAfterFinished=1, suspend=True), place)
    _until(cluster, place, "Job", "Suspended")
    body = {"spec": {"suspend": False}}
    cluster.client.call("PATCH", _PATHS["Job"].format(place), body, content_type="application/merge-patch+json")
    _until_empty(cluster, place)


def test_a_jobset_restarts_all_its_pods_when_one_has_failed(cluster: Kubernetes, place: str, tmp_path: Path) -> None:
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
