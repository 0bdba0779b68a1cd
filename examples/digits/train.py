"""Train a small CNN on scikit-learn's handwritten digits: 1,797 scans of 8 × 8 pixels that ship with the package.

accel submit --target local --procs-per-node 2 examples/digits/train.py
python examples/digits/train.py --epochs 3
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel import Accelerator, DataLoaderConfiguration, set_seed

Batch = tuple[torch.Tensor, ...]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=64, help="samples to one step, over all processes")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mixed-precision", choices=("no", "bf16", "fp16"), default=None)
    parser.add_argument("--checkpoint-dir", type=Path, help="write a checkpoint here after every epoch")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --checkpoint-dir")
    parser.add_argument(
        "--stop-after", type=int, metavar="EPOCHS", help="stop early, as if the machine were taken away"
    )
    parser.add_argument("--save-model", type=Path, metavar="DIR", help="write the trained weights here")
    parser.add_argument("--losses", type=Path, help="write the loss of every step, as JSON, to this file")
    return parser.parse_args()


def digits() -> tuple[TensorDataset, TensorDataset]:
    """1,437 scans to train on and 360 to test with; every fifth is a test scan."""
    scans, labels = load_digits(return_X_y=True)
    images = torch.tensor(scans, dtype=torch.get_default_dtype()).reshape(-1, 1, 8, 8) / 16
    targets = torch.tensor(labels)
    test = torch.arange(len(targets)) % 5 == 0
    return TensorDataset(images[~test], targets[~test]), TensorDataset(images[test], targets[test])


def build_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


class Log:
    """What has been trained so far: kept in the checkpoint, so that a resumed run goes on with it."""

    def __init__(self) -> None:
        self.epoch = 0
        self.losses: list[float] = []

    def state_dict(self) -> dict[str, object]:
        return {"epoch": self.epoch, "losses": self.losses}

    def load_state_dict(self, state: dict[str, object]) -> None:
        vars(self).update(state)


def main() -> None:
    args = parse_args()
    accelerator = Accelerator(
        mixed_precision=args.mixed_precision,
        dataloader_config=DataLoaderConfiguration(
            split_batches=True, use_seedable_sampler=True, data_seed=args.seed, use_stateful_dataloader=True
        ),
    )
    set_seed(args.seed)
    train, test = digits()
    model = build_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    train_loader = DataLoader(train, batch_size=args.batch_size, shuffle=True, drop_last=True)
    test_loader = DataLoader(test, batch_size=120)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=args.lr, total_steps=max(1, args.epochs * len(train_loader))
    )
    model, optimizer, train_loader, test_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, test_loader, scheduler
    )
    log = Log()
    accelerator.register_for_checkpointing(log)
    if args.resume:
        accelerator.load_state(args.checkpoint_dir)

    where = f"{accelerator.num_processes} process(es) on {accelerator.device.type}"
    accelerator.print(f"training on {len(train)} scans, {where}", flush=True)
    accuracy = 0.0
    for epoch in range(log.epoch, args.epochs):
        losses = []
        model.train()
        for images, labels in progress(train_loader, f"epoch {epoch + 1}/{args.epochs}", accelerator.is_main_process):
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            losses.append(loss.detach())
        log.epoch = epoch + 1
        log.losses += accelerator.reduce(torch.stack(losses), "mean").tolist()
        accuracy = evaluate(accelerator, model, test_loader)
        message = f"epoch {epoch + 1}/{args.epochs}: loss {log.losses[-1]:.4f}, test accuracy {accuracy:.4f}"
        accelerator.print(message, flush=True)
        if args.checkpoint_dir is not None:
            accelerator.save_state(args.checkpoint_dir)
        if args.stop_after == log.epoch:
            break

    if args.save_model is not None:
        accelerator.save_model(model, args.save_model)
    if args.losses is not None and accelerator.is_main_process:
        args.losses.write_text(json.dumps(log.losses))
    if accelerator.is_main_process:
        print(f"test accuracy: {accuracy:.4f}", flush=True)
    accelerator.end_training()


@torch.no_grad()
def evaluate(accelerator: Accelerator, model: nn.Module, loader: DataLoader[Batch]) -> float:
    """The share of test scans that are read rightly, each counted once however many processes there are."""
    model.eval()
    right = total = 0
    for images, labels in loader:
        guesses, truth = accelerator.gather_for_metrics((model(images).argmax(dim=1), labels))
        right += int((guesses == truth).sum())
        total += len(truth)
    return right / total


def progress(batches: DataLoader[Batch], title: str, shown: bool) -> Iterator[Batch]:
    """Yield from ``batches``, behind a bar where someone is looking; a log gets one line an epoch from elsewhere."""
    if not (shown and sys.stderr.isatty()):
        yield from batches
        return
    from rich.console import Console
    from rich.progress import track

    yield from track(batches, title, total=len(batches), console=Console(stderr=True), transient=True)


if __name__ == "__main__":
    main()
