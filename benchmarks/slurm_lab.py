"""The Slurm cluster that `benchmarks/slurm.py` measures on, and the programs by hand that accel is beside."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.clusters.slurm import Slurm

from .measure import until

BIN = Path(sys.executable).parent

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "benchmarks/scripts"

TARGETS = """\
targets:
  lab: &lab
    kind: slurm
    cpu: true
    prologue: ['[ -z "$STAMPS" ] || echo $EPOCHREALTIME >> "$STAMPS/batch"']
  held: {<<: *lab, sbatch: {hold: true}}
"""

# What accel's own batch script asks for, and the same program, by hand.
BATCH = """\
#!/bin/bash
#SBATCH --job-name=plain
#SBATCH --comment=plain
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task={cpus}
#SBATCH --signal=USR1@30
#SBATCH --requeue
#SBATCH --output={folder}/slurm-%j.log
#SBATCH --open-mode=append
{body}
"""

TORCHRUN = """\
echo $EPOCHREALTIME >> "$STAMPS/batch"
main=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
exec srun --kill-on-bad-exit=1 --cpus-per-task=2 bash -c 'exec {torchrun} --nnodes 2 --nproc_per_node 2 \\
    --node_rank $SLURM_NODEID --master_addr "$1" --master_port {port} "$2" "$3"' - "$main" {script} "$STAMPS"
"""

# Its last process writes when it ended.
ENDING = '#!/bin/sh\n: > "$1.began"\nwhile [ ! -e "$2" ]; do sleep 0.05; done\nexec date +%s.%N > "$1"\n'

# Each call of a command of Slurm's is noted with its time, and made.
NOTED = '#!/bin/bash\necho "$EPOCHREALTIME {name} $*" >> {log}\nexec {real} "$@"\n'


class Lab:
    """A cluster, and a project with its targets: `lab`, and `held`, whose jobs do not start."""

    def __init__(self, cluster: Slurm, folder: Path) -> None:
        self.cluster = cluster
        self.folder = folder
        self.project = folder / "project"
        self.project.mkdir()
        (self.project / "accel.yaml").write_text(TARGETS)
        for name, text in {"nothing.sh": "#!/bin/sh\n", "ending.sh": ENDING}.items():
            (self.project / name).write_text(text)
            (self.project / name).chmod(0o755)
        for name in ("all_reduce.py", "preempted.py"):
            shutil.copy(SCRIPTS / name, self.project)
        # The nodes import this checkout, as this process does.
        self.env = {**os.environ, **cluster.env, "ACCEL_HOME": str(folder / "home"), "OMP_NUM_THREADS": "1",
                    "PYTHONPATH": str(ROOT)}  # fmt: skip
        self.calls = folder / "calls"
        self.noted_path = f"{self._noting('squeue', 'sacct', 'scontrol')}:{os.environ['PATH']}"
        self._numbers = itertools.count()

    def fresh(self) -> Path:
        """A new directory."""
        made = self.folder / f"run-{next(self._numbers)}"
        made.mkdir()
        return made

    def run(self, *argv: str, env: dict[str, str] | None = None) -> str:
        """What a command prints. Ends the program when it fails."""
        done = subprocess.run(argv, env={**self.env, **(env or {})}, cwd=self.project, capture_output=True, text=True)
        if done.returncode != 0:
            raise SystemExit(f"{' '.join(argv)} failed:\n{done.stderr[-2000:]}")
        return done.stdout.strip()

    def accel(self, *words: str, env: dict[str, str] | None = None) -> str:
        return self.run(str(BIN / "accel"), *words, env=env)

    def sbatch(self, script: Path, env: dict[str, str] | None = None) -> str:
        """The number of the job."""
        return self.run("sbatch", "--parsable", str(script), env=env)

    def number(self, job: str) -> str:
        """Slurm's, of a job of accel's."""
        native = str(json.loads(self.accel("describe", "--json", job))["native_id"])
        return native.partition("/")[0]

    def script(self, body: str, nodes: int = 1, cpus: int = 1) -> Path:
        folder = self.fresh()
        path = folder / "plain.sh"
        path.write_text(BATCH.format(nodes=nodes, cpus=cpus, folder=folder, body=body))
        return path

    def torchrun(self, name: str) -> Path:
        """A batch script for two ranks on each of two nodes; it finds its stamps by the environment."""
        port = random.randrange(33000, 60000)
        body = TORCHRUN.format(torchrun=BIN / "torchrun", port=port, script=self.project / name)
        return self.script(body, nodes=2, cpus=2)

    def state(self, number: str) -> str:
        return self.run("squeue", "-h", "-t", "all", "-j", number, "-o", "%T")

    def clear(self) -> None:
        """Takes all jobs away, and waits until the nodes are free."""
        self.run("scancel", "--me")
        self.idle()

    def idle(self) -> None:
        until(lambda: not self.run("squeue", "-h", "-a"), "no job is left")

    def forget(self) -> None:
        """What accel keeps of Slurm's last answer."""
        for path in (self.folder / "home").glob("slurm-queue-*"):
            path.unlink()

    def _noting(self, *names: str) -> Path:
        folder = self.folder / "bin"
        folder.mkdir()
        for name in names:
            (folder / name).write_text(NOTED.format(name=name, log=self.calls, real=shutil.which(name)))
            (folder / name).chmod(0o755)
        return folder

    def noted(self) -> list[tuple[float, str]]:
        """The calls of Slurm's commands since this was asked last, by those that have `noted_path` for a PATH."""
        lines = self.calls.read_text().splitlines() if self.calls.exists() else []
        self.calls.unlink(missing_ok=True)
        return [(float(when), words) for when, _, words in (line.partition(" ") for line in lines)]


@contextlib.contextmanager
def cluster_lab() -> Iterator[Lab | None]:
    """A cluster, for as long as this lasts; None, and a line that says why, where there can be none."""
    from tests.clusters.netns import lacking
    from tests.clusters.slurm import ACCOUNTING_PROGRAMS, PROGRAMS, claim

    absent = lacking(**PROGRAMS, **ACCOUNTING_PROGRAMS)
    if absent is not None:
        print(f"slurm: not measured, for {absent[0]} is missing: {absent[1]}", file=sys.stderr)
        yield None
        return
    # A benchmark that is told to end takes its cluster with it.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        with claim() as cluster, tempfile.TemporaryDirectory() as folder:
            cluster.start(4, accounting=True)
            try:
                yield Lab(cluster, Path(folder))
            finally:
                cluster.stop()  # before its jobs' directories go
    finally:
        signal.signal(signal.SIGTERM, before)
