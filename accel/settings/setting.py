"""One row of the settings' schema, the source of the parser, the file, the questionnaire and the pages.

Named tuples, not dataclasses: `accel launch --help` makes about 200 rows and must start nearly as fast as
Python.
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
    default:  the value if not given; None is "not given".
    choices:  the allowed values, regardless of case; passed on in the spelling here.
    aliases:  other spellings of values, from older versions, with their values.
    also:     words allowed besides the kind's values.
    env:      its variable in the worker, or "".
    style:    how the variable is written: `str`, `lower`, `upper`, or `one` (1 if true, unset if false).
    key:      its name in the file if different; "-" for none.
    used_by:  some of `LAUNCHERS`.
    flag:     True if the command line has it.
    spelling: the flag's name if different.
    when:     (setting, value): required for an effect; a number is a minimum.
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
        """Return the flag's spellings: short, with `_`, with `-`."""
        name = self.spelling or self.name
        long = dict.fromkeys([f"--{name}", f"--{name.replace('_', '-')}"])
        return [*([self.short] if self.short else []), *long]

    @property
    def shown(self) -> str:
        """The flag as written in messages and pages; without a flag, the key in the file."""
        return f"--{self.spelling or self.name}" if self.flag else self.file_key

    @property
    def file_key(self) -> str:
        """The name in the configuration file, or ""."""
        return "" if self.key == "-" else self.key or self.name


class Group(NamedTuple):
    """A group of settings: a heading of `--help`, a page, and possibly a section of the file.

    section: the section of the file that holds them; "" is the file itself.
    prefix:  a part of the names that keys in that section may omit.
    example: the arguments of an `accel launch` line that uses it; "" without flags.
    on:      (setting, value) required for the others to have an effect, or None.
    """

    title: str
    about: str
    settings: tuple[Setting, ...]
    section: str = ""
    prefix: str = ""
    on: tuple[str, Any] | None = None
    example: str = ""


def switch(name: str, help: str, **rest: Any) -> Setting:
    """Return a setting that is off by default."""
    return Setting(name, help, "switch", False, **rest)
