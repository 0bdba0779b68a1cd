"""A Google Cloud project on this computer, for TPU slices: its Cloud TPU API (v2), and hosts for the slices' workers.

The API (`tpu_server.py`) is the tests' own, of google-cloud-tpu's messages, over gRPC and REST; states are those that
Google documents, and every call is recorded. Each worker is a host of tests/clusters/ssh.py with a real OpenSSH server,
whose host key the node's guest attributes have, and with a metadata server. No TPU is there. It needs root and the
packages iproute2, openssh-server and openssh-client.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.needs import package
from tests.waiting import until

from .netns import ClusterError, Slot, call, lacking
from .ssh import PROGRAMS, SshHosts

__all__ = ["PARENT", "PROJECT", "SERVICE_ACCOUNT", "ZONE", "ZONES", "Call", "Tpu", "lacks"]

ROOT = Path(__file__).parents[2]
PROJECT, ZONE = "accel-tests", "us-central2-b"
PARENT = f"projects/{PROJECT}/locations/{ZONE}"
# A few zones, and the generations that they have.
ZONES = {ZONE: ("v4",), "us-west4-a": ("v5litepod",), "us-east5-a": ("v5p", "v6e"), "europe-west4-a": ("v2", "v3")}
LAUNCHER = f"launcher@{PROJECT}.iam.gserviceaccount.com"
SERVICE_ACCOUNT = "1-compute@developer.gserviceaccount.com"  # of a node that names none


@dataclass(frozen=True)
class Call:
    """A call: its method and request, who made it (`gcloud`, `test`, or a service account), and by what protocol."""

    method: str
    request: dict[str, Any]
    caller: str
    protocol: str


def lacks() -> tuple[str, str] | None:
    """What this computer lacks for the API and its hosts, and the remedy."""
    if not all(map(find_spec, ("google", "google.cloud", "google.cloud.tpu_v2"))):
        return "google-cloud-tpu", "pip install -c constraints.txt -e '.[dev]'"
    return lacking(**PROGRAMS)


class Tpu:
    """The API, which is a process of its own, and what a test may ask of it. Nodes go by their ids."""

    project, zone, parent = PROJECT, ZONE, PARENT

    def __init__(self, hosts: int) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # until `end`
        self._lock = threading.Lock()
        argv = [sys.executable, "-m", "tests.clusters.tpu_server", str(hosts)]
        self._process = subprocess.Popen(
            argv, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True
        )
        ready = self._read()
        self.address, self.url = f"127.0.0.1:{ready['grpc']}", f"http://127.0.0.1:{ready['rest']}"
        self.hosts = SshHosts(Slot("as", ready["slot"]))
        self._box = self.hosts.box / "client"
        self._make_credentials()

    def end(self) -> None:
        """End the API and its hosts."""
        self._process.communicate(timeout=60)
        self._errors.close()

    @property
    def env(self) -> dict[str, str]:
        """The environment of a client: credentials, project, and the address of the API by gcloud's own variable."""
        return {
            "CLOUDSDK_API_ENDPOINT_OVERRIDES_TPU": f"{self.url}/",
            "CLOUDSDK_API_ENDPOINT_OVERRIDES_COMPUTE": f"{self.url}/compute/v1/",
            "CLOUDSDK_CONFIG": str(self._box / "gcloud"),
            "GOOGLE_APPLICATION_CREDENTIALS": str(self._box / "credentials.json"),
            "GOOGLE_CLOUD_PROJECT": PROJECT,
            "NO_GCE_CHECK": "true",
            "NO_PROXY": "*",
        }

    def gcloud_env(self) -> dict[str, str]:
        """The whole environment of a gcloud that talks to this API: a home of its own, and no credentials."""
        names = [name for name in os.environ if not name.startswith(("CLOUDSDK_", "GOOGLE_", "SSH_AUTH_SOCK"))]
        return {
            **{name: os.environ[name] for name in names},
            **self.env,
            "HOME": str(self._box),
            "CLOUDSDK_AUTH_DISABLE_CREDENTIALS": "true",
            "CLOUDSDK_COMPONENT_MANAGER_DISABLE_UPDATE_CHECK": "1",
            "CLOUDSDK_COMPUTE_ZONE": ZONE,
            "CLOUDSDK_CORE_DISABLE_PROMPTS": "1",
            "CLOUDSDK_CORE_DISABLE_USAGE_REPORTING": "1",
            "CLOUDSDK_CORE_PROJECT": PROJECT,
        }

    def client(self) -> Any:
        """The Python client, over gRPC: its calls are the test's."""
        tpu_v2, grpc = package("google.cloud.tpu_v2"), package("grpc")
        transport = package("google.cloud.tpu_v2.services.tpu.transports").TpuGrpcTransport
        return tpu_v2.TpuClient(transport=transport(channel=grpc.insecure_channel(self.address)))

    def reset(self) -> None:
        """End all nodes and make the project new: no queue, no calls, no failures, denials or holds."""
        self.up()
        self._ask("reset")

    def calls(self, method: str = "", caller: str = "") -> list[Call]:
        """The calls since the reset, as of `CreateNode`; those of one caller, or all."""
        recorded = [Call(**call) for call in self._ask("calls")]
        return [call for call in recorded if method in ("", call.method) and caller in ("", call.caller)]

    def nodes(self) -> list[dict[str, Any]]:
        """All nodes, as the API's JSON."""
        nodes: list[dict[str, Any]] = self._ask("nodes")
        return nodes

    def queued(self) -> list[dict[str, Any]]:
        """All queued resources, as the API's JSON."""
        queued: list[dict[str, Any]] = self._ask("queued")
        return queued

    def history(self, name: str) -> list[str]:
        """The states so far of a node or a queued resource, as `a` or `nodes/a`; "" at its end."""
        states: list[str] = self._ask("history", name=name)
        return states

    def wait(self, name: str, state: str, seconds: float = 60) -> None:
        """Wait until a node or a queued resource has been in this state; "": is gone."""
        until(lambda: state in self.history(name), f"{name} is {state or 'gone'}", seconds)

    def workers(self, node: str) -> list[str]:
        """The names of the node's hosts, in order; none where they are off for good."""
        names: list[str] = self._ask("workers", name=node)
        return names

    def crash(self, node: str, worker: int) -> None:
        """Let one host lose its power; the API does not notice."""
        self.hosts[self.workers(node)[worker]].kill()

    def preempt(self, node: str) -> None:
        """Take a spot node away: its hosts lose their power, its queued resource is suspended."""
        self._ask("preempt", name=node)

    def set_state(self, node: str, state: str) -> None:
        """Let a node have a state, as `REPAIRING`; its hosts stay as they are."""
        self._ask("set_state", name=node, state=state)

    def maintenance(self, node: str, event: str = "TERMINATE_ON_HOST_MAINTENANCE") -> None:
        """Announce maintenance to the node's hosts, or its end (`NONE`), by their metadata server."""
        self._ask("maintenance", name=node, event=event)

    def capacity(self, there: bool) -> None:
        """Without it creations fail as in a stockout, and queued resources wait."""
        self._ask("configure", capacity=there, quota=None, host_keys=None)

    def quota(self, there: bool) -> None:
        """Without it creations are refused, and queued resources fail."""
        self._ask("configure", capacity=None, quota=there, host_keys=None)

    def host_keys(self, there: bool) -> None:
        """Without them the guest attributes have no host keys, as an organization's policy may want it."""
        self._ask("configure", capacity=None, quota=None, host_keys=there)

    def grant(self, queued: str) -> None:
        """Fulfil a queued resource that waits."""
        self._ask("grant", name=queued)

    def hold(self, *steps: str) -> None:
        """Let operations wait until `resume`: CreateNode (CREATING), DeleteNode, UpdateNode, CreateQueuedResource
        (ACCEPTED), DeleteQueuedResource."""
        self._ask("hold", steps=steps)

    def resume(self) -> None:
        self._ask("resume")

    def deny(self, *methods: str, caller: str = "") -> None:
        """Refuse calls of these methods (PERMISSION_DENIED), of one caller or of all."""
        self._ask("deny", methods=methods, caller=caller)

    def allow(self, *methods: str, caller: str = "") -> None:
        """What was denied is allowed again."""
        self._ask("allow", methods=methods, caller=caller)

    def fail(self, method: str, code: str = "UNAVAILABLE", message: str = "Try again.", times: int = 1) -> None:
        """Answer the next calls of a method with an error. `provision`: creations fail, and leave the node CREATING."""
        self._ask("fail", method=method, code=code, message=message, times=times)

    def down(self) -> None:
        """Refuse and cut all connections to the API; operations go on."""
        self._ask("down")

    def up(self) -> None:
        self._ask("up")

    def diagnose(self) -> str:
        """What a failed test shows: nodes, queue, and what the API printed."""
        return "\n".join([*map(json.dumps, [*self.nodes(), *self.queued()]), self._printed()])

    def _make_credentials(self) -> None:
        """A service account's key, by which the Python client signs its tokens, and gcloud's key for SSH."""
        (self._box / ".ssh").mkdir(parents=True, mode=0o700)
        key = self._box / "credentials.pem"
        call("ssh-keygen", "-q", "-t", "rsa", "-b", "2048", "-m", "PEM", "-N", "", "-f", key)
        account = {
            "type": "service_account",
            "project_id": PROJECT,
            "private_key_id": "1",
            "private_key": key.read_text(),
            "client_email": LAUNCHER,
            "client_id": "1",
            "token_uri": f"{self.url}/token",
        }
        (self._box / "credentials.json").write_text(json.dumps(account))
        call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self._box / ".ssh/google_compute_engine")

    def _ask(self, method: str, /, **arguments: Any) -> Any:
        with self._lock:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps({"method": method, "arguments": arguments}) + "\n")
            self._process.stdin.flush()
            reply = self._read()
        if "error" in reply:
            raise ClusterError(f"{method}: {reply['error']}")
        return reply["result"]

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ClusterError(f"the Cloud TPU API ended: {self._printed()}")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def _printed(self) -> str:
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")
