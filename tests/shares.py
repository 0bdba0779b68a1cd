"""Which tests one worker of several runs together, and in which order they are begun.

A cluster belongs to the process that started it, and one test at a time may break it: so all files that need one of a
kind are one share. Kubernetes is shared by all workers (`clusters/sharing.py`); the tests that break it are one share,
begun first, so that no other worker waits each time for its repair. Any other file is a share of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
# The folders of a kind, and what stands in the files of theirs whose tests take the cluster. One worker runs them all.
SERVERS = {
    "slurm": (
        ("tests/schedulers/slurm", "tests/cli/test_slurm.py", "tests/clusters/test_slurm.py"),
        r": (Slurm|Submit)\b",
    ),
    "ssh": (("tests/schedulers/ssh",), r": (SshHosts|Submit|Pool)\b"),
    "kubernetes": (
        ("tests/schedulers/kubernetes", "tests/helm", "tests/clusters/test_kubernetes*.py"),
        r": (Kubernetes|Submit|Server|Run)\b",
    ),
    "sagemaker": (("tests/schedulers/sagemaker", "tests/clusters/test_sagemaker.py"), r": SageMaker\b"),
    "tpu": (("tests/schedulers/tpu", "tests/clusters/test_tpu.py"), r": Tpu\b"),
    # Other hosts like those of "ssh", which take a second to start: together they would be what everybody waits for.
    "hosts": (("tests/schedulers/hosts", "tests/launch/test_cut.py"), r": (SshHosts|Submit|Pool)\b"),
}
# Start servers of their own: hosts, a registry, a tracking server, jobs of several machines.
_MORE_SERVERS = (
    "tests/clusters/*", "tests/cli/test_image.py", "tests/launch/test_nodes.py", "tests/launch/test_kills.py",
    "tests/serve/test_container.py",
    "tests/runtime/tracking/test_outage.py", "tests/runtime/tracking/test_packages.py", "tests/test_docs.py",
    "tests/compat/test_libraries.py", "tests/compat/test_sharded_libraries.py", "tests/cli/test_estimate_memory.py",
)  # fmt: skip
# Take more than their share of the time; `make test-fast` leaves them out too.
_SLOW = (
    "tests/cli/test_selftest.py", "tests/cli/test_env.py", "tests/cli/test_estimate_hub.py",
    "tests/cli/test_versions.py",
    "tests/cli/test_tpu_gcloud.py", "tests/compat/test_command.py", "tests/compat/test_mirror.py",
    "tests/launch/test_preemption.py", "tests/launch/test_program.py", "tests/launch/test_scheduled.py",
    "tests/launch/test_signals.py", "tests/launch/test_world.py", "tests/test_scripts.py",
    "tests/runtime/checkpoint/test_formats.py", "tests/runtime/checkpoint/test_killed.py",
    "tests/runtime/training/test_compile.py", "tests/runtime/test_digits.py", "tests/runtime/test_memory.py",
    "tests/runtime/checkpoint/test_resume_placements.py", "tests/runtime/big_models/test_against_accelerate.py",
    "tests/runtime/big_models/test_libraries.py",
)  # fmt: skip
# Begun early: files that take minutes would otherwise be what everybody waits for at the end.
_LONG = frozenset({
    "tests/runtime/tracking/test_packages.py", "tests/compat/test_libraries.py",
    "tests/compat/test_sharded_libraries.py",
    "tests/launch/test_kills.py", "tests/launch/test_nodes.py", "tests/cli/test_image.py",
    "tests/cli/test_estimate_memory.py",
})  # fmt: skip
_DOCS = "tests/test_docs.py"  # whose tests are programs of their own, and take minutes together
_APART = frozenset(
    {
        _DOCS,
        "tests/schedulers/kubernetes/logs/test_logs.py",
        "tests/schedulers/kubernetes/status/test_job_states_live.py",
    }
)
_ANY_WORKER = "kubernetes"  # the kind of cluster that all workers share
_ALONE = f"{_ANY_WORKER} alone"


def share(nodeid: str, kinds: Mapping[str, str]) -> str:
    """Whose tests are run together with this one."""
    path, _, name = nodeid.partition("::")
    kind = kinds.get(path, path)
    if kind == _ANY_WORKER and name.partition("[")[0] in _alone(path):
        return _ALONE
    return nodeid if path in _APART else path if kind == _ANY_WORKER else kind


def in_order(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """The tests of each kind of cluster, those that break Kubernetes, the long files, Kubernetes, and the others."""
    by_share: dict[str, list[pytest.Item]] = {}
    kinds = cluster_files()
    for item in items:
        by_share.setdefault(share(item.nodeid, kinds), []).append(item)
    first = [*(kind for kind in SERVERS if kind != _ANY_WORKER), _ALONE]
    early = [name for name in by_share if name in _LONG or name.startswith(_DOCS)]

    def place(name: str) -> tuple[int, int]:
        if name in first:
            return 0, first.index(name)
        if name in early:
            return 1, 0
        return 2 if kinds.get(name.partition("::")[0]) == _ANY_WORKER else 3, 0

    return [item for name in sorted(by_share, key=place) for item in by_share[name]]


@cache
def _alone(path: str) -> set[str]:
    """The tests of a file that are marked `alone`. By its text: who hands out shares has collected nothing."""
    pattern = r"^@pytest\.mark\.alone\b.*\n(?:@.*\n(?: .*\n|\)\n)*)*def (test_\w+)"
    return set(re.findall(pattern, (ROOT / path).read_text(), re.MULTILINE))


def needs_a_server(nodeid: str) -> bool:
    path = nodeid.partition("::")[0]
    return path in cluster_files() or any(fnmatch(path, pattern) for pattern in (*_MORE_SERVERS, *_SLOW))


@cache
def cluster_files() -> dict[str, str]:
    """The kind of cluster that the tests of a file take, if they take one."""
    found: dict[str, str] = {}
    for kind, (places, needed) in SERVERS.items():
        for place in places:
            paths = ROOT.glob(place) if place.endswith(".py") else (ROOT / place).rglob("test_*.py")
            for path in paths:
                name = path.relative_to(ROOT).as_posix()
                if name not in found and re.search(needed, path.read_text()):
                    found[name] = kind
    return found


def seconds_by_folder(stats: Mapping[str, Iterable[object]]) -> list[tuple[str, float]]:
    """The seconds that the tests of each folder took, setups included, added up over all workers; the longest first."""
    seconds: dict[str, float] = {}
    for reports in stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                folder = report.nodeid.partition("::")[0].rpartition("/")[0]
                seconds[folder] = seconds.get(folder, 0.0) + report.duration
    return sorted(seconds.items(), key=lambda pair: -pair[1])


def scheduler(config: pytest.Config, log: Any) -> object:
    """Hands out shares where pytest-xdist would hand out files."""
    from xdist.scheduler import LoadFileScheduling

    class Shares(LoadFileScheduling):  # type: ignore[misc]  # pytest-xdist has no types
        def _split_scope(self, nodeid: str) -> str:
            return share(nodeid, cluster_files())

    return Shares(config, log)
