"""`accel completion SHELL`: completion of commands, options, job ids and target names in bash, zsh or fish.

The printed script calls `accel __complete WORDS…`; the last word is the one being typed. That prints a line
per candidate, with a description after a tab. Without candidates the shell completes file names.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from . import exit_status

if TYPE_CHECKING:
    from argparse import Namespace

    from .arguments import Parser

EXAMPLES = """\
  accel completion bash > ~/.local/share/bash-completion/completions/accel
  accel completion zsh > "${fpath[1]}/_accel"
  accel completion fish > ~/.config/fish/completions/accel.fish

Or for this shell alone: eval "$(accel completion bash)"; in fish: accel completion fish | source"""

_BASH = """\
_accel() {
    local line
    COMPREPLY=()
    while IFS= read -r line; do
        COMPREPLY+=("${line%%$'\\t'*}")
    done < <("$1" __complete "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)
}
complete -o bashdefault -o default -F _accel accel
"""

_ZSH = """\
#compdef accel
_accel() {
    local line
    local -a values shown
    for line in "${(@f)$($words[1] __complete "${(@)words[2,CURRENT]}" 2>/dev/null)}"; do
        [[ -n $line ]] || continue
        values+=("${line%%$'\\t'*}")
        shown+=("${line/$'\\t'/  -- }")
    done
    if (( $#values )); then
        compadd -l -d shown -a values
    else
        _files
    fi
}
if [[ $funcstack[1] == _accel ]]; then
    _accel "$@"
else
    compdef _accel accel
fi
"""

_FISH = """\
function __accel_complete
    set -l words (commandline -opc)
    set -l current (commandline -ct)
    set -l found ($words[1] __complete $words[2..-1] "$current" 2>/dev/null)
    if test (count $found) -gt 0
        printf '%s\\n' $found
    else
        __fish_complete_path "$current"
    end
end
complete -c accel -f -a '(__accel_complete)'
"""

SHELLS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}

_MAX_JOBS = 50
_VERBS = {
    "targets": [("check", "check the machines of a target")],
    "image": [("build", "build an image of a project")],
    "config": [("default", "write the defaults"), ("update", "convert an older file")],
}
# Where a command's options are, if not in its own module.
_OPTIONS = {"submit": "accel.cli.submit", "launch": "accel.launch.flags"}


def add_arguments(parser: Parser) -> None:
    parser.add_argument("shell", metavar="SHELL", choices=tuple(SHELLS), help=f"name of the shell: {', '.join(SHELLS)}")


def run(args: Namespace) -> int:
    print(SHELLS[args.shell], end="")
    return exit_status.OK


def complete(tokens: Sequence[str]) -> int:
    """Print the candidates for the last of ``tokens``. Prints nothing on stderr and never fails, for a shell's sake."""
    try:
        from schedulers.printable import one_line

        for value, description in candidates(list(tokens) or [""]):
            sys.stdout.write(f"{value}\t{' '.join(one_line(description).split())}\n" if description else f"{value}\n")
        sys.stdout.flush()
    except Exception:
        return exit_status.ERROR
    return exit_status.OK


def candidates(tokens: list[str]) -> list[tuple[str, str]]:
    """Return (candidate, description) pairs for the last word."""
    from . import COMMANDS

    *previous, current = tokens
    commands = [(name, summary) for name, (_, summary) in COMMANDS.items()]
    if not previous:
        return _matching(current, [*commands, ("help", "Show a command's help")])
    if previous == ["help"]:
        return _matching(current, commands)
    command, *previous = previous
    if command not in COMMANDS or "--" in previous:
        return []
    options = options_of(command)
    if previous and previous[-1] == "=":  # as bash cuts --name=value
        previous.pop()
    elif current == "=" and previous:
        current = ""
    elif current.startswith("-") and "=" in current:
        name, _, value = current.partition("=")
        return [
            (f"{name}={candidate}", description)
            for candidate, description in _matching(value, _values(options.get(_plain(name))))
        ]
    option = _open_option(previous, current, options)
    if option is not None:
        return _matching(current, _values(option))
    if command in _OPTIONS and _has_program(previous, options):
        return []
    if current.startswith("-"):
        return _matching(current, ((name, _description(action)) for name, action in options.items()))
    return _matching(current, _positional_candidates(command, previous))


def _matching(text: str, pairs: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    plain = _plain(text)
    return [
        (value, description)
        for value, description in pairs
        if value.startswith(text) or _plain(value).startswith(plain)
    ]


def _plain(name: str) -> str:
    """Return the option with `-` for `_`: `--num_processes` and `--num-processes` are one option."""
    return name.replace("_", "-") if name.startswith("--") else name


def options_of(command: str) -> dict[str, argparse.Action]:
    """Return a command's options by spelling, as in its parser, with `_` in names replaced by `-`."""
    return {_plain(spelling): action for spelling, action in _parser(command)._option_string_actions.items()}


@functools.cache
def _parser(command: str) -> Parser:
    import importlib

    from . import COMMANDS
    from .arguments import Parser

    parser = Parser(command, "")
    module = importlib.import_module(_OPTIONS.get(command, COMMANDS[command][0]))
    if hasattr(module, "add_arguments"):
        module.add_arguments(parser)
    return parser


def _open_option(previous: Sequence[str], current: str, options: dict[str, argparse.Action]) -> argparse.Action | None:
    """Return the option whose value is being typed, or None."""
    index = next((index for index in range(len(previous) - 1, -1, -1) if previous[index].startswith("-")), None)
    action = None if index is None else options.get(_plain(previous[index]))
    if action is None or not _needs_value(action):
        return None
    is_first = index == len(previous) - 1
    return action if is_first or (action.nargs == "+" and not current.startswith("-")) else None


def _has_program(previous: Sequence[str], options: dict[str, argparse.Action]) -> bool:
    """Return True if the words before include the script: those after it are the script's own."""
    remaining = iter(previous)
    for argument in remaining:
        if not argument.startswith("-"):
            return True
        action = options.get(_plain(argument.partition("=")[0]))
        if action is not None and _needs_value(action) and "=" not in argument:
            next(remaining, None)
    return False


def _needs_value(action: argparse.Action) -> bool:
    """Return True if the next word is the option's value. An optional value follows a `=` only."""
    return action.nargs not in (0, "?")


def _description(action: argparse.Action) -> str:
    return action.help if action.help and action.help is not argparse.SUPPRESS else ""


def _values(action: argparse.Action | None) -> Iterator[tuple[str, str]]:
    if action is None:
        return
    choices = _setting_choices(action.dest) if action.choices is None else map(str, action.choices)
    if choices is not None:
        yield from ((choice, "") for choice in choices)
    elif action.dest in ("target", "write"):
        yield from _targets()
    elif action.dest == "after":
        yield from _job_ids()


def _setting_choices(name: str) -> Iterable[str] | None:
    """Return a setting's values. Its parser reads them itself, ignoring case, and so has no choices."""
    from accel.settings import BY_NAME

    setting = BY_NAME.get(name)
    if setting is not None and setting.kind == "yesno":
        return "true", "false"
    return None if setting is None else setting.choices or None


def _positional_candidates(command: str, previous: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the possible positional words: jobs, the parser's choices, and the command's own verbs."""
    if command == "targets" and "check" in previous:
        yield from _targets()
    elif command in _VERBS:
        yield from () if previous else _VERBS[command]
    for action in _parser(command)._get_positional_actions():
        if action.metavar == "JOB":
            yield from _job_ids()
        elif action.choices is not None:
            yield from _values(action)


def _targets() -> Iterator[tuple[str, str]]:
    from schedulers.config.named_targets import known_targets

    yield from ((target.name, f"{target.kind}, {target.source}") for target in known_targets())


def _job_ids() -> Iterator[tuple[str, str]]:
    """Yield the jobs known here, newest first, in their last known state. No target is polled."""
    from schedulers.store.record import CorruptRecord
    from schedulers.store.store import Store

    store = Store.default()
    jobs = store.records(store.ids()[:_MAX_JOBS])
    if jobs:
        yield "@last", "the newest job"
    for job in jobs:
        yield job.id, "damaged" if isinstance(job, CorruptRecord) else f"{job.name}, {job.status.state.value}"
