"""`accel env`: whole whatever is broken, and never a secret."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from accel.cli import env, exit_status
from accel.diagnostics.redaction import HIDDEN, secrets_of, without_secrets
from tests.nvml import fake_gpus

from .conftest import ROOT, Accel

BROKEN_TORCH = "import sys\nprint('noise')\nraise RuntimeError('libcudart is missing\\nand more')\n"


@pytest.fixture
def no_torch(accel: Accel) -> str:
    """A PYTHONPATH with which no torch is found: importing it takes ten times as long as all else that is shown."""
    top = accel.here / "without"
    (top / "torch").mkdir(parents=True)
    (top / "torch/__init__.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n")
    return f"{top}:{ROOT}"


def found(accel: Accel, *argv: str, **env: str) -> dict[str, Any]:
    done = accel.finish("env", "--json", *argv, HF_HOME=str(accel.home / "hf"), **env)
    assert (done.returncode, done.stderr) == (0, b"")
    shown: dict[str, Any] = json.loads(done.stdout)
    return shown


def test_it_tells_of_all(accel: Accel) -> None:
    told = found(accel, NCCL_DEBUG="INFO")
    assert told["machine"]["platform"]
    assert told["machine"]["python"]
    assert told["machine"]["memory"]
    assert told["packages"]["PyYAML"]
    assert told["torch"]["version"] == told["packages"]["torch"] or "error" in told["torch"]
    assert told["config"]["settings"] is None
    assert told["config"]["path"].startswith(str(accel.home))
    assert told["environment"]["NCCL_DEBUG"] == "INFO"
    by_name = {target["name"]: target for target in told["targets"]}
    assert by_name["local"]["answers"] is True
    assert by_name["ssh"]["answers"] is None  # nobody has named a host
    shown = accel("env")
    assert "\ntorch\n" in shown
    assert re.search(r"\ntargets\n(  .*\n)*  local +answers in", shown)


def test_a_torch_that_is_broken_or_absent_is_one_line(accel: Accel, no_torch: str) -> None:
    top = accel.here / "broken"
    (top / "torch").mkdir(parents=True)
    (top / "torch/__init__.py").write_text(BROKEN_TORCH)
    told = found(accel, PYTHONPATH=f"{top}:{ROOT}")
    assert told["torch"] == {"error": "cannot be imported: RuntimeError: libcudart is missing and more"}
    (top / "torch/__init__.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)\n")
    assert found(accel, PYTHONPATH=f"{top}:{ROOT}")["torch"] == {"error": "ended by signal 11"}
    assert found(accel, PYTHONPATH=no_torch)["torch"] == {"error": "not installed"}


def test_packages_that_cannot_be_imported_are_told_by_their_version(accel: Accel, no_torch: str) -> None:
    top = accel.here / "broken"
    for name in ("transformers", "timm", "huggingface_hub", "deepspeed", "paramiko", "rich", "numpy"):
        (top / name).mkdir(parents=True)
        (top / name / "__init__.py").write_text("raise RuntimeError('needs another torch')\n")
    told = found(accel, PYTHONPATH=f"{top}:{no_torch}")
    assert told["packages"]["rich"]
    assert told["machine"]["platform"]


def test_the_driver_is_asked(accel: Accel, no_torch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpus(tmp_path, monkeypatch, ["GPU-1", "GPU-2"])
    told = found(accel, LD_LIBRARY_PATH=os.environ["LD_LIBRARY_PATH"], PYTHONPATH=no_torch)["nvidia"]
    assert (told["driver"], told["cuda"]) == ("570.1", "12.8")
    assert [device["name"] for device in told["devices"]] == ["Stand-in", "Stand-in"]
    assert told["devices"][0]["memory"] is None  # the stand-in does not know


def test_the_configuration_is_shown_without_its_secrets(accel: Accel, no_torch: str) -> None:
    file = accel.here / "a.yaml"
    file.write_text(
        "num_processes: 4\naws_secret_access_key: wJalrXUtnFEMI\ntpu_env: ['HF_TOKEN=hush', 'A=1']\nwhen: 2024-01-01\n"
    )
    for argv in (["--json"], []):
        shown = accel("env", "--config_file", str(file), *argv, PYTHONPATH=no_torch)
        assert "wJalr" not in shown
        assert "hush" not in shown
        assert "num_processes" in shown
        assert "A=1" in shown
        assert "2024-01-01" in shown


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "--config_file: cannot read a.yaml: it does not exist"),
        ("a: 1\nb: [", "--config_file: a.yaml:2: "),
        ("- 1", "a.yaml:1: must hold settings"),
        ("a: 1\nb: \udcff", "a.yaml:2: not UTF-8"),
        ("a: 1\nb: 2024-13-99", "a.yaml:2: a value cannot be read: month must be in 1..12"),
        ("a: 1\nb: " + "[" * 3000, "a.yaml:2: nested too deeply"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_line(accel: Accel, text: str | None, said: str) -> None:
    if text is not None:
        (accel.here / "a.yaml").write_text(text, errors="surrogateescape")
    done = accel.finish("env", "--config_file", "a.yaml")
    (line,) = done.stderr.decode().splitlines()
    assert done.returncode == exit_status.USAGE
    assert said in line


def test_a_default_file_that_is_broken_hides_nothing_else(accel: Accel, no_torch: str) -> None:
    folder = accel.home / "hf/accelerate"
    folder.mkdir(parents=True)
    (folder / "default_config.yaml").write_text("a: 2024-13-99")
    told = found(accel, PYTHONPATH=no_torch)
    assert "default_config.yaml:1: a value cannot be read" in told["config"]["error"]
    (folder / "default_config.yaml").write_text("num_procesess: 3\n")
    told = found(accel, PYTHONPATH=no_torch)
    assert told["config"]["settings"] == {"num_procesess": 3}
    assert "did you mean 'num_processes'" in told["config"]["error"]  # accel launch would refuse it
    assert told["targets"]


def test_a_target_file_that_is_broken_hides_nothing_else(accel: Accel, no_torch: str) -> None:
    (accel.here / "accel.yaml").write_text("targets: [1]\n")
    told = found(accel, PYTHONPATH=no_torch)
    assert "expects a mapping of names" in told["targets_error"]
    assert told["machine"]
    assert "expects a mapping of names" in accel("env", PYTHONPATH=no_torch)


def test_a_target_that_is_slow_or_broken_holds_nothing_up(accel: Accel, no_torch: str) -> None:
    """A plug-in whose `poll` sleeps, and one that fails in its own way, beside one that answers."""
    (accel.here / "odd.py").write_text(
        "import dataclasses, time\n"
        "@dataclasses.dataclass\nclass Options: pass\n"
        "class Slow:\n    Options = Options\n    def __init__(self, context): self.name = context.name\n"
        "    def poll(self, ids): time.sleep(600)\n"
        "class Odd(Slow):\n    def poll(self, ids): raise KeyError('http://me:hush@host')\n"
    )
    info = accel.here / "odd-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: odd\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[accel.targets]\nslow = odd:Slow\nodd = odd:Odd\n")
    (accel.here / "accel.yaml").write_text("targets:\n  s: {kind: slow}\n  o: {kind: odd}\n")
    env = {"PYTHONPATH": f"{accel.here}:{no_torch}"}
    told = {target["name"]: target for target in found(accel, "--timeout", "20s", **env)["targets"]}
    assert (told["s"]["answers"], told["s"]["message"]) == (False, "no answer in 20 s")
    assert (told["o"]["answers"], told["o"]["message"]) == (False, "KeyError: 'http://…@host'")
    assert told["odd"]["answers"] is None
    assert told["local"]["answers"] is True


def test_no_targets_no_answers() -> None:
    assert env.ping_targets([], 1.0) == []


@pytest.mark.parametrize(
    "value",
    [
        {"HF_TOKEN": "hush"},
        {"wandb_api_key": "hush"},
        {"env": {"DB_PASSWORD": "hush"}},
        {"secrets": ["hush", "hush"]},
        {"commands": ["export HF_TOKEN=hush; python a.py"]},
        {"commands": ["login --token hush && train"]},
        {"commands": ["login --password='hush hush'"]},
        {"url": "https://me:hush@host/path"},
        {"url": "http://me:12/hush@host"},
        {"url": "http://first.last:12/hush@host"},
        {"url": "http://me:p@hush@host"},
        {"url": "http://me:p/p@hush@host"},
        {"header": "Authorization: Bearer hushhushhush"},
        {"note": "hf_hushhushhushhushhush"},
        {"note": "AKIAHUSHHUSHHUSHHUSH"},
        {"AWS_SESSION_TOKEN": 12345678},
        {"message": "login: 'me:hush@node1' does not answer"},
        {"message": "login: 'me:hush@node1': 'me:hush' is no name of a user"},
        {"message": "GET https://host/api?access_token=hush&x=1 failed"},
        {"header": "authorization: Bearer hush-hush-hush"},
        {"ACCEL_FOO_PWD": "hush"},
        {"PASS": "hush"},
        {"MYSQL_PASS": "hush"},
        {"HF_ENDPOINT": "https://host/x?sv=1&sig=hush&se=2"},
        {"additional_args": {"environment": {"DB_PASS": "hush"}}},
        {"commands": ["curl -u me:hush https://host", "curl -ume:hush x", "curl --user 'me:hush hush' x"]},
        {"commands": ["docker login -u me -p hush registry", "docker login -phush", "sshpass -p hush ssh host"]},
    ],
)
def test_no_secret_is_shown(value: dict[str, Any]) -> None:
    shown = json.dumps(without_secrets(value), ensure_ascii=False).lower()
    assert "hush" not in shown
    assert "12345678" not in shown
    assert next(iter(value)).lower() in shown


@pytest.mark.parametrize(
    "value",
    [
        {"num_processes": 8, "debug": False, "gpu_ids": None},
        {"commands": ["pip install -U torch", "python train.py --max_tokens 512"]},
        {"megatron_lm_calculate_per_token_loss": "false", "tokenizer": "gpt2"},
        {"HF_HOME": "/data/hf", "NCCL_DEBUG": "INFO", "url": "https://[::1]:80/a@b"},
        {"message": "target ssh: no hosts; the token of a job is its id"},
        {"PWD": "/data", "OLDPWD": "/", "bypass": 1, "num_passes": 2},
        {"commands": ["docker run -u 1000:1000 -p 80:80 x", "pip install -U git+https://host/a", "ssh -p 22 host"]},
    ],
)
def test_what_is_no_secret_stays(value: dict[str, Any]) -> None:
    assert without_secrets(value) == value


def test_what_is_a_secret_here_is_hidden_everywhere() -> None:
    known = secrets_of({"HF_TOKEN": "hush1234", "env": [{"password": "hush5678"}], "TOKEN": "1", "HOME": "/root"})
    told = without_secrets({"message": "refused hush1234; 'hush5678' too; 1 of 2; /root"}, known=known)
    assert told == {"message": "refused …; '…' too; 1 of 2; /root"}


def test_secrets_of_targets_and_of_the_environment_are_not_shown(accel: Accel, no_torch: str) -> None:
    """In options, in errors that repeat them, in the path of a file, and under a name that says nothing."""
    (accel.here / "accel.yaml").write_text(
        "targets:\n"
        "  a: {kind: ssh, hosts: 'me:hush1234@node1:99999'}\n"
        "  b: {kind: slurm, login: 'me:hush1234@nowhere.invalid'}\n"
        "  c: {kind: local, password: hush1234, env: {WANDB_API_KEY: hush1234}}\n"
        "  d: {kind: ssh, hosts: 127.0.0.1:1, ssh_config: /nowhere/hush5678/config}\n"
    )
    env = {"KUBECONFIG": "/nowhere/hush5678/kubeconfig", "MY_TOKEN": "hush5678", "HF_ENDPOINT": "https://u:hush1234@h"}
    for argv in (["env"], ["env", "--json"], ["targets"], ["targets", "--json"]):
        done = accel.finish(*argv, **env, PYTHONPATH=no_torch)
        shown = (done.stdout + done.stderr).decode()
        assert done.returncode == 0, shown
        assert "hush" not in shown
        assert "ssh_config" in shown or argv[0] == "env"


def test_a_secret_says_that_it_is_set() -> None:
    assert without_secrets({"TOKEN": "x", "PASSWORD": ""}) == {"TOKEN": HIDDEN, "PASSWORD": ""}
