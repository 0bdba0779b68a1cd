"""`accel config` for places where jobs are submitted: the entry that it writes into `accel.yaml`."""

from __future__ import annotations

import dataclasses
import importlib
import json
import typing
from pathlib import Path
from typing import Any

import pytest
import yaml

from accel.cli import config_target, exit_status, main
from accel.cli.yaml_edit import with_value
from accel.settings.prompts import KINDS, TARGET_QUESTIONS
from schedulers.config.named_targets import known_targets

OURS = """\
# who runs what
targets:
  # the lab, by hand
  lab:
    kind: ssh  # no Slurm there
    hosts: a,b
    setup: [[nvidia-smi]]

  big: {kind: slurm, partition: gpu}
# the end
"""


@pytest.fixture(autouse=True)
def somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("ACCEL_CONFIG_HOME", str(tmp_path / "conf"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return tmp_path


def config(answers: str, *words: str) -> int:
    Path("answers.yaml").write_text(answers)
    return main(["config", "--config_file", "x.yaml", "--answers", "answers.yaml", *words])


def targets(path: str) -> Any:
    return yaml.safe_load(Path(path).read_text())["targets"]


@pytest.mark.parametrize(
    ("answers", "name", "entry"),
    [
        ("{place: ssh, ssh_hosts: 'a,b:22'}", "ssh", {"kind": "ssh", "hosts": "a,b:22", "cpu": True}),
        ("{place: ssh, device: gpu, ssh_hostfile: hosts, ssh_user: me, ssh_venv: ~/v, ssh_interface: ib0, target: lab}",
         "lab", {"kind": "ssh", "hostfile": "hosts", "user": "me", "venv": "~/v", "interface": "ib0"}),
        ("{place: slurm, device: gpu, slurm_partition: gpu, slurm_account: us, slurm_qos: high}",
         "slurm", {"kind": "slurm", "partition": "gpu", "account": "us", "qos": "high"}),
        ("{place: slurm, device: gpu, slurm_login: 'me@head', slurm_container: pyxis}",
         "slurm", {"kind": "slurm", "login": "me@head", "python": "python3", "container": "pyxis"}),
        ("{place: kubernetes, device: gpu, kubernetes_namespace: train, kubernetes_queue: gpus}",
         "kubernetes", {"kind": "kubernetes", "namespace": "train", "workload": "pytorchjob", "queue": "gpus"}),
        ("{place: sagemaker, iam_role_name: train, ec2_instance_type: ml.g5.xlarge, image_uri: 'pytorch:2.8'}",
         "sagemaker", {"kind": "sagemaker", "profile": "default", "region": "us-east-1", "role": "train",
                       "instance_type": "ml.g5.xlarge", "image": "pytorch:2.8"}),
        ("{place: sagemaker, iam_role_name: r, profile: '', target: aws, sagemaker_s3_output_path: 's3://b/team'}",
         "aws", {"kind": "sagemaker", "region": "us-east-1", "role": "r", "instance_type": "ml.p3.2xlarge",
                 "s3_output_path": "s3://b/team"}),
        ("{place: tpu, tpu_submit: true, num_processes: 4, slice_zone: us-central2-b, slice_name: pod1}",
         "tpu", {"kind": "tpu", "zone": "us-central2-b", "name": "pod1", "transport": "ssh", "runtime": "torch_tpu"}),
        ("{place: tpu, tpu_submit: true, num_processes: 4, slice_zone: us-east1-d, slice_accelerator_type: v4-32, "
         "slice_version: v2-alpha, slice_spot: true, slice_checkpoint_uri: 'gs://results/{id}', "
         "slice_runtime: torch_xla, main_training_function: go}",
         "tpu", {"kind": "tpu", "zone": "us-east1-d", "accelerator_type": "v4-32", "version": "v2-alpha",
                 "spot": True, "checkpoint_uri": "gs://results/{id}", "transport": "ssh", "runtime": "torch_xla"}),
        ("{place: tpu, tpu_submit: true, num_processes: 4, target: pod, slice_project: mine, slice_zone: us-east1-d, "
         "slice_name: pod1, slice_venv: ~/v, slice_transport: gcloud}",
         "pod", {"kind": "tpu", "project": "mine", "zone": "us-east1-d", "name": "pod1", "venv": "~/v",
                 "transport": "gcloud", "runtime": "torch_tpu"}),
    ],
)  # fmt: skip
def test_answers_make_a_target(
    answers: str, name: str, entry: dict[str, Any], somewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert config(answers) == exit_status.OK
    assert targets("conf/accel.yaml") == {name: entry}
    shown = capsys.readouterr()
    assert shown.out == f"x.yaml\n{somewhere}/conf/accel.yaml\n"
    assert shown.err == f"accel: config: submit with: accel submit --target {name} --config_file x.yaml SCRIPT\n"
    (found,) = [target for target in known_targets() if target.file is not None]
    assert (found.name, {"kind": found.kind, **found.options}) == (name, entry)


def test_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert config("{place: slurm, slurm_partition: gpu, target_file: project}", "--json") == exit_status.OK
    told = json.loads(capsys.readouterr().out)
    assert told["target"]["path"].endswith("/accel.yaml")
    assert {key: told["target"][key] for key in ("name", "kind", "partition", "cpu")} == {
        "name": "slurm", "kind": "slurm", "partition": "gpu", "cpu": True,
    }  # fmt: skip
    assert told["settings"]["use_cpu"] is True


def test_the_projects_file_is_taken_where_there_is_one(somewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("accel.yaml").write_text(OURS)
    below = somewhere / "src"
    below.mkdir()
    monkeypatch.chdir(below)
    assert config("{place: slurm, slurm_partition: debug, target: small}") == exit_status.OK
    text = (somewhere / "accel.yaml").read_text()
    assert text == OURS.replace(
        "# the end\n", "  small:\n    kind: slurm\n    partition: debug\n    cpu: true\n# the end\n"
    )
    assert not (somewhere / "conf").exists()


def test_an_entry_that_is_there_keeps_what_was_not_asked_for() -> None:
    Path("accel.yaml").write_text(OURS)
    assert config("{place: ssh, device: gpu, target: lab, ssh_hosts: 'c,d', ssh_user: me}") == exit_status.OK
    assert Path("accel.yaml").read_text() == OURS.replace("a,b", "c,d").replace(
        "setup: [[nvidia-smi]]\n", "setup: [[nvidia-smi]]\n    user: me\n"
    )
    assert (
        config("{place: ssh, device: gpu, target: lab, ssh_hosts: 'c,d'}") == exit_status.OK
    )  # the user is taken back
    assert targets("accel.yaml")["lab"] == {"kind": "ssh", "hosts": "c,d", "setup": [["nvidia-smi"]]}
    assert targets("accel.yaml")["big"] == {"kind": "slurm", "partition": "gpu"}
    assert "# who runs what\n" in Path("accel.yaml").read_text()


def test_what_was_not_asked_for_and_what_contradicts_it(capsys: pytest.CaptureFixture[str]) -> None:
    """The interpreter is asked for only where there is a login node; hosts take the place of a hostfile."""
    Path("accel.yaml").write_text(
        "targets:\n  c: {kind: slurm, python: /opt/python}\n  lab: {kind: ssh, hostfile: h, python: /opt/python}\n"
    )
    assert config("{place: slurm, device: gpu, target: c, slurm_partition: gpu}") == exit_status.OK
    assert targets("accel.yaml")["c"] == {"kind": "slurm", "python": "/opt/python", "partition": "gpu"}
    assert config("{place: ssh, device: gpu, target: lab, ssh_hosts: 'a,b'}") == exit_status.OK
    assert targets("accel.yaml")["lab"] == {"kind": "ssh", "python": "/opt/python", "hosts": "a,b"}
    text = Path("accel.yaml").read_text()
    capsys.readouterr()
    assert config("{place: ssh, device: gpu, target: lab, ssh_hosts: 'a,b', ssh_venv: ~/v}") == exit_status.USAGE
    assert capsys.readouterr().err == "accel config: target lab: python and venv are both given: keep one\n"
    assert Path("accel.yaml").read_text() == text


def test_what_is_there_is_offered_again() -> None:
    Path("accel.yaml").write_text(OURS)
    assert config_target.offered() == {"ssh_hosts": "a,b", "slurm_partition": "gpu"}


def test_a_link_and_its_mode_stay(somewhere: Path) -> None:
    real = somewhere / "dotfiles.yaml"
    real.write_text(OURS)
    real.chmod(0o600)
    Path("accel.yaml").symlink_to(real)
    assert config("{place: slurm, target: small}") == exit_status.OK
    assert Path("accel.yaml").is_symlink()
    assert set(targets("accel.yaml")) == {"lab", "big", "small"}
    assert real.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ("place: ssh\ntarget: slurm\nssh_hosts: a", ":2: target: 'slurm' is another kind of target: this one"),
        ("place: slurm\ntarget: lab", ":2: target: a target 'lab' of kind ssh already exists"),
        ("place: ssh\nssh_hosts: a[3-1]", ":2: ssh_hosts: "),
        ("place: ssh", ": no answer to ssh_hostfile: The hostfile, one machine per line?"),
        ("place: slurm\nslurm_container: docker", ":2: slurm_container: 'docker' is not one of none, pyxis, apptainer"),
        ("place: kubernetes\nkubernetes_namespace: A b",
         ":2: kubernetes_namespace: namespace must consist of lowercase letters"),
        ("place: kubernetes\nkubernetes_workload: pod", ":2: kubernetes_workload: 'pod' is not one of pytorchjob"),
        ("place: kubernetes\nkubernetes_image: ' x'", ":2: kubernetes_image: image must be one word, not ' x'"),
        ("place: sagemaker\niam_role_name: r\nimage_uri: pytorch:9", ":3: image_uri: pytorch:9: unknown version"),
        ("place: tpu\nnum_processes: 1\ntpu_submit: true\nslice_zone: us",
         ":4: slice_zone: zone: 'us' is not a valid zone"),
        ("place: tpu\nnum_processes: 1\ntpu_submit: true\nslice_zone: us-east1-d\nslice_name: a\nslice_spot: true",
         ":6: slice_spot does not apply to the other answers"),
        ("place: tpu\nnum_processes: 1\nslice_zone: us-east1-d", ":3: slice_zone does not apply to"),
        ("place: tpu\nnum_processes: 1\ntpu_submit: true\nslice_zone: us-east1-d\nslice_name: a\ntpu_use_cluster: true",
         ":6: tpu_use_cluster does not apply to the other answers"),
        ("place: slurm\nssh_hosts: a", ":2: ssh_hosts does not apply to the other answers"),
        ("place: this\ntarget: lab", ":2: target does not apply to the other answers"),
        ("place: k8s", ":1: place: 'k8s' is not one of this, several, ssh, slurm, kubernetes, tpu, sagemaker"),
    ],
)  # fmt: skip
def test_what_no_target_could_have(answers: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("accel.yaml").write_text(OURS)
    assert config(answers) == exit_status.USAGE
    shown = capsys.readouterr().err
    assert shown.startswith(f"accel config: answers.yaml{said}"), shown
    assert shown.count("\n") == 1
    assert Path("accel.yaml").read_text() == OURS
    assert not Path("x.yaml").exists()


def test_both_files_are_written_or_none(somewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("accel.yaml").write_text(OURS)
    Path("answers.yaml").write_text("{place: ssh, ssh_hosts: a, target: new}")
    assert main(["config", "--config_file", "answers.yaml/x.yaml", "--answers", "answers.yaml"]) == exit_status.USAGE
    assert capsys.readouterr().err == "accel config: cannot write answers.yaml/x.yaml: Not a directory\n"
    assert Path("accel.yaml").read_text() == OURS
    Path("answers.yaml").write_text("{place: ssh, ssh_hosts: a, target: new, target_file: user}")
    Path("conf").touch()
    assert main(["config", "--config_file", "y.yaml", "--answers", "answers.yaml"]) == exit_status.USAGE
    assert capsys.readouterr().err.endswith("conf/accel.yaml: Not a directory\n")
    assert sorted(path.name for path in somewhere.iterdir()) == ["accel.yaml", "answers.yaml", "conf"]


def test_the_line_to_go_on_with_is_one_to_paste(capsys: pytest.CaptureFixture[str]) -> None:
    Path("answers.yaml").write_text("{place: slurm, target: big}")
    assert main(["config", "--config_file", "my conf.yaml", "--answers", "answers.yaml"]) == exit_status.OK
    assert "accel submit --target big --config_file 'my conf.yaml' SCRIPT\n" in capsys.readouterr().err


def test_a_file_of_targets_that_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    Path("accel.yaml").write_text("targets:\n  lab: 3\n")
    assert config("{place: ssh, ssh_hosts: a}") == exit_status.USAGE
    shown = capsys.readouterr().err
    assert shown.startswith("accel config: accel.yaml:2: target lab: expects a mapping")
    assert shown.count("\n") == 1


def test_every_question_is_one_of_its_kind() -> None:
    """The options are those of the target's own schema, and a choice offers what the schema allows."""
    for kind in KINDS:
        module, name = config_target._SCHEMAS[kind]
        schema = getattr(importlib.import_module(module), name)
        fields = {field.name for field in dataclasses.fields(schema)}
        hints = typing.get_type_hints(schema)
        for question in TARGET_QUESTIONS:
            if question.target is not None and question.target[0] == kind:
                assert question.target[1] in fields
                allowed = {word for hint in _parts(hints[question.target[1]]) for word in typing.get_args(hint)}
                assert {value for value, _ in question.options} - {"none"} == allowed, question.name


def _parts(hint: Any) -> list[Any]:
    parts = [hint, *typing.get_args(hint)]
    return [part for part in parts if typing.get_origin(part) is typing.Literal]


@pytest.mark.parametrize(
    ("text", "keys", "value", "wanted"),
    [
        ("", "targets.a", {"kind": "ssh"}, "targets:\n  a:\n    kind: ssh\n"),
        ("# only\n", "targets.a", {"kind": "ssh"}, "# only\ntargets:\n  a:\n    kind: ssh\n"),
        ("targets:\n", "targets.a", {"kind": "ssh"}, "targets:\n  a:\n    kind: ssh\n"),
        ("targets: {}\n", "targets.a", {"kind": "ssh"}, "targets:\n  a:\n    kind: ssh\n"),
        ("targets:\n    a:\n        kind: local", "targets.b", {"kind": "ssh"},
         "targets:\n    a:\n        kind: local\n    b:\n      kind: ssh\n"),
        ("targets:\n  a:\n    kind: ssh\n    hosts:\n    - a\n    - b\n    # end\n", "targets.a.hosts", "x",
         "targets:\n  a:\n    kind: ssh\n    hosts: x\n    # end\n"),
        ("targets:\n  a:\n    kind: ssh\n# the end\n", "targets.b", {"kind": "ssh"},
         "targets:\n  a:\n    kind: ssh\n  b:\n    kind: ssh\n# the end\n"),
        ("targets:\n  a:\n    prologue: [\"#\"]\n    text: |\n      x\n\n  # b\n", "targets.a.user", "me",
         "targets:\n  a:\n    prologue: [\"#\"]\n    text: |\n      x\n\n  # b\n    user: me\n"),
        ("targets:\n  a:\n    user:\n    kind: ssh\n", "targets.a.user", "me: 1",
         "targets:\n  a:\n    user: 'me: 1'\n    kind: ssh\n"),
        (OURS, "targets.big.account", "us",
         OURS.replace("big: {kind: slurm, partition: gpu}",
                      "big:\n    kind: slurm\n    partition: gpu\n    account: us")),
        ("{targets: {a: {kind: ssh}}}  # one line\n", "targets.b", {"kind": "ssh"},
         "targets:\n  a:\n    kind: ssh\n  b:\n    kind: ssh\n"),
        ("targets: &x\n  a: &y {kind: ssh}\n  b: *y\n", "targets.a.user", "me",
         "targets:\n  a:\n    kind: ssh\n    user: me\n  b:\n    kind: ssh\n"),
    ],
)  # fmt: skip
def test_a_value_in_a_file_that_people_have_written(text: str, keys: str, value: Any, wanted: str) -> None:
    assert with_value(text, keys.split("."), value) == wanted
