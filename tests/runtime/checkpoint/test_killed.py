"""Writers that are killed, and files that are damaged: the newest whole checkpoint loads and the other is named."""

from __future__ import annotations

import logging
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel import Accelerator, DataLoaderConfiguration, ProjectConfiguration, set_seed
from accel.checkpoint.durable import BLOCK, DurableFile, digest_of, write_durably
from accel.checkpoint.file_names import MANIFEST
from accel.checkpoint.manifest import Manifest, find_damage, write_manifest
from tests.marks import long
from tests.needs import package

from ..small import save_twice
from ..worlds import outcomes, run, run_one

package("hypothesis")

from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402


def _train(directory: str, kill_after: float | None, beside: bool) -> list[tuple[int, float]]:
    """Train to the end, or until killed ``kill_after`` seconds after the start; goes on from the latest checkpoint.

    Returns the number and the loss of every batch of this run: accumulation, shuffling and dropout all matter to it.
    """
    project = ProjectConfiguration(project_dir=directory, automatic_checkpoint_naming=True, total_limit=2)
    config = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=5, use_stateful_dataloader=True)
    accelerator = Accelerator(gradient_accumulation_steps=3, dataloader_config=config, project_config=project)
    set_seed(1, device_specific=True)
    data = TensorDataset(torch.linspace(-1, 1, 96).reshape(48, 2), torch.linspace(0, 1, 48)[:, None])
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(2, 16), nn.Dropout(0.3), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
    loader: Any = DataLoader(data, batch_size=2, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    steps = Steps()
    accelerator.register_for_checkpointing(steps)
    if any((Path(directory) / "checkpoints").glob("checkpoint_*")):
        accelerator.load_state("latest")
    if kill_after is not None:
        # The default action of SIGALRM ends the process where it stands, as SIGKILL does.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, kill_after)
    losses = []
    for _ in range(loader.iteration, 3):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(inputs), targets)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            steps.done += 1
            losses.append((steps.done, loss.item()))
            if steps.done % 2 == 0:
                accelerator.save_state(async_save=beside)
    accelerator.wait_for_checkpoint()
    return losses


class Steps:
    def __init__(self) -> None:
        self.done = 0

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.done = state["done"]


@pytest.mark.parametrize("beside", [*long(False), True])
@pytest.mark.parametrize("processes", [2, *long(1)])
def test_a_run_that_is_killed_goes_on_to_the_bit(tmp_path: Path, processes: int, beside: bool) -> None:
    """Killed at random moments, on all processes, in the middle of epochs, windows and saves."""
    whole = run(_train, str(tmp_path / "whole"), None, beside, processes=processes)
    chance = random.Random(7 + processes + beside)
    directory = str(tmp_path / "killed")
    for _ in range(3):
        ended = outcomes(_train, directory, chance.uniform(0.01, 0.25), beside, processes=processes)
        assert all(outcome.error is not None or outcome.value is not None for outcome in ended)
    rest = run(_train, directory, None, beside, processes=processes)
    for rank in range(processes):
        assert len(rest[rank]) <= len(whole[rank])
        assert rest[rank] == whole[rank][len(whole[rank]) - len(rest[rank]) :]
    folder = Path(directory) / "checkpoints"
    names = sorted(entry.name for entry in folder.iterdir())
    if rest[0]:  # else the last kill came after the last save, and perhaps before that had cleared up
        assert [find_damage(folder / name) for name in names] == [None, None], names


def test_what_a_killed_writer_left_of_an_older_checkpoint_is_deleted(tmp_path: Path) -> None:
    """As of one that was killed when it replaced the first, and that another run went on from."""
    run_one(_automatic, str(tmp_path))
    folder = tmp_path / "checkpoints"
    for name in (".checkpoint_0.draft-01234567", ".checkpoint_1.draft-01234567", ".checkpoint_7.draft-01234567"):
        (folder / name).mkdir()
        (folder / name / "model.safetensors").write_bytes(b"half")
    run_one(_automatic_again, str(tmp_path))
    names = sorted(entry.name for entry in folder.iterdir())
    assert names == [".checkpoint_7.draft-01234567", *(f"checkpoint_{number}" for number in range(4))]


def _whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("whole") / "here"
    run(save_twice, str(place))
    return place


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _whole(tmp_path_factory)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_flipped_bit_and_any_lost_byte_is_named(checkpoint: Path, data: st.DataObject) -> None:
    names = sorted(entry.name for entry in checkpoint.iterdir() if entry.name != "notes.txt")
    path = checkpoint / data.draw(st.sampled_from(names))
    content = path.read_bytes()
    place = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        harmed = content[:place] + bytes([content[place] ^ (1 << data.draw(st.integers(0, 7)))]) + content[place + 1 :]
    else:
        harmed = content[:place]
    path.write_bytes(harmed)
    try:
        problem = find_damage(checkpoint)
    finally:
        path.write_bytes(content)
    assert problem is not None
    assert "\n" not in problem
    if path.name != MANIFEST:
        assert str(path) in problem
    assert find_damage(checkpoint) is None


def _automatic(directory: str) -> None:
    project = ProjectConfiguration(project_dir=directory, automatic_checkpoint_naming=True)
    accelerator = Accelerator(project_config=project)
    model = accelerator.prepare(nn.Linear(1, 1, bias=False))
    for value in range(3):
        with torch.no_grad():
            next(model.parameters()).fill_(value)
        accelerator.save_state()


def _automatic_again(directory: str) -> None:
    project = ProjectConfiguration(project_dir=directory, automatic_checkpoint_naming=True)
    accelerator = Accelerator(project_config=project)
    accelerator.prepare(nn.Linear(1, 1, bias=False))
    accelerator.load_state("latest")
    accelerator.save_state()


def _latest(directory: str) -> Any:
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("accel").addHandler(handler)
    accelerator = Accelerator(project_dir=directory)
    model = accelerator.prepare(nn.Linear(1, 1, bias=False))
    accelerator.load_state("latest")
    return next(model.parameters()).item(), accelerator.save_iteration, told


@pytest.mark.parametrize("processes", [1, 2])
def test_latest_passes_over_and_names_what_is_damaged(tmp_path: Path, processes: int) -> None:
    run_one(_automatic, str(tmp_path))
    folder = tmp_path / "checkpoints"
    manifest = folder / "checkpoint_2" / MANIFEST
    manifest.write_bytes(manifest.read_bytes()[:-9])
    (folder / "checkpoint_1" / "model.safetensors").write_bytes(b"")
    values = run(_latest, str(tmp_path), processes=processes)
    assert [value[:2] for value in values] == [(0.0, 1)] * processes
    passed = [line for line in values[0][2] if line.startswith("skipped: ")]
    assert passed[0].startswith(f"skipped: {manifest} is damaged: ")
    assert passed[1].startswith(f"skipped: {folder / 'checkpoint_1' / 'model.safetensors'} has 0 bytes, but ")


def _extra_memory(directory: str) -> list[int]:
    """MB that saving, and loading into a run that has its state, take at their worst; the state itself is 120 MB."""
    accelerator = Accelerator()
    model = nn.Sequential(*(nn.Linear(1000, 1000) for _ in range(10)))
    optimizer = torch.optim.Adam(model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)
    model(torch.ones(1, 1000)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return [_peak(lambda: accelerator.save_state(directory)), _peak(lambda: accelerator.load_state(directory))]


def _peak(action: Callable[[], object]) -> int:
    Path("/proc/self/clear_refs").write_text("5")  # the highest amount so far is forgotten
    before = _memory("VmRSS")
    action()
    return (_memory("VmHWM") - before) // 1024


def _memory(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def test_neither_way_takes_a_second_copy(tmp_path: Path) -> None:
    saving, loading = run_one(_extra_memory, str(tmp_path / "here"))
    # Of 120 MB. Linux counts memory by processor, and where there are many its sum may be wrong by some MB.
    assert saving <= 40
    assert loading <= 30


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, (1 << 19) - 1, 1 << 19, (1 << 19) + 1, BLOCK, BLOCK + 5])
@pytest.mark.parametrize("piece", [1 << 12, 3 * (1 << 20) + 7])
def test_files_are_what_was_written(tmp_path: Path, size: int, piece: int) -> None:
    data = random.Random(size).randbytes(size)
    path = tmp_path / "file"

    def fill(file: DurableFile) -> None:
        for start in range(0, size, piece):
            changing = bytearray(data[start : start + piece])
            assert file.write(memoryview(changing)) == len(changing)
            changing[:] = bytes(len(changing))

    digest = write_durably(path, fill)
    assert path.read_bytes() == data
    assert digest == digest_of(path)
    assert (digest.length, len(digest.crc32)) == (size, 8 * -(-size // BLOCK))


@pytest.mark.parametrize("place", [0, BLOCK - 1, BLOCK, 2 * BLOCK + 4, 2 * BLOCK + 9])
def test_damage_is_found_in_any_block(tmp_path: Path, place: int) -> None:
    path = tmp_path / "large"
    digest = write_durably(path, lambda file: file.write(bytes(2 * BLOCK + 10)))
    write_manifest(tmp_path, Manifest(num_processes=1, files={"large": digest}))
    assert find_damage(tmp_path) is None
    with path.open("r+b") as file:
        file.seek(place)
        file.write(b"\1")
    assert find_damage(tmp_path) == f"{path} has changed since it was written (its checksum differs)"


def test_a_disk_that_fails_is_told(tmp_path: Path) -> None:
    """A limit of the size of files stands for a full disk: the kernel refuses the write itself."""
    ended = outcomes(_too_large, str(tmp_path / "file"), processes=1)[0]
    assert (ended.error, "File too large" in ended.message) == ("OSError", True)


def _too_large(path: str) -> None:
    import resource

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3 << 20, 3 << 20))
    write_durably(Path(path), lambda file: file.write(bytes(9 << 20)))
