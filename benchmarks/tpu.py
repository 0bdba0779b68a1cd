"""`accel submit --target tpu` beside `--target ssh`, on the same hosts: the tests' Google Cloud on this computer
(`tests/clusters/tpu.py`). They share its processors, and their network has no latency.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .measure import Bar, interleaved, report

ROOT = Path(__file__).parents[1]
HOSTS = 4


def tpu_submit(rounds: int) -> bool:
    """A job on four hosts, whose code they have, by a process that has imported everything and is connected to none."""
    from tests.clusters.tpu import PARENT, ZONE, Tpu, lacks

    absent = lacks()
    if absent is not None:
        print(f"tpu: not measured, for {absent[0]} is missing: {absent[1]}", file=sys.stderr)
        return False
    google = Tpu(HOSTS)
    try:
        with tempfile.TemporaryDirectory() as folder:
            node = {"accelerator_type": f"v4-{8 * HOSTS}", "runtime_version": "tpu-ubuntu2204-base"}
            with google.client() as client:
                client.create_node(parent=PARENT, node_id="pod1", node=node).result()
            os.environ.update({**google.env, "ACCEL_HOME": f"{folder}/home"})
            common = {"ssh_config": str(google.hosts.config), "python": sys.executable, "cpu": True, "disk_gb": 0.001}
            measures = {
                "tpu": _submitted(Path(folder), "tpu", {**common, "zone": ZONE, "name": "pod1"}),
                "ssh": _submitted(Path(folder), "ssh", {**common, "hosts": f"node[1-{HOSTS}]"}),
            }
            return report("tpu_submit", interleaved(measures, rounds), [Bar(ours="tpu", base="ssh", limit=1.2)])
    finally:
        google.end()


def _submitted(folder: Path, target: str, options: dict[str, Any]) -> Callable[[], float]:
    import schedulers

    project = folder / "project"
    project.mkdir(exist_ok=True)
    (project / "job.sh").write_text("true\n")

    def measure() -> float:
        started = time.perf_counter()
        job = schedulers.submit(
            "sh", ["job.sh"], entry="command", target=target, nodes=HOSTS, procs_per_node=1, cwd=project,
            env={"PYTHONPATH": str(ROOT)}, options=options,
        )  # fmt: skip
        taken = time.perf_counter() - started
        job.wait(120)
        made: Any = job.waiting_target()
        made.close()
        return taken

    return measure
