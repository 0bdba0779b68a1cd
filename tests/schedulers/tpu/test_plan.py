"""What the tpu target would do, and what it refuses before it asks anybody."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from schedulers import JobSpec, Reason, Resources, SpecError, State
from schedulers.config.named_targets import load_target
from schedulers.errors import ConfigError, SubmitError
from schedulers.hosts.ssh_config import resolve
from schedulers.target import TargetContext
from schedulers.tpu import slices
from schedulers.tpu.options import TpuOptions
from schedulers.tpu.slices import Slice
from schedulers.tpu.target import TpuTarget

ROOT = Path(__file__).parents[3]
LEAST: dict[str, Any] = {"zone": "us-central2-b", "name": "pod1"}
POD = Slice(name="pod1", node_id=7, state="READY", problem="", addresses=("10.0.0.2", "10.0.0.3"))


def target(**options: Any) -> TpuTarget:
    made = TpuOptions(**{**LEAST, **options})
    return TpuTarget(TargetContext(name="pod", options=made, jobs=Path("/home/me/accel/jobs")))


def test_a_plan() -> None:
    plan = target(venv="~/venv").plan(JobSpec(argv=("train.py", "a b"), code="/p"), "2mxaaaaaaaa")
    assert plan.kind == "tpu"
    assert plan.actions[:2] == (
        ("examine", "the hosts of pod1 in us-central2-b"), ("take", "all of them, by the workers' numbers")
    )  # fmt: skip
    assert '"concurrency": 1' in plan.files["settings.json"]


def test_a_plan_needs_neither_client_nor_library() -> None:
    code = (
        "import sys; from tests.schedulers.tpu.test_plan import target, JobSpec;"
        "target().plan(JobSpec(argv=('t.py',)), 'j');"
        "print([name for name in ('google.auth', 'google.api_core', 'paramiko', 'grpc') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    ("options", "given", "said"),
    [
        ({"zone": "us-central2"}, {}, "target pod: zone: 'us-central2' is no zone that Google Cloud gives"),
        ({"name": "-pod"}, {}, "target pod: name: '-pod' is no name that Google Cloud gives"),
        ({"project": "-Zap"}, {}, "target pod: project: '-Zap' is no project that Google Cloud gives"),
        ({"spares": 1}, {}, "target pod: spares: a job runs on all hosts of its slice: leave it out"),
        ({"zone": None}, {}, "target pod: which slice? say zone: in accel.yaml, or --option zone=…"),
        ({"name": None}, {}, "target pod: which slice? say name: in accel.yaml, or --option name=…"),
        ({}, {"resources": Resources(gpus=8)}, "--gpus 8: a TPU has none; its accelerator_type says which chips"),
        ({}, {"resources": Resources(accelerator="v4")}, "--accelerator v4: the slice's accelerator_type says"),
        ({}, {"image": "a/b"}, "hosts run the job as they are"),
        ({}, {"after": ("2mxaaaaaaab",)}, "hosts know no other jobs"),
    ],
)
def test_what_is_refused(options: dict[str, Any], given: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError) as refused:
        target(**options).plan(JobSpec(argv=("t.py",), **given), "j")
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_transport_that_there_is_not(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"option transport: 'iap' is not one of ssh, gcloud|transport"):
        load_target("tpu", tmp_path, overrides={**LEAST, "transport": "iap"})


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (None, "target pod: there is no TPU VM pod1 in us-central2-b"),
        ("STOPPED", "target pod: pod1 in us-central2-b is STOPPED, not READY"),
        ("REPAIRING", "target pod: pod1 in us-central2-b is REPAIRING (out of order), not READY"),
        ("READY", "target pod: pod1 in us-central2-b has no network endpoints"),
    ],
)
def test_a_slice_that_runs_nothing(found: str | None, said: str) -> None:
    problem = "out of order" if found == "REPAIRING" else ""
    made = found and Slice(name="pod1", node_id=7, state=found, problem=problem, addresses=())
    with pytest.raises(SubmitError) as refused:
        slices.ready(made or None, TpuOptions(**LEAST), "target pod")
    assert str(refused.value) == said


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        (None, Reason.NODE_FAILURE), ("PREEMPTED", Reason.PREEMPTED), ("TERMINATED", Reason.PREEMPTED),
        ("STOPPED", Reason.NODE_FAILURE), ("STOPPING", Reason.NODE_FAILURE), ("DELETING", Reason.NODE_FAILURE),
        *((state, None) for state in ("READY", "REPAIRING", "RESTARTING", "HIDDEN", "UNKNOWN", "STATE_UNSPECIFIED")),
    ],
)  # fmt: skip
def test_what_a_node_s_state_means_for_silent_hosts(state: str | None, reason: Reason | None) -> None:
    found = state and Slice(name="pod1", node_id=7, state=state, problem="", addresses=("10.0.0.2",))
    status = slices.ended(found or None, TpuOptions(**LEAST))
    if reason is None:
        assert status is None
    else:
        assert status is not None
        assert (status.state, status.reason) == (State.FAILED, reason)
        assert status.message.startswith("the slice pod1 ")


def test_the_ssh_configuration_of_the_workers(tmp_path: Path) -> None:
    """As ssh itself reads it: the slice's own words first, then the user's."""
    users = tmp_path / "config"
    users.write_text("Host *\n    User somebody\n    ConnectTimeout 9\n    HostKeyAlias other\n")
    folder = tmp_path / "a folder"
    keys = [["ssh-ed25519 AAAA", "ssh-rsa BBBB"], ["ssh-ed25519 CCCC"]]
    options = TpuOptions(**LEAST, ssh_config=str(users), port=2222)
    slices.write_config(folder, POD, keys, options, "target pod")
    settings = [resolve(host, str(folder / "ssh_config")) for host in POD.hosts]
    assert [(each.alias, each.hostname, each.port, each.user) for each in settings] == [
        ("pod1-w0", "10.0.0.2", 2222, "somebody"), ("pod1-w1", "10.0.0.3", 2222, "somebody")
    ]  # fmt: skip
    assert [each.key_alias for each in settings] == ["tpu.7-0", "tpu.7-1"]
    assert {each.connect_timeout_s for each in settings} == {9.0}
    assert all(str(folder / "known_hosts") in each.known_hosts for each in settings)
    assert (
        folder / "known_hosts"
    ).read_text() == "tpu.7-0 ssh-ed25519 AAAA\ntpu.7-0 ssh-rsa BBBB\ntpu.7-1 ssh-ed25519 CCCC\n"


def test_a_worker_without_a_host_key_is_not_spoken_to(tmp_path: Path) -> None:
    for keys in ([["ssh-ed25519 AAAA"]], [["ssh-ed25519 AAAA"], []]):
        with pytest.raises(ConfigError, match=r"no host key of worker 1 of pod1 .*: say transport: gcloud"):
            slices.write_config(tmp_path, POD, keys, TpuOptions(**LEAST), "target pod")
    assert not list(tmp_path.iterdir())
