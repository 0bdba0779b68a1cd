"""Isolation of training from trackers: check servers first, survive outages, report long waits, raise other errors."""

from __future__ import annotations

import errno
import logging
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from accel.errors import AccelError, TrackerError
from accel.tracking.base import GeneralTracker

logger = logging.getLogger(__name__)

# Checking that a server is reachable: some packages try to connect for minutes, or for ever.

TIMEOUT_S = 10.0
_PORTS = {"http": 80, "https": 443}


def check_reachable(url: str, timeout: float = TIMEOUT_S) -> None:
    """Connect to the host and port of an http(s) ``url``, and disconnect.

    Does nothing for other addresses and behind a proxy. Raises `ConnectionError` if the name does not resolve,
    the connection is refused, or nothing responds within ``timeout`` seconds.
    """
    parts = urlsplit(url)
    host, port = parts.hostname, parts.port or _PORTS.get(parts.scheme)
    if host is None or port is None or parts.scheme not in _PORTS or _proxied(parts.scheme, host):
        return
    try:
        socket.create_connection((host, port), timeout).close()
    except OSError as error:
        raise ConnectionError(f"{host}:{port} cannot be reached: {error.strerror or error}") from error


def _proxied(scheme: str, host: str) -> bool:
    proxies = getproxies()
    return (scheme in proxies or "all" in proxies) and not proxy_bypass(host)


# Outages and long waits.

SLOW_S = 10.0
FIRST_PAUSE_S = 15.0
LONGEST_PAUSE_S = 600.0

# Errors of a disk or a network that are not the script's fault and may pass.
_TRANSIENT_ERRNOS = frozenset(
    {
        errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ESTALE, errno.EROFS, errno.EAGAIN,
        errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTUNREACH, errno.EHOSTDOWN,
    }
)  # fmt: skip
_RETRYABLE_STATUSES = (408, 429)  # request timeout, too many requests


class IsolatedTracker:
    """One tracker of one process, whose outages do not stop training.

    When the tracker's server or disk fails during training, it logs a warning, drops records, and retries after
    15 s, then after twice as long each time, up to 10 min. The number of lost records is logged when the tracker
    works again and at the end. Any other error is raised.
    """

    def __init__(self, tracker: GeneralTracker) -> None:
        self.tracker = tracker
        self._name = str(getattr(tracker, "name", type(tracker).__name__))
        self._is_builtin = type(tracker).__module__.startswith(__package__ or "")
        self._watched = tracker.waits_for_server
        self._retry_at = 0.0
        self._pause = 0.0
        self._lost_records = 0

    def start(self) -> bool:
        """Start the tracker. On an outage log a warning and return False; raise any other error.

        An error of accel's own tracker becomes `TrackerError`.
        """
        try:
            with warn_if_slow(f"tracker {self._name!r} to start"):
                self._check_server()
                self.tracker.start()
        except Exception as error:
            if is_outage(self.tracker, error):
                logger.warning(
                    "tracker %r cannot start, training continues without it: %s%s",
                    self._name, first_line(error), self._hint(),
                )  # fmt: skip
                return False
            if not self._is_builtin or isinstance(error, AccelError):
                raise
            raise TrackerError(f"tracker {self._name!r} did not start: {first_line(error)}{self._hint()}") from error
        return True

    def store(self, config: dict[str, Any]) -> None:
        """Store the configuration; log an outage."""
        with self._tolerating_outage("configuration not stored"), warn_if_slow(f"tracker {self._name!r}"):
            self.tracker.store_init_configuration(config)

    def log(self, values: dict[str, Any], step: int | None, options: Mapping[str, Any]) -> None:
        """Log ``values``, or drop them while the tracker is unreachable."""
        if self._pause and time.monotonic() < self._retry_at:
            self._lost_records += 1
            return
        try:
            if self._pause:
                self._check_server()
            with warn_if_slow(f"tracker {self._name!r} to log") if self._watched else nullcontext():
                self.tracker.log(values, step=step, **options)
        except Exception as error:
            if not is_outage(self.tracker, error):
                raise
            self._back_off(error)
        else:
            if self._pause:
                self._pause = 0.0
                logger.warning("tracker %r works again; records lost so far: %d", self._name, self._lost_records)

    def finish(self) -> None:
        """Finish the tracker; log an outage and the number of lost records."""
        with self._tolerating_outage("run not closed"), warn_if_slow(f"tracker {self._name!r} to finish"):
            self.tracker.finish()
        if self._lost_records:
            logger.warning("tracker %r lost %d records", self._name, self._lost_records)

    def _check_server(self) -> None:
        try:
            url = self.tracker.server()
        except (AttributeError, ImportError, KeyError):
            url = None  # another version of the package stores the address elsewhere
        if url is not None:
            check_reachable(url)

    def _back_off(self, error: BaseException) -> None:
        self._lost_records += 1
        if not self._pause:
            logger.warning(
                "tracker %r failed, training continues; records are lost until it works again: %s",
                self._name, first_line(error),
            )  # fmt: skip
        self._pause = min(self._pause * 2 or FIRST_PAUSE_S, LONGEST_PAUSE_S)
        self._retry_at = time.monotonic() + self._pause

    @contextmanager
    def _tolerating_outage(self, consequence: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if not is_outage(self.tracker, error):
                raise
            logger.warning("tracker %r failed, %s: %s", self._name, consequence, first_line(error))

    def _hint(self) -> str:
        return f"; {self.tracker.offline}" if self.tracker.offline else ""


def is_outage(tracker: GeneralTracker, error: BaseException) -> bool:
    """Return True if ``error``, or one of its causes, means that a server or a disk does not work now."""
    cause: BaseException | None = error
    while cause is not None:
        if (isinstance(cause, OSError) and _is_transient(cause)) or tracker.is_outage(cause):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def _is_transient(error: OSError) -> bool:
    if isinstance(error, (ConnectionError, TimeoutError)) or error.errno in _TRANSIENT_ERRNOS:
        return True
    # Errors of `requests` and of name resolution are OSErrors without a system error number. Malformed addresses and
    # requests that the server rejects are permanent.
    status = getattr(getattr(error, "response", None), "status_code", 0)
    permanent = isinstance(error, ValueError) or (400 <= status < 500 and status not in _RETRYABLE_STATUSES)
    return (error.errno is None or error.errno < 0) and not permanent


def first_line(error: BaseException) -> str:
    """Return the error's type and the first line of its message, at most 300 characters."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__


@contextmanager
def warn_if_slow(operation: str) -> Iterator[None]:
    """Warn after 10 s, and then at doubling intervals, that the block is still waiting for ``operation``."""
    finished = threading.Event()
    started_at = time.monotonic()

    def watch() -> None:
        wait = SLOW_S
        while not finished.wait(wait):
            logger.warning("still waiting for %s after %.0f s", operation, time.monotonic() - started_at)
            wait *= 2

    watcher = threading.Thread(target=watch, name="accel tracker watch", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        finished.set()
        watcher.join()
