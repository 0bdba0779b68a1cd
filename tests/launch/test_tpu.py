"""TPU hosts: which host of which slice one is, torch_tpu's variables, and torch_xla's processes."""

from __future__ import annotations

import http.server
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from accel.launch.errors import LaunchConfigError
from accel.launch.tpu import host
from tests.marks import long
from tests.waiting import until

ROOT = Path(__file__).parents[2]
STANDINS = ROOT / "tests/standins"
ENDPOINTS = "w0:1:10.0.0.3,w1:2:10.0.0.4"
TPU_ENV = "ACCELERATOR_TYPE: 'v4-16'\nTOPOLOGY: '2x2x2'\nWORKER_ID: '1'\nZONE: 'us-central2-b'\n"


class Metadata:
    """A metadata server with these attributes of the instance."""

    def __init__(self, **attributes: str) -> None:
        values = {name.replace("_", "-"): value for name, value in attributes.items()}

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                told = self.headers["Metadata-Flavor"] == "Google"
                value = values.get(self.path.rpartition("/instance/attributes/")[2]) if told else None
                self.send_response(404 if value is None else 200)
                self.end_headers()
                self.wfile.write((value or "").encode())

            def log_message(self, *_: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.env = {"GCE_METADATA_HOST": f"127.0.0.1:{self.server.server_address[1]}"}


@pytest.fixture
def worker_1() -> Iterator[Mapping[str, str]]:
    """The environment of worker 1 of a slice of two hosts."""
    metadata = Metadata(
        worker_network_endpoints=ENDPOINTS, agent_worker_number="1", accelerator_type="v4-16", tpu_env=TPU_ENV
    )
    yield metadata.env
    metadata.server.shutdown()
    metadata.server.server_close()


def test_the_metadata_server_says_which_host_this_is(worker_1: Mapping[str, str]) -> None:
    assert host.slice_environment(worker_1) == {
        "TPU_WORKER_HOSTNAMES": "10.0.0.3,10.0.0.4", "TPU_WORKER_ID": "1", "TPU_ACCELERATOR_TYPE": "v4-16",
        "TPU_TOPOLOGY": "2x2x2",
    }  # fmt: skip
    assert host.slice_environment({**worker_1, "TPU_WORKER_HOSTNAMES": "a,b"}) == {}
    assert host.slice_environment({**worker_1, "TPU_SKIP_MDS_QUERY": "True"}) == {}
    assert "TPU_TOPOLOGY" not in host.slice_environment({**worker_1, "TPU_TOPOLOGY": "2x4"})
    assert host.slice_environment({"GCE_METADATA_HOST": "127.0.0.1:9"}) == {}


def device(tree: Path, name: str, kind: str, vendor: str = "0x1ae0", *, shown: bool = True) -> None:
    """A PCI device, in a group of its own, whose VFIO node is there if it is shown."""
    place = tree / "pci" / name
    place.mkdir(parents=True)
    (place / "vendor").write_text(f"{vendor}\n")
    (place / "device").write_text(f"{kind}\n")
    (tree / "groups" / name).mkdir(parents=True)
    (place / "iommu_group").symlink_to(tree / "groups" / name)
    (tree / "vfio").mkdir(exist_ok=True)
    if shown:
        (tree / "vfio" / name).touch()


def test_the_chips_of_this_host(tmp_path: Path) -> None:
    def chips(**env: str) -> list[str]:
        return host.chips(env, str(tmp_path / "pci"), str(tmp_path / "vfio"))

    assert chips() == []
    assert chips(TORCH_TPU_DEVICES_PER_HOST="2") == ["", ""]
    for number in range(4):
        device(tmp_path, str(number), "0x005e")
    device(tmp_path, "4", "0x0042")  # Google's network card
    device(tmp_path, "5", "0x005e", vendor="0x8086")
    device(tmp_path, "6", "0x005e", shown=False)  # another container's
    assert chips() == ["0x005e"] * 4
    assert chips(TORCH_TPU_DEVICES_PER_HOST="2") == ["0x005e"] * 2
    with pytest.raises(
        LaunchConfigError, match=r"environment: TORCH_TPU_DEVICES_PER_HOST must be a whole number, not 'x'"
    ):
        chips(TORCH_TPU_DEVICES_PER_HOST="x")


def variables(kind: str, nodes: int, processes: int, **env: str) -> tuple[str, str, str]:
    found = host.torch_tpu_variables(env, [kind] * processes, nodes=nodes, processes=processes, run_id="job")
    return (
        found["TORCH_TPU_SLICEBUILDER_ADDRESSES"],
        found["TORCH_TPU_TOPOLOGY"],
        found["TORCH_TPU_XPROF_SESSION_ID"],
    )


def test_all_hosts_are_told_the_same() -> None:
    slice_of_two = {"TPU_WORKER_HOSTNAMES": "a,b", "TPU_TOPOLOGY": "2x2x2"}
    addresses, topology, session = variables("0x005e", 2, 4, **slice_of_two)
    assert addresses == "a:8070,a:8071,a:8072,a:8073,b:8070,b:8071,b:8072,b:8073"
    assert topology == "2,2,2"
    assert (addresses, topology, session) == variables("0x005e", 2, 4, **slice_of_two)
    assert session.isdecimal()
    assert variables("0x006f", 2, 1, **slice_of_two, TORCH_TPU_BASE_PORT="9000")[0] == "a:9000,b:9000"
    assert variables("0x0063", 2, 4, TPU_WORKER_HOSTNAMES="a,b", TPU_TOPOLOGY="2x4")[1] == "2,4,1"
    assert variables("0x0076", 2, 8, TPU_WORKER_HOSTNAMES="a,b", TPU_TOPOLOGY="2x2x2")[1] == "2,2,2,2"


def test_one_host() -> None:
    addresses, topology, _ = variables("0x0063", 1, 8)
    ports = [address.removeprefix("localhost:") for address in addresses.split(",")]
    assert len(set(ports)) == 8
    assert all(port.isdecimal() for port in ports)
    assert topology == "2,4,1"
    assert variables("0x0076", 1, 2)[1] == "1,1,1,2"
    assert variables("", 1, 2, TPU_TOPOLOGY="1x2")[1] == "1,2,1"


def test_what_is_set_stays() -> None:
    own = {"TORCH_TPU_SLICEBUILDER_ADDRESSES": "x:1", "TORCH_TPU_TOPOLOGY": "9", "TORCH_TPU_XPROF_SESSION_ID": "7"}
    assert variables("", 1, 2, **own) == ("x:1", "9", "7")


@pytest.mark.parametrize(
    ("nodes", "processes", "env", "said"),
    [
        (2, 4, {}, "--tpu on 2 machines: TPU_WORKER_HOSTNAMES is not set: export the names of all"),
        (3, 4, {"TPU_WORKER_HOSTNAMES": "a,b"}, "--tpu on 3 machines: TPU_WORKER_HOSTNAMES names 2: "),
        (1, 3, {}, "--num_processes 3: one TPU host of this kind allows 1, 2, 4, 8"),
        (2, 4, {"TPU_WORKER_HOSTNAMES": "a,b"}, "the slice's topology is unknown: export TORCH_TPU_TOPOLOGY"),
        (2, 4, {"TPU_WORKER_HOSTNAMES": "a,b", "TPU_TOPOLOGY": "big"}, "TPU_TOPOLOGY='big' is not a topology"),
        (1, 4, {"MEGASCALE_NUM_SLICES": "2"}, "torch_tpu on several slices (MEGASCALE_NUM_SLICES) is not supported"),
    ],
)  # fmt: skip
def test_what_cannot_be_told(nodes: int, processes: int, env: dict[str, str], said: str) -> None:
    with pytest.raises(LaunchConfigError) as refused:
        variables("0x005e", nodes, processes, **env)
    assert said in str(refused.value)


class Machine:
    """A host with one of the runtimes, as far as `accel launch` can see, and a script."""

    def __init__(self, here: Path, runtime: str) -> None:
        self.here = here
        self.flags: tuple[str, ...] = ("--tpu",)
        (here / "packages").mkdir()
        for path in STANDINS.glob(f"{runtime}*"):
            (here / "packages" / path.name).symlink_to(path)

    def start(self, script: str, *words: str, **env: str) -> subprocess.Popen[str]:
        (self.here / "train.py").write_text(script)
        base = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
        return subprocess.Popen(
            [sys.executable, "-m", "accel", "launch", *self.flags, *words],
            cwd=self.here,
            env={
                **base,
                "PYTHONPATH": os.pathsep.join([str(self.here / "packages"), str(ROOT)]),
                "HF_HOME": str(self.here / "hf"),
                "TPU_SKIP_MDS_QUERY": "1",
                **env,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def launch(self, script: str, *words: str, **env: str) -> tuple[int, list[str], str]:
        with self.start(script, *words, **env) as running:
            out, err = running.communicate(timeout=180)
        return running.returncode, out.splitlines(), err


@pytest.fixture
def torch_tpu(tmp_path: Path) -> Machine:
    return Machine(tmp_path, "torch_tpu")


@pytest.fixture
def torch_xla(tmp_path: Path) -> Machine:
    return Machine(tmp_path, "torch_xla")


TELL = """
import json, os
names = ("RANK", "WORLD_SIZE", "TORCH_TPU_SLICEBUILDER_ADDRESSES", "TORCH_TPU_TOPOLOGY", "ACCELERATE_USE_CPU")
print(json.dumps([os.environ.get(name) for name in names]))
"""


def test_torch_tpu_has_a_rank_a_chip(torch_tpu: Machine) -> None:
    code, lines, err = torch_tpu.launch(TELL, "train.py", TORCH_TPU_DEVICES_PER_HOST="2", TPU_TOPOLOGY="1x2")
    assert code == 0, err
    told = sorted(json.loads(line) for line in lines)
    assert [one[:2] for one in told] == [["0", "2"], ["1", "2"]]
    assert [one[3:] for one in told] == [["1,2,1", None]] * 2
    assert told[0][2] == told[1][2]


def test_chips_are_used_without_a_word(torch_tpu: Machine) -> None:
    """As GPUs are. Where something else is asked for, they are not."""
    torch_tpu.flags = ()
    env = {"TORCH_TPU_DEVICES_PER_HOST": "2", "TPU_TOPOLOGY": "1x2", "CUDA_VISIBLE_DEVICES": ""}
    code, lines, err = torch_tpu.launch(TELL, "train.py", **env)
    assert code == 0, err
    assert sorted(json.loads(line)[:2] for line in lines) == [["0", "2"], ["1", "2"]]
    code, lines, err = torch_tpu.launch(TELL, "--cpu", "train.py", **env)
    assert (code, [json.loads(line) for line in lines]) == (0, [["0", "1", None, None, "true"]]), err


def test_chips_that_are_not_used_are_said(torch_xla: Machine) -> None:
    torch_xla.flags = ()
    env = {"TORCH_TPU_DEVICES_PER_HOST": "2", "CUDA_VISIBLE_DEVICES": ""}
    code, lines, err = torch_xla.launch(TELL, "train.py", **env)
    assert (code, len(lines)) == (0, 1)
    assert err == "accel launch: this machine has TPU chips that the ranks do not use: pass --tpu or --cpu\n"


@pytest.mark.parametrize(
    ("processes", "more"),
    [("", {}), *long(("--config_file c.yaml", {}), ("--num_processes 1", {"ACCELERATE_IN_TPU_POD": "1"}))],
)
def test_torch_tpu_on_the_hosts_of_a_slice(
    processes: str, more: dict[str, str], torch_tpu: Machine, worker_1: Mapping[str, str]
) -> None:
    """Worker 1 has the second half of the ranks. `num_processes` of a file, and in a pod, is for each host."""
    (torch_tpu.here / "c.yaml").write_text("distributed_type: XLA\nnum_processes: 1\n")
    env = {"TORCH_TPU_DEVICES_PER_HOST": "1", "TPU_SKIP_MDS_QUERY": "", **worker_1, **more}
    words = ["--main_process_ip", "127.0.0.1", "--main_process_port", str(_free_port())]
    counted = [*words, *processes.split()]
    other = {**env, "TPU_WORKER_HOSTNAMES": "10.0.0.3,10.0.0.4", "TPU_WORKER_ID": "0", "TPU_TOPOLOGY": "2x2x2"}
    with torch_tpu.start(TELL, *counted, "train.py", **other) as first:
        code, lines, err = torch_tpu.launch(TELL, *counted, "train.py", **env)
        out, first_err = first.communicate(timeout=180)
    assert (code, first.returncode) == (0, 0), (err, first_err)
    addresses = "10.0.0.3:8070,10.0.0.4:8070"
    assert json.loads(out) == ["0", "2", addresses, "2,2,2", None]
    assert [json.loads(line) for line in lines] == [["1", "2", addresses, "2,2,2", None]]
    code, _, err = torch_tpu.launch(
        TELL, "--num_machines", "2", "--machine_rank", "0", "--num_processes", "2", *words, "train.py", **env
    )
    assert code == 2
    assert "--machine_rank 0 contradicts TPU_WORKER_HOSTNAMES of the v4-16, where this is node 1" in err


def _free_port() -> int:
    return host._free_ports(1)[0]


def test_a_host_without_chips_or_with_too_few(torch_tpu: Machine) -> None:
    code, _, err = torch_tpu.launch(TELL, "train.py")
    assert (code, err) == (
        2, "accel launch: --tpu: no TPU found on this machine. If it has one, export TORCH_TPU_DEVICES_PER_HOST\n"
    )  # fmt: skip
    code, _, err = torch_tpu.launch(TELL, "--num_processes", "3", "train.py", TORCH_TPU_DEVICES_PER_HOST="2")
    assert code == 2
    assert "3 processes on this machine and 2 TPU devices: every rank needs one of its own" in err


def test_a_runtime_that_is_not_installed(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "none")
    code, _, err = machine.launch(TELL, "train.py")
    assert code == 1
    assert err == (
        f"accel launch: --tpu: neither torch_tpu nor torch_xla is installed in {sys.executable}: "
        "pip install 'accel-launch[torch-tpu]'\n"
    )
    code, _, err = machine.launch(TELL, "--tpu_runtime", "torch_xla", "train.py")
    assert code == 1
    assert err.startswith("accel launch: --tpu_runtime torch_xla: torch_xla is not installed in ")
    assert err.endswith(": pip install 'accel-launch[torch-xla]'\n")


FUNCTION = """
import os, sys
print("imported", os.environ.get("PJRT_LOCAL_PROCESS_RANK"))
def go():
    print("rank", os.environ["PJRT_LOCAL_PROCESS_RANK"], sys.argv, os.environ["FORK_LAUNCHED"],
          os.environ["PJRT_DEVICE"], os.environ.get("XLA_USE_BF16"), os.environ.get("RANK"))
"""


@pytest.mark.parametrize("entry", ["script", "module"])
def test_torch_xla_calls_the_function_on_every_core(torch_xla: Machine, entry: str) -> None:
    """The script is imported there, and not by the process that starts them."""
    name = ["train.py"] if entry == "script" else ["-m", "train"]
    words = ["--mixed_precision", "bf16", "--main_training_function", "go", *name, "--lr", "1"]
    code, lines, err = torch_xla.launch(FUNCTION, *words, STANDIN_DEVICES="2")
    assert code == 0, err
    told = [f"rank {rank} {[str(torch_xla.here / 'train.py'), '--lr', '1']} 1 TPU 1 None" for rank in (0, 1)]
    assert sorted(lines) == ["imported 0", "imported 1", *told]


@pytest.mark.parametrize(
    ("body", "code", "said"),
    [
        ("sys.exit(3)", 3, ""),
        ("sys.exit('why')", 1, "why\n"),
        ("raise ValueError('wrong')", 1, "ValueError: wrong\n"),
        ("os.kill(os.getpid(), 9)", 1, "accel launch: a process of torch_xla was killed"),
    ],
)
def test_the_first_failure_ends_all(torch_xla: Machine, body: str, code: int, said: str) -> None:
    """Rank 0 would run for ever: torch_xla itself waits for it first."""
    script = f"import os, sys, time\ndef main():\n    if os.environ['PJRT_LOCAL_PROCESS_RANK'] == '1': {body}\n"
    found, _, err = torch_xla.launch(script + "    time.sleep(3600)\n", "train.py", STANDIN_DEVICES="2")
    assert found == code, err
    assert said in err


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_no_process_stays_behind(torch_xla: Machine, signum: int) -> None:
    script = "import os, time\ndef main():\n    open(f'up-{os.getpid()}', 'w').close()\n    time.sleep(3600)\n"
    running = torch_xla.start(script, "train.py", STANDIN_DEVICES="2")
    with running:
        until(lambda: len(list(torch_xla.here.glob("up-*"))) == 2, "both processes run")
        pids = [int(path.name.removeprefix("up-")) for path in torch_xla.here.glob("up-*")]
        running.send_signal(signum)
        running.communicate(timeout=180)
    assert running.returncode == (143 if signum == signal.SIGTERM else -9)
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "both processes have ended")


@pytest.mark.parametrize(
    ("script", "words", "code", "said"),
    [
        ("def train():\n    pass\n", ["--main_training_function", "trian", "train.py"], 1,
         "train.py has no function 'trian'; did you mean 'train'?: pass its name with --main_training_function"),
        ("", ["-m", "nothing.here"], 1, "module 'nothing.here' not found"),
        ("", ["--no_python", "true"], 2, "--tpu and --no_python contradict each other: torch_xla calls a function"),
    ],
)  # fmt: skip
def test_what_torch_xla_cannot_call(torch_xla: Machine, script: str, words: list[str], code: int, said: str) -> None:
    found, _, err = torch_xla.launch(script, *words)
    assert (found, err.count("\n")) == (code, 1), err
    assert said in err
