"""`python -m benchmarks [NAME…] [--rounds N]`: exits with 1 when a bar is missed."""

from __future__ import annotations

import argparse
import sys

from . import __doc__ as about
from .jobs import listing, logs, noticing
from .kubernetes import kubernetes_follow, kubernetes_state, kubernetes_submit
from .kubernetes_jobs import kubernetes_jobs, kubernetes_traffic
from .launch import gang, restart, single
from .runtime import (
    checkpoints,
    collectives,
    ddp_steps,
    dispatch,
    engines,
    imports,
    loaders,
    parallel,
    samplers,
    sharded,
    steps,
)
from .sagemaker import sagemaker_submit
from .serve import serve_followers, serve_idle, serve_list, serve_pages, serve_submit
from .slurm import slurm_end, slurm_launch, slurm_list, slurm_requeue, slurm_submit
from .ssh import ssh_client, ssh_cut, ssh_fabric, ssh_fan_out, ssh_launch
from .startup import startup
from .tpu import tpu_submit

ALL = {
    "startup": (startup, 15),
    "list": (listing, 5),
    "logs": (logs, 9),
    "wait": (noticing, 9),
    "single": (single, 7),
    "gang": (gang, 5),
    "restart": (restart, 5),
    "imports": (imports, 9),
    "steps": (steps, 15),
    "ddp_steps": (ddp_steps, 9),
    "sharded": (sharded, 8),
    "parallel": (parallel, 8),
    "engines": (engines, 8),
    "samplers": (samplers, 9),
    "loaders": (loaders, 15),
    "dispatch": (dispatch, 7),
    "collectives": (collectives, 15),
    "checkpoints": (checkpoints, 5),
    "ssh_launch": (ssh_launch, 5),
    "ssh_fan_out": (ssh_fan_out, 7),
    "ssh_cut": (ssh_cut, 3),
    "ssh_client": (ssh_client, 5),
    "ssh_fabric": (ssh_fabric, 3),
    "slurm_submit": (slurm_submit, 15),
    "slurm_end": (slurm_end, 5),
    "slurm_list": (slurm_list, 9),
    "slurm_requeue": (slurm_requeue, 3),
    "slurm_launch": (slurm_launch, 5),
    "kubernetes_submit": (kubernetes_submit, 9),
    "kubernetes_state": (kubernetes_state, 9),
    "kubernetes_follow": (kubernetes_follow, 3),
    "kubernetes_jobs": (kubernetes_jobs, 5),
    "kubernetes_traffic": (kubernetes_traffic, 3),
    "sagemaker_submit": (sagemaker_submit, 20),
    "tpu_submit": (tpu_submit, 9),
    "serve_submit": (serve_submit, 9),
    "serve_list": (serve_list, 9),
    "serve_pages": (serve_pages, 9),
    "serve_followers": (serve_followers, 3),
    "serve_idle": (serve_idle, 3),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"one or more of {', '.join(ALL)}; slurm is all of slurm_…"
    )
    parser.add_argument("--rounds", type=int, help="instead of each benchmark's own number")
    args = parser.parse_args()
    groups = {name: [member for member in ALL if member.startswith(f"{name}_")] for name in args.names}
    chosen = [member for name in args.names or ALL for member in ([name] if name in ALL else groups[name])]
    unknown = [name for name in args.names if name not in ALL and not groups[name]]
    if unknown:
        parser.error(f"no benchmark {unknown[0]!r}; there are {', '.join(ALL)}")
    met = [ALL[name][0](args.rounds or ALL[name][1]) for name in chosen]
    return 0 if all(met) else 1


if __name__ == "__main__":
    sys.exit(main())
