"""Sharded tensors, models and optimizers, stored in chunks that any number of processes can read back.

A process writes one safetensors file, ``chunks/node_<node>/rank_<rank>.safetensors``. The entry
``accel_chunks`` of its metadata maps each chunk to its full tensor and its offset there.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from itertools import chain, compress
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

from accel.checkpoint.file_names import rank_of_chunks
from accel.checkpoint.files import identity, split_dense
from accel.errors import CheckpointError
from accel.parallel.shares import count_versions, is_sharded, share
from accel.pytree import join_tensors, leaves, meta_tensors, split_tensors
from accel.state import PartialState
from accel.tensor_files import SafetensorsFile, StoredTensor, cut

_TABLE = "accel_chunks"

Dims: TypeAlias = tuple[int, ...]  # a shape, or an offset


def local_offset(name: str, tensor: Any) -> tuple[Dims, torch.Tensor]:
    """Return the offset of this process's part of ``tensor``, and the part, which shares its memory.

    Raises `CheckpointError` with ``name`` for placements other than Shard and Replicate.
    """
    if not is_sharded(tensor):
        return (0,) * tensor.ndim, tensor
    for dim, placement in enumerate(tensor.placements):
        if type(placement).__name__ not in ("Shard", "Replicate") and not _is_cut_again(tensor, dim, placement):
            raise CheckpointError(f"{name} is placed as {placement}: checkpoints hold only Shard and Replicate")
    return _global_offset(tensor.shape, tensor.device_mesh, tensor.placements), share(tensor)


def _is_cut_again(tensor: Any, dim: int, placement: Any) -> bool:
    """Return True for the placement of `fully_shard` that cuts, in the mesh's ``dim``, shards of tensor parallelism."""
    sizes, placements = tensor.device_mesh.shape[dim + 1 :], tensor.placements[dim + 1 :]
    if type(placement).__name__ != "_StridedShard":
        return False
    pieces = math.prod(size for size, other in zip(sizes, placements, strict=True) if other.is_shard(placement.dim))
    return bool(placement.split_factor == pieces)


@lru_cache(maxsize=256)  # many tensors of a model have the same shape, and torch takes 0.1 ms
def _global_offset(shape: Dims, mesh: Any, placements: tuple[Any, ...]) -> Dims:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    return tuple(compute_local_shape_and_global_offset(shape, mesh, placements)[1])


def own_name(name: str, versions: int) -> str:
    """Return the name of this process's version of the tensor ``name``, which has ``versions``; see `count_versions`.

    The main process's is under ``name`` itself, for worlds of other sizes.
    """
    rank = PartialState().process_index
    return f"rank.{rank}/{versions}.{name}" if rank and versions > 1 else name


def chunks_to_write(
    tensors: Mapping[str, torch.Tensor], versions: Mapping[str, int], *, is_writer: bool, every_copy: bool
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the parts of ``tensors`` that this process writes, and the metadata of their file.

    ``versions``: see `count_versions`.
    ``is_writer``: True if it writes tensors that every process holds in full.
    ``every_copy``: True if it also writes parts that other processes hold, since its disk is its own.
    """
    parts: dict[str, torch.Tensor] = {}
    table: dict[str, Any] = {}
    for name, tensor in tensors.items():
        key = own_name(name, versions.get(name, 1))
        if (every_copy or _is_first_copy(tensor)) if is_sharded(tensor) else is_writer or key != name:
            offset, part = local_offset(name, tensor)
            parts[key] = part.detach()
            table[key] = [list(tensor.shape), list(offset)]
    return parts, {_TABLE: json.dumps(table)}


def _is_first_copy(tensor: Any) -> bool:
    """Return True for the shard of process 0's mesh that is first where it is replicated."""
    mesh = tensor.device_mesh
    replicated = [placement.is_replicate() for placement in tensor.placements]
    return 0 in mesh.mesh and not any(compress(mesh.get_coordinate(), replicated))


class Chunks:
    """Saved tensors by name, each in the chunks it was written in. ``folder``: the checkpoint, for error messages."""

    def __init__(self, folder: str, files: Sequence[str] = ()) -> None:
        self.folder = folder
        self._files = files
        self.shapes: dict[str, Dims] = {}
        self._chunks: dict[str, dict[tuple[Dims, Dims], Any]] = {}

    @classmethod
    def single_chunk(cls, tensors: Mapping[str, torch.Tensor], folder: str) -> Chunks:
        """Create from full tensors, with one chunk each."""
        saved = cls(folder)
        for name, tensor in tensors.items():
            saved.add(name, tuple(tensor.shape), (0,) * tensor.ndim, tensor)
        return saved

    @classmethod
    def of_state(cls, state: Mapping[str, Any], folder: str) -> tuple[Chunks, dict[str, Any]]:
        """Create from the dense tensors of a full state dict; return also the rest of it."""
        tensors, rest = split_dense(state)
        return cls.single_chunk(tensors, folder), rest

    @classmethod
    def in_folder(cls, folder: Path, files: Collection[str]) -> Chunks:
        """Open the files of chunks among the ``files`` of a checkpoint. Raises `CheckpointError` for a damaged one."""
        saved = cls(str(folder), [name for name in sorted(files) if rank_of_chunks(name) is not None])
        for path in map(folder.joinpath, saved._files):
            file = SafetensorsFile(path)
            try:
                for name, (shape, offset) in json.loads(file.metadata[_TABLE]).items():
                    saved.add(name, tuple(shape), tuple(offset), file.tensors[name])
            except (KeyError, TypeError, ValueError) as error:
                raise CheckpointError(f"{path} cannot be loaded: its table of chunks is damaged") from error
        return saved

    def add(self, name: str, shape: Dims, offset: Dims, data: Any) -> None:
        """Add a chunk of the tensor ``name``: a tensor, or an object that opens one."""
        if self.shapes.setdefault(name, shape) != shape:
            raise CheckpointError(f"{self.folder}: {name} is {self.shapes[name]} in one file, but {shape} in another")
        self._chunks.setdefault(name, {})[offset, tuple(data.shape)] = data

    def __contains__(self, name: str) -> bool:
        return name in self.shapes

    def own(self, name: str) -> str | None:
        """Return the name of this process's version of a tensor or, without one, of the main process's, if saved."""
        names = (own_name(name, PartialState().num_processes), name)
        return next((saved for saved in names if saved in self), None)

    def under(self, prefix: str) -> list[str]:
        """Return the names that begin with ``prefix``, without it."""
        return [name.removeprefix(prefix) for name in self.shapes if name.startswith(prefix)]

    def renamed(self, names: Mapping[str, str]) -> Chunks:
        """Return a subset under new names; ``names`` maps new names to existing ones."""
        saved = Chunks(self.folder)
        saved.shapes = {name: self.shapes[old] for name, old in names.items()}
        saved._chunks = {name: self._chunks[old] for name, old in names.items()}
        return saved

    def first(self, name: str) -> Any:
        """Return the first chunk of a tensor, which is all of a full one."""
        return next(iter(self._chunks[name].values()))

    def gathered(self, prefix: str) -> dict[str, torch.Tensor]:
        """Return full tensors in memory, by the names under ``prefix``; tied names share one tensor."""
        buffers: dict[int, torch.Tensor] = {}
        tensors: dict[str, torch.Tensor] = {}
        for name in self.under(prefix):
            first = self.first(prefix + name)
            if id(first) not in buffers:
                buffers[id(first)] = torch.empty(self.shapes[prefix + name], dtype=first.dtype)
                self.fill(prefix + name, buffers[id(first)])
            tensors[name] = buffers[id(first)]
        return tensors

    def plan(self, name: str, tensor: torch.Tensor) -> Callable[[], None]:
        """Return a function that copies what was saved under ``name`` to this process's part of ``tensor``.

        Raises `CheckpointError` if the full shapes differ or chunks of this process's part are missing.
        """
        _check_shape(self.folder, name, self.shapes[name], tensor.shape)
        offset, part = local_offset(name, tensor)
        parts = []
        for (start, size), data in self._chunks[name].items():
            common = [
                (max(a, b), min(a + m, b + n)) for a, m, b, n in zip(offset, part.shape, start, size, strict=True)
            ]
            if all(first < stop for first, stop in common):
                parts.append((part[_slices(common, offset)], data, _slices(common, start)))
        missing = part.numel() - sum(target.numel() for target, _, _ in parts)
        if missing:
            raise CheckpointError(
                f"{self.folder}: {missing} elements of {name} are missing{self._missing_ranks_hint()}"
            )

        @torch.no_grad()
        def copy() -> None:
            for target, data, place in parts:
                target.copy_(cut(data if isinstance(data, torch.Tensor) else data.open(), place))

        return copy

    def fill(self, name: str, tensor: torch.Tensor) -> None:
        """Do at once what `plan` plans."""
        self.plan(name, tensor)()

    def _missing_ranks_hint(self) -> str:
        if not self._files:
            return ""
        numbers = [re.findall(r"\d+", name) for name in self._files]
        nodes, ranks = (", ".join(sorted(set(column), key=int)) for column in zip(*numbers, strict=True))
        return (
            f": it has only the chunks of rank {ranks} on node {nodes}. Load it with the processes that saved it, or "
            "save to a file system that all nodes share"
        )


def _check_shape(source: str, name: str, saved: Sequence[int], present: Sequence[int]) -> None:
    if tuple(saved) != tuple(present):
        raise CheckpointError(f"{source}: {name} has shape {tuple(saved)}, but {tuple(present)} in this run")


def _slices(common: Sequence[tuple[int, int]], start: Dims) -> tuple[slice, ...]:
    return tuple(slice(first - offset, stop - offset) for (first, stop), offset in zip(common, start, strict=True))


# Models and optimizers: splitting them into chunks, and filling them from chunks in any world.
#
# Optimizer state is keyed by parameter names, so that the order of parameters may differ.

NameOf: TypeAlias = Callable[[torch.Tensor], str]


def names_of(parameters: Iterable[tuple[str, torch.Tensor]], problem: str) -> NameOf:
    """Return a function from a parameter to its name. It raises `CheckpointError` with ``problem`` for others."""
    names = {id(parameter): name for name, parameter in parameters}

    def name_of(parameter: torch.Tensor) -> str:
        if id(parameter) not in names:
            raise CheckpointError(f"the optimizer has a parameter of shape {tuple(parameter.shape)} that {problem}")
        return names[id(parameter)]

    return name_of


def split_optimizer(optimizer: Any, name_of: NameOf) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Split the state of ``optimizer`` into an outline and its tensors by path.

    The outline holds the ``tree`` of `split_tensors`, with names in place of parameter numbers, and ``versions``: see
    `count_versions`. Collective: all processes must call it.
    """
    tree, tensors = split_tensors(_by_name(optimizer.state_dict(), optimizer, name_of))
    return {"tree": tree, "versions": count_versions(tensors)}, tensors


def outline_full_state(state: Any) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Split the full state dict of an optimizer as `split_optimizer` does."""
    tree, tensors = split_tensors(state)
    return {"tree": tree, "versions": {path: 1 for path, tensor in tensors.items() if not tensor.ndim}}, tensors


def _by_name(state: Any, optimizer: Any, name_of: NameOf) -> Any:
    """Return a state dict of ``optimizer`` with names in place of parameter numbers, if it has those."""
    if "param_groups" not in state:
        return state
    saved = [group["params"] for group in state["param_groups"]]
    present = [group["params"] for group in optimizer.param_groups]
    if [*map(len, saved)] != [*map(len, present)]:
        raise ValueError(f"its groups have {[*map(len, saved)]} parameters, but {[*map(len, present)]} in this run")
    names = dict(zip(chain(*saved), map(name_of, chain(*present)), strict=True))
    return _renamed(state, names, [[names[number] for number in group] for group in saved])


def _renamed(state: Mapping[str, Any], names: Mapping[Any, Any], params: Iterable[list[Any]]) -> dict[str, Any]:
    groups = [{**group, "params": keys} for group, keys in zip(state["param_groups"], params, strict=True)]
    entries = {names.get(key, key): entry for key, entry in state["state"].items()}
    return {**state, "state": entries, "param_groups": groups}


def plan_optimizer(
    optimizer: Any, name_of: NameOf, outline: Mapping[str, Any], saved: Chunks, prefix: str = ""
) -> Callable[[], None]:
    """Check the result of `split_optimizer`; return a function that loads it into this process's parts.

    ``prefix``: the prefix of the names in ``saved``. Raises `CheckpointError` for a mismatch.
    """
    if "chunked" in outline:
        outline, saved, prefix = _upgraded(outline, saved, prefix)
    tree, versions = outline["tree"], outline["versions"]
    named = [{name_of(parameter): parameter for parameter in group["params"]} for group in optimizer.param_groups]
    saved_groups = tree.get("param_groups")
    if saved_groups is not None:
        _check_groups(saved_groups, named, saved.folder)
    places = meta_tensors(tree)
    keys = {path: own_name(prefix + path, versions.get(path, 1)) for path in places}
    for path, key in keys.items():
        if versions.get(path, 1) not in (1, PartialState().num_processes):
            raise CheckpointError(
                f"{saved.folder}: {path} differs between the {versions[path]} processes that saved it, and this run "
                f"has {PartialState().num_processes}: load it with {versions[path]}"
            )
        if key not in saved:
            raise CheckpointError(f"{saved.folder}: {key} is missing")
    parameters = {name: parameter for group in named for name, parameter in group.items()}
    owners = {
        path: parameters[name]
        for name, entry in tree.get("state", {}).items()
        if name in parameters
        for path, _ in leaves(entry, f"['state'][{name!r}]")
    }
    # State that belongs to no parameter is cut as a parameter of its shape.
    any_parameter = next((p for p in parameters.values() if is_sharded(p)), next(iter(parameters.values()), None))
    by_shape = {tuple(parameter.shape): parameter for parameter in parameters.values()}
    current = dict(leaves(_by_name(optimizer.state_dict(), optimizer, name_of)))

    def filled(path: str, shape: tuple[int, ...]) -> torch.Tensor:
        owner = owners.get(path)
        # Also state that was not sharded because its parameter was not, under tensor parallelism.
        sharded = path not in versions or (versions[path] == 1 and owner is not None and shape == owner.shape)
        like = by_shape.get(shape, any_parameter) if owner is None else owner
        return _filled(saved, keys[path], like, current.get(path), plain=not sharded)

    def load() -> None:
        values = {path: filled(path, tuple(place.shape)) for path, place in places.items()}
        state = join_tensors(tree, values)
        if saved_groups is not None:
            numbers = {name: number for number, name in enumerate(parameters)}
            state = _renamed(state, numbers, [[numbers[name] for name in group] for group in named])
        optimizer.load_state_dict(state)

    return load


def _check_groups(saved: Sequence[Mapping[str, Any]], named: Sequence[Mapping[str, Any]], folder: str) -> None:
    if len(saved) != len(named):
        raise CheckpointError(f"{folder}: {len(saved)} parameter group(s), but {len(named)} in this run")
    for saved_group, group in zip(saved, named, strict=True):
        extra = sorted(set(saved_group["params"]) ^ set(group))
        if extra:
            raise CheckpointError(f"{folder}: parameter groups differ from this run's, first in {extra[0]}")


def _upgraded(outline: Mapping[str, Any], saved: Chunks, prefix: str) -> tuple[dict[str, Any], Chunks, str]:
    """Return the outline and chunks of an older accel in today's form: it kept scalars in the outline."""
    state, items = {}, {}
    for name, entry in outline["state"].items():
        keys = outline["chunked"].get(name, ())
        state[name] = {**entry, **{key: torch.empty((), device="meta") for key in keys}}
        items.update({f"['state'][{name!r}][{key!r}]": f"{prefix}{name}:{key}" for key in keys})
    chunks = saved.renamed({path: name for path, name in items.items() if name in saved})
    return {"tree": {"state": state, "param_groups": outline["param_groups"]}, "versions": {}}, chunks, ""


def _filled(saved: Chunks, name: str, parameter: Any, current: Any, *, plain: bool) -> torch.Tensor:
    """Return a saved tensor, in the memory of ``current`` if it fits, cut like ``parameter`` unless it is ``plain``."""
    shape, dtype, sharded = saved.shapes[name], saved.first(name).dtype, is_sharded(parameter) and not plain
    if not isinstance(current, torch.Tensor):
        current = None
    if current is not None and (tuple(current.shape), current.dtype, is_sharded(current)) == (shape, dtype, sharded):
        tensor: torch.Tensor = current.detach()
    elif parameter is not None and shape == tuple(parameter.shape) and not plain:
        tensor = torch.empty_like(parameter.detach(), dtype=dtype)
    else:
        device = parameter.device if current is None and shape and parameter is not None else None
        tensor = torch.empty(shape, dtype=dtype, device=device if current is None else current.device)
    saved.fill(name, tensor)
    if not sharded or is_sharded(tensor):
        return tensor
    from torch.distributed.tensor import DTensor, Replicate

    mesh = parameter.device_mesh
    return DTensor.from_local(tensor.to(parameter.device), mesh, [Replicate()] * mesh.ndim, run_check=False)


def plan_full_optimizer(optimizer: Any, state: Mapping[str, Any], folder: Path) -> Callable[[], None]:
    """Do as `plan_optimizer` with the state dict of an unsharded one, by the order of parameters."""
    outline, tensors = outline_full_state(_by_name(state, optimizer, lambda parameter: str(id(parameter))))
    saved = Chunks.single_chunk(tensors, str(folder))
    return plan_optimizer(optimizer, lambda parameter: str(id(parameter)), outline, saved)


def plan_module(
    module: nn.Module,
    saved: Chunks,
    extra: Mapping[str, Any],
    prefix: str = "",
    *,
    by_module: bool = False,
    **options: Any,
) -> Callable[[], None]:
    """Check weights and buffers; return a function that loads them into ``module``, and ``extra`` as it is.

    Each process's parts are copied or, with ``by_module``, full tensors go to `torch.nn.Module.load_state_dict`, which
    gets ``options``. Raises `CheckpointError` for a shape that differs and, if ``strict``, for names that only one side
    has. Of parts that then load by code of their own, nothing is compared.
    """
    expected = module.state_dict()
    keys = _saved_names(module, expected, saved, prefix)
    own = tuple(
        f"{name}." if name else "" for name, part in module.named_modules() if by_module and _loads_by_own_code(part)
    )
    loads = [] if by_module else [saved.plan(key, expected[name]) for name, key in keys.items()]
    names = {name: prefix + name for name in saved.under(prefix)} | keys
    for name in [*expected, *names, *extra] if options.get("strict", True) else ():
        is_saved = name in names or name in extra
        if is_saved is not (name in expected) and not name.startswith(own):
            problem = f"this run has no {name}" if is_saved else f"it lacks {name}"
            raise CheckpointError(f"{saved.folder}: {problem}")
    if by_module:
        for name, key in keys.items():
            if not name.startswith(own):
                _check_shape(saved.folder, name, saved.shapes[key], expected[name].shape)
        state = {name: saved.first(key) for name, key in names.items()}
        return partial(load_module, module, {**state, **extra}, **options)

    def load() -> None:
        for load_part in loads:
            load_part()
        if extra:
            module.load_state_dict(extra, strict=False)

    return load


def _saved_names(module: nn.Module, expected: Mapping[str, Any], saved: Chunks, prefix: str) -> dict[str, str]:
    """Map the names of tensors in the state dict ``expected`` to those under which ``saved`` has them.

    They are of this process's own version, the same, or those of tied weights: Accelerate saves one name of these.
    """
    parameters = dict(module.named_parameters(remove_duplicate=False))
    tied: dict[Any, list[str]] = {}
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            tied.setdefault(identity(parameters.get(name, value)), []).append(name)
    saved_names: dict[str, str] = {}
    for names in tied.values():
        for name in names:
            keys = [key for other in (name, *names) if (key := saved.own(prefix + other)) is not None]
            if keys:
                saved_names[name] = keys[0]
    return saved_names


def _loads_by_own_code(part: nn.Module) -> bool:
    kind = type(part)
    overridden = kind._load_from_state_dict is not nn.Module._load_from_state_dict
    return overridden or kind.load_state_dict is not nn.Module.load_state_dict or bool(part._load_state_dict_pre_hooks)


def load_module(module: torch.nn.Module, state: dict[str, Any], **kwargs: Any) -> Any:
    """Call ``module.load_state_dict`` with a ``state`` that may hold stored tensors."""
    if kwargs.get("assign"):
        state = {key: value.loaded() if isinstance(value, StoredTensor) else value for key, value in state.items()}
    result = module.load_state_dict(state, **kwargs)
    for part in module.modules():  # code of a module may have kept what it got
        holders: tuple[dict[str, Any], ...] = (vars(part), part._parameters, part._buffers)
        for held in holders:
            held.update({key: value.loaded() for key, value in held.items() if isinstance(value, StoredTensor)})
    return result
