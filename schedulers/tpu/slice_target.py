"""`accel launch` on every host of a slice of Google Cloud TPUs."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ..clean_env import installed_main
from ..errors import SpecError
from ..hosts.jobs.target import HostsTarget
from ..job import JobSpec
from ..target import Plan
from . import options as tpu_options
from . import slices
from .api import Api
from .options import TpuOptions

if TYPE_CHECKING:
    from ..hosts.facts import HostRequirements
    from ..hosts.host_list import Host
    from ..hosts.jobs.status import Hosts


_METADATA = "169.254.169.254"  # of each host: https://cloud.google.com/compute/docs/metadata/querying-metadata
CODE = "code.tar"  # in the directory of a job that waits for its slice
_REACHABLE_WITHIN_S = 60.0
_TORCH_TPU_PYTHON = (3, 11)
_WITH_CHECKPOINTS = installed_main("schedulers.tpu.checkpoints")


class SliceTarget(HostsTarget):
    """A target that runs each job on all hosts of a slice. Native ids: `SLICE-w0,SLICE-w1,…/job id`."""

    kind: ClassVar[str] = "tpu"
    a_target: ClassVar[str] = "a tpu target"
    Options: ClassVar[type] = TpuOptions
    in_order: ClassVar[bool] = True
    _options: TpuOptions

    def config(self) -> tuple[Path, list[Host]]:
        """Rewrite the SSH configuration of the slice's workers. Return its path, and the workers.

        Raises SubmitError, SpecError, ConfigError, Unreachable.
        """
        return self._folder / "ssh_config", self._candidate_hosts(".")

    def wait_reachable(self) -> None:
        """Connect to every worker once: a slice may be READY before its servers. Raises the connection's error."""
        hosts = self._candidate_hosts(".")
        self._host_count(len(hosts), hosts)
        for outcome in self._hosts.pool.map(lambda remote: remote.run(["true"], timeout_s=_REACHABLE_WITHIN_S), hosts):
            if outcome.error is not None:
                raise outcome.error

    @property
    def _hosts(self) -> Hosts:
        if self._connections is None:
            from ..hosts.jobs.status import Hosts

            if not (self._folder / "ssh_config").exists():
                self._candidate_hosts(".")
            self._connections = Hosts(replace(self._options, ssh_config=str(self._folder / "ssh_config")))
        return self._connections

    def _candidate_hosts(self, code: str) -> list[Host]:
        """Return the slice's workers, with their current addresses and keys."""
        api, options = self._api, self._options
        tpu = slices.ready_slice(self._slice(), options, api.label)
        if options.transport == "gcloud":
            slices.write_gcloud_config(self._folder, tpu, options, api.project, api.label)
        else:
            slices.write_config(self._folder, tpu, api.host_keys(tpu.name), options, api.label)
        self.close()  # cached data of the workers may be of an earlier slice
        return tpu.hosts

    def _snapshot_path(self, plan: Plan) -> Path:
        archive = self._jobs / plan.job_id / CODE
        return archive if archive.exists() else super()._snapshot_path(plan)

    def _candidates(self) -> str:
        return f"the hosts of {self._options.name or 'the slice'} in {self._options.zone}"

    def _describe_choice(self, spec: JobSpec) -> str:
        return "all of them, by the workers' numbers"

    def _command(self, spec: JobSpec) -> list[str]:
        command, uri = super()._command(spec), self._options.checkpoint_uri
        return command if uri is None else [command[0], "-c", _WITH_CHECKPOINTS, uri, *command[1:]]

    def _launch_flags(self) -> list[str]:
        options = self._options
        if options.cpu:
            return super()._launch_flags()
        function = ["--main_training_function", options.main_training_function]
        return ["--tpu", "--tpu_runtime", options.runtime, *(function if options.runtime == "torch_xla" else [])]

    def _warnings(self, spec: JobSpec) -> tuple[str, ...]:
        warnings = super()._warnings(spec)
        if spec.procs_per_node is None or self._options.runtime != "torch_xla" or self._options.cpu:
            return warnings
        return (*warnings, f"{spec.procs_per_node} processes per node are ignored: torch_xla starts one per chip")

    def _requirements_of_host(self) -> HostRequirements:
        requirements, options = super()._requirements_of_host(), self._options
        packages, python = dict(requirements.packages), requirements.python
        if options.checkpoint_uri is not None:
            packages["google-cloud-storage"] = "google.cloud.storage"
        if not options.cpu:
            packages[options.runtime] = options.runtime
            python = _TORCH_TPU_PYTHON if options.runtime == "torch_tpu" else python
        return replace(requirements, python=python, packages=packages)

    def _check(self, spec: JobSpec) -> None:
        tpu_options.check(self._options, self.name, spec)
        super()._check(spec)

    def _supervisor_settings(self) -> dict[str, Any]:
        return {"metadata_server": _METADATA}

    def _host_count(self, requested: int, hosts: Sequence[Host]) -> int:
        name = str(self._options.name)
        if requested not in (1, len(hosts)):
            raise SpecError(f"target {self.name}: --nodes {requested}: {name} has {len(hosts)} hosts; leave it out")
        if self._options.transport == "ssh":
            slices.install_key(self._api, name, self._hosts.pool, hosts)
        return len(hosts)

    def _slice(self) -> slices.Slice | None:
        for key in ("zone", "name"):
            if getattr(self._options, key) is None:
                raise SpecError(f"target {self.name}: no {key} of a slice: set it in accel.yaml, or --option {key}=…")
        node = self._api.get(str(self._options.name))
        return None if node is None else slices.Slice.of(node, self._options)

    @functools.cached_property
    def _api(self) -> Api:
        return Api(self._options, self.name)

    @property
    def _folder(self) -> Path:
        project = self._options.project or os.environ.get("CLOUDSDK_CORE_PROJECT") or "default"
        return self._jobs.parent.joinpath("tpu", project, str(self._options.zone), str(self._options.name))
