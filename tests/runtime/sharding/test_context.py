"""Context and sequence parallelism give the losses and norms of one process."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from accel import Accelerator, set_seed
from accel.errors import AccelError
from accel.local_sgd import LocalSGD
from accel.plugins.fsdp import FullyShardedDataParallelPlugin as Plugin
from accel.plugins.parallelism import (
    DeepSpeedSequenceParallelConfig,
    ParallelismConfig,
    TorchContextParallelConfig,
)
from accel.state import AcceleratorState, PartialState
from tests.runtime.worlds import outcomes, run, run_one

WORDS, LENGTH, ROWS, WIDTH, HEADS = 16, 16, 4, 16, 4
# Name -> processes, sizes, and whether a plug-in for FSDP is passed.
MESHES: dict[str, tuple[int, dict[str, Any], bool]] = {
    "cp 2": (2, {"cp_size": 2}, False),
    "cp 2, sharded": (2, {"cp_size": 2}, True),
    "sp 2": (2, {"sp_size": 2}, False),
    "cp 4": (4, {"cp_size": 4}, False),
    "replicas 2, cp 2, sharded": (4, {"dp_replicate_size": 2, "cp_size": 2}, True),
    "shards 2, sp 2": (4, {"sp_size": 2}, True),
    "tp 2, cp 2": (4, {"tp_size": 2, "cp_size": 2}, False),
}


class Layer(nn.Module):
    """Attention with two heads of keys and four of queries, by the function's name or as torch's attribute."""

    def __init__(self, by_name: bool) -> None:
        super().__init__()
        self.by_name = by_name
        self.q, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.k, self.v = nn.Linear(WIDTH, WIDTH // 2), nn.Linear(WIDTH, WIDTH // 2)

    def forward(self, hidden: torch.Tensor, **how: Any) -> torch.Tensor:
        q, k, v = (part(hidden).unflatten(-1, (-1, 4)).transpose(1, 2) for part in (self.q, self.k, self.v))
        function = scaled_dot_product_attention if self.by_name else nn.functional.scaled_dot_product_attention
        result: torch.Tensor = hidden + self.out(function(q, k, v, enable_gqa=True, **how).transpose(1, 2).flatten(2))
        return result


class Model(nn.Module):
    """Two layers of attention, a buffer over the sequence, and a frozen weight."""

    scale: torch.Tensor
    _no_split_modules = ["Layer"]  # noqa: RUF012
    tp_plan = {"layers.*.[qkv]": "colwise", "layers.*.out": "rowwise"}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList([Layer(False), Layer(True)])
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.positions.weight.requires_grad_(False)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, LENGTH))
        self.again = False

    def forward(self, words: torch.Tensor, positions: torch.Tensor, **how: Any) -> torch.Tensor:
        hidden = (self.embed(words) + self.positions(positions)) * self.scale[:, None]
        for layer in self.layers:
            hidden = checkpoint(layer, hidden, use_reentrant=False, **how) if self.again else layer(hidden, **how)
        result: torch.Tensor = self.head(hidden)
        return result


RING = TorchContextParallelConfig("alltoall")


def _accelerator(mesh: str | None, **how: Any) -> Any:
    AcceleratorState._reset_state()
    os.environ.pop("ACCELERATE_USE_FSDP", None)  # an earlier plugin's
    _, sizes, shards = MESHES.get(mesh or "", (1, {}, False))
    checkpointing = how.pop("activation_checkpointing", False)
    sizes = {**sizes, "cp_handler": how.pop("handler", None)}
    return Accelerator(
        fsdp_plugin=Plugin(activation_checkpointing=checkpointing) if shards else None,
        parallelism_config=ParallelismConfig(**sizes) if mesh else None,
        **how,
    )


def _model(accelerator: Any) -> tuple[Any, Any]:
    torch.manual_seed(accelerator.process_index)  # only the main process has the right weights
    model = Model().double()
    prepared: tuple[Any, Any] = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.02))
    return prepared


def _rows(accelerator: Any, step: int) -> list[torch.Tensor]:
    shares, place = accelerator.strategy.data_place
    words = torch.randint(0, WORDS, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    own = words.chunk(shares)[place]
    return [own[:, :-1], own[:, 1:], torch.arange(LENGTH).expand(len(own), -1)]


def _size(accelerator: Any) -> int:
    config = accelerator.parallelism_config or ParallelismConfig()
    size: int = config.cp_size * config.sp_size
    return size


def _mask(kind: str, rows: int, accelerator: Any) -> tuple[dict[str, Any], list[torch.Tensor], list[int]]:
    """Return the arguments of attention for a kind of mask, the masks to cut, and their dimensions."""
    window = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril().triu(-3)
    mask: Any = {
        "window, cut": window[None, None].repeat(rows, 1, 1, 1),
        "window, whole": window,
        "bias": torch.randn(1, HEADS, LENGTH, LENGTH, generator=torch.Generator().manual_seed(5), dtype=torch.float64),
        "padding": (torch.arange(LENGTH) < LENGTH - 3)[None, None, None],
    }.get(kind)
    if kind == "bias":  # of this process's heads
        mask = mask.chunk((accelerator.parallelism_config or ParallelismConfig()).tp_size, 1)[
            accelerator.tensor_parallel_rank
        ]
    cut = (
        kind == "window, cut" and _size(accelerator) == (accelerator.parallelism_config or ParallelismConfig()).cp_size
    )
    return {"attn_mask": mask, "is_causal": kind == "causal"}, [mask] if cut else [], [2]


def _train(accelerator: Any, model: Any, optimizer: Any, steps: int, kind: str = "causal", first: int = 0) -> list[Any]:
    seen = []
    for step in range(first, first + steps):
        words, labels, positions = _rows(accelerator, step)
        how, masks, dims = _mask(kind, len(words), accelerator)
        buffers = [words, labels, positions, accelerator.unwrap_model(model).scale, *masks]
        before = [buffer.clone() for buffer in buffers]
        dims = [1, 1, -1, 0, *dims][: len(buffers)]
        with accelerator.maybe_context_parallel(buffers=buffers, buffer_seq_dims=dims, no_restore_buffers={words}):
            loss = nn.functional.cross_entropy(model(words, positions, **how).flatten(0, 1), labels.flatten())
            accelerator.backward(loss)
        assert all(torch.equal(*pair) for pair in zip(buffers[1:], before[1:], strict=True))
        assert words.shape[1] == LENGTH // _size(accelerator)
        norm = accelerator.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        optimizer.zero_grad()
        seen += [accelerator.reduce(loss.detach(), "mean").item(), norm.item()]
    return seen


KINDS = ("causal", "none", "window, cut", "window, whole", "bias", "padding")


def _all(mesh: str | None) -> dict[str, Any]:
    accelerator = _accelerator(mesh)
    model, optimizer = _model(accelerator)
    seen: dict[str, Any] = {"10 steps": _train(accelerator, model, optimizer, 10)}
    for kind in KINDS:
        seen[kind] = _train(accelerator, model, optimizer, 2, kind)
    accelerator.unwrap_model(model).again = True
    seen["again"] = _train(accelerator, model, optimizer, 2)
    words, _, positions = _rows(accelerator, 7)
    with torch.no_grad():  # outside of a block nothing is cut, and every process sees the whole
        outside = accelerator.gather(model(words, positions, is_causal=True))
    seen["outside"] = outside.chunk(accelerator.num_processes)[0][0].tolist()
    set_seed(0, device_specific=True)
    seen["apart"] = accelerator.context_parallel_rank, torch.initial_seed()
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(12)), 2))
    seen["rows"] = [row for (rows,) in loader for row in accelerator.gather_for_metrics(rows).tolist()]
    # A part of a sequence has a loss of its own, and all of them are the row's.
    losses = torch.full((2,), float(accelerator.context_parallel_rank), dtype=torch.float64)
    gathered = accelerator.gather_for_metrics([losses, torch.tensor(accelerator.process_index)])
    seen["apart"] += ([part.tolist() for part in gathered],)
    return seen


def _otherwise(mesh: str | None) -> dict[str, Any]:
    """With activations that are computed again, and compiled, also outside of a block before."""
    accelerator = _accelerator(mesh, activation_checkpointing=True)
    seen = {"plain": _train(accelerator, *_model(accelerator), 10)}
    accelerator = _accelerator(mesh, dynamo_backend="aot_eager")
    model, optimizer = _model(accelerator)
    words, _, positions = _rows(accelerator, 7)
    model(words, positions, is_causal=True)
    seen["compiled"] = _train(accelerator, model, optimizer, 10)
    return seen


def _by_ring(mesh: str) -> list[float]:
    """Train ten steps; the last five compute activations again."""
    accelerator = _accelerator(mesh, handler=RING)
    model, optimizer = _model(accelerator)
    losses = _train(accelerator, model, optimizer, 5)
    accelerator.unwrap_model(model).again = True
    return losses + _train(accelerator, model, optimizer, 5, first=5)


def _save(folder: str, mesh: str) -> dict[str, torch.Tensor]:
    accelerator = _accelerator(mesh)
    model, optimizer = _model(accelerator)
    _train(accelerator, model, optimizer, 2)
    accelerator.save_state(folder)
    return {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}


def _load(folder: str) -> dict[str, torch.Tensor]:
    accelerator = _accelerator(None)
    model, _ = _model(accelerator)
    accelerator.load_state(folder)
    state: dict[str, torch.Tensor] = accelerator.get_state_dict(model)
    return state


def _world(processes: int, folder: str) -> dict[str, Any]:
    """Train on every mesh of ``processes``, in one world as each takes seconds to start."""
    meshes = [mesh for mesh, (count, *_) in MESHES.items() if count == processes]
    seen: dict[str, Any] = {mesh: _all(mesh) for mesh in meshes}
    seen["ring"] = _by_ring(f"cp {processes}")
    if processes == 4:
        seen["saved"] = _save(folder, "replicas 2, cp 2, sharded")
    else:
        warnings.simplefilter("ignore")  # dynamo looks at the gradients of what is no leaf
        seen["otherwise"] = {mesh: _otherwise(mesh) for mesh in ("cp 2, sharded", "sp 2")}
    return seen


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("checkpoint") / "kept")


@pytest.fixture(scope="module")
def alone() -> Any:
    return run_one(_all, None)


@pytest.fixture(scope="module")
def worlds(folder: str) -> Callable[[int], list[dict[str, Any]]]:
    """Return the results of each process, for a number of processes."""
    return cache(lambda processes: run(_world, processes, folder, processes=processes))


Worlds = Callable[[int], list[dict[str, Any]]]


@pytest.mark.parametrize("mesh", MESHES)
def test_losses_norms_and_rows_are_those_of_one_process(mesh: str, alone: dict[str, Any], worlds: Worlds) -> None:
    processes, sizes, _ = MESHES[mesh]
    sizes = {"cp_size": 1, "sp_size": 1, "tp_size": 1, **sizes}
    copies = sizes["cp_size"] * sizes["sp_size"] * sizes["tp_size"]
    for rank, world in enumerate(worlds(processes)):
        seen = dict(world[mesh])
        losses = [(sizes["cp_size"] - 1) / 2] * 2 * (processes // copies)
        gathered = [losses, list(range(0, processes, sizes["tp_size"]))]
        assert seen.pop("apart") == (rank // sizes["tp_size"] % sizes["cp_size"], rank // copies, gathered)
        assert sorted(seen.pop("rows")) == list(range(12))
        for name, numbers in seen.items():
            expected = torch.tensor(alone[name], dtype=torch.float64)
            torch.testing.assert_close(
                torch.tensor(numbers, dtype=torch.float64), expected, rtol=1e-11, atol=1e-11, msg=f"{name}: {numbers}"
            )


@pytest.mark.parametrize("processes", [2, 4])
def test_keys_and_values_that_go_around(processes: int, alone: dict[str, Any], worlds: Worlds) -> None:
    for world in worlds(processes):
        torch.testing.assert_close(world["ring"], alone["10 steps"], rtol=1e-11, atol=1e-11)


def test_with_activation_checkpointing_and_compiled(alone: dict[str, Any], worlds: Worlds) -> None:
    for world in worlds(2):
        for seen in world["otherwise"].values():
            for numbers in seen.values():
                torch.testing.assert_close(numbers, alone["10 steps"], rtol=1e-11, atol=1e-11)


def test_a_checkpoint_loads_on_one_process(folder: str, worlds: Worlds) -> None:
    saved = worlds(4)[0]["saved"]
    loaded = run_one(_load, folder)
    assert saved.keys() == loaded.keys()
    assert all(torch.equal(saved[name], loaded[name]) for name in saved)


def test_without_cp_size_a_block_has_no_effect() -> None:
    accelerator = Accelerator(cpu=True)
    words = torch.arange(9)[None]
    with accelerator.maybe_context_parallel(buffers=[words], buffer_seq_dims=[1]):
        assert words.shape == (1, 9)
        assert nn.functional.scaled_dot_product_attention is scaled_dot_product_attention


# Mistakes.


def _block(*buffers: torch.Tensor, dims: Any = None, **how: Any) -> Any:
    accelerator = _accelerator("cp 2")
    dims = [1] * len(buffers) if dims is None else dims
    return accelerator.maybe_context_parallel(buffers=list(buffers), buffer_seq_dims=dims, **how)


def _attend(queries: int = 4, keys: int = 4, mask: Any = None, **how: Any) -> None:
    with _block(torch.zeros(1, 8)):
        q, k = torch.zeros(1, 1, queries, 4), torch.zeros(1, 1, keys, 4)
        nn.functional.scaled_dot_product_attention(q, k, k, mask, **how)


def _enter(*buffers: torch.Tensor, **how: Any) -> None:
    with _block(*buffers, **how):
        pass


def _odd() -> None:
    _enter(torch.zeros(1, 4), torch.zeros(2, 9))


def _no_dimension() -> None:
    _enter(torch.zeros(2, 8), torch.zeros(8))


def _other_length() -> None:
    _enter(torch.zeros(2, 8), torch.zeros(2, 16))


def _no_dims() -> None:
    _enter(torch.zeros(2, 8), dims=[])


def _stranger() -> None:
    _enter(torch.zeros(2, 8), no_restore_buffers={torch.zeros(2, 8)})


def _trained() -> None:
    _enter(torch.zeros(2, 8, requires_grad=True))


def _nested() -> None:
    with _block():
        _enter()


def _no_attention() -> None:
    words = torch.zeros(2, 8)
    try:
        _enter(words)
    finally:
        assert words.shape == (2, 8)


def _local_mask() -> None:
    _attend(mask=torch.ones(4, 4, dtype=torch.bool))


def _both() -> None:
    _attend(mask=torch.ones(4, 8, dtype=torch.bool), is_causal=True)


def _other_keys() -> None:
    _attend(keys=8)


def _later() -> None:
    accelerator = _accelerator("cp 2")
    model, _ = _model(accelerator)
    accelerator.unwrap_model(model).again = True
    words, _, positions = _rows(accelerator, 0)
    buffers = [words, positions, accelerator.unwrap_model(model).scale]
    with accelerator.maybe_context_parallel(buffers=buffers, buffer_seq_dims=[1, 1, 0]):
        loss = model(words, positions, is_causal=True).square().mean()
    accelerator.backward(loss)


def _heads() -> None:
    accelerator = _accelerator("sp 2")
    with accelerator.maybe_context_parallel():
        part = torch.zeros(1, 3, 4, 4)
        nn.functional.scaled_dot_product_attention(part, part, part)


def _odd_sp() -> None:
    with _accelerator("sp 2").maybe_context_parallel([torch.zeros(2, 9)], [1]):
        pass


def _cut_mask_sp() -> None:
    with _accelerator("sp 2").maybe_context_parallel():
        part = torch.zeros(1, 2, 4, 4)
        nn.functional.scaled_dot_product_attention(part, part, part, torch.ones(4, 8, dtype=torch.bool))


def _adapter() -> None:
    _accelerator("sp 2").deepspeed_ulysses_dl_adapter([], None)


def _flash() -> None:
    handler = DeepSpeedSequenceParallelConfig(sp_attn_implementation="flash_attention_2")
    Accelerator(parallelism_config=ParallelismConfig(sp_size=2, sp_handler=handler))


def _contexts() -> None:
    Accelerator(parallelism_config=ParallelismConfig(cp_size=2, sp_size=2))


def _ring(mask: Any, **how: Any) -> None:
    accelerator = _accelerator("cp 2", handler=RING)
    part = torch.zeros(1, 2, 4, 4)
    with accelerator.maybe_context_parallel([torch.zeros(8, 1)], [0]):
        nn.functional.scaled_dot_product_attention(part, part, part, mask, **how)


def _strategy() -> None:
    TorchContextParallelConfig("ring")


def _handler() -> Any:
    return ParallelismConfig(cp_size=2, cp_handler="allgather")


def _local_sgd() -> None:
    accelerator = _accelerator("cp 2")
    LocalSGD(accelerator, _model(accelerator)[0], 2)


BLOCK = "maybe_context_parallel: "
CASES: list[tuple[Callable[[], Any], str]] = [
    (_odd, BLOCK + "buffers[1]: sequence length (9, dimension 1) is not divisible by 2 × cp_size (2): pad it to 12"),
    (_no_dimension, BLOCK + "buffers[1] of shape (8,) has no dimension 1"),
    (_other_length, BLOCK + "buffers[1] has a sequence of 16 and buffers[0] of 8: they must be equal"),
    (_no_dims, BLOCK + "1 buffers and 0 buffer_seq_dims: pass one for each"),
    (_stranger, BLOCK + "no_restore_buffers has a tensor that is not in buffers"),
    (_trained, BLOCK + "buffers[0] requires a gradient: pass positions instead, and index it with them"),
    (_nested, BLOCK + "a block within a block: leave the first one before"),
    (_no_attention, BLOCK + "no attention was computed in the block by torch.nn.functional."
                    "scaled_dot_product_attention, so the parts of a sequence did not see each other: compute "
                    "attention with it"),
    (_local_mask, "scaled_dot_product_attention: a mask of shape (4, 4) in a block of maybe_context_parallel: its last "
                  "dimensions must be (4, 8), (8, 8) or (1, 8); for causal attention pass is_causal=True"),
    (_both, "scaled_dot_product_attention: pass attn_mask or is_causal, not both"),
    (_other_keys, "scaled_dot_product_attention: 4 queries and 8 keys in a block of maybe_context_parallel, where a "
                  "process has 4 of a sequence of 8: call it with the part"),
    (_later, "backward: activations are computed again after the block of maybe_context_parallel, where keys are not "
             "gathered: call accelerator.backward(loss) in the block"),
    (_heads, "scaled_dot_product_attention: 3 heads cannot be shared equally by sp_size=2 processes"),
    (_odd_sp, BLOCK + "buffers[0]: sequence length (9, dimension 1) is not divisible by sp_size (2): pad it to 10"),
    (_cut_mask_sp, "scaled_dot_product_attention: a mask of shape (4, 8) in a block of maybe_context_parallel: its "
                   "last dimensions must be (8, 8) or (1, 8); for causal attention pass is_causal=True"),
    (_adapter, "deepspeed_ulysses_dl_adapter: sp_size is DeepSpeed's only with a deepspeed_plugin: pass one, or cut "
               "batches by maybe_context_parallel"),
    (_flash, "DeepSpeedSequenceParallelConfig(sp_attn_implementation='flash_attention_2') is for runs with a "
             "deepspeed_plugin: use 'sdpa'"),
    (_contexts, "ParallelismConfig(cp_size=2, sp_size=2): both split the sequence: set one of them"),
    (lambda: _ring(torch.ones(8, 8)), "TorchContextParallelConfig('alltoall') does not support a mask: use "
                                      "'allgather'"),
    (lambda: _ring(None), "TorchContextParallelConfig('alltoall') does not support attention that is not causal: use "
                          "'allgather'"),
    (lambda: _ring(None, is_causal=True, dropout_p=0.5), "TorchContextParallelConfig('alltoall') does not support "
                                                         "dropout: use 'allgather'"),
    (_strategy, "TorchContextParallelConfig(cp_comm_strategy=…): 'ring' is not one of allgather, alltoall"),
    (_handler, "ParallelismConfig(cp_handler=…) must be a TorchContextParallelConfig, not str"),
    (_local_sgd, "LocalSGD needs a complete sequence on each process: it does not support cp_size and sp_size"),
]  # fmt: skip


def _messages() -> list[str]:
    messages = []
    for mistake, _ in CASES:
        try:
            mistake()
        except AccelError as error:
            messages.append(str(error))
    PartialState().wait_for_everyone()  # the first process has the store, for groups of the others
    return messages


def test_mistakes_are_one_line_on_every_process() -> None:
    expected = [words for _, words in CASES]
    assert run(_messages) == [expected, expected]


def test_two_ways_to_split_sequences_are_one_line() -> None:
    words = "ParallelismConfig(cp_size=2, sp_size=2): both split the sequence: set one of them"
    assert {outcome.message for outcome in outcomes(_contexts, processes=4)} == {words}
