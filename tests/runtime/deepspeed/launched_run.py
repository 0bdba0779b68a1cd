"""Trains the decoder as `accel launch` has set DeepSpeed up, and writes what is seen of the settings into a folder."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

from accel import Accelerator
from tests.runtime.deepspeed.training import CLIP, epoch, loader, optimizer_of
from tests.runtime.sharding.training import decoder


def main(out: Path) -> None:
    """Train an epoch."""
    warnings.simplefilter("ignore")
    accelerator: Any = Accelerator()
    batches = loader(accelerator)
    model: Any = decoder(0).float()
    model, optimizer = accelerator.prepare(model, optimizer_of(model))
    losses, norms = epoch(accelerator, model, optimizer, batches)
    zero = accelerator.deepspeed_config["zero_optimization"]
    seen = {
        "type": accelerator.distributed_type.value,
        "processes": accelerator.num_processes,
        "stage": zero["stage"],
        "window": accelerator.gradient_accumulation_steps,
        "clipping": accelerator.deepspeed_config["gradient_clipping"] == CLIP,
        "saves 16 bits": zero.get("stage3_gather_16bit_weights_on_model_save", False),
        "precision": accelerator.mixed_precision,
        "losses": losses,
        "norms": norms,
    }
    if accelerator.is_main_process:
        (out / "seen.json").write_text(json.dumps(seen))
    accelerator.end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
