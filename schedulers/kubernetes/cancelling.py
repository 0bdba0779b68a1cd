"""The orderly end of a job: its logs kept, its object deleted, its pods given their grace."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

from ..printable import one_line
from .api import Api
from .errors import NotFound
from .native import Native

logger = logging.getLogger(__name__)


def cancel(api: Api, native: Native, directory: Path) -> None:
    """In the foreground: the object goes when everything that belongs to it is gone. Cancelling what is gone is no
    error. Raises ApiError, Unreachable."""
    from .keeping import keep

    warning = keep(api, native, directory)
    if warning:
        logger.warning("%s", one_line(warning))
    path = api.path(native.api_version, native.plural, native.name, namespace=native.namespace)
    with contextlib.suppress(NotFound):
        api.call("DELETE", path, query={"propagationPolicy": "Foreground"})
