"""`import accelerate`, answered by accel, for code that cannot change its import; nothing that is used without it.

Importing this package is enough, and comes before anything that imports `accelerate`::

    import accel.compat
    from transformers import Trainer

From then on `accelerate`, its public submodules and its version (`importlib.metadata`, `importlib.util.find_spec`)
are accel's, in this process and in the Python processes it starts, even where Accelerate itself is installed.
``accelerate.Accelerator is accel.Accelerator``. Nothing else is imported until a name is asked for.

Raises `StateError` where Accelerate itself was imported before.
"""

from __future__ import annotations

from accel.compat.finder import install

install()
