"""Pack a job's code and put it where its pods fetch it: ConfigMaps, a claim, or an object store."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ..errors import SchedulerError, SubmitError, Unreachable
from ..job import JobSpec
from ..printable import one_line
from ..store import object_store, snapshot
from . import submit
from .client.api import Api, hang_up
from .client.errors import ApiError, Forbidden, NotFound
from .manifests import build
from .manifests import code_delivery as delivery
from .manifests.code_delivery import Code, Object
from .options import KubernetesOptions, ObjectStore
from .status import reasons

logger = logging.getLogger(__name__)

# Pack and upload.


def pack(
    spec: JobSpec, options: KubernetesOptions, home: Path, previous_digest: str | None
) -> tuple[str | None, bytes | None]:
    """Return the digest of the code directory and the packed code, or (None, None) if the image has the code.

    `previous_digest`: the digest of an earlier submit, reused if its snapshot exists. Raises SnapshotError.
    """
    if options.code == "image":
        return None, None
    digest, path = previous_digest, home / "snapshots" / f"{previous_digest}.tar"
    if digest is None or not path.exists():
        packed = snapshot.pack(Path(spec.code), home)
        digest, path = packed.digest, packed.path
    try:
        return digest, snapshot.compress(path).read_bytes()
    except OSError as error:
        raise SubmitError(f"{path}: {(error.strerror or str(error)).lower()}") from None


def upload(api: Api, spec: JobSpec, options: KubernetesOptions, job_id: str, data: bytes | None) -> Code:
    """Upload the code unless the job's own objects carry it. Raises SpecError, SubmitError, Unreachable."""
    if data is None:
        return Code(kind="image")
    code = delivery.choose_delivery(options, len(data), delivery.digest_of(data), api.target)
    if code.kind == "pvc":
        put_in_claim(api, build.loader_pod(spec, options, job_id, api.target), code, data)
    if code.kind == "store" and options.code_store is not None:
        put_in_object_store(options.code_store, code, data, api.target)
    return code


# Object stores with the S3 API. Files are named by the code's digest, so existing code is not uploaded again.


def put_in_object_store(store: ObjectStore, code: Code, data: bytes, target: str) -> None:
    """Upload the code with our credentials, unless it exists there. Raises SubmitError."""
    subject = f"target {target}: code_store {store.url}"
    try:
        import boto3
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError, ClientError
    except ImportError:
        raise SubmitError(f"{subject}: the package boto3 is not installed: pip install 'accel-launch[s3]'") from None
    parts = urlsplit(store.url)
    key = "/".join([*(segment for segment in parts.path.split("/") if segment), code.file])
    config = Config(retries={"mode": "standard", "max_attempts": 3}, connect_timeout=10, read_timeout=60)
    try:
        # Not the package's default session, which caches credentials forever.
        client = boto3.Session().client("s3", endpoint_url=store.endpoint, region_name=store.region, config=config)
        object_store.put_content(client, parts.netloc, key, data)
    except ClientError as error:
        details = error.response.get("Error", {})
        raise SubmitError(f"{subject}: {details.get('Code')}: {details.get('Message') or error}") from None
    except (BotoCoreError, ValueError) as error:
        raise SubmitError(f"{subject}: {' '.join(str(error).split())}") from None


# PersistentVolumeClaims, written through a pod that mounts them. Files are named by the code's digest.

_START_S = 600.0  # to attach a volume and pull an image
_PAUSE_S = 0.25
_REPORT_S = 5.0  # between warnings about a pod that does not start
_IDLE_S = 60.0
_CHUNK = 256 << 10
_STDOUT, _STDERR = 1, 2

# Runs in the pod. Exec cannot close the input alone, so the program gets the length. It renames the complete file.
READER = """\
import hashlib, os, sys, time
path, size = sys.argv[1], int(sys.argv[2])
digest = os.path.basename(path).split(".")[0]
if os.path.exists(path) and os.path.getsize(path) == size:
    print("there", flush=True)
    sys.exit(0)
for name in os.listdir(os.path.dirname(path)):
    old = os.path.join(os.path.dirname(path), name)
    # Left by a killed reader; no other file has this suffix.
    if name.endswith(".part") and time.time() - os.path.getmtime(old) > 3600:
        os.unlink(old)
part = "%s.%s.part" % (path, os.urandom(4).hex())
try:
    received = hashlib.sha256()
    with open(part, "wb") as out:
        print("send", flush=True)
        while size:
            data = sys.stdin.buffer.read1(min(size, 1 << 20))
            if not data:
                raise SystemExit("accel: the code ended %d bytes early" % size)
            received.update(data)
            out.write(data)
            size -= len(data)
        out.flush()
        os.fsync(out.fileno())
    if received.hexdigest() != digest:
        raise SystemExit("accel: the code was damaged in transit")
    os.chmod(part, 0o444)
    os.rename(part, path)
    print("done", flush=True)
except OSError as error:
    raise SystemExit("accel: %s: %s" % (error.filename or path, error.strerror))
finally:
    if os.path.exists(part):
        os.unlink(part)
"""


def put_in_claim(api: Api, pod: Object, code: Code, data: bytes) -> None:
    """Upload the code to the claim and delete the pod. Raises SubmitError, and Unreachable when interrupted."""
    check_claim(api, pod)
    loader = _LoaderPod(api, pod)
    try:
        loader.wait_until_running()
        mount = pod["spec"]["containers"][0]["volumeMounts"][0]["mountPath"]
        python = pod["spec"]["containers"][0]["command"][0]
        argv = [python, "-c", READER, f"{mount}/{code.file}", str(len(data))]
        _send(api, pod["metadata"]["name"], argv, data)
    except ApiError as error:
        problem = loader.end_reason() or str(error).removeprefix(f"{api.label}: ")
        raise submit.create_rejected(error, loader.label + problem) from None
    finally:
        with contextlib.suppress(SchedulerError):
            submit.delete(api, pod)


def check_claim(api: Api, pod: Object) -> None:
    """Raise SubmitError if the claim does not exist: the pod would wait for it forever."""
    claim = str(pod["spec"]["volumes"][0]["persistentVolumeClaim"]["claimName"])
    try:
        api.call("GET", api.path("v1", "persistentvolumeclaims", claim))
    except NotFound:
        raise SubmitError(f"{api.label}: code_claim: no claim {claim} in namespace {api.namespace}") from None
    except Forbidden:
        pass  # the pod reports it


class _LoaderPod:
    """The pod that uploads the code. While it does not start, each new reason is logged: a start may take minutes."""

    def __init__(self, api: Api, pod: Object) -> None:
        self._api, self._manifest, self._path = api, build.with_digest(pod), submit.path_of(api, pod)
        self.label = f"{api.label}: the pod {pod['metadata']['name']}, which uploads the code to the claim: "
        self._deadline = time.monotonic() + _START_S
        self._last_report, self._next_report = "", time.monotonic() + _REPORT_S

    def wait_until_running(self) -> None:
        """Wait until the pod runs, also one of an earlier submit. Recreate a pod that has ended, once."""
        recreated = False
        live = self._create()
        while (phase := (live.get("status") or {}).get("phase")) != "Running":
            finished = phase in ("Succeeded", "Failed")
            problem = _obstacle(live) if not finished or recreated else None
            if problem is None and time.monotonic() > self._deadline:
                problem = self._describe(live, f"it has not started in {_START_S:g} s")
            if problem is not None:
                raise SubmitError(self.label + problem)
            if finished:
                recreated = True
                with contextlib.suppress(NotFound):
                    self._api.call("DELETE", self._path, query={"gracePeriodSeconds": "0"})
            else:
                self._report(live)
                time.sleep(_PAUSE_S)
            existing = None if finished else self._api.get_or_none(self._path)
            live = self._create() if existing is None else existing

    def end_reason(self) -> str | None:
        """Return the reason why a pod that has run no longer does, or None."""
        with contextlib.suppress(ApiError, Unreachable):
            return _obstacle(self._api.call("GET", self._path))
        return None

    def _create(self) -> Mapping[str, Any]:
        while True:
            try:
                return submit.create(self._api, self._manifest)
            except submit.BeingDeleted:
                if time.monotonic() > self._deadline:
                    raise
                time.sleep(_PAUSE_S)

    def _report(self, live: Mapping[str, Any]) -> None:
        if time.monotonic() < self._next_report:
            return
        self._next_report = time.monotonic() + _REPORT_S
        message = self._describe(live, "it has not started yet")
        if message != self._last_report:
            self._last_report = message
            logger.warning("%s", one_line(self.label + message))

    def _describe(self, live: Mapping[str, Any], summary: str) -> str:
        """Return `summary` with the reason that the pod's status or, failing that, its events give."""
        from .status import job_states, watch

        query = {"fieldSelector": f"{watch.WARNINGS},involvedObject.name={self._manifest['metadata']['name']}"}
        events: list[dict[str, Any]] = []
        with contextlib.suppress(ApiError, Unreachable):
            events += self._api.items(self._api.path("v1", "events"), query)
        _, detail = next(iter(job_states.waiting_reason(live, events)), (None, ""))
        return f"{summary}: {detail}" if detail else summary


def _obstacle(pod: Mapping[str, Any]) -> str | None:
    """Return the reason why the pod certainly cannot run, or None."""
    for container in (pod.get("status") or {}).get("containerStatuses") or []:
        state = container.get("state") or {}
        reason = str((state.get("waiting") or {}).get("reason") or "")
        # The kubelet retries a failed pull.
        if reason != "ErrImagePull" and reasons.WAITING.get(reason, ("", ""))[1]:
            return (
                f"{reasons.WAITING[reason][1]}: {container.get('image')}: {state['waiting'].get('message') or reason}"
            )
        end = state.get("terminated")
        if end:
            return f"it ended: {end.get('message') or end.get('reason')} (exit code {end.get('exitCode')})"
    return "it ended" if (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed") else None


def _send(api: Api, pod: str, argv: list[str], data: bytes) -> None:
    client = api.connect(pod, argv, container="loader", stdin=True)
    from websocket import WebSocketException  # installed, since there is a connection

    replies = _ExecReader(client, api)
    try:
        if replies.expect(b"there", b"send") == b"send":
            for offset in range(0, len(data), _CHUNK):
                client.write_channel(0, data[offset : offset + _CHUNK])
            replies.expect(b"done")
    except (OSError, WebSocketException) as error:
        raise api.unreachable(error) from None
    finally:
        with contextlib.suppress(OSError, WebSocketException):
            hang_up(client)


class _ExecReader:
    """The output of the program in the pod."""

    def __init__(self, client: Any, api: Api) -> None:
        self._client = client
        self._api = api
        self._out = b""
        self._error = b""

    def expect(self, *lines: bytes) -> bytes:
        """Return the next line, one of these. Raises SubmitError for another, and Unreachable."""
        reply = self._line()
        if reply not in lines:
            raise SubmitError(f"{self._api.label}: cannot upload the code to the claim: {self._problem(reply)}")
        return reply

    def _line(self) -> bytes:
        """Return the next line, empty at the end of output. Raises Unreachable if none comes within a minute."""
        deadline = time.monotonic() + _IDLE_S
        while b"\n" not in self._out:
            if not self._client.is_open():
                return b""
            if time.monotonic() > deadline:
                raise Unreachable(f"{self._api.label}: the pod that uploads the code to the claim does not respond")
            self._client.update(timeout=1)
            self._read_channels()
        line, _, self._out = self._out.partition(b"\n")
        return line.strip()

    def _read_channels(self) -> None:
        self._out += self._client.read_channel(_STDOUT)
        self._error += self._client.read_channel(_STDERR)

    def _problem(self, reply: bytes) -> str:
        while self._client.is_open():
            started_at = time.monotonic()
            self._client.update(timeout=1)
            if time.monotonic() - started_at >= 1:
                break
        self._read_channels()
        text = self._error or reply or b"it ended without output"
        return " ".join(text.decode("utf-8", "replace").split()).removeprefix("accel: ")
