"""What every engine's reduction of gradients has in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_accum.micro_batch import MicroBatch
from lightning_accum.weighing.safeguards import gradients_of_zero

SyncPolicy: TypeAlias = Literal["window", "micro_batch"]
ShardedSyncPolicy: TypeAlias = Literal["window", "micro_batch", "shard"]


class GradientSync:
    """When gradients are reduced over the ranks, and how this one takes part in that. This one is for one rank: never."""

    is_waited_for_in_forward = False
    """The forward and backward of a micro-batch wait for those of the other ranks, whether gradients are reduced or not."""
    can_forget_forward = True  # a forward may fail half-way, and others follow
    is_reduced_inside = False  # the gradients of an unfinished window are averaged over the ranks already

    @property
    def is_recording_graph(self) -> bool:
        """The next forward and backward are reduced, wherever they are in a window."""
        return False

    def blocked(self, micro_batch: MicroBatch) -> AbstractContextManager[Any]:
        """A micro-batch that is not the last of its window: no reduction in its forward and backward."""
        return nullcontext()

    def forward(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run ``step``, a forward with a loss, where the engine prepares its reduction."""
        return step(*args, **kwargs)

    def forward_without_batch(self) -> None:
        """Take part in the other ranks' forward."""

    def backward_without_loss(self) -> None:
        """Take part in the other ranks' backward, adding nothing."""

    def begin_backward(self, micro_batch: MicroBatch, loss: Tensor) -> None:
        """A micro-batch has a loss, and its backward is next."""

    def complete_reduction(self, micro_batch: MicroBatch) -> None:
        """A backward is done, maybe the last of a window."""

    def reduce_accumulated(self) -> None:
        """Reduce what was accumulated without reduction. On all ranks together."""

    def without_weight(self, loss: Tensor, micro_batch: MicroBatch) -> AbstractContextManager[None]:
        """The backward of a loss without weight."""
        return gradients_of_zero(loss)

    def drop_accumulated(self) -> None:
        """What was accumulated is about to be dropped. On all ranks together."""

    def reduce_for_checkpoint(self) -> None:
        """Have the gradients where a checkpoint finds them. On all ranks together."""

    def note_gradients(self) -> None:
        """The gradients of an unfinished window were put back."""

    def end_window(self) -> None:
        """The gradients of a window are reduced."""

    def accumulated(self, parameters: Iterable[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
        """The gradients of these parameters that are not reduced yet."""
        return {own: own.grad for own in parameters if own.requires_grad and own.grad is not None}

    def restore_accumulated(self, parameters: Iterable[nn.Parameter], kept: Mapping[nn.Parameter, Tensor]) -> None:
        """Have the gradients be ``kept``, copies of what :meth:`accumulated` gave before a backward."""
        for parameter in parameters:
            if parameter.requires_grad:
                parameter.grad = kept.get(parameter)

    def gradients_of(
        self, loss: Tensor, share: float, parameters: Sequence[nn.Parameter], keeps_graph: bool = False
    ) -> Sequence[Tensor | None]:
        """The gradients of ``share`` times a loss that is in no window; None for a share of 0. They are added to nothing.

        A sharded module gives out this rank's parts of their mean over the ranks, and is called on all of them.
        """
        found = torch.autograd.grad(loss, parameters, torch.full_like(loss, share), retain_graph=keeps_graph, allow_unused=True)
        return found if share else [None] * len(found)  # NaN * 0 is NaN

    def reshard(self) -> None:
        """Have the module's parameters be those of the optimizer, if others are in their place between steps."""

    def forget_forward(self) -> None:
        """There will be no backward for what ran forward."""


class WrappedSync(GradientSync):
    """An engine that prepares its reduction in a forward of its own, which all ranks run.

    Where this rank has no loss, another stands in for it, and waits for :meth:`backward_without_loss`.
    """

    _stand_in: Tensor | None = None  # the loss in the place of one that is missing, as the engine returned it

    @abstractmethod
    def _run_in_engine(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run ``step`` inside the engine's forward."""

    @abstractmethod
    def _loss_without_batch(self) -> Tensor | None:
        """A loss that stands in for a missing one; None if no rank waits for its backward."""

    def _forward_or_stand_in(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        def or_stand_in(*args: Any, **kwargs: Any) -> Any:
            """The loss of the step, or what stands in for it."""
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
    """What the backward of ``share`` times a loss leaves in the gradients of these parameters, which are as before after it.

    Hooks after the accumulation of a gradient do not run: they step, or add it to the sums of a window.
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
    """Inside, no parameter has a gradient at first, so a step that makes or clears gradients does not touch the window's."""
    kept = [(parameter, parameter.grad) for parameter in parameters]
    for parameter, _ in kept:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in kept:
            parameter.grad = gradient


@contextmanager
def forward_replaced(module: nn.Module, function: Callable[..., Any]) -> Iterator[None]:
    """Have the next call of ``module`` run ``function``, which may itself call ``module.forward``."""
    own = vars(module)
    original = {name: own[name] for name in ("forward",) if name in own}

    def once(*args: Any, **kwargs: Any) -> Any:
        """The next call."""
        own.pop("forward")
        own.update(original)
        return function(*args, **kwargs)

    own["forward"] = once
    try:
        yield
    finally:
        own.pop("forward", None)
        own.update(original)
