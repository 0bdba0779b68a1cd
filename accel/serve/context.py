"""The state that the parts of one server share."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
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


@dataclass(frozen=True)
class ServeContext:
    """The settings, database and job store of a running server.

    id:      random, and kept in the home.
    ending:  set once the server shuts down.
    submits: set when there is a job to submit.
    """

    settings: Settings
    database: Database
    store: Store
    id: str
    ending: threading.Event = field(default_factory=threading.Event)
    submits: threading.Event = field(default_factory=threading.Event)
    failures: Failures = field(default_factory=Failures)
    changes: Changes = field(default_factory=Changes)
    metrics: Metrics = field(init=False)
    spools: Spools = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "metrics", Metrics(self.database))
        spools = Spools(self.store, self.home / "logs", int(self.settings.max_log), self.ending)
        object.__setattr__(self, "spools", spools)

    @property
    def home(self) -> Path:
        """The directory of the server's files."""
        return Path(self.settings.home)

    def end(self) -> None:
        """Begin the end: threads and waiting requests look at `ending` now."""
        self.ending.set()
        self.submits.set()
        self.changes.notify_all()
        self.spools.changes.notify_all()


def context_of(request: Request) -> ServeContext:
    """Return the context of the application that serves the request."""
    return cast(ServeContext, request.app.state.context)


Context = Annotated[ServeContext, Depends(context_of)]
