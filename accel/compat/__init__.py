"""`import accelerate` answered by accel, for code that cannot change its import.

Import this package before anything that imports `accelerate`::

    import accel.compat
    from transformers import Trainer

From then on `accelerate`, its public submodules and its version (`importlib.metadata`,
`importlib.util.find_spec`) are accel's, in this process and in the Python processes it starts, even if
Accelerate itself is installed. ``accelerate.Accelerator is accel.Accelerator``. Modules are imported only
when a name is used.

Raises `StateError` if Accelerate itself is already imported.
"""

from __future__ import annotations

from accel.compat.finder import install

install()
