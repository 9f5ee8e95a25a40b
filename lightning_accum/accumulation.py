"""One training run's accumulation: the policy that was asked for, and the small objects that carry it out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_accum.boundary import Boundary, Tail
from lightning_accum.denominator import Denominator, UnreadableLossError
from lightning_accum.lr_schedule import SchedulerCounts, StepClock
from lightning_accum.plan import MicroBatchSize, Plan, Split
from lightning_accum.splitting import Splitting
from lightning_accum.weight import Weigher, Weight, count_samples
from lightning_accum.window import ClosedWindow, Window


@dataclass(frozen=True)
class Policy:
    """What :class:`~lightning_accum.GradientAccumulation` was asked for; its arguments explain the fields."""

    window: int | Mapping[int, int] | None = None
    weight: Weight | Literal["auto", "equal"] = "auto"
    tail: Tail = "step"
    scheduler_counts: SchedulerCounts = "optimizer_steps"
    log: bool = True
    micro_batch: MicroBatchSize | None = None
    split: Split | None = None
    trim_padding: bool | str = True

    def size_at(self, epoch: int) -> int | None:
        """Loader batches in a window that begins in ``epoch``; None where the Trainer says."""
        if not isinstance(self.window, Mapping):
            return self.window
        return self.window[max(start for start in self.window if start <= epoch)]

    def sizes(self) -> set[int]:
        """Every size that a window can have."""
        if isinstance(self.window, Mapping):
            return set(self.window.values())
        return set() if self.window is None else {self.window}


class Accumulates:
    """What a strategy of this package is known by."""

    accumulation: Accumulation | None = None
    """The state of the running ``fit``; None outside of one, and in manual optimization."""
    policy: Policy = Policy()


class Accumulation:
    """The state of accumulation during one ``fit``.

    Args:
        policy: what was asked for.
        device: the device of this rank.
        world_size: ranks whose gradients are averaged by their reduction.
        warn: takes a warning to be seen once, on rank zero.
        splitting: how loader batches are split; None where each is a micro-batch.
    """

    def __init__(
        self,
        policy: Policy,
        device: torch.device,
        world_size: int,
        warn: Callable[[str], None],
        splitting: Splitting | None = None,
    ) -> None:
        self.policy = policy
        self.splitting = splitting
        self.world_size = world_size
        self.boundary = Boundary(policy.tail)
        self.window = Window(device, world_size)
        self.weigher = Weigher(policy.weight, warn)
        self.clock = StepClock(policy.scheduler_counts)
        self.closed: ClosedWindow | None = None
        """The last window that ended."""
        self.gradient_norm: Tensor | None = None
        """The norm of its gradient, where it was clipped by norm."""
        self.closed_loader_batches = 0
        """How many loader batches it took."""
        self.total_weight: Tensor | float = 0.0
        """The weight of all windows so far."""
        self.is_zero_grad_due = True
        """The gradients are those of an earlier window: they are cleared before the first backward of the next."""
        self.resumed_state: Mapping[str, Any] = {}
        """What the checkpoint that training goes on from says, as :meth:`state_dict` gave it."""
        self.is_boundary = False
        """The micro-batch in training_step is the last of its window."""
        self.batch: Any = None
        """The micro-batch that is in training_step."""
        self.weight: Denominator | None = 0.0
        """Its weight, once it has a loss: None for a sum."""
        self.is_weightless = False
        """The micro-batch is known on the host to have no weight."""
        self._has_loss = False
        self._warn = warn
        self._warned: set[str] = set()

    def restart(self, seen: int, into_window: int, steps: int, loader_batches: int) -> None:
        """Begin to train, or go on from a checkpoint.

        Args:
            seen: loader batches so far.
            into_window: how many of them belong to a window that has not ended.
            steps: optimizer steps so far, and
            loader_batches: what those took; a checkpoint of this package knows better.
        """
        self.discard(seen)
        self.boundary.close(seen - into_window)
        if into_window:
            self._warn(
                f"The checkpoint was taken inside a window, after {into_window} of its loader batches, and does not hold their"
                " gradients: the first optimizer step is made on the rest of the window."
            )
        state: dict[str, Any] = {"optimizer_steps": steps, "total_weight": 0.0}
        state["scheduler_time"] = steps if self.policy.scheduler_counts == "optimizer_steps" else loader_batches
        state.update(self.resumed_state)
        self.clock.optimizer_steps = int(state["optimizer_steps"])
        self.clock.time = int(state["scheduler_time"])
        self.clock.hold()
        self.total_weight = float(state["total_weight"])
        if self.splitting is not None and self.splitting.sizes is not None and "micro_batch_sizes" in state:
            self.splitting.sizes.load_state_dict(state["micro_batch_sizes"])

    # --- one loader batch -----------------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan | None:
        """How the loader batch in hand is split; None where it is a micro-batch."""
        return None if self.splitting is None else self.splitting.plan

    def is_plain(self) -> bool:
        """One micro-batch is the whole window: there is nothing to weigh, and everything is left to Lightning."""
        return self.plan is None and self.world_size == 1 and self.boundary.size == 1

    def begin_micro_batch(self, batch: Any) -> None:
        """Enter training_step."""
        self.batch, self._has_loss = batch, False

    def begin_backward(self, loss: Tensor) -> Tensor | None:
        """Take in the loss of a micro-batch.

        Args:
            loss: the module's own loss.

        Returns:
            The ``gradient`` for its backward; None for plain 1.
        """
        self._has_loss = True
        if self.is_plain():
            self._note_plain(loss)
            return None
        contribution = self.weigher(loss, self.batch)
        self.weight = contribution.weight
        self.is_weightless = not isinstance(contribution.weight, Tensor) and contribution.weight == 0
        seed = self.window.add(loss, contribution)
        if self.is_boundary:
            self.reduce()
        return seed

    def _note_plain(self, loss: Tensor) -> None:
        try:
            weight = self.weigher(loss, self.batch).weight
        except UnreadableLossError:  # whatever the loss, nothing depends on its weight here
            weight = None
        value = loss.item() if loss.device.type == "cpu" else loss.detach()  # Lightning waits for no device here
        self.closed = ClosedWindow(value, 1.0 if weight is None else weight, 1)

    def end_micro_batch(self) -> bool:
        """Leave training_step.

        Returns:
            Whether the micro-batch had a loss.
        """
        had_loss, self._has_loss, self.batch = self._has_loss, False, None
        if not had_loss:
            self.weight = 0.0
        if not had_loss and not self.is_plain():
            self.window.skip()
            if self.is_boundary:
                self.reduce()
        if not had_loss:
            self.closed = None
        return had_loss

    def reduce(self) -> None:
        """Start to sum the weights over the ranks: on all of them before the last reduction of gradients."""
        if self.splitting is not None and self.splitting.sizes is not None:
            self.window.flag = self.splitting.sizes.has_changed
        self.window.reduce()

    # --- the end of a window --------------------------------------------------------------------------------------

    def close(self, seen: int, parameters: Iterable[Tensor]) -> ClosedWindow:
        """End the window with loader batch number ``seen``: its gradients become the full batch's."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        self.closed = self.window.close(gradients)
        if self.closed.is_flagged:
            self._agree_on_sizes()
        self._end(seen)
        if self.closed.is_empty:
            self._warn_once(
                "A window ended without any weight (all labels ignored, or no loss): there is no optimizer step for it, parameters"
                " and optimizer state stay as they are."
            )
        else:
            self.total_weight = self.total_weight + self.closed.weight
        if self.closed.do_terms_disagree:
            self._warn_once(
                f"The terms of the loss are means over counts that are not proportional from micro-batch to micro-batch. All of"
                f" them take the weight of the main one ({self.weigher.criterion}); for the others a window differs from its full"
                " batch."
            )
        return self.closed

    def _agree_on_sizes(self) -> None:
        """A rank found another size of micro-batch: all take the smallest that any rank has found."""
        assert self.splitting is not None
        assert self.splitting.sizes is not None
        sizes = self.splitting.sizes.as_tensor().to(self.window.device, self.window.dtype)
        if self.world_size > 1:
            dist.all_reduce(sizes, dist.ReduceOp.MIN)
        self.splitting.sizes.agree(sizes)

    def close_plain(self, seen: int) -> None:
        """End a window that was left to Lightning."""
        self._end(seen)
        if self.closed is not None:
            self.total_weight = self.total_weight + self.closed.weight

    def _end(self, seen: int) -> None:
        # a closure that runs again (LBFGS over ranks) ends the same window again
        self.closed_loader_batches = self.boundary.position(seen) or self.closed_loader_batches
        self.boundary.close(seen)
        self.is_zero_grad_due = True

    def discard(self, seen: int) -> int:
        """Forget the unfinished window. Returns the loader batches that it had."""
        lost = self.boundary.position(seen)
        self.window.discard()
        self.closed = None
        self._end(seen)
        return lost

    def after_optimizer_step(self, has_stepped: bool) -> None:
        """Count the step for the schedulers."""
        if has_stepped:
            self.clock.tick(self.closed_loader_batches)
        else:
            self.clock.hold()

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            self._warn(message)

    # --- what is said and saved -------------------------------------------------------------------------------------

    def describe(self, batch: Any, loader_batches: int) -> str:
        """One line: what was understood."""
        samples = count_samples(batch)
        parts = [f"a window is {loader_batches} loader batch{'es' if loader_batches != 1 else ''}"]
        if self.world_size > 1:
            parts[0] += f" on each of {self.world_size} ranks"
        if samples is not None:
            total = samples * loader_batches * self.world_size
            parts[0] += f", {total} samples with loader batches like the first ({samples})"
        if self.splitting is not None:
            parts.append(f"each runs {self.splitting.describe()}")
        parts.append(f"weight: {self.weigher.criterion}")
        if self.weigher.unweighed_terms:
            parts.append(f"the same weight for: {', '.join(self.weigher.unweighed_terms)}")
        return f"GradientAccumulation: {'; '.join(parts)}."

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs to go on counting."""
        state: dict[str, Any] = {
            "optimizer_steps": self.clock.optimizer_steps,
            "scheduler_time": self.clock.time,
            "total_weight": float(self.total_weight),
        }
        if self.splitting is not None and self.splitting.sizes is not None:
            state["micro_batch_sizes"] = self.splitting.sizes.state_dict()
        return state
