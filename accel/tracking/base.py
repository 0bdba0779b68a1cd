"""The interface of trackers, `GeneralTracker`, and a placeholder for trackers that do not run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, ClassVar, TypeVar, cast

from accel.errors import ArgumentError

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
    def where_it_should(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(self, "main_process_only", False):
            from accel.state import PartialState

            if not PartialState().is_main_process:
                return None
        return function(self, *args, **kwargs)

    return cast(Method, where_it_should)


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
    # Whether a call of `log` may wait for a server, so that a long wait must be said.
    waits_for_server: ClassVar[bool] = False
    # What a user can do where the server cannot be used.
    offline: ClassVar[str] = ""

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
        return self

    def __getitem__(self, key: Any) -> NoTracker:
        return self

    def __setitem__(self, key: Any, value: Any) -> None:
        return None

    def __iter__(self) -> Any:
        return iter(())

    def __bool__(self) -> bool:
        return False


def known_values(values: Any, what: str) -> Mapping[str, Any]:
    """Return ``values`` if they are a mapping; else raise `ArgumentError`, which names ``what`` they were passed to."""
    if not isinstance(values, Mapping):
        raise ArgumentError(f"{what} takes a dict from names to values, got {type(values).__name__}")
    return values
