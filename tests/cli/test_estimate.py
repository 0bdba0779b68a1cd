"""`accel estimate-memory`: its tables, what it is asked about, and what it refuses."""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import sys
from collections.abc import Iterator
from logging.handlers import BufferingHandler
from pathlib import Path

import pytest

from tests.needs import package

torch = package("torch")
transformers = package("transformers")

from safetensors.torch import save_file  # noqa: E402

from accel.cli import exit_status, main  # noqa: E402
from accel.estimate import report  # noqa: E402
from accel.estimate.activations import step_bytes  # noqa: E402

from .conftest import ROOT  # noqa: E402
from .models import described, estimate, shown  # noqa: E402


@pytest.fixture
def llama(tmp_path: Path) -> str:
    return str(described("llama", tmp_path))


def test_the_table(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate-memory", llama, "--dtypes", "float32", "int4", "--num-processes", "4", "--verbose"]) == 0
    said = capsys.readouterr()
    sizes, needs = said.out.strip().split("\n\n")
    assert [line.split("\t")[0] for line in sizes.splitlines()] == ["float32", "int4"]
    assert sizes.splitlines()[1].endswith("\tN/A")
    assert [line.split("\t")[1] for line in needs.splitlines()] == list(report.TITLES.values())
    assert "4 processes, batch 1 on each, sequences of 512" in said.err
    assert "largest layer: " in said.err
    assert "FSDP gathers by LlamaDecoderLayer, two at a time" in said.err


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


@pytest.mark.parametrize(
    ("name", "unknown", "said"),
    [
        ("bert", "sequences of 999 are longer than the 64 that the model takes", ""),
        ("unnamed", None, "accel: estimate-memory: the model supports sequences of at most 64 tokens, not 999\n"),
    ],
)
def test_a_sequence_that_is_too_long_is_said_and_nothing_else(
    name: str, unknown: str | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, heard = logging.getLogger("torch._subclasses.fake_tensor"), BufferingHandler(100)
    log.addHandler(heard)
    try:
        words = [str(described(name, tmp_path)), "--dtypes", "float32", "--sequence_length", "999", "--json"]
        assert main(["estimate-memory", *words]) == exit_status.OK
    finally:
        log.removeHandler(heard)
    out, err = capsys.readouterr()
    assert json.loads(out)["activations_unknown"] == unknown
    assert (err, heard.buffer) == (said, [])


def test_files_of_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = {"a.weight": torch.zeros(10, 10, dtype=torch.bfloat16), "a.steps": torch.zeros(3, dtype=torch.int64)}
    save_file(one, tmp_path / "model-1.safetensors")
    save_file({"b.weight": torch.zeros(5)}, tmp_path / "model-2.safetensors")
    index = {"weight_map": {"a.weight": "model-1.safetensors", "b.weight": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    alone = shown(capsys, str(tmp_path / "model-1.safetensors"), "--dtypes", "float32", "float16")
    assert [size["total"] for size in alone["sizes"]] == [400 + 24, 200 + 24]  # whole numbers stay as they are
    assert "does not describe the model's forward" in alone["activations_unknown"]
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
    # the batch, what three blocks gave and what the head gave; the gradients of the last block's output and of its sum
    assert found["needs"][0]["activations"] == pytest.approx(2 * 4 * 4 * (6 * 16 + 2), abs=16)
    bare = shown(capsys, "factories:Net", "--dtypes", "float32")
    assert bare["parameters"] == parameters
    assert bare["activations_unknown"] == "factories:Net returns no inputs: make it return (model, inputs)"
    assert shown(capsys, "factories:frozen", "--dtypes", "float32")["needs"][0]["gradients"] == 0
    assert shown(capsys, "factories:reads", "--dtypes", "float32")["parameters"] == parameters


@pytest.mark.usefixtures("factories")
@pytest.mark.parametrize(
    ("argv", "message", "code"),
    [
        (["nowhere:make"], "nowhere:make: no module 'nowhere' here", 1),
        (["factories:none"], "factories:none: module factories has no function or class 'none'", 1),
        (["factories:odd"], "factories:odd returned a int, not a torch.nn.Module", 1),
        (["factories:fails"], "factories:fails cannot be built: KeyError: 'depth'", 1),
        (["./nowhere"], "./nowhere: no such file or directory", 1),
        (["a.safetensors"], "a.safetensors cannot be read: No such file or directory", 1),
        (["factories.py"], "factories.py is a Python file: name a factory in it, such as factories:FACTORY", 1),
        (["config.txt"], "config.txt is not a safetensors file, or is truncated", 1),
        (["empty"], "empty has neither a config.json nor a safetensors file", 1),
        (["broken"], "broken/config.json is not JSON", 1),
        (["strange"], "strange: its config.json has no model type that transformers supports", 1),
        (["remote"], "remote needs code from its repository: review it, then pass --trust_remote_code", 1),
        (["x", "--dtypes", "float8"], "--dtypes: invalid choice: 'float8'", 2),
        (["x", "--dtypes"], "--dtypes needs a value", 2),
        (["x", "--library_name", "keras"], "--library_name: invalid choice: 'keras'", 2),
        (["x", "--batch_size", "0"], "--batch_size 0: expects a whole number of 1 or more", 2),
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
    (tmp_path / "config.txt").write_text("text")
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


@pytest.mark.parametrize(
    ("package", "text", "argv", "message"),
    [
        ("torch", "raise ImportError('none')", ["x"], "torch cannot be imported: ImportError: none"),
        ("torch", "raise OSError('no cublas')", ["x"], "torch cannot be imported: OSError: no cublas"),
        (
            "torch", "raise ModuleNotFoundError('none', name='torch')", ["x"],
            "torch is not installed: pip install 'accel-launch[train]'",
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
    if importlib.util.find_spec("timm") is None:
        # In CI too: timm needs torchvision, whose wheels want the CUDA build of torch.
        pytest.skip("timm is missing: pip install timm torchvision, both for this torch")
    timm = importlib.import_module("timm")
    made = timm.create_model("resnet10t")
    for argv in (["resnet10t"], ["resnet10t", "--library_name", "timm"]):
        found = shown(capsys, *argv, "--dtypes", "float32", "--batch_size", "2")
        assert found["library"] == "timm"
        assert found["sizes"][0]["total"] == sum(t.nbytes for t in [*made.parameters(), *made.buffers()])
        size = made.pretrained_cfg["input_size"]
        expected = step_bytes(made.train(), {"x": torch.zeros(2, *size)}, "float32")
        assert found["needs"][0]["activations"] == pytest.approx(expected, rel=0.001)
    (tmp_path / "config.json").write_text(json.dumps({"architecture": "resnet10t", "num_classes": 3}))
    smaller = shown(capsys, str(tmp_path), "--dtypes", "float32")
    assert smaller["parameters"] == sum(p.numel() for p in timm.create_model("resnet10t", num_classes=3).parameters())
    assert main(["estimate-memory", "resnet10q", "--library_name", "timm"]) == exit_status.ERROR
    assert "timm has no such model; did you mean" in capsys.readouterr().err
