"""A training job of the SageMaker endpoint: its states, from Starting to the artefacts in S3."""

from __future__ import annotations

import math
import signal
import tarfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from tests.needs import package

from .netns import Network
from .sagemaker_instances import Checkpoints, DataError, Instance, download, log_events, upload
from .sagemaker_validation import not_valid

_POLL_S = 0.05
_DAY_S = 24 * 3600
_SPOT_PRICE = 0.4
_MESSAGES = {
    "Starting": "Preparing the instances for training",
    "Downloading": "Downloading input data",
    "Training": "Training image download completed. Training in progress.",
    "Stopping": "Stopping the training job",
    "Interrupted": "Training job interrupted. Spot capacity was reclaimed.",
    "Restarting": "Restarting the training job after an internal error",
    "Uploading": "Uploading generated training model",
    "Completed": "Training job completed",
    "Stopped": "Training job stopped",
    "MaxRuntimeExceeded": "Training job runtime exceeded MaxRuntimeInSeconds provided",
    "MaxWaitTimeExceeded": "Training job exceeded MaxWaitTimeInSeconds provided",
}
NO_CAPACITY = "Insufficient capacity error from EC2 while launching instances, retrying!"
_INTERNAL = "InternalServerError: We encountered an internal error. Please try again."


class Place(Protocol):
    """What a job needs of the endpoint that runs it."""

    grace_s: float
    capacity: bool
    network: Network

    def aws(self, service: str, region: str) -> Any: ...
    def take_index(self) -> int: ...
    def free_index(self, index: int) -> None: ...
    def container_env(self, region: str) -> dict[str, str]: ...


@dataclass
class Order:
    """What ends an attempt from outside: Stopped, Interrupted, Restarting (an internal error), or a limit of time."""

    kind: str
    files: int | None = None  # how many checkpoint files are still copied to S3
    warn: bool = True  # SIGTERM and the grace period before SIGKILL


class _Ended(Exception):
    """The job has ended before its containers started."""


@dataclass
class TrainingJob:
    """All of a job. Its thread alone changes it; `order` is how others ask for that."""

    request: Mapping[str, Any]
    arn: str
    region: str
    place: Place
    created: float = field(default_factory=lambda: round(time.time(), 3))
    status: str = "InProgress"
    transitions: list[dict[str, Any]] = field(default_factory=list)
    reason: str | None = None
    order: Order | None = None
    instances: list[Instance] = field(default_factory=list)
    checkpoints: list[Checkpoints] = field(default_factory=list)
    _trained_s: float = 0.0
    _started: float | None = None
    _ended: float | None = None
    _epoch: int = 0  # of the newest log streams
    _restarts: int = 0
    _held: list[Callable[[], None]] | None = None  # log events that nobody sees yet
    _lock: threading.RLock = field(default_factory=threading.RLock)  # what readers see at once

    def __post_init__(self) -> None:
        self._enter("Starting")
        self.thread = threading.Thread(target=self._run, name=self.name, daemon=True)
        self.thread.start()

    @property
    def name(self) -> str:
        return str(self.request["TrainingJobName"])

    @property
    def secondary(self) -> str:
        return str(self.transitions[-1]["Status"])

    @property
    def modified(self) -> float:
        last = self.transitions[-1]
        return float(last.get("EndTime", last["StartTime"]))

    def stop(self) -> None:
        with self._lock:
            if self.status != "InProgress":
                raise not_valid(f"The request was rejected because the training job is in status {self.status}.")
            self.status, self.order = "Stopping", Order("Stopped")

    def summary(self) -> dict[str, Any]:
        with self._lock:
            return {
                "TrainingJobName": self.name,
                "TrainingJobArn": self.arn,
                "CreationTime": self.created,
                "LastModifiedTime": self.modified,
                "TrainingJobStatus": self.status,
                "SecondaryStatus": self.secondary,
            } | ({"TrainingEndTime": self._ended} if self._ended is not None else {})

    def describe(self) -> dict[str, Any]:
        with self._lock:
            echoed = {key: value for key, value in self.request.items() if key != "Tags"}
            echoed.setdefault("StoppingCondition", {"MaxRuntimeInSeconds": _DAY_S})
            # Where the model is, or would be: jobs without one have this too.
            echoed["ModelArtifacts"] = {"S3ModelArtifacts": self._target("model")}
            optional: dict[str, Any] = {"TrainingStartTime": self._started, "FailureReason": self.reason}
            if self._ended is not None and self._started is not None:
                billed = self._trained_s * (_SPOT_PRICE if self.request.get("EnableManagedSpotTraining") else 1.0)
                optional["TrainingTimeInSeconds"] = math.ceil(self._trained_s)
                optional["BillableTimeInSeconds"] = math.ceil(billed)
            transitions = {"SecondaryStatusTransitions": [dict(entry) for entry in self.transitions]}
            return {**echoed, **self.summary(), **transitions} | {k: v for k, v in optional.items() if v is not None}

    def _enter(self, secondary: str, message: str = "") -> None:
        now = round(time.time(), 3)
        if self.transitions:
            self.transitions[-1]["EndTime"] = now
        text = message or _MESSAGES[secondary]
        self.transitions.append({"Status": secondary, "StartTime": now, "StatusMessage": text})

    def _end(self, status: str, secondary: str, reason: str | None = None) -> None:
        with self._lock:
            self._enter(secondary, reason or "")
            self._ended = self.transitions[-1]["EndTime"] = self.transitions[-1]["StartTime"]
            self.status, self.reason = status, reason

    def _run(self) -> None:
        try:
            while True:
                with self._rented():
                    if self._attempt():
                        return
        except _Ended:
            pass
        except DataError as error:
            self._end("Failed", "Failed", f"ClientError: {error}")
        except Exception as error:
            traceback.print_exc()
            self._end("Failed", "Failed", f"{_INTERNAL} {type(error).__name__}: {error}"[:1024])

    def _attempt(self) -> bool:
        """Run all containers once. Returns True when the job has ended."""
        self._enter("Downloading")
        self._download()
        self._end_when_ordered()
        self._enter("Training")
        began = time.time()
        self._started = self._started or round(began, 3)
        self._start_containers()
        outcome, failed = self._watch(began)
        self._trained_s += time.time() - began
        for instance in self.instances:
            instance.finish()
        for checkpoints in self.checkpoints:
            checkpoints.end(outcome.files if outcome is not None else None)
        if outcome is not None and outcome.kind == "Restarting":
            self._restarts += 1
            if self._restarts > self.request.get("RetryStrategy", {}).get("MaximumRetryAttempts", 0):
                self._end("Failed", "Failed", _INTERNAL)
                return True
        if outcome is not None and outcome.kind in ("Interrupted", "Restarting"):
            self._enter(outcome.kind)
            return False
        self._enter("Uploading")
        self._upload(model=failed is None)
        if failed is not None:
            self._end("Failed", "Failed", self._algorithm_error(failed))
        elif outcome is not None:
            self._end("Stopped", outcome.kind)
        else:
            self._end("Completed", "Completed")
        return True

    @contextmanager
    def _rented(self) -> Iterator[None]:
        """Instances for one attempt, once there is capacity."""
        if self.secondary != "Starting":
            self._enter("Starting")
        while not self.place.capacity:
            if self.transitions[-1]["StatusMessage"] != NO_CAPACITY:
                self._enter("Starting", NO_CAPACITY)
            self._end_when_ordered()
            time.sleep(_POLL_S)
        self._end_when_ordered()
        number = 0
        for group, instance_type, count in _groups(self.request["ResourceConfig"]):
            for _ in range(count):
                number += 1
                index = self.place.take_index()
                self.instances.append(Instance(self.place.network, index, number, group, instance_type))
        try:
            yield
        finally:
            ended, self.instances, self.checkpoints = self.instances, [], []
            for instance in ended:
                instance.end()
                self.place.free_index(instance.machine.index)

    def _end_when_ordered(self) -> None:
        """For the time without containers. An interruption then means nothing."""
        order = self.order or self._limit(0.0)
        if order is not None and order.kind not in ("Interrupted", "Restarting"):
            if order.kind == "Stopped":
                self._enter("Stopping")
            self._end("Stopped", order.kind)
            raise _Ended

    def _limit(self, running_s: float) -> Order | None:
        condition = self.request.get("StoppingCondition", {})
        if self._trained_s + running_s > condition.get("MaxRuntimeInSeconds", _DAY_S):
            return Order("MaxRuntimeExceeded")
        if time.time() - self.created > condition.get("MaxWaitTimeInSeconds", math.inf):
            return Order("MaxWaitTimeExceeded")
        return None

    def _download(self) -> None:
        filesystems = {}
        channels = self.request.get("InputDataConfig", [])
        for channel in channels:
            source = channel["DataSource"].get("FileSystemDataSource")
            if source is not None:
                box = self.place.network.slot.box / "filesystems" / source["FileSystemId"]
                filesystems[channel["ChannelName"]] = Path(f"{box}/{source['DirectoryPath']}")
        for path in filesystems.values():
            path.mkdir(parents=True, exist_ok=True)

        def prepare(position: int) -> None:
            instance = self.instances[position]
            instance.prepare(self.instances, filesystems)
            instance.configure(self.instances, self.request)
            for channel in channels:
                if channel["ChannelName"] not in filesystems:
                    self._download_channel(instance, channel, position)
            if (checkpoint := self.request.get("CheckpointConfig")) is not None:
                with _data_errors("download"):
                    download(self._s3, checkpoint["S3Uri"], instance.ml / "checkpoints")

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(prepare, range(len(self.instances))))

    def _download_channel(self, instance: Instance, channel: Mapping[str, Any], position: int) -> None:
        source = channel["DataSource"]["S3DataSource"]
        mode = channel.get("InputMode", self.request["AlgorithmSpecification"]["TrainingInputMode"])
        if source["S3DataType"] != "S3Prefix" or mode == "Pipe":
            raise DataError(f"The tests' endpoint has no {source['S3DataType']} in mode {mode}")
        sharded = source.get("S3DataDistributionType") == "ShardedByS3Key"
        share = (position, len(self.instances)) if sharded else (0, 1)
        directory = instance.ml / "input/data" / channel["ChannelName"]
        directory.mkdir()
        with _data_errors("download"):
            if not download(self._s3, source["S3Uri"], directory, share):
                raise DataError(
                    f'Data download failed:No S3 objects found under S3 URL "{source["S3Uri"]}" given in input data '
                    "source. Please ensure that the bucket exists in the selected region, that objects exist under "
                    'that S3 prefix, and that the role has "s3:ListBucket" permissions on the bucket.'
                )

    def _start_containers(self) -> None:
        algorithm = self.request["AlgorithmSpecification"]
        command = [*algorithm.get("ContainerEntrypoint", ["train"]), *algorithm.get("ContainerArguments", [])]
        isolated = self.request.get("EnableNetworkIsolation", False)
        env = {"TRAINING_JOB_NAME": self.name, "TRAINING_JOB_ARN": self.arn, "AWS_REGION": self.region}
        # An isolated container has no credentials and reaches no service.
        env |= {} if isolated else self.place.container_env(self.region)
        env |= self.request.get("Environment", {})
        logs = self.place.aws("logs", self.region)
        self._epoch = max(int(time.time()), self._epoch + 1)
        for instance in self.instances:
            show = log_events(logs, f"{self.name}/{instance.host}-{self._epoch}")
            instance.run(command, env, partial(self._log, show))
        if (checkpoint := self.request.get("CheckpointConfig")) is not None:
            self.checkpoints = [
                Checkpoints(self._s3, i.ml / "checkpoints", checkpoint["S3Uri"]) for i in self.instances
            ]

    def _log(self, show: Callable[[list[bytes], float], None], lines: list[bytes]) -> None:
        with self._lock:
            if self._held is None:
                show(lines, time.time())
            else:
                self._held.append(partial(show, lines, time.time()))

    def hold_logs(self, held: bool) -> None:
        """Hide what the containers print from now on, or show it, with the times at which it was printed."""
        with self._lock:
            for show in self._held or ():
                show()
            self._held = [] if held else None

    def _watch(self, began: float) -> tuple[Order | None, Instance | None]:
        """Wait until all containers have ended, or end them: on order, or when one has failed, which is returned."""
        while True:
            codes = [instance.exit_code() for instance in self.instances]
            failed = next((i for i, code in zip(self.instances, codes, strict=True) if code), None)
            if None not in codes:
                return None, failed
            order = self.order or self._limit(time.time() - began)
            if order is not None and order.kind != "Stopped":
                self.order = None
            if order is not None:
                if order.kind == "Stopped":
                    self._enter("Stopping")
                self._stop_containers(order.warn)
                return order, None
            if failed is not None:
                self._stop_containers(True)
                return None, failed
            time.sleep(_POLL_S)

    def _stop_containers(self, warn: bool) -> None:
        if warn:
            for instance in self.instances:
                instance.signal(signal.SIGTERM)
            began = time.monotonic()
            while time.monotonic() - began < self.place.grace_s and any(i.exit_code() is None for i in self.instances):
                time.sleep(_POLL_S)
        for instance in self.instances:
            instance.signal(signal.SIGKILL)

    def _upload(self, *, model: bool) -> None:
        """What all hosts wrote, as one archive each; of a name that several wrote, the first host's."""
        directories = {"output": "output/data", **({"model": "model"} if model else {})}
        for name, directory in directories.items():
            files: dict[str, Path] = {}
            for instance in reversed(self.instances):
                root = instance.ml / directory
                files |= {str(path.relative_to(root)): path for path in sorted(root.rglob("*"))}
            if not files:
                continue
            with _data_errors("upload"):
                target = self._target(name)
                if target.endswith("/"):
                    for relative, path in files.items():
                        if path.is_file():
                            upload(self._s3, path, target + relative)
                else:
                    archive = self.instances[0].machine.own / f"{name}.tar.gz"
                    with tarfile.open(archive, "w:gz", compresslevel=1) as tar:
                        for relative, path in files.items():
                            tar.add(path, relative, recursive=False)
                    upload(self._s3, archive, target)

    def _target(self, name: str) -> str:
        """The URL of an archive, or of a prefix where the output is not compressed."""
        output = self.request["OutputDataConfig"]
        base = f"{output['S3OutputPath'].rstrip('/')}/{self.name}/output"
        if output.get("CompressionType") == "NONE":
            return f"{base}/{'data' if name == 'output' else name}/"
        return f"{base}/{name}.tar.gz"

    def _algorithm_error(self, failed: Instance) -> str:
        texts = []
        for instance in [failed, *self.instances]:
            path = instance.ml / "output/failure"
            if path.is_file():
                texts.append(path.read_text(errors="replace")[:1024])
        return f"AlgorithmError: {texts[0] if texts else ''}, exit code: {failed.exit_code()}"

    @property
    def _s3(self) -> Any:
        return self.place.aws("s3", self.region)


@contextmanager
def _data_errors(what: str) -> Iterator[None]:
    exceptions = package("botocore.exceptions")
    transfer = package("boto3.exceptions")
    try:
        yield
    except (exceptions.ClientError, transfer.S3UploadFailedError) as error:
        kind = "Data download failed" if what == "download" else "Artifact upload failed"
        text = str(error)
        code = "NoSuchBucket" if "NoSuchBucket" in text else "AccessDenied" if "AccessDenied" in text else "Error"
        raise DataError(f"{kind}:{code}: {text.rpartition(': ')[2]}") from error


def _groups(resources: Mapping[str, Any]) -> list[tuple[str, str, int]]:
    """Name, instance type and number of each group of instances."""
    if resources.get("InstanceGroups"):
        groups: Sequence[Mapping[str, Any]] = resources["InstanceGroups"]
        return [(group["InstanceGroupName"], group["InstanceType"], group["InstanceCount"]) for group in groups]
    chosen = resources["InstancePreferences"][0] if "InstancePreferences" in resources else resources
    count = chosen.get("InstanceCount", resources.get("InstanceCount", 1))
    return [("homogeneousCluster", chosen["InstanceType"], count)]
