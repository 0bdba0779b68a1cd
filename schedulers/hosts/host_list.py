"""Lists of hosts: `a,b`, `user@host:port`, `[fd00::1]:22`, `gpu[01-16]`, `gpu{01..16}`, `gpu*`, and hostfiles.

All functions are pure except `read_hostfile`.
"""

from __future__ import annotations

import fnmatch
import ipaddress
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from ..errors import ConfigError, SpecError, nearest

MAX_HOSTS = 10_000
_MAX_SLOTS = 1024
_LAST_PORT = 65535
_MAX_SHOWN = 8

_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?\.?")
_USER = re.compile(r"[A-Za-z0-9_.][A-Za-z0-9_.+@\\-]*")
_GROUP = re.compile(r"\[(?P<ranges>[^][]*)\]|\{(?P<braces>[^{}]*)\}")
_SPAN = re.compile(r"(?P<first>[0-9]+)(?:-|\.\.)(?P<last>[0-9]+)")
_EQUALS = re.compile(r"\s*=\s*")  # Open MPI takes `slots = 4` too
_SETTINGS = ("slots", "max_slots", "port", "user")
_SPELLINGS = {"max-slots": "max_slots", "username": "user"}


@dataclass(frozen=True, kw_only=True)
class Host:
    """A host as it was named.

    name:   as written: an address, a name, or an alias in `~/.ssh/config`.
    user:   the user to log in as; None: as in `~/.ssh/config`.
    port:   the server's; None: as in `~/.ssh/config`.
    slots:  number of processes in a hostfile; None if it gives none.
    source: where it was named: `--hosts` or `file:line`.
    """

    name: str
    user: str | None = None
    port: int | None = None
    slots: int | None = None
    source: str = "--hosts"

    def __str__(self) -> str:
        """Return the host as `--hosts` accepts it."""
        name = f"[{self.name}]" if ":" in self.name else self.name
        user = f"{self.user}@" if self.user else ""
        return f"{user}{name}:{self.port}" if self.port else f"{user}{name}"


def parse_hosts(text: str, *, aliases: Sequence[str] = (), source: str = "--hosts") -> list[Host]:
    """Return the hosts of a list, in its order.

    A word with `*` or `?` stands for the `aliases` that match it and are not named elsewhere in the list. Raises
    SpecError for a host that is written twice, and for a word that names no host.
    """
    by_endpoint: dict[tuple[str, int | None], Host] = {}
    tokens = _split(text, source)
    literal = [token for token in tokens if not _is_pattern(token)]
    for host in itertools.chain.from_iterable(_expanded_hosts(token, source) for token in literal):
        if (host.name, host.port) in by_endpoint:
            raise SpecError(f"{source}: {str(host)!r} is listed twice; one launcher on a host starts all its processes")
        by_endpoint[host.name, host.port] = host
    order: list[Host] = []
    for token in tokens:
        hosts = _matching(token, aliases, source) if _is_pattern(token) else _expanded_hosts(token, source)
        for host in hosts:
            if not _is_pattern(token) or (host.name, host.port) not in by_endpoint:
                order.append(host)
                by_endpoint[host.name, host.port] = host
    return _check_count(order, source)


def read_hostfile(path: str) -> list[Host]:
    """Read a hostfile. Raises ConfigError if it cannot be read, and what `parse_hostfile` raises."""
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return parse_hostfile(file.read(), path)
    except OSError as error:
        raise ConfigError(f"hostfile {path}: {(error.strerror or str(error)).lower()}") from None


def parse_hostfile(text: str, file: str) -> list[Host]:
    """Return the hosts of a hostfile, in its order.

    A line is `host`, `host slots=8` (Open MPI, DeepSpeed) or `host:8` (MPICH); comments begin with `#`. A host
    that is named again adds to its slots; a line without a number counts as one.

    Raises ConfigError, with file:line, for what is not a hostfile and for two lines that contradict each other.
    """
    by_endpoint: dict[tuple[str, int | None], Host] = {}
    for number, line in enumerate(text.splitlines(), 1):
        tokens = _EQUALS.sub("=", line.partition("#")[0]).split()
        if not tokens:
            continue
        location = f"{file}:{number}"
        try:
            for host in _hostfile_line(tokens, location):
                earlier = by_endpoint.get((host.name, host.port))
                by_endpoint[host.name, host.port] = host if earlier is None else _merged(earlier, host)
        except SpecError as error:
            raise ConfigError(str(error)) from None
    if not by_endpoint:
        raise ConfigError(f"{file}: names no host; a line is a host, or `host slots=8`")
    return _check_count(list(by_endpoint.values()), file)


def expand(token: str, source: str = "--hosts") -> Iterator[str]:
    """Expand a word with `[01-16,20]`, `{01..16}` or `{a,b}` to the names it stands for. Raises SpecError."""
    segments: list[Sequence[str]] = []
    start = 0
    for group in _GROUP.finditer(token):
        segments += [[token[start : group.start()]], list(_members(group, token, source))]
        start = group.end()
    rest = token[start:]
    if any(char in part for part in (rest, *(segment[0] for segment in segments[::2])) for char in "[]{}"):
        raise SpecError(f"{source}: {token!r} has a bracket without its other half, or one inside another")
    total = 1
    for segment in segments:
        total *= len(segment)
    if total > MAX_HOSTS:
        raise SpecError(f"{source}: {token!r} names {total} hosts; at most {MAX_HOSTS} are possible")
    return ("".join((*parts, rest)) for parts in itertools.product(*segments))


def _members(group: re.Match[str], token: str, source: str) -> Iterator[str]:
    content = group["ranges"] if group["ranges"] is not None else group["braces"]
    total = 0
    for item in content.split(","):
        span = _SPAN.fullmatch(item)
        if span is None:
            if not item or (group["ranges"] is not None and not item.isdigit()):
                raise SpecError(f"{source}: {token!r}: {item!r} is not a number or a range (as in [01-16,20])")
            yield item
            continue
        first, last = int(span["first"]), int(span["last"])
        if last < first:
            raise SpecError(f"{source}: {token!r}: the range {item} runs backwards")
        total += last - first + 1
        if total > MAX_HOSTS:
            raise SpecError(f"{source}: {token!r} names more than {MAX_HOSTS} hosts")
        width = len(span["first"]) if span["first"].startswith("0") else 0
        yield from (f"{number:0{width}d}" for number in range(first, last + 1))


def _split(text: str, source: str) -> list[str]:
    """Split at commas and blanks that are not in brackets."""
    tokens: list[str] = []
    token, depth = "", 0
    for char in text:
        depth = max(0, depth + (char in "[{") - (char in "]}"))
        if depth == 0 and (char == "," or char.isspace()):
            tokens.append(token)
            token = ""
        else:
            token += char
    tokens.append(token)
    nonempty = [token for token in tokens if token]
    if not nonempty:
        raise SpecError(f"{source}: names no host")
    return nonempty


def _is_pattern(token: str) -> bool:
    return "*" in token or "?" in token


def _matching(token: str, aliases: Sequence[str], source: str) -> Iterable[Host]:
    user, at, pattern = token.rpartition("@")
    names = [name for name in dict.fromkeys(aliases) if _NAME.fullmatch(name)]
    matching = [name for name in names if fnmatch.fnmatchcase(name, pattern) and "[" not in pattern]
    if not matching:
        raise SpecError(
            f"{source}: {token!r} matches no Host entry of the SSH configuration{nearest(pattern, aliases)}"
            f" (it has {_format_names(aliases)})"
        )
    for name in matching:
        yield Host(name=_checked_name(name, source), user=_checked_user(user, token, source) if at else None)


def _format_names(names: Sequence[str]) -> str:
    suffix = f", … ({len(names)} in all)" if len(names) > _MAX_SHOWN else ""
    return f"{', '.join(names[:_MAX_SHOWN])}{suffix}" if names else "none"


def _expanded_hosts(token: str, source: str) -> Iterator[Host]:
    user, at, rest = token.rpartition("@")
    if at:
        _checked_user(user, token, source)
    endpoint = _ipv6(rest, source)
    names = (
        [(endpoint[0], endpoint[1])] if endpoint else [_name_and_port(name, source) for name in expand(rest, source)]
    )
    for name, port in names:
        yield Host(name=name, user=user if at else None, port=port, source=source)


def _ipv6(text: str, source: str) -> tuple[str, int | None] | None:
    """Return the address and the port of `[fd00::1]:22` or `fd00::1`; None for text without two colons."""
    if text.count(":") < 2:
        return None
    address, rest = text, ""
    if text.startswith("["):
        address, bracket, rest = text[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise SpecError(f"{source}: {text!r} is not an IPv6 address; it is written [fd00::1] or [fd00::1]:22")
    try:
        ipaddress.IPv6Address(address)
    except ValueError:
        raise SpecError(
            f"{source}: {text!r} is not a host: an IPv6 address is written [fd00::1] or [fd00::1]:22"
        ) from None
    return address, _port(rest[1:], text, source) if rest else None


def _name_and_port(text: str, source: str) -> tuple[str, int | None]:
    name, colon, port = text.partition(":")
    return _checked_name(name, source), _port(port, text, source) if colon else None


def _checked_name(name: str, source: str) -> str:
    # A name never begins with a dash: nothing that it is handed to may take it for an option.
    if not _NAME.fullmatch(name) or ".." in name or len(name) > 253:
        raise SpecError(f"{source}: {name!r} is not a host name (letters, digits, '.', '-' and '_')")
    return name


def _checked_user(user: str, token: str, source: str) -> str:
    if not _USER.fullmatch(user):
        raise SpecError(f"{source}: {token!r}: {user!r} is not a user name")
    return user


def _port(text: str, token: str, source: str) -> int:
    if not (text.isascii() and text.isdigit()) or not 0 < int(text) <= _LAST_PORT:
        raise SpecError(f"{source}: {token!r}: {text!r} is not a port (1 to {_LAST_PORT})")
    return int(text)


def _hostfile_line(tokens: Sequence[str], location: str) -> list[Host]:
    token, *settings = tokens
    if _is_pattern(token):
        raise SpecError(f"{location}: {token!r}: patterns are for --hosts; a hostfile names each host")
    fields = _settings(settings, location)
    user, at, rest = token.rpartition("@")
    slots: int | None = None
    name, colon, count = rest.rpartition(":")
    if colon and (rest.startswith("[") or rest.count(":") == 1) and not rest.endswith("]"):
        slots = _slots(count, token, location)
        rest = name
    hosts = list(_expanded_hosts(f"{user}{at}{rest}", location))
    if slots is not None and "slots" in fields:
        raise SpecError(f"{location}: {token!r} has its slots twice: {count}, and slots={fields['slots']}")
    if at and fields.get("user", user) != user:
        raise SpecError(f"{location}: {token!r} has two users: {user}, and {fields['user']}")
    return [
        replace(
            host,
            slots=_slots(fields["slots"], token, location) if "slots" in fields else slots,
            port=_port(fields["port"], token, location) if "port" in fields else None,
            user=_checked_user(fields["user"], token, location) if "user" in fields else host.user,
        )
        for host in hosts
    ]


def _settings(tokens: Iterable[str], location: str) -> dict[str, str]:
    settings: dict[str, str] = {}
    for token in tokens:
        name, equals, value = token.partition("=")
        name = _SPELLINGS.get(name, name)
        if name not in _SETTINGS or not equals:
            hint = nearest(name, _SETTINGS) if name not in _SETTINGS else "; it has no value"
            raise SpecError(
                f"{location}: {token!r} is not a setting{hint} (settings: {', '.join(_SETTINGS)}, each NAME=…)"
            )
        if name in settings:
            raise SpecError(f"{location}: {name} is set twice")
        settings[name] = value
    if "max_slots" in settings:
        max_slots = _slots(settings["max_slots"], "max_slots", location)
        if "slots" in settings and _slots(settings["slots"], "slots", location) > max_slots:
            raise SpecError(f"{location}: slots={settings['slots']} is more than max_slots={max_slots}")
    return settings


def _slots(text: str, token: str, location: str) -> int:
    if text.isascii() and text.isdigit() and 0 < int(text) <= _MAX_SLOTS:
        return int(text)
    port = "; in a hostfile the number after ':' is slots, a port is port=N" if text.isdigit() else ""
    raise SpecError(f"{location}: {token!r}: {text!r} is not a number of slots (1 to {_MAX_SLOTS}){port}")


def _merged(earlier: Host, later: Host) -> Host:
    if earlier.user != later.user:
        raise SpecError(
            f"{later.source}: {later.name} as {later.user or 'the default user'} is at {earlier.source} "
            f"as {earlier.user or 'the default user'}; leave one of the lines out"
        )
    return replace(earlier, slots=(earlier.slots or 1) + (later.slots or 1))


def _check_count(hosts: list[Host], source: str) -> list[Host]:
    if len(hosts) > MAX_HOSTS:
        raise SpecError(f"{source}: {len(hosts)} hosts; at most {MAX_HOSTS} are possible")
    return hosts
