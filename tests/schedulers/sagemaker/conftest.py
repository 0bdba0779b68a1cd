"""An account of AWS that is the tests' own, and jobs in it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import schedulers
from schedulers import Job
from tests.clusters.fixtures import _sagemaker, docker, sagemaker
from tests.clusters.sagemaker import SageMaker

__all__ = ["_sagemaker", "docker", "sagemaker"]

Submit = Callable[..., Job]


def target_options(sagemaker: SageMaker, **more: Any) -> dict[str, Any]:
    return {
        "role": sagemaker.role, "image": "team/train:1", "instance_type": "ml.m5.xlarge",
        "s3_output_path": f"s3://{sagemaker.bucket}/team", **more,
    }  # fmt: skip


@pytest.fixture
def submit(home: Path, project: Path, sagemaker: SageMaker) -> Submit:
    """Submits the text of a shell script."""

    def submit(text: str, *args: str, **given: Any) -> Job:
        (project / "job.sh").write_text(f"{text}\n")
        options = target_options(sagemaker, **given.pop("options", {}))
        settings = {"procs_per_node": 1, "grace_s": 2.0, "time_limit_s": 600.0, **given}
        return schedulers.submit(
            "sh", ["job.sh", *args], entry="command", target="sagemaker", cwd=project, options=options, **settings
        )

    return submit
