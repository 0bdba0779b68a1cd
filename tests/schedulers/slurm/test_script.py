"""The batch script: held by golden files, and refused before sbatch is called."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from schedulers import JobSpec, Resources, Retry, SpecError
from schedulers.clean_env import for_sbatch
from schedulers.config.schema import make_options
from schedulers.slurm import sbatch_options, script
from schedulers.slurm.options import SlurmOptions, check
from tests.golden import assert_golden

_D = "/shared/me/accel/jobs/2mxaaaaaaaa"


def options(**given: Any) -> SlurmOptions:
    found: SlurmOptions = make_options(SlurmOptions, given, {}, lambda path, of_key: "target big")[0]
    check(found, "big")
    return found


def everything() -> JobSpec:
    return JobSpec(
        argv=("train.py", "--name", 'it\'s a "job"', "", "a\nb", "ü"),
        name='everything, at #once: it\'s 100 % "quoted"',
        nodes=4,
        procs_per_node=8,
        resources=Resources(gpus=8, cpus=64, memory_gb=480, accelerator="a100"),
        env={"A": "1 2"},
        secrets={"HF_TOKEN": "env:HF_TOKEN"},
        code="/home/me/project",
        workdir="examples",
        setup=(("pip", "install", "-e", "."),),
        time_limit_s=90 * 60,
        grace_s=120.5,
        retry=Retry(max_restarts=3),
    )


def full_options(**given: Any) -> SlurmOptions:
    return options(
        partition=["gpu", "gpu-long"], account="lab", qos="high", constraint="ib&nvme", exclusive=True,
        reservation="workshop", mail_type=["END", "FAIL"], mail_user="me@example.org", exclude="gpu[07,11]",
        modules=["cuda/12.4"], prologue=["ulimit -l unlimited", "export NCCL_DEBUG=WARN"], setup=[["nvidia-smi"]],
        interface="ib0", array_throttle=5, sbatch={"hint": "nomultithread", "wckey": "paper", "reboot": False},
        srun=["--mpi=none"], **given,
    )  # fmt: skip


def job_script(
    spec: JobSpec, given: SlurmOptions, job_id: str = "x", directory: str = _D, **more: Any
) -> script.JobScript:
    return script.JobScript(spec, given, job_id, directory, **{"python": "p", **more})


def text_of(spec: JobSpec, given: SlurmOptions, **more: Any) -> str:
    job = job_script(spec, given, "2mxaaaaaaaa", python="/opt/accel/bin/python", code="/home/me/project")
    return f"{job.render(**more)}\n# settings.json\n{json.dumps(job.settings(), indent=2)}\n"


def test_everything() -> None:
    assert_golden("slurm_everything.txt", text_of(everything(), full_options(), after=("41", "42")))


def test_the_least() -> None:
    assert_golden("slurm_least.txt", text_of(JobSpec(argv=("train.py",)), options()))


@pytest.mark.parametrize("container", ["pyxis", "apptainer"])
def test_a_container(container: str) -> None:
    spec = dataclasses.replace(everything(), image="docker://example.org/team/train:2")
    given = options(container=container, container_mounts=["/data:/data"])
    assert_golden(f"slurm_{container}.txt", text_of(spec, given))


def test_an_array_is_one_script() -> None:
    text = job_script(everything(), full_options(), python="python3").render(tasks=20)
    assert "#SBATCH --array=0-19%5\n" in text
    assert text.endswith(f"exec python3 -I {_D}/slurm/batch.py --array {_D}\n")


def test_what_accel_says_to_sbatch_is_known_to_every_slurm_since_20_11() -> None:
    lines = text_of(everything(), full_options()).split("\n")
    said = [line[len("#SBATCH --") :].partition("=")[0] for line in lines if line.startswith("#SBATCH")]
    assert {"nodes", "comment", "signal", "requeue"} <= set(said)
    assert {sbatch_options.introduced_in(name) for name in said} == {"20.11"}


def test_a_directory_with_a_percent_sign_is_no_pattern() -> None:
    text = job_script(JobSpec(argv=("a.py",)), options(), directory="/data/50%d of it").render()
    assert "#SBATCH --output='/data/50%%d of it/logs/slurm.log'\n" in text
    assert "#SBATCH --chdir='/data/50%d of it'\n" in text
    with pytest.raises(SpecError, match="backslash"):
        job_script(JobSpec(argv=("a.py",)), options(), directory="/data/a\\b").render()
    with pytest.raises(SpecError, match="submitit replaces %j"):
        job_script(JobSpec(argv=("a.py",)), options(), directory="/data/%j").render()


def test_gpus_are_asked_for_once() -> None:
    spec = JobSpec(argv=("a.py",), resources=Resources(gpus=4))
    assert "#SBATCH --gres=gpu:4\n" in job_script(spec, options()).render()
    assert "#SBATCH --gres=gpu:h100:4\n" in job_script(spec, options(gpu_type="h100")).render()
    given = options(gres="gpu:h100:4,nvme:1")
    script.check(spec, given, "big")
    assert "#SBATCH --gres=gpu:h100:4,nvme:1\n" in job_script(spec, given).render()
    with pytest.raises(SpecError, match=r"gres requests 2 GPUs per node, and --gpus 4: keep one"):
        script.check(spec, options(gres="gpu:2"), "big")


@pytest.mark.parametrize(
    ("wanted", "given", "message"),
    [
        ({"accelerator": "a100"}, {"gres": "gpu:4"}, "--accelerator a100, and gres: gpu:4 requests the GPUs"),
        ({"accelerator": "a100"}, {"gres": "nvme:1,gpu:h100:4"}, "write gres: gpu:a100:4"),
        ({}, {"gres": "gpu:4", "gpu_type": "a100"}, "gpu_type: a100, and gres: gpu:4"),
        ({"gpus": 4}, {"sbatch": {"gpus_per_node": 4}}, "sbatch: gpus_per_node and --gpus both request GPUs"),
        ({}, {"sbatch": {"gpus": 4}, "gres": "gpu:4"}, "sbatch: gpus and gres both request GPUs"),
        ({"accelerator": "a100"}, {"gres": "gpu:a100:4,nvme:1"}, ""),
        ({"accelerator": "a100"}, {"gres": "nvme:1"}, ""),
    ],
)
def test_gpus_are_said_in_one_place(wanted: dict[str, Any], given: dict[str, Any], message: str) -> None:
    spec = JobSpec(argv=("a.py",), resources=Resources(**wanted))
    if not message:
        script.check(spec, options(**given), "big")
        return
    with pytest.raises(SpecError) as caught:
        script.check(spec, options(**given), "big")
    assert message in str(caught.value)


@pytest.mark.parametrize("given", [{"sbatch": {"gpus-per-node": 4}}, {"gres": "gpu:1"}, {"sbatch": {"gpus": "a100:1"}}])
def test_a_container_sees_the_gpus_however_they_were_asked_for(given: dict[str, Any]) -> None:
    spec = JobSpec(argv=("a.py",), image="train.sif")
    words = job_script(spec, options(container="apptainer", **given)).settings()["submitit"]
    assert words[:3] == ["apptainer", "exec", "--nv"]


@pytest.mark.parametrize(
    ("image", "pyxis"),
    [
        ("example.org/team/train:2", "example.org#team/train:2"),
        ("docker://example.org/team/train:2", "docker://example.org#team/train:2"),
        ("localhost:5000/train@sha256:0c6e", "localhost:5000#train@sha256:0c6e"),
        ("me@example.org/team/train", "me@example.org#team/train"),
        ("example.org#team/train", "example.org#team/train"),
        ("team/train:2", "team/train:2"),
        ("ubuntu:24.04", "ubuntu:24.04"),
        ("/images/train.sqsh", "/images/train.sqsh"),
        ("./images/train.sqsh", "./images/train.sqsh"),
        ("../train.sqsh", "../train.sqsh"),
        ("dockerd://example.org/team/train", "dockerd://example.org/team/train"),
    ],
)
def test_an_image_as_pyxis_has_it(image: str, pyxis: str) -> None:
    assert script.pyxis_image(image) == pyxis


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"sbatch": {"partion": "gpu"}}, "sbatch has no option 'partion'; did you mean 'partition'"),
        ({"sbatch": {"output": "x"}}, "accel sets 'output' itself; use instead: accel logs"),
        ({"sbatch": {"hint": True}}, "hint needs a value"),
        ({"sbatch": {"hold": "yes"}}, "hold is true or false, not 'yes'"),
        ({"sbatch": {"partition": "a"}, "partition": "b"}, "partition and sbatch: partition set the same option"),
        ({"partition": ["a", ""]}, "partition must not be empty"),
        ({"sbatch": {"mem": 0, "mem_per_gpu": "8G"}}, "sbatch: mem and mem_per_gpu both request memory: keep one"),
        ({"sbatch": {"cpus-per-gpu": 2, "cpus-per-task": 8}}, "cpus-per-gpu and cpus-per-task both request processors"),
        ({"gres": "gpu 4"}, "gres must be like gpu:a100:4"),
        ({"start_timeout_s": 0.0}, "start_timeout_s must be more than 0"),
        ({"array_throttle": 0}, "array_throttle must be 1 or more"),
        ({"slurm_version": "latest"}, "slurm_version must be like '23.11'"),
        ({"prologue": ["a\nb"]}, "has a line break"),
        ({"setup": [[]]}, "a command has no program"),
        ({"user": "me"}, "user requires `login`"),
        ({"root": "accel"}, "root must begin with / or ~/"),
        ({"login": "head", "port": 70000}, "port must be 1 to 65535"),
    ],
)
def test_refused_in_one_line(given: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as caught:
        options(**given)
    assert message in str(caught.value)
    assert str(caught.value).startswith("target big: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image": "train:2"}, "--image needs container"),
        ({"grace_s": 100_000.0}, "Slurm sends the warning at most 65535 s before the end"),
        ({"secrets": {"T": "vault:x"}}, "reads env:NAME and file:PATH only"),
    ],
)
def test_a_job_that_cannot_be_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as caught:
        script.check(dataclasses.replace(everything(), **change), options(), "big")
    assert message in str(caught.value)


@pytest.mark.parametrize("value", ["a\n#SBATCH --wrap=x", "a\0b"])
@pytest.mark.parametrize("key", ["partition", "gpu_type", "wckey"])
def test_a_line_break_in_a_directive_is_refused(key: str, value: str) -> None:
    invalid = options(sbatch={key: value}) if key == "wckey" else options(**{key: value})
    spec = JobSpec(argv=("a.py",), resources=Resources(gpus=1))
    with pytest.raises(SpecError, match=r"^sbatch --(partition|gres|wckey) must be one line, not '") as caught:
        job_script(spec, invalid).render()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("key", ["cpus-per-task", "cpus_per_task"])
def test_memory_and_processors_in_sbatchs_own_words(key: str) -> None:
    job = job_script(JobSpec(argv=("a.py",)), options(sbatch={"mem": 0, key: 8}))
    assert {"#SBATCH --mem=0", "#SBATCH --cpus-per-task=8"} <= set(job.render().split("\n"))
    assert "--cpus-per-task=8" in job.settings()["srun"]  # srun does not inherit it
    assert script.warnings(job.spec, job.options) == ()


@pytest.mark.parametrize(
    ("amount", "given", "message"),
    [
        ({"memory_gb": 8}, {"mem": 0}, "sbatch: mem and --memory request the same: keep one"),
        ({"memory_gb": 8}, {"mem_per_gpu": "8G"}, "sbatch: mem_per_gpu and --memory"),
        ({"cpus": 8}, {"cpus-per-gpu": 2}, "sbatch: cpus-per-gpu and --cpus request the same: keep one"),
    ],
)
def test_memory_and_processors_are_said_once(amount: dict[str, Any], given: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as caught:
        script.check(JobSpec(argv=("a.py",), resources=Resources(**amount)), options(sbatch=given), "big")
    assert message in str(caught.value)


@pytest.mark.parametrize("given", [{"cpus-per-gpu": 4}, {"cpus_per_gpu": 4}, {"exclusive": True}])
def test_cores_are_asked_for_in_another_way(given: dict[str, Any]) -> None:
    assert script.warnings(JobSpec(argv=("a.py",)), options(sbatch=given)) == ()


def test_the_account_that_people_have_in_their_profile() -> None:
    env = {"SBATCH_ACCOUNT": "lab", "SBATCH_QOS": "low", "SBATCH_OUTPUT": "x", "SLURM_CONF": "c", "SLURM_NTASKS": "3"}
    text = job_script(JobSpec(argv=("a.py",)), options(qos="high")).render()
    assert for_sbatch(env, text) == {"SBATCH_ACCOUNT": "lab", "SLURM_CONF": "c"}  # the target says the QOS
    assert for_sbatch({**env, "SLURM_JOB_ID": "7"}, text) == {"SLURM_CONF": "c"}


def test_what_a_job_does_not_get_is_said() -> None:
    spec = JobSpec(argv=("a.py",), time_limit_s=90, resources=Resources(shm_gb=1))
    said = script.warnings(spec, options(slurm_version="22.05", sbatch={"segment": 4}))
    assert [line.split(":")[0] for line in said] == [
        "--cpus is not set",
        "Slurm counts time limits in minutes",
        "shm_gb is not enforced on a slurm target",
        "sbatch --segment needs Slurm 24.05 or later, and slurm_version is 22.05",
    ]
