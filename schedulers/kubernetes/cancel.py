"""Cancel jobs: archive the logs and delete the job's object; its pods end within their grace period."""

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
    """Archive the logs and delete the job's object. Do nothing if the job is gone.

    A later object of the same name stays. Raises ApiError, Unreachable.

    Deletes in the background: a foreground deletion ends with an UPDATE, which Trainer's webhook refuses since
    the runtime is gone by then. This also frees an object that an earlier deletion left behind.
    """
    from .logs.archive import archive_job

    if query.replaced(api, native):
        return
    warning = archive_job(api, native, directory)
    if warning:
        logger.warning("%s", one_line(warning))
    path = api.path(native.api_version, native.plural, native.name, namespace=native.namespace)
    with contextlib.suppress(NotFound):
        api.call("DELETE", path, query={"propagationPolicy": "Background"})


def cancel_rest(api: Api, native: Native, directory: Path) -> bool:
    """Cancel a finished job if one of its pods still runs, as those of a failed PyTorchJob may.

    Returns True if one does. Raises ApiError, Unreachable.
    """
    pods = query.pods_of(api, native)
    if not any(pod_states.is_alive(pod, api.now()) for pod in pods) or query.replaced(api, native):
        return False
    cancel(api, native, directory)
    return True
