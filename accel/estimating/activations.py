"""What a forward keeps for its backward, counted on a model without memory.

The model computes with torch's fake tensors, as if on the CPU: they have shapes and types, the operators that would run
are those that run there, and what autograd saves is asked of it. So attention counts as the fused kernel that it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import nn

from accel.errors import AccelError
from accel.estimating.subject import Subject, on_meta

# float32 throughout; computing in bfloat16 on float32 weights (autocast); weights themselves in bfloat16
Way = Literal["float32", "autocast", "bfloat16"]


class Unmeasured(AccelError):
    """The model cannot be run without memory, or nothing tells what it computes on."""


def measure(subject: Subject, way: Way, *, batch_size: int, sequence_length: int, checkpointing: bool = False) -> int:
    """Bytes that are alive between forward and backward, weights apart. Raises `Unmeasured`, in one line.

    Under autocast the weights' copies in bfloat16 are among them, for autograd keeps those.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    if subject.inputs is None:
        raise Unmeasured("a file of weights does not tell how the model computes")
    try:
        model = on_meta(subject)
        with FakeTensorMode(allow_non_fake_inputs=True):
            _make_fake(model, torch.bfloat16 if way == "bfloat16" else torch.float32)
            if checkpointing:
                _checkpoint(model)
            inputs = subject.inputs(model, batch_size, sequence_length)
            return saved_bytes(model.train(), dict(inputs), way)
    except AccelError as error:
        raise Unmeasured(str(error)) from None
    except Exception as error:
        said = " ".join(f"{type(error).__name__}: {error}".split())
        raise Unmeasured(f"{type(error).__name__} in its forward: {said[:200]}") from error


def saved_bytes(model: nn.Module, inputs: dict[str, Any], way: Way) -> int:
    """Run ``model`` forward and count the memory that autograd keeps and that is not the model's own."""
    if way == "bfloat16":
        inputs = {name: _in_bfloat16(value) for name, value in inputs.items()}
    own = {tensor.untyped_storage()._cdata for tensor in [*model.parameters(), *model.buffers()]}
    with _counting(own) as kept, _autocast(way):
        outputs = model(**inputs)
    del outputs
    return sum(storage.nbytes() for storage in kept.values())


@contextlib.contextmanager
def _counting(own: set[int]) -> Iterator[dict[int, Any]]:
    kept: dict[int, Any] = {}  # holding a storage keeps its address from being given to another

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield kept


def _autocast(way: Way) -> contextlib.AbstractContextManager[object]:
    return torch.autocast("cpu", dtype=torch.bfloat16) if way == "autocast" else contextlib.nullcontext()


def _make_fake(model: nn.Module, dtype: torch.dtype) -> None:
    """Put fake tensors in the place of all that ``model`` holds, as if on the CPU; tied weights stay tied."""
    made: dict[int, torch.Tensor] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            kind = dtype if tensor.is_floating_point() else tensor.dtype
            empty = torch.empty(tensor.shape, dtype=kind, device="cpu")
            parameter = isinstance(tensor, nn.Parameter)
            made[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if parameter else empty
        return made[id(tensor)]

    before = [*model.parameters(), *model.buffers()]  # alive until the end, for an id is theirs only so long
    for module in model.modules():
        places: tuple[Any, ...] = (module._parameters, module._buffers)
        for held in places:
            held.update({name: fake(tensor) for name, tensor in held.items() if tensor is not None})
    del before


def _in_bfloat16(value: Any) -> Any:
    return value.bfloat16() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _checkpoint(model: nn.Module) -> None:
    older = getattr(model, "gradient_checkpointing_enable", None)
    enable = getattr(model, "activation_checkpointing_enable", older)
    if enable is None:
        raise Unmeasured(f"a {type(model).__name__} has no checkpointing of its activations")
    enable()
