"""Build context of an image: the Dockerfile, accel as a wheel, the project's requirements, code and origin."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from schedulers.errors import ConfigError
from schedulers.printable import without_password
from schedulers.store import own_wheel
from schedulers.store.source_files import git_environment, list_code

from . import dockerfile


@dataclass(frozen=True, kw_only=True)
class Project:
    """A project to build an image of.

    code:         its directory.
    requirements: the text of a requirements file for pip, or None.
    with_code:    True to copy the code into the image.
    on_base:      True to build on an image that has torch.
    """

    code: Path
    requirements: str | None
    with_code: bool
    on_base: bool

    def dockerfile(self) -> str:
        return dockerfile.project_dockerfile(
            on_base=self.on_base, requirements=self.requirements is not None, code=self.with_code
        )


def requirements_of(code: Path, requirements_file: str | None) -> str | None:
    """Return the given file's text, else that of requirements.txt, else the dependencies in pyproject.toml.

    Raises ConfigError.
    """
    path = code / "requirements.txt"
    if requirements_file is not None or path.is_file():
        path = Path(requirements_file) if requirements_file is not None else path
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
            raise ConfigError(f"{path}: cannot be read: {reason}") from None
        return _check_standalone(path, text)
    return _declared_dependencies(code / "pyproject.toml")


def make(directory: Path, project: Project, epoch: int | None) -> list[str]:
    """Fill an empty directory with the context; return warnings, a line each.

    With `epoch` (seconds since 1970) every file has that time, so that equal projects make equal images. Raises
    SnapshotError, ConfigError.
    """
    (directory / "Dockerfile").write_text(project.dockerfile())
    wheels = directory / dockerfile.WHEELS
    wheels.mkdir()
    own_wheel.write(wheels)
    (wheels / "constraints.txt").write_text(_torch() + "\n")
    if project.requirements is not None:
        (directory / dockerfile.REQUIREMENTS).write_text(project.requirements)
    warnings: list[str] = []
    if project.with_code:
        warnings = _copy(project.code, directory / dockerfile.CODE)
    if epoch is not None:
        for path in [directory, *directory.rglob("*")]:
            os.utime(path, (epoch, epoch), follow_symlinks=False)
    return warnings


def _check_standalone(path: Path, text: str) -> str:
    """Return the text. Raises ConfigError if it refers to other files, which the context does not have."""
    for number, line in enumerate(text.splitlines(), 1):
        if re.match(r"\s*(-r|--requirement|-c|--constraint|-e|--editable|\.{1,2}/|file:)(\s|=|\S)", line):
            raise ConfigError(
                f"{path}:{number}: {without_password(line.strip())!r} refers to a file that is not copied"
            )
    return text


def _declared_dependencies(path: Path) -> str | None:
    if not path.is_file():
        return None
    try:
        tomllib = importlib.import_module("tomllib")
    except ModuleNotFoundError:  # Python 3.10
        raise ConfigError(f"{path}: reading it needs Python 3.11; give --requirements FILE instead") from None
    try:
        document = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:  # not UTF-8, or not TOML
        raise ConfigError(f"{path}: {error}") from None
    dependencies = document.get("project", {}).get("dependencies")
    if not dependencies:
        return None
    if not isinstance(dependencies, list) or not all(isinstance(dependency, str) for dependency in dependencies):
        raise ConfigError(f"{path}: project.dependencies is not a list of strings")
    return "\n".join(dependencies) + "\n"


def _torch() -> str:
    """Return the torch requirement: the version here, so that the image runs the same, else accel's minimum."""
    try:
        return f"torch=={importlib.metadata.version('torch').partition('+')[0]}"
    except importlib.metadata.PackageNotFoundError:
        return "torch>=2.6"


def _copy(code: Path, destination: Path) -> list[str]:
    top = os.path.realpath(code)
    entries, warnings = list_code(top, image=True)
    destination.mkdir()
    for entry in entries:
        path = destination / entry.path
        path.parent.mkdir(parents=True, exist_ok=True)
        if entry.type == "directory":
            path.mkdir(exist_ok=True)
        elif entry.type == "link":
            path.symlink_to(entry.link)
        else:
            shutil.copyfile(os.path.join(top, entry.path), path)
            path.chmod(entry.mode)
    return warnings


# The project's origin, for the image's labels.


def revision(directory: Path) -> str:
    """Return the commit, with `-dirty` for a changed work tree; "" without git or a first commit."""
    commit = _git(directory, "rev-parse", "HEAD")
    if not commit:
        return ""
    return f"{commit}-dirty" if _git(directory, "status", "--porcelain", "--", ".") else commit


def origin_url(directory: Path) -> str:
    """Return the remote `origin` without user and password, or ""."""
    return without_password(_git(directory, "remote", "get-url", "origin"))


def _git(directory: Path, *arguments: str) -> str:
    try:
        completed = subprocess.run(
            ["git", "-c", "core.fsmonitor=false", "-C", str(directory), *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=git_environment(),
        )
    except FileNotFoundError:
        return ""
    return completed.stdout.decode(errors="replace").strip() if completed.returncode == 0 else ""
