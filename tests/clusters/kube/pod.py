"""The life of one pod on a node of the tests, and what is said of it: as a kubelet and its runtime do."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ..netns import ClusterError
from . import podspec
from .client import Object, Refused
from .logs import ContainerLog
from .podspec import NotYet, Surroundings
from .sandbox import Container, Program, Sandbox
from .watch import Events, stamp

_RETRY_S = 0.3
_LONGEST_BACKOFF_S = 3.0
_DEFAULT_GRACE_S = 30
_READ = 65536


@dataclass
class Instance:
    """One container of the description, over all its starts."""

    spec: Object
    init: bool = False
    restarts: int = 0
    state: Object | None = None
    last: Object | None = None
    running: Container | None = None
    killed_for: str = ""  # a word that stands for `Error`
    log: ContainerLog | None = None
    previous: ContainerLog | None = None

    @property
    def name(self) -> str:
        return str(self.spec["name"])

    @property
    def terminated(self) -> Object | None:
        found = (self.state or {}).get("terminated")
        return found if isinstance(found, dict) else None

    def status(self) -> Object:
        started = "running" in (self.state or {})
        code = (self.terminated or {}).get("exitCode")
        return {
            "name": self.name,
            "image": self.spec["image"],
            "imageID": "" if self.log is None else f"registry.test/{self.spec['image']}@sha256:{'0' * 64}",
            "containerID": f"test://{self.name}-{self.restarts}" if self.log is not None else "",
            "ready": started if not self.init else code == 0,
            "started": started,
            "restartCount": self.restarts,
            "state": self.state or {"waiting": {"reason": "PodInitializing" if not self.init else "ContainerCreating"}},
            "lastState": {"terminated": self.last} if self.last else {},
        }


class Pod:
    """Runs until the pod has ended, or was deleted. `freed` is told when its address is no longer in use."""

    def __init__(
        self, pod: Object, sandbox: Sandbox, around: Surroundings, events: Events, changed: Callable[[], None]
    ) -> None:
        self.object = pod
        self.sandbox = sandbox
        self.around = around
        self.deleting = False
        self.over = False
        self.instances = [Instance(each, init=True) for each in pod["spec"].get("initContainers") or []]
        self.instances += [Instance(each) for each in pod["spec"]["containers"]]
        self.phase = "Pending"
        self._verdict: Object = {}  # a reason and a message that stand for the pod as a whole
        self._events = events
        self._changed = changed
        self._ending = asyncio.Event()
        self._started_at = stamp()
        self._reporting = asyncio.Lock()
        self._volumes: Mapping[str, Path] = {}
        self._ready_since = ""
        self._silent = False
        self.task: asyncio.Task[None] | None = None

    @property
    def path(self) -> str:
        metadata = self.object["metadata"]
        return f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}"

    @property
    def main(self) -> list[Instance]:
        return [each for each in self.instances if not each.init]

    @property
    def ready(self) -> bool:
        return all(each.running is not None for each in self.main) and not self.deleting

    def instance(self, name: str) -> Instance | None:
        return next((each for each in self.instances if each.name == name), None)

    async def run(self) -> None:
        deadline = self.object["spec"].get("activeDeadlineSeconds")
        timer = asyncio.get_running_loop().call_later(deadline, self._too_long) if deadline else None
        try:
            await self._live()
        except (ClusterError, Refused, OSError) as error:
            self._verdict = {"reason": "FailedCreatePodSandBox", "message": str(error)}
            self.phase = "Failed"
        finally:
            if timer is not None:
                timer.cancel()
        await self.sandbox.end()
        self.over = True
        self._changed()
        await self._report()
        if self.deleting:
            await self._remove()

    async def _live(self) -> None:
        await self._report()
        await self._mount()
        if self._ending.is_set():
            return self._settle()
        await self.sandbox.start()
        self._changed()
        for instance in self.instances:
            if instance.init and not await self._run(instance):
                return self._settle()
        await asyncio.gather(*(self._run(each) for each in self.main))
        return self._settle()

    def terminate(self, grace_s: float) -> None:
        """SIGTERM, and after the grace SIGKILL. May be called again, with a shorter grace."""
        self._ending.set()
        loop = asyncio.get_running_loop()
        for instance in self.instances:
            if instance.running is not None:
                if grace_s > 0:
                    instance.running.signal(signal.SIGTERM)
                loop.call_later(grace_s, instance.running.kill)

    def delete(self, pod: Object | None) -> None:
        """By whoever deleted the object; None: it is gone already, without a grace."""
        metadata = pod["metadata"] if pod is not None else {}
        grace = metadata.get("deletionGracePeriodSeconds", _DEFAULT_GRACE_S) if pod is not None else 0
        if not self.deleting:
            for instance in self.main:
                if instance.running is not None:
                    self._events.tell(self.object, "Killing", f"Stopping container {instance.name}")
        self.deleting = True
        self.terminate(grace)

    def fail(self, reason: str, message: str) -> None:
        """The node takes it away: evicted, too long active. It ends without a grace."""
        self._verdict = {"reason": reason, "message": message}
        self._events.tell(self.object, reason, message, warning=True)
        self.terminate(0)

    def kill_container(self, name: str | None, reason: str) -> None:
        """SIGKILL by the kernel, for want of memory."""
        for instance in self.main:
            if instance.running is not None and name in (None, instance.name):
                instance.killed_for = reason
                instance.running.kill()

    async def lose(self) -> None:
        """The node has no power any more: nobody is told."""
        self._silent = True
        if self.task is not None:
            self.terminate(0)
            await self.task

    def _too_long(self) -> None:
        self.fail("DeadlineExceeded", "Pod was active on the node longer than the specified deadline")

    def _settle(self) -> None:
        if self._verdict:
            self.phase = "Failed"
            return
        codes = [(each.terminated or {"exitCode": 1})["exitCode"] for each in self.instances]
        self.phase = "Failed" if any(codes) else "Succeeded"

    async def _mount(self) -> None:
        said = ""
        while not self._ending.is_set():
            try:
                self._volumes = await podspec.volumes(self.object, self.around, self.sandbox)
                return
            except NotYet as error:
                if str(error) != said:
                    self._events.tell(self.object, error.reason, str(error), warning=True)
                said = str(error)
                await self._pause(_RETRY_S)

    async def _run(self, instance: Instance) -> bool:
        """Starts it, again and again as its pod says; whether it ended well."""
        policy = self.object["spec"].get("restartPolicy", "Always")
        backoff = 0.0
        while not self._ending.is_set():
            program = await self._prepared(instance)
            if program is None:
                return False
            code = await self._once(instance, program)
            again = policy != "Never" and (code != 0 or (policy == "Always" and not instance.init))
            if not again or self._ending.is_set():
                return code == 0
            instance.last = instance.terminated
            if backoff:
                name, metadata = instance.name, self.object["metadata"]
                what = f"restarting failed container={name} pod={metadata['name']}_{metadata['namespace']}"
                instance.state = _waiting("CrashLoopBackOff", f"back-off {backoff:g}s {what}({metadata['uid']})")
                self._events.tell(self.object, "BackOff", "Back-off restarting failed container", warning=True)
                await self._report()
                await self._pause(backoff)
                if self._ending.is_set():
                    instance.state = {"terminated": instance.last}
                    return False
            backoff = min(max(2 * backoff, 0.5), _LONGEST_BACKOFF_S)
            instance.restarts += 1
        return False

    async def _prepared(self, instance: Instance) -> Program | None:
        """Its image pulled, so to say, and what it refers to looked up; None when the pod ends before that."""
        while not self._ending.is_set():
            refusal = podspec.unpullable(instance.spec["image"])
            try:
                if refusal is None:
                    return await podspec.program(self.object, instance.spec, self.around, self._volumes)
            except NotYet as error:
                refusal = error.reason, str(error)
            await self._refuse(instance, *refusal)
        return None

    async def _refuse(self, instance: Instance, reason: str, message: str) -> None:
        image = instance.spec["image"]
        again = "waiting" in (instance.state or {})
        if not again:
            said = f'Failed to pull image "{image}": {message}' if reason == "ErrImagePull" else f"Error: {message}"
            self._events.tell(self.object, "Failed", said, warning=True)
        instance.state = _waiting(reason, message)
        if again and reason == "ErrImagePull":
            self._events.tell(self.object, "BackOff", f'Back-off pulling image "{image}"')
            instance.state = _waiting("ImagePullBackOff", f'Back-off pulling image "{image}"')
        await self._report()
        # Said once as an error, once as a back-off; after that nothing is new.
        await self._pause(_RETRY_S if not again else 10 * _RETRY_S)

    async def _once(self, instance: Instance, program: Program) -> int:
        directory = self.sandbox.directory / "containers" / f"{instance.name}-{instance.restarts}"
        log, started = ContainerLog(directory / "log"), stamp()
        said = podspec.cannot_start(program)
        if said is not None:
            log.close()
            instance.previous, instance.log = instance.log, log
            self._events.tell(self.object, "Failed", f"Error: {said}", warning=True)
            instance.state = {"terminated": _ended(128, "StartError", said, started)}
            await self._report()
            return 128
        message = directory / "message"
        message.touch()
        message.chmod(0o666)
        running = await self.sandbox.run(program, message, directory / "root")
        # Which run's log is served goes by this state, as in a kubelet.
        instance.previous, instance.log = instance.log, log
        instance.running, instance.state = running, {"running": {"startedAt": started}}
        self._events.tell(self.object, "Started", f"Started container {instance.name}")
        self._changed()
        if self._ending.is_set():
            self.terminate(0)
        reading = asyncio.create_task(_drain(running, log))
        await self._report()
        code = await running.wait()
        await reading
        instance.running = None
        log.close()
        reason = instance.killed_for or ("Completed" if code == 0 else "Error")
        instance.killed_for = ""
        instance.state = {"terminated": _ended(code, reason, _message(instance, message, code), started)}
        self._changed()
        await self._report()
        return code

    async def _pause(self, seconds: float) -> None:
        """Ends early when the pod does."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._ending.wait(), seconds)

    async def _report(self) -> None:
        if self._silent:
            return
        async with self._reporting:
            await self.around.connection.patch_status(self.path, self._status())

    def _status(self) -> Object:
        if self.phase == "Pending" and any(each.log is not None for each in self.main):
            self.phase = "Running"
        ended = self.phase in ("Succeeded", "Failed")
        initialized = all(each.terminated and each.terminated["exitCode"] == 0 for each in self.instances if each.init)
        why = "PodCompleted" if ended else "ContainersNotReady"
        address = self.around.address if self.phase != "Pending" or initialized else ""
        return {
            "phase": self.phase,
            "conditions": [
                _condition("Initialized", initialized, "ContainersNotInitialized", self._started_at),
                _condition("Ready", self.ready, why, stamp()),
                _condition("ContainersReady", self.ready, why, stamp()),
                _condition("PodScheduled", True, "", self._started_at),
            ],
            "hostIP": self.around.host_address,
            "podIP": address,
            "podIPs": [{"ip": address}] if address else [],
            "startTime": self._started_at,
            "initContainerStatuses": [each.status() for each in self.instances if each.init],
            "containerStatuses": [each.status() for each in self.main],
            **self._verdict,
        }

    async def _remove(self) -> None:
        if self._silent:
            return
        metadata = self.object["metadata"]
        body = {"gracePeriodSeconds": 0, "preconditions": {"uid": metadata["uid"]}}
        with contextlib.suppress(Refused):
            await self.around.connection.call("DELETE", self.path, body)

    def forget(self) -> None:
        """Its logs and its volumes."""
        shutil.rmtree(self.sandbox.directory, ignore_errors=True)


async def _drain(running: Container, log: ContainerLog) -> None:
    while data := await running.output.read(_READ):
        log.add(data)


def _message(instance: Instance, file: Path, code: int) -> str:
    said = file.read_text(errors="replace")[:4096]
    if said or code == 0 or instance.spec.get("terminationMessagePolicy") != "FallbackToLogsOnError":
        return said
    return instance.log.last_words() if instance.log is not None else ""


def _ended(code: int, reason: str, message: str, started: str) -> Object:
    found = {"exitCode": code, "reason": reason, "startedAt": started, "finishedAt": stamp()}
    return {**found, **({"message": message} if message else {})}


def _waiting(reason: str, message: str) -> Object:
    return {"waiting": {"reason": reason, "message": message}}


def _condition(kind: str, true: bool, reason: str, when: str) -> Object:
    found = {"type": kind, "status": "True" if true else "False", "lastTransitionTime": when}
    return found if true or not reason else {**found, "reason": reason}
