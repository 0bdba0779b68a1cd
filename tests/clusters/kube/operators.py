"""The operators of a Kubernetes cluster of the tests, in one process: training operator, Trainer, JobSet, Job.

python -m tests.clusters.kube.operators DIRECTORY       (by tests.clusters.kubernetes)
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from . import webhook
from .controllers import POD, SERVICE, Cluster
from .jobs import Jobs
from .jobsets import JobSets, TrainJobs
from .node import Shape
from .pytorchjob import PyTorchJobs
from .watch import Access, Connection


async def _main(box: Path) -> None:
    shape = Shape.load(box / "nodes.json")
    connection = Connection(Access(shape.server, box / "pki", "admin"))
    cluster = Cluster(connection)
    for operator in (PyTorchJobs, Jobs, JobSets, TrainJobs):
        operator(cluster)
    await webhook.serve(Access(shape.server, box / "pki", "server"), shape.api_address, connection)
    tasks = [asyncio.create_task(listing.run()) for listing in cluster.listings.values()]
    for path in (POD, SERVICE):
        await cluster.listings[path].listed.wait()
    (box / "operators.ready").touch()
    await asyncio.gather(*tasks)


if __name__ == "__main__":
    asyncio.run(_main(Path(sys.argv[1])))
