"""Compares Accelerate 1.15's public surface, listed in ``accelerate_surface.json``, with what `accel.compat` answers.

Run as a program under `accel.compat` (a process of its own: another may hold Accelerate itself), it prints a JSON
object from each difference to what it is. Differences are named as the rows of docs/migrating.md name them:
``name``, ``Class.member``, ``Class.member=`` if it cannot be set, ``name()`` for a signature, ``Enum.MEMBER``; with its
module where names repeat.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SURFACE: dict[str, Any] = json.loads((HERE / "accelerate_surface.json").read_text())
_NOT_ACCELERATES = {"TYPE_CHECKING"}
_WHOLE = ("accelerate.commands", "accelerate.inference", "accelerate.utils.megatron_lm")  # labelled with their module
_BY_PROTOCOL = {"__enter__", "__exit__", "__iter__", "__len__", "__getitem__"}
_SETTABLE_OF_LOADERS = """
device rng_types synchronized_generator skip_batches gradient_state iteration end_of_dataloader remainder
""".split()
_CALLED = {"__init__", "__call__", *_BY_PROTOCOL}


@dataclass(frozen=True)
class Argument:
    """One parameter of a signature; ``default`` is its text, ``None`` where there is none."""

    name: str
    default: str | None = None


def main() -> None:
    """Print every difference."""
    print(json.dumps(dict(differences())))


def differences() -> Iterator[tuple[str, str]]:
    """Every difference, and what it is."""
    for module, name, known in names():
        found = _lookup(module, name)
        label = f"{module}.{name}" if module.startswith(_WHOLE) else name
        if found is None:
            yield label, f"{module} has no {name}"
        elif isinstance(known, dict):
            yield from _class(name, known["members"], found[0])
        elif known.startswith(("def", "(")):
            yield from _signature(label, known.removeprefix("def"), found[0])
    yield from _enums()
    yield from _fields()
    yield from _attributes()


def names() -> Iterator[tuple[str, str, Any]]:
    """Module, name, and what is known of it: a signature, ``const …``, or a dict for a class."""
    for name, kind in SURFACE["accelerate"].items():
        if kind != "module " and name not in SURFACE["modules"]["accelerate.inference"]:
            yield "accelerate", name, ""
    elsewhere = {
        name for module in SURFACE["modules"] if module.startswith(_WHOLE) for name in SURFACE["modules"][module]
    }
    for name in [*SURFACE["utils_exports"], *SURFACE["utils_exports_conditional"]]:
        known = SURFACE["utils_signatures"].get(name, "")
        if name not in elsewhere:
            yield "accelerate.utils", name, known if known.startswith("(") and "available" in name else ""
    for module, members in SURFACE["modules"].items():
        for name, known in members.items():
            if name not in _NOT_ACCELERATES:
                yield module, name, known


def _lookup(module: str, name: str) -> tuple[Any] | None:
    try:
        return (getattr(import_module(module), name),)
    except (ImportError, AttributeError):
        return None


def _class(name: str, members: dict[str, str], found: Any) -> Iterator[tuple[str, str]]:
    if isinstance(found, type) and issubclass(found, str) and hasattr(found, "__members__"):
        return  # an enum: its members are compared, and it is called by value
    for member, known in members.items():
        if member.startswith("_") and member not in _CALLED:
            continue
        label = f"{name}.{member}" if member != "__init__" else name
        fields = getattr(found, "__dataclass_fields__", {})
        annotated = {key for kind in found.__mro__ for key in inspect.get_annotations(kind)}
        if not hasattr(found, member):
            if member not in fields and member not in annotated:
                yield label, f"{name} has no {member}"
        elif member in _BY_PROTOCOL:
            continue  # called by Python itself, by position
        elif known.startswith(("(", "staticmethod (", "classmethod (")):
            target = found if member == "__init__" else getattr(found, member)
            yield from _signature(label, known[known.index("(") :], target, bound=known.startswith("c"))


def _signature(label: str, text: str, found: Any, bound: bool = False) -> Iterator[tuple[str, str]]:
    wanted = parse(text)
    try:
        there = list(inspect.signature(found).parameters.values())
    except (TypeError, ValueError):
        yield f"{label}()", "has no signature"
        return
    for drop in ("self", "cls"):
        wanted = [argument for argument in wanted if argument.name != drop]
        there = [parameter for parameter in there if parameter.name != drop]
    if [argument.name for argument in wanted] == ["*args", "**kwargs"]:
        return  # a decorator hides what the function takes
    why = compare(wanted, there)
    if why:
        yield f"{label}()", why


def parse(text: str) -> list[Argument]:
    """The parameters of a signature's text; ``*args`` and ``**kwargs`` keep their stars."""
    inner, _ = _balanced(text)
    arguments = []
    for part in _split(inner, ","):
        name, _, default = _partition_default(part)
        name = name.partition(":")[0].strip()
        if name and name != "/":
            arguments.append(Argument(name, default))
    return arguments


def _balanced(text: str) -> tuple[str, str]:
    depth = 0
    for index, sign in enumerate(text):
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(sign, 0)
        if depth == 0:
            return text[1:index], text[index + 1 :]
    raise ValueError(text)


def _split(text: str, separator: str) -> list[str]:
    parts, depth, quote, start = [], 0, "", 0
    for index, sign in enumerate(text):
        if quote:
            quote = "" if sign == quote else quote
        elif sign in "'\"":
            quote = sign
        else:
            depth += {"(": 1, "[": 1, "{": 1, "<": 1, ")": -1, "]": -1, "}": -1, ">": -1}.get(sign, 0)
            if sign == separator and depth == 0:
                parts.append(text[start:index])
                start = index + 1
    return [part.strip() for part in [*parts, text[start:]] if part.strip()]


def _partition_default(part: str) -> tuple[str, str, str | None]:
    pieces = _split(part, "=")
    return (pieces[0], "=", "=".join(pieces[1:])) if len(pieces) > 1 else (part, "", None)


def compare(wanted: list[Argument], there: list[inspect.Parameter]) -> str:
    """What of ``wanted`` a function with the parameters ``there`` does not take as it was; nothing if all is well."""
    positional = [p for p in there if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    kinds = {p.kind for p in there}
    starred = next((i for i, a in enumerate(wanted) if re.fullmatch(r"\*\w*", a.name)), len(wanted))
    named = [argument for argument in wanted[:starred] if not argument.name.startswith("**")]
    keywords = {argument.name for argument in wanted[starred:] if not argument.name.startswith("*")}
    if keywords - {p.name for p in there if p.kind is p.KEYWORD_ONLY}:
        return f"takes no {', '.join(sorted(keywords))}"
    if any(a.name.startswith("**") for a in wanted) and inspect.Parameter.VAR_KEYWORD not in kinds:
        return "takes no **kwargs"
    if any(re.fullmatch(r"\*\w+", a.name) for a in wanted) and inspect.Parameter.VAR_POSITIONAL not in kinds:
        return "takes no *args"
    ours = [p.name for p in positional]
    if ours != [a.name for a in named]:
        return f"takes ({', '.join(ours)}), not ({', '.join(a.name for a in named)})"
    for argument, parameter in zip(named, positional, strict=True):
        if argument.default is None:
            continue
        if parameter.default is parameter.empty:
            return f"needs {argument.name}"
        if not _same_default(argument.default, parameter.default):
            return f"{argument.name}={parameter.default!r}, not {argument.default}"
    return ""


def _same_default(text: str, value: Any) -> bool:
    try:
        expected = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return True  # the text of an object, which says nothing of its value
    return bool(expected == value) or str(expected) == str(value)


def _enums() -> Iterator[tuple[str, str]]:
    for name, members in SURFACE["enums"].items():
        found = _lookup("accelerate.utils.dataclasses", name)
        if found is None:
            continue
        ours = {member: str(getattr(value, "value", value)) for member, value in found[0].__members__.items()}
        for member, value in members.items():
            if ours.get(member) != str(value):
                yield f"{name}.{member}", f"is {ours.get(member)!r}, not {value!r}"


def _fields() -> Iterator[tuple[str, str]]:
    for name, known in {**SURFACE["dataclasses"], "ParallelismConfig": SURFACE["ParallelismConfig"]}.items():
        found = _lookup("accelerate.utils", name)
        if found is None:
            continue
        for field in known["fields"]:
            if field not in getattr(found[0], "__dataclass_fields__", {}):
                yield f"{name}.{field}", f"{name} has no field {field}"


def _attributes() -> Iterator[tuple[str, str]]:
    import torch
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState, PartialState

    made = {"Accelerator": Accelerator(cpu=True), "AcceleratorState": AcceleratorState()}
    made |= {"GradientState": GradientState(), "PartialState": PartialState()}
    for name, thing in made.items():
        members = [*SURFACE[name], *SURFACE[f"{name}_instance_attrs"]]
        for attribute in dict.fromkeys(members):
            if not attribute.startswith("_") and not hasattr(thing, attribute):
                yield f"{name}.{attribute}", f"{name}() has no {attribute}"
        with_setters = [member for member, kind in SURFACE[name].items() if kind == "property+setter"]
        yield from _unsettable(name, thing, dict.fromkeys([*SURFACE[f"{name}_instance_attrs"], *with_setters]))
    loader = made["Accelerator"].prepare(torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(2))))
    yield from _unsettable("DataLoaderShard", loader, _SETTABLE_OF_LOADERS)


def _unsettable(name: str, thing: Any, attributes: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Attributes that scripts can set on Accelerate's object and not on ``thing``."""
    for attribute in attributes:
        if not attribute.startswith("__") and hasattr(thing, attribute):
            try:
                setattr(thing, attribute, getattr(thing, attribute))
            except AttributeError:
                yield f"{name}.{attribute}=", "cannot be set"


if __name__ == "__main__":
    main()
