"""Collectives over a nest of 20 small tensors, in each of two processes: by hand, accel and Accelerate in turns."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.scripts.rounds import interleave, timed, write

ROUNDS = int(os.environ.get("BENCHMARK_ROUNDS", "15"))
TIMES = 40


def nest() -> dict[str, Any]:
    torch.manual_seed(0)
    return {
        "logits": {f"head_{i}": torch.randn(4, 8) for i in range(10)},
        "losses": [torch.randn(4) for _ in range(5)],
        "labels": tuple(torch.randint(0, 9, (4, 2)) for _ in range(5)),
    }


def main() -> None:
    torch.set_num_threads(1)
    from accelerate import PartialState as TheirState
    from accelerate.utils import gather as their_gather
    from accelerate.utils import pad_across_processes as their_pad

    from accel import PartialState
    from accel.collectives import gather, pad_across_processes

    state = PartialState(cpu=True)
    TheirState(cpu=True)
    data = nest()
    tensors = [*data["logits"].values(), *data["losses"], *data["labels"]]
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    flat = torch.zeros(size, dtype=torch.uint8)
    everyones = torch.zeros(size * state.num_processes, dtype=torch.uint8)
    all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gathered, expected = gather(data), their_gather(data)
    assert all(torch.equal(gathered["logits"][key], expected["logits"][key]) for key in data["logits"])
    seconds = interleave(
        {
            "one flat all_gather": timed(lambda: all_gather(everyones, flat), TIMES),
            "gather of 20, accel": timed(lambda: gather(data), TIMES),
            "gather of 20, accelerate": timed(lambda: their_gather(data), TIMES // 4),
            "pad of 20 alike, accel": timed(lambda: pad_across_processes(data), TIMES),
            "pad of 20 alike, accelerate": timed(lambda: their_pad(data), TIMES // 4),
        },
        ROUNDS,
    )
    write(seconds)
    state.destroy_process_group()


if __name__ == "__main__":
    main()
