"""Training of a small language model of transformers, which the tests of splits over processes share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from .training import CLIP, Run

LENGTH, ROWS, WORDS, BATCHES = 8, 2, 32, 8
SIZES = {"vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
WINDOWS = (1, 3)  # of 8 batches: the last of 3 has 2


def causal_model(kind: str = "Llama", **more: Any) -> Any:
    """A model with 4 heads, 1 of them for keys, which two processes must repeat."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        **{**SIZES, "num_attention_heads": 4, "num_key_value_heads": 1, "pad_token_id": 0, **more}
    )
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def rows_of(groups: int) -> list[dict[str, torch.Tensor]]:
    """The rows of `BATCHES` batches for each group; they end in padding, so parts have different numbers of labels."""
    words = torch.randint(1, WORDS, (BATCHES * ROWS * groups, LENGTH), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(words)
    mask[:, -2:] = 0
    words[mask == 0] = 0
    return [
        {"input_ids": row, "attention_mask": tokens, "labels": torch.where(tokens == 1, row, -100)}
        for row, tokens in zip(words, mask, strict=True)
    ]


def loss_of_whole(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    loss: torch.Tensor = model(**batch).loss
    return loss


def sgd_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5)


def train(accelerator: Any, batches: Any, loss_of: Callable[..., torch.Tensor], **more: Any) -> Run:
    """Train a fresh model, of a configuration with ``more``, for an epoch, and free it."""
    model = causal_model(**more)
    model, optimizer, batches = accelerator.prepare(model, sgd_of(model), batches)
    run = epoch_of(accelerator, model, optimizer, batches, loss_of)
    accelerator.free_memory()
    return run


def epoch_of(accelerator: Any, model: Any, optimizer: Any, batches: Any, loss_of: Callable[..., torch.Tensor]) -> Run:
    """The loss of each batch over all processes, and the norm of the gradients of each window."""
    losses, norms = [], []
    for batch in batches:
        with accelerator.accumulate(model):
            loss = loss_of(model, batch)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), CLIP)))
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    assert len(losses) == len(batches)
    return losses, norms


def check_clipped(runs: Mapping[str, Run]) -> None:
    """Check that the losses of a run differ, and that every step is clipped."""
    for losses, norms in runs.values():
        assert len(set(losses)) == BATCHES
        assert min(norms) > CLIP
