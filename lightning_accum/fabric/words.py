"""The names that a message has for a hand-written loop, where the parts that fits and loops share have written it for fits."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from lightning_accum.user_warnings import rank_zero_warn, warn

_AROUND = "torch.autograd.graph.save_on_cpu() around forward and backward"
_NAMES = {  # the first that fits is taken
    'GradientAccumulation(1, micro_batch="offload")': _AROUND,
    'GradientAccumulation(micro_batch="offload")': _AROUND,
    'micro_batch="offload"': _AROUND,
    "delete checkpoint['callbacks']['GradientAccumulation'] from the file": "leave out accumulator.load_state_dict(...)",
    "GradientAccumulation": "Accumulator",
    "in the module's optimizer_step, after super().optimizer_step(...)": "where accumulator.step() returns True",
    "self.all_gather(..., sync_grads=True)": "torch.distributed.nn.functional.all_gather(...)",
    "`window/skipped_micro_batches`": "`accumulator.skipped_micro_batches`",
}


class Words:
    """Puts the names of a hand-written loop into messages.

    Args:
        loss: what computes the loss in a loop, where a fit has its ``training_step``.

    Example:
        >>> Words("loss_of")("training_step returns a sum: pass GradientAccumulation(weight=SampleCount())")
        'loss_of returns a sum: pass Accumulator(weight=SampleCount())'
    """

    def __init__(self, loss: str) -> None:
        self._names = {**_NAMES, "training_step": loss}
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

    def correct(self, error: BaseException) -> None:
        """Put them into an error that one of the shared parts has raised. Errors of the user's code stay as they are."""
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        name = "" if trace is None else f"{trace.tb_frame.f_globals.get('__name__')}."
        if name.startswith("lightning_accum.") and not name.startswith("lightning_accum.fabric."):
            error.args = tuple(self(word) if isinstance(word, str) else word for word in error.args)

    @contextmanager
    def in_errors(self) -> Iterator[None]:
        """Have them in the errors that are raised in here."""
        try:
            yield
        except Exception as error:
            self.correct(error)
            raise
