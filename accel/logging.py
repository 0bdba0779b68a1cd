"""Loggers for several processes."""

from __future__ import annotations

import logging
import os
from collections.abc import MutableMapping
from typing import Any

from accel.errors import one_of
from accel.state import PartialState

_LOGGED: set[tuple[str, str, str]] = set()
_LEVELS = ("CRITICAL", "ERROR", "WARNING", "INFO", "DEBUG")


class MultiProcessAdapter(logging.LoggerAdapter[logging.Logger]):
    """A logger that logs on the main process only, unless a call overrides this.

    ``main_process_only=False`` logs on every process, ``in_order=True`` on every process in the order of their
    ranks (all must make the call). `PartialState` must exist; any of accel's objects creates it.
    """

    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        """Log as `logging.Logger.log` does, on the processes selected by ``main_process_only`` and ``in_order``."""
        main_only = kwargs.pop("main_process_only", True)
        in_order = kwargs.pop("in_order", False)
        kwargs.setdefault("stacklevel", 2)
        if not self.isEnabledFor(level):
            return
        state = PartialState()
        if in_order:
            self._log_in_turn(state, level, msg, args, kwargs)
        elif state.is_main_process or not main_only:
            self._emit(level, msg, args, kwargs)

    def warning_once(self, *args: Any, **kwargs: Any) -> None:
        """Log a warning only the first time that this logger gets it with these arguments; options as in `log`.

        With ``in_order`` all processes must make the call equally often.
        """
        key = (self.logger.name, repr(args), repr(kwargs))
        if key not in _LOGGED:
            _LOGGED.add(key)
            kwargs["stacklevel"] = kwargs.get("stacklevel", 2) + 1
            self.log(logging.WARNING, *args, **kwargs)

    def _log_in_turn(
        self, state: PartialState, level: int, msg: object, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        kwargs["stacklevel"] += 1
        for rank in range(state.num_processes):
            if rank == state.process_index:
                self._emit(level, msg, args, kwargs)
            state.wait_for_everyone()

    def _emit(self, level: int, msg: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        message, options = self.process(msg, kwargs)
        options["stacklevel"] += 1
        self.logger.log(level, message, *args, **options)

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Return message and keywords as they are."""
        return msg, kwargs


def get_logger(name: str, log_level: str | None = None) -> MultiProcessAdapter:
    """Return the logger ``name`` for several processes, at ``log_level`` or ``ACCELERATE_LOG_LEVEL``.

    Raises `ArgumentError` for an unknown level.
    """
    source = "log_level"
    if log_level is None:
        log_level, source = os.environ.get("ACCELERATE_LOG_LEVEL"), "environment variable ACCELERATE_LOG_LEVEL"
    logger = logging.getLogger(name)
    if log_level is not None:
        level = one_of(log_level.upper(), _LEVELS, source=source)
        logger.setLevel(level)
        logger.root.setLevel(level)
    return MultiProcessAdapter(logger, {})
