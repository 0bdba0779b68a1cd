"""The orderly end of a job: its logs kept, its object deleted, its pods given their grace."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

from ..printable import one_line
from .client.api import Api
from .client.errors import NotFound
from .native_id import Native
from .status import pod_states, query

logger = logging.getLogger(__name__)


def cancel(api: Api, native: Native, directory: Path) -> None:
    """Archive the logs and delete the job's object. Cancelling a job that is gone is no error, also where a later
    object has its name. Raises ApiError, Unreachable.

    In the background: a deletion in the foreground needs an UPDATE at its end, which Trainer's webhook refuses since
    the runtime is gone by then. This also frees an object that an earlier deletion left behind.
    """
    from .logs.archive import keep

    if query.replaced(api, native):
        return
    warning = keep(api, native, directory)
    if warning:
        logger.warning("%s", one_line(warning))
    path = api.path(native.api_version, native.plural, native.name, namespace=native.namespace)
    with contextlib.suppress(NotFound):
        api.call("DELETE", path, query={"propagationPolicy": "Background"})


def cancel_rest(api: Api, native: Native, directory: Path) -> bool:
    """Cancel a job that is over when one of its pods still runs, as others of a failed PyTorchJob do. Returns True when
    one does. Raises ApiError, Unreachable."""
    pods = query.pods_of(api, native)
    if not any(pod_states.alive(pod, api.now()) for pod in pods) or query.replaced(api, native):
        return False
    cancel(api, native, directory)
    return True
