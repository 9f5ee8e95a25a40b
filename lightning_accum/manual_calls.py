"""Compares the calls of a manual ``training_step`` between loader batches and between ranks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_accum.errors import UsageError
from lightning_accum.prove import apart, sample
from lightning_accum.ranks import Ranks, have_all_left
from lightning_accum.sync.base import gradients_in_place
from lightning_accum.trial import PATIENCE
from lightning_accum.user_warnings import users_line

Gradients: TypeAlias = Mapping[nn.Parameter, Tensor]
_SAMPLED = 2**12  # elements compared in a gradient
_SAME_CALLS = (
    "All ranks must make the same calls of manual_backward and step: a rank without a loss passes a loss of 0 that depends on "
    "the parameters. With automatic optimization a rank may return None."
)


@dataclass
class TriedStep:
    """What a ``training_step`` does in a trial."""

    given: Sequence[Gradients] = ()  # what its backwards leave in .grad, if not their own gradients
    losses: list[Tensor] = field(default_factory=list)
    gradients: list[Gradients] = field(default_factory=list)  # of each loss
    stepped: list[dict[int, Tensor]] = field(default_factory=list)  # .grad in each call of an optimizer's step, and its numbers
    moves: bool = False  # a step changes parameters a little

    def backward(self, loss: Tensor, parameters: Sequence[nn.Parameter]) -> None:
        """Add the gradients of a loss to ``.grad``."""
        number = len(self.losses)
        if number < len(self.given):
            gradients = self.given[number]
        else:
            found = gradients_in_place(loss, 1.0, parameters, keeps_graph=True)
            gradients = {own: gradient for own, gradient in zip(parameters, found, strict=True) if gradient is not None}
        self.losses.append(loss)
        self.gradients.append(gradients)
        for own, gradient in gradients.items():
            own.grad = gradient.clone() if own.grad is None else own.grad + gradient

    def step(self, optimizer: Optimizer) -> None:
        """Note the gradients with which an optimizer would step, and its learning rate and other numbers."""
        parameters = [own for group in optimizer.param_groups for own in group["params"]]
        self.stepped.append({at: sample(own.grad.clone(), _SAMPLED) for at, own in enumerate(parameters) if own.grad is not None})
        numbers = [float(value) for group in optimizer.param_groups for value in group.values() if isinstance(value, (int, float))]
        self.stepped.append({0: torch.tensor(numbers)})
        if self.moves:
            with torch.no_grad():
                for own in parameters:
                    own.mul_(1.01).add_(0.01)

    def difference(self, other: TriedStep) -> float:
        """The relative difference of the gradients in the calls of ``step`` in both trials."""
        if len(self.stepped) != len(other.stepped):
            return math.inf
        return max((apart(one, [two]) or 0.0 for one, two in zip(self.stepped, other.stepped, strict=True)), default=0.0)


@dataclass
class ManualMicroBatch:
    """The loader batch that ``training_step`` runs on."""

    batch: Any = None
    defers_steps: bool = False  # steps of optimizers and schedulers are deferred, since it does not end its window
    is_running: bool = False  # training_step is running
    next_call: int = 0  # the number of its next backward call
    stepped: list[str] = field(default_factory=list)  # the optimizers whose step it has called
    versions: list[int] = field(default_factory=list)  # of the parameters before it
    before: dict[nn.Parameter, Tensor] | None = None  # the .grad before its first backward
    given: set[nn.Parameter] = field(default_factory=set)  # parameters with gradients of its backwards
    begun: float = field(default_factory=time.monotonic)  # when it entered training_step

    def warn_of_others(self, stepped: list[str], calls: int, warn: Callable[[str], None]) -> None:
        """Warn if its ``training_step`` did not call the same steps and backwards as the first of the window."""
        if self.stepped != stepped and self.next_call:
            warn(
                f"training_step stepped {', '.join(self.stepped) or 'nothing'} in a micro-batch of a window, and "
                f"{', '.join(stepped) or 'nothing'} in the first. Only the steps of the last micro-batch are taken. Do steps "
                "depend on batch_idx or on the loss, or does the module accumulate gradients itself?"
            )
        if self.next_call != calls:
            warn(
                f"training_step called manual_backward {calls} times in the first micro-batch of a window, and {self.next_call} "
                "times in another. A window combines the first calls of all micro-batches, then the second calls, and equals its "
                "full batch only if all micro-batches make the same calls. Does their number depend on batch_idx, or does "
                "training_step return early?"
            )

    def compare_places(self, ranks: Ranks, is_end: bool) -> None:
        """Raise, on all ranks, if they are at different places in the ``training_step`` that ends a window, or ended otherwise."""
        if ranks.size == 1:
            return
        line, left = ("", ", and left training_step") if is_end else (f" ({users_line()})", "")
        stepped = ", ".join(self.stepped) or "nothing"
        where = f"has called manual_backward {self.next_call} times{line}, stepped {stepped}{left}"
        code = crc32(f"{self.next_call} {self.stepped} {is_end}".encode()) & 0xFFFFFF  # exact in any type
        most, fewest = ranks.largest(code, -code)
        if most != -fewest:
            places = [f"rank {rank} {place}" for rank, place in enumerate(ranks.gather(where))]
            raise UsageError(
                f"The ranks are at different places in the training_step that ends a window: {'; '.join(places)}. {_SAME_CALLS}"
            )

    def wait_for_others(self, ranks: Ranks, most_calls: int) -> None:
        """Leave ``training_step`` together, if each backward waits for the other ranks. Called on each rank that gets here.

        Raise if this rank has called backward less often than before (``most_calls``), and others are still in training_step.
        """
        may_be_early = self.next_call < most_calls or not most_calls
        if not have_all_left(may_be_early, PATIENCE + 10 * (time.monotonic() - self.begun)):
            raise UsageError(
                f"Rank {ranks.rank} has called manual_backward {self.next_call} times and left training_step, while another "
                f"rank is still in it and waits for this one. {_SAME_CALLS}"
            )


def check_batches(ranks: Ranks, has_batch: bool) -> None:
    """Raise, on all ranks, if some have a batch that reduces gradients and others have none, for which they would wait."""
    some_have, some_lack = ranks.largest(has_batch, not has_batch)
    if some_have and some_lack:
        has, others = ("has", "another lacks it") if has_batch else ("lacks", "others have it")
        raise UsageError(
            f"Rank {ranks.rank} {has} a loader batch, and {others}: a loader has yielded None, or ends. With "
            "automatic_optimization=False training_step itself reduces gradients and steps, on all ranks or on none: have the "
            "loaders yield equally many batches and no None, or use automatic optimization."
        )
