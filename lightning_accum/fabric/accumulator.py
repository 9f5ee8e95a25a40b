"""Accumulator: windows in a hand-written loop."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn

from lightning_accum.accumulation import Accumulation
from lightning_accum.boundary import Tail
from lightning_accum.check import MOST_BATCHES
from lightning_accum.errors import ArgumentError
from lightning_accum.exclusions import refuse
from lightning_accum.fabric.loop import Loop
from lightning_accum.fabric.passes import LoopMessages
from lightning_accum.fabric.training import Fabric, LossOf, Training
from lightning_accum.nonfinite import Guard
from lightning_accum.parameter_changes import KeptGradients
from lightning_accum.policy import OnNonfinite, Policy, Split, Tokens, WindowSize, checked_policy, row_wise_fields
from lightning_accum.session import Session
from lightning_accum.verdict import Verdict
from lightning_accum.weighing.advice import of_unchecked
from lightning_accum.weighing.counts import Weight
from lightning_accum.weighing.safeguards import warn_of_batch_norm, warn_of_hooks
from lightning_accum.whole.row_proof import unproven
from lightning_accum.whole.row_wise import row_wise_of

_log = logging.getLogger("lightning.fabric.accumulation")

_NOT_IN_A_LOOP = {
    "auto": 'micro_batch="auto" runs a batch again if memory runs out, and cannot run your loop again. Give a number of samples'
    " or Tokens(...); or train a LightningModule with GradientAccumulation.",
    "offload": 'micro_batch="offload" is not for hand-written loops: run the forward and backward of each batch in'
    " torch.autograd.graph.save_on_cpu(pin_memory=True), and leave micro_batch out.",
}


class Accumulator(Loop):
    """Accumulates gradients over windows in a hand-written loop, so that each window takes the step of one batch.

    It yields the micro-batches of a loader, defers the reduction over ranks to the end of a window, and divides the gradients once,
    by the sum of the denominators of the losses. So the loop divides nothing, and counts nothing.

    Args:
        fabric: a ``lightning.fabric.Fabric`` on one device, with ``"ddp"``, or with ``ModelParallelStrategy`` (FSDP2). None for
            plain torch on one device, or with a model in DistributedDataParallel.
        model: the model that the loop calls, after ``fabric.setup``.
        optimizer: its optimizer, after ``fabric.setup``.
        window: loader batches in a window, on every rank; see :class:`~lightning_accum.GradientAccumulation` for more forms, and
            for the arguments below.
        micro_batch: the size of the micro-batches that each loader batch is split into.
        row_wise: submodules that run in micro-batches of that size, while the loss sees the loader's batch.
        weight: the weight of a micro-batch.
        tail: what the end of the data does to an unfinished window. With ``"carry"`` it continues in the next pass over the data;
            the pass with ``is_last=True`` steps it.
        accumulate_dtype: the type in which gradients are summed.
        on_nonfinite: what to do with a micro-batch whose loss or gradient is not finite. ``"skip"`` leaves it out of the model and
            the window.
        trim_padding: whether to trim the padding of split batches. Needs ``loss_of``, for the check before.
        split: splits loader batches that are not containers of tensors with one entry a sample.
        loss_of: a function ``loss_of(model, batch)`` that returns the loss of a batch, for the check of the first batches. The loop
            need not call it.
        check: whether to find parameters that change inside a window; and, with ``loss_of``, to check on a few rows of the first
            batches that parts add up to the whole.
        log: whether to print the start line at the first micro-batch, on rank zero.

    Raises:
        ValueError: an argument is out of its range, or two exclude each other, or the set-up of the model is not supported. In the
            loop, before the first step: the losses of micro-batches do not add up to the loss of their batch.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> accumulator = Accumulator(None, model, torch.optim.SGD(model.parameters(), lr=0.1), window=2, log=False)
        >>> for inputs, target in accumulator([(torch.ones(n, 2), torch.zeros(n, 1)) for n in (1, 3, 2)]):
        ...     accumulator.backward(nn.functional.mse_loss(model(inputs), target))
        ...     if accumulator.step(clip_norm=1.0):
        ...         print(accumulator.optimizer_steps, accumulator.window_weight)
        1 4.0
        2 2.0
    """

    def __init__(
        self,
        fabric: Fabric | None,
        model: nn.Module,
        optimizer: Any,
        window: WindowSize = 1,
        *,
        micro_batch: int | Tokens | None = None,
        row_wise: str | Sequence[str] | None = None,
        weight: Literal["auto", "equal"] | Weight | Sequence[Weight] = "auto",
        tail: Tail = "step",
        accumulate_dtype: torch.dtype | None = None,
        on_nonfinite: OnNonfinite = "propagate",
        trim_padding: bool | str = True,
        split: Split | None = None,
        loss_of: LossOf | None = None,
        check: bool = True,
        log: bool = True,
    ) -> None:
        if isinstance(micro_batch, str) and micro_batch in _NOT_IN_A_LOOP:
            raise ArgumentError(_NOT_IN_A_LOOP[micro_batch])
        self._messages = messages = LoopMessages("the loss function" if loss_of is None else "loss_of")
        with messages:
            self.policy = policy = checked_policy(
                Policy(
                    1 if window is None else window,
                    weight,  # type: ignore[arg-type]  # a sequence becomes a tuple
                    tail,
                    log=log,
                    micro_batch=None if row_wise is not None else micro_batch,
                    split=split,
                    trim_padding=trim_padding,
                    accumulate_dtype=accumulate_dtype,
                    on_nonfinite=on_nonfinite,
                    check=check,
                    **row_wise_fields(row_wise, micro_batch),
                )
            )
            self._training = training = Training(fabric, model, optimizer, loss_of, self._refuse_step)
            refuse(training.asked(policy))
            splitting, sums = self._splitting(), training.make_sync(policy)
            layers = row_wise_of(policy, training.module, training.ranks, training.is_sharded)
            accumulation = Accumulation(policy, training.ranks, messages.rank_zero_warn, splitting, sums, layers)
        if loss_of is None and accumulation.row_wise is not None and accumulation.row_wise.proofs_left:
            messages.rank_zero_warn(unproven(accumulation.row_wise, "pass loss_of="))
        guard = None
        if on_nonfinite != "propagate":
            where = lambda: f"Loader batch {self._seen + 1} of rank {training.ranks.rank}, counted from 1,"  # noqa: E731
            guard = Guard(training, sums or training.sync, on_nonfinite == "skip", where, _log.info, messages.warn)
        self._accumulation, self._session = accumulation, Session(training, accumulation, guard, self._announce)
        is_long, is_split = policy.may_be_longer_than_one(1), policy.micro_batch is not None  # row-wise batches are not split
        if is_long or is_split or training.ranks.size > 1:
            reason = 'weight="equal"' if weight == "equal" else "pass loss_of=" if loss_of is None else None
            if policy.check:
                accumulation.check.begin(MOST_BATCHES, reason)
            if policy.check and loss_of is None and weight != "equal":
                messages.rank_zero_warn(of_unchecked(Verdict(None, seen="pass loss_of="), is_manual=True))
            warn_of_hooks(training.module, messages.rank_zero_warn, is_checked=accumulation.check.batches_left > 0)
        warn_of_batch_norm(training.module, is_split, is_long, messages.rank_zero_warn)
        self._kept = KeptGradients()

    @property
    def window_loss(self) -> float:
        """The full-batch loss of the last window; NaN if it had no weight, and before the first."""
        closed = self._accumulation.closed
        return math.nan if closed is None else float(closed.loss)

    @property
    def window_weight(self) -> float:
        """The total weight of the last window, over all ranks: tokens, samples, elements; 1 for a summed loss."""
        closed = self._accumulation.closed
        return 0.0 if closed is None else float(closed.weight)

    @property
    def total_weight(self) -> float:
        """The weight of all windows so far."""
        return float(self._accumulation.total_weight)

    @property
    def optimizer_steps(self) -> int:
        """Steps of the optimizer so far."""
        return self._accumulation.clock.optimizer_steps

    @property
    def skipped_micro_batches(self) -> int:
        """Micro-batches that ``on_nonfinite="skip"`` has left out so far, over all ranks."""
        return self._accumulation.total_left_out

    def state_dict(self) -> dict[str, Any]:
        """The state to save with the states of model and optimizer, including gradients inside a window. Call it on all ranks.

        Raises:
            RuntimeError: a window has ended, and ``step`` was not called yet.
        """
        self._refuse_unfinished()
        self._refuse_changes()
        own = self._accumulation.state_dict()
        window = self._accumulation.partial_window(self._training, int(self._size(1)))
        if window is not None:
            own["window"] = window.state_dict()
        return {"passes": self.passes, "loader_batches": self.loader_batches, "accumulation": own}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume from a checkpoint, after the model and the optimizer are restored. Call it on all ranks.

        The loader has to resume, too: if it yields the same batches again, ``accumulator(loader, skip=accumulator.loader_batches)``
        skips those that are done.

        Raises:
            ValueError: another version of the package has written it, or the unfinished window belongs to another model.
        """
        if self._pass is not None:
            self._pass.close()
        if missing := {"passes", "loader_batches", "accumulation"} - set(state_dict):
            raise ArgumentError(f"This is not the state of an Accumulator: it lacks {', '.join(sorted(missing))}")
        accumulation, self._is_backward_done = self._accumulation, False
        self.discard()
        self.passes, self.loader_batches = state_dict["passes"], state_dict["loader_batches"]
        accumulation.begin_epoch(self.passes)
        with self._messages:
            window = accumulation.restart(state_dict["accumulation"], self._seen, 0, 0, int(self._size(1)))
            if window is not None and any(loss.weighed and not loss.gradients for loss in window.losses):
                raise ArgumentError("This state lacks the gradients of a window. Load the state of rank 0 on all ranks.")
            accumulation.restore(window, self._training)
            if window is not None:
                self._keep_gradients()
