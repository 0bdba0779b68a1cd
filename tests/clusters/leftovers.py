"""Clusters whose owner ended without stopping them: its run was ended by a signal, or it was killed.

python -m tests.clusters.leftovers     stops them
"""

from __future__ import annotations

from importlib import import_module

from .netns import Slot

# Kind of slot -> the module and class of its cluster, and the method that ends it and removes all that it left.
_CLUSTERS = {
    "as": ("ssh", "SshHosts", "down"),
    "aw": ("slurm", "Slurm", "stop"),
    "ak": ("kubernetes", "Kubernetes", "stop"),
    "dk": ("docker", "Docker", "stop"),
}


def stop_abandoned() -> None:
    for kind, (module, name, method) in _CLUSTERS.items():
        for slot in Slot.abandoned(kind):
            cluster = getattr(import_module(f".{module}", __package__), name)(slot)
            getattr(cluster, method)()
            slot.release()


if __name__ == "__main__":
    stop_abandoned()
