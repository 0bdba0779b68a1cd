"""Options of an ssh target, and what they mean before any host is contacted."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from ..errors import SpecError
from ..hosts.host_list import Host, parse_hosts, read_hostfile
from ..hosts.jobs import options as common
from ..hosts.jobs.options import HostOptions

_MAX_SHOWN = 64


@dataclass(frozen=True, kw_only=True)
class SshOptions(HostOptions):
    """Options of an ssh target in `accel.yaml`, in addition to `HostOptions`.

    hosts:           `a,b`, `user@host:port`, `gpu[01-16]`, or patterns of ~/.ssh/config such as `gpu*`.
    hostfile:        a file with one host per line (syntax of Open MPI, DeepSpeed or MPICH), instead of `hosts`;
                     a relative path is resolved from the code directory.
    """

    hosts: str | tuple[str, ...] | None = None
    hostfile: str | None = None


def check(options: SshOptions, name: str) -> None:
    """Raise SpecError, naming the key, for invalid options."""
    if options.hosts is not None and options.hostfile is not None:
        raise SpecError(f"target {name}: hosts and hostfile are both given: keep one (--hosts replaces hosts only)")
    common.check(options, name)


def hosts_text(options: SshOptions) -> str | None:
    """Return the hosts as the comma-separated text of `--hosts`, or None."""
    hosts = options.hosts
    return hosts if hosts is None or isinstance(hosts, str) else ",".join(hosts)


def known_hosts_count(options: SshOptions, source: str) -> int | None:
    """Return the number of hosts, or None if a file must be read for it. Raises SpecError."""
    text = hosts_text(options)
    if text is None or "*" in text or "?" in text:
        return None
    return len(parse_hosts(text, source=source))


def candidates(options: SshOptions, source: str) -> str:
    """Return the hosts that a job may run on, as text, without reading a file. Raises SpecError."""
    text = hosts_text(options)
    if options.hostfile is not None:
        return f"hostfile {options.hostfile}"
    if text is None or "*" in text or "?" in text:
        return str(text)
    hosts = [str(host) for host in parse_hosts(text, source=source)]
    suffix = f", … ({len(hosts)} hosts)" if len(hosts) > _MAX_SHOWN else ""
    return f"{', '.join(hosts[:_MAX_SHOWN])}{suffix}"


def named_hosts(options: SshOptions, name: str, code: str) -> list[Host]:
    """Return the hosts, in their order; read the hostfile or the SSH configuration. Raises SpecError, ConfigError."""
    text = hosts_text(options)
    if options.hostfile is not None:
        hosts = read_hostfile(os.path.join(code, os.path.expanduser(options.hostfile)))
    elif text is not None:
        hosts = parse_hosts(text, aliases=_aliases(options, text), source=f"target {name}: hosts")
    else:
        raise SpecError(f"target {name}: no hosts; give --hosts a,b or --hostfile FILE, or write hosts: in accel.yaml")
    return [replace(host, user=host.user or options.user, port=host.port or options.port) for host in hosts]


def _aliases(options: SshOptions, text: str) -> list[str]:
    if "*" not in text and "?" not in text:
        return []
    from ..hosts.ssh_config import aliases

    return list(aliases(options.ssh_config))
