"""What the tpu target would do, and what it refuses before it asks anybody."""

from __future__ import annotations

import json
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
from schedulers.tpu.api import Api
from schedulers.tpu.options import TpuOptions
from schedulers.tpu.slice_target import SliceTarget
from schedulers.tpu.slices import Slice
from schedulers.tpu.target import TpuTarget
from schedulers.tpu.topology import hosts_of
from tests.needs import package

ROOT = Path(__file__).parents[3]
LEAST: dict[str, Any] = {"zone": "us-central2-b", "name": "pod1"}
POD = Slice(name="pod1", node_id=7, state="READY", problem="", addresses=("10.0.0.2", "10.0.0.3"))


def target(**options: Any) -> SliceTarget:
    made = TpuOptions(**{**LEAST, **options})
    return TpuTarget(TargetContext(name="pod", options=made, jobs=Path("/home/me/accel/jobs")))


def test_a_plan() -> None:
    plan = target(venv="~/venv").plan(JobSpec(argv=("train.py", "a b"), code="/p"), "2mxaaaaaaaa")
    assert plan.kind == "tpu"
    assert plan.actions[:2] == (
        ("examine", "the hosts of pod1 in us-central2-b"), ("take", "all of them, by the workers' numbers")
    )  # fmt: skip
    assert '"concurrency": 1' in plan.files["settings.json"]


def created(**options: Any) -> SliceTarget:
    least = {"name": None, "accelerator_type": "v4-32", "version": "tpu-ubuntu2204-base"}
    return target(**{**least, **options})


def test_the_plan_of_a_slice_that_is_created() -> None:
    options = {"spot": True, "network": "lab", "labels": {"team": "a"}, "tags": ("b",), "metadata": {"k": "v"},
               "service_account": "sa@p.iam.gserviceaccount.com", "project": "lab-1"}  # fmt: skip
    plan = created(**options).plan(JobSpec(argv=("train.py",), code="/p"), "2mxaaaaaaaa")
    assert plan.actions[0] == ("create", "TPU VM", "accel-2mxaaaaaaaa-0", "in", "us-central2-b")
    assert plan.actions[-1] == ("delete", "accel-2mxaaaaaaaa-0", "after the job")
    node = json.loads(plan.files["node.json"])
    own = json.loads(node["metadata"].pop("accel-slice"))
    assert own["url"] == (
        "https://tpu.googleapis.com/v2/projects/lab-1/locations/us-central2-b/nodes/accel-2mxaaaaaaaa-0"
    )
    assert (own["arrive_s"], own["silent_s"], own["ended_s"], own["result"]) == (2100.0, 600.0, 120.0, "")
    assert node == {
        "acceleratorType": "v4-32",
        "runtimeVersion": "tpu-ubuntu2204-base",
        "networkConfig": {"network": "lab", "enableExternalIps": True},
        "serviceAccount": {
            "email": "sa@p.iam.gserviceaccount.com",
            "scope": ["https://www.googleapis.com/auth/cloud-platform"],
        },
        "labels": {"team": "a", "accel-job": "2mxaaaaaaaa"},
        "tags": ["b"],
        "metadata": {
            "enable-guest-attributes": "TRUE", "k": "v", "startup-script": "{schedulers/node/tpu_slice.py}",
        },
        "schedulingConfig": {"spot": True},
    }  # fmt: skip


def test_the_plan_of_a_queued_resource() -> None:
    shape = {"accelerator_type": None, "type": "v5litepod", "topology": "2x2", "keep": True, "internal_ips": True}
    disk = {"data_disk": ("source=projects/p/zones/z/disks/d,mode=read-only",)}
    options = {**shape, **disk, "queued": True, "reserved": True, "valid_until_duration": "1d12h"}
    request = json.loads(created(**options).plan(JobSpec(argv=("t.py",)), "j").files["queued-resource.json"])
    (spec,) = request["tpu"]["nodeSpec"]
    assert (spec["nodeId"], spec["parent"]) == ("accel-j-0", "projects/{project}/locations/us-central2-b")
    assert spec["node"]["acceleratorConfig"] == {"type": "V5LITE_POD", "topology": "2x2"}
    assert spec["node"]["dataDisks"] == [{"sourceDisk": "projects/p/zones/z/disks/d", "mode": "READ_ONLY"}]
    assert spec["node"]["networkConfig"] == {"enableExternalIps": False}
    assert spec["node"]["metadata"] == {"enable-guest-attributes": "TRUE"}
    assert (request["guaranteed"], request["queueingPolicy"]) == (
        {"reserved": True}, {"validUntilDuration": "129600s"}
    )  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "hosts"),
    [
        (("v4-8",), 1), (("v4-32",), 4), (("v5p-16",), 2), (("v3-8",), 1), (("v5litepod-8",), 1), (("v6e-4",), 1),
        (("v5litepod-16",), 4), (("v6e-256",), 64), (("v9-8",), None), ((None, "v4", "2x2x4"), 4),
        ((None, "v6e", "2x4"), 1),
    ],
)  # fmt: skip
def test_hosts_of_a_slice(shape: tuple[str | None, ...], hosts: int | None) -> None:
    assert hosts_of(*[*shape, None, None][:3]) == hosts


CREATED: dict[str, Any] = {"name": None, "accelerator_type": "v4-32", "version": "tpu-ubuntu2204-base"}


@pytest.mark.parametrize(
    ("options", "flags"),
    [
        ({}, "--tpu --tpu_runtime torch_tpu"),
        ({"runtime": "torch_xla", "main_training_function": "go"},
         "--tpu --tpu_runtime torch_xla --main_training_function go"),
        ({"cpu": True, "runtime": "torch_xla"}, "--cpu"),
    ],
)  # fmt: skip
def test_the_runtime_is_a_flag_of_the_launch(options: dict[str, Any], flags: str) -> None:
    plan = target(**options).plan(JobSpec(argv=("train.py",), code="/p"), "2mxaaaaaaaa")
    command = json.loads(plan.files["settings.json"])["command"]
    assert command[command.index("launch") + 1 :] == [*flags.split(), "--", "train.py"]


def test_torch_xla_starts_as_many_processes_as_there_are_chips() -> None:
    spec = JobSpec(argv=("train.py",), code="/p", procs_per_node=4)
    (warning,) = target(runtime="torch_xla").plan(spec, "2mxaaaaaaaa").warnings
    assert warning == "4 processes per node are ignored: torch_xla starts one per chip"
    assert target().plan(spec, "2mxaaaaaaaa").warnings == ()


def test_a_plan_needs_neither_client_nor_library() -> None:
    code = (
        "import sys; from tests.schedulers.tpu.test_plan import target, JobSpec;"
        "target().plan(JobSpec(argv=('t.py',)), 'j');"
        "heavy = ('google.auth', 'google.api_core', 'fabric', 'paramiko', 'grpc');"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_without_googles_client_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    package("google.cloud.tpu_v2")
    monkeypatch.delattr("google.cloud.tpu_v2")
    monkeypatch.setitem(sys.modules, "google.cloud.tpu_v2", None)
    with pytest.raises(ConfigError, match=r"^target pod: needs Google's client: pip install 'accel-launch\[tpu\]'"):
        Api(TpuOptions(**LEAST, project="lab-1"), "pod").get("pod1")


@pytest.mark.parametrize(
    ("options", "given", "said"),
    [
        ({"zone": "us-central2"}, {}, "target pod: zone: 'us-central2' is not a valid zone in Google Cloud"),
        ({"name": "-pod"}, {}, "target pod: name: '-pod' is not a valid name in Google Cloud"),
        ({"project": "-Zap"}, {}, "target pod: project: '-Zap' is not a valid project in Google Cloud"),
        ({"spares": 1}, {}, "target pod: spares: a job runs on all hosts of its slice: leave it out"),
        ({"zone": None}, {}, "target pod: no zone of a slice: set it in accel.yaml, or --option zone=…"),
        ({"name": None}, {}, "target pod: no name of a slice: set it in accel.yaml, or --option name=…"),
        ({"accelerator_type": "v4-8"}, {}, "name and accelerator_type are given: keep one of name,"),
        ({"spot": True}, {}, "spot: only for slices that accel creates; pod1 exists already"),
        ({"name": None, "type": "v4"}, {}, "set both type and topology, as in type: v4, topology: 2x2x4"),
        ({"name": None, "type": "v5lite", "topology": "4x4"}, {}, "type: 'v5lite' is not one of v2, v3, v4, v5litepod"),
        ({**CREATED, "version": None}, {}, "no runtime version: set version: in accel.yaml (gcloud compute tpus"),
        ({**CREATED, "spot": True, "reserved": True}, {}, "spot and reserved are both given: keep one"),
        ({**CREATED, "valid_until_duration": "soon"}, {}, "valid_until_duration: 'soon' is not a duration (24h, 1d12h"),
        ({**CREATED, "node_count": 2}, {}, "node_count: 2: a job runs on one slice; for several, use"),
        ({**CREATED, "metadata": {"startup-script": "x"}}, {}, "metadata: startup-script is set by accel, so that the"),
        ({**CREATED, "scopes": ("tpu",)}, {}, "scopes: without cloud-platform the slice cannot delete itself"),
        (
            {**CREATED, "data_disk": ("source=d",)},
            {},
            "data_disk: only slices of one host support disks, and this one has 4",
        ),
        (
            {**CREATED, "accelerator_type": "v4-8", "data_disk": ("d",)},
            {},
            "data_disk: 'd' is not like source=projects/P",
        ),
        (CREATED, {"nodes": 3}, "--nodes 3: v4-32 has 4 hosts; leave it out"),
        ({"runtime": "torch_xla"}, {"entry": "command"}, "--no-python: torch_xla calls a function of a Python script"),
        (
            {"requirements": "r.txt", "requirements_python": "3.10.4"},
            {},
            "requirements_python: 3.10.4: torch_tpu needs Python 3.11 or newer",
        ),
        ({}, {"resources": Resources(gpus=8)}, "--gpus 8: a TPU has none; accelerator_type sets its chips"),
        ({}, {"resources": Resources(accelerator="v4")}, "--accelerator v4: accelerator_type sets the slice's chips"),
        ({}, {"image": "a/b"}, "hosts run the job as they are"),
        ({}, {"after": ("2mxaaaaaaab",)}, "--after is not supported; submit the job once"),
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
        (None, "target pod: TPU VM not found: pod1 in us-central2-b"),
        ("STOPPED", "target pod: pod1 in us-central2-b is STOPPED, not READY"),
        ("REPAIRING", "target pod: pod1 in us-central2-b is REPAIRING (out of order), not READY"),
        ("READY", "target pod: pod1 in us-central2-b has no network endpoints"),
    ],
)
def test_a_slice_that_runs_nothing(found: str | None, said: str) -> None:
    problem = "out of order" if found == "REPAIRING" else ""
    made = found and Slice(name="pod1", node_id=7, state=found, problem=problem, addresses=())
    with pytest.raises(SubmitError) as refused:
        slices.ready_slice(made or None, TpuOptions(**LEAST), "target pod")
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
    status = slices.status_if_over(found or None, TpuOptions(**LEAST))
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
        with pytest.raises(ConfigError, match=r"no host key of worker 1 of pod1 .*: set transport: gcloud"):
            slices.write_config(tmp_path, POD, keys, TpuOptions(**LEAST), "target pod")
    assert not list(tmp_path.iterdir())
