"""megatron-core's model behind one module, `MegatronEngine`, whose forward runs the passes of all micro-batches."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from accel.errors import ArgumentError, StateError
from accel.parallel.megatron_core import core_of, is_initialised
from accel.pytree import collect, map_nested
from accel.state import AcceleratorState, GradientState

IGNORED = -100  # the label of tokens without a loss, as in transformers


class AbstractTrainStep:
    """The functions of a training step; a subclass is ``MegatronLMPlugin(custom_train_step_class=…)``.

    It sets ``forward_step``, which gets an iterator of micro-batches and the model, and returns the model's output and
    a function from that to the loss and a dict of losses to report. ``model_output_class``, if it has one, is called
    with ``loss`` and ``logits`` for the result of the prepared model.
    """

    forward_step: Callable[..., Any]
    model_output_class: Any = None

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def get_batch_func(self, accelerator: Any, megatron_dataset_flag: bool) -> Any:
        """Return a function from an iterator of micro-batches to the model's inputs."""

    def get_forward_step_func(self) -> Any:
        """Return the value of ``forward_step``."""

    def get_loss_func(self, accelerator: Any) -> Any:
        """Return a function from the model's output to the loss and a dict of losses to report."""


class GPTTrainStep(AbstractTrainStep):
    """The step of language models, with the plug-in's ``custom_get_batch_function`` and ``custom_loss_function``.

    Batches have ``input_ids`` and, as in transformers, ``labels`` that are not shifted (default: ``input_ids``) and an
    ``attention_mask``, whose zeros must be on the right. The loss is the mean over a micro-batch's labelled tokens.
    """

    def __init__(self, accelerator: Any = None, args: Any = None) -> None:
        super().__init__("GPTTrainStep")
        self.get_batch = _call(self.get_batch_func, accelerator, False)
        self.loss_func = _call(self.get_loss_func, accelerator)
        self.forward_step = self.get_forward_step_func()

    def get_batch_func(self, accelerator: Any, megatron_dataset_flag: bool) -> Any:
        """Return the plug-in's function, or the default one."""
        return _plugin_function("custom_get_batch_function") or language_batch

    def get_loss_func(self, accelerator: Any) -> Any:
        """Return the plug-in's function, or the default one."""
        return _plugin_function("custom_loss_function") or language_loss

    def get_forward_step_func(self) -> Any:
        """Return the step of a ``GPTModel``."""

        def forward_step(data_iterator: Iterator[Any], model: nn.Module) -> tuple[Any, Any]:
            tokens, labels, loss_mask, attention_mask, position_ids = self.get_batch(data_iterator)
            output = model(tokens, position_ids, attention_mask, labels=labels)
            return output, partial(self.loss_func, loss_mask)

        return forward_step


def language_batch(data_iterator: Iterator[Any]) -> tuple[Any, ...]:
    """Return tokens, shifted labels, the mask of labelled tokens, no attention mask, and positions."""
    batch = next(data_iterator)
    if "input_ids" not in batch:
        raise ArgumentError(
            f"model(**batch): no input_ids among {', '.join(batch)}: pass MegatronLMPlugin(custom_get_batch_function=…)"
        )
    tokens = batch["input_ids"].long()
    labels = batch.get("labels", tokens).roll(-1, 1)
    loss_mask = labels != IGNORED
    present = batch.get("attention_mask")
    if present is not None:
        if bool((present[:, 0] == 0).any()):
            raise ArgumentError("model(**batch): sequences are padded on the left: pad them on the right")
        loss_mask &= present.roll(-1, 1).bool()
    loss_mask[:, -1] = False
    inputs = {
        "tokens": tokens,
        "labels": labels.masked_fill(~loss_mask, 0),
        "loss_mask": loss_mask,
        "position_ids": torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens),
    }
    core_of("utils").get_batch_on_this_cp_rank(inputs)
    return inputs["tokens"], inputs["labels"], inputs["loss_mask"], None, inputs["position_ids"]


def language_loss(loss_mask: torch.Tensor, output: torch.Tensor) -> tuple[Any, ...]:
    """Return the mean of the losses where ``loss_mask`` is True, and what to report."""
    parallel_state = core_of("parallel_state")
    mask = loss_mask.reshape(-1).float()
    own = torch.stack([(output.float().reshape(-1) * mask).sum(), mask.sum()])
    total = own.detach().clone()
    if parallel_state.get_context_parallel_world_size() > 1:
        dist.all_reduce(total, group=parallel_state.get_context_parallel_group())
    mean = (total[0] + own[0] - own[0].detach()) / total[1].clamp(min=1)  # the value of all parts, this part's gradient
    return mean, {"lm loss": avg_losses_across_data_parallel_group([mean])[0]}


class MegatronEngine(nn.Module):
    """A model of megatron-core that is trained: the module that `Accelerator.prepare` returns.

    In training, a call runs the forward and backward passes of all micro-batches of a batch, through every stage of
    the pipeline, and returns the mean loss, on every process. The gradients stay this replica's own until
    `finish`. In evaluation, and without gradients, a call runs forward passes only.

    ``base_model``: the model inside megatron-core's ``DistributedDataParallel``.
    """

    def __init__(self, base_model: nn.Module, step: Any, micro_batches: int, output_class: Any = None) -> None:
        super().__init__()
        self.base_model: Any = base_model
        self.train_step_handler = step
        self.micro_batches = micro_batches
        self.deferred = 0  # blocks of `no_sync` that have begun
        self._output_class = getattr(step, "model_output_class", None) or output_class
        self._forward_backward = core_of("pipeline_parallel").get_forward_backward_func()
        self._tokens: torch.Tensor | None = None
        self._config: Any = core_of("utils").get_model_config(base_model)
        self._config.finalize_model_grads_func = self._hold_gradients

    @property
    def module(self) -> nn.Module:
        """The model without wrappers."""
        return innermost(self.base_model)

    def forward(self, **batch: Any) -> Any:
        """Run a batch, a dict of tensors whose rows are the samples; returns the mean loss, or the output class."""
        batches = cut(batch, self.micro_batches)
        rows, length = next(value.shape[:2] for value in batches[0].values() if isinstance(value, torch.Tensor))
        trains = self.training and torch.is_grad_enabled()
        with self._no_sync():
            reports = self._forward_backward(
                forward_step_func=self.train_step_handler.forward_step,
                data_iterator=iter(batches),
                model=[self.base_model],
                num_microbatches=len(batches),
                seq_length=length,
                micro_batch_size=rows,
                forward_only=not trains,
            )
        loss, logits = _mean_reports(reports)
        return loss if self._output_class is None else self._output_class(loss=loss, logits=logits)

    def _no_sync(self) -> AbstractContextManager[None]:
        """Return the block of the passes, in which only the last one of a window reduces gradients."""
        if GradientState().sync_gradients and not self.deferred:
            self._config.no_sync_func = self.base_model.no_sync
            return nullcontext()
        self._config.no_sync_func = None  # its end would switch the outer block off
        block: AbstractContextManager[None] = self.base_model.no_sync()
        return block

    def _hold_gradients(self, model: Any, num_tokens: torch.Tensor | None = None, **kwargs: Any) -> None:
        """Keep the number of tokens for `finish`, which megatron-core's schedule would call here."""
        if num_tokens is not None:
            self._tokens = num_tokens if self._tokens is None else self._tokens + num_tokens

    def finish(self, length: int) -> None:
        """Reduce the gradients of a window of ``length`` batches over all processes, and divide them by its length."""
        tokens, self._tokens = self._tokens, None
        core_of("distributed").finalize_model_grads([self.base_model], tokens)
        if tokens is None and length > 1:
            self.base_model.scale_gradients(1 / length)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, which megatron-core has in buffers."""
        self.base_model.zero_grad_buffer()
        self._tokens = None


def output_class(model: nn.Module) -> Any:
    """Return the class of results of a script that was written for a model of transformers; else None."""
    if not getattr(getattr(model, "config", None), "return_dict", False):
        return None
    from transformers.modeling_outputs import CausalLMOutput

    return CausalLMOutput


def innermost(model: Any) -> nn.Module:
    """Return the model inside megatron-core's wrappers."""
    while "module" in model._modules:
        model = model.module
    inner: nn.Module = model
    return inner


def cut(batch: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """Return ``batch`` in ``count`` micro-batches of equal size, or in more if its rows are no multiple of ``count``.

    Values that are no tensors are in all of them. Raises `ArgumentError` for a batch without rows.
    """
    leaves: list[Any] = []
    collect(batch, leaves)
    rows = {len(leaf) for leaf in leaves if _has_rows(leaf)}
    if len(rows) != 1 or 0 in rows:
        raise ArgumentError(f"model(**batch): tensors must have as many rows, at least one, not {sorted(rows)}")
    (number,) = rows
    count = next((parts for parts in range(count, number) if number % parts == 0), number)
    size = number // count

    def part(start: int, value: Any) -> Any:
        return value[start : start + size] if _has_rows(value) else value

    return [map_nested(partial(part, start), batch) for start in range(0, number, size)]


def _has_rows(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim > 0


def _mean_reports(reports: Sequence[dict[str, Any]]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the sum of the reported losses, each a mean of the micro-batches, and the logits on the last stage."""
    parallel_state = core_of("parallel_state")
    loss = torch.zeros((), device=AcceleratorState().device)
    logits = None
    if reports:
        for name in reports[0]:
            values = [report[name].detach() for report in reports]
            if name == "logits":
                logits = torch.cat(values)
            elif values[0].ndim == 0:
                loss += torch.stack(values).float().mean()
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        group = parallel_state.get_pipeline_model_parallel_group()
        dist.broadcast(loss, parallel_state.get_pipeline_model_parallel_last_rank(), group=group)
    return loss, logits


def _plugin_function(name: str) -> Callable[..., Any] | None:
    function: Callable[..., Any] | None = getattr(AcceleratorState().megatron_lm_plugin, name, None)
    return function


def _call(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a method that a script may have written with fewer parameters, as Accelerate's documentation does."""
    return function(*arguments[: len(inspect.signature(function).parameters)])


def avg_losses_across_data_parallel_group(losses: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the mean of each of ``losses`` over the processes with different data. All of those must call it."""
    group = _data_group("avg_losses_across_data_parallel_group")
    means = torch.cat([loss.detach().clone().view(1) for loss in losses])
    dist.all_reduce(means, group=group)
    return means / dist.get_world_size(group)


def gather_across_data_parallel_groups(tensor: Any) -> Any:
    """Concatenate each tensor in ``tensor``, which may be nested, over the processes with different data."""
    group = _data_group("gather_across_data_parallel_groups")

    def gather_one(part: torch.Tensor) -> torch.Tensor:
        part = part.reshape(1) if part.ndim == 0 else part.contiguous()
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, part, group=group)
        return torch.cat(parts)

    return map_nested(gather_one, tensor)


def _data_group(caller: str) -> Any:
    if not is_initialised():
        raise StateError(f"{caller} needs a run that trains a model of megatron-core")
    return core_of("parallel_state").get_data_parallel_group()
