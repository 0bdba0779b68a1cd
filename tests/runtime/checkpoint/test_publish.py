"""Publishing a checkpoint: what a writer killed at any moment, another run, or a special place leaves of it."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from accel.checkpoint.directory import discard, drafts, numbered, publish, recover, remove, start_draft
from accel.checkpoint.durable import DurableFile
from accel.checkpoint.file_names import MANIFEST
from accel.checkpoint.files import write_bytes
from accel.checkpoint.manifest import Manifest, find_damage, read_manifest, write_manifest
from accel.checkpoint.weights import read_weights, save_weights
from accel.errors import CheckpointError
from tests.marks import long
from tests.needs import missing

from ..small import simple
from ..worlds import outcomes, run_one

OLD = {"model.bin": b"old", "chunks/node_1/rank_1": b"old", "only_old": b"old"}
NEW = {"model.bin": b"new", "chunks/node_0/rank_0": b"new", "only_new": b"new"}


def _draft(final: Path, files: dict[str, bytes]) -> tuple[Path, Any]:
    """A whole draft, and its lock."""
    draft, lock = start_draft(final)
    digests = {}
    for name, content in files.items():
        (draft / name).parent.mkdir(parents=True, exist_ok=True)
        digests[name] = write_bytes(draft / name, content)
    write_manifest(draft, Manifest(num_processes=1, files=digests))
    return draft, lock


def _start(final: Path) -> Path:
    """A draft that its writer gave up."""
    draft, lock = start_draft(final)
    assert lock is not None
    lock.close()
    return draft


def _save(final: Path, files: dict[str, bytes]) -> None:
    draft, lock = _draft(final, files)
    publish(draft, final, lock)


def _files(folder: Path) -> dict[str, bytes]:
    """All that is in the folder, but its manifest; folders too, so that no empty one is left."""
    paths = {str(path.relative_to(folder)): path for path in folder.rglob("*") if ".draft-" not in str(path)}
    files = {name: path.read_bytes() for name, path in paths.items() if path.is_file() and path.name != MANIFEST}
    parents = {str(parent) for name in files for parent in Path(name).parents}
    assert {name for name, path in paths.items() if path.is_dir()} <= parents, "an empty folder is left"
    return files


def _ends_at(event: int, action: Callable[[], Any]) -> bool:
    """Run ``action`` in a process that ends before its ``event``-th change of the disk; true if it came that far."""
    pid = os.fork()
    if pid == 0:
        left = [event]

        def counted(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **how: Any) -> Any:
                left[0] -= 1
                if left[0] < 0:
                    os._exit(9)
                return function(*args, **how)

            return call

        for name in ("rename", "replace", "unlink", "rmdir", "mkdir", "fsync"):
            setattr(os, name, counted(getattr(os, name)))
        DurableFile.write = counted(DurableFile.write)  # type: ignore[method-assign]
        try:
            action()
        finally:
            os._exit(0)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status) == 9


def _every_end(directory: str, exists: bool) -> tuple[list[str], set[int]]:
    """What is found after a save that ended at each event, and after a recovery that ended at some event too."""
    found, inodes = [], set()
    event = 0
    while True:
        folder = Path(directory) / str(event)
        final = folder / "here"
        if exists:
            _save(final, OLD)
            (final / "notes.txt").write_bytes(b"the script's own")
            inode = final.stat().st_ino
        else:
            folder.mkdir(parents=True)
        ended = _ends_at(event, lambda final=final: _save(final, NEW))  # type: ignore[misc]
        _ends_at(event % 13, lambda final=final: recover(final))  # type: ignore[misc]
        recover(final)
        own = {"notes.txt": b"the script's own"} if exists else {}
        for draft in drafts(final):
            discard(draft, final)
        if final.exists():
            assert find_damage(final) is None
            files = _files(final)
            files.pop(".accel_lock", None)  # of one that ended before it could delete it; the next save does
            assert files in ({**NEW, **own}, {**OLD, **own}), (event, files)
            found.append("new" if "only_new" in files else "old")
            inodes |= {final.stat().st_ino - inode} if exists else set()
        else:
            found.append("none")
        assert [entry.name for entry in folder.iterdir()] == (["here"] if final.exists() else [])
        _save(final, {"next": b"one"})
        assert _files(final) == {"next": b"one", **own}
        if not ended:
            return found, inodes
        event += 1


@pytest.mark.parametrize("exists", [True, False])
def test_a_writer_that_ends_anywhere_leaves_the_old_checkpoint_or_the_new_one(tmp_path: Path, exists: bool) -> None:
    found, inodes = run_one(_every_end, str(tmp_path), exists)
    before = found.count("old" if exists else "none")
    assert found == ["old" if exists else "none"] * before + ["new"] * (len(found) - before)
    assert before > 10
    assert len(found) - before > (10 if exists else 1)
    assert inodes == ({0} if exists else set())  # the folder itself stays


def test_numbers_of_interrupted_checkpoints_are_found(tmp_path: Path) -> None:
    _save(tmp_path / "checkpoint_1", OLD)
    for number in (1, 2):
        _draft(tmp_path / f"checkpoint_{number}", NEW)[1].close()
    (tmp_path / "checkpoint_x").mkdir()
    found = numbered(tmp_path, "checkpoint_")
    assert found == [(number, tmp_path / f"checkpoint_{number}") for number in (1, 2)]
    assert [_files(folder) for _, folder in found] == [NEW, NEW]


def _half_replaced(directory: str) -> None:
    final = Path(directory) / "checkpoints/checkpoint_0"
    _save(final, OLD)
    draft, lock = _draft(final, NEW)
    lock.close()
    (draft / ".replaced").mkdir()
    os.rename(final / MANIFEST, draft / ".replaced" / MANIFEST)
    os.rename(draft / "model.bin", final / "model.bin")
    (draft / "only_new").write_bytes(b"")  # lost with the machine


def _load(directory: str, place: str | None) -> None:
    accelerator, _, _, _ = simple(project_dir=directory)
    accelerator.load_state(place)


def test_files_of_two_checkpoints_are_never_loaded(tmp_path: Path) -> None:
    final = tmp_path / "checkpoints/checkpoint_0"
    _half_replaced(str(tmp_path))
    (draft,) = drafts(final)
    told = f"{final} has no {MANIFEST}"
    for place, said in ((str(final), f"{told} (only {draft.name}, which is incomplete)"), (None, told)):
        ended = outcomes(_load, str(tmp_path), place, processes=1)[0]
        assert (ended.error, said in ended.message) == ("CheckpointError", True), ended
    discard(_start(final), final)  # a next save that fails keeps what tells so
    assert drafts(final) == [draft]
    _save(final, NEW)
    assert _files(final).items() >= NEW.items()
    assert drafts(final) == [draft]
    ours = _start(final)
    assert drafts(final) == [ours]


@pytest.fixture
def another(tmp_path: Path) -> Iterator[Callable[[Path, bool], Callable[[], None]]]:
    """Another run that writes a draft, and is ended by what is returned."""
    running: list[subprocess.Popen[bytes]] = []

    def start(final: Path, whole: bool) -> Callable[[], None]:
        code = f"""
import sys
from pathlib import Path
from tests.runtime.checkpoint.test_publish import NEW, _draft
from accel.checkpoint.directory import start_draft
draft, lock = _draft(Path({str(final)!r}), NEW) if {whole} else start_draft(Path({str(final)!r}))
print(draft, flush=True)
sys.stdin.read()
"""
        process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        running.append(process)
        assert process.stdout is not None
        assert process.stdout.readline()

        def end() -> None:
            process.kill()
            process.communicate()

        return end

    yield start
    for process in running:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("exists", [True, False])
def test_another_runs_draft_is_left_alone_until_it_is_given_up(
    tmp_path: Path, exists: bool, another: Callable[[Path, bool], Callable[[], None]]
) -> None:
    final = tmp_path / "here"
    if exists:
        _save(final, OLD)
    end = another(final, False)
    (theirs,) = drafts(final)
    ours = _start(final)
    assert set(drafts(final)) == {theirs, ours}
    end()
    ours = _start(final)
    assert drafts(final) == [ours]


def test_a_whole_draft_is_published_by_its_writer_while_it_lives(
    tmp_path: Path, another: Callable[[Path, bool], Callable[[], None]]
) -> None:
    final = tmp_path / "here"
    _save(final, OLD)
    end = another(final, True)
    assert recover(final) is None
    assert len(drafts(final)) == 1
    (final / "only_old").stat()
    end()
    (theirs,) = drafts(final)
    assert recover(final) == f"{final} was being replaced when its writer was killed: restored {theirs.name}"
    assert _files(final) == NEW


def test_without_locks_every_draft_was_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", refused)
    first, second = _start(tmp_path / "here"), _start(tmp_path / "here")
    assert first != second
    assert drafts(tmp_path / "here") == [second]


def test_a_file_system_that_cannot_rename_is_refused_as_a_save_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", refused)
        accelerator, _, _, _ = simple()
        with pytest.raises(CheckpointError) as raised:
            accelerator.save_state(tmp_path / "here")
    assert str(raised.value) == (
        f"saving {tmp_path / 'here'}: the file system of {tmp_path} cannot rename (Function not implemented): save on "
        "another, and copy from there"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[..., None]]:
    if os.geteuid() != 0:
        missing("root", "mounting needs it")
    places: list[str] = []

    def mount(place: Path, *options: str) -> None:
        place.mkdir(exist_ok=True)
        subprocess.run(["mount", *options, place], check=True)
        places.append(str(place))

    yield mount
    for place in reversed(places):
        subprocess.run(["umount", "--lazy", place], check=True)


def test_a_mount_point_holds_a_checkpoint(tmp_path: Path, mounted: Callable[..., None]) -> None:
    final = tmp_path / "disk"
    mounted(final, "-t", "tmpfs", "tmpfs")
    for files in (OLD, NEW):
        _save(final, files)
    assert _files(final) == NEW
    remove(final)
    assert list(final.iterdir()) == []


def test_a_folder_of_an_images_layer_holds_a_checkpoint(tmp_path: Path, mounted: Callable[..., None]) -> None:
    base, merged = tmp_path / "base", tmp_path / "merged"
    mounted(base, "-t", "tmpfs", "tmpfs")
    for name in ("upper", "work", "lower"):
        (base / name).mkdir()
    for name in ("here", "gone"):
        _save(base / "lower" / name, OLD)
    options = f"lowerdir={base}/lower,upperdir={base}/upper,workdir={base}/work"
    mounted(merged, "-t", "overlay", "overlay", "-o", options)
    with pytest.raises(OSError, match="cross-device"):
        os.rename(merged / "here", merged / "there")
    _save(merged / "here", NEW)
    assert _files(merged / "here") == NEW
    remove(merged / "gone")
    assert sorted(os.listdir(merged)) == ["here"]


def _in_the_current_directory(directory: str) -> list[str]:
    os.chdir(directory)
    accelerator, _, _, _ = simple()
    for _ in range(2):
        accelerator.save_state(".")
    accelerator.load_state(".")
    return sorted(os.listdir())


def test_the_current_directory_holds_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("the script itself")
    names = run_one(_in_the_current_directory, str(tmp_path))
    files = ["custom_checkpoint_0.pkl", "model.safetensors", "optimizer.bin", "random_states_0.pkl"]
    assert names == [MANIFEST, *files, "train.py"]
    assert (tmp_path / "train.py").read_text() == "the script itself"


def test_a_folder_in_the_way_of_a_file_is_named_and_nothing_changes(tmp_path: Path) -> None:
    final = tmp_path / "here"
    _save(final, OLD)
    (final / "only_new").mkdir()
    (final / "only_new" / "mine").write_bytes(b"mine")
    draft, lock = _draft(final, NEW)
    with pytest.raises(CheckpointError, match=f"^{final}/only_new is a directory, but the checkpoint has a file"):
        publish(draft, final, lock)
    lock.close()
    discard(draft, final)
    assert _files(final) == {**OLD, "only_new/mine": b"mine"}


def test_a_manifest_deletes_nothing_elsewhere(tmp_path: Path) -> None:
    final, other = tmp_path / "here", tmp_path / "other"
    other.write_bytes(b"mine")
    _save(final, OLD)
    listed = read_manifest(final)
    assert listed is not None
    digest = listed.files["model.bin"]
    (final / MANIFEST).unlink()
    write_manifest(final, Manifest(num_processes=1, files={"../other": digest, str(other): digest}))
    _save(final, NEW)
    assert other.exists()


# What is on the disk when the machine ends, and not only the process.


def _recorded(action: Callable[[], Any]) -> list[tuple[str, str]]:
    """The flushes and renames of ``action``, in order."""
    events: list[tuple[str, str]] = []
    fsync, rename, replace, unlink = os.fsync, os.rename, os.replace, os.unlink

    def flushed(file: int) -> None:
        events.append(("fsync", os.readlink(f"/proc/self/fd/{file}")))
        fsync(file)

    def moved(source: Any, target: Any) -> None:
        events.append(("from", os.fspath(source)))
        events.append(("to", os.fspath(target)))
        rename(source, target)

    def deleted(path: Any, **how: Any) -> None:
        events.append(("unlink", os.fspath(path)))
        unlink(path, **how)

    os.fsync, os.rename, os.replace, os.unlink = flushed, moved, moved, deleted  # type: ignore[assignment]
    try:
        action()
    finally:
        os.fsync, os.rename, os.replace, os.unlink = fsync, rename, replace, unlink
    return events


def _two_saves(directory: str) -> list[list[tuple[str, str]]]:
    accelerator, model, _, _ = simple()

    def hook(_: Any, __: Any, folder: str) -> None:
        (Path(folder) / "sub").mkdir()
        (Path(folder) / "sub" / "hook.txt").write_text("a hook's")

    accelerator.register_save_state_pre_hook(hook)
    place, folder = Path(directory) / "here", Path(directory) / "model"
    saves = [_recorded(lambda: accelerator.save_state(place)) for _ in range(2)]
    return [*saves, *(_recorded(lambda: accelerator.save_model(model, folder, "10B")) for _ in range(2))]


def test_everything_is_on_the_disk_before_what_names_it(tmp_path: Path) -> None:
    first, second, *models = run_one(_two_saves, str(tmp_path))
    place = str(tmp_path / "here")
    names = ["model.safetensors", "optimizer.bin", "random_states_0.pkl", "sub/hook.txt"]
    publishing = first.index(("to", place))
    draft = first[publishing - 1][1]
    for name in (*names, MANIFEST):
        assert ("fsync", f"{draft}/{name}") in first[:publishing]
    manifest = first.index(("fsync", f"{draft}/{MANIFEST}"))
    assert {("fsync", f"{draft}/{name}") for name in names} | {("fsync", f"{draft}/sub")} <= set(first[:manifest])
    assert ("fsync", draft) in first[manifest:publishing]
    assert ("fsync", str(tmp_path)) in first[publishing:]

    publishing = second.index(("to", f"{place}/{MANIFEST}"))
    draft = str(Path(second[publishing - 1][1]).parent)
    begun = second.index(("from", f"{place}/{MANIFEST}"))
    manifest = second.index(("fsync", f"{draft}/{MANIFEST}"))
    assert {("fsync", f"{draft}/{name}") for name in names} | {("fsync", f"{draft}/sub")} <= set(second[:manifest])
    assert ("fsync", draft) in second[manifest:begun]
    last = max(second.index(("to", f"{place}/{name}")) for name in names)
    assert {("fsync", place), ("fsync", f"{place}/sub")} <= set(second[last:publishing])
    assert ("fsync", place) in second[publishing:]

    index = str(tmp_path / "model/model.safetensors.index.json")
    folder = ("fsync", str(tmp_path / "model"))
    for events in models:
        shards = [number for number, (kind, path) in enumerate(events) if kind == "to" and path != index]
        published = events.index(("to", index))
        assert folder in events[events.index(("unlink", index)) : shards[0]]
        assert folder in events[shards[-1] : published]
        assert folder in events[published:]
        for number in (*shards, published):
            assert ("fsync", events[number - 1][1]) in events[: shards[0]]


# `save_model`


def _every_end_of_a_model(directory: str, before: str, after: str, safe_before: bool, safe: bool) -> list[str]:
    import torch

    sizes = {"one": 10**9, "two": 200, "three": 100}

    def state(value: float) -> dict[str, torch.Tensor]:
        return {f"w{n}": torch.full((20,), float(value)) for n in range(3)}

    found = []
    event = 0
    while True:
        folder = Path(directory) / str(event)
        if before != "none":
            save_weights(state(1), folder, sizes[before], safe_before)
        (folder / "config.json").parent.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text("{}")
        ended = _ends_at(event, lambda folder=folder: save_weights(state(2), folder, sizes[after], safe))  # type: ignore[misc]
        try:
            loaded = read_weights(folder)
            (value,) = {value for tensor in loaded.values() for value in tensor.tolist()}
            assert loaded.keys() == state(1).keys()
            found.append({1: "old", 2: "new"}[value])
        except CheckpointError:
            found.append("none")
        save_weights(state(2), folder, sizes[after], safe)
        count = {"one": 1, "two": 2, "three": 3}[after]
        names = [path.name for path in folder.iterdir() if not (safe and path.name.startswith("pytorch_model"))]
        assert len(names) == 1 + count + (count > 1), names
        assert (folder / "config.json").exists()
        shutil.rmtree(folder)
        if not ended:
            return found
        event += 1


_SIZES = ("one", "two", "three")
_CHANGES = [
    ("none", "one", True, True),
    ("one", "three", True, True),
    ("three", "two", True, True),
    ("one", "three", False, False),
    ("three", "two", True, False),
]
_OTHERS = [
    change
    for change in product(("none", *_SIZES), _SIZES, (True, False), (True, False))
    if change not in _CHANGES and (change[0] != "none" or change[2] is change[3])
]


@pytest.mark.parametrize(
    ("before", "after", "safe_before", "safe"),
    [*_CHANGES, *long(*_OTHERS)],
)
def test_a_model_loads_as_before_or_as_saved_or_not_at_all(
    tmp_path: Path, before: str, after: str, safe_before: bool, safe: bool
) -> None:
    ends = run_one(_every_end_of_a_model, str(tmp_path), before, after, safe_before, safe)
    kinds = [kind for number, kind in enumerate(ends) if number == 0 or ends[number - 1] != kind]
    replaced = before != "none" and (safe is not safe_before or before == after == "one")
    assert kinds == [*(["old"] if before != "none" else []), *([] if replaced else ["none"]), "new"]
