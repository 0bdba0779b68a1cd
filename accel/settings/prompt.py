"""A question: its setting, its condition on earlier answers, and its default."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from . import BY_NAME
from .setting import Setting
from .values import read

Answers = Mapping[str, Any]
Condition = Callable[[Answers], bool]


class Machine(NamedTuple):
    """This machine's hardware.

    kind, devices: kind (cuda, xpu, mps, cpu) and number of its devices.
    cores:         usable processors.
    project:       True if the directory belongs to a project with its own `accel.yaml`.
    """

    kind: str
    devices: int
    cores: int = 1
    project: bool = False


class Question(NamedTuple):
    """One question.

    name:    of the answer, and of its setting, if there is one.
    options: (value, displayed text) of a choice; empty if the setting defines its values.
    when:    returns True if the question is open after these answers.
    default: the proposed answer; None without a sensible one.
    own:     the setting of a question that is about no setting of a launch.
    common:  the choices shown first, if there are many; the others are behind "another one".
    target:  (kind, option) of the target that the answer is about; None if it is about the launch.
    """

    name: str
    text: str
    when: Condition
    options: tuple[tuple[str, str], ...] = ()
    default: Callable[[Answers, Machine], Any] | None = None
    may_be_empty: bool = False
    own: Setting | None = None
    common: tuple[str, ...] = ()
    target: tuple[str, str] | None = None

    @property
    def setting(self) -> Setting:
        """The question's setting. Raises KeyError if it has no single one."""
        return self.own or BY_NAME[self.name]

    @property
    def many(self) -> bool:
        """True if the answer is a list, read one word at a time."""
        return not self.options and self.setting.kind == "words"

    def choices(self) -> tuple[tuple[str, str], ...]:
        """Return the choices as (value, displayed text), or nothing for a typed answer."""
        if self.options:
            return self.options
        if self.setting.kind in ("switch", "yesno"):
            return (("yes", "yes"), ("no", "no"))
        return tuple((choice, choice) for choice in self.setting.choices)

    def offered(self, answers: Answers, machine: Machine) -> Any:
        """Return the default after these answers, or None."""
        if self.default is not None:
            return self.default(answers, machine)
        return None if self.options else self.setting.default

    def understood(self, raw: object) -> Any:
        """Return the answer in `raw`. Raises BadValue."""
        if self.may_be_empty and raw in ("", None, []):
            return None
        if not self.options:
            return read(self.setting, raw)
        return read(Setting(self.name, self.text, choices=tuple(value for value, _ in self.options)), raw)


def ask(name: str, text: str, when: Condition, **rest: Any) -> Question:
    """Make a question; `offer` is a constant default."""
    if "offer" in rest:
        value = rest.pop("offer")
        rest["default"] = lambda answers, machine: value
    return Question(name, text, when, **rest)


def answered(name: str, *values: Any) -> Condition:
    """Return the condition that the answer to `name` is one of `values`."""
    return lambda answers: answers.get(name) in values


def both(one: Condition, other: Condition) -> Condition:
    return lambda answers: one(answers) and other(answers)


def at_least(name: str, least: int) -> Condition:
    return lambda answers: int(answers.get(name) or 0) >= least
