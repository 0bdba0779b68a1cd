"""What the ssh target would do, held by a golden file, and what it refuses before it asks any host."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from schedulers import JobSpec, Resources, Retry, SpecError
from schedulers.ssh.target import SshOptions, SshTarget
from schedulers.target import TargetContext
from tests.golden import assert_golden

from .conftest import ROOT


def target(**options: Any) -> SshTarget:
    return SshTarget(TargetContext(name="lab", options=SshOptions(**options), jobs=Path("/home/me/accel/jobs")))


def test_a_plan_with_everything() -> None:
    spec = JobSpec(
        argv=("train.py", "--name", 'it\'s a "job"', "", "a\nb", "ü"),
        name="everything, at once",
        nodes=2,
        resources=Resources(gpus=8, cpus=8),
        env={"A": "1 2"},
        secrets={"HF_TOKEN": "env:HF_TOKEN"},
        code="/home/me/project",
        workdir="examples",
        setup=(("pip", "install", "-e", "."),),
        time_limit_s=3600,
        grace_s=12.5,
        retry=Retry(max_restarts=3),
    )
    lab = target(hosts="gpu[01-04]", user="me", spares=2, venv="~/venv", setup=(("nvidia-smi",),), interface="ib",
                 modules=("cuda/12.4", "a b"), prologue=("export TOOL='1  2'",))  # fmt: skip
    assert_golden("ssh_plan.txt", str(lab.plan(spec, "2mxaaaaaaaa")))


def test_no_secret_is_in_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hush")
    spec = JobSpec(argv=("train.py",), secrets={"HF_TOKEN": "env:HF_TOKEN"})
    assert "hush" not in str(target(hosts="a").plan(spec, "j").to_json())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"hosts": "a", "hostfile": "b"}, "target lab: hosts and hostfile are both given"),
        ({"hosts": "a", "heartbeat_s": 4}, "heartbeat_s must be 5 or more, not 4"),
        ({"hosts": "a", "start_timeout_s": 0}, "start_timeout_s must be more than 0, not 0"),
        ({"hosts": "a", "spares": -1}, "spares must be 0 or more, not -1"),
        ({"hosts": "a", "port": 65536}, "port must be 1 to 65535, not 65536"),
        ({"hosts": "a", "ports": "30-20"}, "ports must be a range of 2 or more, such as 29500-29599, not '30-20'"),
        ({"hosts": "a", "ports": "29500"}, "ports must be a range of 2 or more, such as 29500-29599, not '29500'"),
        ({"hosts": "a", "python": "p", "venv": "v"}, "python and venv are both given: keep one"),
        ({"hosts": "a", "root": "accel"}, "root must begin with / or ~/, not 'accel'"),
        ({"hosts": "a", "prologue": ("a\nb",)}, "an entry of modules or prologue has a line break"),
        ({"hosts": "a", "setup": ((),)}, "setup: a command has no program"),
    ],
)
def test_options_that_cannot_be_meant(options: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=re.escape(said)):
        target(**options)


@pytest.mark.parametrize(
    ("options", "spec", "said"),
    [
        ({}, {}, "target lab: no hosts; give --hosts a,b or --hostfile FILE"),
        ({"hosts": "a,b"}, {"nodes": 3}, "3 nodes requested, but it has 2 hosts"),
        ({"hosts": "a,b", "spares": 1}, {"nodes": 2}, "2 nodes and 1 spares requested, but it has 2 hosts"),
        ({"hosts": "a"}, {"image": "x"}, "--image needs another kind of target"),
        ({"hosts": "a"}, {"after": ("x",)}, "--after is not supported; submit the job once"),
        ({"hosts": "a"}, {"secrets": {"A": "vault:x"}}, "--secret A: an ssh target reads env:NAME and file:PATH"),
        ({"hosts": "a", "cpu": True}, {"resources": Resources(gpus=1)}, "and --gpus contradict each other: keep one"),
        ({"hosts": "a,-oProxyCommand=x"}, {}, "'-oProxyCommand=x' is not a host name"),
    ],
)
def test_jobs_that_it_cannot_run(options: dict[str, Any], spec: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=re.escape(said)):
        target(**options).plan(JobSpec(argv=("train.py",), **spec), "j")


def test_every_option_is_in_the_documentation() -> None:
    table = (ROOT / "docs/ssh.md").read_text().partition("\n## Options\n")[2].partition("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| `")]
    named = {word for line in rows for word in re.findall(r"`(\w+)`", line.split(" | ")[0])}
    assert named == {field.name for field in dataclasses.fields(SshOptions)}


def test_hosts_of_a_hostfile_beside_the_code(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a slots=2\nme@b slots=2 # the other\n")
    hosts = target(hosts=None, hostfile="hosts", user="you", port=2222)._candidate_hosts(str(tmp_path))
    assert [str(host) for host in hosts] == ["you@a:2222", "me@b:2222"]


def test_hosts_of_the_ssh_configuration(tmp_path: Path) -> None:
    (tmp_path / "config").write_text("Host gpu1 gpu2\n  User me\nHost other\n")
    hosts = target(hosts="gpu*", ssh_config=str(tmp_path / "config"))._candidate_hosts(".")
    assert [str(host) for host in hosts] == ["gpu1", "gpu2"]
