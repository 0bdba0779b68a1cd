"""The programs that build images: their detection, their command lines, and the digest from the registry."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from schedulers.errors import SchedulerError, SpecError

PROGRAMS = ("docker", "podman", "buildah")
KANIKO = "kaniko"

# https://github.com/distribution/reference, without a digest, which the build determines.
_PART = r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*"
_HOST = r"(?:[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?)(?:\.[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?)*(?::\d+)?"
_REFERENCE = re.compile(rf"(?P<name>(?:{_HOST}/)?{_PART}(?:/{_PART})*)(?::(?P<tag>\w[\w.-]{{0,127}}))?\Z", re.ASCII)
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}\Z")
_REMEDY = "install one of docker, podman and buildah, or build in the cluster: --builder kaniko"


class BuildError(SchedulerError):
    """An image could not be built or pushed."""


@dataclass(frozen=True, kw_only=True)
class Build:
    """One build.

    context:     a directory with its Dockerfile.
    epoch:       the time of all files in the image, in seconds since 1970.
    extra_flags: additional arguments for the builder.
    """

    tag: str
    context: str
    arguments: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    epoch: int | None = None
    extra_flags: Sequence[str] = ()


def check_tag(text: str) -> str:
    """Return the text if it is a valid image name. Raises SpecError."""
    if "@" in text:
        raise SpecError(f"--tag {text} has a digest: give NAME:TAG")
    if not _REFERENCE.match(text):
        raise SpecError(f"--tag {text!r} is not a valid image name: [HOST[:PORT]/]name[:tag], in lower case")
    return text


def repository(tag: str) -> str:
    """Return the image's name without the tag."""
    match = _REFERENCE.match(tag)
    assert match is not None
    return match["name"]


def choose(requested: str | None) -> str:
    """Return the requested builder, else the first usable one here. Raises BuildError."""
    if requested == KANIKO:
        return KANIKO
    if requested is not None:
        if shutil.which(requested) is None:
            raise BuildError(f"--builder {requested}: {requested} not found on PATH: {_REMEDY}")
        return requested
    installed = [program for program in PROGRAMS if shutil.which(program)]
    builder = next((program for program in installed if program != "docker" or _has_daemon()), None)
    if builder is None:
        reason = "docker is installed, but its daemon does not answer" if installed else "no image builder found"
        raise BuildError(f"{reason}: {_REMEDY}")
    return builder


def command(builder: str, build: Build) -> list[str]:
    """Return the builder's command line."""
    argv = [builder, "build", "--file", os.path.join(build.context, "Dockerfile"), "--tag", build.tag]
    if build.epoch is not None:
        argv += ["--build-arg", f"SOURCE_DATE_EPOCH={build.epoch}"]
        argv += [] if builder == "docker" else ["--timestamp", str(build.epoch)]
    for key, value in build.arguments.items():
        argv += ["--build-arg", f"{key}={value}"]
    for key, value in build.labels.items():
        argv += ["--label", f"{key}={value}"]
    return [*argv, *build.extra_flags, build.context]


def build(builder: str, image_build: Build) -> None:
    """Build the image; the builder's output goes to stderr. Raises BuildError."""
    _run(command(builder, image_build), f"{builder} could not build {image_build.tag}")


def push(builder: str, tag: str) -> str:
    """Push the image and return its digest in the registry. Raises BuildError."""
    problem = f"{builder} could not push {tag}"
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch, "digest")
        digest = "" if builder == "docker" else f"--digestfile={file}"
        _run([argument for argument in (builder, "push", digest, tag) if argument], problem)
        image_digest = _docker_digest(tag) if builder == "docker" else file.read_text().strip()
    if not _DIGEST.match(image_digest):
        raise BuildError(f"{builder} pushed {tag} but did not report its digest ({image_digest or 'nothing'})")
    return image_digest


def _docker_digest(tag: str) -> str:
    argv = ["docker", "image", "inspect", "--format", "{{json .RepoDigests}}", tag]
    completed = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if completed.returncode:
        raise BuildError(f"docker did not report the digest of {tag}: {completed.stderr.strip()}")
    digests = dict(reference.rsplit("@", 1) for reference in json.loads(completed.stdout) or [])
    name = repository(tag)
    return str(digests.get(name) or digests.get(name.removeprefix("docker.io/").removeprefix("library/")) or "")


def _has_daemon() -> bool:
    argv = ["docker", "version", "--format", "{{.Server.Version}}"]
    try:
        return subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=30).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def _run(argv: Sequence[str], problem: str) -> None:
    completed = subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=2)
    if completed.returncode:
        raise BuildError(f"{problem} (exit {completed.returncode}): its output is above")
