"""sagemaker_raw.py REQUEST: makes the S3 calls of a submit, for code that S3 has, and CreateTrainingJob."""

import json
import sys
import uuid
from pathlib import Path

import boto3

given = json.loads(Path(sys.argv[1]).read_text())
request, bucket, contents = given["request"], given["bucket"], given["contents"]
name = f"raw-{uuid.uuid4().hex[:12]}"
s3 = boto3.client("s3")
s3.head_bucket(Bucket=bucket)
for key, file in contents.items():
    s3.head_object(Bucket=bucket, Key=key)
    s3.copy({"Bucket": bucket, "Key": key}, bucket, f"raw/{name}/{file}")
for file, text in given["files"].items():
    s3.put_object(Bucket=bucket, Key=f"raw/{name}/{file}", Body=text.encode())
request["InputDataConfig"][0]["DataSource"]["S3DataSource"]["S3Uri"] = f"s3://{bucket}/raw/{name}/"
boto3.client("sagemaker").create_training_job(**{**request, "TrainingJobName": name})
