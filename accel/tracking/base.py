"""What every tracker has: the interface of `GeneralTracker`, and the one that stands where no tracker runs."""

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
    """Decorate a tracker's method so that it runs on the main process alone where ``main_process_only`` says so.

    Elsewhere it does nothing and returns ``None``. The process is looked at when the method is called, so that a
    tracker may be made before the world is formed.
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
    """Base of all trackers; a script's own derives from it and may be given to ``Accelerator(log_with=…)``.

    A class has three attributes or properties: ``name`` (what `Accelerator.get_tracker` is asked for),
    ``requires_logging_directory`` (whether the constructor's second argument is a directory) and ``tracker`` (the
    object of the package behind it). ``main_process_only=False`` in a script's own class has `Accelerator` start it
    and log to it on every process.

    ``start`` is called once, before anything else and not by the constructor; ``finish`` once, last. All methods do
    nothing unless overridden. Raises `IncompleteTracker` where one of the three is missing.
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
        """Open the run. May raise whatever the package raises."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Keep ``values`` as the hyperparameters of the run."""

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Add ``values`` to the run, at ``step``; ``kwargs`` are those of the package's own function."""

    def finish(self) -> None:
        """Close the run; nothing is logged after."""

    def server(self) -> str | None:
        """The address of the server that `start` and `log` need, if there is one and the tracker knows it."""
        return None

    def is_outage(self, error: BaseException) -> bool:
        """Whether ``error``, of this tracker's package, says that a server is out of reach, not that a call is wrong.

        Errors of sockets, of `requests` and of a full disk are known without this.
        """
        return False


class NoTracker(GeneralTracker):
    """What `Accelerator.get_tracker` gives where the tracker does not run: takes every call, item and attribute.

    So ``get_tracker("wandb", unwrap=True).watch(model)`` may stand in a script without asking for the process first.
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
    """Return ``values`` if they are a mapping; else `ArgumentError` names ``what`` they were given to."""
    if not isinstance(values, Mapping):
        raise ArgumentError(f"{what} takes a dict from names to values, got {type(values).__name__}")
    return values
