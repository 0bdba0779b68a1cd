"""Pipelines for inference: a model is cut into stages, one per process, with `torch.distributed.pipelining`.

The model is traced on the CPU with a micro-batch of the example. A batch of any size is cut into micro-batches of that
size, the last one padded. Training with stages is torch's own; docs/parallel.md has an example.
"""

from __future__ import annotations

import inspect
import warnings
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from accel import pytree
from accel.big_models import infer_auto_device_map
from accel.big_models.sizes import Named, class_names, compute_module_sizes, direct_parts
from accel.collectives import broadcast, broadcast_object_list
from accel.errors import ArgumentError, nearest
from accel.state import PartialState


def generate_device_map(
    model: nn.Module,
    num_processes: int = 1,
    no_split_module_classes: Any = None,
    max_memory: dict[Any, int | str] | None = None,
) -> dict[str, Any]:
    """Return the stage of each part of ``model``: ``num_processes`` stages of even size, if it has as many parts.

    Classes in ``no_split_module_classes`` (by default the model's ``_no_split_modules``) stay whole. With
    ``max_memory``, and for one process, this is `infer_auto_device_map`.
    """
    no_split = class_names(no_split_module_classes or getattr(model, "_no_split_modules", None))
    if num_processes == 1 or max_memory is not None:
        return infer_auto_device_map(model, max_memory, no_split, clean_result=False)
    sizes = compute_module_sizes(model)
    units: list[list[str]] = [[]]  # a module each, with the parameters before it: only a module can begin a stage
    for name, part in _parts(direct_parts(model), sizes, sizes[""] / (2 * num_processes), no_split):
        units[-1].append(name)
        if isinstance(part, nn.Module):
            units.append([])
    *units, rest = units
    weights = [sum(sizes.get(name, 0) for name in unit) for unit in units]
    ends = list(accumulate(weights))
    count = min(num_processes, len(units))
    starts = [0]
    for stage in range(1, count):
        # The first unit with its middle in the stage's even share; every stage gets one.
        even = next(i for i, end in enumerate(ends) if (end - weights[i] / 2) * count >= stage * ends[-1])
        starts.append(min(max(even, starts[-1] + 1), len(units) - count + stage))
    device_map = {name: bisect_right(starts, i) - 1 for i, unit in enumerate(units) for name in unit}
    return {**device_map, **dict.fromkeys(rest, len(starts) - 1)}


def _parts(parts: list[Named], sizes: Mapping[str, Any], largest: float, no_split: Sequence[str]) -> Iterator[Named]:
    for name, part in parts:
        if not isinstance(part, nn.Module):
            yield name, part
            continue
        # A container without a forward of its own, such as a ModuleList, is never called.
        is_container = type(part).forward is nn.Module.forward
        is_large = sizes.get(name, 0) > largest and type(part).__name__ not in no_split
        if is_container or (is_large and list(part.children())):
            inner = [(f"{name}.{child}", value) for child, value in direct_parts(part)]
            yield from _parts(inner, sizes, largest, no_split)
        else:
            yield name, part


def find_pippy_batch_size(args: Any, kwargs: Any) -> int | None:
    """Return the rows of the first tensor that has dimensions, or ``None``."""
    return pytree.find_batch_size((args, kwargs))


class _Traced(nn.Module):
    """The model with tensors in and out, for torch's tracer."""

    def __init__(self, model: nn.Module, example: dict[str, Any], rows: int, outputs: list[Any]) -> None:
        super().__init__()
        self.model, self.example, self.rows = model, example, rows
        self.keep = outputs.append  # torch.export resets attributes that forward assigns

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        bound = inspect.signature(self.model.forward).bind_partial()
        # Copies, so that the first stage has every input, and the last one every output.
        bound.arguments.update(pytree.replace_tensors(self.example, [tensor.clone() for tensor in inputs]))
        output = pytree.map_nested(_plain, self.model(*bound.args, **bound.kwargs))
        for path, leaf in pytree.leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.shape[:1] != (self.rows,):
                raise ArgumentError(f"output{path} has shape {list(leaf.shape)}, without a row for each of the input")
        self.keep(pytree.map_nested(lambda leaf: torch.Tensor if isinstance(leaf, torch.Tensor) else leaf, output))
        return tuple(tensor.clone() for tensor in pytree.tensors(output))


def _plain(leaf: Any) -> Any:
    return leaf if isinstance(leaf, (torch.Tensor, bool, int, float, str)) else None


class _Pipeline:
    """A traced model, and the stage of it that this process runs."""

    def __init__(
        self, model: nn.Module, split_points: Sequence[str], args: Any, kwargs: Mapping[str, Any], num_chunks: int
    ) -> None:
        from torch.distributed.pipelining import pipe_split, pipeline

        self._state = state = PartialState()
        self._signature = inspect.signature(model.forward)
        example = self._bind(args, kwargs)
        inputs = pytree.tensors(pytree.send_to_device(example, "cpu"))
        total = next(len(tensor) for tensor in inputs if tensor.ndim)
        self._rows = -(-total // num_chunks)
        self._has_rows = [tensor.shape[:1] == (total,) for tensor in inputs]
        self._layout = self._layout_of(example)
        outputs: list[Any] = []
        traced = _Traced(model.to("cpu"), example, self._rows, outputs)
        split: Callable[[], Any] = pipe_split
        hooks = [model.get_submodule(name).register_forward_pre_hook(lambda *_: split()) for name in split_points]
        try:
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # torch's own
                pipe = pipeline(traced, next(self._chunks(inputs, total)))
        except Exception as error:
            cause = str(error.__cause__ or error).strip().partition("\n")[0]
            raise ArgumentError(f"prepare_pippy: torch cannot trace {type(model).__name__}: {cause}") from error
        finally:
            for hook in hooks:
                hook.remove()
        if pipe.num_stages != state.num_processes:
            raise ArgumentError(
                f"prepare_pippy: split_points {', '.join(split_points)} made {pipe.num_stages} stages for "
                f"{state.num_processes} processes: forward must call each of these modules once"
            )
        self._output = outputs[-1]
        self._stage: Any = pipe.build_stage(state.process_index, state.device).submod
        nodes = list(pipe.split_gm.graph.nodes)
        modules = [node for node in nodes if node.op == "call_module"]
        # The source of each argument of each stage: a stage, or -1 for the inputs, and an index into its tensors.
        self._sources = [[_source(arg, modules, nodes) for arg in module.args] for module in modules]
        self._results = [_source(arg, modules, nodes)[1] for arg in nodes[-1].args[0]]

    def _bind(self, args: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return self._signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise ArgumentError(f"the model's forward: {error}") from None

    def _layout_of(self, arguments: Any) -> dict[str, Any]:
        """Return type and shape of each tensor, without the rows, and every other value, by path."""
        has_rows = iter(self._has_rows)
        return {
            path: (leaf.dtype, *leaf.shape[next(has_rows, False) :]) if isinstance(leaf, torch.Tensor) else leaf
            for path, leaf in pytree.leaves(arguments)
            if leaf is not None
        }

    def _read(self, args: Any, kwargs: Mapping[str, Any]) -> tuple[int, list[torch.Tensor]]:
        """Return the number of rows and the tensors of a batch that has the layout of the example."""
        arguments = self._bind(args, kwargs)
        layout = self._layout_of(arguments)
        for path in {**self._layout, **layout}:
            if (own := layout.get(path)) != (expected := self._layout.get(path)):
                raise ArgumentError(f"the batch's {path} is {own}; the example of prepare_pippy has {expected}")
        inputs = pytree.tensors(arguments)
        sizes = {len(tensor) for tensor, has_rows in zip(inputs, self._has_rows, strict=True) if has_rows}
        if len(sizes) > 1 or 0 in sizes:
            raise ArgumentError(f"a batch for a pipeline needs one number of rows above 0, not {sorted(sizes)}")
        return sizes.pop(), pytree.send_to_device(inputs, self._state.device)

    def _chunks(self, inputs: list[torch.Tensor], rows: int) -> Iterator[tuple[torch.Tensor, ...]]:
        """Yield the inputs of each micro-batch; the last row is repeated until the last of them is complete."""
        for start in range(0, rows, self._rows):
            chosen = torch.arange(start, start + self._rows).clamp(max=rows - 1)
            yield tuple(
                tensor[chosen.to(tensor.device)] if has_rows else tensor
                for tensor, has_rows in zip(inputs, self._has_rows, strict=True)
            )

    @torch.no_grad()
    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the main process's batch; return the output on the last process and ``None`` on the others."""
        size: list[Any] = [None]
        inputs: list[torch.Tensor] = []
        if self._state.is_main_process:
            try:
                size[0], inputs = self._read(args, kwargs)
            except Exception as error:  # raised on every process
                size[0] = str(error)
        broadcast_object_list(size)
        rows = size[0]
        if isinstance(rows, str):
            raise ArgumentError(rows)
        chunks = self._chunks(inputs, rows) if inputs else ((),) * -(-rows // self._rows)
        sent: list[tuple[Any, torch.Tensor]] = []
        results = [self._run_chunk(chunk, sent) for chunk in chunks]
        for work, _ in sent:
            work.wait()
        if not self._state.is_last_process:
            return None
        values = (torch.cat([result[index] for result in results])[:rows] for index in self._results)
        return pytree.map_nested(lambda leaf: next(values) if leaf is torch.Tensor else leaf, self._output)

    def _run_chunk(self, chunk: Sequence[torch.Tensor], sent: list[tuple[Any, torch.Tensor]]) -> list[torch.Tensor]:
        """Run this stage: receive its arguments, and send the results, which ``sent`` keeps until they have arrived.

        torch's own schedules send and receive in two different orders when a result skips a stage.
        """
        rank = self._state.process_index
        arguments: list[torch.Tensor] = []
        pending: list[Any] = []
        placeholders = [node for node in self._stage.graph.nodes if node.op == "placeholder"]
        for (stage, index), placeholder in zip(self._sources[rank], placeholders, strict=True):
            if stage < 0:
                arguments.append(chunk[index])
                continue
            like = placeholder.meta["val"]
            arguments.append(torch.empty(like.shape, dtype=like.dtype, device=self._state.device))
            pending.append(dist.irecv(arguments[-1], stage))
        for work in pending:
            work.wait()
        output = self._stage(*arguments)
        results = [output] if isinstance(output, torch.Tensor) else list(output)
        for later in range(rank + 1, self._state.num_processes):
            for stage, index in self._sources[later]:
                if stage == rank:
                    value = results[index].contiguous()
                    sent.append((dist.isend(value, later), value))
        return results if self._state.is_last_process else []


def _source(arg: Any, modules: list[Any], nodes: list[Any]) -> tuple[int, int]:
    if arg.op == "placeholder":
        return -1, nodes.index(arg)
    return (modules.index(arg), 0) if arg in modules else (modules.index(arg.args[0]), arg.args[1])


def build_pipeline(model: nn.Module, split_points: Sequence[str], args: Any, kwargs: Any, num_chunks: int) -> _Pipeline:
    """Trace ``model`` with 1/``num_chunks`` of the example's rows; return the pipeline, whose ``step`` runs a batch."""
    return _Pipeline(model, split_points, args or (), kwargs or {}, num_chunks)


def pippy_forward(forward: Callable[..., Any], num_chunks: int, gather_output: bool, *args: Any, **kwargs: Any) -> Any:
    """Call ``forward``, whose output the last process has; copy that to every process if ``gather_output`` is set."""
    state = PartialState()
    output = forward(*args, **kwargs)
    if not gather_output or not state.use_distributed:
        return output
    last = state.num_processes - 1
    outline = [pytree.split_tensors(output)[0]]
    broadcast_object_list(outline, last)
    if not state.is_last_process:
        empty = [torch.empty_like(tensor, device=state.device) for tensor in pytree.tensors(outline)]
        output = pytree.replace_tensors(outline[0], empty)
    broadcast(pytree.tensors(output), last)
    return output


def prepare_pippy(
    model: nn.Module,
    split_points: str | list[str] | None = "auto",
    no_split_module_classes: list[str] | None = None,
    example_args: tuple[Any, ...] | None = (),
    example_kwargs: dict[str, Any] | None = None,
    num_chunks: int | None = None,
    gather_output: bool | None = False,
) -> nn.Module:
    """Cut ``model`` into one stage per process, for inference, and return it; calls of it run the stages.

    ``split_points``: the modules at which the second and later stages begin, or ``"auto"`` for even sizes (see
    `generate_device_map`). The example is a batch for one process; ``num_chunks`` is the number of micro-batches in
    it, by default the number of processes. A call takes the main process's batch, of any number of rows. The last
    process returns the output, with ``gather_output`` every process. Raises `ArgumentError`.
    """
    state = PartialState()
    count = state.num_processes
    chunks = count if num_chunks is None else num_chunks
    if chunks < 1:
        raise ArgumentError(f"prepare_pippy(num_chunks={num_chunks}): it must be 1 or more")
    if not find_pippy_batch_size(example_args, example_kwargs):
        raise ArgumentError("prepare_pippy needs example_args or example_kwargs with a tensor that has rows")
    names = _split_points(model, split_points, no_split_module_classes, count)
    forward = model.forward = vars(model).get("_original_forward", model.forward)
    pipeline = build_pipeline(model, names, example_args, example_kwargs, chunks) if count > 1 else None
    if pipeline is None:
        model.to(state.device)

    def step(*args: Any, **kwargs: Any) -> Any:
        return forward(*pytree.send_to_device(args, state.device), **pytree.send_to_device(kwargs, state.device))

    run = torch.no_grad()(step) if pipeline is None else pipeline.step
    model.__dict__.update(_original_forward=forward, hf_split_points=names, pippy_stage=pipeline)
    model.forward = partial(pippy_forward, run, chunks, bool(gather_output))
    return model


def _split_points(model: nn.Module, split_points: Any, no_split: Any, count: int) -> list[str]:
    modules = dict(model.named_modules())
    if split_points == "auto":
        device_map = generate_device_map(model, count, no_split) if count > 1 else {}
        starts = {stage: name for name, stage in reversed(device_map.items()) if name in modules}
        names = [starts[stage] for stage in range(1, count) if stage in starts]
    else:
        names = class_names(split_points)
    for name in names:
        if not name or name not in modules:
            kind = type(model).__name__
            raise ArgumentError(f"prepare_pippy: {kind} has no module {name!r} to split at{nearest(name, modules)}")
    if count > 1 and len(names) + 1 != count:
        raise ArgumentError(
            f"prepare_pippy: {type(model).__name__} is split into {len(names) + 1} stages for {count} processes: pass "
            f"{count - 1} split_points, or start {len(names) + 1} processes"
        )
    return names
