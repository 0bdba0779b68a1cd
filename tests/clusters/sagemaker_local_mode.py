"""Runs a CreateTrainingJob request by local mode of the SageMaker SDK 3, whose interpreter this needs.

python sagemaker_local_mode.py REQUEST DIRECTORY
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import boto3

# From this module, which is imported without numpy, pandas and scipy; those that define them are not.
from sagemaker.train.local.local_container import Channel, DataSource, Session, _LocalContainer


def _channel(given: dict[str, Any]) -> Channel:
    source = given["DataSource"]["S3DataSource"]
    s3 = {
        "s3_data_type": source["S3DataType"],
        "s3_uri": source["S3Uri"],
        "s3_data_distribution_type": source.get("S3DataDistributionType", "FullyReplicated"),
    }
    return Channel(channel_name=given["ChannelName"], data_source=DataSource(s3_data_source=s3))


def main(request: dict[str, Any], directory: str) -> None:
    algorithm = request["AlgorithmSpecification"]
    # With a bucket it asks nobody for the account.
    session = Session(boto_session=boto3.Session(), default_bucket="none")
    _LocalContainer(
        training_job_name=request["TrainingJobName"],
        instance_type="local_cpu",
        instance_count=request["ResourceConfig"]["InstanceCount"],
        image=algorithm["TrainingImage"],
        container_root=directory,
        input_data_config=[_channel(channel) for channel in request["InputDataConfig"]],
        environment=dict(request.get("Environment", {})),
        hyper_parameters=dict(request.get("HyperParameters", {})),
        sagemaker_session=session,
        container_entrypoint=algorithm.get("ContainerEntrypoint"),
        container_arguments=algorithm.get("ContainerArguments"),
    ).train(wait=True)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), sys.argv[2])
