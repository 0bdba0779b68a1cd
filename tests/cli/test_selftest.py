"""`accel test`: the checks, run for real; what it says of a failure; and the configuration files it reads."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from accel.cli import exit_status, main
from accel.cli.arguments import Parser
from accel.cli.launch import resolve_settings
from accel.cli.test import add_arguments, launches
from accel.selftest.__main__ import CHECKS, checks_for
from accel.world.available import is_torchao_available
from schedulers.processes import Identity
from tests.marks import long
from tests.needs import missing
from tests.settings.lines import given
from tests.waiting import until

from .conftest import Accel


def checks(shown: str) -> list[tuple[str, str]]:
    return [(line[:8].strip(), line[8:24].strip()) for line in shown.splitlines()]


WHOLE, SHARDED = checks_for(sharded=False), checks_for(sharded=True)


@pytest.mark.long
def test_every_check_runs_on_1_2_and_4_processes_and_those_of_sharding_on_4(accel: Accel) -> None:
    shown = accel("test", "--cpu")
    assert checks(shown) == [("ok", name) for name in [*WHOLE * 3, *SHARDED]]
    assert [line.split()[-2] for line in shown.splitlines()] == [
        *(n for n in "124" for _ in WHOLE),
        *("4" * len(SHARDED)),
    ]
    assert {*WHOLE, *SHARDED, "sequences", "8 bits"} == CHECKS.keys()


def test_the_settings_of_a_file_that_shards_are_used(accel: Accel) -> None:
    (accel.here / "fsdp.yaml").write_text(
        "distributed_type: FSDP\nnum_processes: 2\nmixed_precision: bf16\nuse_cpu: true\n"
        "fsdp_config: {fsdp_state_dict_type: FULL_STATE_DICT}\n"
        "parallelism_config: {parallelism_config_dp_replicate_size: 2}\n"
    )
    assert checks(accel("test", "--config_file", "fsdp.yaml")) == [("ok", name) for name in SHARDED]


def test_the_settings_of_a_file_that_splits_layers_are_used(accel: Accel) -> None:
    (accel.here / "tp.yaml").write_text(
        "distributed_type: FSDP\nuse_cpu: true\nfsdp_config: {fsdp_version: 2}\n"
        "parallelism_config: {parallelism_config_tp_size: 2}\n"
    )
    shown = accel("test", "--config_file", "tp.yaml")  # 2, and 2 × 2
    assert checks(shown) == [("ok", name) for name in SHARDED * 2]
    assert [line.split()[-2] for line in shown.splitlines()] == [n for n in "24" for _ in SHARDED]


@pytest.mark.parametrize("way", ["cp", *long("sp")])
def test_the_settings_of_a_file_that_splits_sequences_are_used(way: str, accel: Accel) -> None:
    (accel.here / "parts.yaml").write_text(
        f"use_cpu: true\nnum_processes: 2\nparallelism_config: {{parallelism_config_{way}_size: 2}}\n"
    )
    names = checks_for(sharded=False, split_sequences=True)
    assert checks(accel("test", "--config_file", "parts.yaml")) == [("ok", name) for name in names]


def test_a_file_with_fp8_checks_layers_in_8_bits_and_the_rest_in_bf16(accel: Accel) -> None:
    if not is_torchao_available():
        missing("torchao", "pip install -c constraints.txt --no-deps torchao")
    (accel.here / "fp8.yaml").write_text("mixed_precision: fp8\nnum_processes: 1\nuse_cpu: true\n")
    names = checks_for(sharded=False, fp8=True)
    assert checks(accel("test", "--config_file", "fp8.yaml")) == [("ok", name) for name in names]


# Put before accel by PYTHONPATH: a machine on which gathering gives another result.
BROKEN = """
import accel.collectives as broken
from tests.marks import long
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
    assert done.returncode == exit_status.ERROR, shown + said
    assert checks(shown)[-1] == ("FAILED", "collectives")
    assert said.splitlines()[-1] == (
        "accel: test: 'collectives' failed: process 0 of 1: SanityError: gather: expected [0.0], got [1.0]"
    )


def test_a_launch_that_fails_is_named(accel: Accel) -> None:
    (accel.here / "sitecustomize.py").write_text(
        "import os, sys\nif any('sanity' in word for word in sys.orig_argv):\n    os._exit(1)\n"
    )
    path = f"{accel.here}:{accel.env()['PYTHONPATH']}"
    done = accel.finish("test", "--cpu", "--num_processes", "1", PYTHONPATH=path)
    assert done.returncode == exit_status.ERROR
    assert done.stderr.decode().splitlines()[-1].endswith("ended with code 1 after 'the start'")


def test_the_settings_of_a_file_are_used_and_a_line_of_json_a_check(accel: Accel) -> None:
    (accel.here / "accelerate.yaml").write_text("mixed_precision: bf16\nnum_processes: 2\nuse_cpu: true\n")
    done = accel.finish("test", "--config_file", "accelerate.yaml", "--json")
    said = done.stderr.decode()
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["check"] for line in lines] == WHOLE, said
    assert all(line["ok"] and line["processes"] == 2 and line["seconds"] >= 0 for line in lines)
    assert said.splitlines()[-1] == (
        "accel: test: all checks passed with the settings of accelerate.yaml: training works on this machine"
    )


def test_the_default_file_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    default = tmp_path / "accelerate/default_config.yaml"
    default.parent.mkdir()
    default.write_text("num_processes: 1\nuse_cpu: true\n")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    launched: list[list[str]] = []

    def run_here(flags: list[str], *, as_json: bool) -> int:
        launched.append(flags)
        return exit_status.OK

    monkeypatch.setattr("accel.cli.test._run_here", run_here)
    assert main(["test"]) == exit_status.OK
    assert launched == [[f"--config_file={default}"]]
    said = capsys.readouterr().err
    assert said == f"accel: test: all checks passed with the settings of {default}: training works on this machine\n"


def test_it_runs_as_a_job_on_a_target(accel: Accel) -> None:
    done = accel.finish("test", "--target", "local", "--num_processes", "2", "--cpu")
    assert done.returncode == 0, done.stderr
    lines = [line.removeprefix("[rank 0] ") for line in done.stdout.decode().splitlines()]
    assert lines == [f"ok      {name}" for name in WHOLE]
    assert b"succeeded" in done.stderr
    assert done.stderr.endswith(b"accel: test: all checks passed: training works on local\n")


# The file that `accel launch` reads where none is named: nothing of it must count where another one is.
OTHER = "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2}\nenable_cpu_affinity: true\nnum_processes: 8\n"


@pytest.mark.parametrize(
    ("text", "words", "wanted", "launched"),
    [
        ("distributed_type: 'NO'\nnum_processes: 1", "", {"use_fsdp": False, "enable_cpu_affinity": False}, 1),
        ("distributed_type: FSDP\nfsdp_config: {fsdp_ignored_modules: a}", "", {"fsdp_ignored_modules": "a"}, 3),
        ("distributed_type: MULTI_GPU\nnum_processes: 2", "--cpu", {"cpu": True, "multi_gpu": False}, 1),
        ("distributed_type: MULTI_GPU", "--num_processes 2", {"cpu": False, "multi_gpu": True, "num_processes": 2}, 1),
        ("mixed_precision: bf16", "--num_processes 2", {"cpu": True, "mixed_precision": "bf16"}, 1),
        ("num_processes: -1", "--num_processes 1", {"num_processes": 1}, 1),
        ("parallelism_config: {parallelism_config_tp_size: 2}", "", {"num_processes": 2}, 1),
        ("parallelism_config: {parallelism_config_tp_size: 8}", "", {"num_processes": 8}, 1),
    ],
)
def test_a_launch_has_the_settings_of_the_file_that_is_named(
    text: str, words: str, wanted: dict[str, object], launched: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    (tmp_path / "accelerate").mkdir()
    (tmp_path / "accelerate/default_config.yaml").write_text(OTHER)
    path = tmp_path / "named.yaml"
    path.write_text(text)
    runs = launches(arguments("--config_file", str(path), *words.split()), str(path))
    assert len(runs) == launched
    for flags in runs:
        found = resolve_settings(given(*flags))
        assert {name: found[name].value for name in wanted} == wanted


def arguments(*words: str) -> argparse.Namespace:
    parser = Parser("test", "")
    add_arguments(parser)
    return parser.read(words)


def test_told_to_end_it_ends_its_launch_and_its_ranks(accel: Accel) -> None:
    """In a check that hangs."""
    (accel.here / "sitecustomize.py").write_text(
        "import os, sys, time\n"
        "def hang(data):\n"
        "    open(os.environ['RANK'], 'w').write(f'{os.getpid()} {os.getppid()}')\n"
        "    time.sleep(600)\n"
        "if any('sanity' in word for word in sys.orig_argv):\n"
        "    import accel.collectives as broken\n"
        "    broken.gather = hang\n"
    )
    path = f"{accel.here}:{accel.env()['PYTHONPATH']}"
    running = accel.start("test", "--cpu", "--num_processes", "2", PYTHONPATH=path)
    ranks = [accel.here / "0", accel.here / "1"]
    until(lambda: all(rank.exists() and rank.read_text() for rank in ranks), "a check that hangs")
    running.terminate()
    _, said = running.communicate(timeout=60)
    assert running.returncode == 143
    assert b"Traceback" not in said
    pids = [int(pid) for rank in ranks for pid in rank.read_text().split()]
    until(lambda: not any(map(Identity.of, pids)), "the end of ranks and fork server")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("num_proceses: 2", "accelerate.yaml:1: unknown setting 'num_proceses'; did you mean 'num_processes'?"),
        ("- a\n- b", "accelerate.yaml:1: must hold settings, one `name: value` per line"),
        ("use_cpu: true\ndistributed_type: MULTI_GPU", "--cpu (accelerate.yaml:1) and --multi_gpu (accelerate.yaml:2)"),
        ("num_processes: -1", "accelerate.yaml:1: num_processes: -1 needs --num_processes on the command line"),
        ("{compute_environment: AMAZON_SAGEMAKER, ec2_instance_type: t, iam_role_name: r}",
         "accelerate.yaml is for SageMaker: the checks run on this machine, or on a --target"),
        (None, "--config_file: cannot read accelerate.yaml: it does not exist"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_used(
    text: str | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    if text is not None:
        Path("accelerate.yaml").write_text(text)
    assert main(["test", "--config_file", "accelerate.yaml"]) == exit_status.USAGE
    shown = capsys.readouterr().err
    assert shown.startswith(f"accel test: {said}")
    assert shown.count("\n") == 1


def test_what_the_launch_refuses_is_its_one_line(accel: Accel) -> None:
    (accel.here / "c.yaml").write_text("distributed_type: MULTI_GPU\n")
    done = accel.finish("test", "--config_file", "c.yaml", "--num_processes", "2", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == exit_status.USAGE
    assert done.stderr.startswith(b"accel launch: --multi_gpu (c.yaml:1): this machine shows no GPU")
    assert done.stderr.count(b"\n") == 1


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--num_processes", "0"], "accel test: --num_processes 0: expects a whole number of 1 or more"),
        (["--num_processes", "two"], "accel test: --num_processes: expects a whole number of 0 or more, not 'two'"),
        (["--target", "local", "--config_file", "x"], "accel test: --config_file is for this machine"),
    ],
)
def test_a_wrong_line(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["test", *argv]) == exit_status.USAGE
    assert capsys.readouterr().err.startswith(said)


@pytest.mark.parametrize("name", CHECKS)
def test_every_check_says_what_it_checks(name: str) -> None:
    check: Callable[..., None] = CHECKS[name]
    assert check.__doc__
    assert check.__doc__.count("\n") == 0


def test_without_torch_it_is_one_line(accel: Accel) -> None:
    done = subprocess.run(
        [sys.executable, "-S", "-m", "accel", "test"], env=accel.env(), capture_output=True, text=True, check=False
    )
    said = "accel test: torch is not installed: pip install 'accel-launch[train]'\n"
    assert (done.returncode, done.stdout, done.stderr) == (exit_status.ERROR, "", said)
