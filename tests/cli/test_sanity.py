"""`accel test`: the checks, run for real; what it says of a failure; and the configuration files it reads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from accel.cli import exits, main
from accel.cli.launch_file import read_flags
from accel.cli.words import UsageError
from accel.sanity.__main__ import CHECKS

from .conftest import Accel


def checks(shown: str) -> list[tuple[str, str]]:
    return [(line[:8].strip(), line[8:24].strip()) for line in shown.splitlines()]


def test_every_check_runs_on_1_2_and_4_processes(accel: Accel) -> None:
    shown = accel("test", "--cpu")
    assert checks(shown) == [("ok", name) for name in CHECKS] * 3
    assert [line.split()[-2] for line in shown.splitlines()] == [count for count in "124" for _ in CHECKS]


def test_a_line_of_json_a_check(accel: Accel) -> None:
    lines = [json.loads(line) for line in accel("test", "--cpu", "--num-processes", "2", "--json").splitlines()]
    assert [line["check"] for line in lines] == list(CHECKS)
    assert all(line["ok"] and line["processes"] == 2 and line["seconds"] >= 0 for line in lines)


# Put before accel by PYTHONPATH: a machine on which gathering gives another result.
BROKEN = """
import accel.collectives as broken
real = broken.gather
broken.gather = lambda data: real(data) if not isinstance(data, dict) else {**real(data), "a": real(data["a"]) + 1}
"""


def test_the_failing_check_is_named(accel: Accel) -> None:
    (accel.here / "sitecustomize.py").write_text(
        "import sys\n"
        "if any('sanity' in word for word in sys.orig_argv):\n"
        + "".join(f"    {line}\n" for line in BROKEN.splitlines())
    )
    path = f"{accel.here}:{accel.env()['PYTHONPATH']}"
    done = accel.finish("test", "--cpu", "--num_processes", "1", PYTHONPATH=path)
    shown, said = done.stdout.decode(), done.stderr.decode()
    assert done.returncode == exits.ERROR, shown + said
    assert checks(shown)[-1] == ("FAILED", "collectives")
    assert said.splitlines()[-1] == (
        "accel: test: 'collectives' failed: process 0 of 1: SanityError: gather: expected [0.0], got [1.0]"
    )


def test_a_launch_that_fails_is_named(accel: Accel) -> None:
    (accel.here / "accelerate.yaml").write_text("mixed_precision: fp16\nnum_processes: 1\nuse_cpu: true\n")
    done = accel.finish("test", "--config_file", "accelerate.yaml")
    assert done.returncode == exits.ERROR
    assert b"fp16" in done.stderr
    assert done.stderr.decode().splitlines()[-1].endswith("ended with code 1 after 'the start'")


def test_the_settings_of_a_file_are_used(accel: Accel) -> None:
    (accel.here / "accelerate.yaml").write_text("mixed_precision: bf16\nnum_processes: 2\nuse_cpu: true\n")
    default = accel.here / "hf/accelerate/default_config.yaml"
    default.parent.mkdir(parents=True)
    default.write_text((accel.here / "accelerate.yaml").read_text())
    for argv, named in ((["--config_file", "accelerate.yaml"], "accelerate.yaml"), ([], default.name)):
        done = accel.finish("test", *argv, HF_HOME=str(accel.here / "hf"))
        shown, said = done.stdout.decode(), done.stderr.decode()
        assert checks(shown) == [("ok", name) for name in CHECKS], said
        assert "2 processes" in shown
        assert said.splitlines()[-1].startswith("accel: test: all went well with the settings of ")
        assert said.splitlines()[-1].endswith(f"{named}: training works here")


def test_it_runs_as_a_job_on_a_target(accel: Accel) -> None:
    done = accel.finish("test", "--target", "local", "--num_processes", "2", "--cpu")
    assert done.returncode == 0, done.stderr
    lines = [line.removeprefix("[rank 0] ") for line in done.stdout.decode().splitlines()]
    assert lines == [f"ok      {name}" for name in CHECKS]
    assert b"succeeded" in done.stderr
    assert done.stderr.endswith(b"accel: test: all went well: training works on local\n")


WHOLE = """
compute_environment: LOCAL_MACHINE
debug: true
distributed_type: MULTI_CPU
downcast_bf16: 'no'
dynamo_config:
  dynamo_backend: INDUCTOR
enable_cpu_affinity: false
fsdp_config: {}
gpu_ids: all
machine_rank: 0
main_process_ip: null
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 2
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
use_cpu: true
"""


def test_a_whole_file_as_flags(tmp_path: Path) -> None:
    path = tmp_path / "accelerate.yaml"
    path.write_text(WHOLE)
    assert read_flags("accel test", str(path)) == [
        "--cpu", "--mixed_precision=bf16", "--num_processes=2", "--num_machines=1", "--gpu_ids=all", "--same_network",
        "--machine_rank=0", "--rdzv_backend=static", "--debug", "--dynamo_backend=inductor",
        "--main_training_function=main",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("num_proceses: 2", "unknown setting 'num_proceses'; did you mean 'num_processes'?"),
        ("distributed_type: FSPD", "accelerate.yaml:1: distributed_type: 'FSPD' is not one of NO"),
        ("- a\n- b", "must hold settings, one `name: value` a line"),
        ("a: [", "accelerate.yaml:1: "),
        (None, "cannot read"),
    ],
)
def test_a_file_that_cannot_be_used(text: str | None, said: str, tmp_path: Path) -> None:
    path = tmp_path / "accelerate.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UsageError) as caught:
        read_flags("accel test", str(path))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--num_processes", "0"], "accel test: --num_processes 0: a whole number from 1 on"),
        (["--num_processes", "two"], "accel test: --num_processes: not a whole number: 'two'"),
        (["--target", "local", "--config_file", "x"], "accel test: --config_file is for this machine"),
    ],
)
def test_a_wrong_line(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["test", *argv]) == exits.USAGE
    assert capsys.readouterr().err.startswith(said)


@pytest.mark.parametrize("name", CHECKS)
def test_every_check_says_what_it_checks(name: str) -> None:
    check: Callable[..., None] = CHECKS[name]
    assert check.__doc__
    assert check.__doc__.count("\n") == 0
