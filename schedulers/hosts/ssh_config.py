"""Settings of a host in `~/.ssh/config`, from `ssh -G`, which alone knows all of its syntax.

No connection is made for that. The aliases that `--hosts 'gpu*'` may mean are read from the files themselves.
"""

from __future__ import annotations

import functools
import getpass
import glob
import os
import re
import shlex
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ..errors import ConfigError
from .host_list import Host, parse_hosts

_USER_CONFIG = "~/.ssh/config"
_SYSTEM_CONFIG = "/etc/ssh/ssh_config"
_DEEPEST_INCLUDE = 16
_TOKEN = re.compile(r"%(.)")
_COMMAND_TIMEOUT_S = 20


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The SSH settings of one host. Times are in seconds; None means not set.

    alias:          the host's name as it was written.
    hostname, port: where to connect to.
    jumps:          hosts on the way, in order.
    certificates:   files that CertificateFile names.
    """

    alias: str
    hostname: str
    port: int
    user: str
    identities: tuple[str, ...] = ()
    identities_only: bool = False
    agent: str | None = None
    known_hosts: tuple[str, ...] = ()
    key_alias: str | None = None
    revoked: str | None = None
    certificates: tuple[str, ...] = ()
    jumps: tuple[Host, ...] = ()
    proxy_command: str | None = None
    connect_timeout_s: float | None = None
    alive_interval_s: float | None = None
    alive_count: int = 3
    family: str = "any"
    bind_address: str | None = None

    @property
    def endpoint(self) -> str:
        return f"[{self.hostname}]:{self.port}" if ":" in self.hostname else f"{self.hostname}:{self.port}"


def resolve(host: Host, config: str | None = None) -> Settings:
    """Return the settings for a host; `config` replaces the user's and the system's files, as `ssh -F` does.

    Raises ConfigError if the files are wrong (with the message of `ssh`) or if there is no `ssh`.
    """
    command = ["ssh", *(["-F", config] if config else []), "-T", "-G"]
    command += ["-p", str(host.port)] if host.port else []
    command += ["-l", host.user] if host.user else []
    # C: English messages can be searched for.
    env = {**os.environ, "LC_ALL": "C"}
    try:
        completed = subprocess.run(
            [*command, "--", host.name],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=env,
            timeout=_COMMAND_TIMEOUT_S,
        )
    except FileNotFoundError:
        raise ConfigError("ssh not found, which reads ~/.ssh/config: apt-get install openssh-client") from None
    except subprocess.TimeoutExpired:
        raise ConfigError(f"`ssh -G {host.name}` timed out: a `Match exec` in ~/.ssh/config hangs") from None
    if completed.returncode != 0:
        stderr_lines = completed.stderr.decode(errors="replace").strip().splitlines() or ["it said nothing"]
        raise ConfigError(f"the SSH configuration for {host.name} cannot be read: {stderr_lines[0]}")
    return parse_settings(host, completed.stdout.decode(errors="surrogateescape"))


def parse_settings(host: Host, text: str) -> Settings:
    """Parse the output of `ssh -G`. Raises ConfigError for an option that accel does not support."""
    all_values: dict[str, list[str]] = {}
    for line in text.splitlines():
        key, _, value = line.partition(" ")
        all_values.setdefault(key, []).append(value)
    option = {key: values[0] for key, values in all_values.items()}
    if option.get("proxyusefdpass") == "yes" and _unless_none(option.get("proxycommand")):
        raise ConfigError(f"{host.name}: ProxyUseFdpass is set in the SSH configuration, but accel does not support it")
    if _unless_none(option.get("knownhostscommand")):
        raise ConfigError(
            f"{host.name}: KnownHostsCommand is set in the SSH configuration, but accel supports known_hosts files "
            "only. For this host, set: KnownHostsCommand none"
        )
    hostname, port, user = option["hostname"], int(option["port"]), option["user"]
    tokens = _tokens(host.name, hostname, port, user)
    timeout, alive = option.get("connecttimeout", "none"), option.get("serveraliveinterval", "0")
    # Debian's ssh has this default with BatchMode; a user's own 300 looks the same.
    default_interval = "300" if option.get("batchmode") == "yes" else "0"
    jump = _unless_none(option.get("proxyjump"))
    known_hosts_files = [
        path for name in ("userknownhostsfile", "globalknownhostsfile") for path in _files(option.get(name, ""))
    ]
    return Settings(
        alias=host.name,
        hostname=hostname,
        port=port,
        user=user,
        identities=tuple(_path(path, tokens) for path in all_values.get("identityfile", ()) if path != "none"),
        identities_only=option.get("identitiesonly") == "yes",
        agent=_agent(option.get("identityagent"), tokens),
        known_hosts=tuple(_path(path, tokens) for path in known_hosts_files if path not in ("none", "/dev/null")),
        key_alias=option.get("hostkeyalias"),
        revoked=_path(revoked, tokens) if (revoked := _unless_none(option.get("revokedhostkeys"))) else None,
        certificates=tuple(_path(path, tokens) for path in all_values.get("certificatefile", ()) if path != "none"),
        jumps=tuple(parse_jumps(jump, f"ProxyJump of {host.name}")) if jump else (),
        proxy_command=_expand(command, tokens) if (command := _unless_none(option.get("proxycommand"))) else None,
        connect_timeout_s=float(timeout) if timeout.isdigit() and int(timeout) else None,
        alive_interval_s=float(alive) if alive.isdigit() and int(alive) and alive != default_interval else None,
        alive_count=int(option.get("serveralivecountmax", "3")),
        family=option.get("addressfamily", "any"),
        bind_address=option.get("bindaddress"),
    )


def parse_jumps(text: str, source: str) -> list[Host]:
    """Parse `user@host:port,…`, and the same as `ssh://` addresses."""
    tokens = [token.strip().removeprefix("ssh://").rstrip("/") for token in text.split(",")]
    return [host for token in tokens for host in parse_hosts(token, source=source)]


def aliases(config: str | None = None) -> list[str]:
    """Return every Host entry that is a name and not a pattern, in the order of the files, following Includes."""
    home = os.path.expanduser("~/.ssh")
    files = [(config, home)] if config else [(os.path.expanduser(_USER_CONFIG), home), (_SYSTEM_CONFIG, "/etc/ssh")]
    return list(dict.fromkeys(name for file, base in files for name in _names_in(file, base, 0)))


def _names_in(file: str, base: str, depth: int) -> Iterator[str]:
    try:
        with open(file, encoding="utf-8", errors="surrogateescape") as stream:
            lines = stream.read().splitlines()
    except OSError:
        return
    for line in lines:
        keyword, values = split_line(line)
        if keyword == "host":
            yield from (value for value in values if not set(value) & set("*?!"))
        elif keyword == "include" and depth < _DEEPEST_INCLUDE:
            for value in values:
                pattern = os.path.join(base, os.path.expanduser(value))
                for included in sorted(glob.glob(pattern)):
                    yield from _names_in(included, base, depth + 1)


def split_line(line: str) -> tuple[str, list[str]]:
    """Return the keyword, in lower case, and the values of a line `Keyword value …` or `Keyword=value`."""
    match = re.match(r"\s*([A-Za-z]+)(?:\s*=\s*|\s+)(.*)", line)
    if match is None:
        return "", []
    try:
        return match[1].lower(), shlex.split(match[2], comments=True)
    except ValueError:
        return match[1].lower(), []


def _files(value: str) -> list[str]:
    """Split file names that `ssh -G` prints without quotes; one with spaces is recognized if the file exists."""
    return [value] if " " in value and os.path.isfile(value) else shlex.split(value)


def _unless_none(value: str | None) -> str | None:
    return None if value is None or value.lower() == "none" else value


def _agent(value: str | None, tokens: Mapping[str, str]) -> str | None:
    if value is None or value == "SSH_AUTH_SOCK":
        return os.environ.get("SSH_AUTH_SOCK") or None
    if value == "none":
        return None
    return os.environ.get(value[1:]) if value.startswith("$") else _path(value, tokens)


def _path(text: str, tokens: Mapping[str, str]) -> str:
    return os.path.expanduser(_expand(text, tokens))


def _expand(text: str, tokens: Mapping[str, str]) -> str:
    return _TOKEN.sub(lambda match: tokens.get(match[1], match[0]), text)


def _tokens(alias: str, hostname: str, port: int, user: str) -> dict[str, str]:
    name = os.uname().nodename
    tokens = {"%": "%", "d": os.path.expanduser("~"), "h": hostname, "i": str(os.getuid()), "k": alias}
    tokens |= {"L": name.partition(".")[0], "l": name, "n": alias, "p": str(port), "r": user, "u": _local_user()}
    return tokens


@functools.cache
def _local_user() -> str:
    return getpass.getuser()
