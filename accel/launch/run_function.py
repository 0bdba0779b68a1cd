"""Call the function of a job in every rank: `python -m accel.launch.run_function NAME bytes=N sha256=DIGEST`.

`function.pkl` has a line of JSON with the versions that wrote it, and the pickle of function, arguments and keyword
arguments. Rank 0 writes the returned value to `result.pkl`, which `accel.submit`'s `Job.result` reads.
"""

from __future__ import annotations

# A package of the program may have the name `schedulers`: nothing is imported from there.
import hashlib
import json
import os
import pickle
import platform
import sys
from collections.abc import Callable, Sequence
from typing import Any

_FILE, _RESULT = "function.pkl", "result.pkl"  # as in schedulers/job.py


class SetupError(Exception):
    """The function cannot be loaded here."""


def main(argv: Sequence[str]) -> None:
    source, destination = _directories()
    name, digest = argv[0], argv[-1]
    function, args, kwargs = load(os.path.join(source, _FILE), digest)
    value = function(*args, **kwargs)
    if os.environ.get("RANK", "0") == "0":
        write(os.path.join(destination, _RESULT), pickle_value(value, name))


def _directories() -> tuple[str, str]:
    """Return the directories of the function and of its result: the job's, or SageMaker's."""
    directory = os.environ.get("ACCEL_JOB_DIR")
    if directory is not None:
        return directory, directory
    try:
        return os.environ["SM_CHANNEL_CODE"], os.environ["SM_OUTPUT_DATA_DIR"]
    except KeyError:
        raise SetupError("no job's directory: accel.submit(FUNCTION) starts this module in a job") from None


def load(path: str, digest: str) -> tuple[Callable[..., object], Sequence[Any], dict[str, Any]]:
    """Load function, arguments and keyword arguments. Raises SetupError if this Python cannot load them."""
    with open(path, "rb") as file:
        content = file.read()
    if f"sha256={hashlib.sha256(content).hexdigest()}" != digest:
        raise SetupError(f"{path} is not what was submitted: its sha256 is another")
    header, _, data = content.partition(b"\n")
    versions = json.loads(header)
    python = platform.python_version()
    try:
        import cloudpickle
    except ImportError:
        cloudpickle = None
    # Pickled functions are byte code, which differs between minor versions.
    if cloudpickle is None or versions["python"].split(".")[:2] != python.split(".")[:2]:
        installed = "no cloudpickle" if cloudpickle is None else f"cloudpickle {cloudpickle.__version__}"
        raise SetupError(
            f"the function was pickled by Python {versions['python']} with cloudpickle {versions['cloudpickle']}, "
            f"and this is Python {python} with {installed}"
        )
    loaded: tuple[Callable[..., object], Sequence[Any], dict[str, Any]] = pickle.loads(data)
    return loaded


def pickle_value(value: object, name: str) -> bytes:
    import cloudpickle

    try:
        data: bytes = cloudpickle.dumps(value)
    except Exception as error:  # of any class's own __reduce__
        problem = " ".join(str(error).split())
        raise TypeError(f"the value that {name} returned cannot be pickled: {problem}") from None
    return data


def write(path: str, data: bytes) -> None:
    """Write the file whole or not at all."""
    partial = f"{path}.{os.getpid()}"
    with open(partial, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


if __name__ == "__main__":
    main(sys.argv[1:])
