"""The world that ranks are given: torchrun's variables, Accelerate's, and unchanged scripts that live on them."""

from __future__ import annotations

import importlib.util
import json
import os
import socket

import pytest

from tests.marks import long
from tests.needs import missing

from .conftest import Launcher

TORCHRUN = {
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "ROLE_NAME",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_RUN_ID",
}
DUMP = "import json, os\njson.dump(dict(os.environ), open('env.' + os.environ['RANK'], 'w'))\n"


def env(launcher: Launcher, rank: int) -> dict[str, str]:
    return dict(json.loads((launcher.here / f"env.{rank}").read_text()))


def test_variables(launcher: Launcher) -> None:
    launcher(
        "--num_processes",
        "2",
        "--mixed_precision",
        "bf16",
        "--rdzv_id",
        "run 7",
        "--role",
        "r",
        launcher.script(DUMP),
        KEPT="a\nb",
    )
    first, second = env(launcher, 0), env(launcher, 1)
    assert first.keys() >= TORCHRUN
    assert {name for name in first if first[name] != second[name]} == {"RANK", "LOCAL_RANK", "ROLE_RANK"}
    wanted = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "NODE_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "ROLE_NAME": "r",
        "TORCHELASTIC_RUN_ID": "run 7",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "ACCELERATE_USE_CPU": "true",
        "KEPT": "a\nb",
        "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // 2)),
    }
    assert {name: first[name] for name in wanted} == wanted
    assert second["RANK"] == second["LOCAL_RANK"] == "1"


@pytest.mark.parametrize("flags", [(), ("--log_dir", "logs")], ids=["exec", "single"])
def test_a_world_of_one(launcher: Launcher, flags: tuple[str, ...]) -> None:
    launcher(*flags, launcher.script(DUMP))
    found = env(launcher, 0)
    assert found.keys() >= TORCHRUN
    assert (found["RANK"], found["WORLD_SIZE"], found["ACCELERATE_USE_CPU"]) == ("0", "1", "true")
    assert "OMP_NUM_THREADS" not in found


WORLD = """\
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
"""
DDP = """\
from torch.nn.parallel import DistributedDataParallel as DDP
torch.manual_seed(0)
model = DDP(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    model(torch.full((2, 4), float(rank + step))).mean().backward()
    optimizer.step(); optimizer.zero_grad()
sums = [torch.zeros(1) for _ in range(size)]
dist.all_gather(sums, model.module.weight.sum().detach().reshape(1))
assert torch.equal(sums[0], sums[-1]), sums
"""
TOTAL = """\
total = torch.tensor([float(rank + 1)])
dist.all_reduce(total)
# One write a line: a spawned rank is unbuffered, as torchrun's are, and its prints may mix with another's.
os.write(1, f"rank {rank} of {size} total {total.item()}\\n".encode())
dist.destroy_process_group()
"""
PLAIN = WORLD + DDP + TOTAL


@pytest.mark.parametrize(
    ("method", "script"),
    [("fork", PLAIN), ("spawn", WORLD + TOTAL), *long(("spawn", PLAIN))],  # spawned ranks each load the optimizers
    ids=["fork", "spawn", "spawn-DDP"],
)
def test_a_plain_script_of_torch_distributed(launcher: Launcher, method: str, script: str) -> None:
    done = launcher("--num_processes", "2", "--start_method", method, launcher.script(script))
    assert sorted(done.out.splitlines()) == ["rank 0 of 2 total 3.0", "rank 1 of 2 total 3.0"]


def test_the_same_script_alone(launcher: Launcher) -> None:
    assert launcher(launcher.script(PLAIN)).out == "rank 0 of 1 total 1.0\n"


ACCELERATE = """\
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
accelerator = Accelerator()
set_seed(1)
data = torch.utils.data.DataLoader(torch.arange(10.0).reshape(10, 1), batch_size=2)
model = torch.nn.Linear(1, 1)
model, optimizer, data = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3), data)
seen = []
for batch in data:
    accelerator.backward(model(batch).pow(2).mean())
    optimizer.step(); optimizer.zero_grad()
    seen += accelerator.gather_for_metrics(batch).flatten().tolist()
accelerator.wait_for_everyone()
if accelerator.is_main_process:
    print(accelerator.num_processes, accelerator.device.type, accelerator.mixed_precision, sorted(seen))
accelerator.end_training()
"""


@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_script_written_for_accelerate(launcher: Launcher, processes: str) -> None:
    if importlib.util.find_spec("accelerate") is None:
        missing("accelerate", "pip install accelerate==1.15.0")
    done = launcher("--num_processes", processes, "--mixed_precision", "bf16", launcher.script(ACCELERATE))
    assert done.out == f"{processes} cpu bf16 {[float(number) for number in range(10)]}\n", done


def test_logs_have_the_very_bytes(launcher: Launcher) -> None:
    launcher.script(
        "import os, sys\n"
        "rank = os.environ['RANK']\n"
        "out, err = sys.stdout.buffer, sys.stderr.buffer\n"
        "out.write(bytes(range(256)) * 300); out.flush()\n"
        "err.write(b'no newline \\xc3'); err.flush()\n"
        "os.system('printf child')\n"
        "print('', rank, end='', flush=True)\n"
    )
    done = launcher("--num_processes", "2", "--log_dir", "logs", "train.py")
    assert (done.out, done.err) == ("", "")
    launcher("--log_dir", "one", "train.py")
    for rank, folder in ((0, "logs"), (1, "logs"), (0, "one")):
        data = (launcher.here / folder / f"rank-{rank}.a0.log").read_bytes()
        assert data == bytes(range(256)) * 300 + b"no newline \xc3child" + b" %d" % rank


@pytest.mark.parametrize(("spec", "ranks"), [("3", [0, 1]), ("1:3", [1]), ("0:0,1:1", [1]), ("0", [])])
def test_tee(launcher: Launcher, spec: str, ranks: list[int]) -> None:
    launcher.script("import os\nfor i in range(2000): print(i, os.environ['RANK'], 'é' * 40)\nprint('end', end='')")
    done = launcher("--num_processes", "2", "--log_dir", "logs", "--tee", spec, "train.py")
    for rank in (0, 1):
        mine = [line for line in done.out.splitlines() if line.startswith(f"[rank {rank}] ")]
        log = launcher.log(rank).splitlines()
        assert len(log) == 2001
        assert mine == ([f"[rank {rank}] {line}" for line in log] if rank in ranks else [])
    assert done.out.count("\n") == 2001 * len(ranks)


def test_tee_of_one_process(launcher: Launcher) -> None:
    launcher.script("print('a')\nprint('b')")
    assert launcher("--log_dir", "logs", "--tee", "3", "train.py").out == "[rank 0] a\n[rank 0] b\n"


LATE = """\
import os, sys, time
import torch.distributed.distributed_c10d as c10d
joins = c10d._new_process_group_helper
def late(*words, **more):
    made = joins(*words, **more)
    time.sleep(0.9)
    open("joined", "w").close()
    return made
if os.environ["RANK"] == "1": c10d._new_process_group_helper = late
from accel import Accelerator
Accelerator(cpu=True)
if not os.path.exists("joined"): sys.exit("rank 1 has not joined yet")
"""


def test_no_rank_goes_on_before_all_have_joined(launcher: Launcher) -> None:
    """A program that ends at once would otherwise take its end of connections away that others are still making."""
    launcher("--cpu", "--num_processes", "2", launcher.script(LATE))


LISTENERS = """
import json, os
port = f":{int(os.environ['MASTER_PORT']):04X}"
lines = [line.split() for name in ("tcp", "tcp6") for line in open(f"/proc/net/{name}").readlines()[1:]]
found = sorted({line[1].partition(":")[0] for line in lines if line[3] == "0A" and line[1].endswith(port)})
print(json.dumps([os.environ["MASTER_ADDR"], found]), flush=True)
"""
LOOPBACK = "0100007F"


@pytest.mark.parametrize("flags", [("--main_process_ip", socket.gethostname()), ("--rdzv_backend", "c10d")])
def test_the_store_of_one_machine_listens_on_loopback_alone(launcher: Launcher, flags: tuple[str, ...]) -> None:
    done = launcher("--num_processes", "2", *flags, launcher.script(LISTENERS))
    assert list(map(json.loads, done.out.splitlines())) == [["127.0.0.1", [LOOPBACK]]] * 2
