"""What plays the controllers of JobSet and Trainer, and a storage driver, in a Kubernetes cluster of the tests.

    python -m tests.clusters.kube.operators DIRECTORY ADDRESS       (by tests.clusters.kubernetes)

In one process, which talks to the API server as the real ones do; ADDRESS is where its webhook answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from pathlib import Path

from . import webhook
from .client import Object, Refused
from .control import API_PORT
from .controllers import POD, SERVICE, Cluster
from .jobsets import JobSets, TrainJobs
from .watch import Access, Connection, Listing


class Storage:
    """A directory for each claim, which every node sees."""

    def __init__(self, connection: Connection, directory: Path) -> None:
        self._connection = connection
        self._directory = directory
        self._changed = asyncio.Event()
        self.claims = Listing(connection, "/api/v1/persistentvolumeclaims", lambda *_: self._changed.set())

    async def run(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            for claim in self.claims:
                if not claim["spec"].get("volumeName") and not claim["metadata"].get("deletionTimestamp"):
                    await self._provide(claim)

    async def _provide(self, claim: Object) -> None:
        metadata, spec = claim["metadata"], claim["spec"]
        directory = self._directory / str(metadata["uid"])
        if directory.exists():
            return
        directory.mkdir(parents=True)
        directory.chmod(0o777)
        reference = {"namespace": metadata["namespace"], "name": metadata["name"], "uid": metadata["uid"]}
        body = {
            "apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": f"pv-{metadata['uid']}"},
            "spec": {
                "capacity": spec["resources"]["requests"], "accessModes": spec["accessModes"],
                "storageClassName": spec.get("storageClassName", ""), "hostPath": {"path": str(directory)},
                "claimRef": {"apiVersion": "v1", "kind": "PersistentVolumeClaim", **reference},
                "persistentVolumeReclaimPolicy": "Retain",
            },
        }  # fmt: skip
        with contextlib.suppress(Refused):
            await self._connection.call("POST", "/api/v1/persistentvolumes", body)


async def _main(box: Path, address: str) -> None:
    server = f"https://{address}:{API_PORT}"
    connection = Connection(Access(server, box / "pki", "admin"))
    cluster = Cluster(connection)
    for operator in (JobSets, TrainJobs):
        operator(cluster)
    storage = Storage(connection, box / "claims")
    await webhook.serve(Access(server, box / "pki", "server"), address, connection)
    listings = [*cluster.listings.values(), storage.claims]
    tasks = [asyncio.create_task(each.run()) for each in listings]
    tasks.append(asyncio.create_task(storage.run()))
    for path in (POD, SERVICE):
        if path in cluster.listings:
            await cluster.listings[path].listed.wait()
    await storage.claims.listed.wait()
    (box / "operators.ready").touch()
    await asyncio.gather(*tasks)


if __name__ == "__main__":
    asyncio.run(_main(Path(sys.argv[1]), sys.argv[2]))
