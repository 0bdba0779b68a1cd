"""The operators of a Kubernetes cluster of the tests, in one process: training operator, Trainer, JobSet, Job.

python -m tests.clusters.kubernetes_operators DIRECTORY       (by tests.clusters.kubernetes)
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from .kubernetes_controllers import POD, SERVICE, Cluster
from .kubernetes_jobs import Jobs
from .kubernetes_jobsets import JobSets, TrainJobs
from .kubernetes_node import Shape
from .kubernetes_pytorchjob import PyTorchJobs
from .kubernetes_watch import Access, Connection


async def _main(box: Path) -> None:
    shape = Shape.load(box / "nodes.json")
    connection = Connection(Access(shape.server, box / "pki", "admin"))
    cluster = Cluster(connection)
    for operator in (PyTorchJobs, Jobs, JobSets, TrainJobs):
        operator(cluster)
    tasks = [asyncio.create_task(listing.run()) for listing in cluster.listings.values()]
    for path in (POD, SERVICE):
        await cluster.listings[path].listed.wait()
    (box / "operators.ready").touch()
    await asyncio.gather(*tasks)


if __name__ == "__main__":
    asyncio.run(_main(Path(sys.argv[1])))
