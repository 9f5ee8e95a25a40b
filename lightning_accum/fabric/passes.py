"""The passes of a hand-written loop over its data: micro-batches and ends of windows, the same number on every rank."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, suppress
from itertools import islice
from types import TracebackType
from typing import Any, cast

from torch import Tensor
from torch.utils.data import IterableDataset
from typing_extensions import override

from lightning_accum.accumulation import Accumulation
from lightning_accum.counting import count_window
from lightning_accum.errors import AccumulationError, ArgumentError, UsageError
from lightning_accum.fabric.training import Training
from lightning_accum.later_terms import check_loader_batch
from lightning_accum.looks import Checked
from lightning_accum.micro_batch import MicroBatch, Weighed
from lightning_accum.parameter_changes import ONCE_A_WINDOW
from lightning_accum.policy import Policy
from lightning_accum.ranks import LoaderBatches, of_all_ranks
from lightning_accum.session import Session
from lightning_accum.splitting.plan import Splitting
from lightning_accum.start_line import start_line
from lightning_accum.user_warnings import rank_zero_warn, warn
from lightning_accum.whole.row_proof import prove_row_wise

Part = tuple[MicroBatch, bool]  # a micro-batch, and whether it ends its window


class Passes:
    """Draws loader batches, splits them, and checks the first ones."""

    policy: Policy
    _training: Training
    _accumulation: Accumulation
    _session: Session
    _messages: LoopMessages
    _samples: frozenset[int] = frozenset()  # the batch sizes of the loader; empty if unknown
    _length = math.inf
    _seen = 0  # loader batches that are done, over all passes
    passes = 0
    """The number of passes over the data that are done."""
    loader_batches = 0
    """Loader batches of the current pass that are done; 0 between passes."""

    def _splitting(self) -> Splitting | None:
        """How loader batches are split; None if each is a micro-batch."""
        policy = self.policy
        if policy.micro_batch is None:
            return None
        may_trim = self._training.loss_of is not None and not self._training.is_sharded
        if isinstance(policy.trim_padding, str) and not may_trim:
            raise ArgumentError(f"trim_padding={policy.trim_padding!r} needs loss_of=, and a model that is not sharded.")
        trim, warn = policy.trim_padding and may_trim, self._messages.rank_zero_warn
        step = cast("Callable[[Any], Tensor]", self._training.loss_of)  # without it nothing is trimmed
        return Splitting(policy, self._training, trim, warn, lambda: self._samples, step)

    def _micro_batches(self, loader: Iterable[Any], skip: int, is_last: bool) -> Iterator[Part]:
        """One pass, without its first ``skip`` loader batches. If it ``is_last``, ``tail="carry"`` also ends the window."""
        accumulation, boundary = self._accumulation, self._accumulation.boundary
        size = getattr(loader, "batch_size", None)
        self._samples = frozenset((size,)) if isinstance(size, int) else frozenset()
        self.loader_batches, ends_data = skip, False
        accumulation.begin_epoch(self.passes)
        ranks, self._length = self._training.ranks, _length_of(loader)
        (longest,) = ranks.largest(self._length)
        batches = LoaderBatches(of_all_ranks(loader, int(longest) if longest < math.inf else None, ranks))
        accumulation.rest_of_window = lambda: batches.draw_ahead(boundary.left(self._seen + 1))
        for batch, ends_data, is_shadow, _ in islice(batches, skip, None):
            accumulation.is_shadow_batch = is_shadow
            boundary.begin(self._size)
            is_cut = ends_data and boundary.is_cut_by_the_end(self._seen + 1, is_last, boundary.size)
            ends_window = is_cut or self._seen + 1 >= boundary.ends_at
            self._begin_loader_batch(batch)
            yield from self._parts(batch, ends_window, is_shadow)
        self.passes, self.loader_batches = self.passes + 1, 0
        lost = boundary.position(self._seen)
        if lost > 0 and not ends_data and boundary.is_cut_by_the_end(self._seen, is_last, boundary.size):
            found = f"The loader gave fewer batches than its length of {self._length}: {lost} are in a window that never ended"
            raise UsageError(f"{found}. Correct its __len__, or pass iter(loader), which has no length.")

    def _begin_loader_batch(self, batch: Any) -> None:
        """Plan how it is split, and check it or count its window, if that is due."""
        accumulation, training, loss_of = self._accumulation, self._training, self._training.loss_of
        if accumulation.splitting is not None:
            accumulation.splitting.begin(batch)
        row_wise, batches = accumulation.row_wise, [] if batch is None else [batch]
        if row_wise is not None and row_wise.proofs_left and loss_of is not None:
            warn, position = self._messages.rank_zero_warn, accumulation.position
            prove_row_wise(training, row_wise, loss_of, batches, self._samples, warn, position)
        if loss_of is not None and ((is_again := accumulation.take_look()) or accumulation.check.batches_left):
            is_long = self.policy.may_be_longer_than_one(1)
            may_count = self.policy.may_count_first(is_long)
            checked = Checked(training, loss_of, accumulation, self._samples, is_long, self._say, may_count)
            check_loader_batch(checked, batch, self.transferred, is_again)
        if accumulation.window.counted is not None:
            count_window(accumulation, self, batch, training.sync, training.snapshotter)

    def _parts(self, batch: Any, ends_window: bool, is_shadow: bool) -> Iterator[Part]:
        plan, overlaps = self._accumulation.plan, not self._session.finishes_after_backward
        own, parts, part = 1 if plan is None else len(plan.pieces), iter([batch] if plan is None else plan), None
        rounds = self._session.rounds(own)
        for position in range(rounds):
            part, is_again = next(parts, part), position >= own  # other ranks have more micro-batches
            is_end, rows = ends_window and position == rounds - 1, None if plan is None or is_again else plan.rows
            yield MicroBatch(part, rows, position, rounds, is_end and overlaps, is_shadow or is_again), is_end

    def transferred(self, batch: Any) -> Any:
        """A loader batch that was drawn ahead."""
        return batch

    def run_ahead(self, batch: Any, ahead: int) -> Tensor | None:
        """The loss of a micro-batch that is ``ahead`` loader batches after the current one."""
        if self._training.loss_of is None:
            raise UsageError("The state that was loaded counts the terms of a loss ahead. Pass loss_of=, as before it was saved.")
        return self._training.loss_of(batch)

    def _size(self, of_tokens: float = math.inf) -> float:
        """Loader batches in a window that begins now; ``of_tokens`` if it ends by its tokens."""
        return self.policy.size_at(self._accumulation.epoch, self._accumulation.clock.optimizer_steps) or of_tokens

    def _announce(self, micro_batch: MicroBatch, weighed: Weighed) -> None:
        self._say(start_line(self._accumulation, micro_batch, weighed, self._samples, int(self._size(1)), self._length))

    def _say(self, line: str) -> None:
        if self.policy.log and self._training.ranks.rank == 0:
            print(self._messages(line), flush=True)


def _length_of(loader: Iterable[Any]) -> float:
    """Number of batches of a loader, or inf if unknown. The length of a stream is not relied on."""
    with suppress(TypeError, RuntimeError):  # raised by some loaders without a length
        if not isinstance(getattr(loader, "dataset", None), IterableDataset):
            return len(loader)  # type: ignore[arg-type]
    return math.inf


_AROUND = "torch.autograd.graph.save_on_cpu() around forward and backward"
_NAMES = {  # the first match is used
    'GradientAccumulation(1, micro_batch="offload")': _AROUND,
    'GradientAccumulation(micro_batch="offload")': _AROUND,
    'micro_batch="offload"': _AROUND,
    "delete checkpoint['callbacks']['GradientAccumulation'] from the file": "leave out accumulator.load_state_dict(...)",
    "GradientAccumulation": "Accumulator",
    ONCE_A_WINDOW: "if accumulator.step() returns True",
    "in on_before_optimizer_step, which sees": "in optimizer.register_step_pre_hook(...), which sees",
    "self.all_gather(..., sync_grads=True)": "torch.distributed.nn.functional.all_gather(...)",
    "`window/skipped_micro_batches`": "`accumulator.skipped_micro_batches`",
}


class LoopMessages(AbstractContextManager[Any]):
    """Adapts messages written for fits to hand-written loops. As a context, adapts errors raised inside."""

    def __init__(self, name_of_loss: str) -> None:
        self._names = {**_NAMES, "training_step": name_of_loss}
        self._pattern = re.compile("|".join(map(re.escape, self._names)))

    def __call__(self, message: str) -> str:
        """A message, with the names of a loop."""
        return self._pattern.sub(lambda found: self._names[found[0]], message)

    def warn(self, message: str) -> None:
        """Warn, on any rank."""
        warn(self(message))

    def rank_zero_warn(self, message: str) -> None:
        """Warn, on rank zero."""
        rank_zero_warn(self(message))

    @override
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.adapt(error)

    def adapt(self, error: BaseException | None) -> None:
        """Adapt the message of an error of this package."""
        if isinstance(error, AccumulationError):  # errors of the user's code are not changed
            error.args = tuple(self(word) if isinstance(word, str) else word for word in error.args)
