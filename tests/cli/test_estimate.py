"""`accel estimate-memory`: its numbers against models that are really made and really trained, and what it refuses."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from safetensors.torch import save_file  # noqa: E402
from torch import nn  # noqa: E402

from accel.cli import exits, main  # noqa: E402
from accel.estimating import sharing_out  # noqa: E402
from accel.estimating.activations import measure, saved_bytes  # noqa: E402
from accel.estimating.report import report, shape_of, size_of  # noqa: E402
from accel.estimating.subject import find, on_meta  # noqa: E402
from accel.estimating.transformers import inputs as inputs_of  # noqa: E402

from .conftest import ROOT  # noqa: E402

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 101,
        "dtype": "bfloat16",
    },
    "bert": {
        "model_type": "bert", "architectures": ["BertForMaskedLM"], "hidden_size": 32, "intermediate_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 101, "max_position_embeddings": 64,
    },
    "vit": {
        "model_type": "vit", "architectures": ["ViTForImageClassification"], "hidden_size": 32,
        "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 16, "patch_size": 4,
    },
    "t5": {
        "model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "d_model": 32, "d_kv": 8, "d_ff": 64,
        "num_layers": 2, "num_heads": 4, "vocab_size": 101, "decoder_start_token_id": 0,
    },
    "unnamed": {
        "model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 101, "n_positions": 64,
    },
}  # fmt: skip


@pytest.fixture(params=CONFIGS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[request.param]))
    return tmp_path


@pytest.fixture
def llama(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["llama"]))
    return str(tmp_path)


def real(folder: Path | str) -> nn.Module:
    """The model, allocated: every weight float32, all random."""
    model = find(str(folder)).make()
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    return model.float()


def allocated(tensors: Any) -> int:
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def test_sizes_are_those_of_the_real_model(folder: Path) -> None:
    model, empty = real(folder), on_meta(find(str(folder)))
    assert {p.device.type for p in empty.parameters()} == {"meta"}
    assert size_of(empty, "float32").total == allocated([*model.parameters(), *model.buffers()])
    half = model.to(torch.bfloat16)
    assert size_of(empty, "bfloat16").total == allocated([*half.parameters(), *half.buffers()])


@pytest.mark.parametrize("way", ["float32", "autocast", "bfloat16"])
def test_activations_are_those_of_the_real_model(folder: Path, way: Any) -> None:
    model = real(folder).train()
    if way == "bfloat16":
        model = model.to(torch.bfloat16)
    expected = saved_bytes(model, dict(inputs_of(model, 2, 16)), way)
    assert expected > 0
    assert measure(find(str(folder)), way, batch_size=2, sequence_length=16) == pytest.approx(expected, rel=0.001)


def test_activations_by_hand() -> None:
    """Of Linear, ReLU, Linear and a sum, the backward needs each layer's input and nothing else."""
    model = nn.Sequential(nn.Linear(8, 32, bias=False), nn.ReLU(), nn.Linear(32, 4, bias=False))
    assert saved_bytes(model, {"input": torch.zeros(16, 8)}, "float32") == 16 * (8 + 32) * 4


def test_checkpointing_keeps_less(llama: str) -> None:
    plain = measure(find(llama), "float32", batch_size=4, sequence_length=32)
    assert measure(find(llama), "float32", batch_size=4, sequence_length=32, checkpointing=True) < plain


def test_a_step_of_training_holds_what_is_said(folder: Path) -> None:
    model = real(folder).train()
    optimizer = torch.optim.Adam(model.parameters())
    outputs = model(**inputs_of(model, 1, 8))
    (outputs.loss if "loss" in outputs else outputs[0].sum()).backward()
    used = [p for p in model.parameters() if p.grad is not None]
    optimizer.step()
    averages = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    found = report(find(str(folder)), ["float32"], processes=1, sequence_length=8)
    (ddp,) = [need for need in found.needs if need.strategy == "ddp"]
    assert ddp.weights == allocated([*model.parameters(), *model.buffers()])
    assert ddp.gradients == 4 * sum(p.numel() for p in model.parameters())
    assert ddp.optimizer == 8 * sum(p.numel() for p in model.parameters())
    assert sum(p.grad.nbytes for p in used if p.grad is not None) <= ddp.gradients
    assert allocated(averages) <= ddp.optimizer
    if len(used) == len(list(model.parameters())):
        assert allocated(averages) == ddp.optimizer


SHARDED = """
import json, os, sys
import torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from accel.estimating.subject import find
from accel.estimating.transformers import inputs as inputs_of
dist.init_process_group("gloo")
model = find(sys.argv[1]).make().float()
for layer in model.model.layers:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.Adam(model.parameters())
model(**inputs_of(model, 1, 8)).loss.backward()
optimizer.step()
def held(tensors):
    return sum(t.to_local().numel() * t.to_local().element_size() for t in tensors)
parameters = list(model.parameters())
states = [s[n] for s in optimizer.state.values() for n in ("exp_avg", "exp_avg_sq")]
with open(f"{sys.argv[2]}/{dist.get_rank()}.json", "w") as file:
    json.dump([held(parameters), held(p.grad for p in parameters), held(states)], file)
dist.destroy_process_group()
"""


def test_two_processes_of_fsdp_hold_what_is_said(llama: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SHARDED)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    launch = [sys.executable, "-m", "accel", "launch", "--cpu", "--num_processes", "2"]
    subprocess.run(
        [*launch, str(tmp_path / "train.py"), llama, str(tmp_path)],
        env=env,
        check=True,
        timeout=300,
        capture_output=True,
    )
    found = report(find(llama), ["float32"], processes=2, sequence_length=8)
    (need,) = [need for need in found.needs if need.strategy == "fsdp"]
    shape, _ = shape_of(on_meta(find(llama)))
    for rank in range(2):
        weights, gradients, states = json.loads((tmp_path / f"{rank}.json").read_text())
        assert need.weights - shape.fixed == pytest.approx(weights, rel=0.02)  # rows are not divided
        assert need.gradients == pytest.approx(gradients, rel=0.02)
        assert need.optimizer == pytest.approx(states, rel=0.02)


def test_shares_add_up() -> None:
    shape = sharing_out.Shape(trained=1000, fixed=8, unit=100, outside=200, leaf=150)
    alone = {need.strategy: need for need in sharing_out.needs(shape, 1, "bfloat16", {"bfloat16": 64, "autocast": 96})}
    assert {name: (n.weights, n.gradients, n.optimizer, n.gathered) for name, n in alone.items()} == {
        "ddp": (4008, 4000, 8000, 0),
        "fsdp": (4008, 4000, 8000, 0),
        "zero1": (2008, 2000, 12000, 0),
        "zero2": (2008, 2000, 12000, 0),
        "zero3": (2008, 2000, 12000, 0),
    }
    eight = {need.strategy: need for need in sharing_out.needs(shape, 8, "bfloat16", {"bfloat16": 64, "autocast": 96})}
    assert {name: (n.weights, n.gradients, n.optimizer, n.gathered) for name, n in eight.items()} == {
        "ddp": (4008, 4000, 8000, 4000),
        "fsdp": (508, 500, 1000, 2 * (200 + 200 + 200)),
        "zero1": (2008, 2000, 1500, 0),
        "zero2": (2008, 250, 1500, 0),
        "zero3": (258, 250, 1500, 2 * (300 + 150)),
    }
    assert (eight["ddp"].activations, eight["fsdp"].activations) == (96, 64)
    assert eight["ddp"].total == 4008 + 4000 + 8000 + 4000 + 4000  # Adam's step comes when the activations are gone
    assert eight["zero3"].total == 258 + 250 + 1500 + 900 + 64


def shown(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert main(["estimate-memory", "--json", *argv]) == exits.OK
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_table(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate-memory", llama, "--dtypes", "float32", "int4", "--num-processes", "4", "--verbose"]) == 0
    said = capsys.readouterr()
    sizes, needs = said.out.strip().split("\n\n")
    assert [line.split("\t")[0] for line in sizes.splitlines()] == ["float32", "int4"]
    assert sizes.splitlines()[1].endswith("\tN/A")
    assert [line.split("\t")[1] for line in needs.splitlines()] == list(sharing_out.TITLES.values())
    assert "4 processes, batch 1 on each, sequences of 512" in said.err
    assert "largest layer: " in said.err
    assert "LlamaDecoderLayer by LlamaDecoderLayer" in said.err


def test_batch_and_length_count(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    one = shown(capsys, llama, "--dtypes", "float32", "--sequence_length", "16")
    two = shown(capsys, llama, "--dtypes", "float32", "--sequence_length", "16", "--batch_size", "2")
    long = shown(capsys, llama, "--dtypes", "float32", "--sequence_length", "32")
    base = one["needs"][0]["activations"]
    assert base < two["needs"][0]["activations"] <= 2.2 * base
    assert base < long["needs"][0]["activations"] <= 2.2 * base
    less = shown(capsys, llama, "--dtypes", "float32", "--sequence_length", "16", "--activation_checkpointing")
    assert less["needs"][0]["activations"] < base


def test_a_bfloat16_config_is_counted_in_the_types_asked_for(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = shown(capsys, llama)
    totals = {size["dtype"]: size["total"] for size in found["sizes"]}
    assert list(totals) == ["float32", "float16", "bfloat16", "int8", "int4"]
    assert totals["float32"] > found["parameters"] * 4
    assert totals["int4"] * 8 == totals["float32"]
    assert found["sizes"][0]["training"]["step"] == 4 * totals["float32"]
    assert found["sizes"][3]["training"] is None


def test_files_of_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = {"a.weight": torch.zeros(10, 10, dtype=torch.bfloat16), "a.steps": torch.zeros(3, dtype=torch.int64)}
    save_file(one, tmp_path / "model-1.safetensors")
    save_file({"b.weight": torch.zeros(5)}, tmp_path / "model-2.safetensors")
    index = {"weight_map": {"a.weight": "model-1.safetensors", "b.weight": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    alone = shown(capsys, str(tmp_path / "model-1.safetensors"), "--dtypes", "float32", "float16")
    assert [size["total"] for size in alone["sizes"]] == [400 + 24, 200 + 24]  # whole numbers stay as they are
    assert "does not tell how the model computes" in alone["activations_unknown"]
    assert alone["needs"][0]["activations"] is None
    for both in (tmp_path, tmp_path / "model.safetensors.index.json"):
        found = shown(capsys, str(both), "--dtypes", "float32")
        assert found["sizes"][0]["total"] == 400 + 24 + 20
        assert found["largest_layers"] == ["a"]


FACTORIES = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.head = nn.Linear(width, 2)
    def forward(self, x):
        for block in self.blocks:
            x = block(x).relu()
        return self.head(x)
def model(batch_size, sequence_length):
    return Net(), {"x": torch.zeros(batch_size, sequence_length, 16)}
def reads():
    made = Net()
    made.scale = torch.linspace(0, 1, 3)[1].item()
    return made
def odd(): return 3
def fails(): raise KeyError("depth")
frozen = lambda: Net().requires_grad_(False)
"""


@pytest.fixture
def factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "factories.py").write_text(FACTORIES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    sys.modules.pop("factories", None)


@pytest.mark.usefixtures("factories")
def test_factories(capsys: pytest.CaptureFixture[str]) -> None:
    parameters = 3 * (16 * 16 + 16) + 16 * 2 + 2
    found = shown(capsys, "factories:model", "--dtypes", "float32", "--batch_size", "2", "--sequence_length", "4")
    assert found["parameters"] == parameters
    assert found["needs"][0]["activations"] == 2 * 4 * 16 * 4 * 4  # the input and three outputs
    bare = shown(capsys, "factories:Net", "--dtypes", "float32")
    assert bare["parameters"] == parameters
    assert bare["activations_unknown"] == "factories:Net gives no inputs: let it return (model, inputs)"
    assert shown(capsys, "factories:frozen", "--dtypes", "float32")["needs"][0]["gradients"] == 0
    assert shown(capsys, "factories:reads", "--dtypes", "float32")["parameters"] == parameters


@pytest.mark.usefixtures("factories")
@pytest.mark.parametrize(
    ("argv", "message", "code"),
    [
        (["nowhere:make"], "nowhere:make: no module 'nowhere' here", 1),
        (["factories:none"], "factories:none: module factories has nothing called 'none' that could be called", 1),
        (["factories:odd"], "factories:odd gives a int, not a torch.nn.Module", 1),
        (["factories:fails"], "factories:fails cannot be made: KeyError: 'depth'", 1),
        (["./nowhere"], "./nowhere: no such file or directory", 1),
        (["a.safetensors"], "a.safetensors: No such file or directory", 1),
        (["factories.py"], "factories.py is not a safetensors file, or it is damaged", 1),
        (["empty"], "empty has neither a config.json nor a safetensors file", 1),
        (["broken"], "broken/config.json is not JSON", 1),
        (["strange"], "strange: its config.json is of no model that transformers knows", 1),
        (["remote"], "remote is defined by code of its own: read it, and if you trust it, give --trust_remote_code", 1),
        (["x", "--dtypes", "float8"], "--dtypes: invalid choice: 'float8'", 2),
        (["x", "--dtypes"], "--dtypes needs a value", 2),
        (["x", "--library_name", "keras"], "--library_name: invalid choice: 'keras'", 2),
        (["x", "--batch_size", "0"], "--batch_size 0: a whole number from 1 on", 2),
        ([], "the following arguments are required: MODEL", 2),
    ],
)
def test_what_cannot_be_estimated_is_one_line(
    argv: list[str], message: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, config in (("broken", "{"), ("strange", '{"model_type": "q"}'), ("remote", '{"auto_map": {"A": "b"}}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(config)
    (tmp_path / "empty").mkdir()
    assert main(["estimate-memory", *argv]) == code
    said = capsys.readouterr()
    assert message in said.err
    assert said.err.count("\n") == 1
    assert said.out == ""


def test_code_that_comes_with_a_model_runs_when_it_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "own.py").write_text(
        "from torch import nn\nfrom transformers import PretrainedConfig, PreTrainedModel\n"
        "class Config(PretrainedConfig):\n    model_type = 'own'\n"
        "class Model(PreTrainedModel):\n    config_class = Config\n"
        "    def __init__(self, config):\n        super().__init__(config)\n        self.a = nn.Linear(3, 5)\n"
        "        self.post_init()\n    def forward(self, input_ids): return self.a(input_ids)\n"
    )
    auto = {"AutoConfig": "own.Config", "AutoModel": "own.Model"}
    (folder / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": auto}))
    assert shown(capsys, str(folder), "--trust-remote-code")["parameters"] == 20


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of the Hub as fetching one file takes."""

    asked: list[str]

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        self.asked.append(self.path)
        name = self.path.strip("/").partition("/resolve/main/")[0]
        body = json.dumps(CONFIGS["llama"]).encode() if name == "me/llama" else b""
        error = {"me/gated": ("GatedRepo", 403), "me/bare": ("EntryNotFound", 404)}.get(name, ("RepoNotFound", 404))
        self.send_response(200 if body else error[1])
        if not body:
            self.send_header("X-Error-Code", error[0])
        self.send_header("ETag", '"e"')
        self.send_header("X-Repo-Commit", "0" * 40)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[tuple[str, list[str]]]:
    handler = type("Handler", (Hub,), {"asked": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", handler.asked  # type: ignore[attr-defined]
    server.shutdown()
    server.server_close()


def estimate(*argv: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "accel", "estimate-memory", *argv]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_DISABLE_TELEMETRY": "1", **env}
    env = {name: value for name, value in env.items() if name != "HF_HUB_OFFLINE"}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)


def test_a_name_on_the_hub(hub: tuple[str, list[str]], tmp_path: Path) -> None:
    where, asked = hub
    env = {"HF_ENDPOINT": where, "HF_HOME": str(tmp_path)}
    done = estimate("me/llama", "--dtypes", "float32", "--json", **env)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["needs"][0]["activations"] > 0
    assert {path.rpartition("/")[2] for path in asked} == {"config.json"}
    for name, message in (
        ("me/gated", "me/gated is gated"),
        ("me/none", "me/none: no such file, directory or model on http"),
        ("me/bare", "me/bare has no config.json"),
        ("not a name!", "'not a name!' is no file or directory here, and no name"),
    ):
        failed = estimate(name, **env)
        assert (failed.returncode, failed.stdout) == (1, "")
        (line,) = failed.stderr.splitlines()
        assert message in line
    env["HF_ENDPOINT"] = "http://127.0.0.1:9"  # nobody listens
    cached = estimate("me/llama", "--dtypes", "float32", "--json", **env)
    assert json.loads(cached.stdout) == json.loads(done.stdout)
    failed = estimate("me/other", **env)
    assert failed.returncode == 1
    (line,) = failed.stderr.splitlines()
    assert "http://127.0.0.1:9 cannot be reached, and its config.json is not in the cache" in line


@pytest.mark.parametrize(
    ("package", "text", "argv", "message"),
    [
        ("torch", "raise ImportError('none')", ["x"], "needs torch, which cannot be imported: ImportError: none"),
        ("torch", "raise OSError('no cublas')", ["x"], "needs torch, which cannot be imported: OSError: no cublas"),
        (
            "torch", "raise ModuleNotFoundError('none', name='torch')", ["x"],
            "needs torch: pip install accel-launch[train]",
        ),
        ("huggingface_hub", "raise KeyError('a')", ["x/y"], "x/y: huggingface_hub cannot be imported: KeyError: 'a'"),
        ("transformers", "raise OSError('a')", ["LLAMA"], "transformers cannot be imported: OSError: a"),
        ("timm", "raise OSError('a')", ["x", "--library_name", "timm"], "timm cannot be imported: OSError: a"),
    ],
)  # fmt: skip
def test_a_broken_package_is_one_line(
    tmp_path: Path, llama: str, package: str, text: str, argv: list[str], message: str
) -> None:
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text(f"{text}\n")
    failed = estimate(*(llama if word == "LLAMA" else word for word in argv), PYTHONPATH=f"{tmp_path}:{ROOT}")
    (line,) = failed.stderr.splitlines()
    assert failed.returncode == 1
    assert line.endswith(message)


def test_models_of_timm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    timm = pytest.importorskip("timm")
    made = timm.create_model("resnet10t")
    for argv in (["resnet10t"], ["resnet10t", "--library_name", "timm"]):
        found = shown(capsys, *argv, "--dtypes", "float32", "--batch_size", "2")
        assert found["library"] == "timm"
        assert found["sizes"][0]["total"] == allocated([*made.parameters(), *made.buffers()])
        size = made.pretrained_cfg["input_size"]
        expected = saved_bytes(made.train(), {"x": torch.zeros(2, *size)}, "float32")
        assert found["needs"][0]["activations"] == expected
    (tmp_path / "config.json").write_text(json.dumps({"architecture": "resnet10t", "num_classes": 3}))
    smaller = shown(capsys, str(tmp_path), "--dtypes", "float32")
    assert smaller["parameters"] == sum(p.numel() for p in timm.create_model("resnet10t", num_classes=3).parameters())
    assert main(["estimate-memory", "resnet10q", "--library_name", "timm"]) == exits.ERROR
    assert "timm has no such model; did you mean" in capsys.readouterr().err
