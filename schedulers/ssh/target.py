"""The ssh target: `accel launch` on each of several named machines."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import ClassVar

from ..errors import SpecError
from ..hosts.host_list import Host, parse_hosts, read_hostfile
from ..hosts.jobs.options import HostOptions
from ..hosts.jobs.target import HostsTarget
from ..job import JobSpec
from ..target import TargetContext

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


class SshTarget(HostsTarget):
    """A target that runs each job on hosts that share nothing. A job's native id is `host,host,…/job id`."""

    kind: ClassVar[str] = "ssh"
    a_target: ClassVar[str] = "an ssh target"
    Options: ClassVar[type] = SshOptions
    _options: SshOptions

    def __init__(self, context: TargetContext) -> None:
        super().__init__(context)
        options = self._options
        if options.hosts is not None and options.hostfile is not None:
            problem = "hosts and hostfile are both given: keep one (--hosts replaces hosts only)"
            raise SpecError(f"target {self.name}: {problem}")
        hosts = options.hosts or ""
        self._text = hosts if isinstance(hosts, str) else ",".join(hosts)
        self._has_patterns = "*" in self._text or "?" in self._text

    def _candidate_hosts(self, code: str) -> list[Host]:
        """Return the hosts, in their order; read the hostfile or the SSH configuration."""
        options = self._options
        self._require_hosts()
        if options.hostfile is not None:
            hosts = read_hostfile(os.path.join(code, os.path.expanduser(options.hostfile)))
        else:
            hosts = self._listed_hosts()
        return [replace(host, user=host.user or options.user, port=host.port or options.port) for host in hosts]

    def _candidates(self) -> str:
        if self._options.hostfile is not None:
            return f"hostfile {self._options.hostfile}"
        if self._has_patterns:
            return self._text
        hosts = [str(host) for host in self._listed_hosts()]
        suffix = f", … ({len(hosts)} hosts)" if len(hosts) > _MAX_SHOWN else ""
        return f"{', '.join(hosts[:_MAX_SHOWN])}{suffix}"

    def _check(self, spec: JobSpec) -> None:
        super()._check(spec)
        self._require_hosts()
        count, spare_count = self.known_host_count(), self._options.spares
        if count is not None and count < spec.nodes + spare_count:
            spares = f" and {spare_count} spares" if spare_count else ""
            raise SpecError(f"target {self.name}: {spec.nodes} nodes{spares} requested, but it has {count} hosts")

    def known_host_count(self) -> int | None:
        """Return the number of hosts, or None if a file must be read for it. Raises SpecError."""
        return None if not self._text or self._has_patterns else len(self._listed_hosts())

    def _require_hosts(self) -> None:
        if self._options.hosts is None and self._options.hostfile is None:
            raise SpecError(
                f"target {self.name}: no hosts; give --hosts a,b or --hostfile FILE, or write hosts: in accel.yaml"
            )

    def _listed_hosts(self) -> list[Host]:
        """Return the hosts of the option `hosts`. For patterns, reads the SSH configuration."""
        from ..hosts.ssh_config import aliases

        known = aliases(self._options.ssh_config) if self._has_patterns else ()
        return parse_hosts(self._text, aliases=known, source=f"target {self.name}: hosts")
