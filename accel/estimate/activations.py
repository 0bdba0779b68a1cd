"""The memory of a training step besides weights, gradients and the optimizer, measured without allocating it.

The model computes with torch's fake tensors, as if on the CPU: they have shapes and types, and the operators
are those of a real run. So fused attention counts as one kernel; memory inside a kernel does not count. Only on GPUs
do such kernels take dropout, so attention is measured without it.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from accel.errors import AccelError
from accel.estimate.find import Subject, on_meta

# float32 throughout; float32 weights with bfloat16 autocast; bfloat16 weights
ComputeMode = Literal["float32", "autocast", "bfloat16"]


class Unmeasured(AccelError):
    """The model cannot be run without memory, or its inputs are unknown."""


def measure(
    subject: Subject, mode: ComputeMode, *, batch_size: int, sequence_length: int, checkpointing: bool = False
) -> int:
    """Return `step_bytes` for ``subject``. Raises `Unmeasured`, in one line.

    Under autocast it includes the bfloat16 copies of the weights, which autograd keeps.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    if subject.inputs is None:
        raise Unmeasured("a weights file does not describe the model's forward")
    try:
        model = on_meta(subject)
        with _quiet(), FakeTensorMode(allow_non_fake_inputs=True):
            _make_fake(model, torch.bfloat16 if mode == "bfloat16" else torch.float32)
            if checkpointing:
                _checkpoint(model)
            inputs = subject.inputs(model, batch_size, sequence_length)
            return step_bytes(model.train(), dict(inputs), mode)
    except AccelError as error:
        raise Unmeasured(str(error)) from None
    except Exception as error:
        if sequence_length > (subject.longest or sequence_length):
            explanation = f"sequences of {sequence_length} are longer than the {subject.longest} that the model takes"
            raise Unmeasured(explanation) from error
        detail = " ".join(f"{type(error).__name__}: {error}".split())
        raise Unmeasured(f"{type(error).__name__} in its forward or backward: {detail[:200]}") from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch's log of failures, which `Unmeasured` reports instead."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    previous, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = previous


def step_bytes(model: nn.Module, inputs: dict[str, Any], mode: ComputeMode) -> int:
    """Return the peak bytes of a forward and backward, without weights, buffers and the weights' gradients.

    The batch counts, and so do the outputs until the backward ends, as in a training loop with variables for them.
    """
    if mode == "bfloat16":
        inputs = {name: _in_bfloat16(value) for name, value in inputs.items()}
    tracker = _AllocationTracker([*model.parameters(), *model.buffers()], tree_leaves(inputs))
    with _exclude_gradients(model, tracker), tracker:
        with _autocast(mode), NoAttentionDropout():
            outputs = model(**inputs)
        loss = _loss(outputs)
        if loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]
        del outputs, loss
    model.zero_grad()
    return tracker.peak()


class NoAttentionDropout(TorchFunctionMode):
    """Calls of fused attention without their dropout, with which the CPU's kernel would not be used."""

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.scaled_dot_product_attention:
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            else:
                kwargs = {**kwargs, "dropout_p": 0.0}
        return func(*args, **kwargs)


class _AllocationTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A recorder of the storages that operators allocate while it is active, and of their release."""

    def __init__(self, model_tensors: Iterable[torch.Tensor], batch: Iterable[object]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._events: list[tuple[int, int]] = []  # a storage's number and bytes, negative when freed
        self._excluded: set[int] = set()
        # By address of the storage; the weak reference reports when another storage may have it.
        self._live: dict[int, tuple[int, weakref.ref[Any] | None]] = {
            t.untyped_storage()._cdata: (-1, None) for t in model_tensors
        }
        for tensor in batch:
            self._note(tensor)

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        outputs = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(outputs):
            self._note(tensor)
        return outputs

    def _note(self, tensor: object) -> None:
        if not isinstance(tensor, torch.Tensor):
            return
        storage = tensor.untyped_storage()
        address, size, number = storage._cdata, storage.nbytes(), len(self._events)
        if address in self._live:
            return

        def on_free(_: object) -> None:
            self._events.append((number, -size))
            self._live.pop(address, None)

        self._events.append((number, size))
        self._live[address] = (number, weakref.ref(storage, on_free))

    def exclude(self, tensor: torch.Tensor) -> None:
        """Exclude a tensor from the count, from its allocation on."""
        self._excluded.add(self._live[tensor.untyped_storage()._cdata][0])

    def peak(self) -> int:
        current = peak = 0
        for number, size in self._events:
            current += 0 if number in self._excluded else size
            peak = max(peak, current)
        return peak


@contextlib.contextmanager
def _exclude_gradients(model: nn.Module, tracker: _AllocationTracker) -> Iterator[None]:
    def accumulated(parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            tracker.exclude(parameter.grad)

    hooks = [p.register_post_accumulate_grad_hook(accumulated) for p in model.parameters() if p.requires_grad]  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _loss(outputs: Any) -> torch.Tensor:
    """Return the model's own loss, else the sum of its outputs, which needs no memory."""
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    tensors = [t for t in tree_leaves(outputs) if isinstance(t, torch.Tensor) and t.requires_grad]
    return torch.stack([t.sum() for t in tensors]).sum() if tensors else torch.zeros(())


def _autocast(mode: ComputeMode) -> contextlib.AbstractContextManager[object]:
    return torch.autocast("cpu", dtype=torch.bfloat16) if mode == "autocast" else contextlib.nullcontext()


def _make_fake(model: nn.Module, dtype: torch.dtype) -> None:
    """Replace all tensors of ``model`` by fake ones, as if on the CPU; tied weights stay tied."""
    fakes: dict[int, torch.Tensor] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in fakes:
            kind = dtype if tensor.is_floating_point() else tensor.dtype
            empty = torch.empty(tensor.shape, dtype=kind, device="cpu")
            parameter = isinstance(tensor, nn.Parameter)
            fakes[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if parameter else empty
        return fakes[id(tensor)]

    originals = [*model.parameters(), *model.buffers()]  # kept alive, so that no id is reused
    for module in model.modules():
        mappings: tuple[Any, ...] = (module._parameters, module._buffers)
        for mapping in mappings:
            mapping.update({name: fake(tensor) for name, tensor in mapping.items() if tensor is not None})
    del originals


def _in_bfloat16(value: Any) -> Any:
    return value.bfloat16() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _checkpoint(model: nn.Module) -> None:
    fallback = getattr(model, "gradient_checkpointing_enable", None)
    enable = getattr(model, "activation_checkpointing_enable", fallback)
    if enable is None:
        raise Unmeasured(f"a {type(model).__name__} has no checkpointing of its activations")
    enable()
