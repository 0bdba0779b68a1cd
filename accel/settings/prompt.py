"""A question: what it asks for, when it is open, what it offers; and conditions on earlier answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from . import BY_NAME
from .setting import Setting
from .values import read

Answers = Mapping[str, Any]
Condition = Callable[[Answers], bool]


class Machine(NamedTuple):
    """What this machine has.

    kind, devices: of its devices (cuda, xpu, mps, cpu), and how many.
    cores:         processors that may be used.
    project:       whether the directory belongs to a project with an `accel.yaml` of its own.
    """

    kind: str
    devices: int
    cores: int = 1
    project: bool = False


class Question(NamedTuple):
    """One question.

    name:    of the answer; of the setting that it asks for, if there is one.
    options: (value, what people see) of a choice; empty if it is the setting that knows its values.
    when:    whether it is open after these answers.
    default: the answer that is offered; None where there is no sensible one.
    own:     what it asks for, where that is no setting of a launch.
    common:  the choices that are shown first, where there are many; the others are behind "another one".
    target:  (kind, option) of the target that the answer is about; none if it is about the launch.
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
        """Raises KeyError for a question that asks for no single setting."""
        return self.own or BY_NAME[self.name]

    @property
    def many(self) -> bool:
        """Whether the answer is a list, one word of which is asked for at a time."""
        return not self.options and self.setting.kind == "words"

    def choices(self) -> tuple[tuple[str, str], ...]:
        """(value, what people see), where there are few answers; else nothing."""
        if self.options:
            return self.options
        if self.setting.kind in ("switch", "yesno"):
            return (("yes", "yes"), ("no", "no"))
        return tuple((choice, choice) for choice in self.setting.choices)

    def offered(self, answers: Answers, machine: Machine) -> Any:
        """The default after these answers; None where there is none."""
        if self.default is not None:
            return self.default(answers, machine)
        return None if self.options else self.setting.default

    def understood(self, raw: object) -> Any:
        """The answer that `raw` is. Raises BadValue."""
        if self.may_be_empty and raw in ("", None, []):
            return None
        if not self.options:
            return read(self.setting, raw)
        return read(Setting(self.name, self.text, choices=tuple(value for value, _ in self.options)), raw)


def ask(name: str, text: str, when: Condition, **rest: Any) -> Question:
    """A question; `offer` is a default that depends on nothing."""
    if "offer" in rest:
        value = rest.pop("offer")
        rest["default"] = lambda answers, machine: value
    return Question(name, text, when, **rest)


def answered(name: str, *values: Any) -> Condition:
    """That the answer to `name` is one of `values`."""
    return lambda answers: answers.get(name) in values


def both(one: Condition, other: Condition) -> Condition:
    return lambda answers: one(answers) and other(answers)


def at_least(name: str, least: int) -> Condition:
    return lambda answers: int(answers.get(name) or 0) >= least
