"""`accel submit --target sagemaker` beside a script with boto3, at the tests' endpoint on this computer
(`tests/clusters/sagemaker.py`): they share its processors, and their network has no latency.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from .measure import difference, interleaved, report_limits, wall

BIN = Path(sys.executable).parent
RAW = Path(__file__).parent / "scripts/sagemaker_raw.py"
LIMIT_S = 0.5
_TARGET = """\
targets:
  lab:
    kind: sagemaker
    role: {role}
    image: team/train:1
    instance_type: ml.m5.xlarge
    s3_output_path: s3://{bucket}
"""


def sagemaker_submit(rounds: int) -> bool:
    """A job whose code S3 has: the first, which is not counted, has sent it. No instances start."""
    from tests.clusters.sagemaker import SageMaker, lacks

    absent = lacks()
    if absent is not None:
        print(f"sagemaker: not measured, for {absent[0]} is missing: {absent[1]}", file=sys.stderr)
        return False
    endpoint = SageMaker()
    try:
        with tempfile.TemporaryDirectory() as folder:
            return _submits(endpoint, Path(folder), rounds)
    finally:
        endpoint.end()


def _submits(endpoint: Any, folder: Path, rounds: int) -> bool:
    endpoint.configure(capacity=False)
    project = folder / "project"
    project.mkdir()
    (project / "accel.yaml").write_text(_TARGET.format(role=endpoint.role, bucket=endpoint.bucket))
    (project / "train.py").write_text("print('trained')\n")
    env = {**os.environ, **endpoint.env, "ACCEL_HOME": str(folder / "home")}
    words = [str(BIN / "accel"), "submit", "--target", "lab", "--time-limit", "1h", "train.py"]
    submit = wall(words, env, str(project))
    submit()
    (folder / "raw.json").write_text(json.dumps(_made(endpoint)))
    ours, raw = "accel submit", "the same calls with boto3"
    measures = {raw: wall([sys.executable, str(RAW), str(folder / "raw.json")], env), ours: submit}
    seconds = interleaved(measures, rounds)
    return report_limits("sagemaker_submit", seconds, {difference(seconds, ours, raw): LIMIT_S})


def _made(endpoint: Any) -> dict[str, Any]:
    """The job that accel has made: its request, and what it has put into S3."""
    (request,) = [call.request for call in endpoint.calls("sagemaker", "CreateTrainingJob")]
    s3 = endpoint.client("s3")
    keys = [each["Key"] for each in s3.list_objects_v2(Bucket=endpoint.bucket)["Contents"]]
    names = {key: key.rpartition("/")[2] for key in keys}
    small = {key: name for key, name in names.items() if name in ("entry.py", "job.json")}
    texts = {name: s3.get_object(Bucket=endpoint.bucket, Key=key)["Body"].read() for key, name in small.items()}
    return {
        "request": dict(request),
        "bucket": endpoint.bucket,
        "contents": {key: name for key, name in names.items() if "/content/" in key},
        "files": {name: text.decode() for name, text in texts.items()},
    }
