"""A real Docker daemon on this computer: network, processes and mounts of its own, images that need not be pulled.

    python -m tests.clusters.docker     prints its address (DOCKER_HOST), and serves until its input ends

It is a machine of `netns.py`: ending its first process ends all containers. Images may name, in MOUNTS, what their
containers see of this computer, read-only (`HOST`, which holds nothing else); others are Docker's own affair. It needs
root and the packages docker.io and iptables, and for the SageMaker SDK's local mode docker-compose.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from .kube import images
from .netns import ClusterError, Machine, Network, Slot, call, lacking, wait_until

PROGRAMS = {
    "docker": "docker.io", "dockerd": "docker.io", "containerd": "containerd", "runc": "runc", "iptables": "iptables",
    "docker-compose": "docker-compose",
}  # fmt: skip
HOST = "host:1"  # its containers see this interpreter and its packages, but neither accel nor the checkout
MOUNTS = "ACCEL_TEST_MOUNTS"
_START_S = 60.0
_CGROUPS = Path("/sys/fs/cgroup")
_BOOT = """\
set -e
mount -t tmpfs -o mode=755 tmpfs /run
echo 1 >/proc/sys/net/ipv4/ip_forward
exec dockerd --data-root {own}/data --exec-root /run/docker --pidfile /run/docker.pid --host unix://{socket} \\
    --cgroup-parent /{tag} --oom-score-adjust=0 --add-runtime host={own}/runtime --default-runtime host \\
    --insecure-registry {here}/32
"""  # it may not lower its own oom_score_adj without CAP_SYS_RESOURCE
_RUNTIME = """\
#!{python}
import json, os, sys
if "create" in sys.argv:
    path = sys.argv[sys.argv.index("--bundle") + 1] + "/config.json"
    with open(path) as file:
        spec = json.load(file)
    for variable in spec["process"]["env"]:
        name, _, value = variable.partition("=")
        for place in value.split(":") if name == {mounts!r} else ():
            spec["mounts"].append({{"destination": place, "source": place, "type": "bind", "options": ["rbind", "ro"]}})
    with open(path, "w") as file:
        json.dump(spec, file)
os.execvp("runc", ["runc", *sys.argv[1:]])
"""


def lacks() -> tuple[str, str] | None:
    """What this computer lacks for the daemon and docker-compose, and the remedy."""
    return lacking(**PROGRAMS)


class Docker:
    """The daemon, in a slot of its own."""

    def __init__(self, slot: Slot) -> None:
        self.slot = slot
        self._network = Network(slot)
        self._machine = Machine(self._network, 1, "docker", self._boot)

    @property
    def here(self) -> str:
        """The address of this computer for the daemon and its containers. Registries at it may speak plain HTTP."""
        return self._network.address(0)

    @property
    def address(self) -> str:
        """The daemon's address, where the ports are that containers publish."""
        return self._machine.address

    @property
    def env(self) -> dict[str, str]:
        """What leads a client to it."""
        return {"DOCKER_HOST": f"unix://{self._socket}", "DOCKER_CONFIG": str(self._machine.own / "config")}

    def start(self) -> None:
        """Raises ClusterError, with what the daemon said last."""
        self.stop()
        own = self._machine.own
        own.mkdir(parents=True)
        (own / "runtime").write_text(_RUNTIME.format(python=sys.executable, mounts=MOUNTS))
        (own / "runtime").chmod(0o755)
        self._network.up()
        self._machine.start()
        try:
            wait_until("the Docker daemon answers", self._answers, _START_S)
        except ClusterError as error:
            raise ClusterError(f"{error}: {self._machine.log.read_text()[-2000:]}") from None
        image = own / "host.tar"
        seen = ":".join(images.mounts(with_accel=False))
        path = f"{sys.prefix}/bin:/usr/local/bin:/usr/bin:/bin"
        images.write_host(image, HOST, [f"PATH={path}", f"{MOUNTS}={seen}"])
        self.run("load", "--quiet", "--input", str(image))

    def stop(self) -> None:
        """End the daemon and all of its containers, and remove everything."""
        self._machine.end()
        self._network.down()
        for parent in (_CGROUPS / self.slot.tag, *_CGROUPS.glob(f"*/{self.slot.tag}")):  # of version 2, and of 1
            for directory in sorted([parent, *parent.glob("**/")], reverse=True):
                with contextlib.suppress(OSError):
                    directory.rmdir()
        shutil.rmtree(self.slot.box, ignore_errors=True)

    def run(self, *words: str) -> str:
        """Run the client; what it printed. Raises ClusterError."""
        return call("env", *(f"{name}={value}" for name, value in self.env.items()), "docker", *words)

    def exit_codes(self) -> list[int]:
        """Of all containers, by their names."""
        ids = self.run("ps", "--all", "--quiet").split()
        shown = self.run("inspect", "--format", "{{.Name}} {{.State.ExitCode}}", *ids) if ids else ""
        return [int(line.split()[1]) for line in sorted(shown.splitlines())]

    def clear(self) -> None:
        """Remove all containers and the networks that were made for them."""
        ids = self.run("ps", "--all", "--quiet").split()
        if ids:
            self.run("rm", "--force", *ids)
        self.run("network", "prune", "--force")

    def build(self, tag: str, *lines: str) -> None:
        """Make an image by a Dockerfile without a context."""
        done = subprocess.run(
            ["docker", "build", "--quiet", "--tag", tag, "-"], input="\n".join(lines), text=True, capture_output=True,
            env={**os.environ, **self.env, "DOCKER_BUILDKIT": "0"},
        )  # fmt: skip
        if done.returncode:
            raise ClusterError(done.stderr)

    @property
    def _socket(self) -> Path:
        return self.slot.box / "docker.sock"

    def _answers(self) -> bool:
        if not self._machine.alive():
            raise ClusterError("the Docker daemon has ended")
        return subprocess.run(["docker", "info"], env={**os.environ, **self.env}, capture_output=True).returncode == 0

    def _boot(self, machine: Machine) -> str:
        return _BOOT.format(own=machine.own, socket=self._socket, tag=self.slot.tag, here=self.here)


def claim() -> Docker:
    """A daemon that belongs to this process, which is yet to be started."""
    return Docker(Slot.claim("dk"))


def main() -> int:
    absent = lacks()
    if absent:
        print(f"{absent[0]} is missing: {absent[1]}", file=sys.stderr)
        return 1
    docker = claim()
    try:
        docker.start()
        print(f"DOCKER_HOST={docker.env['DOCKER_HOST']}", flush=True)
        sys.stdin.read()
    finally:
        docker.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
