"""`accel config` in a real pseudo-terminal: arrow keys, lines with a check, back and forward, Ctrl-C."""

from __future__ import annotations

import fcntl
import os
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from accel.cli import config_target
from accel.cli.config_prompts import OTHER_CHOICE, choices
from accel.settings.config_file import to_document
from accel.settings.prompts import Machine, Question, entry_of
from accel.settings.setting import typed
from accel.settings.wizard import open_question, values_of
from tests.marks import long
from tests.needs import package

package("prompt_toolkit.shortcuts.choice_input")

ROOT = Path(__file__).parents[2]
UP, DOWN, RIGHT, LEFT = "\x1b[A", "\x1b[B", "\x1b[C", "\x1b[D"
ENTER, BACK, ERASE, CTRL_C = "\r", "\x1b[Z", "\x15", "\x03"
HERE = Machine("cpu", 1)
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\x1b[=>]|\r")


class Terminal:
    """`accel config` as a person sees it: what it shows is read until it shows a text, then keys are typed."""

    def __init__(self, here: Path, *words: str, columns: int = 200, **env: str) -> None:
        self.fd, there = os.openpty()
        fcntl.ioctl(there, termios.TIOCSWINSZ, struct.pack("4H", 50, columns, 0, 0))

        def own_the_terminal() -> None:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        self.process = subprocess.Popen(
            [sys.executable, "-m", "accel", "config", *words],
            cwd=here,
            env={
                "PATH": os.environ["PATH"],
                "PYTHONPATH": str(ROOT),
                "HF_HOME": str(here / "hf"),
                "ACCEL_CONFIG_HOME": str(here / "conf"),
                "TERM": "xterm",
                "PROMPT_TOOLKIT_NO_CPR": "1",
                "CUDA_VISIBLE_DEVICES": "",
                **env,
                "LANG": "C.UTF-8",
            },
            stdin=there,
            stdout=there,
            stderr=there,
            start_new_session=True,
            preexec_fn=own_the_terminal,
        )
        os.close(there)
        self.shown = ""

    def until(self, text: str) -> None:
        """Reads until `text` has been shown since the last keys."""
        deadline = time.monotonic() + 60
        while text not in _CONTROL.sub("", self.shown):
            assert time.monotonic() < deadline, self.shown
            assert self._read(), self.shown

    def types(self, *keys: str) -> None:
        self.shown = ""
        os.write(self.fd, "".join(keys).encode())

    def asks(self, text: str, *keys: str) -> None:
        self.until(text)
        self.types(*keys)

    def ends(self) -> int:
        while self._read():
            pass
        return self.process.wait(60)

    def _read(self) -> bool:
        if not select.select([self.fd], [], [], 60)[0]:
            return False
        try:
            data = os.read(self.fd, 65536)
        except OSError:  # the other end is closed
            return False
        self.shown += data.decode(errors="replace")
        return bool(data)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    opened = Terminal(tmp_path, "--config_file", "x.yaml")
    yield opened
    opened.process.kill()
    opened.process.wait()
    os.close(opened.fd)


def test_a_whole_questionnaire(terminal: Terminal, tmp_path: Path) -> None:
    terminal.asks("Where will it run?", ENTER)
    terminal.asks("What will it train on?", ENTER)  # a machine without a GPU offers the CPU
    terminal.asks("How many processes", ERASE, "two", ENTER)
    terminal.asks("expects a whole number of 1 or more, not 'two'", ERASE, "2", ENTER)
    terminal.asks("Compile the model", ENTER)
    terminal.asks("Mixed precision?", DOWN, ENTER)
    terminal.asks("Check every collective", ENTER)
    terminal.until("mixed_precision: bf16")
    terminal.asks("Write this to x.yaml?", ENTER)
    assert terminal.ends() == 0
    found = yaml.safe_load((tmp_path / "x.yaml").read_text())
    assert (found["distributed_type"], found["num_processes"], found["mixed_precision"]) == ("MULTI_CPU", 2, "bf16")


def test_what_the_file_says_is_offered(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text(
        "use_cpu: true\nnum_processes: 3\nmixed_precision: bf16\ndistributed_type: MULTI_CPU"
    )
    terminal = Terminal(tmp_path, "--config_file", "x.yaml")
    try:
        for question in ("Where will", "What will", "How many processes", "Compile", "Mixed precision?", "Check every"):
            terminal.asks(question, ENTER)
        terminal.asks("Write this to x.yaml?", ENTER)
        assert terminal.ends() == 0
    finally:
        terminal.process.kill()
        os.close(terminal.fd)
    found = yaml.safe_load((tmp_path / "x.yaml").read_text())
    assert (found["num_processes"], found["mixed_precision"]) == (3, "bf16")


# A branch of the questionnaire: the answers that are not what is offered.
BRANCHES: dict[str, dict[str, Any]] = {
    "cpu": {"num_processes": 4, "mixed_precision": "bf16"},
    "another compiler": {"dynamo_backend": "eager"},
    "torch.compile": {"dynamo_backend": "inductor", "dynamo_mode": "max-autotune",
                      "dynamo_use_regional_compilation": True},
    "gpus": {"device": "gpu", "num_processes": 4, "gpu_ids": "0,1,2,3", "enable_cpu_affinity": True, "debug": True},
    "fp8 te": {"device": "gpu", "mixed_precision": "fp8", "fp8_backend": "te", "fp8_margin": 2,
               "fp8_format": "E4M3", "fp8_override_linear_precision": (True, False, False)},
    "fp8 ao": {"device": "gpu", "mixed_precision": "fp8", "fp8_pad_inner_dim": False},
    "fsdp 1": {"device": "gpu", "way": "fsdp", "fsdp_version": "1", "fsdp_sharding_strategy": "SHARD_GRAD_OP",
               "fsdp_cpu_ram_efficient_loading": False, "fsdp_transformer_layer_cls_to_wrap": "BertLayer"},
    "fsdp 2 and tp": {"device": "gpu", "way": "fsdp", "use_parallelism_config": True, "parallelism_config_tp_size": 2,
                      "parallelism_config_cp_size": 2, "parallelism_config_dp_shard_size": 2},
    "deepspeed": {"device": "gpu", "way": "deepspeed", "zero_stage": 3, "offload_optimizer_device": "nvme",
                  "offload_optimizer_nvme_path": "/nvme", "gradient_clipping": 1.0, "zero3_init_flag": True},
    "deepspeed of several": {
        "place": "several", "device": "gpu", "num_machines": "4", "machine_rank": 1, "main_process_ip": "n0",
        "way": "deepspeed", "deepspeed_config_file": "ds.json", "deepspeed_hostfile": "hosts"},
    "megatron": {"device": "gpu", "way": "megatron", "megatron_lm_tp_degree": 2, "megatron_lm_pp_degree": 2,
                 "megatron_lm_num_micro_batches": 4},
    "several with mpirun": {"place": "several", "num_machines": "2", "main_process_ip": "n0", "num_processes": 8,
                            "mpirun_hostfile": "hosts"},
    "ssh": {"place": "ssh", "ssh_hosts": "me@gpu[01-04]", "ssh_venv": "~/venv", "target": "lab", "num_processes": 8},
    "ssh by a hostfile": {"place": "ssh", "ssh_hostfile": "hosts", "target_file": "project"},
    "slurm": {"place": "slurm", "device": "gpu", "way": "fsdp", "slurm_login": "me@login:22", "slurm_partition": "gpu",
              "slurm_container": "apptainer"},
    "kubernetes": {"place": "kubernetes", "device": "gpu", "kubernetes_namespace": "train",
                   "kubernetes_workload": "jobset", "kubernetes_image": "ghcr.io/us/train:1"},
    "tpu host": {"place": "tpu", "num_processes": 8, "main_training_function": "go", "mixed_precision": "bf16"},
    "tpu pod": {"place": "tpu", "num_processes": 8, "tpu_use_cluster": True, "tpu_name": "pod", "tpu_zone": "z",
                "commands": ["pip list", "ls /data"], "env": ["A=1"], "tpu_use_sudo": True},
    "sagemaker": {"place": "sagemaker", "iam_role_name": "role", "region": "eu-west-1", "num_machines": "2",
                  "distributed_type": "DATA_PARALLEL", "ec2_instance_type": "ml.p4d.24xlarge",
                  "target": "aws", "image_uri": "pytorch:2.8"},
}  # fmt: skip


def keys(question: Question, wanted: Any, offered: Any, before: dict[str, Any]) -> list[str]:
    """What a person types for an answer, one a screen."""
    check = partial(config_target.check_answer, question, earlier=before, machine=HERE)
    first, rest = ([value for value, _ in options] for options in choices(question, _word(offered), check))
    if rest:
        first.append(OTHER_CHOICE)
    if _word(wanted) in rest:
        return [*_move(first, offered, OTHER_CHOICE), *_move(rest, "", wanted)]
    if first:
        return _move(first, offered, wanted)
    if question.many:
        return [*(word + ENTER for word in wanted or []), ENTER]
    return [ERASE + ("" if wanted is None else typed(question.setting, wanted)) + ENTER]


def _move(options: list[str], offered: Any, wanted: Any) -> list[str]:
    at, to = (options.index(_word(answer)) if _word(answer) in options else 0 for answer in (offered, wanted))
    return [(DOWN if to > at else UP) * abs(to - at) + ENTER]


def _word(answer: Any) -> str:
    return {True: "yes", False: "no"}.get(answer, str(answer)) if isinstance(answer, bool) else str(answer)


_SOME = ("cpu", "fsdp 2 and tp", "slurm", "kubernetes", "tpu pod", "sagemaker")


@pytest.mark.parametrize("branch", [*_SOME, *long(*(name for name in BRANCHES if name not in _SOME))])
def test_every_branch(branch: str, terminal: Terminal, tmp_path: Path) -> None:
    """What is asked is what the earlier answers leave open, and the files hold what was answered."""
    answers: dict[str, Any] = {}
    said = dict(BRANCHES[branch])
    while (question := open_question(answers)) is not None:
        offered = question.offered(answers, HERE)
        before = dict(answers)
        answers[question.name] = said.pop(question.name, question.parse(offered) if offered is not None else None)
        first, *more = keys(question, answers[question.name], offered, before)
        terminal.asks(question.text, first)
        for word in more:
            terminal.asks("aot_eager" if question.choices() else "Another one (empty: no more)?", word)
    assert not said  # every answer was asked for
    made = entry_of(answers)
    terminal.until("# x.yaml")
    terminal.asks("Write this to x.yaml", ENTER)
    assert terminal.ends() == 0, terminal.shown
    assert yaml.safe_load((tmp_path / "x.yaml").read_text()) == to_document(values_of(answers, HERE))
    accel_yaml = tmp_path / ("accel.yaml" if answers.get("target_file") == "project" else "conf/accel.yaml")
    assert accel_yaml.exists() == (made is not None)
    if made is not None:
        assert yaml.safe_load(accel_yaml.read_text()) == {"targets": {made[0]: made[1]}}


def test_an_answer_that_no_target_could_have(terminal: Terminal, tmp_path: Path) -> None:
    terminal.asks("Where will it run?", DOWN, DOWN, ENTER)
    for question in ("What will it train on?", "How many processes on each"):
        terminal.asks(question, ENTER)
    terminal.asks("The target's name", ERASE, "slurm", ENTER)
    terminal.asks("'slurm' is another kind of target: this one is of kind ssh", ERASE, "lab", ENTER)
    terminal.asks("Which machines", "gpu[04-01]", ENTER)
    terminal.until("gpu[04-01]")
    terminal.asks("hosts", ERASE, "a,b", ENTER)
    terminal.asks("The user there", BACK)
    terminal.asks("Which machines", CTRL_C)
    assert terminal.ends() == 130
    assert not (tmp_path / "conf").exists()


def test_back_and_forward(terminal: Terminal, tmp_path: Path) -> None:
    terminal.asks("Where will it run?", ENTER)
    terminal.asks("What will it train on?", UP, ENTER)  # GPUs
    terminal.asks("How is the work spread", DOWN, RIGHT)
    terminal.asks("Which version of FSDP?", LEFT)
    terminal.asks("How is the work spread", LEFT)
    terminal.asks("What will it train on?", DOWN, ENTER)
    terminal.asks("How many processes", BACK)
    terminal.asks("What will it train on?", RIGHT)
    terminal.asks("How many processes", ENTER)
    terminal.asks("Compile the model", ENTER)
    terminal.asks("Mixed precision?", ENTER)
    terminal.asks("Check every collective", ENTER)
    terminal.asks("Write this to x.yaml?", ENTER)
    assert terminal.ends() == 0
    found = yaml.safe_load((tmp_path / "x.yaml").read_text())
    assert (found["use_cpu"], "fsdp_config" in found) == (True, False)


@pytest.mark.parametrize("keys", [(CTRL_C,), (ENTER, CTRL_C)])
def test_leaving_writes_nothing(terminal: Terminal, tmp_path: Path, keys: tuple[str, ...]) -> None:
    terminal.asks("Where will it run?", keys[0])
    if len(keys) > 1:
        terminal.asks("What will it train on?", keys[1])
    assert terminal.ends() == 130
    assert "nothing was written" in terminal.shown
    assert not (tmp_path / "x.yaml").exists()


def test_a_dumb_terminal_is_asked_by_numbers(tmp_path: Path) -> None:
    terminal = Terminal(tmp_path, "--config_file", "x.yaml", TERM="dumb")
    try:
        terminal.asks("Amazon SageMaker\n [1]", "\n")
        terminal.asks("the CPU\n [2]", "<\n")
        terminal.asks("Amazon SageMaker\n [1]", "9\n")
        terminal.asks("a number from 1 to 7, not '9'", "this\n")
        terminal.asks("the CPU\n [2]", "\n")
        terminal.asks("How many processes? [1]", "two\n")
        terminal.asks("expects a whole number of 1 or more, not 'two'", "2\n")
        terminal.asks("another one\n [1]", "\n")
        terminal.asks("3  fp8\n [1]", "2\n")
        terminal.asks("Check every collective", "\n")
        terminal.asks("Write this to x.yaml?", "\n")
        assert terminal.ends() == 0, terminal.shown
        assert "\x1b" not in terminal.shown
    finally:
        terminal.process.kill()
        os.close(terminal.fd)
    found = yaml.safe_load((tmp_path / "x.yaml").read_text())
    assert (found["use_cpu"], found["num_processes"], found["mixed_precision"]) == (True, 2, "bf16")


def test_options_are_wrapped_where_the_terminal_is_narrow(tmp_path: Path) -> None:
    terminal = Terminal(tmp_path, "--config_file", "x.yaml", columns=40)
    try:
        terminal.until("Amazon SageMaker")
        words = " ".join(_CONTROL.sub("", terminal.shown).split())
        assert "several machines, with `accel launch` started on each by hand" in words
        terminal.types(CTRL_C)
        assert terminal.ends() == 130
    finally:
        terminal.process.kill()
        os.close(terminal.fd)
