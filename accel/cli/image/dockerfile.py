"""The text of the Dockerfiles: those in deploy/, and the one of a project's image. Pure.

They share stages. Docker, podman, buildah and kaniko build them; nothing needs BuildKit.
"""

# ruff: noqa: E501  # lines of another language

from __future__ import annotations

import re
from collections.abc import Mapping

# Contents of a project's build context besides the Dockerfile.
WHEELS, REQUIREMENTS, CODE = "wheels", "requirements.txt", "code"

_REPOSITORY = """\
# accel and torch in an image whose user is not root, for pods that keep to the restricted Pod Security Standard.
#
#   docker build --file deploy/kubernetes/Dockerfile --build-arg VARIANT=cuda --tag team/accel:cuda .
#   docker build --file deploy/kubernetes/Dockerfile --build-arg VARIANT=cpu --build-arg TORCH_INDEX=… --tag team/accel:cpu .
#
# The context is the root of the repository. README.md beside this file names every argument. `accel image build` has
# the same stages, and puts a project on top. Made from accel/cli/image/dockerfile.py: make golden

"""
_SAGEMAKER = """\
# What the containers of SageMaker's training jobs need: Python, torch, numpy, safetensors, and boto3 for secrets.
#
#   docker build --file deploy/sagemaker/Dockerfile --build-arg VARIANT=cuda --tag accel:cuda .
#
# The context is the root of the repository. The arguments are those of deploy/kubernetes/README.md. The user is root,
# who alone may write to /opt/ml. Made from accel/cli/image/dockerfile.py: make golden

"""
_PROJECT = """\
# A project in an image whose user is not root, for pods that keep to the restricted Pod Security Standard.
# Made by accel image build.

"""
# Without timestamps in compiled modules, equal projects make equal images.
_PIP = """\
ARG SOURCE_DATE_EPOCH
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_TRUSTED_HOST
"""
_FROM_SOURCES = f"""\
FROM ${{PYTHON_IMAGE}} AS wheel
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY accel accel
COPY schedulers schedulers
# The index where packages come from, where it is not pip's own: pip reads these as they are.
{_PIP}RUN python -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .
COPY constraints.txt /wheels/constraints.txt
"""
_WHEEL_STAGE = f"""\
FROM scratch AS wheel
COPY {WHEELS} /wheels
"""
_PACKAGES = f"""\
FROM ${{PYTHON_IMAGE}} AS packages
ARG VARIANT=cuda
# The index that has torch for that variant, where the one above does not.
ARG TORCH_INDEX
ARG EXTRAS=train
{_PIP}ENV PATH=/opt/venv/bin:$PATH
COPY --from=wheel /wheels /wheels
# Its version is the one that constraints.txt pins.
# hadolint ignore=DL3013
RUN python -m venv /opt/venv \\
    && pip install --no-cache-dir ${{TORCH_INDEX:+--index-url "$TORCH_INDEX"}} "$(grep '^torch[=>]=' /wheels/constraints.txt)"
# A CUDA build by mistake makes a CPU image gigabytes larger; a CPU build by mistake trains without its GPUs.
RUN python -c "import sys, torch; built = 'cuda' if torch.version.cuda else 'cpu'; sys.exit(0 if built == '$VARIANT' else f'VARIANT=$VARIANT, but the index gave torch {{torch.__version__}} ({{built}}): name another with TORCH_INDEX')"
RUN wheel="$(ls /wheels/*.whl)" \\
    && pip install --no-cache-dir --constraint /wheels/constraints.txt "${{wheel}}[$EXTRAS]" \\
    && accel --version
"""
_SYSTEM = """\
FROM ${PYTHON_IMAGE} AS runtime
ARG VARIANT=cuda
ARG REVISION=unknown
LABEL org.opencontainers.image.title="accel" \\
      org.opencontainers.image.description="accel and torch (${VARIANT})" \\
      org.opencontainers.image.licenses="Apache-2.0" \\
      org.opencontainers.image.revision="${REVISION}"
# torch.compile builds what it runs. Empty leaves the compiler out.
ARG APT_PACKAGES="g++"
# hadolint ignore=DL3008
RUN if [ -n "$APT_PACKAGES" ]; then \\
        apt-get update \\
        && apt-get install --yes --no-install-recommends $APT_PACKAGES \\
        && rm -rf /var/lib/apt/lists/*; \\
    fi
"""
_ACCOUNT = """\
ARG UID=1000
ARG GID=1000
RUN groupadd --gid "$GID" accel \\
    && useradd --uid "$UID" --gid "$GID" --create-home accel \\
    && install --directory --owner "$UID" --group "$GID" /workspace
"""
_INSTALLED = """\
COPY --from=packages /opt/venv /opt/venv
# NVIDIA's container runtime shows what is named here.
ENV PATH=/opt/venv/bin:$PATH \\
    PYTHONUNBUFFERED=1 \\
    NVIDIA_VISIBLE_DEVICES=all \\
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
WORKDIR /workspace
"""
_END = """\
# By number: the kubelet cannot tell that a name is not root.
USER ${UID}:${GID}
"""
_COMMAND = """\
CMD ["accel", "--help"]
"""
_RUNTIME = _SYSTEM + _ACCOUNT + _INSTALLED + _END + _COMMAND
# A base may be Debian's Python, which lets pip install nothing unless it is told to.
_ON_BASE = f"""\
FROM ${{BASE}} AS project
ARG EXTRAS
{_PIP}ENV PIP_BREAK_SYSTEM_PACKAGES=1 PYTHONUNBUFFERED=1
USER 0:0
COPY --from=wheel /wheels /wheels
RUN python3 -c "import importlib.util as u, sys; sys.exit(None if u.find_spec('torch') else 'the base has no torch for its python3: name another with --base')"
# Whatever asks for another torch than the base's is refused by pip.
RUN python3 -c "import importlib.metadata as m; print('torch==' + m.version('torch'))" >/wheels/torch.txt \\
    && wheel="$(ls /wheels/*.whl)" \\
    && python3 -m pip install --no-cache-dir --constraint /wheels/torch.txt "${{wheel}}${{EXTRAS:+[$EXTRAS]}}" \\
    && accel --version
"""
_ON_RUNTIME = f"""\
FROM runtime AS project
{_PIP}USER 0:0
COPY --from=wheel /wheels /wheels
# Whatever asks for another torch than the one above is refused by pip.
RUN python3 -c "import importlib.metadata as m; print('torch==' + m.version('torch'))" >/wheels/torch.txt
"""
_REQUIRED = f"""\
COPY {REQUIREMENTS} /wheels/{REQUIREMENTS}
RUN python3 -m pip install --no-cache-dir --constraint /wheels/torch.txt --requirement /wheels/{REQUIREMENTS}
"""
# A directory that WORKDIR makes is root's, and COPY leaves one alone that is there.
_USER = """\
ARG UID=1000
ARG GID=1000
RUN mkdir -p /workspace && chown "$UID:$GID" /workspace
WORKDIR /workspace
"""
_CODED = f"""\
COPY --chown=${{UID}}:${{GID}} {CODE} /workspace
"""


def repository_dockerfile() -> str:
    """Return deploy/kubernetes/Dockerfile: accel and torch from this repository."""
    stages = [_FROM_SOURCES, _PACKAGES, _RUNTIME]
    return _REPOSITORY + "ARG PYTHON_IMAGE=python:3.12-slim\n\n" + "\n".join(stages)


def sagemaker_dockerfile() -> str:
    """Return deploy/sagemaker/Dockerfile: the same with boto3, running as root."""
    packages = _PACKAGES.replace("ARG EXTRAS=train\n", "ARG EXTRAS=train,sagemaker\n")
    stages = [_FROM_SOURCES, packages, _SYSTEM + _INSTALLED + _COMMAND]
    return _SAGEMAKER + "ARG PYTHON_IMAGE=python:3.12-slim\n\n" + "\n".join(stages)


def project_dockerfile(*, on_base: bool, requirements: bool, code: bool) -> str:
    """Return a project's Dockerfile: accel and torch (or a base image with torch), requirements, code."""
    first = "ARG BASE\n" if on_base else "ARG PYTHON_IMAGE=python:3.12-slim\n"
    stages = [_WHEEL_STAGE, _ON_BASE] if on_base else [_WHEEL_STAGE, _PACKAGES, _RUNTIME, _ON_RUNTIME]
    top = (_REQUIRED if requirements else "") + _USER + (_CODED if code else "") + _END
    return _PROJECT + first + "\n" + "\n".join(stages) + top


def arguments(text: str) -> Mapping[str, str]:
    """Return the build arguments of a Dockerfile with their defaults."""
    defaults: dict[str, str] = {}
    for name, value in re.findall(r"^ARG (\w+)(?:=(.*))?$", text, re.MULTILINE):
        defaults.setdefault(name, value.strip('"'))
    return defaults
