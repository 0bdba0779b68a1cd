"""What starting the command may load (the directions of imports: `[tool.importlinter]`), and docs/architecture.md."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Imported only where a connection is opened.
LATE = {"schedulers.hosts.opening"}
OPTIONAL = set(
    "torch numpy safetensors submitit fabric paramiko kubernetes boto3 sagemaker deepspeed fastapi sqlalchemy".split()
)


def modules(package: str) -> Iterator[tuple[str, Path]]:
    for path in sorted((ROOT / package).rglob("*.py")):
        yield ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"), path


def imports(module: str, path: Path) -> set[str]:
    """The absolute names that are imported when a module is."""
    found: set[str] = set()
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in _reached(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            name = ".".join([*base, *(node.module or "").split(".")]).strip(".")
            found |= {name} if node.module else {f"{name}.{alias.name}" for alias in node.names}
    return found


def _reached(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node that runs on import: not the bodies of functions, nor what only a type checker reads."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        yield node
        yield from _reached(node)


def test_the_runtime_s_face_loads_no_scheduler() -> None:
    # `accel.submit` and the nouns beside it: a lazy table, nothing more.
    path = ROOT / "accel/__init__.py"
    assert not {name for name in imports("accel", path) if name.startswith("schedulers")}


def test_optional_packages_are_not_imported_on_the_way_to_a_submit() -> None:
    for module, path in [*modules("schedulers"), *modules("accel/cli")]:
        if module in LATE:
            continue
        found = imports(module, path)
        assert not found & LATE, module
        assert not {name.partition(".")[0] for name in found} & OPTIONAL, module


@pytest.mark.parametrize("package", ["accel", "accel.cli", "accel.launch.devices", "accel.launch.run", "schedulers"])
def test_importing_loads_no_torch(package: str) -> None:
    code = f"import {package}, sys; print(*[m for m in {sorted(OPTIONAL)} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == ""


def test_a_list_without_a_server_loads_no_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ACCEL_HOME", "ACCEL_CONFIG_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    code = (
        "import sys; from accel.cli import main; main(['list']);"
        "print({'urllib3', 'fastapi', 'sqlalchemy', 'schedulers.service.client'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "set()"


@pytest.mark.parametrize("package", ["accel", "schedulers"])
def test_every_public_name_is_there(package: str) -> None:
    module = __import__(package)
    assert [name for name in module.__all__ if not hasattr(module, name)] == []


def test_each_package_has_the_same_description_in_its_docstring_and_in_the_document() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    tree = text[text.index("## Packages") : text.index("## Glossary")]
    top, written = "", {}
    for line in re.sub(r"\n +(?=[^- ])", " ", tree).splitlines():
        if match := re.fullmatch(r"( *)- `(\w+)/`: (.*)", line):
            top = top if match[1] else match[2]
            written[f"{top}/{match[2]}" if match[1] else top] = match[3]
    inits = [path for top in ("accel", "schedulers") for path in (ROOT / top).glob("*/__init__.py")]
    packages = ["accel", "schedulers", *(path.parent.relative_to(ROOT).as_posix() for path in inits)]
    assert written == {package: _first_paragraph(ROOT / package / "__init__.py") for package in packages}


def test_the_way_of_a_submit_names_files_that_exist() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    way = text[text.index("## The way of a submit") : text.index("## Packages")]
    paths = re.findall(r"`((?:accel|schedulers)/[\w/]+\.py)`", way)
    assert len(re.findall(r"^\d+\. ", way, re.MULTILINE)) == 10
    assert [path for path in paths if not (ROOT / path).is_file()] == []


def _first_paragraph(path: Path) -> str:
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    return " ".join(docstring.partition("\n\n")[0].split())


def test_the_glossary_names_modules_that_exist() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    glossary = text[text.index("## Glossary") : text.index("## Layers")]
    words = [line.split("|") for line in glossary.splitlines() if line.startswith("| ")][2:]
    terms = [term for _, cell, *_ in words for term in cell.split(",")]
    assert 0 < len(terms) <= 60
    for _, word, _, where, _ in words:
        for path in re.findall(r"`([^`]+)`", where):
            assert list(ROOT.glob(path)), f"{word}: {path}"
