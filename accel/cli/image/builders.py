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

# https://github.com/distribution/reference, but for a digest, which is what comes out.
_PART = r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*"
_HOST = r"(?:[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?)(?:\.[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?)*(?::\d+)?"
_REFERENCE = re.compile(rf"(?P<name>(?:{_HOST}/)?{_PART}(?:/{_PART})*)(?::(?P<tag>\w[\w.-]{{0,127}}))?\Z", re.ASCII)
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}\Z")
_REMEDY = "install one of docker, podman and buildah, or have it built in the cluster: --builder kaniko"


class BuildError(SchedulerError):
    """An image could not be built or pushed."""


@dataclass(frozen=True, kw_only=True)
class Build:
    """One build.

    context: a directory with its Dockerfile.
    epoch:   the time of all files in the image, in seconds since 1970.
    more:    further words for the builder.
    """

    tag: str
    context: str
    arguments: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    epoch: int | None = None
    more: Sequence[str] = ()


def check_tag(text: str) -> str:
    """Return the text if it is a valid image name. Raises SpecError."""
    if "@" in text:
        raise SpecError(f"--tag {text}: a digest is what the build gives; name the image and a tag: team/train:1")
    if not _REFERENCE.match(text):
        raise SpecError(f"--tag {text!r} is not the name of an image: [HOST[:PORT]/]name[:tag], in small letters")
    return text


def repository(tag: str) -> str:
    """Return the image's name without the tag."""
    found = _REFERENCE.match(tag)
    assert found is not None
    return found["name"]


def choose(wanted: str | None) -> str:
    """Return the requested builder, else the first usable one here. Raises BuildError."""
    if wanted == KANIKO:
        return KANIKO
    if wanted is not None:
        if shutil.which(wanted) is None:
            raise BuildError(f"--builder {wanted}: there is no {wanted} on PATH: {_REMEDY}")
        return wanted
    there = [program for program in PROGRAMS if shutil.which(program)]
    found = next((program for program in there if program != "docker" or _has_daemon()), None)
    if found is None:
        why = "docker is there, and its daemon does not answer" if there else "nothing here builds images"
        raise BuildError(f"{why}: {_REMEDY}")
    return found


def command(builder: str, build: Build) -> list[str]:
    """Return the builder's command line."""
    words = [builder, "build", "--file", os.path.join(build.context, "Dockerfile"), "--tag", build.tag]
    if build.epoch is not None:
        words += ["--build-arg", f"SOURCE_DATE_EPOCH={build.epoch}"]
        words += [] if builder == "docker" else ["--timestamp", str(build.epoch)]
    for key, value in build.arguments.items():
        words += ["--build-arg", f"{key}={value}"]
    for key, value in build.labels.items():
        words += ["--label", f"{key}={value}"]
    return [*words, *build.more, build.context]


def build(builder: str, wanted: Build) -> None:
    """Build the image; the builder's output goes to stderr. Raises BuildError."""
    _run(command(builder, wanted), f"{builder} could not build {wanted.tag}")


def push(builder: str, tag: str) -> str:
    """Push the image and return its digest in the registry. Raises BuildError."""
    failed = f"{builder} could not push {tag}"
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch, "digest")
        digest = "" if builder == "docker" else f"--digestfile={file}"
        _run([word for word in (builder, "push", digest, tag) if word], failed)
        found = _of_docker(tag) if builder == "docker" else file.read_text().strip()
    if not _DIGEST.match(found):
        raise BuildError(f"{builder} pushed {tag}, and does not tell its digest ({found or 'nothing'})")
    return found


def _of_docker(tag: str) -> str:
    words = ["docker", "image", "inspect", "--format", "{{json .RepoDigests}}", tag]
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        raise BuildError(f"docker does not tell the digest of {tag}: {done.stderr.strip()}")
    known = dict(reference.rsplit("@", 1) for reference in json.loads(done.stdout) or [])
    name = repository(tag)
    return str(known.get(name) or known.get(name.removeprefix("docker.io/").removeprefix("library/")) or "")


def _has_daemon() -> bool:
    words = ["docker", "version", "--format", "{{.Server.Version}}"]
    try:
        return subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, timeout=30).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def _run(words: Sequence[str], failed: str) -> None:
    done = subprocess.run(words, stdin=subprocess.DEVNULL, stdout=2)
    if done.returncode:
        raise BuildError(f"{failed} (exit {done.returncode}): what it said is above")
