"""The ssh target: `accel launch` on each of several named machines."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from ..errors import SpecError
from ..hosts.jobs.target import HostsTarget
from ..job import JobSpec
from ..target import TargetContext
from . import options as ssh_options
from .options import SshOptions

if TYPE_CHECKING:
    from ..hosts.host_list import Host


class SshTarget(HostsTarget):
    """A target that runs each job on hosts that share nothing. A job's native id is `host,host,…/job id`."""

    kind: ClassVar[str] = "ssh"
    a_target: ClassVar[str] = "an ssh target"
    Options: ClassVar[type] = SshOptions
    _options: SshOptions

    def __init__(self, context: TargetContext) -> None:
        super().__init__(context)
        ssh_options.check(self._options, self.name)

    def _candidate_hosts(self, code: str) -> list[Host]:
        return ssh_options.named_hosts(self._options, self.name, code)

    def _candidates(self) -> str:
        return ssh_options.candidates(self._options, f"target {self.name}: hosts")

    def _check(self, spec: JobSpec) -> None:
        super()._check(spec)
        options = self._options
        if options.hosts is None and options.hostfile is None:
            raise SpecError(
                f"target {self.name}: no hosts; give --hosts a,b or --hostfile FILE, or write hosts: in accel.yaml"
            )
        count = ssh_options.known_hosts_count(options, f"target {self.name}: hosts")
        if count is not None and count < spec.nodes + options.spares:
            spares = f" and {options.spares} spares" if options.spares else ""
            raise SpecError(f"target {self.name}: {spec.nodes} nodes{spares} requested, but it has {count} hosts")
