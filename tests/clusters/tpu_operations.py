"""What every call of the tests' Cloud TPU API goes through: its record, its failures, and long-running operations."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.cloud import tpu_v2
from google.longrunning import operations_pb2
from google.protobuf import empty_pb2, json_format

from .tpu import Call

__all__ = ["Operations", "Refused", "to_dict"]

_DENIED = "Permission 'tpu.{permission}' denied on resource '//tpu.googleapis.com/{name}' (or it may not exist)."


class Refused(Exception):
    """An error of the API, with its canonical code, as `RESOURCE_EXHAUSTED`."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = grpc.StatusCode[code]
        self.message = message


@dataclass
class _Fault:
    method: str
    code: str
    message: str
    times: int


@dataclass
class _Faults:
    next: list[_Fault] = field(default_factory=list)
    denied: set[tuple[str, str]] = field(default_factory=set)  # method and caller; "" is every caller

    def check(self, method: str, name: str, caller: str) -> None:
        if {(method, caller), (method, "")} & self.denied:
            raise Refused("PERMISSION_DENIED", _DENIED.format(permission=method, name=name))
        for fault in self.next:
            if fault.method == method and fault.times > 0:
                fault.times -= 1
                raise Refused(fault.code, fault.message)


class Operations:
    """Operations run in threads of their own. `changed` is notified of whatever they change."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self._calls: list[Call] = []
        self._faults = _Faults()
        self._operations: dict[str, operations_pb2.Operation] = {}
        self._held: set[str] = set()
        self._threads: list[threading.Thread] = []

    def call(self, method: str, request: Any, caller: str, protocol: str) -> Any:
        """The reply, which is nobody else's. Raises Refused."""
        asked = to_dict(request)
        name = str(asked.get("name") or asked.get("parent") or asked.get("node", {}).get("name", ""))
        with self.changed:
            self._calls.append(Call(method, asked, caller, protocol))
            self._faults.check(method, name, caller)
            reply = self.handle(method, request)
            copy = type(reply)() if isinstance(reply, operations_pb2.Operation) else type(reply)(reply)
            if isinstance(reply, operations_pb2.Operation):
                copy.CopyFrom(reply)
            return copy

    def handle(self, method: str, request: Any) -> Any:
        raise NotImplementedError

    # Long-running operations.

    def operate(self, method: str, name: str, work: Callable[[], Any]) -> operations_pb2.Operation:
        """Start an operation on a resource; `work` returns its response, or raises Refused."""
        place = "/".join(name.split("/")[:4])
        operation = operations_pb2.Operation(name=f"{place}/operations/operation-{uuid.uuid4()}")
        metadata = tpu_v2.OperationMetadata(target=name, verb=method, api_version="v2")
        operation.metadata.Pack(tpu_v2.OperationMetadata.pb(metadata))
        self._operations[operation.name] = operation

        def run() -> None:
            try:
                response = work()
                with self.changed:
                    message = response if isinstance(response, empty_pb2.Empty) else type(response).pb(response)
                    operation.response.Pack(message)
            except Refused as error:
                operation.error.code, operation.error.message = error.code.value[0], error.message
            except Exception as error:
                operation.error.code, operation.error.message = 13, f"{type(error).__name__}: {error}"
                raise
            finally:
                with self.changed:
                    operation.done = True
                    self.changed.notify_all()

        self.spawn(run)
        return operation

    def spawn(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, daemon=True)
        self._threads = [*(other for other in self._threads if other.is_alive()), thread]
        thread.start()

    def get_operation(self, request: operations_pb2.GetOperationRequest) -> operations_pb2.Operation:
        if request.name not in self._operations:
            raise Refused("NOT_FOUND", f"Resource '{request.name}' was not found")
        return self._operations[request.name]

    def reach(self, step: str, unless: Callable[[], bool]) -> None:
        """Wait while this step is held, unless it has become needless."""
        with self.changed:
            self.changed.wait_for(lambda: step not in self._held or unless())

    def join(self) -> None:
        """Wait for all operations to end; nothing is held."""
        with self.changed:
            self._held.clear()
            self.changed.notify_all()
        for thread in self._threads:
            thread.join(60)

    # What a test asks.

    def calls(self) -> list[dict[str, Any]]:
        return [vars(call) for call in self._calls]

    def deny(self, methods: Sequence[str], caller: str) -> None:
        self._faults.denied |= {(method, caller) for method in methods}

    def allow(self, methods: Sequence[str], caller: str) -> None:
        self._faults.denied -= {(method, caller) for method in methods}

    def fail(self, method: str, code: str, message: str, times: int) -> None:
        self._faults.next.append(_Fault(method, grpc.StatusCode[code].name, message, times))

    def hold(self, steps: Sequence[str]) -> None:
        self._held |= set(steps)

    def resume(self) -> None:
        with self.changed:
            self._held.clear()
            self.changed.notify_all()

    def forget(self) -> None:
        self._calls, self._faults, self._operations = [], _Faults(), {}


def to_dict(message: Any) -> dict[str, Any]:
    """A message as the API's JSON, of proto-plus or not."""
    plain = type(message).pb(message) if hasattr(type(message), "pb") else message
    fields: dict[str, Any] = json_format.MessageToDict(plain)
    return fields
