"""Jobs of one target that were sent to different clusters: each is asked, whatever became of the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from schedulers import JobSpec, State
from schedulers.errors import ConfigError, Unreachable
from schedulers.kubernetes import cluster_ref
from schedulers.kubernetes.cluster_ref import ClusterRef
from schedulers.kubernetes.options import KubernetesOptions
from schedulers.kubernetes.target import KubernetesTarget
from schedulers.target import TargetContext, same_backend

from .servers import refused, reply, serving
from .shapes import condition, workload

HERE, GONE, SHUT = (f"job/team/run1/{name}" for name in ("here", "gone", "shut"))


def _ended(handler: Any) -> None:
    reply(handler, {"items": []} if "/pods" in handler.path else workload("Job", condition("Complete")))


@pytest.fixture
def target(tmp_path: Path) -> KubernetesTarget:
    options = KubernetesOptions(image="i", kubeconfig=str(tmp_path / "config"))
    return KubernetesTarget(TargetContext(name="k", options=options, jobs=tmp_path / "jobs"))


def _place(tmp_path: Path, **servers: str) -> None:
    """A context of each name, and a job that was sent to it; of the context `gone` there is only the job."""
    content = {
        "clusters": [{"name": name, "cluster": {"server": server}} for name, server in servers.items()],
        "contexts": [{"name": name, "context": {"cluster": name, "namespace": "team"}} for name in servers],
    }
    (tmp_path / "config").write_text(yaml.safe_dump(content))
    for name in (*servers, "gone"):
        place = ClusterRef(namespace="team", kubeconfig=str(tmp_path / "config"), context=name)
        cluster_ref.write(tmp_path / "jobs", name, place)


def test_a_cluster_that_refuses_and_one_that_is_forgotten_silence_no_other(
    tmp_path: Path, target: KubernetesTarget
) -> None:
    with serving(_ended) as here, serving(refused(401, "Unauthorized", "Unauthorized")) as shut:
        _place(tmp_path, here=here.url, shut=shut.url)
        with pytest.raises(Unreachable) as caught:
            target.poll([GONE, HERE, SHUT])
        assert {native: status.state for native, status in caught.value.answers.items()} == {HERE: State.SUCCEEDED}
        assert caught.value.silent is not None
        assert "has no context 'gone'" in caught.value.silent[GONE]
        assert "the credentials of context shut are not accepted" in caught.value.silent[SHUT]
        assert [*caught.value.silent] == [GONE, SHUT]
        with pytest.raises(ConfigError, match="has no context 'gone'"):
            target.poll([GONE])
        assert target.poll([HERE])[HERE].state is State.SUCCEEDED
        # A submit that is carried out: what was sent may be there, and run.
        for name, words in (("gone", "has no context 'gone'"), ("shut", "are not accepted")):
            with pytest.raises(Unreachable, match=words):
                target.submit(target.plan(JobSpec(argv=("a.py",)), name))
    target.close()


def test_a_context_that_comes_to_mean_another_cluster(tmp_path: Path, target: KubernetesTarget) -> None:
    """Its namespace has another uid; without the right to read that, the server's URL and CA count."""

    def namespace(uid: str) -> Any:
        return lambda handler: reply(handler, {"metadata": {"uid": uid}})

    jobs = {"here": HERE}
    with (
        serving(namespace("u1")) as one, serving(namespace("u2")) as two,
        serving(refused(403, "Forbidden", "Forbidden")) as shut,
    ):  # fmt: skip
        identities = []
        for server in (one, two, shut, one):
            _place(tmp_path, here=server.url)
            fresh = KubernetesTarget(TargetContext(name="k", options=target._options, jobs=tmp_path / "jobs"))
            identities.append(fresh.backends(jobs)["here"])
            fresh.close()
    assert [identity.partition(" ")[0] for identity in identities[:2]] == ["namespace=u1", "namespace=u2"]
    assert identities[2].startswith("server=")
    assert same_backend(identities[0], identities[3])
    assert same_backend(identities[0], identities[1]) is False
    assert same_backend(identities[0], identities[2]) is None
    assert same_backend(identities[2], identities[0]) is False
