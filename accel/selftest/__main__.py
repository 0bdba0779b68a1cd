"""``python -m accel.sanity [--json]``: run the checks in this world; the first failure ends it with exit code 1.

Started by a launcher, all processes run every check together. In a world with sharded models or split layers, the
check of shards replaces those that need whole models; split sequences have a check of their own. Prints a line per
check; with ``--json`` ``{"check", "processes", "ok", "seconds"}``, and for a failed one ``"process"`` and
``"message"`` too.
"""

from __future__ import annotations

import json
import os
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
    "sequences": training_checks.sequences,
    "precision": training_checks.precision,
    "8 bits": training_checks.eight_bits,
    "checkpoints": persistence_checks.checkpoints,
    "records": persistence_checks.records,
    "profiling": persistence_checks.profiling,
    "big models": persistence_checks.big_models,
    "preemption": persistence_checks.preemption,  # last: from then on this run counts as preempted
}


def checks_for(*, sharded: bool, split_sequences: bool = False, fp8: bool = False) -> list[str]:
    """Return the names of the checks for a world whose models and sequences are cut or not, in 8 bits or not."""
    left_out = {
        "uneven inputs": sharded,
        "local steps": sharded or split_sequences,
        "sharding": not sharded,
        "sequences": not split_sequences,
        "8 bits": not fp8,
    }
    return [name for name in CHECKS if not left_out.get(name, False)]


def main(argv: list[str]) -> int:
    """Run every check for this world and return the exit code."""
    as_json = "--json" in argv
    fp8 = os.environ.get("ACCELERATE_MIXED_PRECISION") == "fp8"
    accelerator = Accelerator(mixed_precision="bf16" if fp8 else None)  # most checks have models too small for 8 bits
    accelerator.gradient_accumulation_steps = 1  # whatever the configuration says
    config = accelerator.parallelism_config
    split_sequences = config is not None and (config.cp_enabled or config.sp_enabled)
    for name in checks_for(sharded=accelerator.strategy.shards_models, split_sequences=split_sequences, fp8=fp8):
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
