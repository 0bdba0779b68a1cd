"""Jobs of Python functions: the pickle that is sent along, and the value that comes back."""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import os
import pickle
import platform
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, NotReady, SchedulerError, SpecError
from ..job import FUNCTION_MODULE
from ..printable import one_line
from ..store import atomic_files

if TYPE_CHECKING:
    from ..store.record import Record

_RESULT = "result.pkl"  # as in accel/launch/run_function.py
_MAX_MB = 64
_WITHOUT_A_RUN = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)


def name_of(function: Callable[..., object]) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__)).strip("<>")  # of a lambda


def pack(
    function: Callable[..., object], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[str, ...], bytes]:
    """Return the job's argv, and the content of its `FUNCTION_FILE`.

    Raises SpecError for what cannot be called, pickled or sent; ConfigError if cloudpickle is missing.
    """
    name = name_of(function)
    if any(is_kind(call) for is_kind in _WITHOUT_A_RUN for call in (function, type(function).__call__)):
        raise SpecError(
            f"{name} is a generator or coroutine function, whose call runs nothing: wrap it in one that runs"
        )
    if isinstance(args, (str, bytes)) or not isinstance(args, Sequence):
        raise SpecError(f"args must be a tuple or a list, not {type(args).__name__}: write args=(VALUE,)")
    try:
        import cloudpickle
    except ImportError:
        raise ConfigError("functions need cloudpickle: pip install 'accel-launch[functions]'") from None
    try:
        data = cloudpickle.dumps((function, tuple(args), dict(kwargs)))
    except Exception as error:  # of any class's own __reduce__
        part = _unpicklable_part(cloudpickle.dumps, function, args, kwargs)
        raise SpecError(f"{part} cannot be pickled: {one_line(str(error))}") from None
    header = {"schema": 1, "python": platform.python_version(), "cloudpickle": cloudpickle.__version__}
    content = json.dumps(header).encode() + b"\n" + data
    if len(content) > _MAX_MB * 1_000_000:
        raise SpecError(
            f"{name} and its arguments have {len(content) / 1e6:.0f} MB when pickled, and {_MAX_MB} MB is the limit: "
            "let the function read its data from files"
        )
    digest = hashlib.sha256(content).hexdigest()
    return (FUNCTION_MODULE, name, f"bytes={len(content)}", f"sha256={digest}"), content


def _unpicklable_part(
    dump: Callable[[object], bytes], function: Callable[..., object], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> str:
    """Name the first argument, or variable of the function, that `dump` cannot pickle; else the function."""
    name = name_of(function)
    parts = {f"argument {key} of {name}": value for key, value in [*enumerate(args, 1), *kwargs.items()]}
    if inspect.isfunction(function):
        variables = inspect.getclosurevars(function)
        parts |= {
            f"{key}, which {name} uses,": value for key, value in {**variables.globals, **variables.nonlocals}.items()
        }
    for part, value in parts.items():
        try:
            dump(value)
        except Exception:
            return part
    return name


def read_result(record: Record, fetch: Callable[[str], object]) -> object:
    """Return the value of a job that has succeeded. Unpickling runs code that is in the pickle.

    `fetch` creates a directory from the job's results, on a target that stores them. Raises NotReady if there is no
    value, SchedulerError if it cannot be loaded here.
    """
    path = record.directory / _RESULT
    try:
        if record.kind == "sagemaker" and not path.exists():
            with tempfile.TemporaryDirectory(dir=record.directory) as directory:
                fetch(f"{directory}/results")
                os.replace(f"{directory}/results/output/{_RESULT}", path)
        data = path.read_bytes()
    except FileNotFoundError:
        raise NotReady(f"job {record.id} left no value: its function ended the process before it returned") from None
    except OSError as error:
        raise atomic_files.store_error(error, str(path), "read") from error
    try:
        return pickle.loads(data)
    except Exception as error:
        raise SchedulerError(
            f"the value of job {record.id} cannot be loaded here: {type(error).__name__}: {one_line(str(error))}"
        ) from None
