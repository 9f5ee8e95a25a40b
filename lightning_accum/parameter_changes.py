"""Whether parameters change between the micro-batches of a window. In the full batch all rows see the same parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from lightning_accum.errors import UsageError
from lightning_accum.exact import as_real, is_dense, is_on_host

_WINDOWS = 4  # windows compared at the beginning of a fit: a moving average of the parameters begins to move after the first step
_SAMPLED = 256  # elements compared in each parameter

ONCE_A_WINDOW = "in a callback's on_window_end, or in the module's optimizer_step after super().optimizer_step(...)"
"""Where to run code once a window, in automatic optimization."""


class KeptGradients:
    """The gradients after a backward of a window, to detect other code that clears or changes them before the next backward."""

    def __init__(self, parameters: Sequence[tuple[str, Tensor]] = ()) -> None:
        self.parameters = parameters
        self._kept: list[tuple[Tensor | None, int | None, Tensor | None]] = []

    def keep(self, has_values: bool = False) -> None:
        """Save the present gradients; if it ``has_values``, also their values, since DDP moves gradients in memory."""
        found = [own.grad for _, own in self.parameters]
        self._kept = [(own, getattr(own, "_version", None), elements_of(own) if has_values else None) for own in found]

    def changed(self) -> list[str]:
        """The names of parameters whose gradients have changed."""
        return [name for (name, own), kept in zip(self.parameters, self._kept, strict=False) if _is_other(own.grad, *kept)]

    def forget(self) -> None:
        """Compare nothing: gradients may change now."""
        self._kept = []


def _is_other(now: Tensor | None, gradient: Tensor | None, version: int | None, values: Tensor | None) -> bool:
    is_same = now is gradient and getattr(now, "_version", None) == version
    if values is None or (is_same and not is_on_host(values)):  # no copy from a device; on the host ``.data`` changes no version
        return not is_same
    elements = elements_of(now)
    return elements.shape != values.shape or not torch.equal(elements, values)


class ParameterChanges:
    """Compares some elements of each parameter in the first windows of a fit, and in the first of each epoch.

    If a hook updates a moving average at every batch, or ``training_step`` normalises embeddings, each micro-batch after the first
    sees other parameters than the full batch would. Changes before the first forward or after the last backward of a window happen
    once a window, as they should. Without ``warn`` nothing is compared.
    """

    def __init__(self, warn: Callable[[str], None] | None, once_a_window: str = ONCE_A_WINDOW) -> None:
        self._warn = warn
        self._once_a_window = once_a_window
        self._windows_left = _WINDOWS
        self._before: list[tuple[str, Tensor, Tensor]] = []  # name, parameter, elements
        self.is_due = warn is not None  # the next window is compared
        self.is_under_way = False  # the present window is compared
        self.gradients = KeptGradients()  # the gradients between two backwards of the present window

    def begin_epoch(self) -> None:
        """Compare the first window of the epoch."""
        self.is_due = self._warn is not None

    def begin(self, named_parameters: Mapping[str, Tensor]) -> None:
        """Save the parameters, after the first forward of a window that is compared. The check covers buffers."""
        self._windows_left = max(0, self._windows_left - 1)
        self.is_due, self.is_under_way = self._windows_left > 0, True
        named = [(name, p) for name, p in named_parameters.items() if not is_lazy(p) and p.dtype.to_real().is_floating_point]
        self.gradients = KeptGradients([(name, own) for name, own in named if own.layout == torch.strided and not own.is_meta])
        self._before = [(name, tensor, _elements(tensor)) for name, tensor in self.gradients.parameters]

    def refuse_other_gradients(self) -> None:
        """Refuse gradients that somebody changed, before the backward of a micro-batch.

        In the full batch, gradients are cleared after ``training_step``. In a later micro-batch, gradients that a step or a
        callback adds would stay, and gradients that it clears would be lost.
        """
        if changed := self.gradients.changed():
            raise UsageError(
                f"Between two micro-batches of a window the gradient of '{changed[0]}' was cleared or changed, by training_step or "
                "by a callback: the window would not take the step of its full batch, and no step was made. Leave zero_grad to "
                "Lightning, and clip once a window, in on_before_optimizer_step. If a step needs its own gradients, as for "
                "adversarial examples, use torch.autograd.grad(...) instead of backward(), or run the batch whole: "
                'micro_batch="offload", and a window of 1. check=False turns this check off.'
            )

    def end(self, micro_batches: int) -> None:
        """Compare the parameters, after the last backward of a window with this many micro-batches."""
        self.is_under_way = False
        self.gradients.forget()
        before, self._before = self._before, []
        if not before or self._warn is None or micro_batches < 2:
            return
        pairs = [(name, tensor, now, then) for name, tensor, then in before if (now := _elements(tensor)).shape == then.shape]
        norms = [
            torch.stack(((now - then).norm(), torch.maximum(now.norm(), then.norm()), _usual(now, then))).to(before[0][2].device)
            for _, _, now, then in pairs
        ]
        changed: dict[str, float] = {}
        for (name, tensor, *_), (difference, size, usual) in zip(pairs, torch.stack(norms).tolist() if norms else (), strict=True):
            eps = torch.finfo(tensor.dtype).eps  # repeated normalising changes a few elements, or all by rounding
            if difference > 16 * eps * size or usual > 2 * eps:
                changed[name] = difference / size
        if changed:
            self._warn(_message(changed, self._once_a_window))
            self.stop()

    def stop(self) -> None:
        """Compare no more windows, after a warning."""
        self._warn, self._before, self.is_due, self.is_under_way = None, [], False, False


def _usual(now: Tensor, then: Tensor) -> Tensor:
    """The median relative change of an element."""
    return ((now - then).abs() / then.abs().clamp(min=torch.finfo(then.dtype).tiny)).median()


def elements_of(tensor: Tensor | None) -> Tensor:
    """A copy of some elements of a gradient or parameter; empty for None."""
    return torch.empty(0) if tensor is None or not is_dense(tensor) else _elements(tensor).nan_to_num()


def _message(changed: dict[str, float], once_a_window: str) -> str:
    first, *others = changed
    more = f" and {len(others)} more change" if others else " changes"
    size = f"relative change in this one: {'up to ' * bool(others)}{max(changed.values()):.1g}"
    return (
        f"The parameter{'s' * bool(others)} '{first}'{more} between the micro-batches of a window ({size}): all but the first see "
        "different values than the full batch would. Change parameters (a moving average, a copy, a normalisation) once a window: "
        f"{once_a_window}."
    )


@torch.no_grad()
def _elements(tensor: Tensor) -> Tensor:
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    flat = as_real(tensor).reshape(-1)
    dtype = torch.float64 if flat.dtype == torch.float64 else torch.float32
    return flat[:: max(1, flat.numel() // _SAMPLED) | 1].to(dtype, copy=True)
