"""Trackers for tests, without a package."""

from __future__ import annotations

from typing import Any

from accel.tracking import GeneralTracker


class Listing(GeneralTracker):
    """Keeps what it is asked to do."""

    name = "listing"
    requires_logging_directory = False

    def __init__(self, run_name: str = "", **more: Any) -> None:
        super().__init__()
        self.calls: list[Any] = [("made", run_name, more)]

    @property
    def tracker(self) -> list[Any]:
        return self.calls

    def start(self) -> None:
        self.calls.append("start")

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.calls.append(("config", values))

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.calls.append(("log", values, step, kwargs))

    def finish(self) -> None:
        self.calls.append("finish")


class Failing(Listing):
    """Raises ``error`` from the methods called ``where``."""

    def __init__(self, where: str, error: Exception) -> None:
        super().__init__()
        self.where = where
        self.error = error

    def _fail(self, where: str) -> None:
        if where == self.where:
            raise self.error

    def start(self) -> None:
        self._fail("start")

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self._fail("config")

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self._fail("log")
        super().log(values, step)

    def finish(self) -> None:
        self._fail("finish")
