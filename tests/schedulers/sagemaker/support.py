"""What the tests of the sagemaker target make jobs of."""

from __future__ import annotations

from typing import Any

from schedulers import JobSpec
from schedulers.sagemaker.options import SageMakerOptions

ROLE = "arn:aws:iam::123456789012:role/train"
JOB_ID = "2mxaaaaaaaa"


def options(**given: Any) -> SageMakerOptions:
    least: dict[str, Any] = {
        "region": "us-east-1", "role": ROLE, "image": "pytorch:2.8", "instance_type": "ml.m5.xlarge",
        "s3_output_path": "s3://results/team",
    }  # fmt: skip
    return SageMakerOptions(**{**least, **given})


def spec(*argv: str, **given: Any) -> JobSpec:
    return JobSpec(argv=argv or ("train.py",), name="train", time_limit_s=given.pop("time_limit_s", 3600.0), **given)
