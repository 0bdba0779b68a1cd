"""Terminal prompts: menus with arrow keys, checked lines, back and forward. Uses prompt_toolkit."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from .argv import UsageError

if TYPE_CHECKING:
    from prompt_toolkit.key_binding import KeyBindings
    from prompt_toolkit.key_binding.key_processor import KeyPressEvent

    from accel.settings.wizard import Machine, Question

_HELP = "Enter, →  next     ←, Shift-Tab  back     ↑ ↓  choose     Ctrl-C  quit"
_HELP_LINE = "Enter, Tab  next     Shift-Tab  back     Ctrl-C  quit"
_HELP_NARROW = "Enter next, Shift-Tab back, Ctrl-C quit"
_HELP_PLAIN = "Enter alone takes the answer in brackets; < goes back; Ctrl-C quits.\n"
OTHER_CHOICE = "?"


# (value, label) of each choice.
Options = tuple[tuple[str, str], ...]


class Back(Exception):
    """The user wants the previous question."""


def need_terminal() -> None:
    """Raise UsageError without a terminal, or if prompt_toolkit is not installed."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError("accel config", "not a terminal: use --answers FILE or `accel config default`")
    try:
        import prompt_toolkit.shortcuts.choice_input  # noqa: F401
    except ImportError:
        raise UsageError(
            "accel config", "questions need prompt_toolkit 3.0.52 or newer: pip install 'prompt_toolkit>=3.0.52'"
        ) from None


def ask(
    machine: Machine, offered: Mapping[str, Any], files: Callable[[Mapping[str, Any]], list[tuple[str, str]]]
) -> dict[str, Any] | None:
    """Return the answers after the user has confirmed the files that they produce, else None.

    offered: answers from earlier files, used instead of the defaults.
    files:   returns path and text of each file that answers produce.
    """
    from accel.settings.wizard import open_question, valid_answers

    from . import config_target

    answers: dict[str, Any] = {}
    previous = dict(offered)  # and answers given before going back
    order: list[str] = []
    _introduce(machine)
    try:
        while True:
            question = open_question(answers)
            try:
                if question is None:
                    return answers if _confirmed(files(answers)) else None
                default = previous.get(question.name, question.offered(answers, machine))
                check = partial(config_target.check_answer, question, earlier=answers, machine=machine)
                answer = _ask_one(question, default, check)
                answers[question.name] = previous[question.name] = answer
                order.append(question.name)
            except Back:
                if order:
                    del answers[order.pop()]
                    answers = valid_answers(answers)
                    order = [name for name in order if name in answers]
    except (KeyboardInterrupt, EOFError):
        return None


def _introduce(machine: Machine) -> None:
    devices = "no GPU" if machine.kind == "cpu" else f"{machine.devices} of {machine.kind}"
    print(f"This machine: {devices}, {machine.cores} processors.\n", flush=True)
    if _is_plain():
        print(_HELP_PLAIN, flush=True)


def _ask_one(question: Question, offered: Any, check: Callable[[Any], None]) -> Any:
    """Prompt until `check` accepts the answer. Choices that `check` rejects are not shown."""
    from accel.settings.setting import typed

    default = {True: "yes", False: "no"}.get(offered, str(offered)) if isinstance(offered, bool) else str(offered)
    first, rest = choices(question, default, check)
    if first:
        return _ask_choice(question, first, rest, default, check)
    if question.many:
        return _several(question, offered or [], check)
    return _line(question, "" if offered is None else typed(question.setting, offered), check)


def choices(question: Question, offered: str, check: Callable[[Any], None]) -> tuple[Options, Options]:
    """Return the options of a menu and those behind "another one", without those that `check` rejects.

    If `check` rejects all, all are returned, and its message explains why. Both are empty for typed answers.
    """
    from accel.settings.setting import BadValue

    accepted: list[tuple[str, str]] = []
    for option in question.choices():
        with contextlib.suppress(BadValue):
            check(question.parse(option[0]))
            accepted.append(option)
    options = tuple(accepted) or question.choices()
    common = (*question.common, offered) if question.common else [value for value, _ in options]
    first = tuple(option for option in options if option[0] in common)
    return first, tuple(option for option in options if option not in first)


def _ask_choice(question: Question, first: Options, rest: Options, offered: str, check: Callable[[Any], None]) -> Any:
    from accel.settings.setting import BadValue

    options = (*first, (OTHER_CHOICE, "another one")) if rest else first
    while True:
        choice = _menu(question.text, options, offered)
        answer = question.parse(_menu(question.text, rest, "") if choice == OTHER_CHOICE else choice)
        try:
            check(answer)
        except BadValue as error:
            print(f" {error}", flush=True)
        else:
            return answer


def _several(question: Question, offered: list[str], check: Callable[[Any], None]) -> list[str] | None:
    """Read values, one per line, up to an empty line."""
    lines: list[str] = []
    while True:
        text = f" {question.text} " if not lines else " Another one (empty: no more)? "
        default = offered[len(lines)] if len(lines) < len(offered) else ""
        line = _typed(text, default, lambda entry: check([*lines, entry.strip()]) if entry.strip() else None).strip()
        if not line:
            return lines or None
        lines.append(line)


def _menu(text: str, options: Options, offered: str) -> str:
    from prompt_toolkit.shortcuts.choice_input import ChoiceInput

    values = [value for value, _ in options]
    if _is_plain():
        return _plain_menu(text, options, offered if offered in values else values[0])
    return ChoiceInput(
        message=text,
        options=[(value, _wrapped(label)) for value, label in options],
        default=offered if offered in values else values[0],
        show_numbers=False,
        bottom_toolbar=_fitting(_HELP),
        key_bindings=_keys(in_menu=True),
    ).prompt()


def _line(question: Question, offered: str, check: Callable[[Any], None]) -> Any:
    from accel.settings.setting import BadValue

    def check_text(text: str) -> None:
        if not text and not question.may_be_empty:
            raise BadValue("an answer is required")
        check(question.parse(text))

    return question.parse(_typed(f" {question.text} ", offered, check_text))


def _typed(text: str, offered: str, check_text: Callable[[str], None]) -> str:
    """Read a line for which `check_text` raises no BadValue."""
    from prompt_toolkit import prompt
    from prompt_toolkit.validation import Validator

    from accel.settings.setting import BadValue

    if _is_plain():
        return _plain_line(text, offered, check_text)

    class Check(Validator):
        def validate(self, document: Any) -> None:
            from prompt_toolkit.validation import ValidationError

            try:
                check_text(document.text)
            except BadValue as error:
                raise ValidationError(len(document.text), str(error)) from None

    return prompt(
        text,
        default=offered,
        validator=Check(),
        validate_while_typing=False,
        bottom_toolbar=_fitting(_HELP_LINE),
        key_bindings=_keys(in_menu=False),
    )


def _is_plain() -> bool:
    """Return True on a terminal without cursor movement (TERM=dumb), as in an editor's shell."""
    from prompt_toolkit.utils import is_dumb_terminal

    return is_dumb_terminal()


def _wrapped(text: str) -> str:
    """Wrap an option's text at the terminal's width: the menu would cut it off."""
    import shutil
    import textwrap

    return "\n  ".join(textwrap.wrap(text, max(20, shutil.get_terminal_size().columns - 7)))


def _fitting(text: str) -> str:
    import shutil

    return text if len(text) < shutil.get_terminal_size().columns else _HELP_NARROW


def _plain_menu(text: str, options: Options, offered: str) -> str:
    """Number the options and read a number or a value."""
    from accel.settings.setting import BadValue

    values = [value for value, _ in options]
    numbers = {str(number): value for number, value in enumerate(values, 1)}

    def check_text(entry: str) -> None:
        if entry not in numbers and entry not in values:
            raise BadValue(f"a number from 1 to {len(values)}, not {entry!r}")

    lines = [f"  {number}  {label}" for number, (_, label) in enumerate(options, 1)]
    choice = _plain_line("\n".join([text, *lines, ""]), str(values.index(offered) + 1), check_text)
    return numbers.get(choice, choice)


def _plain_line(text: str, default: str, check_text: Callable[[str], None]) -> str:
    """Read a line for which `check_text` raises no BadValue; an empty one is the default, `<` raises Back."""
    from accel.settings.setting import BadValue

    while True:
        line = input(f"{text.rstrip(' ')} [{default}] " if default else text).strip() or default
        if line == "<":
            raise Back
        try:
            check_text(line)
        except BadValue as error:
            print(f" {error}", flush=True)
        else:
            return line


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
