"""AWS's own programs for SageMaker, from PyPI: the SDK's local mode, and the toolkit in a container.

Their pins conflict with those of accel: each is in a place of its own, made once. Of the SDK's 136 packages, those that
its local mode imports. The toolkit brings what accel's environment has not, and is seen there by PYTHONPATH.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests import cached
from tests.needs import missing

from .docker import Docker

SDK = """
annotated-types==0.8.0 attrs==26.1.0 boto3==1.44.8 botocore==1.44.8 certifi==2026.10.19.post1
charset-normalizer==3.5.3 idna==3.20 importlib-metadata==6.11.0 jmespath==1.1.0 jsonschema==4.26.0
jsonschema-specifications==2025.9.1 markdown-it-py==4.3.0 mdurl==0.1.2 platformdirs==4.14.8 pydantic==2.14.4
pydantic_core==2.50.5 Pygments==2.21.0 python-dateutil==2.9.0.post0 PyYAML==6.0.4 referencing==0.37.0
requests==2.34.2 rich==14.3.4 rpds-py==2026.9.1 s3transfer==0.19.3 sagemaker-core==2.27.0 sagemaker-train==1.27.0
six==1.17.0 typing_extensions==4.16.0 typing-inspection==0.4.5 urllib3==2.8.0 zipp==4.1.2
""".split()
TOOLKIT = """
sagemaker_training==5.1.4 gevent==26.9.0 greenlet==3.5.6 inotify_simple==1.2.1 retrying==1.4.2 zope.event==6.2
zope.interface==8.7
""".split()
_PIP = "install --quiet --disable-pip-version-check --no-deps".split()
_LIMIT_S = 180


@dataclass(frozen=True)
class Outcome:
    """How local mode ended: its exit code, what it and the containers printed, and the containers' exit codes."""

    code: int
    text: str
    containers: list[int]


def run(request: Mapping[str, Any], docker: Docker, directory: Path) -> Outcome:
    """Run a CreateTrainingJob request by local mode, with the AWS account of this process's environment.

    What the containers left is in `directory`/artifacts.
    """
    python = _sdk() / "bin/python"
    directory.mkdir()
    file = directory / "request.json"
    file.write_text(json.dumps(request))
    # Isolated: its own directory has a sagemaker.py and a docker.py.
    argv = [str(python), "-I", str(Path(__file__).with_name("sagemaker_local_mode.py")), str(file), str(directory)]
    env = {**os.environ, **docker.env, "SAGEMAKER_VALIDATE_ROLE": "false"}
    try:
        done = subprocess.run(
            argv, env=env, cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=_LIMIT_S
        )
        return Outcome(done.returncode, done.stdout, docker.exit_codes())
    finally:
        docker.clear()


def image_table() -> Any:
    """The SDK's own table of AWS's images of PyTorch."""
    (path,) = _sdk().glob("lib/python*/site-packages/sagemaker/core/image_uri_config/pytorch.json")
    return json.loads(path.read_text())


def toolkit() -> Path:
    """A directory for PYTHONPATH with sagemaker-training."""
    return cached.directory("sagemaker-toolkit", (sys.version_info[:2], TOOLKIT), _make_toolkit)


def _sdk() -> Path:
    """A virtual environment with the SDK."""
    return cached.directory("sagemaker-sdk", (sys.version_info[:2], SDK), _make_sdk)


def _make_sdk(place: Path) -> None:
    venv.create(place, with_pip=False)
    _pip("the SageMaker SDK", "--python", str(place / "bin/python"), *_PIP, *SDK)


def _make_toolkit(place: Path) -> None:
    _pip("sagemaker-training", *_PIP, "--target", str(place), *TOOLKIT)


def _pip(what: str, *words: str) -> None:
    done = subprocess.run([sys.executable, "-m", "pip", *words], capture_output=True, text=True)
    if done.returncode:
        missing(what, f"pip reaches no index: {done.stderr.strip()[-300:]}")
