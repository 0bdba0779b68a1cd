"""What a setting is: one row of the schema, from which the parser, the file, the questionnaire and the pages are made.

Named tuples and not dataclasses: `accel launch --help` makes some 200 rows, and must start as fast as Python nearly.
"""

from __future__ import annotations

from typing import Any, NamedTuple

# Who reads a setting.
ALL = ("all",)
LAUNCHERS = {
    "all": "every launch",
    "gang": "several processes",
    "deepspeed": "DeepSpeed",
    "fsdp": "FSDP",
    "megatron": "Megatron-LM",
    "parallelism": "parallelism over several dimensions",
    "fp8": "FP8",
    "dynamo": "torch.compile",
    "tpu": "a TPU",
    "pod": "a TPU pod",
    "mpi": "mpirun",
    "sagemaker": "Amazon SageMaker",
}

KINDS = {
    "switch": "yes, if given",
    "text": "text",
    "whole": "a whole number",
    "positive": "a whole number from 1 on",
    "number": "a number",
    "seconds": "seconds",
    "yesno": "true or false",
    "yesnos": "three of true or false, with commas",
    "words": "text; may be given several times",
    "table": "names and values",
}


class Setting(NamedTuple):
    """One setting.

    name:     of the flag, and of the value everywhere in the program.
    kind:     one of `KINDS`.
    default:  what holds where nobody says anything; None is "not given".
    choices:  the allowed values; case does not count, and the spelling here is the one that is passed on.
    aliases:  other spellings of values, of older versions, with what they mean.
    also:     words that it may be beside what its kind says.
    env:      the variable that it becomes in the worker; "" if it becomes none.
    style:    how the value is written there: `str`, `lower`, `upper`, or `one` (1 if yes, nothing if no).
    key:      its name in the file where that is another one; "-" where it has none.
    used_by:  some of `LAUNCHERS`.
    flag:     whether the command line takes it.
    spelling: the flag's name where that is another one.
    when:     (setting, value): it has an effect only then, or only from then on if the value is a number.
    """

    name: str
    help: str
    kind: str = "text"
    default: Any = None
    choices: tuple[str, ...] = ()
    aliases: tuple[tuple[str, str], ...] = ()
    also: tuple[str, ...] = ()
    short: str = ""
    metavar: str = ""
    env: str = ""
    style: str = "str"
    key: str = ""
    used_by: tuple[str, ...] = ALL
    flag: bool = True
    spelling: str = ""
    when: tuple[str, Any] | None = None

    def spellings(self) -> list[str]:
        """The flag as it may be typed: short, with `_`, with `-`."""
        name = self.spelling or self.name
        long = dict.fromkeys([f"--{name}", f"--{name.replace('_', '-')}"])
        return [*([self.short] if self.short else []), *long]

    @property
    def shown(self) -> str:
        """The flag as messages and pages write it; of a setting that has none, its name in the file."""
        return f"--{self.spelling or self.name}" if self.flag else self.file_key

    @property
    def file_key(self) -> str:
        """Its name in the configuration file; "" where it has none."""
        return "" if self.key == "-" else self.key or self.name


class Group(NamedTuple):
    """Settings that belong together: a heading of `--help`, a page, and perhaps a section of the file.

    section: the section of the file that holds them; "" is the file itself.
    prefix:  what a key in that section may leave out of the name.
    example: what follows `accel launch` in a line that uses it; "" where no flag of it is one.
    on:      the setting, with its value, without which the others of the group have no effect; None if they always do.
    """

    title: str
    about: str
    settings: tuple[Setting, ...]
    section: str = ""
    prefix: str = ""
    on: tuple[str, Any] | None = None
    example: str = ""


def switch(name: str, help: str, **rest: Any) -> Setting:
    """A setting that is off unless it is given."""
    return Setting(name, help, "switch", False, **rest)
