"""Print the test files that depend on given files: by default on those changed since the merge base with origin/main.

The graph's nodes are files. An edge comes from an import, wherever it stands, or from a string literal that names a
module, a command, a host program or a file. docs/tested.md says what it cannot see.
"""

from __future__ import annotations

import ast
import gc
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[1]
EVERY_TEST_NEEDS = ("pyproject.toml", "constraints.txt")
# Modules named here are loaded early, or looked up in sys.modules: whoever needs them names them too.
IGNORED_STRINGS = {
    "tests/conftest.py", "tests/shares.py", "tests/warm.py", "accel/world/available.py", "accel/launch/fork_server.py",
}  # fmt: skip
# Imported only where a test names one of the words.
ON_REQUEST = {
    "accel/compat/startup/sitecustomize.py": ("--compat", "ACCEL_COMPAT", "accel.compat"),
    "accel/compat/name_table.py": ("--compat", "ACCEL_COMPAT", "accel.compat"),
    "accel/cli/tpu_config.py": ("tpu-config", "--tpu_cluster"),
}
_OURS = r"(?:accel|schedulers|tests|benchmarks)"
DOTTED = re.compile(rf"\b{_OURS}(?:\.\w+)+")
FROM = re.compile(rf"\bfrom +({_OURS}[\w.]*) +import +(\([^)]*\)|[^\n;#]+)")
IMPORT = re.compile(rf"\bimport +({_OURS})\b")
TABLE_VALUE = re.compile(rf"({_OURS}(?:\.\w+)+)(?::\w+)?")
WORD = re.compile(r"""(?:^|\b(?:accel|import|from) |[:=] ?|--target |["'])([\w.-]+)""")
COMMAND = re.compile(r"\baccel (?!import\b)[a-z]")
SENT = re.compile(r"schedulers\.hosts\.(remote_files\.host_programs?|bundle\.pack)")


@dataclass
class Source:
    """The names and strings of a Python file."""

    uses: set[str] = field(default_factory=set)  # dotted names
    lazy: dict[str, str] = field(default_factory=dict)  # of a package with __getattr__: name -> its dotted origin
    tables: dict[str, dict[str, str]] = field(default_factory=dict)  # variable -> key -> module
    strings: set[str] = field(default_factory=set)
    globs: bool = False  # searches folders for Python files
    passed: set[str] = field(default_factory=set)  # strings in lists and tuples, as keywords and as defaults
    paths: set[str] = field(default_factory=set)  # strings, f-strings and joined paths, with * for what is computed

    @cached_property
    def words(self) -> set[str]:
        """The words that may be arguments: quoted, after a sign or a command, or in a text without any sign."""
        return {
            word
            for text in self.strings
            for word in (text.split() if re.fullmatch(r"[\w -]*", text) else WORD.findall(text))
        }


def nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but docstrings, parents first."""
    stack = [tree]
    while stack:
        yield (node := stack.pop())
        for name in node._fields:
            value = getattr(node, name, None)
            if isinstance(value, list):
                stack += [child for child in value if isinstance(child, ast.AST) and not _is_docstring(child)]
            elif isinstance(value, ast.AST) and not isinstance(value, ast.expr_context):
                stack.append(value)


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def read(path: str, text: str) -> Source:
    source, bound = Source(), dict[str, str]()
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        print(f"affected: {path}:{error.lineno}: {error.msg}: its dependencies are unknown", file=sys.stderr)
        return source
    package = PurePosixPath(path).parent.parts
    chains, done = list[list[str]](), set[int]()

    def imported(node: ast.ImportFrom) -> dict[str, str]:
        base = ".".join(
            [*package[: len(package) + 1 - node.level], node.module or ""] if node.level else [node.module or ""]
        )
        return {alias.asname or alias.name: f"{base.strip('.')}.{alias.name}" for alias in node.names}

    if path.endswith("__init__.py") and any(getattr(node, "name", "") == "__getattr__" for node in tree.body):
        types = [node for node in tree.body if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)]
        tree.body = [node for node in tree.body if node not in types]
        for statement in (statement for block in types for statement in block.body):
            source.lazy |= imported(statement) if isinstance(statement, ast.ImportFrom) else {}
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name if alias.asname else alias.name.partition(".")[0]
                bound[alias.asname or top] = top
                source.uses.add(f"{alias.name}.__init__")
        elif isinstance(node, ast.ImportFrom):
            bound |= (names := imported(node))
            source.uses.update(names.values())
        elif isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, ast.Dict):
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            if isinstance(target, ast.Name) and (table := _table(node.value)):
                source.tables[target.id] = table
                done |= {id(inner) for inner in ast.walk(node.value)}
        elif isinstance(node, (ast.List, ast.Tuple, ast.keyword, ast.arguments)):
            for child in ast.iter_child_nodes(node):
                value = _pattern(child) or ""
                source.passed.add(value if isinstance(child, ast.Constant) else os.path.basename(value))
        elif (
            isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("glob", "rglob")
        ):
            source.globs |= any(_pattern(word) == "*.py" for word in node.args)
        elif id(node) in done:
            continue
        elif isinstance(node, (ast.Attribute, ast.Name)):
            chain: list[str] = []
            inner: ast.AST = node
            while isinstance(inner, ast.Attribute):
                chain, inner = [inner.attr, *chain], inner.value
                done.add(id(inner))
            if isinstance(inner, ast.Name):
                chains.append([inner.id, *chain])
        elif isinstance(node, (ast.BinOp, ast.JoinedStr, ast.Constant)) and (said := _pattern(node)):
            source.paths.add(said.removeprefix("*/"))
            for inner in [node] if isinstance(node, ast.Constant) else ast.walk(node):
                if isinstance(inner, ast.Constant) and isinstance(inner.value, str):
                    source.strings.add(inner.value)
                if not isinstance(inner, (ast.Attribute, ast.Name)):
                    done.add(id(inner))
    if source.lazy or path in IGNORED_STRINGS:
        source.strings, source.paths = set(), set()
    source.uses |= {".".join([bound[first], *rest]) for first, *rest in chains if first in bound}
    return source


def _table(node: ast.Dict) -> dict[str, str]:
    """Return key -> module of a dict whose every value is a module of ours, or a tuple that begins with one."""
    table: dict[str, str] = {}
    for key, value in zip(node.keys, node.values, strict=True):
        first = value.elts[0] if isinstance(value, ast.Tuple) and value.elts else value
        found = TABLE_VALUE.fullmatch(_pattern(first) or "")
        if not found or not isinstance(key, ast.Constant):
            return {}
        table[str(key.value)] = found[1]
    return table


def _pattern(node: ast.AST) -> str | None:
    """Return the text of a string, of an f-string, or of a path joined with `/`: * stands for what is computed."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(_pattern(part) or "*" for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        left, right = _pattern(node.left), _pattern(node.right)
        return f"{left}/{right or '*'}" if left else right
    return None


class Graph:
    """Which files each file depends on."""

    def __init__(self, root: Path, files: Iterable[str]) -> None:
        self.files = sorted(set(files))
        self._modules = {_module(path): path for path in self.files if path.endswith(".py")}
        self._known = set(self.files)
        self._data_files = self._known - {path for path in self.files if re.match(rf"{_OURS}/.*\.py$", path)}
        self._below: dict[str, list[str]] = defaultdict(list)  # folder -> all files in it
        for path in self.files:
            for folder in PurePosixPath(path).parents:
                self._below[str(folder)].append(path)
        paths = [path for path in self._modules.values() if (root / path).is_file()]
        self._sources = {path: read(path, (root / path).read_text()) for path in paths}
        self.needs = {path: self._imports(path, source) for path, source in self._sources.items()}
        for path, source in self._sources.items():
            self.needs[path] |= self._data(path, source)
        self._follow_tables()

    def tests(self, changed: Iterable[str]) -> list[str]:
        """Return the test files that depend on one of these files."""
        affected = set(self.files) if set(changed) & set(EVERY_TEST_NEEDS) else _reach(self._needed_by(), changed)
        return sorted(path for path in affected & self._sources.keys() if _is_test(path))

    def _imports(self, path: str, source: Source) -> set[str]:
        folders = list(PurePosixPath(path).parents)
        names = ["__init__.py", "conftest.py"] if _is_test(path) else ["__init__.py"]
        found = {str(folder / name) for folder in folders for name in names} & self._known
        uses = set(source.uses)
        ships = path.startswith("schedulers/hosts/") or any(map(SENT.fullmatch, uses))
        for text in source.strings:
            uses.update(DOTTED.findall(text))
            uses.update(f"{module}.__init__" for module in IMPORT.findall(text))
            uses.update(
                f"{module}.{name}" for module, names in FROM.findall(text) for name in re.findall(r"\w+|\*", names)
            )
            if path.startswith("tests/") and COMMAND.search(text):
                uses.add("accel.__main__")
            if ships:
                name = text.replace(".", "/")
                found |= {f"schedulers/node/{name}.py", f"schedulers/{name}.py"} & self._known
                found.update(self._below.get(name, ()))
        if "accel" in source.passed:
            uses.add("accel.__main__")
        return found.union(*(self._origin(use) for use in uses))

    def _origin(self, dotted: str) -> set[str]:
        """Return the files of a name: of its module, or of the module from which a lazy package gets it."""
        module, rest = dotted, list[str]()
        while module and module not in self._modules:
            module, _, last = module.rpartition(".")
            rest.insert(0, last)
        if not module:
            return set()
        path = self._modules[module]
        lazy = self._sources[path].lazy if path in self._sources else {}
        if rest and rest[0] in lazy:
            return {path} | self._origin(lazy[rest[0]])
        everything = lazy if not rest or rest[0] in ("*", "__all__") else {}
        main = {self._modules.get(f"{module}.__main__", path)} if not rest else set()
        return {path}.union(main, *(self._origin(origin) for origin in everything.values()))

    def _data(self, path: str, source: Source) -> set[str]:
        """Return the files and folders that its strings name: from its own folder, one above, or one of an import."""
        bases = {str(folder) for folder in PurePosixPath(path).parents}
        bases -= {"."} if path.startswith(("accel/", "schedulers/")) else set()  # they are installed without the rest
        bases |= {str(PurePosixPath(need).parent) for need in self.needs[path] if need.startswith("tests/")}
        found: set[str] = set()
        for text in source.paths:
            if len(text) > 200 or not re.search(r"\w", text) or text.startswith("/") or "\n" in text or text == "*.py":
                continue
            any_file = "/" in text or source.globs
            for base in bases:
                name = os.path.normpath(f"{base}/{text}")
                files = [name] if name in self._known else list(self._below.get(name, ()))
                if "*" in text:
                    begin, end = name.partition("*")[0], name.rpartition("*")[2]
                    near = self._below.get(os.path.dirname(begin) or ".", ())
                    files = [file for file in near if file.startswith(begin) and file.endswith(end)]
                    files = [file for file in files if "/" in text or os.path.dirname(file) == base]
                    files = [file for file in files if fnmatchcase(file, name)]  # last, as each pattern is compiled
                    any_file = False
                found.update(file for file in files if any_file or file in self._data_files or file == name)
        return found

    def _follow_tables(self) -> None:
        """Let what names a key of a table, and reaches the table, depend on the module of that key."""
        tables: dict[tuple[str, str], dict[str, set[str]]] = {}
        for path, source in self._sources.items():
            for variable, table in source.tables.items():
                tables[path, variable] = {key: self._origin(module) for key, module in table.items()}
        for path, requests in ON_REQUEST.items():
            tables[path, ""] = dict.fromkeys(requests, self.needs.get(path, set()))
            self.needs[path] = set()
        needed_by = self._needed_by()
        near = {path: _reach(needed_by, [path], depth=3) - {path} for path, _ in tables}
        count = -1
        while count != (count := sum(map(len, self.needs.values()))):
            needed_by = self._needed_by()
            for (table_path, variable), entries in tables.items():
                own = os.path.dirname(table_path) + "/" if table_path.endswith("__init__.py") else table_path
                for path in (_reach(needed_by, [table_path]) & self._sources.keys()) - ON_REQUEST.keys():
                    source, in_tests = self._sources[path], path.startswith("tests/")
                    if in_tests and f"{_module(table_path)}.{variable}" in source.uses:
                        words = set(entries)
                    elif _is_test(path):
                        words = self._words(path)
                    elif path in near[table_path] and not path.startswith(own):
                        words = source.words if in_tests else source.passed
                    else:
                        continue
                    self.needs[path] |= set[str]().union(*(entries[word] for word in entries.keys() & words))

    def _words(self, path: str) -> set[str]:
        """Return the words in the strings of a test module, and of the test modules that it imports itself."""
        near = [need for need in self.needs[path] if need.startswith("tests/") and need in self._sources]
        return set[str]().union(*(self._sources[each].words for each in [path, *near]))

    def _needed_by(self) -> dict[str, set[str]]:
        needed_by: dict[str, set[str]] = defaultdict(set)
        for path, needs in self.needs.items():
            for need in needs:
                needed_by[need].add(path)
        return needed_by


def _reach(needed_by: Mapping[str, set[str]], changed: Iterable[str], depth: int = sys.maxsize) -> set[str]:
    found, last = set(changed), set(changed)
    while last and depth:
        last = set[str]().union(*(needed_by.get(path, ()) for path in last)) - found
        found |= last
        depth -= 1
    return found


def _module(path: str) -> str:
    return path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")


def _is_test(path: str) -> bool:
    return path.startswith("tests/") and os.path.basename(path).startswith("test_")


def git(root: Path, *words: str) -> list[str]:
    done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True)
    return [line for line in done.stdout.split("\0") if line] if not done.returncode else []


def changed(root: Path) -> list[str]:
    """Return what is not committed, and what differs from the merge base with origin/main where there is one."""
    base = "".join(git(root, "merge-base", "HEAD", "origin/main")).strip() or "HEAD"
    return git(root, "diff", "--name-only", "--no-renames", "-z", base) + git(
        root, "ls-files", "-oz", "--exclude-standard"
    )


def main(words: Sequence[str], root: Path = ROOT) -> int:
    differing = changed(root)
    known = {*git(root, "ls-files", "-coz", "--exclude-standard"), *differing}
    given = [os.path.relpath(word, root) for word in words]
    for word, path in zip(words, given, strict=True):
        if (path not in known and not (root / path).is_file()) or path.startswith(".."):
            print(f"affected: no such file in {root}: {word}", file=sys.stderr)
            return 2
    for path in Graph(root, {*known, *given}).tests(given or differing):
        print(path)
    return 0


if __name__ == "__main__":
    gc.disable()  # the syntax trees are many objects and no garbage: a third of the time
    sys.exit(main(sys.argv[1:]))
