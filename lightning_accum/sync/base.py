"""The base of every engine's reduction of gradients."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_accum.micro_batch import MicroBatch
from lightning_accum.undo import replacing
from lightning_accum.weighing.safeguards import gradients_of_zero

SyncPolicy: TypeAlias = Literal["window", "micro_batch", "shard"]
"""When gradients are reduced over the ranks; ``"shard"`` only by FSDP2."""
NOTHING_AROUND = nullcontext()


class GradientSync:
    """Controls when gradients are reduced over the ranks. This base class is for one rank, and reduces nothing."""

    is_waited_for_in_forward = False
    """Whether each forward and backward of a micro-batch waits for the other ranks."""
    can_forget_forward = True  # whether a forward may fail half-way
    notes_parameters = False  # notes those that a backward has reached, even one outside of micro-batches
    is_reduced_inside = False  # the gradients of an unfinished window are averaged over the ranks already

    @property
    def is_recording_graph(self) -> bool:
        """Whether gradients must be reduced in the next forward and backward."""
        return False

    def blocked(self, micro_batch: MicroBatch) -> AbstractContextManager[Any]:
        """The context of a micro-batch that is not the last of its window, without reduction."""
        return NOTHING_AROUND

    def forward(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run ``step``, a forward with a loss, inside the engine's preparation of the reduction."""
        return step(*args, **kwargs)

    def forward_without_batch(self) -> None:
        """Take part in the other ranks' forward."""

    def backward_without_loss(self) -> None:
        """Take part in the other ranks' backward, adding nothing."""

    def begin_backward(self, micro_batch: MicroBatch, loss: Tensor) -> None:
        """Called before the backward of a micro-batch."""

    def complete_reduction(self, micro_batch: MicroBatch) -> None:
        """Called after a backward, perhaps the last of a window."""

    def reduce_accumulated(self) -> None:
        """Average the gradients of a window that ended before any micro-batch was known to be its last. On all ranks."""

    def without_weight(self, loss: Tensor, micro_batch: MicroBatch) -> AbstractContextManager[None]:
        """The context of the backward of a loss without weight."""
        return gradients_of_zero(loss)

    def drop_accumulated(self) -> None:
        """Prepare to drop the accumulated gradients. Called on all ranks."""

    def reduce_for_checkpoint(self) -> None:
        """Move the gradients to where a checkpoint finds them. Called on all ranks."""

    def note_gradients(self) -> None:
        """Called after the gradients of an unfinished window were restored."""

    def end_window(self) -> None:
        """Called on all ranks at the end of a window, before its gradients are scaled; they are averaged here at the latest."""

    def accumulated(self, parameters: Iterable[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
        """The gradients of these parameters that are not reduced yet."""
        return {own: own.grad for own in parameters if own.requires_grad and own.grad is not None}

    def restore_accumulated(self, parameters: Iterable[nn.Parameter], kept: Mapping[nn.Parameter, Tensor]) -> None:
        """Restore the gradients from ``kept``, copies of :meth:`accumulated` before a backward."""
        put_gradients((parameter for parameter in parameters if parameter.requires_grad), kept)

    def gradients_of(
        self, loss: Tensor, share: float, parameters: Sequence[nn.Parameter], keeps_graph: bool = False
    ) -> Sequence[Tensor | None]:
        """The gradients of ``share`` times a loss that is in no window, as these parameters receive them. They are not added to
        ``.grad``.

        For a sharded module: this rank's shards of the mean over the ranks. Called on all ranks.
        """
        if self.notes_parameters or self.is_recording_graph:
            start = torch.full_like(loss, share)
            return torch.autograd.grad(loss, parameters, start, retain_graph=keeps_graph, allow_unused=True)
        return gradients_in_place(loss, share, parameters, keeps_graph)

    def reshard(self) -> None:
        """Restore the optimizer's parameters in the module, if an engine replaces them between steps."""

    def forget_forward(self) -> None:
        """Forget a forward that will have no backward."""


class WrappedSync(GradientSync):
    """An engine that prepares its reduction in its own forward, which all ranks must run.

    If this rank has no loss, a replacement waits for :meth:`backward_without_loss`.
    """

    _stand_in: Tensor | None = None  # the replacement of a missing loss, as returned by the engine

    @abstractmethod
    def _run_in_engine(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run ``step`` inside the engine's forward."""

    @abstractmethod
    def _loss_without_batch(self) -> Tensor | None:
        """The replacement of a missing loss; None if no rank waits for its backward."""

    @override
    def forward(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        def or_stand_in(*args: Any, **kwargs: Any) -> Any:
            output = step(*args, **kwargs)
            if output is None:
                output = self._stand_in = self._loss_without_batch()
            return output

        self._stand_in = None
        output = self._run_in_engine(or_stand_in, *args, **kwargs)
        if self._stand_in is None:
            return output
        self._stand_in = output
        return None

    @override
    def forward_without_batch(self) -> None:
        self.forward(lambda: None)


def gradients_in_place(
    loss: Tensor, share: float, parameters: Sequence[nn.Parameter], keeps_graph: bool = False
) -> Sequence[Tensor | None]:
    """The gradients of ``share`` times a loss for these parameters, computed by a backward; ``.grad`` is restored.

    Post-accumulate hooks do not run, since they would take an optimizer step, or add to the sums of a window.
    """
    hooks = [own for parameter in parameters if (own := getattr(parameter, "_post_accumulate_grad_hooks", None))]
    kept = [dict(own) for own in hooks]
    for own in hooks:
        own.clear()
    try:
        with gradients_set_aside(parameters):
            torch.autograd.backward(loss, torch.full_like(loss, share), retain_graph=keeps_graph)
            return [parameter.grad for parameter in parameters]
    finally:
        for own, of_own in zip(hooks, kept, strict=True):
            own.update(of_own)


@contextmanager
def gradients_set_aside(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Inside, parameters have no gradients; afterwards they have the gradients of the window again."""
    kept = {parameter: parameter.grad for parameter in parameters}
    put_gradients(kept, {})
    try:
        yield
    finally:
        put_gradients(kept, kept)


def put_gradients(parameters: Iterable[nn.Parameter], gradients: Mapping[nn.Parameter, Tensor | None]) -> None:
    """Give parameters their gradients; None to others."""
    for parameter in parameters:
        parameter.grad = gradients.get(parameter)


def forward_replaced(module: nn.Module, function: Callable[..., Any]) -> ExitStack:
    """Have the next call of ``module`` run ``function``, which may itself call ``module.forward``."""

    def once(*args: Any, **kwargs: Any) -> Any:
        stack.close()
        return function(*args, **kwargs)

    stack = ExitStack()
    stack.enter_context(replacing(module, forward=once))
    return stack
