"""`accel tpu-config`, with a `gcloud` that notes what it is given and runs a worker's commands in a shell here."""

from __future__ import annotations

import json
import os
import shlex
import signal
from pathlib import Path

import pytest

from accel.cli import exit_status
from schedulers.processes import Identity
from tests.waiting import until

from .conftest import Accel

# What the real one does of it: `describe` prints the node, `ssh` runs the command in the worker's shell and exits with
# its code (255 where ssh itself fails).
GCLOUD = """#!/usr/bin/env python3
import json, os, subprocess, sys
argv = sys.argv[1:]
home = os.path.dirname(os.path.abspath(__file__))
with open(f"{home}/calls", "a") as file:
    file.write(json.dumps(argv) + "\\n")
if "describe" in argv:
    if "gone" in argv:
        print("more words", file=sys.stderr)
        sys.exit("ERROR: (gcloud.compute.tpus.tpu-vm.describe) NOT_FOUND:\\n  no such node\\n\\n- set `core/project`")
    if "slow" in argv:
        sys.exit(subprocess.run(["bash", "-c", f"echo $$ > {home}/pid.9; exec sleep 300"]).returncode)
    state = "CREATING" if "young" in argv else "READY"
    print(json.dumps({"state": state, "networkEndpoints": [{"ipAddress": f"10.0.0.{n}"} for n in range(3)]}))
    sys.exit()
worker = argv[argv.index("--worker") + 1]
script = argv[argv.index("--command") + 1]
sys.exit(subprocess.run(["bash", "-c", script], env={**os.environ, "WORKER": worker}).returncode)
"""


class Pod:
    def __init__(self, accel: Accel, folder: Path) -> None:
        self.accel = accel
        self.folder = folder
        folder.mkdir()
        (folder / "gcloud").write_text(GCLOUD)
        (folder / "gcloud").chmod(0o755)
        (folder / ".ssh").mkdir()
        self.key = folder / ".ssh/google_compute_engine"
        self.key.touch()  # gcloud has signed in from here before

    def __call__(self, *argv: str, code: int = 0) -> tuple[list[str], list[str]]:
        done = self.accel.finish("tpu-config", *argv, **self.env())
        assert done.returncode == code, done.stderr.decode()
        assert b"Traceback" not in done.stderr
        return done.stdout.decode().splitlines(), done.stderr.decode().splitlines()

    def env(self) -> dict[str, str]:
        path = f"{self.folder}{os.pathsep}{os.environ['PATH']}"
        return {"PATH": path, "HF_HOME": str(self.folder / "hf"), "HOME": str(self.folder)}

    def calls(self) -> list[list[str]]:
        path = self.folder / "calls"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def pod(accel: Accel, tmp_path: Path) -> Pod:
    return Pod(accel, tmp_path / "cloud")


WHERE = ("--tpu_name", "pod1", "--tpu_zone", "us-central2-b")


def test_every_worker_runs_it(pod: Pod) -> None:
    out, err = pod(*WHERE, "--command", "echo $WORKER in $PWD", "echo said >&2")
    assert sorted(out) == [f"[worker {n}] {n} in /usr/share" for n in range(3)]
    assert sorted(err) == [f"[worker {n}] said" for n in range(3)]
    describe, *each = pod.calls()
    assert describe == "compute tpus tpu-vm describe pod1 --zone us-central2-b --format json".split()
    script = "set -e\ncd /usr/share\necho $WORKER in $PWD\necho said >&2"
    assert sorted(each) == [
        [*f"compute tpus tpu-vm ssh pod1 --zone us-central2-b --worker {n} --command".split(), script] for n in range(3)
    ]


def test_the_key_to_sign_in_with_is_made_by_one_call(pod: Pod) -> None:
    pod.key.unlink()
    pod(*WHERE, "--command", "true")
    _, first, *each = pod.calls()
    assert first[first.index("--worker") + 1 :] == ["0", "--command", "set -e\ntrue"]
    assert len(each) == 3


def test_they_run_at_the_same_time(pod: Pod) -> None:
    """Each waits for all: one after the other they would never end."""
    meet = pod.folder / "meet"
    meet.mkdir()
    wait = f"touch {meet}/$WORKER; until [ $(ls {meet} | wc -l) = 3 ]; do sleep 0.05; done; echo met"
    out, _ = pod(*WHERE, "--command", wait)
    assert sorted(out) == [f"[worker {n}] met" for n in range(3)]


def test_it_stops_at_the_first_command_that_fails(pod: Pod) -> None:
    out, err = pod(
        *WHERE, "--command", "cd /tmp", "--command", "[ $WORKER != 1 ] || exit 7 # why", "sleep 300; echo on", code=7
    )
    assert out == []
    assert err == ["accel: worker 1 ended with code 7; ending the other 2"]


def test_a_command_that_fails_is_not_followed(pod: Pod) -> None:
    out, _ = pod(*WHERE, "--command", "echo a", "(exit 3)", "echo b", code=3)
    assert {line.split("] ")[1] for line in out} <= {"a"}


def test_words_of_a_shell_reach_it(pod: Pod) -> None:
    hostile = """echo 'a "b" $c `d` \\ é' "$(echo x)" ; echo 'end'"""
    out, _ = pod(*WHERE, f"--command={hostile}")
    assert sorted(out)[:2] == ["""[worker 0] a "b" $c `d` \\ é x""", "[worker 0] end"]


def test_debug_shows_and_does_nothing(pod: Pod) -> None:
    out, _ = pod(*WHERE, "--use-alpha", "--install_accelerate", "--command", "echo 'a b'", "--debug")
    shown = shlex.split("\n".join(out))
    script = "set -e\ncd /usr/share\npip install accelerate -U\necho 'a b'"
    assert shown == [
        *"gcloud alpha compute tpus tpu-vm ssh pod1 --zone us-central2-b --worker all --command".split(),
        script,
    ]
    assert pod.calls() == []


def test_alpha(pod: Pod) -> None:
    pod(*WHERE, "--use_alpha", "--command", "true")
    assert {call[0] for call in pod.calls()} == {"alpha"}


@pytest.mark.parametrize(
    ("version", "installed"),
    [
        ("latest", "pip install accelerate -U"),
        ("dev", "pip install git+https://github.com/huggingface/accelerate.git"),
        ("1.15.0", "pip install accelerate==1.15.0"),
        ("1.16.0.dev0", "pip install accelerate==1.16.0.dev0"),
    ],
)
def test_versions(pod: Pod, version: str, installed: str) -> None:
    out, _ = pod(*WHERE, "--install_accelerate", "--accelerate_version", version, "--command", "true", "--debug")
    assert f"\n{installed}\n" in "\n".join(out)


def test_what_is_not_given_stands_in_the_file(pod: Pod) -> None:
    here = pod.accel.here
    file = here / "tpu.yaml"
    file.write_text("tpu_name: pod2\ntpu_zone: z\ncommands: [echo 1, echo 2]\n")
    script = ["set -e", "cd /usr/share"]
    assert shlex.split("\n".join(pod("--config_file", "tpu.yaml", "--debug")[0]))[5:] == [
        "pod2", "--zone", "z", "--worker", "all", "--command", "\n".join([*script, "echo 1", "echo 2"])
    ]  # fmt: skip
    (here / "setup").write_text("# what is needed\n\nexport A=1\necho $A\n")
    file.write_text("tpu_name: pod2\ntpu_zone: z\ncommand_file: setup\n")
    assert sorted(pod("--config_file", "tpu.yaml")[0]) == [f"[worker {n}] 1" for n in range(3)]
    default = pod.folder / "hf/accelerate"
    default.mkdir(parents=True)
    (default / "default_config.yaml").write_text("tpu_name: pod3\ntpu_zone: z\n")
    shown = pod("--command_file", "setup", "--tpu_zone", "y", "--debug")[0]
    assert shown[0].startswith("gcloud compute tpus tpu-vm ssh pod3 --zone y ")


@pytest.mark.parametrize(
    ("argv", "message", "code"),
    [
        ([], "no TPU given: give --tpu_name, or set tpu_name: in ", exit_status.USAGE),
        (["--tpu_name", "a"], "no TPU given: give --tpu_zone", exit_status.USAGE),
        ([*WHERE], "nothing to run: give --command or --command_file", exit_status.USAGE),
        ([*WHERE, "--command", "", "--command", " "], "nothing to run: --command holds no command", exit_status.USAGE),
        (
            [*WHERE, "--command", "a", "--command_file", "b"],
            "--command and --command_file contradict",
            exit_status.USAGE,
        ),
        ([*WHERE, "--command_file", "none"], "--command_file: cannot read none: No such file", exit_status.USAGE),
        ([*WHERE, "--command_file", "empty"], "--command_file: empty holds no command", exit_status.USAGE),
        (
            ["--tpu_name=--x", "--tpu_zone", "z", "--command", "a"],
            "--tpu_name '--x' is not a valid name",
            exit_status.USAGE,
        ),
        ([*WHERE, "--command", "a", "--install_accelerate", "--accelerate_version", "1; rm"], "'1; rm': latest", 2),
        (
            ["--config_file", "bad.yaml", "--tpu_name", "a", "--tpu_zone", "z"],
            "commands: expects a list of words, not 3",
            exit_status.USAGE,
        ),
        (["--config_file", "typo.yaml", "--command", "a"], "typo.yaml:2: unknown setting 'tpu_nmae'; did you m", 2),
        (["--config_file", "twice.yaml", "--command", "a"], "twice.yaml:2: key 'tpu_name' is already on line 1", 2),
        (["--config_file", "empty", "--command", "a"], "no TPU given: give --tpu_name, or set tpu_name: in empty", 2),
        (
            ["--tpu_name", "gone", "--tpu_zone", "z", "--command", "a"],
            "gone in z: ERROR: (gcloud.compute.tpus.tpu-vm.describe) NOT_FOUND: no such node\n",
            exit_status.ERROR,
        ),
        (["--tpu_name", "young", "--tpu_zone", "z", "--command", "a"], "is CREATING, not READY", exit_status.ERROR),
    ],
)
def test_what_cannot_be_done_is_one_line(pod: Pod, argv: list[str], message: str, code: int) -> None:
    (pod.accel.here / "empty").write_text("# nothing\n")
    (pod.accel.here / "bad.yaml").write_text("commands: 3\n")
    (pod.accel.here / "typo.yaml").write_text("tpu_zone: z\ntpu_nmae: a\n")
    (pod.accel.here / "twice.yaml").write_text("tpu_name: a\ntpu_name: c\n")
    out, (line,) = pod(*argv, code=code)
    assert message in f"{line}\n"
    assert out == []


@pytest.mark.parametrize(
    ("name", "begun", "signum"),
    [("pod1", ["pid.0", "pid.1", "pid.2"], signal.SIGTERM), ("slow", ["pid.9"], signal.SIGHUP)],
)
def test_told_to_end_it_leaves_nothing(pod: Pod, name: str, begun: list[str], signum: int) -> None:
    """Neither a worker's gcloud and what that has started, nor one that is asked what the TPU is."""
    words = ["--tpu_name", name, "--tpu_zone", "z", "--command", f"echo $$ > {pod.folder}/pid.$WORKER; sleep 300; :"]
    running = pod.accel.start("tpu-config", *words, **pod.env())
    files = [pod.folder / file for file in begun]
    until(lambda: all(file.exists() and file.read_text() for file in files), "what is to be ended")
    pids = [int(file.read_text()) for file in files]
    running.send_signal(signum)
    _, said = running.communicate(timeout=60)
    assert running.returncode == 128 + signum
    assert said.decode().splitlines() == [f"accel: received {signal.Signals(signum).name}; ending all workers"]
    until(lambda: not any(map(Identity.of, pids)), "its end")


def test_without_gcloud_it_says_so(pod: Pod) -> None:
    (pod.folder / "gcloud").unlink()
    done = pod.accel.finish("tpu-config", *WHERE, "--command", "true", PATH=str(pod.folder))
    assert done.returncode == exit_status.ERROR
    assert b"gcloud not found on PATH" in done.stderr
