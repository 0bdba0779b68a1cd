"""Checkpoints of a job in a Google Cloud Storage bucket: the program around `accel launch` on each host.

Before the ranks start, it restores the newest checkpoint for which the bucket has every host's copy. It
uploads each checkpoint that they write, the manifest last. Nothing in the bucket is overwritten: each save has its own
folder,

    URI/PATH/SAVE/node-N/FILE

PATH is the checkpoint's path under ACCEL_PROJECT_ROOT (`accel.world.environment`), and SAVE the token that
all hosts' copies of one save have in their manifests.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..processes import as_exit_code, die_with_parent

MANIFEST, ROOT = "accel_manifest.json", "ACCEL_PROJECT_ROOT"  # as in accel
_DRAFT = re.compile(r"\..+\.(?:draft|old|gone)-[0-9a-f]{8}")
_NUMBERED = re.compile(r"checkpoint_(\d+)")
_NODE = re.compile(r"node-(\d+)")
_PAUSE_S = 1.0
_TRANSFER = {"worker_type": "thread", "max_workers": 4, "raise_exception": True}
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)


class BucketError(Exception):
    """An operation on the bucket failed. The message has one line."""


class Save(NamedTuple):
    """One save of a checkpoint, the same on all hosts."""

    path: str
    token: str

    def folder(self, node: int) -> str:
        return f"{self.path}/{self.token}/node-{node}"


class Bucket:
    """The objects under a URI. All methods raise BucketError."""

    def __init__(self, uri: str) -> None:
        self.uri = uri
        name, _, prefix = uri.removeprefix("gs://").partition("/")
        self._prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        from google.cloud import storage  # the host checks require it
        from google.cloud.storage.transfer_manager import download_many_to_path, upload_many_from_filenames

        self._download_many, self._upload_many = download_many_to_path, upload_many_from_filenames
        with self._translated_errors():
            self._bucket = storage.Client().bucket(name)

    def upload(self, folder: str, names: Sequence[str], directory: str) -> None:
        """Upload these files of a directory. Raises FileNotFoundError if one no longer exists."""
        with self._translated_errors(FileNotFoundError):
            self._upload_many(self._bucket, names, directory, f"{self._prefix}{folder}/", **_TRANSFER)

    def download(self, folder: str, names: Sequence[str], directory: str) -> None:
        """Download these files to a directory, which this creates."""
        with self._translated_errors():
            self._download_many(self._bucket, names, directory, f"{self._prefix}{folder}/", **_TRANSFER)

    def put_manifest(self, name: str, content: bytes, nodes: int) -> None:
        """Upload the manifest, which completes the copy of one of `nodes` hosts."""
        with self._translated_errors():
            blob = self._bucket.blob(self._prefix + name)
            blob.metadata = {"nodes": str(nodes)}
            blob.upload_from_string(content, "application/json")

    def read(self, name: str) -> bytes:
        with self._translated_errors():
            return bytes(self._bucket.blob(self._prefix + name).download_as_bytes())

    def sizes(self, folder: str = "") -> dict[str, int]:
        return {name: int(blob.size) for name, blob in self._blobs(folder)}

    def complete_saves(self) -> dict[Save, tuple[int, Any]]:
        """Return the saves with every host's copy: save -> (number of hosts, time of host 0's manifest)."""
        blobs_by_save: dict[Save, dict[int, Any]] = {}
        for name, blob in self._blobs(""):
            *path, token, folder, file = name.split("/") if name.count("/") > 2 else ("", "", "")
            node = _NODE.fullmatch(folder)
            if file == MANIFEST and node is not None and not {"", ".", ".."} & {*path, token}:
                blobs_by_save.setdefault(Save("/".join(path), token), {})[int(node[1])] = blob
        complete = {}
        for save, blobs in blobs_by_save.items():
            count = int(blobs[0].metadata["nodes"]) if 0 in blobs else 0
            if count and blobs.keys() >= set(range(count)):
                complete[save] = count, blobs[0].time_created
        return complete

    def _blobs(self, folder: str) -> Iterator[tuple[str, Any]]:
        prefix = f"{self._prefix}{folder}/" if folder else self._prefix
        with self._translated_errors():
            for blob in self._bucket.list_blobs(prefix=prefix):
                yield blob.name[len(self._prefix) :], blob

    @contextlib.contextmanager
    def _translated_errors(self, *passthrough: type[Exception]) -> Iterator[None]:
        """Raise BucketError for exceptions: Google's libraries raise many kinds of them, requests' among them."""
        try:
            yield
        except passthrough:
            raise
        except Exception as error:
            raise BucketError(f"{self.uri}: {type(error).__name__}: {' '.join(str(error).split())}") from error


def restore(bucket: Bucket, root: str, node: int) -> list[str]:
    """Restore the newest complete checkpoint of each project, and those with names of their own, to this host.

    Checkpoints that the host has stay. Returns the paths of the restored ones. Raises BucketError.
    """
    newest: dict[str, tuple[tuple[int, Any], Save, int]] = {}
    for save, (nodes, completed_at) in bucket.complete_saves().items():
        parent, _, name = save.path.rpartition("/")
        number = _NUMBERED.fullmatch(name)
        key = f"{parent}/checkpoint_" if number else save.path
        order = (int(number[1]) if number else 0, completed_at)
        if key not in newest or order > newest[key][0]:
            newest[key] = order, save, nodes
    return [save.path for _, save, nodes in newest.values() if _restore_save(bucket, root, node, save, nodes)]


def _restore_save(bucket: Bucket, root: str, node: int, save: Save, nodes: int) -> bool:
    # A host beyond the number of hosts that saved has no copy: it restores node 0's.
    source_node, base = (node, _node_folder(root, node)) if node < nodes else (0, root)
    destination = os.path.join(base, *save.path.split("/"))
    if os.path.lexists(destination):
        return False
    draft = os.path.join(os.path.dirname(destination), f".{os.path.basename(destination)}.draft-{save.token}")
    shutil.rmtree(draft, ignore_errors=True)
    folder = save.folder(source_node)
    manifest = bucket.read(f"{folder}/{MANIFEST}")
    sizes = _files(manifest)
    bucket.download(folder, list(sizes), draft)
    for name, size in sizes.items():
        if os.path.getsize(os.path.join(draft, name)) != size:
            raise BucketError(f"{bucket.uri}: {folder}/{name} does not have the {size} bytes of its manifest")
    Path(draft, MANIFEST).write_bytes(manifest)  # last: a draft with its manifest counts as complete
    os.rename(draft, destination)
    return True


class Uploads:
    """The uploader of this host's checkpoints, as they become complete."""

    def __init__(self, bucket: Bucket, root: str, node: int, nodes: int) -> None:
        self._bucket, self._node, self._nodes = bucket, node, nodes
        self._own_folder = _node_folder(root, node)
        self._done: set[Save] = set()

    def run(self, finished: threading.Event) -> None:
        """Upload until `finished` is set, and once more."""
        while not finished.wait(_PAUSE_S):
            self.upload_new()
        self.upload_new()

    def upload_new(self) -> None:
        """Upload new checkpoints, the oldest first. Failures are retried the next time."""
        for folder in self._complete_folders():
            try:
                content = Path(folder, MANIFEST).read_bytes()
                path = os.path.relpath(folder, self._own_folder).replace(os.sep, "/")
                save = Save(path, str(json.loads(content)["save"]))
                if save not in self._done:
                    self._upload(save, folder, content)
            except (FileNotFoundError, ValueError, KeyError):
                continue  # it has been replaced, or removed, in the meantime
            except BucketError as error:
                log(f"{os.path.basename(folder)} is not in the bucket yet: {error}")

    def _upload(self, save: Save, folder: str, content: bytes) -> None:
        destination = save.folder(self._node)
        sizes = self._bucket.sizes(destination)
        if f"{destination}/{MANIFEST}" not in sizes:
            pending = [name for name, size in _files(content).items() if sizes.get(f"{destination}/{name}") != size]
            self._bucket.upload(destination, pending, folder)
            if Path(folder, MANIFEST).read_bytes() != content:
                return  # another save took its place: files of both may have been read
            self._bucket.put_manifest(f"{destination}/{MANIFEST}", content, self._nodes)
        self._done.add(save)

    def _complete_folders(self) -> list[str]:
        """Return the folders of complete checkpoints, by the time of completion."""
        folders = []
        for folder, subfolders, files in os.walk(self._own_folder):
            if self._node == 0 and folder == self._own_folder:
                subfolders[:] = [name for name in subfolders if not _NODE.fullmatch(name)]
            subfolders[:] = [name for name in subfolders if not _DRAFT.fullmatch(name)]
            if MANIFEST in files:
                with contextlib.suppress(OSError):  # it was removed in the meantime
                    folders.append((os.path.getmtime(os.path.join(folder, MANIFEST)), folder))
        return [folder for _, folder in sorted(folders)]


def _node_folder(root: str, node: int) -> str:
    return os.path.join(root, f"node-{node}") if node else root


def _files(manifest: bytes) -> dict[str, int]:
    """Return the files in a manifest, with their lengths. Raises ValueError."""
    sizes = {str(name): int(entry["bytes"]) for name, entry in json.loads(manifest)["files"].items()}
    if any({"", ".", ".."} & set(name.split("/")) for name in sizes):
        raise ValueError("a manifest names a file outside of its checkpoint")
    return sizes


@functools.cache
def log(text: str) -> None:
    """Print a line, once: uploads are retried each second."""
    print(f"accel: checkpoints: {text}", file=sys.stderr, flush=True)


def run(command: Sequence[str], uploads: Uploads) -> int:
    """Run the launcher to its end. Return its exit code once its checkpoints are in the bucket."""
    parent = os.getpid()

    def enter() -> None:
        die_with_parent(signal.SIGTERM, parent)
        for signum in _WARNINGS:  # must not end a launcher that does not handle them yet
            signal.signal(signum, signal.SIG_IGN)

    finished = threading.Event()
    launcher = subprocess.Popen(command, preexec_fn=enter)
    for signum in _FORWARDED:
        signal.signal(signum, lambda received, _: launcher.send_signal(received))
    uploading = threading.Thread(target=uploads.run, args=(finished,))
    uploading.start()
    code = launcher.wait()
    finished.set()
    uploading.join()
    return as_exit_code(code)


def main() -> int:
    """Restore, launch and upload. Arguments: the URI, and Python's own: `accel launch` with its flags."""
    uri, *launch = sys.argv[1:]
    os.environ.pop("ACCEL_JOB_SLOTS", None)  # this process holds these descriptors while the launcher runs
    uri = uri.replace("{id}", os.environ["ACCEL_JOB_ID"])
    root = os.environ.setdefault(ROOT, os.path.join(os.environ["ACCEL_JOB_DIR"], "checkpoints"))
    node, nodes = (int(launch[launch.index(flag) + 1]) for flag in ("--machine_rank", "--num_machines"))
    try:
        bucket = Bucket(uri)
        for path in restore(bucket, root, node):
            log(f"{path} is restored from {uri}")
    except (BucketError, OSError, ValueError, KeyError) as error:
        log(str(error))
        return 1
    return run([sys.executable, *launch], Uploads(bucket, root, node, nodes))
