"""Metrics in Prometheus' format: of jobs, from the database at each scrape, and of requests and submits."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from sqlalchemy import Select, func, select

from .database import Database
from .tables import job

_SUBMIT_BUCKETS_S = (0.1, 0.5, 1, 2, 5, 10, 30, 60, 300)


class Metrics:
    """The metrics of one server."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._registry = CollectorRegistry()
        self._registry.register(self)  # which calls `collect`
        self.requests = Counter(
            "accel_requests", "Requests, by the function that answers them.", ["endpoint", "status"],
            registry=self._registry,
        )  # fmt: skip
        self.submit_seconds = Histogram(
            "accel_submit_seconds", "Time from a request to the target's answer.", ["target"],
            buckets=_SUBMIT_BUCKETS_S, registry=self._registry,
        )  # fmt: skip

    def text(self) -> bytes:
        """Return all metrics as text."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics that the database has."""
        live = job.c.ended_at.is_(None)
        count = select(job.c.state, job.c.target, job.c.project, func.count())
        yield self._gauge("accel_jobs", "Jobs.", ["state", "target", "project"], count)
        gpus = select(job.c.project, func.sum(job.c.gpus)).where(job.c.state == "running")
        yield self._gauge("accel_gpus_running", "GPUs of running jobs.", ["project"], gpus)
        age = select(job.c.target, time.time() - func.min(job.c.observed_at)).where(live, job.c.state != "submitting")
        yield self._gauge("accel_poll_age_seconds", "Age of the oldest status of a live job.", ["target"], age)

    def _gauge(self, name: str, text: str, labels: list[str], query: Select[Any]) -> Metric:
        """Return the last column of each row, by the columns before it."""
        family = GaugeMetricFamily(name, text, labels=labels)
        with self._database.read() as connection:
            for row in connection.execute(query.group_by(*(job.c[label] for label in labels))):
                family.add_metric([str(value) for value in row[:-1]], float(row[-1]))
        return family
