"""`submitit_job.py FOLDER KIND …`: what a script that submits with submitit does. Prints the number of the job.

hold                a job that does not start
stamp STAMP GO      one that ends when GO is there; then the time at which its result was here
all_reduce STAMPS   two ranks on each of two nodes, which reduce a number; its end is waited for
"""

import os
import sys
import time
from collections.abc import Callable

import submitit

ALL_REDUCE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "all_reduce.py")


def hold() -> None:
    pass


def stamp(stamp: str, go: str) -> None:
    open(f"{stamp}.began", "w").close()
    while not os.path.exists(go):
        time.sleep(0.05)
    with open(stamp, "w") as file:
        file.write(repr(time.time()))


def all_reduce(stamps: str) -> None:
    import runpy
    import sys

    from submitit.helpers import TorchDistributedEnvironment

    TorchDistributedEnvironment().export(set_cuda_visible_devices=False)
    sys.argv = [ALL_REDUCE, stamps]
    runpy.run_path(ALL_REDUCE, run_name="__main__")


folder, kind, *arguments = sys.argv[1:]
executor = submitit.SlurmExecutor(folder)
wide = {"nodes": 2, "ntasks_per_node": 2} if kind == "all_reduce" else {"nodes": 1, "ntasks_per_node": 1}
more = {"hold": True} if kind == "hold" else {}
executor.update_parameters(cpus_per_task=1, time=60, additional_parameters=more, **wide)
kinds: dict[str, Callable[..., None]] = {"hold": hold, "stamp": stamp, "all_reduce": all_reduce}
job = executor.submit(kinds[kind], *arguments)
print(job.job_id, flush=True)
if kind != "hold":
    job.results()
    print(time.time())
