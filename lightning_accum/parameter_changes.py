"""Whether parameters change between the micro-batches of a window, where those of its full batch all see the same ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from lightning_accum.errors import UsageError

_WINDOWS = 4
"""At the beginning of a fit: what follows the parameters by an average begins to move after the first step."""
_SAMPLED = 256
"""Elements of a parameter that are compared."""


IN_OPTIMIZER_STEP = (
    "in the module's optimizer_step, after super().optimizer_step(...); or in the same hook of batches, where a window is one"
    " loader batch that is split (micro_batch=)"
)
"""Where a module whose optimizer the Trainer steps does what is to run once a window."""


class _Sample(NamedTuple):
    name: str
    tensor: Tensor
    elements: Tensor


class KeptGradients:
    """The gradients of a window as a backward has left them, to see whether others clear or change one before the next."""

    def __init__(self) -> None:
        self.parameters: Sequence[tuple[str, Tensor]] = ()
        """By name."""
        self._kept: list[tuple[Tensor | None, int, Tensor | None]] = []

    def keep(self, has_values: bool = False) -> None:
        """Keep the gradients as they are now; with values, one that is moved, as DDP moves them, is no other."""
        self._kept = [(own.grad, _version(own.grad), elements_of(own.grad) if has_values else None) for _, own in self.parameters]

    def changed(self) -> list[str]:
        """The parameters whose gradients are others now, by name."""
        return [name for (name, own), kept in zip(self.parameters, self._kept, strict=False) if _is_other(own.grad, *kept)]

    def forget(self) -> None:
        """They may change."""
        self._kept = []


def _version(gradient: Tensor | None) -> int:
    return -1 if gradient is None else gradient._version


def _is_other(now: Tensor | None, gradient: Tensor | None, version: int, values: Tensor | None) -> bool:
    is_same = now is gradient and _version(now) == version
    if values is None or (is_same and not values.is_cpu):  # no copy from a device; on the host ``.data`` counts no change
        return not is_same
    elements = elements_of(now)
    return elements.shape != values.shape or not torch.equal(elements, values)


class ParameterChanges:
    """Compares some elements of each parameter in the first windows of a fit, and in the first of each epoch.

    A moving average that a hook updates at every batch, a normalisation of embeddings in ``training_step``: each micro-batch after
    the first sees other parameters than the full batch would. What changes before the first micro-batch has run forward, or after
    the last backward, changes once a window, as it should. Without ``warn`` nothing is compared.
    """

    def __init__(self, warn: Callable[[str], None] | None, once_a_window: str = IN_OPTIMIZER_STEP) -> None:
        self._warn = warn
        self._once_a_window = once_a_window
        self._windows_left = _WINDOWS
        self._before: list[_Sample] = []
        self.is_due = warn is not None
        """The window that begins next is compared."""
        self.is_under_way = False
        """That which is under way is."""
        self.gradients = KeptGradients()
        """What a micro-batch of that has added to is left as it is until the next backward."""

    def begin_epoch(self) -> None:
        """Its first window is compared."""
        self.is_due = self._warn is not None

    def begin(self, module: nn.Module) -> None:
        """The first micro-batch of a window that is compared has run forward."""
        self._windows_left = max(0, self._windows_left - 1)
        self.is_due, self.is_under_way = self._windows_left > 0, True
        self._before = [_Sample(name, tensor, _elements(tensor)) for name, tensor in _compared(module)]
        self.gradients.parameters = [(sample.name, sample.tensor) for sample in self._before]

    def refuse_other_gradients(self) -> None:
        """The backward of a micro-batch is next.

        In the full batch, gradients are cleared after ``training_step``. In a later micro-batch, what a step or a callback adds to
        them would stay, and what it clears is lost.
        """
        if changed := self.gradients.changed():
            raise UsageError(
                f"Between two micro-batches of a window the gradient of '{changed[0]}' was cleared or changed, by training_step or"
                " by a callback: the window would not take the step of its full batch, and no step was made. Leave zero_grad to"
                " Lightning, clip once a window, in on_before_optimizer_step, and where a step needs gradients of its own, as"
                " adversarial examples do, take torch.autograd.grad(...) instead of backward(), or have the batch run whole:"
                ' micro_batch="offload", and a window of 1. check=False leaves this out.'
            )

    def end(self, micro_batches: int) -> None:
        """A window of so many micro-batches, which was compared, has run its last backward."""
        self.is_under_way = False
        self.gradients.forget()
        before, self._before = self._before, []
        if not before or self._warn is None or micro_batches < 2:
            return
        pairs = [(sample, now) for sample in before if (now := _elements(sample.tensor)).shape == sample.elements.shape]
        device = before[0].elements.device
        norms = [
            torch.stack(((now - then).norm(), torch.maximum(now.norm(), then.norm()), _usual(now, then))).to(device)
            for now, then in ((now, sample.elements) for sample, now in pairs)
        ]
        changed: dict[str, float] = {}
        for (sample, _), (difference, size, usual) in zip(pairs, torch.stack(norms).tolist() if norms else (), strict=True):
            eps = torch.finfo(sample.tensor.dtype).eps  # to normalise once more changes a few, or all by one rounding
            if difference > 16 * eps * size or usual > 2 * eps:
                changed[sample.name] = difference / size
        if changed:
            self._warn(_message(changed, self._once_a_window))
            self.stop()

    def stop(self) -> None:
        """Compare nothing more: there was a warning."""
        self._warn, self._before, self.is_due, self.is_under_way = None, [], False, False


def _usual(now: Tensor, then: Tensor) -> Tensor:
    """By how much of its size an element changes in the middle."""
    return ((now - then).abs() / then.abs().clamp(min=torch.finfo(then.dtype).tiny)).median()


def elements_of(tensor: Tensor | None) -> Tensor:
    """Some of a gradient or a parameter, copied; none where there is none."""
    return torch.empty(0) if tensor is None or tensor.layout != torch.strided else _elements(tensor).nan_to_num()


def _message(changed: dict[str, float], once_a_window: str) -> str:
    first, *others = changed
    more = f" and {len(others)} more change" if others else " changes"
    size = f"by {'up to ' * bool(others)}{max(changed.values()):.1g} of {'their' if others else 'its'} size in this one"
    return (
        f"The parameter{'s' * bool(others)} '{first}'{more} between the micro-batches of a window ({size}): all but the first see"
        " others than the full batch would. What changes them (a moving average, a copy, a normalisation) is to run once a window:"
        f" {once_a_window}."
    )


def _compared(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters. Buffers are made to change; whether a loss depends on that is looked at in the check of the first batch."""
    for name, tensor in module.named_parameters():
        if not is_lazy(tensor) and tensor.is_floating_point() and tensor.layout == torch.strided and tensor.device.type != "meta":
            yield name, tensor


@torch.no_grad()
def _elements(tensor: Tensor) -> Tensor:
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    flat = tensor.reshape(-1)
    dtype = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    return flat[:: max(1, flat.numel() // _SAMPLED) | 1].to(dtype, copy=True)
