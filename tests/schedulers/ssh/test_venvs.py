"""Virtual environments out of requirements: made once on a host, whole or not at all. No network: wheels are files."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import sysconfig
import threading
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from schedulers import JobSpec, SpecError, State, SubmitError
from schedulers.config.named_targets import load_target
from schedulers.errors import ConfigError
from schedulers.hosts.errors import RemoteError
from schedulers.hosts.jobs.venvs import Environments, Requirements, read
from schedulers.hosts.transport import Pool
from schedulers.ssh.target import SshOptions, SshTarget
from schedulers.target import SupportsCheck, TargetContext
from tests.clusters.ssh import SshHosts
from tests.needs import package
from tests.waiting import until

from .conftest import Submit, host_options, printed

PYTHON = sys.executable


@pytest.fixture
def pool(ssh_hosts: SshHosts) -> Iterator[Pool]:
    with Pool(config=str(ssh_hosts.config)) as made:
        yield made


def wheel(directory: Path, name: str, version: str = "1.0", files: dict[str, str] | None = None) -> Path:
    path = directory / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    contents = {
        **({f"{name}.py": f"version = {version!r}\n"} if files is None else files),
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: by-hand\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for member, text in contents.items():
            entry = zipfile.ZipInfo(member)
            entry.external_attr = (0o100755 if "/scripts/" in member else 0o100644) << 16
            archive.writestr(entry, text)
        archive.writestr(f"{info}/RECORD", "".join(f"{member},,\n" for member in [*contents, f"{info}/RECORD"]))
    return path


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    directory = tmp_path / "wheels"
    directory.mkdir()
    return directory


def lines(wheels: Path, *more: str) -> str:
    return "\n".join(["--no-index", f"--find-links {wheels}", *more]) + "\n"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("torch\n./pkg\n", "requirements.txt:2: ./pkg is relative"),
        ("-e .\n", "requirements.txt:1: . is relative"),
        ("--editable=pkg\n", "requirements.txt:1: pkg is relative"),
        ("pkg/sub[x]>=1\n", "requirements.txt:1: pkg/sub[x]>=1 is relative"),
        ("a-1-py3-none-any.whl\n", "requirements.txt:1: a-1-py3-none-any.whl is relative"),
        ("a @ file:./a.whl\n", "requirements.txt:1: file:./a.whl is relative"),
        ("\\\n--find-links wheels\n", "requirements.txt:1: wheels is relative"),
        ("-r none.txt\n", "none.txt: no such file or directory"),
        ("-r requirements.txt\n", "requirements.txt:1: -r requirements.txt: the files include each other"),
    ],
)
def test_what_only_this_machine_has_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "requirements.txt").write_text(text)
    with pytest.raises(ConfigError, match=re.escape(problem)):
        read("requirements.txt", str(tmp_path))


def test_what_hosts_can_get_is_passed_on(tmp_path: Path) -> None:
    text = (
        "# ours\nnumpy >= 2 ; python_version > '3.9'  # comment\n-e git+https://example.org/a.git#egg=a\n"
        "b @ https://example.org/b.whl\n/opt/wheels/c.whl\nd @ file:///opt/d.whl\n--find-links ~/wheels\n"
        "-r sub/more.txt\n-c sub/pins.txt\n--hash \\\n  sha256:0\n"
    )
    (tmp_path / "sub").mkdir()
    (tmp_path / "requirements.txt").write_text(text)
    (tmp_path / "sub/more.txt").write_text("e\n-cpins.txt\n")
    (tmp_path / "sub/pins.txt").write_text("\ufefff == 1\n", encoding="utf-8")
    found = read("requirements.txt", str(tmp_path)).files
    assert found["requirements.txt"].splitlines() == [
        "numpy >= 2 ; python_version > '3.9'",
        "-e git+https://example.org/a.git#egg=a",
        "b @ https://example.org/b.whl",
        "/opt/wheels/c.whl",
        "d @ file:///opt/d.whl",
        "--find-links ~/wheels",
        "e",
        "-c constraints-1.txt",
        "-c constraints-2.txt",
        "--hash    sha256:0",
    ]
    assert found["constraints-1.txt"] == found["constraints-2.txt"] == "f == 1\n"


def test_the_options_are_checked(submit: Submit) -> None:
    with pytest.raises(SpecError, match="target ssh: requirements must be the name of a file"):
        submit("true", options={"requirements": " "})
    with pytest.raises(SpecError, match="requirements_python is set, but requirements is not; set both"):
        submit("true", options={"requirements_python": "3.12"})
    for bad in ("3.9", "3", "python3.12", "3.12.", ">=3.12", "-3.12", " "):
        with pytest.raises(SpecError, match=f"from 3.10 on, such as 3.12 or 3.12.4, not '{bad}'"):
            submit("true", options={"requirements": "r.txt", "requirements_python": bad})
    with pytest.raises(ConfigError, match=r"requirements .*nothing.txt: no such file or directory"):
        submit("true", options={"requirements": "nothing.txt"})


def test_a_plan_says_what_is_made() -> None:
    options = SshOptions(hosts="a,b", requirements="r.txt", venv="~/venv")
    target = SshTarget(TargetContext(name="lab", options=options, jobs=Path("/home/me/accel/jobs")))
    plan = target.plan(JobSpec(argv=("train.py",), nodes=2), "2mxaaaaaaaa")
    assert plan.actions[0] == ("make", "~/.accel/envs", "from", "r.txt", "where it is lacking")
    assert plan.actions[-1][0] == "~/.accel/envs/{digest of r.txt}/bin/python"
    assert ("start", "~/venv/bin/python") in [action[:2] for action in plan.actions]


def test_a_plan_says_which_python_an_environment_gets() -> None:
    options = SshOptions(hosts="a", requirements="r.txt", requirements_python="3.12")
    target = SshTarget(TargetContext(name="lab", options=options, jobs=Path("/home/me/accel/jobs")))
    plan = target.plan(JobSpec(argv=("train.py",)), "2mxaaaaaaaa")
    assert plan.actions[0] == (
        "make", "~/.accel/envs", "from", "r.txt", "with Python", "3.12", "where it is lacking"
    )  # fmt: skip


def test_a_job_runs_with_what_it_requires_and_with_what_is_there(
    submit: Submit, ssh_hosts: SshHosts, project: Path, wheels: Path
) -> None:
    wheel(wheels, "needed")
    (project / "requirements.txt").write_text(lines(wheels, "needed"))
    options = {"requirements": "requirements.txt"}
    text = "import torch, accel, needed, sys; print(needed.version, sys.prefix)"
    job = submit(text, options=options, entry="script")  # to Python, the first line is a comment
    assert job.wait(60).state is State.SUCCEEDED
    envs = [ssh_hosts.home(node) / ".accel/envs" for node in ("node1", "node2")]
    made = [sorted(path.name for path in directory.iterdir()) for directory in envs]
    (name,) = [name for name in made[0] if len(name) == 64]
    assert made[0] == made[1] == [name, f"{name}.lock", f"{name}.log"]
    assert printed(job, 1) == f"1.0 {ssh_hosts.box}/home/root/.accel/envs/{name}\n"
    marker = envs[0] / name / ".whole"
    before = (marker.stat().st_ino, (envs[0] / name / "bin/python").lstat().st_ino)
    second = submit("true", options=options)
    assert second.wait(60).state is State.SUCCEEDED
    assert (marker.stat().st_ino, (envs[0] / name / "bin/python").lstat().st_ino) == before


def test_a_host_that_cannot_get_it_is_named_with_pips_words_and_nothing_is_left(
    submit: Submit, ssh_hosts: SshHosts, project: Path, wheels: Path
) -> None:
    (project / "requirements.txt").write_text(lines(wheels, "nowhere==7"))
    with pytest.raises(SubmitError) as error:
        submit("true", options={"requirements": "requirements.txt"})
    for node in ("node1", "node2"):
        assert re.search(
            rf"{node}: requirements.txt: pip install \(Python .*\) failed \(status 1\): .*No matching distribution "
            r"found for nowhere==7 \(all of it: /.*\.log\)",
            str(error.value),
        )
        kept = [path for path in (ssh_hosts.home(node) / ".accel/envs").iterdir() if path.suffix != ".lock"]
        assert [path.suffix for path in kept] == [".log"]
    assert "\n" not in str(error.value)


def test_accel_may_come_with_the_requirements(pool: Pool, ssh_hosts: SshHosts, wheels: Path, tmp_path: Path) -> None:
    """The interpreter has neither; the examination is of the environment."""
    from schedulers.hosts.facts import HostRequirements
    from schedulers.hosts.host_list import parse_hosts
    from schedulers.hosts.preflight import examine

    bare = tmp_path / "bare"
    subprocess.run([PYTHON, "-m", "venv", "--without-pip", str(bare)], check=True)
    where = next(bare.glob("lib/*/site-packages")) / "pip.pth"
    pip = subprocess.run([PYTHON, "-c", "import pip, os; print(os.path.dirname(pip.__path__[0]))"], capture_output=True)
    only_pip = tmp_path / "only pip"
    only_pip.mkdir()
    (only_pip / "pip").symlink_to(Path(pip.stdout.decode().strip()) / "pip")
    where.write_text(f"{only_pip}\n")
    for name, version in (("torch", "2.13.0"), ("accel_launch", "0.4.0")):
        wheel(wheels, name, version)
    wanted = HostRequirements(disk_bytes=1)
    hosts = parse_hosts("node1,node2")
    python = str(bare / "bin/python")
    without = examine(pool, hosts, wanted, python=python)
    assert [str(finding) for finding in without.findings if "no torch for" in finding.problem]
    files = {"requirements.txt": lines(wheels, "torch", "accel_launch")}
    made = Environments(Requirements("r", files), root="~/.accel", python=python)
    report = examine(pool, hosts, wanted, python=made.ensure)
    assert report.usable == tuple(hosts), report.findings
    found = [row.facts.facts.packages for row in report.rows if row.facts]
    assert found == [{"accel-launch": "0.4.0", "torch": "2.13.0"}] * 2


Make = Callable[..., Environments]


@pytest.fixture
def make(wheels: Path) -> Make:
    def make(*requirements: str, python: str = PYTHON) -> Environments:
        files = {"requirements.txt": lines(wheels, *requirements)}
        return Environments(Requirements("r.txt", files), root="~/.accel", python=python)

    return make


def test_two_at_once_make_one(pool: Pool, ssh_hosts: SshHosts, wheels: Path, make: Make) -> None:
    wheel(wheels, "needed")
    environments = make("needed")
    assert environments.find(pool.remote("node1")) is None
    pythons: list[str] = []
    threads = [
        threading.Thread(target=lambda: pythons.append(environments.ensure(pool.remote("node1")))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(pythons) == 3
    assert len(set(pythons)) == 1
    assert environments.find(pool.remote("node1")) == pythons[0]
    said = pool.remote("node1").run([pythons[0], "-c", "import needed; print(needed.version)"]).stdout
    assert said == b"1.0\n"
    log = next((ssh_hosts.home("node1") / ".accel/envs").glob("*.log")).read_text()
    assert log.count("Successfully installed needed-1.0") == 1


@pytest.mark.long
def test_another_interpreter_has_another_environment(pool: Pool, wheels: Path, make: Make, tmp_path: Path) -> None:
    wheel(wheels, "needed")
    subprocess.run([PYTHON, "-m", "venv", str(tmp_path / "other")], check=True)
    first = make("needed").ensure(pool.remote("node1"))
    second = make("needed", python=str(tmp_path / "other/bin/python")).ensure(pool.remote("node1"))
    assert first != second
    assert pool.remote("node1").run([first, "-c", "import msgspec"], check=False).status == 0  # of its interpreter
    assert pool.remote("node1").run([second, "-c", "import msgspec"], check=False).status == 1


VERSION = ".".join(map(str, sys.version_info[:2]))


@pytest.fixture
def uv() -> str:
    """A script for a host: uv, which finds the Python that runs the tests, and downloads none."""
    program = package("uv").find_uv_bin()
    found = f'PATH="{sys.base_prefix}/bin:$PATH" UV_PYTHON_DOWNLOADS=never UV_OFFLINE=1'
    return f'#!/bin/sh\necho "$0 $*" >>"$HOME/uv.calls"\n{found} exec {program} "$@"\n'


def put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True)
    path.write_text(text)
    path.chmod(0o755)


def test_an_environment_of_another_python_stands_alone(pool: Pool, ssh_hosts: SshHosts, wheels: Path, uv: str) -> None:
    """The interpreter, which has accel and torch, only starts uv; the environment is what is examined."""
    from schedulers.hosts.facts import HostRequirements
    from schedulers.hosts.host_list import parse_hosts
    from schedulers.hosts.preflight import examine

    put(ssh_hosts.home("node1") / ".local/bin/uv", uv)
    wheel(wheels, "needed")
    wheel(wheels, "torch", "2.13.0")

    def made(*requirements: str) -> Environments:
        files = {"requirements.txt": lines(wheels, *requirements)}
        return Environments(Requirements("r", files), root="~/.accel", python=PYTHON, version=VERSION)

    report = examine(pool, parse_hosts("node1"), HostRequirements(disk_bytes=1), python=made("needed", "torch").ensure)
    (row,) = report.rows
    assert row.facts is not None
    assert row.facts.facts.packages == {"accel-launch": None, "torch": "2.13.0"}
    python = made("needed", "torch").find(pool.remote("node1"))
    assert python == row.facts.facts.executable
    code = "import needed, sys; print(needed.version, sys.base_prefix)"
    assert pool.remote("node1").run([python, "-c", code]).stdout.decode() == f"1.0 {sys.base_prefix}\n"
    assert pool.remote("node1").run([python, "-m", "pip", "--version"]).status == 0  # for setup commands
    assert (ssh_hosts.home("node1") / "uv.calls").read_text().count("\n") == 1


@pytest.mark.long
def test_a_job_runs_in_an_environment_of_another_python(
    submit: Submit, ssh_hosts: SshHosts, project: Path, wheels: Path, uv: str
) -> None:
    put(ssh_hosts.home("node1") / ".local/bin/uv", uv)
    there = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"  # torch and accel, not once more
    wheel(wheels, "needed", files={"needed.pth": there, "needed.py": "version = 3\n"})
    (project / "requirements.txt").write_text(lines(wheels, "needed"))
    options = {"requirements": "requirements.txt", "requirements_python": VERSION}
    text = "import torch, needed, sys; print(needed.version, sys.prefix, sys.base_prefix)"
    job = submit(text, options=options, entry="script", hosts="node1", nodes=1)
    assert job.wait(60).state is State.SUCCEEDED
    (env,) = (ssh_hosts.home("node1") / ".accel/envs").glob("[0-9a-f]" * 64)
    assert printed(job, 0) == f"3 {ssh_hosts.box}/home/root/.accel/envs/{env.name} {sys.base_prefix}\n"


def test_uv_is_got_by_pip_where_there_is_none(
    pool: Pool, ssh_hosts: SshHosts, wheels: Path, uv: str, tmp_path: Path
) -> None:
    index = tmp_path / "index"
    index.mkdir()
    wheel(index, "uv", files={"uv-1.0.data/scripts/uv": uv})
    put(ssh_hosts.home("node1") / ".config/pip/pip.conf", f"[global]\nno-index = true\nfind-links = {index}\n")
    wheel(wheels, "needed")
    files = Requirements("r.txt", {"requirements.txt": lines(wheels, "needed")})
    python = Environments(files, root="~/.accel", python=PYTHON, version=VERSION).ensure(pool.remote("node1"))
    assert pool.remote("node1").run([python, "-c", "import needed"]).status == 0
    (call,) = (ssh_hosts.home("node1") / "uv.calls").read_text().splitlines()
    assert call.startswith(f"{Path(python).parents[1]}/uv/bin/uv venv ")


@pytest.mark.parametrize(
    ("version", "requirement", "said"),
    [
        ("3.99", "needed", r"uv venv --python 3.99 failed \(status 2\): error: No interpreter found for Python 3.99 "),
        (
            VERSION,
            "nowhere",
            rf"pip install \(Python {VERSION}\) failed \(status 1\): .*distribution found for nowhere ",
        ),
    ],
)
def test_a_python_or_a_package_that_there_is_not_is_one_line(
    pool: Pool, ssh_hosts: SshHosts, wheels: Path, uv: str, version: str, requirement: str, said: str
) -> None:
    put(ssh_hosts.home("node1") / ".local/bin/uv", uv)
    files = Requirements("r.txt", {"requirements.txt": lines(wheels, requirement)})
    with pytest.raises(RemoteError, match=rf"^node1: r.txt: {said}.*\(all of it: /.*\.log\)$"):
        Environments(files, root="~/.accel", python=PYTHON, version=version).ensure(pool.remote("node1"))
    left = [path.suffix for path in (ssh_hosts.home("node1") / ".accel/envs").iterdir()]
    assert sorted(left) == [".lock", ".log"]


def slow_source(directory: Path, gate: Path) -> Path:
    """A source distribution whose build stands still until the gate is there."""
    import tarfile

    top = directory / "slow-1.0"
    top.mkdir()
    (top / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: slow\nVersion: 1.0\n")
    backend = f'[build-system]\nrequires = []\nbuild-backend = "build"\nbackend-path = ["."]\n# {gate}\n'
    (top / "pyproject.toml").write_text(backend)
    (top / "build.py").write_text(
        f"""
import os, time, zipfile

def build_wheel(directory, config_settings=None, metadata_directory=None):
    open({str(gate)!r} + ".reached", "w").close()
    while not os.path.exists({str(gate)!r}):
        time.sleep(0.05)
    name = "slow-1.0-py3-none-any.whl"
    with zipfile.ZipFile(os.path.join(directory, name), "w") as archive:
        archive.writestr("slow.py", "")
        archive.writestr("slow-1.0.dist-info/METADATA", "Metadata-Version: 2.1\\nName: slow\\nVersion: 1.0\\n")
        wheel = "Wheel-Version: 1.0\\nGenerator: x\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n"
        archive.writestr("slow-1.0.dist-info/WHEEL", wheel)
        archive.writestr("slow-1.0.dist-info/RECORD", "")
    return name
"""
    )
    path = directory / "slow-1.0.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        tar.add(top, "slow-1.0")
    return path


def test_one_that_is_cut_off_half_way_is_never_used(
    ssh_hosts: SshHosts, wheels: Path, make: Make, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    slow_source(wheels, gate)
    environments = make("slow")
    first = Pool(config=str(ssh_hosts.config))

    def give_up() -> None:
        with contextlib.suppress(Exception):
            environments.ensure(first.remote("node1"))

    thread = threading.Thread(target=give_up)
    thread.start()
    until(Path(f"{gate}.reached").exists, "pip builds")
    envs = ssh_hosts.home("node1") / ".accel/envs"
    assert [path for path in envs.iterdir() if len(path.name) == 64]
    first.close()  # the client goes away
    thread.join()
    with Pool(config=str(ssh_hosts.config)) as second:
        assert environments.find(second.remote("node1")) is None
        pips = ("sh", "-c", "pgrep -f 'pip instal[l]' || true")
        until(lambda: not ssh_hosts["node1"].run(*pips), "pip has ended")
        until(lambda: not [path for path in envs.iterdir() if len(path.name) == 64], "what was half made is gone")
        gate.touch()
        python = environments.ensure(second.remote("node1"))
        assert second.remote("node1").run([python, "-c", "import slow"]).status == 0


def test_a_full_disk_leaves_no_environment(pool: Pool, ssh_hosts: SshHosts, wheels: Path, make: Make) -> None:
    wheel(wheels, "large", files={"large.py": "".join(f"# {os.urandom(40).hex()}\n" for _ in range(100_000))})
    script = "mkdir -p /dev/shm/small && mount -t tmpfs -o size=4m tmpfs /dev/shm/small"
    ssh_hosts["node1"].run("sh", "-c", script)
    files = {"requirements.txt": lines(wheels, "large")}
    environments = Environments(Requirements("r.txt", files), root="/dev/shm/small", python=PYTHON)
    with pytest.raises(RemoteError, match=r"^node1: r.txt: pip install .* failed .*No space left on device"):
        environments.ensure(pool.remote("node1"))
    left = ssh_hosts["node1"].run("ls", "/dev/shm/small/envs").split()
    assert sorted(name.rpartition(".")[2] for name in left) == ["lock", "log"]


def test_a_check_makes_nothing_and_says_so(
    ssh_hosts: SshHosts, home: Path, wheels: Path, tmp_path: Path, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel(wheels, "needed")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.txt").write_text(lines(wheels, "needed"))
    options = host_options(ssh_hosts) | {"hosts": "node1", "requirements": "r.txt"}
    target = load_target("ssh", home / "jobs", overrides=options)
    assert isinstance(target, SupportsCheck)
    found = target.check()
    assert "node1: the environment for r.txt does not exist yet; the first submit creates it" in found.warnings
    assert found.failures == ()
    with_another = load_target("ssh", home / "jobs", overrides=options | {"requirements_python": VERSION})
    assert with_another.check().warnings == found.warnings  # type: ignore[attr-defined]
    with_another.close()  # type: ignore[attr-defined]
    envs = ssh_hosts.home("node1") / ".accel/envs"
    assert not envs.exists()
    Environments(read("r.txt", str(tmp_path)), root="~/.accel", python=PYTHON).ensure(pool.remote("node1"))
    found = target.check()
    assert not [warning for warning in found.warnings if "environment" in warning]
    assert found.table[1][2] != "-"  # torch's version
    target.close()  # type: ignore[attr-defined]
