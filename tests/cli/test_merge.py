"""`accel merge-weights`: shards written by two processes of FSDP come back as the weights that were trained."""

from __future__ import annotations

import json
import os
import pickle
import sys
from pathlib import Path

import pytest

from tests import warm
from tests.needs import package

torch = package("torch")

from safetensors import safe_open  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from accel.cli import exit_status, main  # noqa: E402

from .conftest import ROOT  # noqa: E402

TRAIN = """
import sys
import torch, torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard
out, version = sys.argv[1:]
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3)).bfloat16().float()
model[2].bfloat16()
if dist.get_rank() == 0:
    torch.save(model.state_dict(), f"{out}/expected.pt")
fully_shard(model[0]); fully_shard(model[2]); fully_shard(model)
state = get_model_state_dict(model)
dcp.save({"model": state} if version == "wrapped" else state, checkpoint_id=f"{out}/sharded")
dist.destroy_process_group()
"""


@pytest.fixture(scope="module", params=["wrapped", "plain"])
def sharded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fsdp")
    (folder / "train.py").write_text(TRAIN)
    command = [sys.executable, "-m", "accel", "launch", "--cpu", "--num_processes", "2", str(folder / "train.py")]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    warm.run([*command, str(folder), request.param], cwd=None, env=env, timeout=300).check_returncode()
    assert len(list((folder / "sharded").glob("*.distcp"))) == 2
    return folder


def check(path: Path, folder: Path) -> None:
    found = load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)
    expected = torch.load(folder / "expected.pt", weights_only=True)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3))
    model.load_state_dict(found)


def test_the_merged_file_loads(sharded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "place"
    assert main(["merge-weights", str(sharded / "sharded"), str(out)]) == exit_status.OK
    assert capsys.readouterr().out == f"{out}/model.safetensors\n"
    check(out / "model.safetensors", sharded)
    assert (
        main(["merge-weights", str(sharded / "sharded"), str(out), "--unsafe-serialization", "--json"])
        == exit_status.OK
    )
    assert json.loads(capsys.readouterr().out)["file"] == f"{out}/pytorch_model.bin"
    check(out / "pytorch_model.bin", sharded)
    assert sorted(os.listdir(out)) == ["model.safetensors", "pytorch_model.bin"]
    assert (sharded / "sharded/.metadata").exists()


@pytest.mark.parametrize("safe", [True, False])
def test_the_merged_file_is_the_one_that_accelerate_makes(sharded: Path, tmp_path: Path, safe: bool) -> None:
    utils = package("accelerate.utils")
    utils.merge_fsdp_weights(str(sharded / "sharded"), str(tmp_path / "theirs"), safe_serialization=safe)
    flags = [] if safe else ["--unsafe_serialization"]
    assert main(["merge-weights", str(sharded / "sharded"), str(tmp_path / "ours"), *flags]) == exit_status.OK
    name = "model.safetensors" if safe else "pytorch_model.bin"
    if safe:
        with safe_open(tmp_path / "ours" / name, "pt") as one, safe_open(tmp_path / "theirs" / name, "pt") as other:
            assert (one.metadata() or {}).items() >= (other.metadata() or {}).items()
    assert os.listdir(tmp_path / "ours") == os.listdir(tmp_path / "theirs") == [name]
    ours, theirs = (
        load_file(path) if safe else torch.load(path, weights_only=True)
        for path in (tmp_path / "ours" / name, tmp_path / "theirs" / name)
    )
    assert ours.keys() == theirs.keys()
    for key, tensor in theirs.items():
        assert ours[key].dtype == tensor.dtype
        assert torch.equal(ours[key], tensor)


def copied(sharded: Path, tmp_path: Path) -> Path:
    import shutil

    return Path(shutil.copytree(sharded / "sharded", tmp_path / "copy"))


def test_the_checkpoint_is_removed_when_asked(sharded: Path, tmp_path: Path) -> None:
    copy = copied(sharded, tmp_path)
    assert main(["merge-weights", str(copy), str(tmp_path / "out"), "--remove_checkpoint_dir"]) == exit_status.OK
    check(tmp_path / "out/model.safetensors", sharded)
    assert not copy.exists()


def fails(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["merge-weights", *argv]) == exit_status.ERROR
    said = capsys.readouterr()
    (line,) = said.err.splitlines()
    assert said.out == ""
    return str(line)


def test_what_cannot_be_merged_is_one_line(sharded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "out")
    assert ": no such directory" in fails(capsys, str(tmp_path / "nowhere"), out)
    assert "Pass one of its subdirectories: sharded" in fails(capsys, str(sharded), out)
    copy = copied(sharded, tmp_path)
    inside = str(copy / "out")
    assert "would also remove" in fails(capsys, str(copy), inside, "--remove_checkpoint_dir")
    (tmp_path / "file").touch()
    assert "is a file: pass a directory" in fails(capsys, str(copy), str(tmp_path / "file"))
    shard = sorted(copy.glob("*.distcp"))[0]
    whole = shard.read_bytes()
    shard.write_bytes(whole[: len(whole) // 2])
    assert f"{shard} cannot be loaded" in fails(capsys, str(copy), out, "--remove_checkpoint_dir")
    shard.unlink()
    assert f"{shard} is missing" in fails(capsys, str(copy), out)
    metadata = pickle.loads((copy / ".metadata").read_bytes())
    (copy.parent / shard.name).write_bytes(whole)  # there, and good
    for elsewhere in (f"../{shard.name}", str(copy.parent / shard.name)):
        for item in metadata.storage_data.values():
            item.relative_path = elsewhere
        (copy / ".metadata").write_bytes(pickle.dumps(metadata))
        assert f"names '{elsewhere}', which is not in its folder" in fails(capsys, str(copy), out)
    (copy / ".metadata").write_bytes(b"nothing")
    assert "cannot be read" in fails(capsys, str(copy), out)
    assert copy.exists()
    assert not os.path.exists(out)


class Runs:
    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, ("ran",)


def test_code_in_a_checkpoint_does_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Runs()))
    assert "posix.mkdir, which is not allowed in checkpoints" in fails(capsys, str(tmp_path), "out")
    assert not (tmp_path / "ran").exists()


def test_one_place_to_write_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["merge-weights", "a"]) == exit_status.USAGE
    assert "required: OUTPUT" in capsys.readouterr().err
