"""Asking in a terminal: menus with arrow keys, lines with a check, back and forward. The library is prompt_toolkit."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from .words import UsageError

if TYPE_CHECKING:
    from prompt_toolkit.key_binding import KeyBindings
    from prompt_toolkit.key_binding.key_processor import KeyPressEvent

    from accel.settings.questions import Machine, Question

_HELP = "Enter, →  next     ←, Shift-Tab  back     ↑ ↓  choose     Ctrl-C  leave"
_HELP_LINE = "Enter, Tab  next     Shift-Tab  back     Ctrl-C  leave"


class Back(Exception):
    """The person wants the question before."""


def need_terminal() -> None:
    """Raises UsageError where nobody can answer, or what asks is not installed."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError("accel config", "this is no terminal: give --answers FILE, or use accel config default")
    try:
        import prompt_toolkit.shortcuts.choice_input  # noqa: F401
    except ImportError:
        raise UsageError(
            "accel config", "asking needs prompt_toolkit 3.0.52 or newer: pip install 'prompt_toolkit>=3.0.52'"
        ) from None


def ask(
    machine: Machine, offered: Mapping[str, Any], files: Callable[[Mapping[str, Any]], list[tuple[str, str]]]
) -> dict[str, Any] | None:
    """The answers, once the person has seen the files that they make; None if those are not to be written.

    offered: answers of earlier files, which are offered instead of the defaults.
    files:   path and text of each file that answers make.
    """
    from accel.settings.questions import open_question, still_asked

    from . import config_check

    answers: dict[str, Any] = {}
    before = dict(offered)  # and what was answered before going back
    order: list[str] = []
    _introduce(machine)
    try:
        while True:
            question = open_question(answers)
            try:
                if question is None:
                    return answers if _confirmed(files(answers)) else None
                default = before.get(question.name, question.offered(answers, machine))
                answer = _one(question, default, partial(config_check.check, question, before=answers, machine=machine))
                answers[question.name] = before[question.name] = answer
                order.append(question.name)
            except Back:
                if order:
                    del answers[order.pop()]
                    answers = still_asked(answers)
                    order = [name for name in order if name in answers]
    except (KeyboardInterrupt, EOFError):
        return None


def _introduce(machine: Machine) -> None:
    devices = "no GPU" if machine.kind == "cpu" else f"{machine.devices} of {machine.kind}"
    print(f"This machine: {devices}, {machine.cores} processors.\n", flush=True)


def _one(question: Question, offered: Any, check: Callable[[Any], None]) -> Any:
    """The answer, once `check` has nothing against it."""
    from accel.settings.values import typed

    options = question.choices()
    if options:
        word = {True: "yes", False: "no"}.get(offered, str(offered)) if isinstance(offered, bool) else str(offered)
        return _chosen(question, options, word, check)
    if question.many:
        return _several(question, offered or [], check)
    return _line(question, "" if offered is None else typed(question.setting, offered), check)


def _chosen(
    question: Question, options: tuple[tuple[str, str], ...], offered: str, check: Callable[[Any], None]
) -> Any:
    from accel.settings.values import BadValue

    while True:
        answer = question.understood(_menu(question.text, options, offered))
        try:
            check(answer)
        except BadValue as error:
            print(f" {error}", flush=True)
        else:
            return answer


def _several(question: Question, offered: list[str], check: Callable[[Any], None]) -> list[str] | None:
    """One line a word, up to an empty one."""
    said: list[str] = []
    while True:
        text = f" {question.text} " if not said else " Another one (empty: no more)? "
        default = offered[len(said)] if len(said) < len(offered) else ""
        word = _typed(text, default, lambda typed: check([*said, typed.strip()]) if typed.strip() else None).strip()
        if not word:
            return said or None
        said.append(word)


def _menu(text: str, options: tuple[tuple[str, str], ...], offered: str) -> str:
    from prompt_toolkit.shortcuts.choice_input import ChoiceInput

    values = [value for value, _ in options]
    return ChoiceInput(
        message=text,
        options=options,
        default=offered if offered in values else values[0],
        show_numbers=False,
        bottom_toolbar=_HELP,
        key_bindings=_keys(in_menu=True),
    ).prompt()


def _line(question: Question, offered: str, check: Callable[[Any], None]) -> Any:
    from accel.settings.values import BadValue

    def judge(text: str) -> None:
        if not text and not question.may_be_empty:
            raise BadValue("an answer is needed")
        check(question.understood(text))

    return question.understood(_typed(f" {question.text} ", offered, judge))


def _typed(text: str, offered: str, judge: Callable[[str], None]) -> str:
    """A line for which `judge` raises no BadValue."""
    from prompt_toolkit import prompt
    from prompt_toolkit.validation import Validator

    from accel.settings.values import BadValue

    class Check(Validator):
        def validate(self, document: Any) -> None:
            from prompt_toolkit.validation import ValidationError

            try:
                judge(document.text)
            except BadValue as error:
                raise ValidationError(len(document.text), str(error)) from None

    return prompt(
        text,
        default=offered,
        validator=Check(),
        validate_while_typing=False,
        bottom_toolbar=_HELP_LINE,
        key_bindings=_keys(in_menu=False),
    )


def _keys(*, in_menu: bool) -> KeyBindings:
    from prompt_toolkit.key_binding import KeyBindings
    from prompt_toolkit.keys import Keys

    bindings = KeyBindings()

    def back(event: KeyPressEvent) -> None:
        event.app.exit(exception=Back())

    def forward(event: KeyPressEvent) -> None:
        from prompt_toolkit.key_binding.key_processor import KeyPress

        event.app.key_processor.feed(KeyPress(Keys.Enter))

    bindings.add("s-tab", eager=True)(back)
    bindings.add("tab", eager=True)(forward)
    if in_menu:
        bindings.add("left", eager=True)(back)
        bindings.add("right", eager=True)(forward)
    return bindings


def _confirmed(files: list[tuple[str, str]]) -> bool:
    for path, text in files:
        print(f"\n# {path}\n{text}", flush=True)
    options = (("yes", "yes, write it"), ("no", "no, leave everything as it is"))
    return _menu(f"Write this to {' and '.join(path for path, _ in files)}?", options, "yes") == "yes"
