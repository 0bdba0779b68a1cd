"""The state that the parts of one server share."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Annotated, cast

from fastapi import Depends, Request

from schedulers.store.store import Store

from .changes import Changes
from .database import Database
from .limits import Failures
from .metrics import Metrics
from .settings import Settings
from .spool import Spools


class ServeContext:
    """The settings, database and job store of a running server.

    id:      random, and kept in the home.
    ending:  set once the server shuts down.
    submits: set when there is a job to submit.
    """

    def __init__(self, settings: Settings, database: Database, store: Store, server_id: str) -> None:
        self.settings, self.database, self.store, self.id = settings, database, store, server_id
        self.home = Path(settings.home)
        self.ending, self.submits = threading.Event(), threading.Event()
        self.failures, self.changes, self.metrics = Failures(), Changes(), Metrics(database)
        self.spools = Spools(store, self.home / "logs", int(settings.max_log), self.ending)

    def end(self) -> None:
        """Begin the end: threads and waiting requests look at `ending` now."""
        self.ending.set()
        self.submits.set()
        self.changes.notify()
        self.spools.changes.notify()


def context_of(request: Request) -> ServeContext:
    """Return the context of the application that serves the request."""
    return cast(ServeContext, request.app.state.context)


Context = Annotated[ServeContext, Depends(context_of)]
