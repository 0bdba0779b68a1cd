"""`scripts/affected`: the test files that depend on given files."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.affected import ROOT, Graph, changed, git, main

TREE = {
    "pyproject.toml": "",
    "accel/__init__.py": "from typing import TYPE_CHECKING\n"
    "if TYPE_CHECKING:\n    from accel.first import First\n    from accel.second import Second\n"
    "def __getattr__(name): ...\n",
    "accel/first.py": "class First: ...",
    "accel/second.py": "def second():\n    from . import third\nclass Second: ...",
    "accel/third.py": "",
    "accel/__main__.py": "from accel.cli import main",
    "accel/cli/__init__.py": 'COMMANDS = {"list": ("accel.cli.list", "help"), "env": ("accel.cli.env", "help")}\n'
    "def main(): ...",
    "accel/cli/list.py": "",
    "accel/cli/env.py": "",
    "schedulers/__init__.py": "",
    "schedulers/hosts/__init__.py": "",
    "schedulers/hosts/remote_files.py": "def host_programs(*names): ...",
    "schedulers/node/logs.py": "",
    "schedulers/node/jobs.py": "",
    "schedulers/ssh.py": 'from .hosts.remote_files import host_programs\nhost_programs("logs")',
    "helm/accel/values.yaml": "",
    "docs/ssh.md": "",
    "docs/slurm.md": "",
    "tests/__init__.py": "",
    "tests/conftest.py": "",
    "tests/golden/__init__.py": "",
    "tests/golden/plan.txt": "",
    "tests/golden/other_least.txt": "",
    "tests/helpers.py": "import accel\naccel.First",
    "tests/a/conftest.py": "import accel.third",
    "tests/a/test_conftest.py": "",
    "tests/test_command.py": 'run([python, "-m", "accel", "list"])',
    "tests/test_data.py": 'ROOT / "docs" / "ssh.md"\nCHART = ROOT / "helm/accel"',
    "tests/test_first.py": "from tests.helpers import First",
    "tests/test_golden.py": 'from tests.golden import check\ncheck("plan.txt")\ncheck(f"other_{name}.txt")',
    "tests/test_host.py": "from schedulers import ssh",
    "tests/test_nothing.py": '"""Says accel.first."""',
    "tests/test_program.py": 'PROGRAM = """\nfrom accel import (\n    Second,\n)\n"""',
    "tests/test_second.py": "from accel import Second",
}


def write(root: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Graph:
    root = tmp_path_factory.mktemp("small")
    write(root, TREE)
    return Graph(root, TREE)


@pytest.mark.parametrize(
    ("file", "tests"),
    [
        ("accel/first.py", ["test_first"]),
        ("accel/second.py", ["test_program", "test_second"]),
        ("accel/third.py", ["a/test_conftest", "test_program", "test_second"]),
        ("accel/cli/__init__.py", ["test_command"]),
        ("accel/cli/list.py", ["test_command"]),
        ("accel/cli/env.py", []),
        ("schedulers/node/logs.py", ["test_host"]),
        ("schedulers/node/jobs.py", []),
        ("helm/accel/values.yaml", ["test_data"]),
        ("docs/ssh.md", ["test_data"]),
        ("docs/slurm.md", []),
        ("tests/golden/plan.txt", ["test_golden"]),
        ("tests/golden/other_least.txt", ["test_golden"]),
        ("tests/helpers.py", ["test_first"]),
        ("tests/test_nothing.py", ["test_nothing"]),
    ],
)
def test_dependents_of_a_file(small: Graph, file: str, tests: list[str]) -> None:
    assert small.tests([file]) == [f"tests/{name}.py" for name in tests]


@pytest.mark.parametrize("file", ["pyproject.toml", "tests/conftest.py"])
def test_files_that_affect_everything(small: Graph, file: str) -> None:
    assert small.tests([file]) == sorted(path for path in TREE if os.path.basename(path).startswith("test_"))


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    write(tmp_path, TREE)
    commit(tmp_path, "init", "-qb", "main")
    return tmp_path


def commit(root: Path, *first: str) -> None:
    identity = ["-c", "user.name=A", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    for words in (first, ("add", "-A"), (*identity, "commit", "-qm", "x")):
        if words:
            subprocess.run(["git", "-C", str(root), *words], check=True)


def test_default_is_what_is_not_committed(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([], repository) == 0
    assert capsys.readouterr().out == ""
    (repository / "accel/first.py").unlink()
    (repository / "accel/third.py").rename(repository / "accel/fourth.py")
    write(repository, {"tests/test_new.py": "", "docs/ssh.md": "changed"})
    subprocess.run(["git", "-C", str(repository), "add", "docs/ssh.md"], check=True)
    assert sorted(changed(repository)) == [
        "accel/first.py", "accel/fourth.py", "accel/third.py", "docs/ssh.md", "tests/test_new.py",
    ]  # fmt: skip
    assert main([], repository) == 0
    names = ["a/test_conftest", "test_data", "test_first", "test_new", "test_program", "test_second"]
    assert capsys.readouterr().out.split() == [f"tests/{name}.py" for name in names]


def test_default_includes_the_commits_since_origin_main(repository: Path) -> None:
    subprocess.run(["git", "-C", str(repository), "update-ref", "refs/remotes/origin/main", "HEAD"], check=True)
    write(repository, {"accel/first.py": "First = 1"})
    commit(repository)
    write(repository, {"accel/second.py": "Second = 1"})
    assert sorted(changed(repository)) == ["accel/first.py", "accel/second.py"]


def test_unknown_file_is_refused(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(repository / "accel/none.py")], repository) == 2
    assert capsys.readouterr().err == f"affected: no such file in {repository}: {repository}/accel/none.py\n"
    (repository / "accel/first.py").unlink()
    assert main([str(repository / "accel/first.py")], repository) == 0  # known to git
    assert capsys.readouterr().out == "tests/test_first.py\n"


def test_a_file_with_a_syntax_error_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, {"accel/a.py": "def", "tests/test_a.py": "import accel.a"})
    assert Graph(tmp_path, ["accel/a.py", "tests/test_a.py"]).tests(["accel/a.py"]) == ["tests/test_a.py"]
    assert capsys.readouterr().err.startswith("affected: accel/a.py:1: ")


@pytest.fixture(scope="module")
def real() -> Graph:
    return Graph(ROOT, git(ROOT, "ls-files", "-coz", "--exclude-standard"))


@pytest.mark.parametrize(
    ("file", "test"),
    [
        ("schedulers/hosts/supervisor/slots.py", "tests/schedulers/ssh/test_queue.py"),
        ("schedulers/hosts/supervisor/slots.py", "tests/schedulers/local/test_queue.py"),
        ("schedulers/slurm/batch/step.py", "tests/schedulers/slurm/test_batch.py"),
        ("schedulers/node/relay.py", "tests/schedulers/ssh/test_submit.py"),
        ("tests/golden/slurm_least.txt", "tests/schedulers/slurm/test_script.py"),
        ("tests/golden/kubernetes/job_pvc.yaml", "tests/schedulers/kubernetes/manifests/test_build.py"),
        ("helm/accel/values.yaml", "tests/helm/test_charts.py"),
        ("helm/accel-job/files/unpack", "tests/helm/test_generated.py"),
        ("deploy/kubernetes/rbac.yaml", "tests/helm/test_deploy.py"),
        ("accel/local_sgd.py", "tests/runtime/training/test_local_sgd.py"),
        ("accel/tracking/aim.py", "tests/runtime/tracking/test_packages.py"),
        ("accel/commands/launch.py", "tests/cli/test_launch_names.py"),
        ("accel/compat/name_table.py", "tests/compat/test_mirror.py"),
        ("accel/launch/signals.py", "tests/launch/test_signals.py"),
        ("schedulers/kubernetes/target.py", "tests/schedulers/kubernetes/test_submit.py"),
        ("examples/digits/train.py", "tests/runtime/test_digits.py"),
        ("docs/migrating.md", "tests/compat/test_surface.py"),
        ("tests/settings/file_keys.tsv", "tests/settings/test_versions.py"),
        ("tests/clusters/relay.py", "tests/schedulers/ssh/test_run.py"),
        ("scripts/repeat", "tests/test_scripts.py"),
        ("benchmarks/results/gang.json", "tests/test_benchmarks.py"),
    ],
)
def test_dependents_in_this_repository(real: Graph, file: str, test: str) -> None:
    assert (ROOT / file).exists()
    assert test in real.tests([file])


def test_every_program_for_hosts_reaches_a_test_of_its_target(real: Graph) -> None:
    sent = ("schedulers/node/", "schedulers/hosts/supervisor/", "schedulers/slurm/batch/", "schedulers/slurm/login/")
    programs = [path for path in real.files if path.startswith(sent) and path.endswith(".py")]
    folders = ("tests/schedulers/ssh/", "tests/schedulers/slurm/", "tests/schedulers/tpu/")
    assert programs
    assert [path for path in programs if not any(test.startswith(folders) for test in real.tests([path]))] == []


def test_one_target_does_not_affect_the_others(real: Graph) -> None:
    assert "tests/schedulers/local/test_plan.py" not in real.tests(["schedulers/slurm/sbatch_options.py"])
    assert "tests/schedulers/kubernetes/manifests/test_plan.py" not in real.tests(["schedulers/hosts/jobs/submit.py"])
    assert "tests/runtime/training/test_local_sgd.py" not in real.tests(["schedulers/hosts/jobs/submit.py"])


def test_script_runs_from_any_directory(tmp_path: Path) -> None:
    words = [str(ROOT / "scripts/affected"), str(ROOT / "tests/golden/local_plan.txt")]
    done = subprocess.run(
        words, cwd=tmp_path, env={**os.environ, "PYTHON": sys.executable}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "tests/schedulers/local/test_plan.py" in done.stdout.split()
