"""`notebook_launcher` and `debug_launcher`: real worlds, in a program of their own, as a notebook is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from accel.errors import ArgumentError
from accel.launch.function import PrepareForLaunch, _LineBuffer, notebook_launcher
from tests import warm
from tests.marks import long
from tests.ports import free_port

ROOT = Path(__file__).parents[2]

PRELUDE = """
import json, os, signal, subprocess, sys, threading, time
import torch
from accel.errors import AccelError, ProcessError, StateError
from accel.launch.function import debug_launcher, notebook_launcher

torch.randn(400, 400) @ torch.randn(400, 400)  # its OpenMP threads do not survive a fork
torch.nn.Linear(4, 4)(torch.ones(1, 4)).sum().backward()


def tell(**facts):
    os.write(1, json.dumps(facts).encode() + bytes([10]))


def world(factor=1):
    from accel import PartialState

    state = PartialState()
    total = torch.tensor([state.process_index + 1.0])
    torch.distributed.all_reduce(total)
    torch.randn(400, 400) @ torch.randn(400, 400)
    tell(rank=state.process_index, size=state.num_processes, type=str(state.distributed_type),
         total=total.item() * factor, forked=state.fork_launched,
         precision=os.environ.get("ACCELERATE_MIXED_PRECISION"))
"""


def play(script: str, tmp_path: Path, **env: str) -> list[dict[str, Any]]:
    """Runs ``script`` as one program and returns what it told, in the order of ranks; it must end well, and clean."""
    done = run(script, tmp_path, **env)
    assert done.returncode == 0, done.stderr
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return sorted(told, key=lambda facts: facts.get("rank", -1))


def run(script: str, tmp_path: Path, **env: str) -> subprocess.CompletedProcess[str]:
    path = tmp_path / "notebook.py"
    path.write_text(PRELUDE + script)
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("ACCELERATE_", "KAGGLE"))}
    given = {**kept, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", **env}
    return warm.run([sys.executable, str(path)], cwd=tmp_path, env=given, timeout=280)


def test_a_notebook_on_a_cpu_machine_makes_one_world(tmp_path: Path) -> None:
    """Accelerate's defect 11: it said "2 CUDAs" and ran two ranks that both were 0 of 1."""
    told = play("tell(returned=notebook_launcher(world, (2,), num_processes=2))", tmp_path)
    assert told[0] == {"returned": None}
    assert [(one["rank"], one["size"], one["type"], one["total"], one["forked"]) for one in told[1:]] == [
        (0, 2, "MULTI_CPU", 6.0, True),
        (1, 2, "MULTI_CPU", 6.0, True),
    ]


def test_it_says_on_what_it_trains(tmp_path: Path) -> None:
    assert "Launching training on 2 CPU processes." in run("notebook_launcher(world, num_processes=2)", tmp_path).stdout
    assert "Launching training on one CPU." in run("notebook_launcher(print)", tmp_path).stdout


def test_closures_classes_and_several_launches(tmp_path: Path) -> None:
    script = """
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(2, 1)

    def forward(self, x):
        return self.inner(x)

def make(number):
    def train():
        from accel import Accelerator
        accelerator = Accelerator()
        model = accelerator.prepare(Net())
        accelerator.backward(model(torch.ones(3, 2)).sum())
        weights = accelerator.gather(accelerator.unwrap_model(model).inner.weight.grad)
        tell(rank=accelerator.process_index, number=number, grads=weights.shape[0])
    return train

for number in (1, 2):
    notebook_launcher(make(number), num_processes=2)
"""
    told = play(script, tmp_path)
    assert sorted((one["rank"], one["number"], one["grads"]) for one in told) == [
        (rank, number, 2) for rank in (0, 1) for number in (1, 2)
    ]


def test_precision_and_port_reach_the_ranks(tmp_path: Path) -> None:
    told = play(f"notebook_launcher(world, num_processes=2, mixed_precision='bf16', use_port={free_port()})", tmp_path)
    assert [one["precision"] for one in told] == ["bf16", "bf16"]


def test_two_notebooks_train_at_the_same_time(tmp_path: Path) -> None:
    """The default port is not taken from one by the other."""
    script = """
from concurrent.futures import ThreadPoolExecutor

with ThreadPoolExecutor(1) as pool:
    other = pool.submit(notebook_launcher, world, num_processes=2)
    notebook_launcher(world, num_processes=2)
    other.result()  # raises what it raised
"""
    assert [one["size"] for one in play(script, tmp_path)] == [2] * 4


@pytest.mark.parametrize("more", ["", *long("use_port={port}", 'rdzv_backend="c10d"')])
def test_the_store_of_one_machine_listens_on_loopback_alone(tmp_path: Path, more: str) -> None:
    script = f"""
def look():
    port = ":%04X" % int(os.environ["MASTER_PORT"])
    lines = [line.split() for name in ("tcp", "tcp6") for line in open("/proc/net/" + name).readlines()[1:]]
    found = sorted(dict.fromkeys(line[1][:-5] for line in lines if line[3] == "0A" and line[1].endswith(port)))
    world()
    tell(rank=9, where=[os.environ["MASTER_ADDR"], found])
notebook_launcher(look, num_processes=2, {more.format(port=free_port())})
"""
    told = play(script, tmp_path)
    assert [one["total"] for one in told[:2]] == [3.0, 3.0]
    assert [one["where"] for one in told[2:]] == [["127.0.0.1", ["0100007F"]]] * 2


def test_two_nodes_meet(tmp_path: Path) -> None:
    script = f"""
node = int(sys.argv[1]) if len(sys.argv) > 1 else 0
if node == 0:
    other = subprocess.Popen([sys.executable, __file__, "1"])
notebook_launcher(world, num_processes=1, num_nodes=2, node_rank=node, use_port="{free_port()}")
if node == 0:
    assert other.wait() == 0
"""
    assert [(one["rank"], one["total"]) for one in play(script, tmp_path)] == [(0, 3.0), (1, 3.0)]


def test_the_elastic_backend(tmp_path: Path) -> None:
    script = """
notebook_launcher(world, num_processes=2, rdzv_backend="c10d", rdzv_endpoint="127.0.0.1:0")
def bad():
    raise ValueError("the reason")
try:
    notebook_launcher(bad, num_processes=2, rdzv_backend="c10d", rdzv_endpoint="127.0.0.1:0")
except ProcessError as error:
    tell(rank=9, said=str(error).splitlines()[0])
"""
    told = play(script, tmp_path)
    assert [(one["rank"], one["total"]) for one in told[:2]] == [(0, 3.0), (1, 3.0)]
    assert told[2]["said"].endswith("failed first: ValueError: the reason")


def test_the_elastic_backend_of_two_nodes(tmp_path: Path) -> None:
    script = f"""
node = int(sys.argv[1]) if len(sys.argv) > 1 else 0
if node == 0:
    other = subprocess.Popen([sys.executable, __file__, "1"])
elastic = dict(num_processes=1, num_nodes=2, node_rank=node, rdzv_backend="c10d")
notebook_launcher(world, rdzv_endpoint="127.0.0.1:{free_port()}", **elastic)
def bad():
    raise ValueError("the reason")
try:
    notebook_launcher(bad, rdzv_endpoint="127.0.0.1:{free_port()}", **elastic)
except ProcessError as error:
    if node == 0:
        tell(rank=9, said=str(error).splitlines()[0])
if node == 0:
    assert other.wait() == 0
"""
    told = play(script, tmp_path)
    assert [(one["rank"], one["total"]) for one in told[:2]] == [(0, 3.0), (1, 3.0)]
    assert told[2]["said"].endswith("failed first: ValueError: the reason")


FAILING = """
def bad():
    from accel import PartialState
    state = PartialState()
    worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    tell(rank=state.process_index, pids=[os.getpid(), worker.pid])
    state.wait_for_everyone()  # all have told: the first failure ends the others
    if state.process_index == 1:
        raise ValueError("the reason")
    state.wait_for_everyone()
    time.sleep(300)

def alive(pid):
    try:
        return open(f"/proc/{pid}/stat").read().rsplit(")")[-1].split()[0] not in "ZX"
    except OSError:
        return False
"""


def test_the_first_error_is_shown_and_nobody_is_left(tmp_path: Path) -> None:
    script = (
        FAILING
        + """
try:
    notebook_launcher(bad, num_processes=2)
except ProcessError as error:
    tell(rank=8, said=str(error))
"""
    )
    told = play(script, tmp_path)
    said = told[2]["said"].splitlines()
    assert said[0] == "process 1 of 2 failed first: ValueError: the reason"
    assert said[2] == "Traceback (most recent call last):"
    assert 'raise ValueError("the reason")' in told[2]["said"]
    assert "accel/launch" not in told[2]["said"]
    assert [pid for one in told[:2] for pid in one["pids"] if _alive(pid)] == []


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")")[-1].split()[0] not in "ZX"
    except OSError:
        return False


def test_an_interrupt_ends_everything(tmp_path: Path) -> None:
    script = """
def forever():
    from accel import PartialState
    state = PartialState()
    worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    tell(rank=state.process_index, pids=[os.getpid(), worker.pid])
    state.wait_for_everyone()
    if state.process_index == 0:
        os.kill(os.getppid(), signal.SIGINT)
    time.sleep(300)

try:
    notebook_launcher(forever, num_processes=2)
except KeyboardInterrupt:
    tell(rank=9, interrupted=True)
"""
    told = play(script, tmp_path)
    assert told[2] == {"rank": 9, "interrupted": True}
    assert [pid for one in told[:2] for pid in one["pids"] if _alive(pid)] == []


def test_a_killed_rank_and_an_exit_code_are_named(tmp_path: Path) -> None:
    script = """
def killed():
    from accel import PartialState
    if PartialState().process_index == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(300)

def leaves():
    sys.exit(3)

def goes():
    sys.exit(0)

def says_much():
    raise ValueError("€" * 1_000_000)

for function in (killed, leaves, goes, says_much):
    try:
        debug_launcher(function)
        tell(said="nothing")
    except ProcessError as error:
        tell(said=str(error).splitlines()[0])
"""
    killed, leaves, goes, much = (one["said"] for one in play(script, tmp_path))
    assert killed == "process 0 of 2 failed first: was killed by SIGKILL"
    assert leaves.endswith("failed first: SystemExit: 3")
    assert goes == "nothing"
    assert "failed first: ValueError: €€€" in much


def test_ranks_are_started_again(tmp_path: Path) -> None:
    script = """
def second_time():
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        raise ValueError("the first time")
    world()
notebook_launcher(second_time, num_processes=2, max_restarts=1)
"""
    assert [one["total"] for one in play(script, tmp_path)] == [3.0, 3.0]
    said = run(script, tmp_path).stderr
    assert "failed first: ValueError: the first time; starting again" in said


def test_what_forks_cannot_share_is_refused_with_the_remedy(tmp_path: Path) -> None:
    script = """
from accel import Accelerator, PartialState
PartialState()
notebook_launcher(world, num_processes=2)  # a state of this program alone is no obstacle
Accelerator()
for launcher in (notebook_launcher, debug_launcher):
    try:
        launcher(world, num_processes=2)
    except StateError as error:
        tell(rank=9, said=str(error))
"""
    told = play(script, tmp_path)
    assert [one["size"] for one in told[:2]] == [2, 2]
    assert [one["said"] for one in told[2:]] == [
        "this program has made an Accelerator, which forked processes cannot share: restart it, "
        "and make the Accelerator inside the function that is launched"
    ] * 2


def test_an_initialised_gpu_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a machine with GPUs says; that CUDA was initialised is all that is pretended here."""
    import torch

    from accel.launch.function import _refuse_unforkable_state

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(
        Exception, match=r"this program has used CUDA, .* Kernel, Restart\), and touch CUDA only inside"
    ):
        _refuse_unforkable_state("cuda")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setitem(sys.modules, "bitsandbytes", sys)
    with pytest.raises(Exception, match="bitsandbytes was imported, which uses CUDA at once"):
        _refuse_unforkable_state("cuda")
    _refuse_unforkable_state("cpu")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mixed_precision": "bf61"}, r"mixed_precision=…\): 'bf61' is not one of .*; did you mean 'bf16'\?"),
        ({"num_processes": 0}, r"notebook_launcher\(num_processes=0\): expects a whole number of 1 or more"),
        ({"num_processes": 2, "node_rank": 2, "num_nodes": 2}, r"node_rank=2\) is not one of 0 … 1"),
        ({"num_processes": 2, "rdzv_backend": "etcd"}, "'etcd' is not one of static, c10d"),
        ({"num_processes": 2, "num_nodes": 2, "max_restarts": 1}, "on several nodes needs rdzv_backend='c10d'"),
        ({"num_processes": 2, "use_port": "http"}, "port 'http' is not a number from 0 to 65535"),
        ({"num_processes": 2, "rdzv_endpoint": "nowhere"}, r"rdzv_endpoint='nowhere'\) must be HOST:PORT"),
    ],
)
def test_arguments_that_cannot_be(options: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    with pytest.raises(ArgumentError, match=said):
        notebook_launcher(print, **options)


def test_debug_mode_forms_the_world_once_before(tmp_path: Path) -> None:
    told = play("notebook_launcher(world, num_processes=2)", tmp_path, ACCELERATE_DEBUG_MODE="1")
    assert [one["total"] for one in told] == [3.0, 3.0]


def test_lines_of_ranks_are_labelled_and_whole(tmp_path: Path) -> None:
    script = """
def speak():
    print("one", "line")
    print("half", end="")
notebook_launcher(speak, num_processes=2, log_line_prefix_template="[${rank}/${local_rank}] ")
"""
    said = run(script, tmp_path).stdout
    assert "[0/0] one line\n" in said
    assert "[1/1] one line\n" in said
    assert said.count("half") == 2


def test_a_stream_of_whole_lines() -> None:
    import io

    class Kept(io.StringIO):
        def __init__(self) -> None:
            super().__init__()
            self.writes: list[str] = []

        def write(self, text: str) -> int:
            self.writes.append(text)
            return super().write(text)

    stream = Kept()
    lines = _LineBuffer(stream, "> ")
    for piece in ("a", " ", "b", "\n", "c\nd"):
        assert lines.write(piece) == len(piece)
    assert stream.writes == ["> a b\n", "> c\n"]
    lines.flush()
    lines.writelines([" e\n", "f\n"])
    assert stream.getvalue() == "> a b\n> c\n> d e\n> f\n"


def test_prepare_for_launch_says_which_rank_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "FORK_LAUNCHED"):
        monkeypatch.setenv(name, "unset")
    monkeypatch.setenv("NPROC", "4")
    monkeypatch.setenv("NODE_RANK", "1")
    seen: list[Any] = []
    PrepareForLaunch(lambda *args: seen.append((args, os.environ["RANK"], os.environ["LOCAL_RANK"])), "MULTI_GPU")(
        2, "a"
    )
    assert seen == [(("a",), "6", "2")]
    assert os.environ["FORK_LAUNCHED"] == "1"


def test_prepare_for_launch_meets_in_a_file(tmp_path: Path) -> None:
    script = f"""
from torch.multiprocessing import start_processes
from accel.launch.function import PrepareForLaunch
os.environ.update(WORLD_SIZE="2", ACCELERATE_DEBUG_RDV_FILE={str(tmp_path / "meet")!r}, ACCELERATE_USE_CPU="1")
def few():
    torch.set_num_threads(1)
    from accel import PartialState
    tell(rank=PartialState().process_index, size=PartialState().num_processes)
start_processes(PrepareForLaunch(few, debug=True), args=(), nprocs=2, start_method="fork")
"""
    assert play(script, tmp_path) == [{"rank": 0, "size": 2}, {"rank": 1, "size": 2}]
