"""``python -m accel.sanity [--json]``: run the checks in this world; the first failure ends it with exit code 1.

Started by a launcher, all processes run every check together. In a world with sharded models, the checks of
sharding replace those that need whole models. Prints a line per check; with ``--json`` ``{"check",
"processes", "ok", "seconds"}``, and for a failed one ``"process"`` and ``"message"`` too.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable

from accel.accelerator import Accelerator
from accel.errors import AccelError
from accel.selftest import persistence_checks, process_checks, training_checks
from accel.selftest.expect import SanityError

CHECKS: dict[str, Callable[[Accelerator], None]] = {
    "world": process_checks.world,
    "turns": process_checks.main_process_order,
    "shares": process_checks.shares,
    "collectives": process_checks.collectives,
    "triggers": process_checks.triggers,
    "random numbers": process_checks.random_numbers,
    "memory": process_checks.memory,
    "data": training_checks.data,
    "dispatching": training_checks.dispatching,
    "shuffling": training_checks.shuffling,
    "skipping": training_checks.skipping,
    "stepping": training_checks.stepping,
    "uneven inputs": training_checks.uneven_inputs,
    "local steps": training_checks.local_steps,
    "sharding": training_checks.sharding,
    "precision": training_checks.precision,
    "checkpoints": persistence_checks.checkpoints,
    "records": persistence_checks.records,
    "profiling": persistence_checks.profiling,
    "big models": persistence_checks.big_models,
    "preemption": persistence_checks.preemption,  # last: from then on this run counts as preempted
}

_ONLY_UNSHARDED, _ONLY_SHARDED = ("uneven inputs", "local steps"), ("sharding",)


def checks_for(sharded: bool) -> list[str]:
    """Return the names of the checks for a world whose models are ``sharded`` or not."""
    return [name for name in CHECKS if name not in (_ONLY_UNSHARDED if sharded else _ONLY_SHARDED)]


def main(argv: list[str]) -> int:
    """Run every check for this world and return the exit code."""
    as_json = "--json" in argv
    accelerator = Accelerator()
    for name in checks_for(accelerator.is_fsdp2):
        check = CHECKS[name]
        started = time.monotonic()
        try:
            check(accelerator)
        except Exception as error:
            _report_failure(accelerator, name, error, as_json)
            return 1
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            _report(accelerator, name, time.monotonic() - started, as_json)
    accelerator.end_training()
    return 0


def _report(accelerator: Accelerator, name: str, seconds: float, as_json: bool) -> None:
    facts = {"check": name, "processes": accelerator.num_processes, "ok": True, "seconds": round(seconds, 3)}
    print(json.dumps(facts) if as_json else f"ok      {name}", flush=True)


def _report_failure(accelerator: Accelerator, name: str, error: Exception, as_json: bool) -> None:
    """Report at once, from the failing process: the others may wait for it forever."""
    rank, size = accelerator.process_index, accelerator.num_processes
    detail = f"{type(error).__name__}: {' '.join(str(error).split())}"
    if as_json:
        print(
            json.dumps({"check": name, "processes": size, "ok": False, "process": rank, "message": detail}), flush=True
        )
    else:
        print(f"FAILED  {name}: process {rank} of {size}: {detail}", flush=True)
    if not isinstance(error, (SanityError, AccelError)):
        traceback.print_exception(error)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
