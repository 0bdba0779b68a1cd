"""`python -m benchmarks.tables`: write the figures of `benchmarks/results/` into the tables of the README and docs/.

A table stands between `<!-- benchmarks NAME -->` and `<!-- end -->`; `tests/test_benchmarks.py` compares them.
"""

from __future__ import annotations

import json
import re
import statistics

from .measure import RESULTS

ROOT = RESULTS.parents[1]
FILES = (
    "README.md", "docs/accelerator.md", "docs/dependencies.md", "docs/engines.md", "docs/kubernetes.md",
    "docs/parallel.md", "docs/serve.md", "docs/slurm.md", "docs/ssh.md", "docs/tested.md",
)  # fmt: skip
_TABLE = re.compile(r"(<!-- benchmarks (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)

# A cell `{result: figure}` is the median of that figure, `{result: figure / figure}` the ratio of two.
TABLES = {
    "launch": """
| from the command to … | accel | torchrun | accelerate launch |
| the first all-reduce of 8 ranks | {gang: accel launch} | {gang: torchrun} | {gang: accelerate launch} |
| the end of a script that imports torch, 1 process (`python script`: {single: python script}) \
| {single: accel launch} | {single: torchrun} | {single: accelerate launch} |
| the end of `--help` | {startup: accel --help} | {startup: torchrun --help} | {startup: accelerate --help} |
| all 8 ranks back, from the death of one | {restart: restart} | | |
| the last 5 lines of a log of 50 MB (`accel logs`) | {logs: accel logs --tail 5, 50 MB} | | |
""",
    "ddp": """
| a training step in DDP of 2 processes | by hand | accel | Accelerate |
| of 8 floats | {ddp_steps: plain, by hand} | {ddp_steps: plain, accel} | {ddp_steps: plain, accelerate} |
| of 1 ms | {ddp_steps: 1 ms, by hand} | {ddp_steps: 1 ms, accel} | {ddp_steps: 1 ms, accelerate} |
| of 10 ms | {ddp_steps: 10 ms, by hand} | {ddp_steps: 10 ms, accel} | {ddp_steps: 10 ms, accelerate} |
| of 100 ms | {ddp_steps: 100 ms, by hand} | {ddp_steps: 100 ms, accel} | {ddp_steps: 100 ms, accelerate} |
""",
    "sharded": """
| FSDP 2 on 2 processes | accel | other | ratio |
| the shortest of 200 steps with clipping; the loop by hand | {sharded: shortest step, accel} \
| {sharded: shortest step, by hand} | {sharded: shortest step, accel / shortest step, by hand} |
| the same; Accelerate | {sharded: shortest step, accel} | {sharded: shortest step, accelerate} \
| {sharded: shortest step, accel / shortest step, accelerate} |
| `prepare` of 75 MB; `fully_shard` and broadcasts by hand | {sharded: prepare, accel} | {sharded: prepare, by hand} \
| {sharded: prepare, accel / prepare, by hand} |
| `save_state` of 450 MB; `torch.distributed.checkpoint.save` | {sharded: save, accel} | {sharded: save, dcp} \
| {sharded: save, accel / save, dcp} |
| `load_state`, every file verified; `torch.distributed.checkpoint.load` | {sharded: load, accel} \
| {sharded: load, dcp} | {sharded: load, accel / load, dcp} |
""",
    "parallel": """
| the shortest of 200 steps with clipping, 2 processes | accel | by hand | ratio |
| layers split (`tp_size=2`); `parallelize_module` | {parallel: TP 2, accel} | {parallel: TP 2, by hand} \
| {parallel: TP 2, accel / TP 2, by hand} |
| sequences split (`cp_size=2`); keys and values gathered by `all_gather_tensor_autograd`, under DDP \
| {parallel: CP 2, accel} | {parallel: CP 2, by hand} | {parallel: CP 2, accel / CP 2, by hand} |
""",
    "engines": """
| the shortest of 200 steps with clipping, 2 processes on CPUs | accel | by hand | ratio |
| DeepSpeed, ZeRO 2; `deepspeed.initialize` | {engines: ZeRO 2, accel} | {engines: ZeRO 2, by hand} \
| {engines: ZeRO 2, accel / ZeRO 2, by hand} |
| DeepSpeed, ZeRO 3; the same | {engines: ZeRO 3, accel} | {engines: ZeRO 3, by hand} \
| {engines: ZeRO 3, accel / ZeRO 3, by hand} |
| fp8, in software; torchao's `convert_to_float8_training` under DDP | {engines: float8, accel} \
| {engines: float8, by hand} | {engines: float8, accel / float8, by hand} |
""",
    "kubernetes": """
| from submit to end, two pods of two ranks | seconds | over `workload: job` |
| `workload: job` | {kubernetes_jobs: accel, Job} | |
| `workload: pytorchjob`, workers only | {kubernetes_jobs: accel, PyTorchJob} \
| {kubernetes_jobs: accel, PyTorchJob / accel, Job} |
| `torchrun` in a PyTorchJob by hand, Master and Worker | {kubernetes_jobs: torchrun, PyTorchJob} \
| {kubernetes_jobs: torchrun, PyTorchJob / accel, Job} |
""",
    "kubernetes_traffic": """
| | to and from the API server |
| `accel wait` | {kubernetes_traffic: accel wait, kB} |
| `accel logs -f` | {kubernetes_traffic: accel logs -f, kB} |
| `kubectl wait` | {kubernetes_traffic: kubectl wait, kB} |
""",
    "slurm": """
| | accel | a script with submitit | Slurm's own programs |
| submit | {slurm_submit: accel submit} | {slurm_submit: a script with submitit} | {slurm_submit: sbatch} (`sbatch`) |
| the job's end in Slurm → the return of `accel wait`, `results()`, `sbatch --wait` \
| {slurm_end: Slurm's end to accel wait} | {slurm_end: Slurm's end to submitit results()} \
| {slurm_end: Slurm's end to sbatch --wait} |
| the same, without a result: cancelled by somebody else after a minute \
| {slurm_end: scancel after a minute to accel wait} | | |
| calls of `squeue` and `sacct` in that minute | {slurm_end: calls of squeue and sacct in that minute} | | |
| submit → the first all-reduce of two nodes of two ranks | {slurm_launch: accel submit} \
| {slurm_launch: submitit, a task a rank} | {slurm_launch: sbatch, srun torchrun} (`srun torchrun`) |
| `accel list --all` of 1,000 live jobs | {slurm_list: accel list --all, 1000 jobs} | | |
| calls of `squeue`, `sacct` and `scontrol` for it | {slurm_list: calls of squeue, sacct and scontrol} | | |
""",
    "slurm_requeue": """
| a preempted job of two nodes of two ranks | accel | `srun torchrun` |
| warning signal → restart request to Slurm (the ranks agree, save and end) \
| {slurm_requeue: SIGUSR1 to scontrol requeue} | |
| restart request → the second start of the batch script (Slurm's own time) \
| {slurm_requeue: scontrol requeue to batch script, accel} \
| {slurm_requeue: scontrol requeue to batch script, torchrun} |
| the second start of the batch script → the first step | {slurm_requeue: batch script to first step, accel} \
| {slurm_requeue: batch script to first step, torchrun} |
""",
    "ssh": """
| | accel | by hand |
| submit → first all-reduce on 4 hosts; `torchrun` in 4 sessions of `ssh` | {ssh_launch: accel submit} \
| {ssh_launch: torchrun in 4 ssh sessions} |
| a no-op on 64 hosts, new process; `ssh` to all at once | {ssh_fan_out: accel, 64 hosts} \
| {ssh_fan_out: OpenSSH, 64 hosts} |
| the same with curve25519, the key exchange that paramiko uses | | {ssh_fan_out: OpenSSH, 64 hosts, curve25519} |
| the no-op on 16 hosts | {ssh_fan_out: accel, 16 hosts} | |
| the no-op on 4 hosts | {ssh_fan_out: accel, 4 hosts} | |
| the no-op on 64 hosts, connections kept | {ssh_fan_out: accel, 64 hosts, connections kept} | |
| a cable pulled → the job's end on all other hosts, heartbeat 5 s | {ssh_cut: a host cut} | |
| the same, the leading host's cable | {ssh_cut: the first host cut} | |
""",
    "ssh_fabric": """
| over one connection | accel | Fabric |
| 100 bytes sent to standard input | {ssh_fabric: accel, 100 bytes sent} | {ssh_fabric: Fabric, 100 bytes sent} |
| 5 MB printed | {ssh_fabric: accel, 5 MB printed} | {ssh_fabric: Fabric, 5 MB printed} |
| the error after a ProxyCommand that ends | {ssh_fabric: accel, a ProxyCommand that ends} \
| {ssh_fabric: Fabric, a ProxyCommand that ends} |
""",
    "serve": """
| | | against | ratio |
| `accel submit` through the server; to the same target from here | {serve_submit: accel submit, through the server} \
| {serve_submit: accel submit} | {serve_submit: accel submit, through the server / accel submit} |
| `accel list` of 50 live jobs of the server; where it runs | {serve_list: accel list, 50 live jobs of the server} \
| {serve_list: accel list, 50 live jobs} \
| {serve_list: accel list, 50 live jobs of the server / accel list, 50 live jobs} |
| a page of 100 jobs of 10,000; of 100 | {serve_pages: page of 10000 jobs} | {serve_pages: page of 100 jobs} \
| {serve_pages: page of 10000 jobs / page of 100 jobs} |
| the page after 9,000 jobs; the first one | {serve_pages: page of 10000 jobs, after 9,000} \
| {serve_pages: page of 10000 jobs} | {serve_pages: page of 10000 jobs, after 9,000 / page of 10000 jobs} |
| processor time in 10 s, 100 followers of a log of 640 lines a second; one \
| {serve_followers: CPU with 100 followers} | {serve_followers: CPU with one follower} \
| {serve_followers: CPU with 100 followers / CPU with one follower} |
| memory that the 100 followers add | {serve_followers: memory that 100 followers add, kB} | | |
| processor time in 1 s, no requests | {serve_idle: CPU of a second} | | |
| memory, no requests | {serve_idle: memory, kB} | | |
""",
    "runtime": """
| | accel | Accelerate | ratio |
| a step of a tiny linear model, over the loop by hand | {steps: plain, accel over by hand} \
| {steps: plain, accelerate over by hand} | {steps: plain, accel over by hand / plain, accelerate over by hand} |
| the same, in `accumulate` | {steps: accumulate, accel over by hand} | {steps: accumulate, accelerate over by hand} \
| {steps: accumulate, accel over by hand / accumulate, accelerate over by hand} |
| the same, with clipping and a schedule | {steps: whole, accel over by hand} \
| {steps: whole, accelerate over by hand} | {steps: whole, accel over by hand / whole, accelerate over by hand} |
| a batch of 32 indices of one rank of 1,024 (of one alone: {samplers: world 1, accel}) \
| {samplers: world 1024, accel} | {samplers: world 1024, accelerate} \
| {samplers: world 1024, accel / world 1024, accelerate} |
| the first batch after 10,000 skipped ones, world of 64 | {samplers: skip 10,000 at world 64, accel} \
| {samplers: skip 10,000 at world 64, accelerate} \
| {samplers: skip 10,000 at world 64, accel / skip 10,000 at world 64, accelerate} |
| a batch of a stream, over the plain loader | {loaders: Stream, accel over plain} \
| {loaders: Stream, accelerate over plain} | {loaders: Stream, accel over plain / Stream, accelerate over plain} |
| a batch of indexed data from 2 workers (plain loader: {loaders: Rows, 2 workers, plain}) \
| {loaders: Rows, 2 workers, accel} | {loaders: Rows, 2 workers, accelerate} \
| {loaders: Rows, 2 workers, accel / Rows, 2 workers, accelerate} |
| a batch of a stream from 2 workers (plain loader: {loaders: Stream, 2 workers, plain}) \
| {loaders: Stream, 2 workers, accel} | {loaders: Stream, 2 workers, accelerate} \
| {loaders: Stream, 2 workers, accel / Stream, 2 workers, accelerate} |
| a dispatched batch of 3 × 16 × 512 integers, 2 processes | {dispatch: 16 × 512, accel} \
| {dispatch: 16 × 512, accelerate} | {dispatch: 16 × 512, accel / 16 × 512, accelerate} |
| `gather` of 20 small tensors, 2 processes (one flat all_gather: {collectives: one flat all_gather}) \
| {collectives: gather of 20, accel} | {collectives: gather of 20, accelerate} \
| {collectives: gather of 20, accel / gather of 20, accelerate} |
| `save_state` of 630 MB; ours is on the disk, theirs in the page cache | {checkpoints: save, accel} \
| {checkpoints: save, accelerate} | {checkpoints: save, accel / save, accelerate} |
| `save_state(async_save=True)`: the loop stands still, the first time | {checkpoints: async, accel} | | |
| … and later | {checkpoints: again, accel} | | |
| `load_state` of it, warm; ours verifies it first, and reads it from the disk | {checkpoints: load, accel} \
| {checkpoints: load, accelerate} | {checkpoints: load, accel / load, accelerate} |
| … more memory at its worst | {checkpoints: load, accel, GB more memory} \
| {checkpoints: load, accelerate, GB more memory} \
| {checkpoints: load, accel, GB more memory / load, accelerate, GB more memory} |
| importing it (importing torch: {imports: import torch}) | {imports: from accel import Accelerator} \
| {imports: from accelerate import Accelerator} \
| {imports: from accel import Accelerator / from accelerate import Accelerator} |
""",
}


def rendered(name: str) -> str:
    """The Markdown table ``name``, with the kept figures, and below it the bars that they miss."""
    head, *rows = re.sub(r"\{(\w+): ([^}]+)\}", lambda cell: _cell(cell[1], cell[2]), TABLES[name]).strip().splitlines()
    table = "\n".join([head, "|" + " --- |" * (head.count("|") - 1), *rows]) + "\n"
    missed = [line for result in sorted(set(re.findall(r"\{(\w+): ", TABLES[name]))) for line in _missed(result)]
    return f"{table}\nMISSED: {'; '.join(missed)}.\n" if missed else table


def _missed(result: str) -> list[str]:
    """A line for each bar that the kept figures of this result do not meet."""
    kept = json.loads((RESULTS / f"{result}.json").read_text())
    limits = kept["bars"]
    return [f"{bar} = {at:.3g} (at most {limits[bar]:g})" for bar, at in kept["ratios"].items() if at > limits[bar]]


def _cell(result: str, figures: str) -> str:
    kept = json.loads((RESULTS / f"{result}.json").read_text())["figures"]
    medians = [statistics.median(kept[figure]) for figure in figures.split(" / ")]
    if len(medians) == 2:
        return f"{medians[0] / medians[1]:.2g}"
    return _shown(figures, medians[0])


def _shown(figure: str, value: float) -> str:
    if "GB" in figure:
        return f"{value * 1e3:.0f} MB"
    if figure.startswith("calls"):
        return f"{value:g}"
    if figure.endswith(", kB"):
        return f"{value / 1e3:.0f} MB" if value >= 1e3 else f"{value:.0f} kB"
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value * 1e6:.3g} µs"


def renewed(text: str) -> str:
    """``text`` with its tables as the kept figures make them."""
    return _TABLE.sub(lambda table: f"{table[1]}{rendered(table[2])}{table[3]}", text)


def main() -> None:
    for name in FILES:
        path = ROOT / name
        path.write_text(renewed(path.read_text()))


if __name__ == "__main__":
    main()
