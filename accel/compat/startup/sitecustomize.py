"""Startup of a Python process whose parent uses `accel.compat`: enable it here, then run the user's own file.

Any Python may load this file, also of another version or without accel, and must not fail.
"""

import os
import sys


def _go_on() -> None:
    if os.environ.get("ACCEL_COMPAT") != "1":
        return
    try:
        import accel.compat  # noqa: F401
    except ImportError:
        return


def _user_own() -> None:
    """Run the `sitecustomize` that this one hides, under its own name."""
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    directory = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != directory]
    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is None or spec.loader is None:
        return
    module = module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


try:
    _go_on()
finally:
    _user_own()
