"""Checks of training: each process's data, and results equal to those of one process."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler

from accel.accelerator import Accelerator
from accel.data import skip_first_batches
from accel.local_sgd import LocalSGD
from accel.parallel.shares import share
from accel.plugins import DataLoaderConfiguration
from accel.precision import choose_precision
from accel.selftest.expect import expect_close, expect_equal, expect_near

_BATCH = 3


class Layer(torch.nn.Linear):
    """A linear layer that tensor parallelism splits, with whole outputs."""

    tp_plan: ClassVar = {"": "colwise_gather_output"}


class _Numbers(Dataset[torch.Tensor]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(float(index))


class _Stream(IterableDataset[torch.Tensor]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter([torch.tensor(float(index)) for index in range(self.length)])


def data(accelerator: Accelerator) -> None:
    """Check that every loader yields each sample to one process, in order, and that padding at the end is dropped."""
    length = 2 * _BATCH * accelerator.num_processes + 1
    numbers = [float(index) for index in range(length)]
    sampler = BatchSampler(SequentialSampler(_Numbers(length)), _BATCH, drop_last=False)
    loaders: dict[str, DataLoader[Any]] = {
        "map-style": DataLoader(_Numbers(length), batch_size=_BATCH),
        "batch sampler": DataLoader(_Numbers(length), batch_sampler=sampler),
        "iterable": DataLoader(_Stream(length), batch_size=_BATCH),
    }
    for name, loader in loaders.items():
        expect_equal(name, _collect_samples(accelerator, accelerator.prepare(loader)), numbers)


def dispatching(accelerator: Accelerator) -> None:
    """Check that data read only by the main process are sent to all processes."""
    dispatcher = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
    length = 2 * _BATCH * dispatcher.num_processes + 1
    for name, dataset in (("map-style", _Numbers(length)), ("iterable", _Stream(length))):
        loader = dispatcher.prepare(DataLoader(dataset, batch_size=_BATCH))
        expect_equal(name, _collect_samples(dispatcher, loader), [float(index) for index in range(length)])
    dispatcher.free_memory()


def shuffling(accelerator: Accelerator) -> None:
    """Check that seeded shuffling is reproducible, differs between epochs, and loses no sample."""
    length = 2 * _BATCH * accelerator.num_processes
    config = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=5)
    epochs = []
    for _ in range(2):
        seeded = Accelerator(dataloader_config=config)
        loader = seeded.prepare(DataLoader(_Numbers(length), batch_size=_BATCH, shuffle=True))
        epochs.append([_collect_samples(seeded, loader) for _ in range(2)])
        seeded.free_memory()
    expect_equal("the same seed", epochs[0], epochs[1])
    expect_equal("another epoch", epochs[0][0] == epochs[0][1], False)
    expect_equal("all samples", sorted(epochs[0][0]), [float(index) for index in range(length)])


def skipping(accelerator: Accelerator) -> None:
    """Check that skipping batches leaves the rest of the epoch unchanged."""
    length = 3 * _BATCH * accelerator.num_processes
    loader = accelerator.prepare(DataLoader(_Numbers(length), batch_size=_BATCH))
    epoch = [batch.tolist() for batch in loader]
    rest = [batch.tolist() for batch in skip_first_batches(loader, 1)]
    expect_equal("the rest of an epoch", rest, epoch[1:])
    accelerator.free_memory()


def stepping(accelerator: Accelerator) -> None:
    """Check that several processes, with accumulation and a short last window, get the weights of one process."""
    size, rows, steps = accelerator.strategy.data_place[0], 2, 2
    batches = 5  # two windows and a short one
    inputs = torch.linspace(-1, 1, batches * size * rows).reshape(-1, 1)
    accumulating = Accelerator(gradient_accumulation_steps=steps, dataloader_config=DataLoaderConfiguration())
    model, optimizer, loader = _job(inputs, rows)
    model, optimizer, loader = accumulating.prepare(model, optimizer, loader)
    for batch in loader:
        with accumulating.accumulate(model):
            accumulating.backward(model(batch).pow(2).mean())
            if accumulating.sync_gradients:
                accumulating.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    trained: Any = accumulating.unwrap_model(model)
    tolerance = 1e-4 if accelerator.mixed_precision == "no" else 5e-2
    expect_close("weights", trained.weight, _by_hand(inputs, rows * size, steps), tolerance)
    accumulating.free_memory()
    accumulating.gradient_accumulation_steps = 1  # of the whole process


def _job(inputs: torch.Tensor, rows: int) -> tuple[torch.nn.Linear, torch.optim.Optimizer, DataLoader[Any]]:
    torch.manual_seed(3)
    model = Layer(1, 4)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(inputs, batch_size=rows)  # type: ignore[arg-type]


def _by_hand(inputs: torch.Tensor, rows: int, steps: int) -> torch.Tensor:
    model, optimizer, loader = _job(inputs, rows)
    batches = list(loader)
    for start in range(0, len(batches), steps):
        window = batches[start : start + steps]
        for batch in window:
            (model(batch).pow(2).mean() / len(window)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return model.weight


def uneven_inputs(accelerator: Accelerator) -> None:
    """Check that processes may run out of batches at different times."""
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    batches = [torch.ones(1, 1, device=accelerator.device)] * (1 + accelerator.process_index)
    with accelerator.join_uneven_inputs([model]):
        for batch in batches:
            accelerator.backward(model(batch).sum())
    counts = accelerator.gather(torch.tensor([len(batches)], device=accelerator.device))
    expect_equal("batches", counts, list(range(1, accelerator.num_processes + 1)))
    accelerator.free_memory()


def local_steps(accelerator: Accelerator) -> None:
    """Check that LocalSGD trains each process separately and averages at the end."""
    rank, size = accelerator.process_index, accelerator.num_processes
    plain_model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(plain_model.weight)
    model, optimizer = accelerator.prepare(plain_model, torch.optim.SGD(plain_model.parameters(), lr=1.0))
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=4) as local:
        accelerator.backward(-(rank + 1.0) * model(torch.ones(1, 1, device=accelerator.device)).sum())
        optimizer.step()
        local.step()
        expect_equal("a process's own weight", plain_model.weight, [[rank + 1.0]])
    expect_close("the mean weight", plain_model.weight, torch.tensor([[(size + 1) / 2]]))
    accelerator.free_memory()


def sharding(accelerator: Accelerator) -> None:
    """Check that each process holds its shard of a model, and that the gradient norm covers the whole model."""
    size, config = accelerator.num_processes, accelerator.parallelism_config
    assert config is not None
    parts = config.dp_shard_size * config.non_data_parallel_size
    torch.manual_seed(accelerator.process_index)  # only the main process's weights count
    model = accelerator.prepare(Layer(4, 2 * size, bias=False))
    inputs = torch.ones(1, 4, device=accelerator.device)
    accelerator.backward(model(inputs).sum())
    shard_sizes = [share(parameter).numel() for parameter in model.parameters()]
    expect_equal("elements of the model on a process", shard_sizes, [8 * size // parts])
    norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
    expect_close("the norm of the gradient", norm, torch.tensor(8.0 * size).sqrt(), 1e-2)
    torch.manual_seed(0)
    expect_close(
        "the main process's weights", next(model.parameters()), torch.nn.Linear(4, 2 * size, bias=False).weight
    )
    accelerator.free_memory()


def sequences(accelerator: Accelerator) -> None:
    """Check that processes that share a sequence attend to all of it."""
    config = accelerator.parallelism_config
    assert config is not None
    parts = config.cp_size * config.sp_size
    torch.manual_seed(0)
    sequence = torch.randn(1, parts, 4 * parts, 8).to(accelerator.device)  # a head for each process, of 8 features
    expected = torch.nn.functional.scaled_dot_product_attention(sequence, sequence, sequence, is_causal=True)
    positions = torch.arange(4 * parts)
    with accelerator.maybe_context_parallel([sequence, positions], [2, 0]):
        output = torch.nn.functional.scaled_dot_product_attention(sequence, sequence, sequence, is_causal=True)
        expect_equal("a process's part of a sequence", len(positions), 4)
        expect_close("attention to a whole sequence", output, expected[:, :, positions.to(accelerator.device)])


def precision(accelerator: Accelerator) -> None:
    """Check that models compute in the requested precision and return their inputs' type."""
    expected = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[accelerator.mixed_precision]
    model = torch.nn.Linear(2, 2).to(accelerator.device)
    with accelerator.autocast():
        expect_equal(
            "type under autocast", str(model(torch.ones(1, 2, device=accelerator.device)).dtype), str(expected)
        )
    prepared = accelerator.prepare(Layer(2, 2))
    output = prepared(torch.ones(1, 2, device=accelerator.device))
    expect_equal("type of a prepared model's output", str(output.dtype), "torch.float32")
    accelerator.free_memory()


def eight_bits(accelerator: Accelerator) -> None:
    """Check that results and gradients of linear layers in 8 bits are close to the ones in 32 bits."""
    precision = choose_precision("fp8", accelerator.device)
    torch.manual_seed(0)
    reference = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(3))).to(accelerator.device)
    model, inputs = copy.deepcopy(reference), torch.randn(32, 32).to(accelerator.device)
    precision.convert(model, compiled=True)
    precision.wrap_forward(model)
    for tested in (reference, model):
        tested(inputs).square().sum().backward()
    expect_near("outputs", model(inputs), reference(inputs))
    expect_near("gradients", model[1].weight.grad, reference[1].weight.grad)


def _collect_samples(accelerator: Accelerator, loader: Any) -> list[float]:
    samples: list[float] = []
    for batch in loader:
        samples += accelerator.gather_for_metrics(batch).tolist()
    return samples
