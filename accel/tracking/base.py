"""Base classes of trackers, and the conversion of values to plain numbers and text."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, ClassVar, TypeVar, cast

from accel.errors import ArgumentError

logger = logging.getLogger(__name__)

Method = TypeVar("Method", bound=Callable[..., Any])

_REQUIRED = ("name", "requires_logging_directory", "tracker")


class IncompleteTracker(ArgumentError, NotImplementedError):
    """A tracker class lacks an attribute that every tracker must have."""


def on_main_process(function: Method) -> Method:
    """Decorate a tracker's method to run only on the main process if ``main_process_only`` is true.

    On other processes it does nothing and returns ``None``. The process is determined at each call, so that a
    tracker may be created before the world is formed.
    """

    @wraps(function)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(self, "main_process_only", False):
            from accel.state import PartialState

            if not PartialState().is_main_process:
                return None
        return function(self, *args, **kwargs)

    return cast(Method, wrapper)


class GeneralTracker:
    """Base of all trackers. A script's own tracker derives from it and may be passed to ``Accelerator(log_with=…)``.

    A class has three required attributes or properties:

    ``name``: the name for `Accelerator.get_tracker`.
    ``requires_logging_directory``: True if the constructor's second argument is a directory.
    ``tracker``: the object of the package behind it.

    ``main_process_only=False`` in a script's own class makes `Accelerator` start it and log to it on every
    process. ``start`` is called once, first, and not by the constructor; ``finish`` once, last. Methods do
    nothing unless overridden. Raises `IncompleteTracker` if one of the three is missing.
    """

    main_process_only: bool = True
    waits_for_server: ClassVar[bool] = False  # True if `log` may wait for a server: long waits are then reported
    offline: ClassVar[str] = ""  # how to log without the server, for messages

    def __init__(self, _blank: bool = False) -> None:
        if _blank:
            return
        # `dir`, not `hasattr`: the property `tracker` may only be read once the tracker has been started.
        missing = [name for name in _REQUIRED if name not in dir(self)]
        if missing:
            raise IncompleteTracker(
                f"tracker class {type(self).__name__} lacks {', '.join(missing)}: define them in the class"
            )

    def start(self) -> None:
        """Open the run. May raise any error of the package."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store ``values`` as the run's hyperparameters."""

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log ``values`` at ``step``; ``kwargs`` are those of the package's own function."""

    def finish(self) -> None:
        """Close the run. Nothing is logged afterwards."""

    def server(self) -> str | None:
        """Return the address of the server that `start` and `log` need, or None if there is none or it is unknown."""
        return None

    def is_outage(self, error: BaseException) -> bool:
        """Return True if ``error``, of this tracker's package, means an unreachable server and not a wrong call.

        Errors of sockets, of `requests` and of a full disk are recognized without this.
        """
        return False


class NoTracker(GeneralTracker):
    """A placeholder for a tracker that does not run; accepts every call, item and attribute.

    `Accelerator.get_tracker` returns it, so that ``get_tracker("wandb", unwrap=True).watch(model)`` works in a
    script on every process.
    """

    def __init__(self) -> None:
        super().__init__(_blank=True)

    def __getattr__(self, name: str) -> Any:
        # Protocols of the language (copying, pickling, iterating) must find that they are not supported.
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> NoTracker:
        """Do nothing."""
        return self

    def __getitem__(self, key: Any) -> NoTracker:
        return self

    def __setitem__(self, key: Any, value: Any) -> None:
        return None

    def __iter__(self) -> Any:
        return iter(())

    def __bool__(self) -> bool:
        return False


class RunTracker(GeneralTracker):
    """Base of a tracker whose ``start`` sets ``.run``, an object with ``config`` and ``finish``.

    ``run_name`` is the package's project; ``kwargs`` go to the package's function that starts a run.
    """

    requires_logging_directory = False
    main_process_only = False
    run: Any

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.init_kwargs = kwargs

    @property
    def tracker(self) -> Any:
        """The package's run."""
        return self.run

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Merge ``values`` into the run's configuration."""
        self.run.config.update(values)

    @on_main_process
    def finish(self) -> None:
        """Send what is left and end the run."""
        self.run.finish()


# Plain values: tensors, and numpy's scalars and arrays, converted to Python's own types.

_PLAIN = (int, float, str, bool, type(None))
_warned: set[tuple[str, str]] = set()


def scalar(value: Any) -> Any:
    """Return the number in a tensor, array or numpy scalar of one element; anything else as it is."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, float):  # numpy's float64 among others
        return float(value)
    item = getattr(value, "item", None)
    if item is None or _count(value) != 1:
        return value
    number = item()
    return number if type(number) in _PLAIN else value


def _count(value: Any) -> int | None:
    numel = getattr(value, "numel", None)
    count = numel() if callable(numel) else getattr(value, "size", None)
    return count if isinstance(count, int) else None


def scalars(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``values`` with `scalar` applied to each, and to each value of a dict in them."""
    return {
        name: {key: scalar(item) for key, item in value.items()} if isinstance(value, Mapping) else scalar(value)
        for name, value in values.items()
    }


def plain(value: Any) -> Any:
    """Return ``value`` as dicts with text keys, lists, numbers, text and ``None`` only.

    Tensors and arrays become nested lists, sets and tuples become lists, and anything else its ``str``.
    """
    value = scalar(value)
    if type(value) in _PLAIN:
        return value
    if isinstance(value, (str, bool)):  # an enum's member that is also text
        return str(value)
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((plain(item) for item in value), key=str)
    tolist = getattr(value, "tolist", None)
    return plain(tolist()) if callable(tolist) else str(value)


def is_number(value: Any) -> bool:
    """Return True if ``value`` is an int, a float or a bool."""
    return isinstance(value, (int, float))


def warn_skipped(tracker: str, name: str, value: Any, accepted: str) -> None:
    """Warn, once per tracker and name, that ``value`` is not logged because the tracker only accepts ``accepted``."""
    if (tracker, name) not in _warned:
        _warned.add((tracker, name))
        logger.warning("tracker %r accepts only %s: skipped %r (%s)", tracker, accepted, name, type(value).__name__)


def table_rows(
    tracker: str, columns: list[str] | None, data: list[list[Any]] | None, dataframe: Any
) -> list[list[Any]] | Any:
    """Return the rows of a table, ``columns`` first, or ``dataframe``. Raises `ArgumentError` without data."""
    if dataframe is not None:
        return dataframe
    if data is None:
        raise ArgumentError(f"log_table of tracker {tracker!r} needs data=… or dataframe=…")
    return [columns, *data] if columns else data
