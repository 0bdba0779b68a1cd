"""What other launchers are given, where they are installed: stand-ins write down the words and variables they get."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from accel.launch import external

ROOT = Path(__file__).parents[2]
# A command that writes what it was given, and for DeepSpeed what stands in the file of variables.
RECORDER = f"""#!{sys.executable}
import json, os, sys
if "--version" in sys.argv:
    print("mpirun (Open MPI) 5.0.3")
    sys.exit()
file = os.environ.get("DS_ENV_FILE")
held = dict(line.rstrip().split("=", 1) for line in open(file)) if file else {{}}
print(json.dumps({{"argv": sys.argv[1:], "env": dict(os.environ), "file": held}}))
sys.exit(7)
"""


class Machine:
    """A machine with the script, commands and packages that a test puts there."""

    def __init__(self, here: Path) -> None:
        self.here = here
        (here / "bin").mkdir()
        (here / "train.py").write_text("print('trained')\n")

    def command(self, name: str) -> None:
        path = self.here / "bin" / name
        path.write_text(RECORDER)
        path.chmod(0o755)

    def package(self, name: str, text: str = "") -> None:
        path = self.here.joinpath("packages", *name.split("."))
        path.mkdir(parents=True, exist_ok=True)
        for folder in [path, *path.parents]:
            if folder == self.here / "packages":
                break
            (folder / "__init__.py").touch()
        (path / "__init__.py").write_text(text)

    def launch(self, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        paths = [str(self.here / "packages"), str(ROOT)]
        return subprocess.run(
            [sys.executable, "-m", "accel", "launch", *words],
            cwd=self.here,
            env={
                "PATH": f"{self.here / 'bin'}:{os.environ['PATH']}",
                "PYTHONPATH": os.pathsep.join(paths),
                "HF_HOME": str(self.here / "hf"),
                **env,
            },
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_deepspeed_on_several_machines(machine: Machine) -> None:
    machine.package("deepspeed")
    machine.command("deepspeed")
    (machine.here / "c.yaml").write_text(
        "distributed_type: DEEPSPEED\nmixed_precision: bf16\nnum_machines: 2\nnum_processes: 4\nmachine_rank: 0\n"
        "main_process_ip: head\nmain_process_port: 2222\n"
        "deepspeed_config: {deepspeed_hostfile: hosts, zero_stage: 3, deepspeed_multinode_launcher: pdsh}\n"
    )
    done = machine.launch("--config_file", "c.yaml", "train.py", "--lr", "1", SECRET="s")
    assert done.returncode == 7, done.stderr
    told = json.loads(done.stdout)
    assert (
        told["argv"]
        == (
            "--hostfile hosts --no_local_rank --launcher pdsh --num_gpus 2 --master_addr head --master_port 2222 "
            "train.py --lr 1"
        ).split()
    )
    wanted = {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
        "ACCELERATE_MIXED_PRECISION": "bf16",
    }
    assert wanted.items() <= told["env"].items()
    assert wanted.items() <= told["file"].items()
    assert "SECRET" not in told["file"]
    fields = told["env"]["ACCELERATE_CONFIG_DS_FIELDS"].split(",")
    assert set(fields) == {"mixed_precision", "zero_stage", "deepspeed_hostfile", "deepspeed_multinode_launcher"}
    assert str(machine.here) in told["env"]["PYTHONPATH"].split(os.pathsep)


def test_deepspeed_on_one_machine_is_our_gang_with_its_variables(machine: Machine) -> None:
    machine.package("deepspeed")
    (machine.here / "train.py").write_text(
        "import os\nprint(os.environ['ACCELERATE_USE_DEEPSPEED'], os.environ['ACCELERATE_DEEPSPEED_ZERO_STAGE'])\n"
    )
    done = machine.launch("--use_deepspeed", "--zero_stage", "1", "--num_processes", "1", "train.py")
    assert (done.returncode, done.stdout) == (0, "true 1\n"), done.stderr


@pytest.mark.parametrize(
    ("env", "starter"),
    [({}, "pdsh"), ({"SLURM_JOB_ID": "1"}, "standard"), ({"ACCEL_JOB_ID": "j"}, "standard")],
)
def test_deepspeed_is_started_on_each_machine_by_who_has_placed_it(env: dict[str, str], starter: str) -> None:
    assert external._deepspeed_launcher({"deepspeed_multinode_launcher": None}, env) == starter
    assert external._deepspeed_launcher({"deepspeed_multinode_launcher": "mpich"}, env) == "mpich"


def test_several_machines_need_a_hostfile(machine: Machine) -> None:
    machine.package("deepspeed")
    words = "--num_machines 2 --machine_rank 0 --main_process_ip h --num_processes 2".split()
    done = machine.launch("--use_deepspeed", *words, "train.py")
    assert done.returncode == 2
    assert done.stderr == "accel launch: --use_deepspeed on 2 machines needs --deepspeed_hostfile\n"


def test_mpirun(machine: Machine) -> None:
    machine.command("mpirun")
    done = machine.launch("--cpu", "--mpirun_hostfile", "hosts", "--num_processes", "4", "train.py", "--lr", "1")
    assert done.returncode == 7, done.stderr
    told = json.loads(done.stdout)
    wanted = "--hostfile hosts --npernode 4 -n 4 --bind-to socket"
    assert told["argv"] == [*wanted.split(), sys.executable, "train.py", "--lr", "1"]
    assert told["env"]["ACCELERATE_USE_CPU"] == "true"
    assert (told["env"]["MASTER_ADDR"], told["env"]["MASTER_PORT"]) == ("127.0.0.1", "29500")


def test_a_host_of_a_pod_does_not_start_the_pod_again(machine: Machine) -> None:
    machine.package("torch_tpu")
    (machine.here / "c.yaml").write_text("distributed_type: XLA\ntpu_use_cluster: true\ntpu_name: pod\n")
    told = {"TORCH_TPU_DEVICES_PER_HOST": "1", "TPU_TOPOLOGY": "1x1", "TPU_SKIP_MDS_QUERY": "1"}
    done = machine.launch("--config_file", "c.yaml", "--tpu", "--no_tpu_cluster", "train.py", **told)
    assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr


def test_a_file_that_asks_for_what_is_not_here_is_named(machine: Machine) -> None:
    (machine.here / "c.yaml").write_text("num_processes: 2\ndistributed_type: MULTI_GPU\n")
    done = machine.launch("--config_file", "c.yaml", "train.py", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2
    assert done.stderr.startswith("accel launch: --multi_gpu (c.yaml:2): this machine shows no GPU")


# `describe` prints the node, `ssh` runs the command in the worker's shell.
GCLOUD = """#!/bin/bash
if [ "$4" = describe ]; then echo '{"state": "READY", "networkEndpoints": [{}, {}]}'; exit; fi
while [ "$1" != --worker ]; do shift; done
WORKER=$2 bash -c "$4"
"""
HOST = '#!/bin/bash\nprintf \'<%s> \' "$A" "$ACCELERATE_IN_TPU_POD" "$@"; echo; exit $((WORKER * CODE))\n'


@pytest.mark.parametrize("code", [0, 3])
def test_a_tpu_pod_by_gcloud(machine: Machine, code: int) -> None:
    """This machine need not have a TPU's runtime."""
    for name, text in (("gcloud", GCLOUD), ("accel-launch", HOST)):
        (machine.here / "bin" / name).write_text(text)
        (machine.here / "bin" / name).chmod(0o755)
    (machine.here / "c.yaml").write_text(
        "distributed_type: XLA\ntpu_use_cluster: true\ntpu_name: pod\ntpu_zone: z\nnum_processes: 8\n"
        'tpu_env: ["A=it\'s 1"]\nmixed_precision: bf16\n'
    )
    words = ["--config_file", "c.yaml", "--tpu_runtime", "torch_xla", "train.py", "--name", "a b"]
    done = machine.launch(*words, CODE=str(code))
    assert done.returncode == code, done.stderr
    words = "--tpu --no_tpu_cluster --num_processes 8 --mixed_precision bf16 --tpu_runtime torch_xla".split()
    words += "--main_training_function main".split()
    told = "".join(f"<{word}> " for word in ["it's 1", "1", *words, "train.py", "--name", "a b"])
    assert code or sorted(done.stdout.splitlines()) == [f"[worker {n}] {told}" for n in range(2)]


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("tpu_name: pod", 2, "--tpu_cluster: tpu_name pod is not a tpu target in accel.yaml: to use gcloud,"),
        ("tpu_zone: z", 2, "--tpu_cluster needs the pod's name: set tpu_name in the configuration file"),
        ("{tpu_vm: [h], tpu_zone: z}", 2, "--vm (c.yaml:1): the hosts come from tpu_name in the configuration file"),
        ("{tpu_name: pod, tpu_zone: z}", 1, "gcloud not found on PATH: install the Google Cloud CLI"),
    ],
)
def test_a_pod_that_cannot_be_reached(machine: Machine, text: str, code: int, said: str) -> None:
    (machine.here / "c.yaml").write_text(text)
    done = machine.launch(
        "--tpu", "--tpu_cluster", "--config_file", "c.yaml", "train.py", PATH=str(machine.here / "bin")
    )
    assert (done.returncode, done.stderr.count("\n")) == (code, 1), done.stderr
    assert f"accel launch: {said}" in done.stderr


def test_a_package_that_is_missing(machine: Machine) -> None:
    done = machine.launch("--tpu", "--tpu_runtime", "torch_xla", "train.py")
    assert done.returncode == 1
    assert "pip install 'accel-launch[torch-xla]'" in done.stderr
